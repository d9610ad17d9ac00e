//! The slot in which the answer to a message will lie.
//!
//! A peer that waits for an answer reads its slot again and again, so the peer's core holds the
//! cache line. To write it, this core has to take the line away first, which takes as long as the
//! message itself. A receiver that is likely to answer a short message asks for the line as soon as
//! the message is matched. The line comes while the program handles the message. A longer message
//! takes so long that the peer would have the line back.
//!
//! This cuts the time of `carrack perf latency --op send --size 8` to 0.78 on two of 16 cores of an
//! Intel Xeon, and to 0.98 on an AMD EPYC (2026-11-29, medians of alternated runs).
//!
//! A thread is likely to answer if it has sent one message to the peer since the peer's last one.
//! Another thread's notes do not count, since they may lie in another core's cache.

#![forbid(unsafe_code)]

use crate::contract::PeerId;
use crate::mem::prefetch::prefetch_to_write;
use std::cell::Cell;
use std::ptr::null;
use std::sync::atomic::AtomicU64;

/// Peers that a thread remembers, by the low bits of their numbers. Of two with the same bits it
/// remembers the one that it sent to last.
const PEERS: usize = 8;
/// No peer's number.
const NO_PEER: u32 = u32::MAX;

/// A peer that this thread has sent to since the peer's last message, and the control word of the
/// slot behind the first message. The memory may be gone: a prefetch does nothing then. Several
/// devices share a note; the wrong one costs a prefetch in vain.
#[derive(Clone, Copy)]
struct Next {
    peer: u32,
    slot: *const AtomicU64,
}

thread_local! {
    static NEXT: [Cell<Next>; PEERS] =
        const { [const { Cell::new(Next { peer: NO_PEER, slot: null() }) }; PEERS] };
}

/// Notes that this thread has sent a message to a peer, and the slot of the next one. Of several
/// messages in a row it notes the first only: a note of each costs a stream of active messages
/// 3 % of its rate (`carrack perf rate --op am --size 8`, 2 cores of an AMD EPYC, 2026-11-29).
#[inline(always)]
pub(super) fn sent(peer: PeerId, slot: impl FnOnce() -> *const AtomicU64) {
    NEXT.with(|all| {
        let place = &all[peer.0 as usize % PEERS];
        if place.get().peer != peer.0 {
            place.set(Next { peer: peer.0, slot: slot() });
        }
    });
}

/// Asks for the slot of the answer to a message that has come from a peer, if one is likely.
#[inline(always)]
pub(super) fn received(peer: PeerId) {
    if let Some(slot) = take(peer) {
        prefetch_to_write(slot.cast(), 64);
    }
}

/// Forgets that anything was sent to a peer, whose message needs no prefetch.
#[inline(always)]
pub(super) fn forget(peer: PeerId) {
    let _ = take(peer);
}

#[inline(always)]
fn take(peer: PeerId) -> Option<*const AtomicU64> {
    NEXT.with(|all| {
        let place = &all[peer.0 as usize % PEERS];
        let next = place.get();
        (next.peer == peer.0).then(|| {
            place.set(Next { peer: NO_PEER, ..next });
            next.slot
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_asked_for_once_and_only_of_a_peer_that_was_sent_to() {
        let slots = [const { AtomicU64::new(0) }; 3];
        let [first, second, third] = slots.each_ref().map(std::ptr::from_ref);
        let (one, other) = (PeerId(1), PeerId(1 + PEERS as u32));
        assert_eq!(take(one), None, "nothing was sent");
        sent(one, || first);
        sent(one, || second);
        assert_eq!(take(one), Some(first), "the first of a row is noted");
        assert_eq!(take(one), None, "its messages are not answered");
        sent(one, || second);
        sent(other, || third);
        assert_eq!(take(one), None, "another peer has its place");
        assert_eq!(take(other), Some(third));
        sent(one, || first);
        assert!(std::thread::spawn(move || take(one).is_none()).join().unwrap(), "its own notes");
    }
}
