//! The one function that moves a user's bytes.
//!
//! It takes the kind of memory of both sides and decides who moves the bytes. The CPU does when
//! both sides are host memory, else the engine of a GPU that owns a side. Users' bytes are copied
//! nowhere else, and `cargo xtask test` fails on a `memcpy` in another file. A CPU's copy of
//! device memory is a crash, which the simulated GPU's memory shows in the project's tests.

#![expect(clippy::disallowed_methods, reason = "the one copy function")]

use super::{MemKind, MemMut, MemRef};
use crate::gpu::{GpuError, GpuEvent, Stream};

/// State of a copy that was started.
#[derive(Debug)]
pub enum Copied {
    /// The bytes are there.
    Done,
    /// An engine copies. When the event has fired, the bytes are there and both sides are free.
    Pending(GpuEvent),
}

/// Reason why no copy was started. Nothing was written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CopyError {
    /// The target is shorter than the source.
    #[error(
        "a copy of {len} bytes does not fit into {room}: give it more room, or copy fewer bytes"
    )]
    TooLong {
        /// Bytes of the source.
        len: usize,
        /// Bytes that the target has.
        room: usize,
    },
    /// A side's kind is not known, so neither the CPU nor an engine may touch it.
    #[error(
        "a copy from {src} to {dst} memory was refused: say what kind it is, or let the runtime \
         ask the driver"
    )]
    Unknown {
        /// Kind of the target.
        dst: MemKind,
        /// Kind of the source.
        src: MemKind,
    },
    /// A side is managed memory.
    #[error(
        "a copy from {src} to {dst} memory was refused: managed memory moves while it is used; \
         copy to or from memory of cudaMalloc or cudaMallocHost"
    )]
    Managed {
        /// Kind of the target.
        dst: MemKind,
        /// Kind of the source.
        src: MemKind,
    },
    /// The engine refused, or failed.
    #[error(
        "a copy from {src} to {dst} memory failed: {cause}; `carrack selftest` tests the GPUs' \
         engines"
    )]
    Engine {
        /// Kind of the target.
        dst: MemKind,
        /// Kind of the source.
        src: MemKind,
        /// The driver's error.
        cause: GpuError,
    },
}

/// Copies all of `src` to the start of `dst`.
///
/// # Safety
/// When the answer is [`Copied::Pending`], both ranges must stay as their views promise until the
/// event has fired, whatever their lifetimes say. [`Transfer`](super::Transfer) ensures that by
/// owning them. Another process or a NIC may write a range at the same time: each copied byte is
/// then any of its values.
///
/// # Races
/// Other threads, too, may use a range of a region at the same time, by this function or by
/// atomics. Both sides are accessed plainly all the same. The language asks for relaxed atomics
/// for each byte, which take 5 to 19 times as long from 64 bytes on. Atomics of words take twice
/// as long, and the language does not define how they meet accesses of other lengths. Instead the
/// promise of [`Region`](super::Region) rests on three facts. Each side is accessed once, nothing
/// here depends on the values, and no reference to the bytes exists.
#[inline(always)]
pub unsafe fn copy(dst: MemMut<'_>, src: MemRef<'_>) -> Result<Copied, CopyError> {
    if src.len > dst.len {
        return Err(CopyError::TooLong { len: src.len, room: dst.len });
    }
    if dst.place.is_host() && src.place.is_host() {
        // SAFETY: both views promise `src.len` valid bytes of host memory.
        unsafe { move_bytes(dst.ptr, src.ptr, src.len) };
        return Ok(Copied::Done);
    }
    // SAFETY: passed on from the caller.
    unsafe { copy_by_engine(dst, src) }
}

