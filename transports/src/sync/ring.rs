//! One producer, one consumer, 64-byte slots that carry their own sequence number.
//!
//! ```text
//! slot      | control 8 B | header 16 B | payload 40 B         |   first slot of a record
//! slot + 1  | control 8 B | payload 56 B                       |   up to three more
//! control   = sequence 32 | slots 8 | kind 8 | payload bytes 16
//! ```
//!
//! A record that fits into one slot travels as one cache line. The consumer waits for the sequence
//! number of the very line that holds the message. So a small message costs a single transfer
//! between cores, and no shared index is touched. UCX's shared-memory FIFO takes an atomic
//! exchange on a shared head for each message. The producer learns of free slots from `freed`,
//! which the consumer writes now and then. It looks there only when its own count runs out.
//!
//! The continuation slots keep a control word of their own. So no byte of a payload ever lies where
//! a later lap looks for a sequence number, and none can forge a record.
//!
//! Each side trusts nothing that the other wrote: see [`Corrupt`].

#![expect(unsafe_code, reason = "a structure without locks shares cells between threads")]
#![allow(
    clippy::cast_possible_truncation,
    reason = "positions are cut to the ring, and fields to their width in the control word"
)]

mod run;

pub use run::RunShape;

use super::primitives::{AtomicU64, Ordering};
use crate::mem::{MemMut, MemRef, Place, copy::copy_now};

/// Payload bytes in a record's first slot.
pub const FIRST: usize = 40;
/// Payload bytes in each further slot.
pub const NEXT: usize = 56;
/// Slots that a record can take.
pub const MAX_SLOTS: usize = 4;
/// Payload bytes that a record can carry: 208.
pub const MAX_PAYLOAD: usize = FIRST + (MAX_SLOTS - 1) * NEXT;
/// Distance from a side's next slot to the slot whose cache line it prefetches. The line has come
/// from the other core by then, and lies beyond the slot that a consumer without backlog looks at.
const AHEAD: u64 = 6;
/// Bytes of a slot behind its control word.
pub const BODY: usize = 56;
/// Bytes of the header that each record carries in addition to its payload.
pub const HEADER: usize = 16;

/// Storage of a ring's slots: on the heap, or in memory shared by two processes.
///
/// # Safety
/// All methods name the same memory each time. `control(at)` and the body of `at` are slot `at`
/// for `at < capacity()`, a power of two. The bodies are [`BODY`] bytes of host memory.
pub unsafe trait Slots {
    /// Returns the number of slots: a power of two.
    fn capacity(&self) -> usize;
    /// Returns the control word of a slot.
    fn control(&self, at: usize) -> &AtomicU64;
    /// Returns the number of slots that the consumer has freed since the beginning.
    fn freed(&self) -> &AtomicU64;
    /// Hands out a slot's body for writing.
    ///
    /// # Safety
    /// The slot is the producer's at the moment.
    unsafe fn write(&self, at: usize, f: impl FnOnce(*mut u8));
    /// Hints that the producer will soon write this slot.
    #[inline(always)]
    fn will_write(&self, at: usize) {
        let _ = at;
    }
    /// Hints that the consumer will soon read this slot.
    #[inline(always)]
    fn will_read(&self, at: usize) {
        let _ = at;
    }
    /// Hands out a slot's body for reading. The pointer stays valid as long as the slots do.
    ///
    /// # Safety
    /// The slot is the consumer's at the moment.
    unsafe fn read(&self, at: usize, f: impl FnOnce(*const u8));
}

/// Impossible value from the other side, which is broken or hostile; the ring is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// A record claims a number of slots that no record has.
    #[error("a record claims {slots} slots for {len} payload bytes, which no record has")]
    Shape {
        /// Slots claimed.
        slots: u8,
        /// Payload bytes claimed.
        len: u16,
    },
    /// The consumer claims to have freed more than was ever sent, or less than before.
    #[error("{freed} slots freed of {sent} sent, after {before}")]
    Freed {
        /// Slots claimed to be free.
        freed: u64,
        /// Slots sent.
        sent: u64,
        /// The claim before.
        before: u64,
    },
}

