//! Ranks that take no answers and go on asking. The resources that others keep for them are
//! bounded, and an error names them.

use super::runtime::Job3;
use super::{GEOMETRY, INLINE};
use crate::support::sink::Sink;
use crate::support::{Watchdog, happens, sent, step, until};
use carrack::buffer::Region;
use carrack::transports::contract::DownCause;
use carrack::transports::shm::Geometry;
use carrack::{PeerState, Rank};
use std::time::Duration;

const RTS_AM: u64 = 3;
const RTS_SEND: u64 = 4;
const FRAGMENT: u64 = 5;
const NOTE: u64 = 7;
const RTS_PUT: u64 = 17;
const GET: u64 = 18;
const PIECES: u64 = 19;
const ATOMIC: u64 = 20;

/// Lists of pieces that a rank may have on their way, with room for ends that were not heard of.
const MOST: u64 = 128;

const ATTACKER: Rank = Rank(1);

/// Offers that a rank with default settings keeps at most, with some more for its threads.
const OFFERS: u64 = (128 << 10) + 4096;

fn words<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Sends what `message` makes of numbers, of which `enough` are too many; the attacker is found
/// out, and the honest rank goes on.
#[track_caller]
fn too_many(enough: u64, complaint: &str, message: impl Fn(u64) -> ([u64; 2], Vec<u8>)) -> Job3 {
    let mut job = Job3::new(Geometry { slots: 1024, ..GEOMETRY });
    push_up_to(&mut job, enough, complaint, message);
    job
}

#[track_caller]
fn push_up_to(
    job: &mut Job3,
    enough: u64,
    complaint: &str,
    message: impl Fn(u64) -> ([u64; 2], Vec<u8>),
) {
    let push = |job: &mut Job3, numbers: std::ops::Range<u64>| {
        for number in numbers {
            let (header, bytes) = message(number);
            job.push(INLINE, header, &bytes);
        }
    };
    let state = |job: &Job3| job.ranks[0].peer_state(ATTACKER);
    // Half of it is no reason for anything.
    push(job, 0..enough / 2);
    assert!(!happens(&job.ranks, Duration::from_millis(20), || state(job) != PeerState::Up));
    push(job, enough / 2..enough);
    until(&job.ranks, || state(job) != PeerState::Up);
    let found = state(job);
    let PeerState::Down(DownCause::Protocol(why)) = &found else { panic!("{found:?}") };
    assert!(why.contains(complaint), "{why}");
    // What still comes finds no place any more.
    let kept = kept(job);
    push(job, enough..enough + 5000);
    assert!(!happens(&job.ranks, Duration::from_millis(20), || false));
    assert_eq!(self::kept(job), kept);
    let sink = Sink::keeping();
    let name = job.ranks[0].register_comp(&sink).unwrap();
    sent(&job.ranks, || job.ranks[1].post_am(Rank(0), b"honest", name).try_submit());
    assert_eq!(sink.one(&job.ranks).rank, Rank(2));
}

/// Operations and messages that the victim keeps.
fn kept(job: &Job3) -> (usize, usize) {
    (job.ranks[0].pending().operations.len(), job.ranks[0].default_matching_engine().waiting().0)
}

#[test]
fn offers_that_nobody_has_asked_for_are_bounded() {
    let _watchdog = Watchdog::over("offers");
    let job = too_many(OFFERS + 1, "this rank did not ask for", |number| {
        ([RTS_SEND | 3 << 8, number], words([1 << 20, number, 0, 0, 0]))
    });
    assert_eq!(kept(&job), (0, OFFERS as usize));
    // A receive from the attacker is told.
    let sink = Sink::keeping();
    let recv = job.ranks[0]
        .post_recv(ATTACKER, vec![0; 8], carrack::Tag(u64::MAX - 5))
        .comp(&sink)
        .try_submit();
    assert!(recv.unwrap().is_posted());
    assert!(sink.one(&job.ranks).error.is_some());
}

#[test]
fn requests_whose_answers_are_not_taken_are_bounded() {
    let _watchdog = Watchdog::over("requests");
    // The bound is checked only now and then. An atomic operation keeps only its answer, for which
    // there is more room.
    let often = 1024;
    for (kind, enough) in
        [(GET, OFFERS + often), (RTS_PUT, OFFERS + often), (ATOMIC, 2 * OFFERS + 1024 + often)]
    {
        let mut job = Job3::new(Geometry { slots: 1024, ..GEOMETRY });
        let mr = job.ranks[0].register_memory(&Region::host(64)).unwrap();
        let rmr = mr.remote_key().to_bytes();
        let region = u64::from_le_bytes(rmr[4..12].try_into().unwrap());
        push_up_to(&mut job, enough, "takes no answer", |number| {
            ([kind, 0], words([number, region, 0, 8, 0]))
        });
        assert_eq!(kept(&job), (0, 0), "{kind}");
    }
    let mut job = Job3::new(Geometry { slots: 1024, ..GEOMETRY });
    let name = job.ranks[0].register_comp(&Sink::keeping()).unwrap();
    push_up_to(&mut job, OFFERS + 16, "this rank did not ask for", |number| {
        ([RTS_AM | u64::from(name.0) << 32, 0], words([1, number, 0, 0, 0]))
    });
    assert_eq!(kept(&job), (0, 0));
}

