//! Copies between regions that an engine is given together.

use super::{
    Buffer, CopyError, MemKind, Region, Strided, StridedError, Transfer, copy::check_kinds,
};
use crate::gpu::{Gpu, GpuError, GpuEvent, Pieces, Stream};
use std::ops::Range;
use std::sync::Arc;

/// Copies between parts of regions, of one kind of memory on each side, that are begun together.
/// They become one [`Transfer`], which holds all of the regions. Copies that [go by way of
/// blocks](Self::goes_by_way) become one for each block.
pub struct Together {
    dst: Side,
    src: Side,
    engine: Arc<dyn Gpu>,
    pieces: Pieces,
}

/// Parts of two regions of a [`Together`], for many copies between them.
pub struct Between<'t> {
    pieces: &'t mut Pieces,
    to: (*mut u8, usize),
    from: (*mut u8, usize),
}

impl Between<'_> {
    /// Adds a copy for each of `what`: `place` returns its target, its source and its length in
    /// bytes. Returns `true` if all lie within the parts; else none is added.
    #[inline(always)]
    pub fn extend<T>(
        &mut self,
        what: &[T],
        place: impl FnMut(&T) -> (usize, usize, usize),
    ) -> bool {
        self.pieces.extend(self.to, (self.from.0.cast_const(), self.from.1), what, place)
    }
}

/// The regions of one side. Pieces of one region mostly come one after the other, or those of a
/// few regions alternate, so only the last few are compared.
#[derive(Clone)]
struct Side {
    kind: MemKind,
    regions: Vec<Region>,
}

impl Side {
    fn of(region: &Region) -> Self {
        Self { kind: region.kind(), regions: vec![region.clone()] }
    }

    /// Holds a region and returns `true`, if it is of this side's kind: pieces are copied as
    /// memory of that kind.
    #[inline]
    fn hold(&mut self, region: &Region) -> bool {
        if self.regions.iter().rev().take(8).any(|last| last.is(region)) {
            return true;
        }
        let takes = region.kind() == self.kind;
        if takes {
            self.regions.push(region.clone());
        }
        takes
    }

    fn into_buffer(mut self) -> Buffer {
        match (self.regions.pop(), self.regions.is_empty()) {
            (Some(one), true) => one.whole().into(),
            (last, _) => {
                self.regions.extend(last);
                self.regions
                    .into_iter()
                    .map(|region| region.whole().into())
                    .collect::<Vec<Buffer>>()
                    .into()
            }
        }
    }
}

/// Returns the engine that copies between two regions, if an engine does. It reaches both by
/// itself, or host memory that is not pinned by way of blocks.
fn engine<'a>(dst: &'a Region, src: &'a Region) -> Option<&'a Arc<dyn Gpu>> {
    let reached = |region: &Region| {
        matches!(region.kind(), MemKind::Device(_) | MemKind::Pinned | MemKind::Host)
    };
    let gpu =
        |region: &'a Region| region.gpu().filter(|_| matches!(region.kind(), MemKind::Device(_)));
    gpu(dst).or(gpu(src)).filter(|_| reached(dst) && reached(src))
}

/// Returns `true` if an engine does not reach a side by itself: a call for it would wait.
fn is_pageable((dst, src): (MemKind, MemKind)) -> bool {
    dst == MemKind::Host || src == MemKind::Host
}

impl Together {
    /// Makes an empty set with room for `count` copies, for regions such as these. `None` where no
    /// engine takes them together: between host memory the CPU copies.
    pub fn between(dst: &Region, src: &Region, count: usize) -> Option<Self> {
        let engine = engine(dst, src)?.clone();
        let pieces = Pieces::new(dst.kind(), src.kind(), count);
        Some(Self { dst: Side::of(dst), src: Side::of(src), engine, pieces })
    }

    /// Returns `true` if copies between these two regions fit into the set.
    pub fn takes(&self, dst: &Region, src: &Region) -> bool {
        (dst.kind(), src.kind()) == (self.dst.kind, self.src.kind)
            && engine(dst, src).is_some_and(|engine| Arc::ptr_eq(engine, &self.engine))
    }

    /// Adds a copy of `len` bytes from an offset in a region to an offset in another, for regions
    /// that it [`takes`](Self::takes). Returns `true` if both parts lie within their regions, and
    /// these are of the set's kinds; else the copy is left out.
    #[inline]
    pub fn push(&mut self, dst: (&Region, usize), src: (&Region, usize), len: usize) -> bool {
        let (Some(to), Some(from)) = (dst.0.pointer(dst.1, len), src.0.pointer(src.1, len)) else {
            return false;
        };
        let takes = self.dst.hold(dst.0) && self.src.hold(src.0);
        if takes {
            self.pieces.push(to, from, len);
        }
        takes
    }

