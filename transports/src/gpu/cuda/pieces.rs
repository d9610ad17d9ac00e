//! Many copies in one call of the driver, and rows at regular distances.
//!
//! `cuMemcpyBatchAsync` came with CUDA 12.8. In 13.0 it lost its index of the piece that failed,
//! under another name. A driver that has neither is given runs of rows at equal distances as one
//! call each, and all other copies one by one.

use super::copier::{Copier, Offered};
use super::device::CudaGpu;
use super::error::{INVALID_VALUE, MISSING_CALL, NOT_SUPPORTED};
use super::event::Fired;
use super::home::Home;
use super::lane::CopyDirection;
use super::rows::{Copy2d, Copy3d, CopyAttributes, Rows};
use super::sys::{DevicePtr, StreamHandle};
use crate::gpu::pieces::Run;
use crate::gpu::{GpuError, GpuEvent, Grid, Pieces};
use crate::mem::MemKind;
use std::sync::Arc;

const NEW: &str = "cuMemcpyBatchAsync_v2";
const OLD: &str = "cuMemcpyBatchAsync";

/// CUDA's names of the legacy default stream, which takes no batch: the batch goes to another
/// stream.
const LEGACY_STREAMS: [usize; 2] = [0, 1];

/// Destination of copies.
type CopyLane<'a> = (&'a Home, CopyDirection, StreamHandle);

impl CudaGpu {
    /// Starts many copies: on a stream of the user's, or on the library's own for their direction.
    ///
    /// # Safety
    /// As `Gpu::copy_pieces`.
    pub(super) unsafe fn copy_pieces_on(
        &self,
        users: Option<StreamHandle>,
        pieces: &Pieces,
    ) -> Result<GpuEvent, GpuError> {
        if pieces.is_empty() {
            return Ok(GpuEvent::new(Arc::new(Fired)));
        }
        let offer = |copier: &Copier, home: &Home| copier.offer_many(self, home, pieces);
        self.give_copies(users, pieces.kinds(), offer, |lane| {
            // SAFETY: the caller's promise.
            unsafe { self.give_pieces(lane, pieces) }
        })
    }

    /// Starts the copy of rows, and planes of rows.
    ///
    /// # Safety
    /// As `Gpu::copy_grid`.
    pub(super) unsafe fn copy_grid_on(
        &self,
        users: Option<StreamHandle>,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        if grid.is_empty() {
            return Ok(GpuEvent::new(Arc::new(Fired)));
        }
        let [bytes, rows, planes] = grid.count;
        if rows == 1 && planes == 1 {
            // SAFETY: the caller's promise, of the one row that there is.
            return unsafe { self.copy_on(users, dst, src, bytes) };
        }
        let kinds = (dst.1, src.1);
        let no_copier = |_: &Copier, _: &Home| Offered::Not;
        self.give_copies(users, kinds, no_copier, |lane| {
            // SAFETY: the caller's promise.
            match unsafe { give_grid(lane, dst, src, grid) } {
                // The pitch may exceed the driver's limit, the device may have no access to the
                // memory, or the driver may lack the call. Row by row, each of these copies is
                // possible.
                Err(refused) if is_to_be_tried_otherwise(&refused) => {
                    tracing::debug!(%refused, ?grid, "row by row");
                    let mut each = Pieces::new(kinds.0, kinds.1, rows.saturating_mul(planes));
                    for (to, from) in grid.rows() {
                        each.push(dst.0.wrapping_add(to), src.0.wrapping_add(from), bytes);
                    }
                    // SAFETY: the same bytes.
                    unsafe { self.give_pieces(lane, &each) }
                }
                given => given,
            }
        })
    }

