//! Instructions of a short message between two ranks over shared memory.

use crate::profile::counted;
use crate::report::Count;
use crate::support::{Job, OverShm, Watchdog};
use carrack::{Buffer, CompQueue, Counter, Rank, RemoteComp, Runtime, Synchronizer, Tag};
use std::hint::black_box;

const ROLE: &str = "TEST_HOST_INSTRUCTIONS";

/// Messages that are counted, and those before, which warm up.
const MESSAGES: u64 = 1000;
const WARM_UP: u64 = 300;

/// Counted functions. No two have the same code, which the compiler would merge.
const MEASURED: [&str; 7] = [
    "measured_am",
    "measured_delivery",
    "measured_receive",
    "measured_send",
    "measured_match",
    "measured_fruitless",
    "measured_match_of_4_kib",
];

#[inline(never)]
fn measured_am(rank: &Runtime, name: RemoteComp, number: u64) {
    rank.post_am(Rank(1), &number.to_le_bytes(), name).submit().unwrap();
}

#[inline(never)]
fn measured_delivery(rank: &Runtime, delivered: &Counter) -> u64 {
    drop(rank.progress());
    delivered.get()
}

#[inline(never)]
fn measured_receive(rank: &Runtime, buffer: Vec<u8>, arrived: &Synchronizer) {
    rank.post_recv(Rank(0), buffer, Tag(1)).comp(arrived).submit().unwrap();
}

#[inline(never)]
fn measured_send(rank: &Runtime, number: u64) {
    rank.post_send(Rank(1), &number.to_le_bytes(), Tag(1)).submit().unwrap();
}

#[inline(never)]
fn measured_match(rank: &Runtime, arrived: &Synchronizer) -> bool {
    drop(rank.progress());
    arrived.test()
}

#[inline(never)]
fn measured_match_of_4_kib(rank: &Runtime, arrived: &CompQueue) -> bool {
    drop(rank.progress());
    !arrived.is_empty()
}

#[inline(never)]
fn measured_fruitless(rank: &Runtime) {
    drop(rank.progress());
}

/// Makes progress that finds nothing: the next message is then none of a stream.
fn rest(ranks: &[Runtime]) {
    ranks.iter().for_each(|rank| drop(rank.progress()));
}

/// Messages that each find their receiver at rest. The buffer of a receive comes back in its
/// status.
#[test]
fn a_rank_in_its_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let ranks = black_box(OverShm::ranks(2));
    let (delivered, arrived) = (Counter::new(), Synchronizer::new(1));
    let name = ranks[1].register_comp(&delivered).unwrap();
    let (mut buffer, mut large, queue) = (vec![0; 8], vec![0; 4096], CompQueue::new(1));
    for number in 1..=WARM_UP + MESSAGES {
        let is_counted = number > WARM_UP;
        if is_counted {
            rest(&ranks);
            measured_am(&ranks[0], name, number);
            let delivered = measured_delivery(&ranks[1], &delivered);
            assert_eq!(delivered, number, "one call of progress delivers");
            rest(&ranks);
            measured_receive(&ranks[1], buffer, &arrived);
            measured_send(&ranks[0], number);
            let is_there = measured_match(&ranks[1], &arrived);
            assert!(is_there, "one call of progress matches");
            rest(&ranks);
            measured_fruitless(&ranks[1]);
        } else {
            ranks[0].post_am(Rank(1), &number.to_le_bytes(), name).submit().unwrap();
            ranks[1].post_recv(Rank(0), buffer, Tag(1)).comp(&arrived).submit().unwrap();
            ranks[0].post_send(Rank(1), &number.to_le_bytes(), Tag(1)).submit().unwrap();
            while delivered.get() < number || !arrived.test() {
                ranks.iter().for_each(|rank| drop(rank.progress()));
            }
        }
        ranks[1].post_recv(Rank(0), large, Tag(2)).comp(&queue).submit().unwrap();
        ranks[0].post_send(Rank(1), &[number as u8; 4096], Tag(2)).submit().unwrap();
        while is_counted && !measured_match_of_4_kib(&ranks[1], &queue)
            || !is_counted && queue.is_empty()
        {
            drop(ranks[1].progress());
        }
        let status = queue.pop().unwrap();
        assert_eq!(status.bytes(), Some(&[number as u8; 4096][..]));
        let Buffer::Vec(back) = status.buffer else { panic!("another buffer") };
        large = back;
        let status = arrived.take().unwrap().pop().unwrap();
        assert_eq!(status.bytes(), Some(&number.to_le_bytes()[..]));
        let Buffer::Vec(back) = status.buffer else { panic!("another buffer") };
        buffer = back;
    }
}

pub(crate) fn counts() -> Vec<Count> {
    let _watchdog = Watchdog::over("instructions of host memory");
    let count = |name: &str| {
        let path = format!("{}::{name}", module_path!());
        let all = counted(&path, "host_instructions::a_rank_in_its_role", ROLE, |_| false);
        (name.replacen("measured", "shm", 1), all / MESSAGES)
    };
    MEASURED.into_iter().map(count).collect()
}
