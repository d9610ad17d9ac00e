//! The memory: a sealed memfd with a ring, its chunks, and the flags between the two sides.
//!
//! ```text
//!    0  freed      written by the receiver: ring slots that it has freed
//!   64  attention  written by the receiver: it looks by itself, or not
//!  128  chunks     one word each, written by the receiver: times that it has returned the chunk
//!  384  access     revocable right of the sender to copy from and to the receiver's memory
//!  512  splits     words for messages in the other direction that both sides copy, 64 bytes each
//! 1024  slots      written by the sender, 64 bytes each
//! page  bytes      of the chunks, written by the sender
//! ```
//!
//! It holds offsets, never addresses, and each reader checks them. It is sealed against shrinking,
//! growing and further sealing. The receiver checks the seals and the size before it maps, so no
//! peer can make a load of this process fault. Nothing of it has a name in `/dev/shm`.

#![expect(unsafe_code, reason = "memory that other processes write")]

use crate::contract::{Lender, Splits};
use crate::fork::Owner;
use crate::mem::memfd::{Mapping, map_memfd, sealed_memfd};
use crate::mem::prefetch::{prefetch, prefetch_to_write};
use crate::mem::{MapError, MemMut, MemRef, Place};
use crate::sync::attention::Attention;
use crate::sync::bells::Bells;
use crate::sync::ring::{BODY, Slots};
use crate::sync::{Revocable, Split};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const FREED: usize = 0;
const ATTENTION: usize = 64;
const CHUNK_WORDS: usize = 128;
const ACCESS: usize = CHUNK_WORDS + MAX_CHUNKS as usize * 4;
const SPLITS: usize = 512;
const SLOTS: usize = SPLITS + MAX_SPLITS as usize * 64;
const PAGE: usize = 4096;

/// Largest number of chunks of a segment: the bits of a word, and the room for the chunks' words.
pub const MAX_CHUNKS: u32 = 64;

/// Messages that both sides can copy at once.
pub(super) const MAX_SPLITS: u32 = 8;

/// Sizes of a segment's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Slots of 64 bytes: a power of two, 8 to 65536.
    pub slots: u32,
    /// Chunks for middle-sized messages, 1 to 64.
    pub chunks: u32,
    /// Bytes of a chunk: a multiple of 64, up to 1 MiB.
    pub chunk_size: u32,
}

impl Geometry {
    /// Checks that a segment can have these sizes. Also applied to numbers that a peer sent.
    pub fn check(self) -> Result<(), String> {
        let Self { slots, chunks, chunk_size } = self;
        if !slots.is_power_of_two() || !(8..=65536).contains(&slots) {
            return Err(format!(
                "{slots} ring slots: a power of two from 8 to 65536 is needed (CARRACK_SHM_SLOTS)"
            ));
        }
        if !(1..=MAX_CHUNKS).contains(&chunks) {
            return Err(format!(
                "{chunks} chunks: 1 to {MAX_CHUNKS} are possible (CARRACK_SHM_CHUNKS)"
            ));
        }
        if chunk_size == 0 || !chunk_size.is_multiple_of(64) || chunk_size > 1 << 20 {
            return Err(format!(
                "chunks of {chunk_size} bytes: a multiple of 64 up to 1 MiB is needed \
                (CARRACK_PACKET_SIZE)"
            ));
        }
        Ok(())
    }

    fn chunks_at(self) -> usize {
        (SLOTS + self.slots as usize * 64).next_multiple_of(PAGE)
    }

    fn bytes(self) -> usize {
        (self.chunks_at() + self.chunks as usize * self.chunk_size as usize).next_multiple_of(PAGE)
    }
}

/// One direction between two devices.
#[derive(Debug)]
pub struct Segment {
    mapping: Mapping,
    geometry: Geometry,
    /// The process that is its sender or its receiver. A fork of that process writes nothing here.
    owner: Owner,
}

impl Segment {
    /// Makes a fresh segment. Returns it with the descriptor for the receiver.
    ///
    /// # Errors
    /// `INVAL`: the sizes are impossible, see [`Geometry::check`]. Else the system has no memory,
    /// or no descriptor, left.
    pub fn create(geometry: Geometry) -> Result<(Arc<Self>, OwnedFd), Errno> {
        geometry.check().map_err(|_| Errno::INVAL)?;
        let fd = sealed_memfd("carrack-segment", geometry.bytes())?;
        let mapping = Mapping::of(fd.as_fd(), geometry.bytes())?;
        Ok((Arc::new(Self { mapping, geometry, owner: Owner::this_process() }), fd))
    }

