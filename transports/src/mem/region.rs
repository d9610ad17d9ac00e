//! Memory with an owner, an identity and a kind.

mod joined;
mod lines;

pub use joined::SoleRegion;

use super::lent::{Freed, Watch};
use super::shared::Share;
use super::{CopyError, MemKind, MemMut, MemRef, Place, copy::copy_and_wait};
use crate::gpu::{Driver, Gpu};
use lines::Lines;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Identity of an allocation: a GPU driver's buffer id, or a number of this process. An address
/// that is freed and allocated again is another allocation (gpu.md, legacy IPC rule 6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct AllocId(pub u64);

/// Memory with an owner: cheap to clone, freed when the last clone and the last slice are dropped.
///
/// A region never yields a reference, since a peer or a GPU may write it at any time: bytes are
/// copied in and out.
///
/// # Concurrent use of the same bytes
/// Threads, peers, GPUs and NICs may read and write the same bytes at the same time; other bytes
/// are not affected. A read that meets a write finds old bytes, new ones, or a mixture. Of two
/// writes that meet, each byte is from one. An aligned word of 8 bytes of host memory that is read
/// or written by itself is never a mixture. Copies order nothing: a completion, a notification or
/// an atomic operation tells that bytes are complete.
#[derive(Clone)]
pub struct Region(Arc<Allocation>);

struct Allocation {
    base: NonNull<u8>,
    len: usize,
    kind: MemKind,
    id: AllocId,
    /// `Some` in roots only: parts ask their root.
    gpu: Option<Arc<dyn Gpu>>,
    share: Option<Arc<Share>>,
    /// The region that this one is a part of. Dropped before the owner's content.
    root: Option<Region>,
    /// The check of the program's memory; the root holds the driver that is asked.
    watch: Watch,
    driver: Option<Weak<dyn Driver>>,
    /// Owner that frees the memory; dropped with the last handle, or given to the keeper.
    owner: Option<Box<dyn Any + Send + Sync>>,
    keeper: OnceLock<Arc<dyn Keeper>>,
}

/// Keeper of a region's owner after the region's last handle is dropped. Memory that other
/// processes have mapped must not be freed before they are done.
pub trait Keeper: Send + Sync {
    /// Keeps the owner until the memory may be freed.
    fn keep(&self, owner: Box<dyn Any + Send + Sync>);
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let (Some(keeper), Some(owner)) = (self.keeper.take(), self.owner.take()) {
            keeper.keep(owner);
        }
    }
}

/// A region, if a handle to it still exists.
#[derive(Clone, Debug)]
pub struct WeakRegion(Weak<Allocation>);

impl WeakRegion {
    /// Returns the region, while there is a handle.
    pub fn upgrade(&self) -> Option<Region> {
        self.0.upgrade().map(Region)
    }

    /// Returns `true` if it refers to `region`.
    pub fn is_of(&self, region: &Region) -> bool {
        std::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&region.0))
    }

    /// Returns `true` if no handle is left.
    pub fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

