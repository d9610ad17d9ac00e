//! The shared receive queue, and the packets that are posted to it.
//!
//! Each slot has a *line*, a cache line in a table of the device's. The NIC puts the front of a
//! message there: the header, and the bytes of a short message. Only a longer message continues in
//! the slot's packet. So a short message is one write of the NIC's and one line for the CPU to
//! read, and its packet is not touched. The front of a longer one is copied to the beginning of
//! the packet.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::bounces::HEADER;
use super::memory::{Area, Slabs};
use super::sys::bindings::{ibv_recv_wr, ibv_sge};
use super::sys::{PostFailure, ProtectionDomain, SharedReceiveQueue, VerbsError};
use super::wr_id::WrId;
use crate::contract::{Header, Payload};
use crate::mem::{MemMut, MemRef, Packet, PacketSource, SmallBytes, copy::copy_now};
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Receives that are posted under one doorbell.
const TOGETHER: usize = 16;

/// Content of a slot's line.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SlotLine {
    header: [u64; 2],
    front: [u8; SmallBytes::MAX],
}

/// Bytes from one line to the next: each is a cache line of its own.
const PITCH: usize = 64;

const _: () =
    assert!(size_of::<SlotLine>() <= PITCH && std::mem::offset_of!(SlotLine, front) == HEADER);

/// A place for one message.
#[derive(Debug)]
struct ReceiveSlot {
    packet: Option<Packet>,
    key: u32,
}

/// The receives of a device.
#[derive(Debug)]
pub(super) struct Receives {
    // In drop order: the queue, whose receives name registrations, then these, then the memory.
    queue: Option<Arc<SharedReceiveQueue>>,
    slabs: Slabs,
    lines: Area,
    /// Bytes of a payload that lie in the line. 0 if the CPU cannot access a packet, and so cannot
    /// move them there.
    front: usize,
    slots: Vec<ReceiveSlot>,
    /// Slots with a packet, not posted yet.
    fresh: Vec<u32>,
    /// Slots without a packet, each with the connection to credit when it has one.
    empty: Vec<(u32, Option<u32>)>,
    source: Arc<dyn PacketSource>,
    /// Number of fresh slots that are worth a doorbell.
    enough: usize,
    /// Error of the last registration of a packet, or post of a receive.
    refused: Option<String>,
    /// Set if no receive can be posted any more.
    is_broken: bool,
}

/// A message that has arrived.
#[derive(Debug)]
pub(super) enum Taken {
    /// A message that lies in the line.
    Small(Header, SmallBytes),
    /// Any other message.
    Large(Header, Payload),
}