    /// Maps a sender's segment.
    ///
    /// # Errors
    /// The defect, in words for the users of both sides, or the resource that this process lacks.
    pub fn open(fd: &OwnedFd, geometry: Geometry) -> Result<Arc<Self>, MapError> {
        geometry.check()?;
        let mapping = map_memfd(fd, geometry.bytes())?;
        Ok(Arc::new(Self { mapping, geometry, owner: Owner::this_process() }))
    }

    /// Returns the sizes of its parts.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the flag by which the receiver says that it looks by itself.
    #[inline(always)]
    pub fn attention(&self) -> &Attention {
        // SAFETY: in the first page, aligned; any value is an atomic's.
        unsafe { self.mapping.at(ATTENTION) }
    }

    /// Returns the sender's right to have the kernel copy from and to the receiver's memory.
    pub fn access(&self) -> &Revocable {
        const { assert!(ACCESS.is_multiple_of(64) && ACCESS + 64 <= SPLITS) };
        // SAFETY: in the first page, aligned; any value is an atomic's.
        unsafe { self.mapping.at(ACCESS) }
    }

    /// Returns the number of times that a chunk was returned. `None` when there is no such chunk.
    fn returns(&self, chunk: u32) -> Option<&AtomicU32> {
        // SAFETY: below the geometry's number, which is at most what the words have room for.
        (chunk < self.geometry.chunks)
            .then(|| unsafe { self.mapping.at(CHUNK_WORDS + chunk as usize * 4) })
    }

    /// Returns, for the sender, the set of chunks, one bit each, that have come back as often as
    /// they were `lent`. Only the receiver writes these counts, so that sending a chunk touches no
    /// line that the receiver writes.
    pub fn returned(&self, lent: &[u32; MAX_CHUNKS as usize]) -> u64 {
        (0..self.geometry.chunks).zip(lent).fold(0, |back, (chunk, &lent)| {
            // Acquire: the receiver's reads of the chunk have ended before this side writes it
            // again.
            let is_back =
                self.returns(chunk).is_some_and(|count| count.load(Ordering::Acquire) == lent);
            back | u64::from(is_back) << chunk
        })
    }

    fn chunk_ptr(&self, chunk: u32) -> *mut u8 {
        let at = self.geometry.chunks_at() + chunk as usize * self.geometry.chunk_size as usize;
        // SAFETY: within the mapping, for a chunk below the geometry's number.
        unsafe { self.mapping.base.add(at).as_ptr() }
    }

    /// Returns a chunk's bytes, for the sender. `None` when there is no such chunk.
    pub fn chunk_mut(&self, chunk: u32) -> Option<MemMut<'_>> {
        // SAFETY: the chunk lies within the mapping; no references into it exist on either side.
        (chunk < self.geometry.chunks).then(|| unsafe {
            MemMut::from_raw(self.chunk_ptr(chunk), self.geometry.chunk_size as usize, Place::Host)
        })
    }

    /// Prefetches the first lines of bytes that will be read soon, all at once: they are in the
    /// sender's cache. The copy prefetches the later ones by itself.
    pub(super) fn will_read(&self, ptr: *const u8, len: usize) {
        const FIRST: usize = 1024;
        prefetch(ptr, len.min(FIRST));
    }

    /// Prefetches the lines of a chunk that will be written soon, from the receiver's cache. Those
    /// of 8 KiB take an eighth of its message's time off its way.
    #[inline(always)]
    pub(super) fn will_fill(&self, chunk: u32, len: usize) {
        if chunk < self.geometry.chunks {
            let len = len.min(self.geometry.chunk_size as usize);
            prefetch_to_write(self.chunk_ptr(chunk), len);
        }
    }

    /// Returns the first `len` bytes of a chunk, for the receiver. `None` when the sender named a
    /// chunk or a length that does not exist.
    pub fn chunk(&self, chunk: u32, len: u32) -> Option<MemRef<'_>> {
        let there = chunk < self.geometry.chunks && len <= self.geometry.chunk_size;
        // SAFETY: checked to lie within the mapping.
        there.then(|| unsafe { MemRef::from_raw(self.chunk_ptr(chunk), len as usize, Place::Host) })
    }
}