    /// Gives a stream many copies.
    ///
    /// # Safety
    /// As `Gpu::copy_pieces`.
    unsafe fn give_pieces(&self, lane: CopyLane<'_>, pieces: &Pieces) -> Result<(), GpuError> {
        let ends = pieces.kinds();
        // For ordinary host memory the batch call may wait. The single calls say so, and are used.
        let is_pageable = ends.0 == MemKind::Host || ends.1 == MemKind::Host;
        let mut is_begun = false;
        if pieces.count() > 1 && !is_pageable && self.no_batches.get().is_none() {
            // SAFETY: the caller's promise.
            let given = unsafe {
                if LEGACY_STREAMS.contains(&lane.2.0) {
                    give_batch_to_stand_in(lane, pieces)
                } else {
                    give_batch(lane, pieces)
                }
            };
            match given {
                // Copies that the batch has begun are done once more behind it, on the same
                // stream.
                Err(refused) if is_to_be_tried_otherwise(&refused) => {
                    tracing::debug!(%refused, ?pieces, "one by one");
                    is_begun = refused.code != MISSING_CALL;
                    if refused.code != INVALID_VALUE {
                        let _ = self.no_batches.set(refused);
                    }
                }
                given => return given.inspect_err(|_| settle(lane)),
            }
        }
        for run in pieces.runs() {
            // SAFETY: the caller's promise, of these of the copies.
            let given = unsafe { self.give_run(lane, ends, &run, &mut is_begun) };
            given.inspect_err(|_| {
                if is_begun {
                    settle(lane);
                }
            })?;
        }
        Ok(())
    }

    /// Gives a stream copies of one length at equal distances. `is_begun` is set once some copies
    /// are in flight.
    ///
    /// # Safety
    /// As `Gpu::copy`, of each of them.
    unsafe fn give_run(
        &self,
        lane: CopyLane<'_>,
        (to, from): (MemKind, MemKind),
        run: &Run,
        is_begun: &mut bool,
    ) -> Result<(), GpuError> {
        let (dst, src) = ((run.to, to), (run.from, from));
        if run.rows > 1 {
            let grid = Grid {
                count: [run.len, run.rows, 1],
                dst_pitch: [run.dst_pitch, 0],
                src_pitch: [run.src_pitch, 0],
            };
            // SAFETY: the caller's promise.
            match unsafe { give_grid(lane, dst, src, &grid) } {
                Err(refused) if is_to_be_tried_otherwise(&refused) => {}
                given => {
                    *is_begun |= given.is_ok();
                    return given;
                }
            }
        }
        for row in 0..run.rows {
            let (to, from) = (
                run.to.wrapping_add(row * run.dst_pitch),
                run.from.wrapping_add(row * run.src_pitch),
            );
            // SAFETY: the caller's promise.
            unsafe { self.copy_one(lane, (to, dst.1), (from, src.1), run.len) }?;
            *is_begun = true;
        }
        Ok(())
    }
}

/// Waits for all work of a stream, because the caller will free what its copies touch. Only after
/// an error, since the stream itself may wait for a word.
fn settle((home, _, stream): CopyLane<'_>) {
    // SAFETY: a stream of this context.
    if let Err(error) = unsafe { home.calls().stream_synchronize(stream) } {
        tracing::debug!(%error, "after copies of which some were refused");
    }
}

/// Returns `true` if the refusal may be due to the call, and not to the copies.
fn is_to_be_tried_otherwise(error: &GpuError) -> bool {
    [MISSING_CALL, NOT_SUPPORTED, INVALID_VALUE].contains(&error.code)
}

/// Gives many copies by one call to a second stream, behind all work of the legacy default stream,
/// which then waits for them.
///
/// # Safety
/// As `Gpu::copy_pieces`; the context is current.
#[cold]
unsafe fn give_batch_to_stand_in(
    (home, direction, legacy): CopyLane<'_>,
    pieces: &Pieces,
) -> Result<(), GpuError> {
    let stand_in = home.stand_in()?;
    home.put_behind(stand_in, legacy)?;
    // SAFETY: the caller's promise.
    let given = unsafe { give_batch((home, direction, stand_in), pieces) };
    // Also after a refusal: some copies may have begun, and will be done once more.
    let is_behind = home.put_behind(legacy, stand_in);
    if is_behind.is_err() {
        settle((home, direction, stand_in));
    }
    given.and(is_behind)
}