/// Reason why a record was not pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushError {
    /// The ring is full until the consumer frees slots.
    Full,
    /// The payload is longer than a record carries, or is not host memory.
    Unfit,
    /// See [`Corrupt`].
    Corrupt(Corrupt),
}

/// Returns the number of slots of a payload.
#[inline(always)]
fn slots_for(len: usize) -> usize {
    if len <= FIRST { 1 } else { 1 + (len - FIRST).div_ceil(NEXT) }
}

#[inline(always)]
fn control_word(position: u64, slots: usize, kind: u8, len: usize) -> u64 {
    // Position + 1, so that fresh memory, all zero, is no record. Sequence numbers of one slot
    // differ by the capacity from lap to lap, and repeat only after 2^32 slots.
    let sequence = position.wrapping_add(1) & 0xffff_ffff;
    sequence | (slots as u64) << 32 | u64::from(kind) << 40 | (len as u64) << 48
}

/// The writing end.
#[derive(Debug)]
pub struct Producer<S> {
    slots: S,
    mask: u64,
    sent: u64,
    freed: u64,
}

impl<S: Slots> Producer<S> {
    /// Makes the writing end of a fresh ring.
    ///
    /// # Safety
    /// It is the only writing end that these slots ever have.
    pub unsafe fn new(slots: S) -> Self {
        let mask = slots.capacity() as u64 - 1;
        Self { slots, mask, sent: 0, freed: 0 }
    }

    /// Returns the storage.
    pub fn slots(&self) -> &S {
        &self.slots
    }

    /// Returns the control word of the next record.
    #[inline(always)]
    pub fn next_control(&self) -> &AtomicU64 {
        self.slots.control((self.sent & self.mask) as usize)
    }

    /// Returns `true` if the consumer has taken everything, as far as it has told.
    pub fn is_drained(&self) -> bool {
        self.slots.freed().load(Ordering::Acquire) == self.sent
    }

    /// Writes one record. `payload` is host memory of at most [`MAX_PAYLOAD`] bytes.
    #[inline]
    pub fn push(
        &mut self,
        kind: u8,
        header: [u64; 2],
        payload: MemRef<'_>,
    ) -> Result<(), PushError> {
        if payload.len() <= FIRST && payload.place().is_host() {
            // SAFETY: host memory, by its view's promise, of that length.
            return unsafe { self.push_one(kind, header, payload) };
        }
        self.push_several(kind, header, payload)
    }

    /// Writes a record of one slot: the path of small messages.
    ///
    /// # Safety
    /// `payload` is host memory of at most [`FIRST`] bytes.
    #[inline(always)]
    unsafe fn push_one(
        &mut self,
        kind: u8,
        header: [u64; 2],
        payload: MemRef<'_>,
    ) -> Result<(), PushError> {
        if self.sent - self.freed > self.mask {
            self.refresh()?;
            if self.sent - self.freed > self.mask {
                return Err(PushError::Full);
            }
        }
        let sent = self.sent;
        let (at, ahead) = ((sent & self.mask) as usize, (sent + 1 + AHEAD) & self.mask);
        self.sent = sent + 1;
        let control = self.slots.control(at);
        // SAFETY: by the credit check the consumer no longer reads this slot.
        unsafe {
            self.slots.write(at, |body| {
                body.cast::<[u64; 2]>().write_unaligned(header);
                fill(body, HEADER, payload);
            });
        }
        // Release: a consumer that sees the sequence number sees the record.
        control.store(control_word(sent, 1, kind, payload.len()), Ordering::Release);
        self.slots.will_write(ahead as usize);
        Ok(())
    }

    /// Hints that a record will be pushed. A consumer that waits for it has the line of its slot,
    /// which this side takes away while it writes the rest of the message. The line of a full ring
    /// is left to the consumer, which has yet to read it.
    #[inline(always)]
    pub fn will_push(&self) {
        if self.sent - self.freed <= self.mask {
            self.slots.will_write((self.sent & self.mask) as usize);
        }
    }

