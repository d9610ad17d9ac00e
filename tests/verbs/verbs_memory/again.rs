//! A NIC that has not received the answer to a read repeats it, and gets the bytes that are there
//! by then. So the end of a read may be reported only after its bytes have arrived.

use super::{ONE_IN, nics, ranks, soon_again};
use crate::support::sink::Sink;
use crate::support::{Watchdog, pattern, posted, settle, until};
use carrack::buffer::Region;
use carrack::{Rank, Tag};
use carrack_simulators::nic::Config;

const ROUNDS: u64 = 300;
const LEN: usize = 9000;

/// The owner writes to its memory as soon as it hears of a get, and the get has brought what was
/// there before.
#[test]
fn an_owner_that_is_told_of_a_get_may_write_there_although_answers_are_lost() {
    let _watchdog = Watchdog::over("written after a get");
    let nics = nics([Config::default(), Config::default()]);
    let ranks = ranks(&nics, &soon_again());
    let region = Region::host(LEN);
    let registered = ranks[1].register_memory(&region).unwrap();
    let (rmr, told) = (registered.remote_key(), Sink::keeping());
    let name = ranks[1].register_comp(&told).unwrap();
    // By the owner's progress, which also answers where the region is: from then on the NIC knows.
    let first = Sink::keeping();
    let _ = posted(&ranks, || {
        ranks[0].post_get(Rank(1), vec![0; 8], &rmr, 0).comp(&first).try_submit()
    });
    assert!(first.one(&ranks).error.is_none());
    settle(&ranks);
    nics.iter().for_each(|nic| nic.faults().lose_packets(ONE_IN));
    let write = |seed| region.slice(0, LEN).unwrap().write(&pattern(seed, LEN)).unwrap();
    write(0);
    for round in 0..ROUNDS {
        let (done, len) = (Sink::keeping(), [8, 4000, LEN][round as usize % 3]);
        let get = ranks[0].post_get(Rank(1), vec![0xee; len], &rmr, 0).comp(&done);
        let mut get = get.remote_comp(name).tag(Tag(round));
        get.submit().unwrap();
        until(&ranks, || told.count() > 0);
        write(round + 1);
        let status = done.one(&ranks);
        assert!(status.error.is_none(), "{status:?}");
        let bytes = status.buffer.to_vec().unwrap();
        assert!(
            bytes == pattern(round, LEN)[..len],
            "round {round}: the owner was told, and asked again"
        );
        let notifications: Vec<_> =
            told.take().iter().map(|status| (status.rank, status.tag, status.size)).collect();
        assert_eq!(notifications, [(Rank(0), Tag(round), len)]);
    }
}

/// The registration ends while gets are in flight. A rank without its answer must still be able to
/// repeat the read.
#[test]
fn memory_that_was_read_stays_known_to_the_nic_until_the_bytes_have_arrived() {
    let _watchdog = Watchdog::over("deregistered behind gets");
    let nics = nics([Config::default(), Config::default()]);
    let ranks = ranks(&nics, &soon_again());
    let region = Region::host(LEN);
    region.whole().write(&pattern(1, LEN)).unwrap();
    nics.iter().for_each(|nic| nic.faults().lose_packets(ONE_IN));
    for round in 0..2 * ROUNDS {
        let registered = ranks[1].register_memory(&region).unwrap();
        let (rmr, done) = (registered.remote_key(), Sink::keeping());
        let get = || {
            let mut get = ranks[0].post_get(Rank(1), vec![0xee; 100], &rmr, 0).comp(&done);
            get.submit().unwrap();
        };
        get();
        until(&ranks, || done.count() == 1 && ranks[0].pending().operations.is_empty());
        (0..4).for_each(|_| get());
        ranks[1].deregister_memory(registered);
        until(&ranks, || done.count() == 5);
        for status in done.take() {
            assert!(status.error.is_none(), "round {round}: {status:?}");
            assert!(status.buffer.to_vec().unwrap() == pattern(1, LEN)[..100], "round {round}");
        }
    }
    assert!(ranks.iter().all(|rank| rank.pending().down.is_empty()), "a connection has ended");
}