/// Gives a stream many copies by one call.
///
/// # Safety
/// As `Gpu::copy_pieces`; the context is current.
unsafe fn give_batch((home, _, stream): CopyLane<'_>, pieces: &Pieces) -> Result<(), GpuError> {
    let to: Vec<DevicePtr> = pieces.iter().map(|(to, ..)| to as DevicePtr).collect();
    let from: Vec<DevicePtr> = pieces.iter().map(|(_, from, _)| from as DevicePtr).collect();
    let lens: Vec<usize> = pieces.iter().map(|(.., len)| len).collect();
    let (to, from) = (to.as_ptr(), from.as_ptr());
    // One sort of copies, from index 0 on.
    let (attributes, begin) = ([CopyAttributes::IN_ORDER], [0_usize]);
    let (sorts, first) = (attributes.as_ptr(), begin.as_ptr());
    // SAFETY: three lists of equal length, and the caller's promise about what they name. They are
    // read before the call returns.
    match unsafe {
        home.calls().memcpy_batch_async(
            to,
            from,
            lens.as_ptr(),
            lens.len(),
            sorts,
            first,
            1,
            stream,
        )
    } {
        Err(missing) if missing.code == MISSING_CALL => {}
        given => return given,
    }
    let mut failed = usize::MAX;
    // SAFETY: as above; the place for the answer is ours.
    unsafe {
        home.calls().memcpy_batch_async_first(
            to,
            from,
            lens.as_ptr(),
            lens.len(),
            sorts,
            first,
            1,
            &raw mut failed,
            stream,
        )
    }
    .map_err(|error| match lens.get(failed) {
        Some(len) => {
            GpuError { hint: format!("piece {failed}, of {len} bytes: {}", error.hint), ..error }
        }
        None => error,
    })
}

/// Gives a stream rows, and planes of rows, by one call.
///
/// # Safety
/// As `Gpu::copy_grid`; the context is current.
unsafe fn give_grid(
    (home, _, stream): CopyLane<'_>,
    dst: (*mut u8, MemKind),
    src: (*const u8, MemKind),
    grid: &Grid,
) -> Result<(), GpuError> {
    let (calls, Grid { count, dst_pitch, src_pitch }) = (home.calls(), *grid);
    let rows = |addr: usize, kind: MemKind, [pitch, _]: [usize; 2], height| Rows {
        addr,
        is_host: kind.is_host(),
        pitch,
        height,
    };
    let (to, from) = (dst.0 as usize, src.0 as usize);
    let [bytes, height, planes] = count;
    // With planes of one row, or one plane, one distance remains: that of rows.
    if height == 1 || planes == 1 {
        let of = |pitch: [usize; 2]| if planes == 1 { pitch } else { [pitch[1], 0] };
        let copy = Copy2d::of(
            rows(to, dst.1, of(dst_pitch), 0),
            rows(from, src.1, of(src_pitch), 0),
            [bytes, height.max(planes)],
        );
        // SAFETY: the caller's promise.
        return unsafe { calls.memcpy_2d_async(&raw const copy, stream) };
    }
    let heights = |pitch: [usize; 2]| {
        (pitch[1].is_multiple_of(pitch[0])).then_some(pitch[1] / pitch[0].max(1))
    };
    let (Some(dst_height), Some(src_height)) = (heights(dst_pitch), heights(src_pitch)) else {
        let hint = format!("planes are no whole number of rows apart: {grid:?}");
        return Err(super::error::because("cuMemcpy3DAsync", NOT_SUPPORTED, hint));
    };
    let copy = Copy3d::of(
        rows(to, dst.1, dst_pitch, dst_height),
        rows(from, src.1, src_pitch, src_height),
        count,
    );
    // SAFETY: the caller's promise.
    unsafe { calls.memcpy_3d_async(&raw const copy, stream) }
}

/// Describes in words how grouped copies are given to the driver.
pub(super) fn how(gpu: &CudaGpu) -> String {
    let missing = gpu.shared.calls.missing();
    let otherwise = "runs of rows at equal distances by one call of cuMemcpy2DAsync each, all \
        others one by one";
    match gpu.no_batches.get() {
        _ if missing.contains(&NEW) && missing.contains(&OLD) => {
            let path = &gpu.shared.calls.path;
            format!("{otherwise}: {path} has no {OLD}, which drivers of CUDA 12.8 and later have")
        }
        Some(why) => format!("{otherwise}: {why}"),
        None if missing.contains(&NEW) => format!("by one call of {OLD}, however many they are"),
        None => format!("by one call of {NEW}, however many they are"),
    }
}
