//! Copies that go together through blocks of pinned memory: those between GPU memory and host
//! memory that is not pinned. An engine's call would wait for each of them.

use super::copy::copy_now;
use super::{CopyError, MemKind, MemMut, MemRef, Place, Region, Together, Transfer};
use crate::gpu::{Gpu, Pieces};
use std::sync::Arc;

/// Copies in two halves. The CPU copies between the host memory and blocks, an engine between
/// blocks and the GPU's memory. Each block takes one call. Each half continues from its own
/// position; a block may end in the middle of a piece.
pub struct ByWay {
    together: Together,
    by_cpu: PiecePosition,
    by_engine: PiecePosition,
    len: usize,
}

// SAFETY: its pointers lead into memory of the regions that it holds, which any thread may use.
// Only a thread with `&mut self` follows them.
unsafe impl Send for ByWay {}
// SAFETY: as above; through a shared reference nothing is copied.
unsafe impl Sync for ByWay {}

/// Position of a half: a piece, and an offset in it in bytes.
#[derive(Clone, Copy, Default)]
struct PiecePosition {
    piece: usize,
    within: usize,
}

impl PiecePosition {
    /// Returns the copies, or parts of them, for the next `len` bytes: target, source, offset in
    /// the block, length.
    fn next(
        &mut self,
        pieces: &Pieces,
        len: usize,
    ) -> impl Iterator<Item = (*mut u8, *const u8, usize, usize)> {
        let mut left = pieces.iter().skip(self.piece).peekable();
        let mut at = 0;
        std::iter::from_fn(move || {
            let &(to, from, whole) = left.peek().filter(|_| at < len)?;
            let (within, count) = (self.within, (whole - self.within).min(len - at));
            let one = (to.wrapping_add(within), from.wrapping_add(within), at, count);
            at += count;
            self.within += count;
            if self.within == whole {
                left.next();
                *self = Self { piece: self.piece + 1, within: 0 };
            }
            Some(one)
        })
    }
}

impl ByWay {
    /// Takes copies that [go](Together::goes_by_way) through blocks. `None` for others, whose
    /// memory the CPU may not touch on either side.
    pub fn of(together: Together) -> Option<Self> {
        let len = together.pieces().iter().map(|(.., len)| len).sum();
        let (by_cpu, by_engine) = (PiecePosition::default(), PiecePosition::default());
        together.goes_by_way().then_some(Self { together, by_cpu, by_engine, len })
    }

    /// Returns the bytes of all copies.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `true` if the bytes come from the GPU.
    pub fn is_from_gpu(&self) -> bool {
        self.together.kinds().0 == MemKind::Host
    }

    /// Returns the GPU whose engine does the other half.
    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        self.together.engine()
    }

    /// Makes the CPU copy the next `len` bytes: into a block, or, if they come from the GPU, out
    /// of it.
    ///
    /// # Errors
    /// The block is shorter than `len`, or is not host memory.
    pub fn copy_by_cpu(&mut self, block: &Region, len: usize) -> Result<(), CopyError> {
        let base = room(block, len)?;
        if !block.kind().is_host() {
            return Err(CopyError::Unknown { dst: block.kind(), src: MemKind::Host });
        }
        let from_gpu = self.is_from_gpu();
        for (to, from, at, count) in self.by_cpu.next(self.together.pieces(), len) {
            let within = base.wrapping_add(at);
            let (to, from) = if from_gpu { (to, within.cast_const()) } else { (within, from) };
            // SAFETY: each piece was checked against its region, which `together` holds, and the
            // block's bytes lie within that. Both are host memory, of which regions give out no
            // references.
            let (dst, src) = unsafe {
                (
                    MemMut::from_raw(to, count, Place::Host),
                    MemRef::from_raw(from, count, Place::Host),
                )
            };
            copy_now(dst, src)?;
        }
        Ok(())
    }

    /// Makes the engine begin the next `len` bytes: out of a block, or, if they come from the GPU,
    /// into it.
    ///
    /// # Errors
    /// The engine's, and that the block is shorter than `len`. Nothing is in flight then.
    pub fn start_by_engine(&mut self, block: &Region, len: usize) -> Result<Transfer, CopyError> {
        let base = room(block, len)?;
        let from_gpu = self.is_from_gpu();
        let ((dst, src), all) = (self.together.kinds(), self.together.pieces());
        let kinds = if from_gpu { (block.kind(), src) } else { (dst, block.kind()) };
        // An estimate: the average number of pieces in `len` bytes.
        let count = all.count().saturating_mul(len) / self.len.max(1) + 2;
        let mut pieces = Pieces::new(kinds.0, kinds.1, count);
        for (to, from, at, count) in self.by_engine.next(all, len) {
            let within = base.wrapping_add(at);
            let (to, from) = if from_gpu { (within, from) } else { (to, within.cast_const()) };
            pieces.push(to, from, count);
        }
        // SAFETY: each piece was checked against its region, and the block's bytes lie within
        // that. The transfer holds the block and the regions until the event has fired.
        let begun = unsafe { self.together.engine().copy_pieces(&pieces) };
        let event =
            begun.map_err(|cause| CopyError::Engine { dst: kinds.0, src: kinds.1, cause })?;
        let (dst, src) = self.together.held();
        let block = block.whole().into();
        let ends = if from_gpu { (block, src) } else { (dst, block) };
        Ok(Transfer::in_flight(ends.0, ends.1, event))
    }
}

/// Returns the first address of a block that has room for `len` bytes.
fn room(block: &Region, len: usize) -> Result<*mut u8, CopyError> {
    block.pointer(0, len).ok_or(CopyError::TooLong { len, room: block.len() })
}
