//! Many small allocations in few blocks.
//!
//! All ranks keep the same records, and change them only by messages that all ranks get. So they
//! find the same place for a piece without asking. Each call tells the pieces that the rank has
//! released since the last call. A piece is used again when all ranks have released it, since until
//! then some rank may read it. That costs one round of messages for each call.

use super::buddy::Buddy;
use super::error::SharedAllocError;
use super::region::SharedRegion;
use super::shared::SharedDeviceAllocator;
use super::stats::{AllocCounts, CountGuard, SharedStats};
use super::wire::{AllocCall, Asks};
use super::{BLOCK, MOST, POOL_FREED};
use crate::region::Region;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Pool that cuts blocks of a [`SharedDeviceAllocator`] into pieces, for small or short-lived
/// memory. Pieces begin at multiples of 256 bytes.
///
/// A piece longer than a block gets a block of its own, freed when all ranks have released the
/// piece. Other blocks stay until [`trim`](Self::trim), or until the pool and its pieces are
/// dropped.
pub struct SharedPool {
    allocator: SharedDeviceAllocator,
    number: u32,
    block: usize,
    books: Mutex<Books>,
    freed: Arc<FreedPieces>,
    counts: AllocCounts,
}

/// The released pieces that this rank has not told the others yet.
#[derive(Default)]
struct FreedPieces(Mutex<VecDeque<u64>>);

impl FreedPieces {
    fn lock(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.0.lock()
    }

    /// Takes the first of them. Also returns `true` if there are more.
    fn take(&self) -> (Vec<u64>, bool) {
        let mut all = self.lock();
        let count = all.len().min(POOL_FREED);
        let first = all.drain(..count).collect();
        (first, !all.is_empty())
    }

    /// Puts pieces back whose report failed.
    fn put_back(&self, first: Vec<u64>) {
        let mut all = self.lock();
        first.into_iter().rev().for_each(|number| all.push_front(number));
    }
}

/// The guard of this rank's part of a piece.
struct PieceGuard {
    number: u64,
    freed: Arc<FreedPieces>,
    _counted: CountGuard,
}

impl Drop for PieceGuard {
    fn drop(&mut self) {
        self.freed.lock().push_back(self.number);
    }
}

/// The state of a pool, the same at all ranks.
#[derive(Default)]
struct Books {
    /// Pieces that were ever made; likewise blocks.
    pieces: u64,
    blocks_made: u64,
    blocks: BTreeMap<u64, PoolBlock>,
    live: BTreeMap<u64, PoolPiece>,
}

struct PoolBlock {
    region: Region,
    /// `None`: the block is one piece.
    cut: Option<Buddy>,
}

struct PoolPiece {
    block: u64,
    at: usize,
    len: usize,
    /// Set for each rank, by its place in the scope, that has released the piece.
    gone: Vec<bool>,
}

impl Books {
    /// Notes that a rank has released a piece. An unknown piece changes nothing.
    fn release(&mut self, place: usize, number: u64) {
        let Some(piece) = self.live.get_mut(&number) else {
            return tracing::warn!(place, number, "a rank has released an unknown piece");
        };
        if let Some(gone) = piece.gone.get_mut(place) {
            *gone = true;
        }
        if piece.gone.iter().any(|gone| !gone) {
            return;
        }
        let Some(PoolPiece { block, at, len, .. }) = self.live.remove(&number) else { return };
        match self.blocks.get_mut(&block).map(|block| &mut block.cut) {
            Some(Some(cut)) => cut.give(at, len),
            Some(None) => drop(self.blocks.remove(&block)),
            None => {}
        }
    }

    /// Returns room for a piece in the present blocks: the block's number, and the place in it.
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

    /// Returns the allocator that provides the blocks.
    pub fn allocator(&self) -> &SharedDeviceAllocator {
        &self.allocator
    }

    /// Returns the bytes of a block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Returns counts of this rank's memory from the pool.
    pub fn stats(&self) -> SharedStats {
        self.counts.get()
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock()
    }

    /// Allocates a piece of `len` bytes for all ranks of the scope: a collective call of the
    /// scope.
    ///
    /// # Errors
    /// See [`SharedAllocError`]: the same variant at all ranks of the scope.
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
                // Releases that are not reported yet may make room.
                None if more && !is_long => {}
                None => {
                    let region =
                        shared.fresh(if is_long { len } else { self.block }, shared.counts())?;
                    let mut cut = (!is_long).then(|| Buddy::of(self.block));
                    let at = cut.as_mut().and_then(|cut| cut.take(len)).unwrap_or(0);
                    let number = books.blocks_made;
                    books.blocks_made += 1;
                    books.blocks.insert(number, PoolBlock { region, cut });
                    break (number, at);
                }
            }
        };
        let number = books.pieces;
        books.pieces += 1;
        books.live.insert(number, PoolPiece { block, at, len, gone: vec![false; shared.count()] });
        let counted = self.counts.allocation(len, 0);
        self.hold(&books);
        let guard = PieceGuard { number, freed: self.freed.clone(), _counted: counted };
        let region = books
            .blocks
            .get(&block)
            .and_then(|block| block.region.subregion_with(at, len, Box::new(guard)));
        let region = region.ok_or(SharedAllocError::Len { len })?;
        Ok(SharedRegion { region, leader: shared.leader, number })
    }

    /// Gives back the blocks that are wholly free at all ranks: a collective call of the scope.
    /// Returns their bytes.
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

    /// Notes the bytes that the blocks take up.
    fn hold(&self, books: &Books) {
        let held = books.held();
        self.counts.change(|stats| stats.held = held);
    }

    /// Exchanges the released pieces of all ranks. Returns `true` if a rank has more to report.
    fn told(
        &self,
        books: &mut Books,
        meet: impl FnOnce((Vec<u64>, bool)) -> Result<Vec<AllocCall>, SharedAllocError>,
    ) -> Result<bool, SharedAllocError> {
        let (freed, more) = self.freed.take();
        let calls = meet((freed.clone(), more)).inspect_err(|_| self.freed.put_back(freed))?;
        for (place, call) in calls.iter().enumerate() {
            call.freed.iter().for_each(|number| books.release(place, *number));
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
