//! Large messages that NICs write chunk by chunk, over simulated NICs. Every byte arrives, and no
//! more than a few chunks are registered at a time. Each operation ends once, though NICs refuse
//! requests or ranks end meanwhile.

mod endings;
mod fixture;
mod rails;
mod refused;

use crate::support::guard::Guarded;
use crate::support::sink::Sink;
use crate::support::{Watchdog, pattern, posted};
use carrack::region::Region;
use carrack::{Buffer, Rank, Tag};
use fixture::{CHUNK, ChunkFixture, Kind};

/// One chunk and less, which goes whole; a byte more; even and odd numbers of chunks; and many.
const SIZES: [usize; 7] =
    [40_000, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 1, 5 * CHUNK + 17, 3 << 20];

#[test]
fn messages_of_any_length_arrive_to_the_last_byte_from_and_into_memory_of_any_owner() {
    let _watchdog = Watchdog::over("messages in chunks");
    let fixture = ChunkFixture::new();
    for (seed, size) in (0_u64..).zip(SIZES) {
        for from in Kind::ALL {
            let bytes = pattern(seed, size);
            let target = Guarded::new(size + 5, seed);
            fixture.send((0, from.filled(&bytes)), (1, target.slice().into()));
            target.assert_holds(&bytes);
            let status = fixture.send((1, from.filled(&bytes)), (0, vec![0; size].into()));
            assert_eq!(status.bytes(), Some(&bytes[..]), "{size} B from {from:?}");
        }
    }
    assert_eq!(fixture.registered(), [0, 0], "what has ended is registered no more");
}

#[test]
fn active_messages_arrive_so_too() {
    let _watchdog = Watchdog::over("active messages in chunks");
    let fixture = ChunkFixture::new();
    let arrived = Sink::keeping();
    let name = fixture.ranks[1].register_comp(&arrived).unwrap();
    for (seed, size) in (0_u64..).zip(SIZES) {
        let bytes = pattern(seed, size);
        let left = Sink::keeping();
        let mut am =
            fixture.ranks[0].post_am(Rank(1), bytes.clone(), name).tag(Tag(seed)).comp(&left);
        assert!(posted(&fixture.ranks, || am.try_submit()).is_posted());
        let status = arrived.one(&fixture.ranks);
        assert_eq!((status.bytes(), status.tag), (Some(&bytes[..]), Tag(seed)));
        let status = left.one(&fixture.ranks);
        assert_eq!(
            (status.error.is_none(), status.bytes()),
            (true, Some(&bytes[..])),
            "its buffer comes back"
        );
    }
}

#[test]
fn both_sides_register_a_chunk_at_a_time_and_never_more_than_two() {
    let _watchdog = Watchdog::over("registrations in chunks");
    let fixture = ChunkFixture::new();
    let (size, chunks) = (6 * CHUNK + 1, 7);
    let before = fixture.counters();
    let bytes = pattern(3, size);
    let (left, came) =
        fixture.begin((0, Kind::Vec.filled(&bytes)), (1, vec![0; size].into()), None);
    // A NIC that is done at once with each chunk may never have two.
    drop(fixture.stop_in_the_midst());
    assert_eq!(came.one(&fixture.ranks).bytes(), Some(&bytes[..]));
    assert!(left.one(&fixture.ranks).error.is_none());
    let after = fixture.counters();
    for rank in [0, 1] {
        assert_eq!(after[rank].registrations - before[rank].registrations, chunks, "rank {rank}");
    }
    let most = [
        after[0].to_be_read.most - before[0].to_be_read.now,
        after[1].to_be_written.most - before[1].to_be_written.now,
    ];
    assert_eq!(most, [2 * CHUNK as u64; 2], "two chunks are registered at a time, and never more");
    assert_eq!(fixture.registered(), [0, 0]);
    assert!(fixture.chunks_written(1, &before) >= 6, "the NIC has written them");
}

#[test]
fn two_chunks_are_in_flight_at_once_and_the_third_waits_for_the_first() {
    let _watchdog = Watchdog::over("chunks in flight");
    let fixture = ChunkFixture::new();
    let (size, bytes) = (5 * CHUNK, pattern(4, 5 * CHUNK));
    let before = fixture.counters();
    let (left, came) =
        fixture.begin((0, Kind::Vec.filled(&bytes)), (1, vec![0; size].into()), None);
    let held = fixture.stop_in_the_midst();
    assert_eq!((left.count(), came.count()), (0, 0));
    assert_eq!(fixture.chunks_written(1, &before), 0, "the NIC has not begun");
    drop(held);
    assert_eq!(came.one(&fixture.ranks).bytes(), Some(&bytes[..]));
    assert_eq!(left.one(&fixture.ranks).bytes(), Some(&bytes[..]));
    assert_eq!(fixture.registered(), [0, 0]);
}

#[test]
fn what_a_nic_knows_already_is_not_registered_again() {
    let _watchdog = Watchdog::over("registered regions");
    let fixture = ChunkFixture::new();
    let (size, bytes) = (4 * CHUNK, pattern(5, 4 * CHUNK));
    let region = Region::host(size);
    region.whole().write(&bytes).unwrap();
    for round in 0..3 {
        let before = fixture.counters();
        let status = fixture.send((0, Buffer::from(region.whole())), (1, vec![0; size].into()));
        assert_eq!(status.bytes(), Some(&bytes[..]));
        let new = fixture.counters()[0].registrations - before[0].registrations;
        assert_eq!(new, u64::from(round == 0), "round {round}");
    }
}

#[test]
fn many_messages_both_ways_share_a_link() {
    let _watchdog = Watchdog::over("many messages in chunks");
    let fixture = ChunkFixture::new();
    fixture.carries_both_ways(24, 9973);
    assert_eq!(fixture.registered(), [0, 0]);
}
