//! The places of a shard of the table of operations.

use super::table::{OpEntry, OpKind};
use crate::deadline::Deadline;
use crate::names::Rank;
use std::collections::VecDeque;

/// An operation in its place.
pub(super) struct OpSlot<E: OpEntry> {
    pub(super) at: (Rank, u64),
    pub(super) kind: OpKind,
    /// Deadline, until it has passed once.
    pub(super) deadline: Deadline,
    /// `None` while a thread carries it on.
    pub(super) entry: Option<Box<E>>,
    /// Events that have come meanwhile: seldom any.
    #[allow(clippy::box_collection, reason = "a queue without values takes longer to drop")]
    pub(super) events: Option<Box<VecDeque<E::Event>>>,
}

/// Operations by peer and name: an operation has the place of its hash, or one behind it, with none
/// free between.
pub(super) struct OpSlots<E: OpEntry> {
    /// A power of two, or none. At least half are free.
    pub(super) places: Vec<Option<OpSlot<E>>>,
    pub(super) len: usize,
    /// Bits of a hash that do not count.
    shift: u32,
}

impl<E: OpEntry> OpSlots<E> {
    /// Places of a shard with an operation, at least.
    const LEAST: usize = 32;

    pub(super) const fn new() -> Self {
        Self { places: Vec::new(), len: 0, shift: 0 }
    }

    /// Returns the place of an operation by its hash. Ranks give consecutive names: the golden
    /// ratio (Knuth, The Art of Computer Programming 3, 6.4) spreads them evenly. Names with gaps
    /// meet more often.
    #[inline]
    fn home(&self, (peer, name): (Rank, u64)) -> usize {
        let hash = (name ^ u64::from(peer.0) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> self.shift) as usize
    }

    #[inline]
    fn after(&self, place: usize) -> usize {
        (place + 1) & (self.places.len() - 1)
    }

    /// Returns where an operation is, or the free place where it would be.
    #[inline]
    fn search(&self, at: (Rank, u64)) -> Result<usize, usize> {
        let mut place = self.home(at);
        loop {
            match &self.places[place] {
                Some(slot) if slot.at == at => return Ok(place),
                Some(_) => place = self.after(place),
                None => return Err(place),
            }
        }
    }

    #[inline]
    pub(super) fn find(&self, at: (Rank, u64)) -> Option<usize> {
        if self.len == 0 { None } else { self.search(at).ok() }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: (Rank, u64)) -> Option<&mut OpSlot<E>> {
        let place = self.find(at)?;
        self.places[place].as_mut()
    }

    /// Returns the free place for an operation, unless there is one of its name. The caller fills
    /// it and counts the operation.
    #[inline]
    pub(super) fn vacant(&mut self, at: (Rank, u64)) -> Option<&mut Option<OpSlot<E>>> {
        if self.places.len() <= 2 * self.len {
            self.grow();
        }
        let place = self.search(at).err()?;
        Some(&mut self.places[place])
    }

    #[cold]
    fn grow(&mut self) {
        let more = Self::LEAST.max(2 * self.places.len());
        let old = std::mem::take(&mut self.places);
        self.shift = u64::BITS - more.trailing_zeros();
        self.places.resize_with(more, || None);
        for slot in old.into_iter().flatten() {
            if let Err(place) = self.search(slot.at) {
                self.places[place] = Some(slot);
            }
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, at: (Rank, u64)) -> Option<OpSlot<E>> {
        let mut hole = self.find(at)?;
        let removed = self.places[hole].take();
        self.len -= 1;
        // Those behind it move up, unless that would be before their own place.
        let (mut next, mask) = (self.after(hole), self.places.len() - 1);
        while let Some(slot) = &self.places[next] {
            let home = self.home(slot.at);
            if next.wrapping_sub(home) & mask >= next.wrapping_sub(hole) & mask {
                self.places.swap(hole, next);
                hole = next;
            }
            next = self.after(next);
        }
        removed
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &OpSlot<E>> {
        self.places.iter().flatten()
    }
}
