//! A bound on messages that wait for their receives.
//!
//! Small messages are sent whole, before their receiver is known to have room for them. A message
//! to be matched waits at the receiver for its receive; an active message waits for room in its
//! completion object. The receiver has one budget for both (`CARRACK_UNEXPECTED`). A sender whose
//! message exceeds half of it is told to *hold*. Its messages then travel as offers, and their
//! bytes stay with it, until the receiver keeps at most a quarter. Offers take the place of their
//! messages, so only the place where the bytes wait changes. A message is neither refused nor
//! delayed because others wait, so a correct program cannot deadlock on it.
//!
//! A notification of a put or a get is no longer than its offer would be. Where deliveries alone
//! exceed half of the budget, puts and gets that notify are refused, to be retried.
//!
//! The other half is for messages that are sent before their sender hears of the hold. Each sender
//! has a share of that half ([`Deaf`]), after which it has to make progress before it sends more.
//! So a rank keeps its budget, plus the messages that the links to it hold: a ring of shared
//! memory, or the requests of a queue pair. A share is [`LEAST`] at least, so a budget that is too
//! small for all ranks of the job is exceeded by that, too.

use crate::chores::{Chore, Chores, Waiting};
use crate::device::DeviceInner;
use crate::names::Rank;
use crate::progress::Pass;
use crate::protocol::header::Room;
use crate::protocol::wire::Control;
use carrack_transports::contract::Payload;
use carrack_transports::mem::Buffer;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Bytes that a message takes in the matching table, without its payload.
const ENTRY: usize = 128;
/// Bytes that a device may send without having listened, at least and at most.
const LEAST: usize = 16 << 10;
const MOST: usize = 1 << 20;

/// The messages that a rank keeps without a receive.
pub(crate) struct Unexpected {
    bytes: AtomicUsize,
    /// Bytes of those that wait for room in a completion object.
    undelivered: AtomicUsize,
    budget: usize,
    /// Packets among them: incoming messages need packets, too.
    packets: AtomicUsize,
    packet_size: usize,
}

/// The cost of a message that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    bytes: usize,
    in_packet: bool,
}

impl Kept {
    /// The cost of a status whose buffer is the user's.
    pub(crate) const STATUS: Self = Self { bytes: ENTRY, in_packet: false };

    /// Returns the cost of a message in a packet of `size` bytes.
    pub(crate) fn packet(size: usize) -> Self {
        Self { bytes: ENTRY + size, in_packet: true }
    }

    /// Returns `true` if it is a message in a packet.
    pub(crate) fn is_packet(self) -> bool {
        self.in_packet
    }

    /// Returns the cost of a message in a buffer that belongs to no packet pool.
    pub(crate) fn buffer(buffer: &Buffer) -> Self {
        let bytes = if matches!(buffer, Buffer::Small(_)) { 0 } else { buffer.len() };
        Self { bytes: ENTRY + bytes, in_packet: false }
    }
}

impl Unexpected {
    pub(crate) fn new(budget: usize, packet_size: usize) -> Self {
        let bytes = AtomicUsize::new(0);
        let (undelivered, packets) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { bytes, undelivered, budget, packets, packet_size }
    }

    /// Adds a message. Returns `true` if its sender has to hold.
    #[inline]
    pub(crate) fn add(&self, payload: &Payload) -> bool {
        self.charge(self.kept(payload))
    }

    /// Removes a message.
    #[inline]
    pub(crate) fn sub(&self, payload: &Payload) {
        self.release(self.kept(payload));
    }

    /// Adds the cost of a message that waits. Returns `true` if its sender has to hold.
    #[inline]
    pub(crate) fn charge(&self, kept: Kept) -> bool {
        if kept.in_packet {
            self.packets.fetch_add(1, Ordering::Relaxed);
        }
        self.bytes.fetch_add(kept.bytes, Ordering::Relaxed) + kept.bytes > self.budget / 2
    }