impl Receives {
    /// Creates a queue of `depth` receives, none of which is posted.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        depth: u32,
        source: Arc<dyn PacketSource>,
    ) -> Result<Self, VerbsError> {
        let queue = SharedReceiveQueue::create(domain, depth, 2)?;
        let lines = Area::new(domain, depth as usize * PITCH)?;
        let front =
            if source.kind().is_host() { SmallBytes::MAX.min(source.packet_size()) } else { 0 };
        let slots = (0..depth).map(|_| ReceiveSlot { packet: None, key: 0 }).collect();
        Ok(Self {
            queue: Some(queue),
            slabs: Slabs::new(domain.clone()),
            lines,
            front,
            slots,
            fresh: Vec::with_capacity(depth as usize),
            empty: (0..depth).rev().map(|slot| (slot, None)).collect(),
            source,
            enough: TOGETHER.min(depth as usize / 4).max(1),
            refused: None,
            is_broken: false,
        })
    }

    /// Returns the queue, for queue pairs.
    pub(super) fn queue(&self) -> Option<&Arc<SharedReceiveQueue>> {
        self.queue.as_ref()
    }

    /// Returns the number of its receives.
    pub(super) fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Returns `true` if the library has its queue at that address.
    pub(super) fn is(&self, address: usize) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.as_raw().addr() == address)
    }

    /// Takes a message of `len` bytes with its header out of a slot, if all of it lies in the
    /// line. The slot keeps its packet, and is posted again. `None`: the message is longer, or has
    /// no header; it is left in the slot.
    #[inline(always)]
    pub(super) fn take_short(&mut self, slot: u32, len: usize) -> Option<(Header, SmallBytes)> {
        let payload = len.checked_sub(HEADER).filter(|payload| *payload <= self.front)?;
        let line = self.line(slot)?;
        self.fresh.push(slot);
        Some((Header(line.header), SmallBytes::first(payload, line.front)))
    }

    /// Takes a message of `len` bytes with its header out of a slot. `None`: too short for a
    /// header. The slot is posted again, with another packet if the message has kept its own. The
    /// flag is `true` if the peer may be credited now; else `credit_to` is reported once the slot
    /// has a packet.
    pub(super) fn take(&mut self, slot: u32, len: usize, credit_to: u32) -> Option<(Taken, bool)> {
        if let Some((header, bytes)) = self.take_short(slot, len) {
            return Some((Taken::Small(header, bytes), true));
        }
        let (Some(payload), Some(line)) = (len.checked_sub(HEADER), self.line(slot)) else {
            self.again(slot);
            return None;
        };
        let Some(mut packet) = self.slots.get_mut(slot as usize)?.packet.take() else {
            debug_assert!(false, "a slot without a packet is not posted");
            return None;
        };
        packet.set_len(payload);
        let copied = copy_now(packet.view_mut(), MemRef::host(&line.front[..self.front]));
        debug_assert!(copied.is_ok() || self.front == 0, "the packet is of the source's kind");
        let refilled = self.fill(slot);
        // While half of the receives are posted, a missing one costs the peer no credit.
        let enough = 2 * self.empty.len() < self.slots.len();
        if !refilled && !enough {
            match self.put_aside(slot, packet) {
                Ok(bytes) => {
                    return Some((Taken::Large(Header(line.header), Payload::Aside(bytes)), true));
                }
                Err(unmoved) => packet = unmoved,
            }
        }
        if !refilled {
            self.empty.push((slot, (!enough).then_some(credit_to)));
        }
        Some((Taken::Large(Header(line.header), Payload::Packet(packet)), refilled || enough))
    }

    /// Copies a message out of its packet, which its slot gets back. No packets are left, and the
    /// posted receives are needed for the runtime's messages.
    #[cold]
    #[inline(never)]
    fn put_aside(&mut self, slot: u32, packet: Packet) -> Result<Vec<u8>, Packet> {
        let (Some(bytes), Some(place)) = (packet.as_slice(), self.slots.get_mut(slot as usize))
        else {
            return Err(packet);
        };
        let bytes = bytes.to_vec();
        place.packet = Some(packet);
        self.fresh.push(slot);
        Ok(bytes)
    }

    /// Reads a slot's line.
    #[inline(always)]
    fn line(&self, slot: u32) -> Option<SlotLine> {
        let mut line = SlotLine::new_zeroed();
        let came = self.lines.part(slot as usize * PITCH, size_of::<SlotLine>())?;
        copy_now(MemMut::host(line.as_mut_bytes()), came).ok()?;
        Some(line)
    }

    /// Reposts the slot of a receive that has ended without a message.
    pub(super) fn again(&mut self, slot: u32) {
        if self.slots.get(slot as usize).is_some_and(|slot| slot.packet.is_some()) {
            self.fresh.push(slot);
        }
    }

    /// Takes a packet for a slot. Returns `true` if there was one.
    fn fill(&mut self, slot: u32) -> bool {
        let Some(place) = self.slots.get_mut(slot as usize) else { return false };
        let Some(packet) = self.source.take() else { return false };
        // SAFETY: this holds the source, and with it the packets' pool, and drops the
        // registrations first.
        match unsafe { self.slabs.key(&packet) } {
            Ok(key) => {
                *place = ReceiveSlot { packet: Some(packet), key };
                self.fresh.push(slot);
                true
            }
            Err(error) => {
                tracing::debug!(%error, "a packet cannot be received into");
                self.refused = Some(error.to_string());
                false
            }
        }
    }

    /// Returns the reason why nothing can be received any more, once.
    pub(super) fn failed(&mut self) -> Option<String> {
        let nothing_stands = self.empty.len() == self.slots.len();
        self.is_broken |= nothing_stands && self.refused.is_some();
        self.refused.take_if(|_| self.is_broken)
    }

    /// Looks for packets for the slots that have none. `credit` is called for the connections
    /// whose messages had kept theirs.
    #[cold]
    pub(super) fn refill(&mut self, mut credit: impl FnMut(u32)) {
        if self.is_broken {
            return;
        }
        self.refused = None;
        while let Some(&(slot, whose)) = self.empty.last() {
            if !self.fill(slot) {
                return;
            }
            self.empty.pop();
            if let Some(whose) = whose {
                credit(whose);
            }
        }
    }

    /// Returns `true` if slots lack a packet.
    #[inline(always)]
    pub(super) fn is_hungry(&self) -> bool {
        !self.empty.is_empty()
    }

    /// Returns `true` if the fresh slots are worth a doorbell.
    #[inline(always)]
    pub(super) fn is_due(&self) -> bool {
        self.fresh.len() >= self.enough
    }

    /// Returns `true` if slots are fresh while others lack a packet: all posted receives may be
    /// used up. Without that three quarters of them are posted, since fewer fresh ones are not
    /// due.
    #[inline(always)]
    pub(super) fn are_missed(&self) -> bool {
        !self.fresh.is_empty() && self.is_hungry()
    }

    /// Posts the fresh slots.
    pub(super) fn post(&mut self) {
        while !self.fresh.is_empty() && !self.is_broken {
            let count = self.fresh.len().min(TOGETHER);
            let posted = self.post_some(count);
            // From the back: their memory was touched last.
            self.fresh.truncate(self.fresh.len() - posted);
            if posted < count {
                return;
            }
        }
    }

    /// Posts the last `count`. Returns the number of those that were posted.
    fn post_some(&mut self, count: usize) -> usize {
        let Some(queue) = &self.queue else { return 0 };
        let room = self.source.packet_size().saturating_sub(self.front);
        let length = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        let mut parts = [[ibv_sge::default(); 2]; TOGETHER];
        let mut requests = [ibv_recv_wr::default(); TOGETHER];
        let slots = self.fresh.iter().rev().take(count);
        for ((&slot, parts), request) in slots.zip(&mut parts).zip(&mut requests) {
            let Some(ReceiveSlot { packet: Some(packet), key }) = self.slots.get(slot as usize)
            else {
                return 0;
            };
            parts[0] = ibv_sge {
                addr: self.lines.addr(slot as usize * PITCH),
                length: length(HEADER + self.front),
                lkey: self.lines.key(),
            };
            parts[1] = ibv_sge {
                addr: (packet.addr() + self.front) as u64,
                length: length(room),
                lkey: *key,
            };
            request.wr_id = WrId::Receive(slot).encode();
            // Some devices take a length of 0 for 2 GiB.
            (request.sg_list, request.num_sge) = (parts.as_mut_ptr(), if room > 0 { 2 } else { 1 });
        }
        let first = requests.as_mut_ptr();
        for at in 1..count {
            requests[at - 1].next = first.wrapping_add(at);
        }
        // SAFETY: each receive names its slot's line, and the packet in its slot. The packet stays
        // there until the receive has ended or the queue is destroyed. The packet has the length
        // that its source promises.
        match unsafe { queue.post(first) } {
            Ok(()) => count,
            Err(PostFailure { errno, bad_wr: bad }) => {
                // A queue may hold fewer than it says; the rest follows when there is room.
                if errno != libc::ENOMEM {
                    let error = std::io::Error::from_raw_os_error(errno);
                    self.refused = Some(format!("its receive queue takes no receive: {error}"));
                    self.is_broken = true;
                }
                // Those before the refused one were taken.
                let bad = (0..count).find(|&at| std::ptr::eq(first.wrapping_add(at), bad.cast()));
                bad.unwrap_or(0)
            }
        }
    }

    /// Ends it: nothing is received any more, and packets are returned. All queue pairs are gone
    /// by now.
    pub(super) fn close(&mut self) {
        self.queue = None;
        for slot in &mut self.slots {
            slot.packet = None;
        }
        self.fresh.clear();
        self.empty.clear();
    }
}
