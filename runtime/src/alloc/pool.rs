//! Many small allocations in few blocks.
//!
//! All ranks keep the same books, changed by nothing but what all have told each other: so they
//! find the same place for a piece without asking. Each call tells which pieces the rank has let go
//! of since; a piece is used again when all have, since until then somebody may still read it. That
//! is one message round for each call, which no pool whose pieces are used again can do without.

use super::buddy::Buddy;
use super::error::SharedAllocError;
use super::region::SharedRegion;
use super::shared::SharedDeviceAllocator;
use super::stats::{Counted, Counts, SharedStats};
use super::wire::{Asks, Call};
use super::{BLOCK, MOST, POOL_FREED};
use crate::region::Region;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Cuts blocks of a [`SharedDeviceAllocator`] into pieces: for what is small, or comes and goes.
/// Pieces begin at multiples of 256 bytes.
///
/// What is longer than a block gets one of its own, which goes when all ranks have let go of it.
/// Other blocks stay until [`trim`](Self::trim), or until the pool and its pieces are dropped.
pub struct SharedPool {
    allocator: SharedDeviceAllocator,
    number: u32,
    block: usize,
    books: Mutex<Books>,
    freed: Arc<Freed>,
    counts: Counts,
}

/// Pieces that this rank has let go of, and has not told of yet.
#[derive(Default)]
struct Freed(Mutex<VecDeque<u64>>);

impl Freed {
    fn lock(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of them, and whether there are more.
    fn take(&self) -> (Vec<u64>, bool) {
        let mut all = self.lock();
        let count = all.len().min(POOL_FREED);
        let first = all.drain(..count).collect();
        (first, !all.is_empty())
    }

    /// They were told in vain.
    fn put_back(&self, first: Vec<u64>) {
        let mut all = self.lock();
        first.into_iter().rev().for_each(|number| all.push_front(number));
    }
}

/// What this rank's part of a piece keeps.
struct Part {
    number: u64,
    freed: Arc<Freed>,
    _counted: Counted,
}

impl Drop for Part {
    fn drop(&mut self) {
        self.freed.lock().push_back(self.number);
    }
}

/// The same at all ranks.
#[derive(Default)]
struct Books {
    /// Pieces that there have been, and blocks.
    pieces: u64,
    blocks_made: u64,
    blocks: BTreeMap<u64, Block>,
    live: BTreeMap<u64, Piece>,
}

struct Block {
    region: Region,
    /// `None`: it is one piece.
    cut: Option<Buddy>,
}

struct Piece {
    block: u64,
    at: usize,
    len: usize,
    /// Who has let go of it, by their places.
    gone: Vec<bool>,
}

impl Books {
    /// A rank tells that it has let go of a piece. Whatever it tells besides changes nothing.
    fn let_go(&mut self, place: usize, number: u64) {
        let Some(piece) = self.live.get_mut(&number) else {
            return tracing::warn!(place, number, "a rank has let go of a piece that there is not");
        };
        if let Some(gone) = piece.gone.get_mut(place) {
            *gone = true;
        }
        if piece.gone.iter().any(|gone| !gone) {
            return;
        }
        let Some(Piece { block, at, len, .. }) = self.live.remove(&number) else { return };
        match self.blocks.get_mut(&block).map(|block| &mut block.cut) {
            Some(Some(cut)) => cut.give(at, len),
            Some(None) => drop(self.blocks.remove(&block)),
            None => {}
        }
    }

    /// Room for a piece in the blocks that there are: which, and where in it.
    fn room(&mut self, len: usize) -> Option<(u64, usize)> {
        let mut cut = self
            .blocks
            .iter_mut()
            .filter_map(|(number, block)| Some((*number, block.cut.as_mut()?)));
        cut.find_map(|(number, cut)| Some((number, cut.take(len)?)))
    }

    fn held(&self) -> usize {
        self.blocks.values().map(|block| block.region.len().next_multiple_of(BLOCK)).sum()
    }
}

impl SharedPool {
    pub(super) fn new(allocator: SharedDeviceAllocator, number: u32, block: usize) -> Self {
        let (books, freed, counts) = Default::default();
        Self { allocator, number, block, books, freed, counts }
    }