    fn push_several(
        &mut self,
        kind: u8,
        header: [u64; 2],
        payload: MemRef<'_>,
    ) -> Result<(), PushError> {
        let len = payload.len();
        if len > MAX_PAYLOAD || !payload.place().is_host() {
            return Err(PushError::Unfit);
        }
        let count = slots_for(len);
        let capacity = self.mask + 1;
        if self.sent + count as u64 - self.freed > capacity {
            self.refresh()?;
            if self.sent + count as u64 - self.freed > capacity {
                return Err(PushError::Full);
            }
        }
        self.will_push();
        for extra in 1..count {
            let position = self.sent + extra as u64;
            let at = (position & self.mask) as usize;
            let part = payload.part(FIRST + (extra - 1) * NEXT, NEXT);
            // SAFETY: by the credit check the consumer no longer reads this slot.
            unsafe { self.slots.write(at, |body| fill(body, 0, part)) };
            // Not a record, but a sequence number of this lap, which later laps do not mistake for
            // theirs.
            self.slots.control(at).store(control_word(position, 0, 0, 0), Ordering::Relaxed);
        }
        let at = (self.sent & self.mask) as usize;
        // SAFETY: as above.
        unsafe {
            self.slots.write(at, |body| {
                body.cast::<[u64; 2]>().write_unaligned(header);
                fill(body, HEADER, payload.part(0, FIRST));
            });
        }
        // Release: a consumer that sees the sequence number sees the record.
        self.slots.control(at).store(control_word(self.sent, count, kind, len), Ordering::Release);
        self.sent += count as u64;
        for slots in 0..count as u64 {
            self.slots.will_write(((self.sent + AHEAD - slots) & self.mask) as usize);
        }
        Ok(())
    }

    #[cold]
    fn refresh(&mut self) -> Result<(), PushError> {
        // Acquire: the consumer's reads of the freed slots have ended before this side writes them
        // again.
        let freed = self.slots.freed().load(Ordering::Acquire);
        if freed > self.sent || freed < self.freed {
            let (sent, before) = (self.sent, self.freed);
            return Err(PushError::Corrupt(Corrupt::Freed { freed, sent, before }));
        }
        self.freed = freed;
        Ok(())
    }
}

/// Copies a part of a record into a slot's body, from `at` on.
///
/// # Safety
/// `body` is a slot's body, and `at + part.len()` at most [`BODY`].
#[inline(always)]
unsafe fn fill(body: *mut u8, at: usize, part: MemRef<'_>) {
    // SAFETY: within the body, by the caller's promise.
    let target = unsafe { MemMut::from_raw(body.add(at), BODY - at, Place::Host) };
    // Both are host memory, and the part fits into the target, so the copy is not refused.
    let _ = copy_now(target, part);
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer<S> {
    slots: S,
    mask: u64,
    taken: u64,
    told: u64,
    tell_every: u64,
}

/// A record, still in its slots.
#[derive(Debug)]
pub struct Record<'a, S> {
    slots: &'a S,
    mask: u64,
    position: u64,
    /// The producer's word for the kind of record.
    pub kind: u8,
    /// Number of its slots.
    pub count: u8,
    len: usize,
}

impl<S: Slots> Consumer<S> {
    /// Makes the reading end of a fresh ring.
    ///
    /// # Safety
    /// It is the only reading end that these slots ever have.
    pub unsafe fn new(slots: S) -> Self {
        let capacity = slots.capacity() as u64;
        Self { slots, mask: capacity - 1, taken: 0, told: 0, tell_every: (capacity / 8).max(1) }
    }

    /// Returns the storage.
    pub fn slots(&self) -> &S {
        &self.slots
    }