/// Copies like [`copy`], on a stream: behind the work that the stream has, and before later work.
///
/// # Errors
/// The errors of [`copy`], and [`CopyError::Unknown`] if neither side is GPU memory, or a side is
/// host memory that no engine reaches.
///
/// # Safety
/// As [`copy`].
pub unsafe fn copy_on(
    stream: &dyn Stream,
    dst: MemMut<'_>,
    src: MemRef<'_>,
) -> Result<Copied, CopyError> {
    let (to, from) = (dst.place.kind(), src.place.kind());
    if src.len > dst.len {
        return Err(CopyError::TooLong { len: src.len, room: dst.len });
    }
    if !goes_on_a_stream(to, from) {
        return Err(CopyError::Unknown { dst: to, src: from });
    }
    // SAFETY: the views promise valid ranges of the kinds given; the caller keeps them until the
    // event.
    let started = unsafe { stream.copy((dst.ptr, to), (src.ptr, from), src.len) };
    started.map(Copied::Pending).map_err(|cause| CopyError::Engine { dst: to, src: from, cause })
}

/// Returns `true` if a stream can do the copy: an engine reaches both sides by itself, and at
/// least one is a GPU's.
pub fn goes_on_a_stream(dst: MemKind, src: MemKind) -> bool {
    let reached = |kind| matches!(kind, MemKind::Device(_) | MemKind::Pinned);
    reached(dst) && reached(src) && !(dst.is_host() && src.is_host())
}

/// Copies all of `src` to the start of `dst`, and waits for an engine if one is needed.
///
/// For paths that are not hot and hold only borrowed memory; never called from `post` or
/// `progress`.
///
/// Never inlined, so that a loop that reads until a peer has written reads the memory each time.
#[inline(never)]
pub fn copy_and_wait(dst: MemMut<'_>, src: MemRef<'_>) -> Result<(), CopyError> {
    let (to, from) = (dst.place.kind(), src.place.kind());
    // SAFETY: this function does not return before the event has fired, so the borrows hold.
    match unsafe { copy(dst, src) }? {
        Copied::Done => Ok(()),
        Copied::Pending(event) => {
            event.wait().map_err(|cause| CopyError::Engine { dst: to, src: from, cause })
        }
    }
}

/// Copies between two places in host memory, within the call.
///
/// # Errors
/// [`CopyError::Unknown`] when a side is not host memory: that takes an engine, and time.
/// [`CopyError::TooLong`] when the target is shorter.
#[inline(always)]
pub fn copy_now(dst: MemMut<'_>, src: MemRef<'_>) -> Result<(), CopyError> {
    let (to, from, room) = (dst.place, src.place, dst.len);
    match try_copy_now(dst, src) {
        true => Ok(()),
        false if to.is_host() && from.is_host() => Err(CopyError::TooLong { len: src.len, room }),
        false => Err(CopyError::Unknown { dst: to.kind(), src: from.kind() }),
    }
}

/// Copies as [`copy_now`]. Returns `false` where that returns an error.
#[must_use = "nothing is copied if the result is `false`"]
#[inline(always)]
pub fn try_copy_now(dst: MemMut<'_>, src: MemRef<'_>) -> bool {
    let fits = dst.place.is_host() && src.place.is_host() && src.len <= dst.len;
    if fits {
        // SAFETY: both views promise `src.len` valid bytes of host memory.
        unsafe { move_bytes(dst.ptr, src.ptr, src.len) };
    }
    fits
}

/// Checks that the CPU or an engine can copy between memory of two kinds.
///
/// # Errors
/// [`CopyError::Unknown`], [`CopyError::Managed`]: such memory is not touched here.
#[inline]
pub fn check_kinds(dst: MemKind, src: MemKind) -> Result<(), CopyError> {
    if matches!((dst, src), (MemKind::Device(_), MemKind::Device(_))) {
        return Ok(());
    }
    if dst == MemKind::Unknown || src == MemKind::Unknown {
        return Err(CopyError::Unknown { dst, src });
    }
    if matches!(dst, MemKind::Managed(_)) || matches!(src, MemKind::Managed(_)) {
        return Err(CopyError::Managed { dst, src });
    }
    Ok(())
}