    /// Subtracts a cost.
    #[inline]
    pub(crate) fn release(&self, kept: Kept) {
        self.bytes.fetch_sub(kept.bytes, Ordering::Relaxed);
        if kept.in_packet {
            self.packets.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Adds as [`charge`](Self::charge), for a message that waits for room in its completion
    /// object.
    pub(crate) fn charge_delivery(&self, kept: Kept) -> bool {
        self.undelivered.fetch_add(kept.bytes, Ordering::Relaxed);
        self.charge(kept)
    }

    /// Subtracts the cost of a delivery.
    pub(crate) fn release_delivery(&self, kept: Kept) {
        self.undelivered.fetch_sub(kept.bytes, Ordering::Relaxed);
        self.release(kept);
    }

    /// Returns the cost of a payload while it waits.
    pub(crate) fn kept(&self, payload: &Payload) -> Kept {
        match payload {
            Payload::Small(_) => Kept { bytes: ENTRY, in_packet: false },
            Payload::Packet(_) => Kept::packet(self.packet_size),
            other => Kept { bytes: ENTRY + other.len(), in_packet: false },
        }
    }

    /// Returns `true` if one more may stay in a packet of a pool of `limit` packets.
    pub(crate) fn may_keep_packet(&self, limit: usize) -> bool {
        self.packets.load(Ordering::Relaxed) < limit / 2
    }

    /// Returns the bytes that are kept now.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the room for a rank that was told `before`. A closed window opens when three
    /// quarters of the budget are free.
    fn room(&self, before: Room) -> Room {
        let undelivered = self.undelivered.load(Ordering::Relaxed);
        let most = if before == Room::OffersOnly { self.budget / 4 } else { self.budget / 2 };
        match self.bytes() {
            kept if kept <= self.budget / 4 => Room::Any,
            _ if undelivered > most => Room::OffersOnly,
            _ => Room::Offers,
        }
    }
}

/// Ranks that a device has told to hold, or is about to.
pub(crate) struct Holds {
    ranks: Waiting<Vec<(Rank, Room)>>,
    /// Counts the messages about room, under the lock of the list: two threads may send them in
    /// any order.
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
            ranks.push((rank, Room::Any));
            self.ranks.set_count(ranks.len());
        }
    }
}

/// The bytes that a device has sent to be matched since it last listened.
pub(crate) struct Deaf {
    bytes: AtomicU32,
    /// Set if a peer has said that it takes no notifications; it may take some again.
    was_refused: AtomicBool,
    /// Its share of half of the budget, which the ranks of a job have in common.
    limit: u32,
}

impl Deaf {
    pub(crate) fn new(budget: usize, ranks: u32) -> Self {
        let share = budget / 2 / ranks.saturating_sub(1).max(1) as usize;
        let limit = share.clamp(LEAST, MOST) as u32;
        Self { bytes: AtomicU32::new(0), was_refused: AtomicBool::new(false), limit }
    }

    #[inline(always)]
    pub(crate) fn sent(&self, size: usize) {
        // Not exact when several threads send, which is harmless. Each thread checks the limit
        // before it sends, so it is exceeded by one message of each thread at most.
        let bytes = self.bytes.load(Ordering::Relaxed).wrapping_add((size + ENTRY) as u32);
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn has_to_listen(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.limit
    }

    /// Returns `true` if a peer takes no notifications, or has taken none for a while.
    #[inline(always)]
    pub(crate) fn was_refused(&self) -> bool {
        self.was_refused.load(Ordering::Relaxed)
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
        let mut news = Vec::new();
        ranks.retain_mut(|(rank, told)| {
            let room = self.inner.unexpected.room(*told);
            if room != *told {
                news.push((*rank, room));
                *told = room;
            }
            room != Room::Any
        });
        holds.set_count(ranks.len());
        drop(ranks);
        for (rank, room) in news {
            self.device.control(self.inner, rank, Control::Hold { room, turn });
        }
    }

    /// Handles a peer's message about its room.
    pub(crate) fn hold(&self, from: Rank, room: Room, turn: u64) {
        if let Some(route) = self.device.route(from) {
            route.hold(room, turn);
            if room == Room::OffersOnly {
                self.device.deaf.was_refused.store(true, Ordering::Relaxed);
            }
        }
    }
}

impl DeviceInner {
    /// Returns `true` if a peer wants messages to be offered.
    #[inline]
    pub(crate) fn offers_all(&self, rank: Rank) -> bool {
        self.known_route(rank).is_some_and(|route| route.is_held())
    }
}
