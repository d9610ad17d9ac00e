//! The budget of messages that wait for their receives, or for room in their completion objects.

use crate::protocol::flow::{Budget, Room};
use carrack_transports::contract::Payload;
use carrack_transports::mem::Buffer;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that a message takes in the matching table, without its payload.
pub(crate) const ENTRY: usize = 128;

/// The messages that a rank keeps without a receive.
pub(crate) struct UnexpectedBudget {
    bytes: AtomicUsize,
    /// Bytes of those that wait for room in a completion object.
    undelivered: AtomicUsize,
    budget: Budget,
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

impl UnexpectedBudget {
    pub(crate) fn new(budget: usize, packet_size: usize) -> Self {
        let (bytes, budget) = (AtomicUsize::new(0), Budget(budget));
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
        self.budget.is_short(self.bytes.fetch_add(kept.bytes, Ordering::Relaxed) + kept.bytes)
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
    /// object. Returns `true` if its sender has to hold.
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

    /// Returns the bytes among them that wait for room in a completion object.
    pub(crate) fn undelivered_bytes(&self) -> usize {
        self.undelivered.load(Ordering::Relaxed)
    }

    /// Returns the room for a rank that was told `before`.
    pub(crate) fn room(&self, before: Room) -> Room {
        self.budget.room((self.bytes(), self.undelivered_bytes()), before)
    }
}
