//! A bound on messages that wait for their receives.
//!
//! Small messages are sent whole, whether or not somebody waits for them. What nobody waits for yet has to be kept by the
//! receiver, which has a budget for it (`CARRACK_UNEXPECTED`). A sender whose message goes beyond half of the budget is told
//! to *hold*: from then on its messages to be matched travel as offers, and their bytes stay with it, until the receiver
//! keeps no more than a quarter. Offers take the place of their messages, so nothing changes but where the bytes
//! wait; and a message is neither refused nor held up because others wait, so a program that is right cannot
//! deadlock on it.
//!
//! The other half is for what senders send before they hear of it: each of them has a share of that half ([`Deaf`]), after which
//! it has to make progress before it sends more. So a rank keeps its budget, and no more beyond it than what the links to it
//! hold: a ring of shared memory, or the requests of a queue pair. A share is [`LEAST`] at least, so a budget that is too
//! small for all ranks of the job is exceeded by that, too.

use crate::chores::{Chore, Chores, Waiting};
use crate::device::DeviceInner;
use crate::names::Rank;
use crate::progress::Pass;
use crate::protocol::header::Message;
use carrack_transports::contract::Payload;
use carrack_transports::mem::SmallBytes;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Bytes that a message takes in the matching table, beside its payload.
const ENTRY: usize = 128;
/// Bytes that a device may send to be matched without having listened, at least and at most.
const LEAST: usize = 16 << 10;
const MOST: usize = 1 << 20;

/// What a rank keeps of messages that have no receive yet.
pub(crate) struct Unexpected {
    bytes: AtomicUsize,
    budget: usize,
    /// Packets among them: what comes in needs some, too.
    packets: AtomicUsize,
    packet_size: usize,
}

impl Unexpected {
    pub(crate) fn new(budget: usize, packet_size: usize) -> Self {
        Self { bytes: AtomicUsize::new(0), budget, packets: AtomicUsize::new(0), packet_size }
    }

    /// One more. Returns `true` if its sender is to hold.
    #[inline]
    pub(crate) fn add(&self, payload: &Payload) -> bool {
        let cost = self.cost(payload);
        if matches!(payload, Payload::Packet(_)) {
            self.packets.fetch_add(1, Ordering::Relaxed);
        }
        self.bytes.fetch_add(cost, Ordering::Relaxed) + cost > self.budget / 2
    }

    /// One less.
    #[inline]
    pub(crate) fn sub(&self, payload: &Payload) {
        self.bytes.fetch_sub(self.cost(payload), Ordering::Relaxed);
        if matches!(payload, Payload::Packet(_)) {
            self.packets.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn cost(&self, payload: &Payload) -> usize {
        ENTRY
            + match payload {
                Payload::Small(_) => 0,
                Payload::Packet(_) => self.packet_size,
                other => other.len(),
            }
    }

    /// Whether one more may stay in a packet of a pool that has so many.
    pub(crate) fn may_keep_packet(&self, limit: usize) -> bool {
        self.packets.load(Ordering::Relaxed) < limit / 2
    }

    /// Bytes kept now.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    fn is_low(&self) -> bool {
        self.bytes() <= self.budget / 4
    }
}

/// Ranks that a device has told to hold, or is about to.
pub(crate) struct Holds {
    ranks: Waiting<Vec<(Rank, bool)>>,
    /// Counts what ranks are told, under the lock of the list: two threads may send it in any order.
    turns: AtomicU64,
}

impl Holds {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self { ranks: Waiting::for_progress(chores, Chore::Holds), turns: AtomicU64::new(1) }
    }

    /// Notes a rank, which progress will tell.
    #[cold]
    pub(crate) fn add(&self, rank: Rank) {
        let mut ranks = self.ranks.lock();
        if !ranks.iter().any(|&(other, _)| other == rank) {
            ranks.push((rank, false));
            self.ranks.set_count(ranks.len());
        }
    }
}

/// How much a device has sent to be matched since it last listened.
pub(crate) struct Deaf {
    bytes: AtomicU32,
    /// Its share of half of the budget, which the ranks of a job have in common.
    limit: u32,
}

impl Deaf {
    pub(crate) fn new(budget: usize, ranks: u32) -> Self {
        let share = budget / 2 / ranks.saturating_sub(1).max(1) as usize;
        let limit = share.clamp(LEAST, MOST) as u32;
        Self { bytes: AtomicU32::new(0), limit }
    }

    #[inline(always)]
    pub(crate) fn sent(&self, size: usize) {
        // Not exact when several threads send: nothing depends on it.
        let size = size as u32 + ENTRY as u32;
        self.bytes.store(self.bytes.load(Ordering::Relaxed).saturating_add(size), Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn has_to_listen(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.limit
    }

    #[inline(always)]
    pub(crate) fn listens(&self) {
        if self.bytes.load(Ordering::Relaxed) != 0 {
            self.bytes.store(0, Ordering::Relaxed);
        }
    }
}

impl Pass<'_> {
    /// Tells ranks to hold; or, when there is room again, to go on.
    #[cold]
    pub(crate) fn move_holds(&self) {
        let Holds { ranks: holds, turns } = &self.device.holds;
        let Some(mut ranks) = holds.try_lock() else { return };
        let turn = turns.fetch_add(1, Ordering::Relaxed);
        let on = !self.inner.unexpected.is_low();
        let told: Vec<Rank> = if on {
            ranks
                .iter_mut()
                .filter_map(|(rank, told)| (!std::mem::replace(told, true)).then_some(*rank))
                .collect()
        } else {
            let told = ranks.drain(..).filter_map(|(rank, told)| told.then_some(rank)).collect();
            holds.set_count(0);
            told
        };
        drop(ranks);
        for rank in told {
            self.device.control(self.inner, rank, Message::Hold { on, turn }, SmallBytes::empty());
        }
    }

    /// A peer has told this rank to hold, or to go on.
    pub(crate) fn hold(&self, from: Rank, on: bool, turn: u64) {
        if let Some(route) = self.device.route(from) {
            route.hold(on, turn);
        }
    }
}

impl DeviceInner {
    /// Whether a peer wants messages that are to be matched to be offered.
    #[inline]
    pub(crate) fn offers_all(&self, rank: Rank) -> bool {
        self.known_route(rank).is_some_and(|route| route.is_held())
    }
}