impl Lender for Segment {
    fn give_back(&self, chunk: u32) {
        if !self.owner.is_here() {
            return;
        }
        if let Some(count) = self.returns(chunk) {
            // Release: this side's reads have ended before the sender may write again. A chunk is
            // lent once at a time, so no other thread counts.
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
    }
}

impl Splits for Segment {
    fn count(&self) -> u32 {
        MAX_SPLITS
    }

    fn get(&self, number: u32) -> Option<&Split> {
        if !self.owner.is_here() {
            return None;
        }
        // SAFETY: below the number that there is room for, in the first page, 64-aligned; any
        // value is an atomic's.
        (number < MAX_SPLITS).then(|| unsafe { self.mapping.at(SPLITS + number as usize * 64) })
    }
}

/// The ring of a segment. Clones are the same ring.
#[derive(Clone, Debug)]
pub struct SegmentSlots {
    /// The first slot, and the number of slots less one. Here and not behind the segment's
    /// pointer, because every look at the ring needs them.
    first: NonNull<u8>,
    mask: usize,
    segment: Arc<Segment>,
}

// SAFETY: the pointer leads into the segment, which may be used from any thread and is kept alive
// here.
unsafe impl Send for SegmentSlots {}
// SAFETY: as above.
unsafe impl Sync for SegmentSlots {}

impl SegmentSlots {
    /// Makes the ring of `segment`.
    pub fn of(segment: Arc<Segment>) -> Self {
        // SAFETY: the slots lie within the mapping.
        let first = unsafe { segment.mapping.base.add(SLOTS) };
        Self { first, mask: segment.geometry.slots as usize - 1, segment }
    }

    #[inline(always)]
    fn slot(&self, at: usize) -> NonNull<u8> {
        // SAFETY: the slots lie within the mapping, and `at` is cut to their number, a power of
        // two.
        unsafe { self.first.add((at & self.mask) * 64) }
    }
}

// SAFETY: a slot's place depends on its number alone, and is inside the mapping for every number.
// The number of slots was checked to be a power of two. A slot has 64 bytes, eight of them the
// control word.
unsafe impl Slots for SegmentSlots {
    fn capacity(&self) -> usize {
        self.mask + 1
    }

    #[inline(always)]
    fn control(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the slot starts with its control word, 64-aligned.
        unsafe { self.slot(at).cast::<AtomicU64>().as_ref() }
    }

    #[inline(always)]
    fn freed(&self) -> &AtomicU64 {
        // SAFETY: in the first page, aligned.
        unsafe { self.segment.mapping.at(FREED) }
    }

    #[inline(always)]
    unsafe fn write(&self, at: usize, f: impl FnOnce(*mut u8)) {
        const { assert!(BODY == 56) };
        // SAFETY: eight bytes into the slot's 64.
        f(unsafe { self.slot(at).add(8).as_ptr() });
    }

    #[inline(always)]
    fn will_write(&self, at: usize) {
        // The receiver's core read the line last. A prefetch keeps its transfer out of the path of
        // the message that will be written into it.
        prefetch_to_write(self.slot(at).as_ptr(), 64);
    }

    #[inline(always)]
    fn will_read(&self, at: usize) {
        prefetch(self.slot(at).as_ptr(), 64);
    }

    #[inline(always)]
    unsafe fn read(&self, at: usize, f: impl FnOnce(*const u8)) {
        // SAFETY: as above.
        f(unsafe { self.slot(at).add(8).as_ptr() });
    }
}

/// The page by which senders wake a receiver: its bells, and a flag that it sleeps.
#[derive(Debug)]
pub struct BellPage(Mapping);

#[repr(C)]
struct BellPageLayout {
    bells: Bells,
    asleep: AtomicU32,
}

impl BellPage {
    /// Makes a fresh page. Returns it with the descriptor for senders.
    pub fn create() -> Result<(Self, OwnedFd), Errno> {
        let fd = sealed_memfd("carrack-bells", PAGE)?;
        Ok((Self(Mapping::of(fd.as_fd(), PAGE)?), fd))
    }

