//! Operations that end in the middle of a message: each ends once, gives its buffer back, and
//! leaves nothing registered.

use super::fixture::{CHUNK, ChunkFixture, Kind};
use crate::support::sink::Sink;
use crate::support::{Watchdog, pattern, until_with_errors};
use carrack::{OpError, Rank, Runtime, Tag};
use carrack_simulators::nic::HeldWork;
use std::time::Duration;

const SIZE: usize = 6 * CHUNK + 77;

/// Begins a message, and stops it when the sender's NIC has two chunks and has not begun with them.
fn in_the_midst(fixture: &ChunkFixture) -> (Sink, Sink, HeldWork) {
    let ends =
        fixture.begin((0, Kind::Vec.filled(&pattern(1, SIZE))), (1, vec![0; SIZE].into()), None);
    let held = fixture.stop_in_the_midst();
    (ends.0, ends.1, held)
}

/// Waits until something has ended, which it does once.
#[track_caller]
fn ends_once(ranks: &[Runtime], end: &Sink) -> carrack::Status {
    until_with_errors(ranks, || end.count() > 0);
    settle_whatever(ranks);
    let mut all = end.take();
    assert_eq!(all.len(), 1, "{all:?}");
    all.pop().unwrap()
}

fn settle_whatever(ranks: &[Runtime]) {
    let mut steps = 0;
    until_with_errors(ranks, || {
        steps += 1;
        steps > 300
    });
}

#[test]
fn a_receiver_that_goes_ends_the_send_with_its_buffer() {
    let _watchdog = Watchdog::over("a receiver that goes");
    let mut fixture = ChunkFixture::new();
    let (left, came, held) = in_the_midst(&fixture);
    drop(held);
    drop(fixture.ranks.pop());
    let status = came.take().pop().expect("its runtime has ended it");
    assert!(matches!(status.error.as_deref(), Some(OpError::Closed)), "{status:?}");
    assert_eq!(status.buffer.len(), SIZE);
    let status = ends_once(&fixture.ranks, &left);
    assert!(
        matches!(status.error.as_deref(), Some(OpError::PeerDown { rank: Rank(1), .. })),
        "{status:?}"
    );
    assert_eq!(status.buffer.as_slice(), Some(&pattern(1, SIZE)[..]), "its buffer comes back");
}

#[test]
fn a_sender_that_goes_ends_the_receive_with_its_buffer() {
    let _watchdog = Watchdog::over("a sender that goes");
    let mut fixture = ChunkFixture::new();
    let (left, came, held) = in_the_midst(&fixture);
    drop(held);
    drop(fixture.ranks.remove(0));
    let status = left.take().pop().expect("its runtime has ended it");
    assert!(matches!(status.error.as_deref(), Some(OpError::Closed)), "{status:?}");
    assert_eq!(status.buffer.as_slice(), Some(&pattern(1, SIZE)[..]), "its buffer comes back");
    let status = ends_once(&fixture.ranks, &came);
    assert!(
        matches!(status.error.as_deref(), Some(OpError::PeerDown { rank: Rank(0), .. })),
        "{status:?}"
    );
    assert_eq!(status.buffer.len(), SIZE);
}

#[test]
fn a_nic_that_is_taken_out_ends_both_sides_with_their_buffers() {
    for lost in [0, 1] {
        let _watchdog = Watchdog::over("a NIC that goes");
        let fixture = ChunkFixture::new();
        let (left, came, held) = in_the_midst(&fixture);
        assert!(fixture.nics[lost].remove(0));
        drop(held);
        let statuses = [&left, &came].map(|end| ends_once(&fixture.ranks, end));
        for status in &statuses {
            assert!(
                matches!(status.error.as_deref(), Some(OpError::PeerDown { .. })),
                "{status:?}"
            );
            assert_eq!(status.buffer.len(), SIZE);
        }
        assert_eq!(statuses[0].buffer.as_slice(), Some(&pattern(1, SIZE)[..]));
    }
}

#[test]
fn a_receive_past_its_deadline_ends_and_its_sender_comes_to_an_end_all_the_same() {
    let _watchdog = Watchdog::over("a receive's deadline");
    // On a machine that is busy the deadline may pass before the message has met its receive.
    let met = [50, 500, 5000, 50_000].into_iter().any(|millis| {
        let fixture = ChunkFixture::new();
        let (left, came) = (Sink::keeping(), Sink::keeping());
        let recv = fixture.ranks[1].post_recv(Rank(0), vec![0; SIZE], Tag(5)).comp(&came);
        assert!(recv.deadline(Duration::from_millis(millis)).try_submit().unwrap().is_posted());
        let mut send = fixture.ranks[0].post_send(Rank(1), pattern(1, SIZE), Tag(5)).comp(&left);
        send.submit().unwrap();
        while !fixture.is_shown() {
            if came.count() > 0 {
                return false;
            }
            fixture.ranks[1].progress().unwrap();
        }
        let held = fixture.stop_in_the_midst();
        let status = ends_once(&fixture.ranks, &came);
        assert!(matches!(status.error.as_deref(), Some(OpError::TimedOut(Rank(0)))), "{status:?}");
        assert_eq!(left.count(), 0);
        drop(held);
        let status = ends_once(&fixture.ranks, &left);
        assert!(
            status.error.is_none() && status.bytes() == Some(&pattern(1, SIZE)[..]),
            "{status:?}"
        );
        assert_eq!(fixture.registered(), [0, 0]);
        true
    });
    assert!(met);
}

#[test]
fn a_send_past_its_deadline_ends_and_its_bytes_arrive_all_the_same() {
    let _watchdog = Watchdog::over("a send's deadline");
    let fixture = ChunkFixture::new();
    let (left, came) = (Sink::keeping(), Sink::keeping());
    let mut recv = fixture.ranks[1].post_recv(Rank(0), vec![0; SIZE], Tag(5)).comp(&came);
    assert!(recv.try_submit().unwrap().is_posted());
    let send = fixture.ranks[0].post_send(Rank(1), pattern(1, SIZE), Tag(5)).comp(&left);
    send.deadline(Duration::from_millis(50)).submit().unwrap();
    let held = fixture.stop_in_the_midst();
    let status = ends_once(&fixture.ranks, &left);
    assert!(matches!(status.error.as_deref(), Some(OpError::TimedOut(Rank(1)))), "{status:?}");
    assert_eq!(came.count(), 0);
    drop(held);
    let status = ends_once(&fixture.ranks, &came);
    assert_eq!(
        (status.error.is_none(), status.bytes()),
        (true, Some(&pattern(1, SIZE)[..])),
        "{status:?}"
    );
    assert_eq!(left.count(), 0, "it has ended once");
    assert_eq!(fixture.registered(), [0, 0]);
}
