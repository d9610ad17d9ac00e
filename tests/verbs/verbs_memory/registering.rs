//! Pages on demand, writes in any order, thread domains: where the NIC has them, and where not.

use super::{nics, ranks};
use crate::support::sink::{Sink, Sort};
use crate::support::{Watchdog, connect, pattern, posted, settle, step, until};
use carrack::buffer::Region;
use carrack::{AtomicAgent, Rank, RemoteKey, Runtime, Tag};
use carrack_simulators::nic::{Config, Limits};
use carrack_transports::verbs::VerbsOptions;

/// Limit of locked memory: well above the queues and packets of a rank, and below the user memory
/// that these tests register.
const LOCKED: u64 = 12 << 20;
const LONG: usize = 16 << 20;

fn config(limits: Limits) -> Config {
    Config { limits, ..Config::default() }
}

/// Has rank 0's NIC told where the region is.
fn introduce(ranks: &[Runtime], rmr: &RemoteKey) {
    let sink = Sink::keeping();
    for _ in 0..2 {
        let _ =
            posted(ranks, || ranks[0].post_put(Rank(1), vec![1], rmr, 0).comp(&sink).try_submit());
        assert!(sink.one(ranks).error.is_none());
    }
    settle(ranks);
}

/// Puts and gets. Both end though rank 1 does nothing, or not, as is expected.
fn move_bytes(ranks: &[Runtime], region: &Region, rmr: &RemoteKey, by_nic: bool) {
    let (sink, bytes) = (Sink::keeping(), pattern(7, LONG));
    let put = ranks[0].post_put(Rank(1), bytes.clone(), rmr, 0).comp(&sink).try_submit().unwrap();
    let get = ranks[0]
        .post_get(Rank(1), vec![0; LONG], rmr, LONG as u64)
        .comp(&sink)
        .try_submit()
        .unwrap();
    assert!(put.is_posted() && get.is_posted());
    if by_nic {
        until(&ranks[..1], || sink.count() == 2);
    } else {
        settle(&ranks[..1]);
        assert!(sink.count() < 2, "so much has been locked");
        until(ranks, || sink.count() == 2);
    }
    assert!(sink.take().iter().all(|status| status.error.is_none()));
    assert!(region.slice(0, LONG).unwrap().to_vec().unwrap() == bytes);
}

#[test]
fn memory_that_is_paged_on_demand_is_not_locked() {
    let _watchdog = Watchdog::over("on demand");
    let locked = |on_demand| config(Limits { locked: LOCKED, on_demand, ..Limits::default() });
    for (on_demand, has, by_nic) in [(true, true, true), (false, true, false), (true, false, false)]
    {
        let options = VerbsOptions { on_demand, ..VerbsOptions::default() };
        let ranks = ranks(&nics([locked(has), locked(has)]), &options);
        let region = Region::host(2 * LONG);
        let mr = ranks[1].register_memory(&region).unwrap();
        let rmr = mr.remote_key();
        introduce(&ranks, &rmr);
        // If too much memory would have to be locked, the owner carries the operations out.
        move_bytes(&ranks, &region, &rmr, by_nic);
        // A large message: written into the receive's buffer, or part by part.
        let (sink, bytes) = (Sink::keeping(), pattern(8, LONG));
        let _ =
            ranks[0].post_recv(Rank(1), vec![0; LONG], Tag(1)).comp(&sink).try_submit().unwrap();
        let _ = posted(&ranks, || ranks[1].post_send(Rank(0), bytes.clone(), Tag(1)).try_submit());
        assert!(sink.one(&ranks).buffer.to_vec().unwrap() == bytes);
        drop(mr);
        let words = ranks[1].registration(&region).atomics(AtomicAgent::Nic).register();
        let refused = words.as_ref().err().map(ToString::to_string);
        assert_eq!(refused.is_none(), by_nic, "{refused:?}");
        assert!(
            refused.is_none_or(|why| why.contains("sim0") && why.contains("lock")),
            "what to do is not told"
        );
    }
}