    /// Maps a receiver's page.
    pub fn open(fd: &OwnedFd) -> Result<Self, MapError> {
        map_memfd(fd, PAGE).map(Self)
    }

    fn layout(&self) -> &BellPageLayout {
        const { assert!(size_of::<BellPageLayout>() <= PAGE) };
        // SAFETY: it fits into the page, which is aligned for anything; any bytes are atomics.
        unsafe { self.0.at(0) }
    }

    /// Returns the bells.
    #[inline(always)]
    pub fn bells(&self) -> &Bells {
        &self.layout().bells
    }

    /// Returns the flag that is not 0 while the receiver sleeps: the sender that turns it to 0
    /// must write the receiver's eventfd.
    pub fn asleep(&self) -> &AtomicU32 {
        &self.layout().asleep
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    const SMALL: Geometry = Geometry { slots: 8, chunks: 2, chunk_size: 128 };

    #[test]
    fn a_segment_of_no_possible_size_is_not_made() {
        let wrong = [
            Geometry { slots: 0, ..SMALL },
            Geometry { slots: 12, ..SMALL },
            Geometry { chunks: 65, ..SMALL },
            Geometry { chunk_size: 100, ..SMALL },
        ];
        for geometry in wrong {
            assert_eq!(Segment::create(geometry).unwrap_err(), Errno::INVAL, "{geometry:?}");
        }
    }

    #[test]
    fn a_segment_whose_size_or_seals_are_wrong_is_not_mapped() {
        let (_, fd) = Segment::create(SMALL).unwrap();
        assert!(Segment::open(&fd, SMALL).is_ok());
        let error = Segment::open(&fd, Geometry { chunks: 64, ..SMALL }).unwrap_err();
        assert!(error.to_string().contains("bytes long"), "{error}");
        let unsealed =
            rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, SMALL.bytes() as u64).unwrap();
        assert!(Segment::open(&unsealed, SMALL).unwrap_err().to_string().contains("sealed"));
        let file = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(Segment::open(&file, SMALL).unwrap_err().to_string().contains("not a memfd"));
    }

    #[test]
    fn a_sealed_segment_cannot_be_shrunk_under_its_receiver() {
        let (_, fd) = Segment::create(SMALL).unwrap();
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
    }

    #[test]
    fn numbers_that_no_segment_has_are_refused() {
        for bad in [
            Geometry { slots: 0, ..SMALL },
            Geometry { slots: 4, ..SMALL },
            Geometry { slots: 12, ..SMALL },
            Geometry { slots: u32::MAX, ..SMALL },
            Geometry { chunks: 0, ..SMALL },
            Geometry { chunks: 65, ..SMALL },
            Geometry { chunk_size: 0, ..SMALL },
            Geometry { chunk_size: 65, ..SMALL },
            Geometry { chunk_size: !63, ..SMALL },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_fork_gives_no_chunk_back_and_takes_no_piece_of_a_message() {
        let (segment, _fd) = Segment::create(SMALL).unwrap();
        // SAFETY: the child has this thread alone, and calls nothing that waits for another.
        match unsafe { libc::fork() } {
            0 => {
                segment.give_back(0);
                let has_splits = (0..MAX_SPLITS).any(|number| segment.get(number).is_some());
                // SAFETY: ends the child without the parent's clean-up.
                unsafe { libc::_exit(if has_splits { 1 } else { 42 }) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: waits for the child just made, and writes an integer.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert_eq!(libc::WEXITSTATUS(status), 42);
            }
        }
        let never = [0; MAX_CHUNKS as usize];
        assert_eq!(segment.returned(&never), 0b11, "no chunk was given back");
        assert!(segment.get(0).is_some());
        segment.give_back(0);
        assert_eq!(segment.returned(&never), 0b10);
    }

    #[test]
    fn a_chunk_or_length_that_is_not_there_gives_nothing() {
        let (segment, _fd) = Segment::create(SMALL).unwrap();
        assert!(segment.chunk(1, 128).is_some());
        assert!(segment.chunk(2, 1).is_none());
        assert!(segment.chunk(0, 129).is_none());
        assert!(segment.chunk(u32::MAX, u32::MAX).is_none());
        segment.give_back(77);
    }
}