    /// Prepares many copies between parts of two regions, which it [`takes`](Self::takes). Offsets
    /// count from the beginnings of the parts. `None` when a part is not inside its region, or a
    /// region is of another kind.
    #[inline]
    pub fn between_parts(
        &mut self,
        dst: (&Region, Range<usize>),
        src: (&Region, Range<usize>),
    ) -> Option<Between<'_>> {
        let part = |(region, range): (&Region, Range<usize>)| {
            let len = range.end.checked_sub(range.start)?;
            Some((region.pointer(range.start, len)?, len))
        };
        let (to, from) = (part((dst.0, dst.1))?, part((src.0, src.1))?);
        let takes = self.dst.hold(dst.0) && self.src.hold(src.0);
        takes.then_some(Between { pieces: &mut self.pieces, to, from })
    }

    /// Returns the number of copies.
    pub fn count(&self) -> usize {
        self.pieces.count()
    }

    /// Returns the kinds of memory of the targets and of the sources.
    pub fn kinds(&self) -> (MemKind, MemKind) {
        self.pieces.kinds()
    }

    /// Returns `true` if a side is host memory that is not pinned, so that an engine's calls would
    /// wait: such copies are for [`ByWay`](super::ByWay).
    pub fn goes_by_way(&self) -> bool {
        is_pageable(self.kinds())
    }

    pub(super) fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    pub(super) fn engine(&self) -> &Arc<dyn Gpu> {
        &self.engine
    }

    /// Returns the regions of both sides, targets first, for one of several transfers to hold.
    pub(super) fn held(&self) -> (Buffer, Buffer) {
        (self.dst.clone().into_buffer(), self.src.clone().into_buffer())
    }

    /// Begins all copies. The call may wait if they [go by way of blocks](Self::goes_by_way).
    ///
    /// # Errors
    /// The engine's. Nothing is in flight then.
    pub fn start(self) -> Result<Transfer, CopyError> {
        // SAFETY: each piece was checked against its region; the transfer holds the regions until
        // the event has fired.
        let begun = unsafe { self.engine.copy_pieces(&self.pieces) };
        self.begun(begun)
    }

    /// Begins all copies on a stream: behind the work that the stream has, and before later work.
    ///
    /// # Errors
    /// The errors of [`start`](Self::start).
    pub fn start_on(self, stream: &dyn Stream) -> Result<Transfer, CopyError> {
        // SAFETY: as in `start`.
        let begun = unsafe { stream.copy_pieces(&self.pieces) };
        self.begun(begun)
    }

    fn begun(self, begun: Result<GpuEvent, GpuError>) -> Result<Transfer, CopyError> {
        let (dst, src) = self.pieces.kinds();
        let event = begun.map_err(|cause| CopyError::Engine { dst, src, cause })?;
        Ok(Transfer::in_flight(self.dst.into_buffer(), self.src.into_buffer(), event))
    }
}

/// Reason why a strided block was not copied.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StridedRefused {
    /// The block is invalid, or not within its region.
    #[error(transparent)]
    Strided(#[from] StridedError),
    /// The engine refused.
    #[error(transparent)]
    Copy(#[from] CopyError),
}

/// Begins the copy of a strided block of one region to one of the same shape of another, by a GPU's
/// engine. It is on `stream` if one is given. `None` where no engine takes it: as
/// [`Together::between`], and for host memory that is not pinned, whose rows are copied together.
///
/// # Errors
/// See [`StridedRefused`]. Nothing is in flight then.
pub fn start_strided(
    (dst, to): (&Region, &Strided),
    (src, from): (&Region, &Strided),
    stream: Option<&dyn Stream>,
) -> Result<Option<Transfer>, StridedRefused> {
    let grid = Strided::grid(to, from)?;
    to.check(dst.len())?;
    from.check(src.len())?;
    check_kinds(dst.kind(), src.kind())?;
    let Some(engine) = engine(dst, src).filter(|_| !is_pageable((dst.kind(), src.kind()))) else {
        return Ok(None);
    };
    let (Some(target), Some(source)) = (dst.pointer(to.offset, 0), src.pointer(from.offset, 0))
    else {
        return Ok(None);
    };
    let ends = ((target, dst.kind()), (source.cast_const(), src.kind()));
    // SAFETY: every row lies within its region, which the two checks have said; the transfer holds
    // the regions until the event has fired.
    let begun = unsafe {
        match stream {
            Some(stream) => stream.copy_grid(ends.0, ends.1, &grid),
            None => engine.copy_grid(ends.0, ends.1, &grid),
        }
    };
    let (kind, other) = (dst.kind(), src.kind());
    let event = begun.map_err(|cause| CopyError::Engine { dst: kind, src: other, cause })?;
    Ok(Some(Transfer::in_flight(dst.whole().into(), src.whole().into(), event)))
}