/// Starts a copy by the engine of the GPU that one side belongs to.
///
/// # Safety
/// As [`copy`].
#[cold]
unsafe fn copy_by_engine(dst: MemMut<'_>, src: MemRef<'_>) -> Result<Copied, CopyError> {
    let (to, from) = (dst.place.kind(), src.place.kind());
    check_kinds(to, from)?;
    if src.len == 0 {
        return Ok(Copied::Done);
    }
    let Some(engine) = dst.place.gpu().or(src.place.gpu()) else {
        return Err(CopyError::Unknown { dst: to, src: from });
    };
    // SAFETY: the views promise valid ranges of the kinds given; the caller keeps them until the
    // event.
    let started = unsafe { engine.copy((dst.ptr, to), (src.ptr, from), src.len) };
    started.map(Copied::Pending).map_err(|cause| CopyError::Engine { dst: to, src: from, cause })
}

/// Does as `memmove`, with the sizes of small messages spelled out: for these a call into the C
/// library costs more than the copy.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`.
#[inline(always)]
unsafe fn move_bytes(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: each arm reads all it needs before it writes, and only inside the two ranges. The
    // second of a pair of loads ends where the range ends.
    unsafe {
        match len {
            0 => {}
            8..=16 => {
                let head = src.cast::<u64>().read_unaligned();
                let tail = src.add(len - 8).cast::<u64>().read_unaligned();
                dst.cast::<u64>().write_unaligned(head);
                dst.add(len - 8).cast::<u64>().write_unaligned(tail);
            }
            17..=32 => {
                let head = src.cast::<[u64; 2]>().read_unaligned();
                let tail = src.add(len - 16).cast::<[u64; 2]>().read_unaligned();
                dst.cast::<[u64; 2]>().write_unaligned(head);
                dst.add(len - 16).cast::<[u64; 2]>().write_unaligned(tail);
            }
            4..=7 => {
                let head = src.cast::<u32>().read_unaligned();
                let tail = src.add(len - 4).cast::<u32>().read_unaligned();
                dst.cast::<u32>().write_unaligned(head);
                dst.add(len - 4).cast::<u32>().write_unaligned(tail);
            }
            1..=3 => {
                let (first, middle, last) =
                    (src.read(), src.add(len / 2).read(), src.add(len - 1).read());
                dst.write(first);
                dst.add(len / 2).write(middle);
                dst.add(len - 1).write(last);
            }
            _ => std::ptr::copy(src, dst, len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn miri_every_small_size_is_copied_exactly_and_nothing_next_to_it() {
        for len in 0..=70 {
            let src: Vec<u8> = (0..len).map(|at| at as u8 ^ 0xa5).collect();
            let mut dst = vec![0xee_u8; len + 16];
            copy_now(MemMut::host(&mut dst[8..8 + len]), MemRef::host(&src)).unwrap();
            assert_eq!(&dst[8..8 + len], &src[..]);
            assert!(dst[..8].iter().chain(&dst[8 + len..]).all(|&byte| byte == 0xee), "size {len}");
        }
    }

    #[test]
    fn a_target_that_is_too_short_is_refused_and_untouched() {
        let mut dst = [7_u8; 4];
        let refused = copy_now(MemMut::host(&mut dst), MemRef::host(&[1; 5]));
        assert!(matches!(refused, Err(CopyError::TooLong { len: 5, room: 4 })));
        assert_eq!(dst, [7; 4]);
    }

    #[test]
    fn memory_of_unknown_kind_is_never_touched() {
        let mut dst = [7_u8; 4];
        // SAFETY: the range is the array; only its kind is withheld.
        let unknown = unsafe { MemMut::from_raw(dst.as_mut_ptr(), 4, crate::mem::Place::Unknown) };
        assert!(matches!(
            copy_and_wait(unknown, MemRef::host(&[1; 4])),
            Err(CopyError::Unknown { .. })
        ));
        assert_eq!(dst, [7; 4]);
    }
}