// SAFETY: a region is an address that is only used through the copy function, and an owner that is
// itself Send and Sync. It gives out no references into the memory.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Region {
    /// Allocates zeroed host memory, aligned to a cache line of 64 bytes.
    ///
    /// # Panics
    /// If `len` is beyond the address space. Aborts without memory, as [`Vec`] does.
    pub fn host(len: usize) -> Self {
        let (base, owner) = Lines::zeroed(len);
        // SAFETY: the owner frees the `len` bytes at `base` when it is dropped, and not before.
        unsafe { Self::from_parts(base, len, MemKind::Host, host_id(), None, Box::new(owner)) }
    }

    /// Makes a region of memory that `owner` frees when it is dropped.
    ///
    /// # Safety
    /// `len` bytes at `base` are memory of `kind` that stays allocated, and is not used through
    /// Rust references, until `owner` is dropped. `gpu` is given when `kind` names one.
    pub unsafe fn from_parts(
        base: NonNull<u8>,
        len: usize,
        kind: MemKind,
        id: AllocId,
        gpu: Option<Arc<dyn Gpu>>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let (owner, watch) = (Some(owner), Watch::never());
        let (share, root, driver, keeper) = (None, None, None, OnceLock::new());
        Self(Arc::new(Allocation {
            base,
            len,
            kind,
            id,
            gpu,
            share,
            root,
            watch,
            driver,
            owner,
            keeper,
        }))
    }

    /// Adds the share by which other processes can map it. For fresh regions.
    pub(super) fn with_share(mut self, share: Arc<Share>) -> Self {
        if let Some(allocation) = Arc::get_mut(&mut self.0) {
            allocation.share = Some(share);
        }
        self
    }

    /// Marks it as memory of the program, with the check of its presence and the driver that is
    /// asked. For fresh regions.
    pub(super) fn lent(mut self, watch: Watch, driver: Weak<dyn Driver>) -> Self {
        if let Some(allocation) = Arc::get_mut(&mut self.0) {
            (allocation.watch, allocation.driver) = (watch, Some(driver));
        }
        self
    }

    /// Asks whether the program's memory is still the allocation that the region was made of. This
    /// is one short question to the driver, except at the first use, since making the region has
    /// asked. It costs nothing for other memory, and for [`MR_DEVICE`](super::MR_DEVICE), where no
    /// driver is asked.
    ///
    /// # Errors
    /// The memory was freed.
    #[inline]
    pub fn recheck(&self) -> Result<(), Freed> {
        if self.0.watch.is_never() {
            return Ok(());
        }
        let driver = self.root().0.driver.as_ref();
        driver.map_or(Ok(()), |driver| self.0.watch.recheck(self, driver))
    }

    /// Returns the share by which other processes map it, if it can be mapped.
    pub fn share(&self) -> Option<&Arc<Share>> {
        self.0.share.as_ref()
    }

    /// Adds to a word of host memory and returns its earlier value, in one atomic step for all
    /// processes that map it.
    ///
    /// # Errors
    /// See [`AtomicError`].
    pub fn fetch_add(&self, offset: usize, value: u64) -> Result<u64, AtomicError> {
        self.word(offset).map(|word| word.fetch_add(value, Ordering::AcqRel))
    }

    /// Stores `new` in a word of host memory if it holds `expected`, and returns its earlier
    /// value. This is one atomic step for all processes that map it.
    ///
    /// # Errors
    /// See [`AtomicError`].
    pub fn compare_swap(&self, offset: usize, expected: u64, new: u64) -> Result<u64, AtomicError> {
        let word = self.word(offset)?;
        match word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(held) | Err(held) => Ok(held),
        }
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64, AtomicError> {
        if !self.0.kind.is_host() {
            return Err(AtomicError::Kind(self.0.kind));
        }
        if offset.checked_add(8).is_none_or(|end| end > self.0.len) {
            return Err(AtomicError::Outside { offset, len: self.0.len });
        }
        // SAFETY: within the allocation.
        let at = unsafe { self.0.base.add(offset) }.cast::<AtomicU64>();
        if !at.is_aligned() {
            return Err(AtomicError::Unaligned { offset });
        }
        // SAFETY: aligned host memory that the region keeps allocated, to which no plain reference
        // exists. Copies of the same word at the same time find the old or the new value on every
        // machine that this runs on.
        Ok(unsafe { at.as_ref() })
    }

    /// Returns `true` if both are handles to the same region, not only to the same bytes.
    #[inline]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns its kind of memory; for a [joined](Self::joined) region of several GPUs, the first
    /// one's.
    pub fn kind(&self) -> MemKind {
        self.0.kind
    }

    /// Returns the identity of its allocation.
    pub fn id(&self) -> AllocId {
        self.0.id
    }

    /// Returns the GPU whose engines copy it: its owner, the GPU that it was opened for, or the
    /// first of several.
    pub fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        self.root().0.gpu.as_ref()
    }

    /// Returns its first address, for drivers; the CPU must not dereference it.
    pub fn addr(&self) -> usize {
        self.0.base.as_ptr() as usize
    }

    /// Returns a part of it as a region of its own, which keeps all of it alive. `None` when the
    /// part is not inside.
    pub fn subregion(&self, offset: usize, len: usize) -> Option<Self> {
        self.subregion_with(offset, len, Box::new(()))
    }

    /// Does the same, and keeps `what` alive until this part and all parts of it are dropped;
    /// `what` is dropped last.
    pub fn subregion_with(
        &self,
        offset: usize,
        len: usize,
        what: Box<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        self.part_of(offset, len, self.0.watch.of_a_part(), what)
    }

    /// Does the same, with another check of presence than the whole.
    pub(super) fn part_of(
        &self,
        offset: usize,
        len: usize,
        watch: Watch,
        what: Box<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        if offset.checked_add(len)? > self.0.len {
            return None;
        }
        let Allocation { base, kind, id, .. } = &*self.0;
        // SAFETY: within the allocation, which the root keeps.
        let base = unsafe { base.add(offset) };
        // A part's own parts keep alive what the part keeps alive.
        let what: Box<dyn Any + Send + Sync> =
            if self.0.root.is_some() { Box::new((self.clone(), what)) } else { what };
        let part = Allocation {
            base,
            len,
            kind: *kind,
            id: *id,
            gpu: None,
            share: None,
            root: Some(self.root().clone()),
            watch,
            driver: None,
            owner: Some(what),
            keeper: OnceLock::new(),
        };
        Some(Self(Arc::new(part)))
    }

    /// Returns the region that it is a part of, or itself.
    pub fn root(&self) -> &Self {
        self.0.root.as_ref().unwrap_or(self)
    }

    /// Sets the keeper that gets the root's owner in the end. The first one stays.
    pub fn keep_with(&self, keeper: impl FnOnce() -> Arc<dyn Keeper>) {
        self.root().0.keeper.get_or_init(keeper);
    }

    /// Returns a handle that keeps nothing alive.
    pub fn downgrade(&self) -> WeakRegion {
        WeakRegion(Arc::downgrade(&self.0))
    }

    /// Returns a part of it that keeps all of it alive. `None` when the part is not inside.
    pub fn slice(&self, offset: usize, len: usize) -> Option<RegionSlice> {
        let end = offset.checked_add(len)?;
        (end <= self.0.len).then(|| RegionSlice { region: self.clone(), offset, len })
    }

    /// Returns a part of it, for the copy function. `None` when the part is not inside.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Option<MemRef<'_>> {
        let inside = offset.checked_add(len)? <= self.0.len;
        // SAFETY: within the allocation, which `self` keeps.
        inside.then(|| unsafe {
            MemRef::from_raw(self.0.base.as_ptr().add(offset), len, self.place())
        })
    }

    /// Returns a part of it as a target of the copy function. `None` when the part is not inside.
    #[inline]
    pub fn part_mut(&self, offset: usize, len: usize) -> Option<MemMut<'_>> {
        let inside = offset.checked_add(len)? <= self.0.len;
        // SAFETY: as above; regions give out no references, so none is alive.
        inside.then(|| unsafe {
            MemMut::from_raw(self.0.base.as_ptr().add(offset), len, self.place())
        })
    }

    /// Returns the first address of a part, without a check of the kind of memory: for lists of
    /// parts of one region. `None` when the part is not inside.
    #[inline]
    pub(super) fn pointer(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(len)? <= self.0.len;
        // SAFETY: within the allocation, which `self` keeps.
        inside.then(|| unsafe { self.0.base.as_ptr().add(offset) })
    }

    /// Returns its first address, likewise unchecked.
    #[inline]
    pub(super) fn base(&self) -> *mut u8 {
        self.0.base.as_ptr()
    }

    /// Returns a slice of all of it.
    pub fn whole(&self) -> RegionSlice {
        RegionSlice { region: self.clone(), offset: 0, len: self.0.len }
    }

    fn place(&self) -> Place<'_> {
        match self.0.kind {
            MemKind::Host => Place::Host,
            kind => Place::of(kind, self.gpu()),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Allocation { base, len, kind, id, .. } = *self.0;
        write!(f, "Region({kind} {base:p}+{len} #{})", id.0)
    }
}