#[test]
fn writes_in_any_order_are_seen_before_anybody_is_told_of_them() {
    let _watchdog = Watchdog::over("relaxed ordering");
    let options = VerbsOptions { relaxed: true, ..VerbsOptions::default() };
    let ranks = ranks(&nics([config(Limits::default()), config(Limits::default())]), &options);
    let region = Region::host(2 * LONG);
    let mr = ranks[1].register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    introduce(&ranks, &rmr);
    // Without a notification the owner hears nothing. Its memory must still hold the bytes when
    // the put is complete.
    move_bytes(&ranks, &region, &rmr, true);
    for (number, len) in (0..).zip([1, 8, 40, 300, 5000, 70_000, 1 << 20]) {
        let (sink, bytes) = (Sink::keeping(), pattern(number, len));
        ranks[0].post_put(Rank(1), bytes.clone(), &rmr, 3).comp(&sink).submit().unwrap();
        until(&ranks[..1], || sink.count() == 1);
        assert!(region.slice(3, len).unwrap().to_vec().unwrap() == bytes, "{len}: not seen");
        let told = Sink::new(Sort::Queue);
        let name = ranks[1].register_comp(&told).unwrap();
        let bytes = pattern(number + 100, len);
        let put = ranks[0].post_put(Rank(1), bytes.clone(), &rmr, 3).comp(&sink);
        put.remote_comp(name).submit().unwrap();
        until(&ranks, || told.count() == 1);
        assert!(
            region.slice(3, len).unwrap().to_vec().unwrap() == bytes,
            "{len}: the notification was early"
        );
        let arrived = Sink::keeping();
        let _ = ranks[1]
            .post_recv(Rank(0), vec![0; len], Tag(number))
            .comp(&arrived)
            .try_submit()
            .unwrap();
        let _ =
            posted(&ranks, || ranks[0].post_send(Rank(1), bytes.clone(), Tag(number)).try_submit());
        let status = arrived.one(&ranks);
        assert!(status.buffer.to_vec().unwrap() == bytes, "{len}: the message was early");
    }
}

#[test]
fn queue_pairs_have_thread_domains_as_far_as_there_are_some_and_are_never_posted_to_by_two_threads()
{
    let _watchdog = Watchdog::over("thread domains");
    let has = |thread_domains| config(Limits { thread_domains, ..Limits::default() });
    for (most, there, expected) in [(64, 100, 3), (64, 2, 2), (1, 100, 1), (0, 100, 0), (64, 0, 0)]
    {
        let nics = nics([has(there), has(100), has(100)]);
        let options = VerbsOptions { thread_domains: most, ..VerbsOptions::default() };
        let ranks = ranks(&nics, &options);
        // With each of three ranks, itself included.
        assert_eq!(nics[0].thread_domains(0), expected, "{most} of {there}");
        let arrived = Sink::keeping();
        let names: Vec<_> =
            ranks.iter().map(|rank| rank.register_comp(&arrived).unwrap()).collect();
        let name = names[0];
        const EACH: u64 = 200;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let ranks = &ranks;
                scope.spawn(move || {
                    for number in 0..EACH {
                        let to = Rank(u32::try_from((thread + number) % 3).unwrap());
                        while ranks[0]
                            .post_am(to, &number.to_le_bytes(), name)
                            .try_submit()
                            .unwrap()
                            .is_retry()
                        {
                            step(ranks);
                        }
                    }
                });
            }
        });
        until(&ranks, || arrived.count() as u64 == 4 * EACH);
        drop(ranks);
        assert_eq!(nics[0].thread_domains(0), 0, "they end with their connections");
    }
    // An old library has none.
    let ranks = ranks(
        &nics([Config { extended: false, ..Config::default() }, has(100)]),
        &VerbsOptions::default(),
    );
    connect(&ranks);
}