    /// Returns `true` if a record is there. Costs one load of the record's own cache line.
    #[inline(always)]
    pub fn is_ready(&self) -> bool {
        let control = self.slots.control((self.taken & self.mask) as usize).load(Ordering::Relaxed);
        control as u32 == self.taken.wrapping_add(1) as u32
    }

    /// Returns the next record, if there is one. It stays in its slots until
    /// [`advance`](Self::advance).
    #[inline(always)]
    pub fn peek(&self) -> Result<Option<Record<'_, S>>, Corrupt> {
        let at = (self.taken & self.mask) as usize;
        let control = self.slots.control(at).load(Ordering::Acquire);
        if control as u32 != self.taken.wrapping_add(1) as u32 {
            return Ok(None);
        }
        let (slots, kind, len) =
            ((control >> 32) as u8, (control >> 40) as u8, (control >> 48) as u16);
        let bytes = usize::from(len);
        let small = slots == 1 && bytes <= FIRST;
        if !small && !self.can_be(slots, bytes) {
            return Err(Corrupt::Shape { slots, len });
        }
        Ok(Some(Record {
            slots: &self.slots,
            mask: self.mask,
            position: self.taken,
            kind,
            count: slots,
            len: bytes,
        }))
    }

    fn can_be(&self, slots: u8, bytes: usize) -> bool {
        bytes <= MAX_PAYLOAD
            && usize::from(slots) == slots_for(bytes)
            && u64::from(slots) <= self.mask + 1
    }

    /// Prefetches the cache line of a slot further on. For a consumer with a backlog: fetching a
    /// line that the producer has yet to write takes it away from the producer.
    #[inline(always)]
    pub fn fetch_ahead(&self) {
        self.slots.will_read(((self.taken + AHEAD) & self.mask) as usize);
    }

    /// Frees the slots of the record of [`peek`](Self::peek), and of those [`alike`](Self::alike).
    #[inline(always)]
    pub fn advance(&mut self, slots: usize) {
        self.taken += slots as u64;
        if self.taken - self.told >= self.tell_every {
            // Release: this side's reads have ended before the producer may write again.
            self.slots.freed().store(self.taken, Ordering::Release);
            self.told = self.taken;
        }
    }

    /// Takes the next record, if there is one, and frees its slots when `take` has returned
    /// something. When `take` returns `None` the record stays where it is.
    pub fn pop<R>(
        &mut self,
        take: impl FnOnce(Record<'_, S>) -> Option<R>,
    ) -> Result<Option<R>, Corrupt> {
        let Some(record) = self.peek()? else { return Ok(None) };
        let count = record.count;
        let Some(result) = take(record) else { return Ok(None) };
        self.advance(count.into());
        Ok(Some(result))
    }
}