    /// The allocator that its blocks are of.
    pub fn allocator(&self) -> &SharedDeviceAllocator {
        &self.allocator
    }

    /// Bytes of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// What there is, at this rank.
    pub fn stats(&self) -> SharedStats {
        self.counts.get()
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a piece of so many bytes for all ranks of the scope: a collective call of it.
    ///
    /// # Errors
    /// See [`SharedAllocError`]: the same kind at all ranks of the scope.
    pub fn allocate(&self, len: usize) -> Result<SharedRegion, SharedAllocError> {
        let shared = &self.allocator.0;
        let mut turn = shared.turn()?;
        let mut books = self.books();
        let asks = Asks::Piece { pool: self.number, block: self.block as u64, len: len as u64 };
        let is_long = len > self.block;
        let (block, at) = loop {
            let more = self.told(&mut books, |told| shared.meet(&mut turn, asks, told))?;
            if len == 0 || len > MOST {
                return Err(SharedAllocError::Len { len });
            }
            match books.room(len) {
                Some(found) => break found,
                // There may be room in what is not told yet.
                None if more && !is_long => {}
                None => {
                    let region =
                        shared.fresh(if is_long { len } else { self.block }, shared.counts())?;
                    let mut cut = (!is_long).then(|| Buddy::of(self.block));
                    let at = cut.as_mut().and_then(|cut| cut.take(len)).unwrap_or(0);
                    let number = books.blocks_made;
                    books.blocks_made += 1;
                    books.blocks.insert(number, Block { region, cut });
                    break (number, at);
                }
            }
        };
        let number = books.pieces;
        books.pieces += 1;
        books.live.insert(number, Piece { block, at, len, gone: vec![false; shared.count()] });
        let counted = self.counts.allocation(len, 0);
        self.hold(&books);
        let part = Part { number, freed: self.freed.clone(), _counted: counted };
        let region = books
            .blocks
            .get(&block)
            .and_then(|block| block.region.subregion_with(at, len, Box::new(part)));
        let region = region.ok_or(SharedAllocError::Len { len })?;
        Ok(SharedRegion { region, leader: shared.leader, number })
    }

    /// Gives back the blocks of which no rank has a piece: a collective call of the scope. How many
    /// bytes they had.
    ///
    /// # Errors
    /// See [`SharedAllocError`].
    pub fn trim(&self) -> Result<usize, SharedAllocError> {
        let shared = &self.allocator.0;
        let mut turn = shared.turn()?;
        let mut books = self.books();
        let asks = Asks::Trim { pool: self.number };
        let before = books.held();
        while self.told(&mut books, |told| shared.meet(&mut turn, asks, told))? {}
        books.blocks.retain(|_, block| block.cut.as_ref().is_none_or(|cut| !cut.is_whole()));
        self.hold(&books);
        Ok(before - books.held())
    }

    /// Notes what the blocks take up.
    fn hold(&self, books: &Books) {
        let held = books.held();
        self.counts.change(|stats| stats.held = held);
    }

    /// All tell what they have let go of. Whether somebody has more to tell.
    fn told(
        &self,
        books: &mut Books,
        meet: impl FnOnce((Vec<u64>, bool)) -> Result<Vec<Call>, SharedAllocError>,
    ) -> Result<bool, SharedAllocError> {
        let (freed, more) = self.freed.take();
        let calls = meet((freed.clone(), more)).inspect_err(|_| self.freed.put_back(freed))?;
        for (place, call) in calls.iter().enumerate() {
            call.freed.iter().for_each(|number| books.let_go(place, *number));
        }
        self.hold(books);
        Ok(calls.iter().any(|call| call.more))
    }
}

impl std::fmt::Debug for SharedPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "SharedPool(#{}, blocks of {} bytes, of {:?})",
            self.number, self.block, self.allocator
        )
    }
}