/// Reason why an atomic operation was not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AtomicError {
    /// The word reaches beyond the region.
    #[error("8 bytes at {offset} reach beyond the {len} bytes of the region: name a word within")]
    Outside {
        /// Offset of the word.
        offset: usize,
        /// Bytes of the region.
        len: usize,
    },
    /// The word is not aligned.
    #[error("the word at {offset} is not aligned: atomic operations need a multiple of 8 bytes")]
    Unaligned {
        /// Offset of the word.
        offset: usize,
    },
    /// The word is not in host memory.
    #[error("the CPU does no atomic operations on {0} memory: register it for post_fetch_add")]
    Kind(MemKind),
}

/// Returns an identity for host memory that no driver gives out.
pub(super) fn host_id() -> AllocId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Host identities have the top bit set; drivers count from below.
    AllocId(NEXT.fetch_add(1, Ordering::Relaxed) | 1 << 63)
}

/// A part of a region; keeps the region's memory alive.
#[derive(Clone, Debug)]
pub struct RegionSlice {
    region: Region,
    offset: usize,
    len: usize,
}

impl RegionSlice {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the region that it is a part of.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns its offset in the region, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns its kind of memory.
    pub fn kind(&self) -> MemKind {
        self.region.kind()
    }

    /// Returns the bytes, for the copy function.
    pub fn view(&self) -> MemRef<'_> {
        // SAFETY: `offset + len` was checked against the region when the slice was made, and the
        // region keeps its memory allocated while `self` lives.
        unsafe {
            MemRef::from_raw(
                self.region.0.base.as_ptr().add(self.offset),
                self.len,
                self.region.place(),
            )
        }
    }

    /// Returns the bytes as a target of the copy function.
    ///
    /// It takes `&self`: a region is shared memory by nature, and no references into it exist.
    pub fn view_mut(&self) -> MemMut<'_> {
        // SAFETY: as in `view`; regions give out no references, so none is alive.
        unsafe {
            MemMut::from_raw(
                self.region.0.base.as_ptr().add(self.offset),
                self.len,
                self.region.place(),
            )
        }
    }

    /// Copies `bytes` to the start of the slice, waiting for an engine if one is needed.
    ///
    /// Other threads may use the slice meanwhile: see [`Region`].
    pub fn write(&self, bytes: &[u8]) -> Result<(), CopyError> {
        if let (Ok(bytes), Some(word)) = (bytes.try_into(), self.word(bytes.len())) {
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
            return Ok(());
        }
        copy_and_wait(self.view_mut(), MemRef::host(bytes))
    }

    /// Copies the slice to the start of `bytes`, waiting for an engine if one is needed.
    ///
    /// Other threads may use the slice meanwhile: see [`Region`].
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), CopyError> {
        if let (Ok(bytes), Some(word)) =
            (<&mut [u8; 8]>::try_from(&mut *bytes), self.word(self.len))
        {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            return Ok(());
        }
        copy_and_wait(MemMut::host(bytes), self.view())
    }

    /// Returns the first word, if the copy is that word, whole and aligned, in host memory.
    fn word(&self, copied: usize) -> Option<&AtomicU64> {
        if copied == 8 && self.len >= 8 { self.region.word(self.offset).ok() } else { None }
    }

    /// Copies the slice's bytes into a vector.
    pub fn to_vec(&self) -> Result<Vec<u8>, CopyError> {
        let mut bytes = vec![0; self.len];
        self.read(&mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn miri_a_slice_keeps_its_region_alive_and_holds_what_was_written() {
        let region = Region::host(100);
        let slice = region.slice(10, 20).unwrap();
        drop(region);
        slice.write(&[9; 20]).unwrap();
        assert_eq!(slice.to_vec().unwrap(), vec![9; 20]);
        assert!(slice.write(&[9; 21]).is_err());
    }

    #[test]
    fn a_part_of_a_part_keeps_what_the_part_keeps() {
        let kept = Arc::new(());
        let whole = Region::host(100);
        let part = whole.subregion_with(10, 50, Box::new(kept.clone())).unwrap();
        let (inner, slice) = (part.subregion(5, 10).unwrap(), part.slice(0, 50).unwrap());
        let innermost = inner.subregion(1, 2).unwrap();
        drop((whole, part, slice, inner));
        assert_eq!(Arc::strong_count(&kept), 2, "a part of it still exists");
        assert_eq!(innermost.len(), 2);
        drop(innermost);
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    /// The two halves of a torn word differ.
    #[test]
    fn miri_an_aligned_word_that_threads_read_and_write_at_once_is_never_torn() {
        let (region, turns) = (Region::host(24), if cfg!(miri) { 100 } else { 200_000_u32 });
        let at = region.addr().next_multiple_of(8) - region.addr();
        let word = region.slice(at, 8).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The first word of a longer slice counts as a word, too.
                let slice = region.slice(at, 16).unwrap();
                for turn in 0..turns {
                    slice.write([turn.to_ne_bytes(); 2].as_flattened()).unwrap();
                }
            });
            scope.spawn(|| {
                for _ in 0..turns {
                    region.fetch_add(at, 1 << 32 | 1).unwrap();
                }
            });
            for _ in 0..turns {
                let mut found = [[0; 4]; 2];
                word.read(found.as_flattened_mut()).unwrap();
                assert_eq!(found[0], found[1]);
            }
        });
    }

    #[test]
    fn what_is_longer_or_shorter_than_a_word_is_copied_to_the_byte() {
        let region = Region::host(24);
        for at in 0..8 {
            let (slice, part) = (region.slice(at, 16).unwrap(), region.slice(at, 8).unwrap());
            slice.write(&[1; 16]).unwrap();
            slice.write(&[2; 8]).unwrap();
            slice.write(&[3; 7]).unwrap();
            assert_eq!(slice.to_vec().unwrap(), [3, 3, 3, 3, 3, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1]);
            let (mut long, mut short) = ([9; 10], [9; 8]);
            part.read(&mut long).unwrap();
            assert_eq!(long, [3, 3, 3, 3, 3, 3, 3, 2, 9, 9]);
            assert!(matches!(slice.read(&mut short), Err(CopyError::TooLong { len: 16, room: 8 })));
            assert!(matches!(part.write(&[0; 9]), Err(CopyError::TooLong { len: 9, room: 8 })));
        }
    }

    #[test]
    fn a_slice_beyond_its_region_is_refused() {
        let region = Region::host(100);
        assert!(region.slice(90, 11).is_none());
        assert!(region.slice(usize::MAX, 2).is_none());
        assert!(region.slice(100, 0).is_some());
    }
}