impl<S: Slots> Record<'_, S> {
    /// Returns the number of payload bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there is no payload.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the header and the payload of a record of one slot. The producer can still write
    /// them if it breaks the protocol.
    #[inline(always)]
    pub fn in_one_slot(&self) -> ([u64; 2], MemRef<'_>) {
        let at = (self.position & self.mask) as usize;
        let (mut header, mut payload) = ([0; 2], MemRef::host(&[]));
        // SAFETY: the sequence number said that the producer has handed this slot over. The payload
        // is cut to the body.
        unsafe {
            self.slots.read(at, |body| {
                header = body.cast::<[u64; 2]>().read_unaligned();
                payload = MemRef::from_raw(body.add(HEADER), self.len.min(FIRST), Place::Host);
            });
        }
        (header, payload)
    }

    /// Copies the part of the payload in the first slot, with the bytes behind it in that slot, and
    /// returns the header. A copy of fixed size is quicker than one of the right size. For records
    /// of one slot that is all of it.
    #[inline(always)]
    pub fn copy_first_to(&self, to: &mut [u8; FIRST]) -> [u64; 2] {
        let mut header = [0; 2];
        let at = (self.position & self.mask) as usize;
        // SAFETY: the sequence number said that the producer has handed this slot over. A body is
        // `HEADER + FIRST` bytes long.
        unsafe {
            self.slots.read(at, |body| {
                header = body.cast::<[u64; 2]>().read_unaligned();
                *to = body.add(HEADER).cast::<[u8; FIRST]>().read_unaligned();
            });
        };
        header
    }

    /// Returns the header.
    #[inline(always)]
    pub fn header(&self) -> [u64; 2] {
        let mut header = [0; 2];
        let at = (self.position & self.mask) as usize;
        // SAFETY: the sequence number said that the producer has handed this slot over.
        unsafe { self.slots.read(at, |body| header = body.cast::<[u64; 2]>().read_unaligned()) };
        header
    }

    /// Copies the payload to the start of `to`, as far as there is room.
    #[inline(always)]
    pub fn copy_to(&self, to: &mut [u8]) {
        let len = self.len.min(to.len());
        let first = (self.position & self.mask) as usize;
        // SAFETY: `pop` found the record handed over, and its shape right.
        unsafe {
            self.slots.read(first, |body| drain(body.add(HEADER), &mut to[..len.min(FIRST)]));
        }
        let mut done = FIRST;
        while done < len {
            let extra = 1 + (done - FIRST) / NEXT;
            let at = ((self.position + extra as u64) & self.mask) as usize;
            let end = len.min(done + NEXT);
            // SAFETY: as above.
            unsafe { self.slots.read(at, |body| drain(body, &mut to[done..end])) };
            done = end;
        }
    }
}

/// Copies bytes out of a slot's body.
///
/// # Safety
/// `to.len()` bytes are readable at `from`.
#[inline(always)]
unsafe fn drain(from: *const u8, to: &mut [u8]) {
    // SAFETY: the caller's promise.
    let source = unsafe { MemRef::from_raw(from, to.len(), Place::Host) };
    let _ = copy_now(MemMut::host(to), source);
}

/// A ring's slots on the heap: for tests, models, benchmarks, and rings within a process.
pub mod heap {
    use super::super::primitives::{AtomicU64, UnsafeCell};
    use super::{BODY, Slots};
    use std::sync::Arc;

    /// The slots of one ring; clones are the same slots.
    #[derive(Clone, Debug)]
    pub struct HeapSlots(Arc<Inner>);

    #[derive(Debug)]
    struct Inner {
        slots: Box<[Slot]>,
        freed: AtomicU64,
    }

    #[repr(C, align(64))]
    #[derive(Debug)]
    struct Slot {
        control: AtomicU64,
        body: UnsafeCell<[u8; BODY]>,
    }

    // SAFETY: the ring's protocol gives a slot's body to one side at a time.
    unsafe impl Send for Inner {}
    // SAFETY: as above.
    unsafe impl Sync for Inner {}

    impl HeapSlots {
        /// Makes fresh slots. `capacity` is rounded up to a power of two.
        pub fn new(capacity: usize) -> Self {
            let slot = || Slot { control: AtomicU64::new(0), body: UnsafeCell::new([0; BODY]) };
            let slots = (0..capacity.next_power_of_two()).map(|_| slot()).collect();
            Self(Arc::new(Inner { slots, freed: AtomicU64::new(0) }))
        }
    }

    // SAFETY: the slots are a boxed slice that never changes; its length is a power of two.
    unsafe impl Slots for HeapSlots {
        fn capacity(&self) -> usize {
            self.0.slots.len()
        }
        #[inline(always)]
        fn control(&self, at: usize) -> &AtomicU64 {
            &self.0.slots[at].control
        }
        fn freed(&self) -> &AtomicU64 {
            &self.0.freed
        }
        #[inline(always)]
        unsafe fn write(&self, at: usize, f: impl FnOnce(*mut u8)) {
            self.0.slots[at].body.with_mut(|body| f(body.cast()));
        }
        #[inline(always)]
        unsafe fn read(&self, at: usize, f: impl FnOnce(*const u8)) {
            self.0.slots[at].body.with(|body| f(body.cast()));
        }
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests;