#[test]
fn lists_of_pieces_are_bounded_and_those_that_make_no_sense_cost_nothing() {
    let _watchdog = Watchdog::over("pieces");
    let mut job = Job3::new(Geometry { slots: 1024, ..GEOMETRY });
    let mr = job.ranks[0].register_memory(&Region::host(64)).unwrap();
    let rmr = mr.remote_key().to_bytes();
    let region = u64::from_le_bytes(rmr[4..12].try_into().unwrap());
    // No list, one longer than any, more bytes than any has, fewer than the list, and bytes next
    // to the requested ones.
    for (landing, count, size) in [
        (0, 0, 0),
        (0, 0, 16),
        (0, 1025, 1025 * 16),
        (0, u64::MAX, 16),
        (0, 1 << 60, 1 << 63),
        (0, 1, 16 + (64 << 10) + 1),
        (0, 1, u64::MAX),
        (0, 2, 31),
        (7, 2, 33),
    ] {
        for token in 0..1000 {
            job.push(INLINE, [PIECES, landing], &words([token, region, count, size, 0]));
        }
        assert!(!happens(&job.ranks, Duration::from_millis(2), || job.ranks[0]
            .peer_state(ATTACKER)
            != PeerState::Up));
        // Only the answers, which the attacker does not take.
        let is_coming =
            job.ranks[0].pending().operations.iter().any(|op| op.what.contains("on its way here"));
        assert!(!is_coming, "{count} pieces, {size} B");
    }
    // Lists that never come: an honest rank's largest number in flight, and no more.
    push_up_to(&mut job, MOST + 1, "lists of pieces", |number| {
        (
            [PIECES, number % 2 * (number + 5)],
            words([number, region, 1, 16 + (1 - number % 2) * 8, 0]),
        )
    });
    // And such as come, but whose answers are not taken.
    let mut job = Job3::new(Geometry { slots: 1024, ..GEOMETRY });
    let mr = job.ranks[0].register_memory(&Region::host(1 << 16)).unwrap();
    let rmr = mr.remote_key().to_bytes();
    let region = u64::from_le_bytes(rmr[4..12].try_into().unwrap());
    let list = |number: u64| {
        let landing = 2 * number + 2;
        [
            ([PIECES, number + 5], words([number, region, 1, 16, 0])),
            // The victim gives a name to the list, and one to its bytes.
            ([FRAGMENT, landing], words([0, 1 << 16])),
        ]
    };
    for number in 0..MOST / 2 {
        list(number).into_iter().for_each(|(header, bytes)| job.push(INLINE, header, &bytes));
    }
    let answers = |job: &Job3| {
        job.ranks[0]
            .pending()
            .operations
            .iter()
            .filter(|op| op.what == "message on its way out")
            .count()
    };
    until(&job.ranks, || answers(&job) as u64 == MOST / 2);
    push_up_to(&mut job, 2 * MOST, "lists of pieces", |number| {
        list(MOST / 2 + number / 2).into_iter().nth(number as usize % 2).unwrap()
    });
    assert_eq!(answers(&job), 0);
}

/// A note that a member of a group of two has come to its barrier.
fn note(group: u64, number: u64) -> ([u64; 2], Vec<u8>) {
    ([NOTE | group << 32, number], words([77, 2 << 32, 0, 0]))
}

#[test]
fn notes_of_operations_far_ahead_are_bounded() {
    let _watchdog = Watchdog::over("notes");
    let far = 1 << 18;
    // On one board, and spread over many.
    too_many(far + 1, "notes ahead", |number| note(0, 1000 + number));
    too_many(far + 1, "notes ahead", |number| note(1 + number % 1000, number));
}

#[test]
fn groups_that_one_rank_tells_of_are_bounded_and_take_nobody_elses_place() {
    let _watchdog = Watchdog::over("groups");
    let job = too_many((1 << 14) + 1, "groups", |number| note(1 + number, 7));
    // Groups of ranks that are honest still come about, also under names that it has used.
    for name in [5, 70_000] {
        let groups =
            [0, 1].map(|at: usize| job.ranks[at].group(name, &[Rank(0), Rank(2)]).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| groups[1].barrier().unwrap());
            groups[0].barrier().unwrap();
        });
    }
    step(&job.ranks);
}
