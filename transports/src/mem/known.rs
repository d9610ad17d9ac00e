//! Raw memory of the program that was looked up before: the kinds of its addresses, for the whole
//! process.
//!
//! A driver's full answer on an address takes up to a microsecond. Its short one, the allocation's
//! number, takes a tenth of that (gpu.md, "Measured"). So an answer is kept by extent, and used as
//! long as the short answer is the same. An address that was freed and allocated again has another
//! number (gpu.md, legacy IPC rule 6).
//!
//! Each extent keeps the root of all regions in it. Facts on an allocation (its export, and the
//! export's name) are attached to the root, and so are found once, not once for each pointer. The
//! root owns nothing: it is dropped when the extent is forgotten and the last region in it is
//! dropped.
//!
//! Host memory is not kept: it can become other memory without a notice. Pinned memory gets no
//! root: no peer maps it, and the rest of the locked memory may be in use through Rust references.

use super::extents::Extents;
use super::lent::{Freed, Watch};
use super::{AllocId, MemHint, MemKind, Region, WeakRegion};
use crate::gpu::{Driver, Extent, Gpu, GpuError};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Extents that are known at a time; one that was not used lately makes room. Each takes some 300
/// bytes.
pub const KNOWN_EXTENTS: usize = 1024;
/// Extents that one call of `look_after` checks.
const SWEPT: usize = 8;

/// Reason why raw memory was not taken.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RawError {
    /// The address is null.
    #[error("the address of the memory is null: give that of an allocation")]
    Null,
    /// A driver failed to classify the address.
    #[error(
        "what memory {addr:#x} is cannot be found out: {cause}; check that it is allocated, and \
        look for earlier errors of the driver"
    )]
    Query {
        /// The address.
        addr: usize,
        /// The driver's error.
        cause: GpuError,
    },
    /// The memory is not of the kind that the caller stated.
    #[error(
        "the memory at {addr:#x} was said to be {said}, and is {found}: say what it is, or \
        MR_UNKNOWN"
    )]
    Kind {
        /// The address.
        addr: usize,
        /// The caller's statement.
        said: MemHint,
        /// The kind that was found.
        found: MemKind,
    },
    /// The range is longer than the allocation that it begins in.
    #[error(
        "{len} bytes at {addr:#x} reach beyond the allocation, which ends after {left}: name no \
        more than these"
    )]
    Beyond {
        /// The address.
        addr: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes up to the end.
        left: usize,
    },
    /// The driver migrates the memory.
    #[error(
        "the memory at {addr:#x} is managed (cudaMallocManaged), which moves while it is used, so \
         nothing here copies it: send from memory of cudaMalloc or cudaMallocHost, and copy there \
         first"
    )]
    Managed {
        /// The address.
        addr: usize,
    },
    /// The memory was freed.
    #[error(transparent)]
    Freed(#[from] Freed),
}

/// The table: see the [module](self).
#[derive(Debug)]
pub struct KnownMemory {
    table: RwLock<Table>,
    /// Number of extents: programs without GPUs never take the lock.
    count: AtomicUsize,
    /// Address at which [`look_after`](Self::look_after) goes on.
    swept: AtomicUsize,
}

#[derive(Debug)]
struct Table {
    extents: Extents<KnownEntry>,
    /// Roots that the table does not keep, or keeps no longer, and of which regions may still
    /// exist.
    not_kept: Vec<(Range<usize>, WeakRegion)>,
}

#[derive(Debug)]
struct KnownEntry {
    id: AllocId,
    /// Weak: the table does not keep a driver alive.
    driver: Weak<dyn Driver>,
    what: What,
}

#[derive(Debug)]
enum What {
    /// Memory of a device: the root of all regions in it.
    Device(Region),
    /// Locked host memory.
    Pinned(Option<Arc<dyn Gpu>>),
    /// Memory of a device that no driver knows any more. The CPU must not touch it, even if the
    /// program gives it as unknown memory.
    Freed(MemKind),
}

/// The table's answer on an address.
enum Recalled {
    Region(Region),
    /// An entry that is no longer true, or does not reach far enough.
    Stale,
    /// No entry.
    Unknown,
}

impl KnownEntry {
    fn kind(&self) -> MemKind {
        match &self.what {
            What::Device(root) => root.kind(),
            What::Pinned(_) => MemKind::Pinned,
            What::Freed(kind) => *kind,
        }
    }

    /// Returns `true` if its driver says that it is still the same allocation.
    fn still_there(&self, addr: usize, drivers: &[Arc<dyn Driver>]) -> bool {
        let asked =
            |driver: &dyn Driver| driver.buffer_id(addr).is_ok_and(|id| id == Some(self.id));
        // Usually it is one of the caller's, and needs no new reference.
        let is_it = |driver: &&Arc<dyn Driver>| {
            std::ptr::addr_eq(Arc::as_ptr(driver), self.driver.as_ptr())
        };
        match drivers.iter().find(is_it) {
            Some(driver) => asked(&**driver),
            None => self.driver.upgrade().is_some_and(|driver| asked(&*driver)),
        }
    }

    /// Returns the root of a device's memory.
    fn root(&self) -> Option<&Region> {
        match &self.what {
            What::Device(root) => Some(root),
            _ => None,
        }
    }

    /// Returns the entry that stays when no driver knows the memory any more. The memory of a
    /// driver that is gone went with it, so its addresses may hold anything. Memory that was
    /// locked is host memory, as before.
    fn freed(&self) -> Option<Self> {
        let was_device = matches!(self.what, What::Device(_)) && self.driver.strong_count() > 0;
        let what = What::Freed(self.kind());
        was_device.then(|| Self { id: self.id, driver: self.driver.clone(), what })
    }
}

impl KnownMemory {
    /// Makes a table of at most `extents` extents.
    pub const fn of(extents: usize) -> Self {
        let table = Table { extents: Extents::bounded(extents), not_kept: Vec::new() };
        Self { table: RwLock::new(table), count: AtomicUsize::new(0), swept: AtomicUsize::new(0) }
    }

    /// Returns the process's table: addresses mean the same to all its runtimes.
    pub fn of_the_process() -> &'static Self {
        static KNOWN: KnownMemory = KnownMemory::of(KNOWN_EXTENTS);
        &KNOWN
    }

    /// Returns the number of extents.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read()
    }

    /// Changes the table. Entries that leave it are dropped without the lock: freeing GPU memory
    /// takes time, and a root's keeper may be any code.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Table) -> (T, Vec<(Range<usize>, KnownEntry)>),
    ) -> T {
        let mut table: RwLockWriteGuard<'_, Table> = self.table.write();
        let (answer, gone) = change(&mut table);
        for (range, entry) in &gone {
            if let What::Device(root) = &entry.what {
                table.note(range.clone(), root);
            }
        }
        self.count.store(table.extents.len(), Ordering::Relaxed);
        drop(table);
        drop(gone);
        answer
    }

    /// Makes a region of memory that the caller answers for. Regions of one allocation of a GPU
    /// have one [root](Region::root), as long as the table knows it.
    ///
    /// # Errors
    /// See [`RawError`].
    ///
    /// # Safety
    /// `len` bytes at `addr` stay allocated until the last clone of the region, of its parts and of
    /// its root is dropped. Until then they are not used through Rust references. The table's own
    /// clone of the root does not count. Memory said to be [`MR_HOST`](super::MR_HOST) is host
    /// memory. Memory said to be [`MR_DEVICE`](super::MR_DEVICE) is GPU memory, and
    /// [`forget`](Self::forget) was called before earlier memory at its address was freed.
    pub unsafe fn region(
        &self,
        addr: *mut u8,
        len: usize,
        hint: MemHint,
        drivers: &[Arc<dyn Driver>],
    ) -> Result<Region, RawError> {
        let base = NonNull::new(addr).ok_or(RawError::Null)?;
        let (addr, left) = (addr as usize, usize::MAX - addr as usize);
        if len > left {
            return Err(RawError::Beyond { addr, len, left });
        }
        // SAFETY: the caller's promise, passed on; likewise below.
        match unsafe { self.recall(base, len, hint, drivers) }? {
            Recalled::Region(region) => return Ok(region),
            // SAFETY: as above.
            Recalled::Unknown if hint == MemHint::Host => return Ok(unsafe { host(base, len) }),
            // It was memory of a GPU, and is another GPU's or host memory by now.
            Recalled::Stale if hint == MemHint::Host => drop(self.forget(addr, 1)),
            Recalled::Unknown | Recalled::Stale => {}
        }
        // SAFETY: as above.
        unsafe { self.ask(base, len, hint, drivers) }
    }

    /// Makes a region by the entry of the address, if the entry still holds.
    ///
    /// # Safety
    /// As [`region`](Self::region).
    unsafe fn recall(
        &self,
        base: NonNull<u8>,
        len: usize,
        hint: MemHint,
        drivers: &[Arc<dyn Driver>],
    ) -> Result<Recalled, RawError> {
        if self.is_empty() {
            return Ok(Recalled::Unknown);
        }
        let addr = base.as_ptr() as usize;
        let table = self.read();
        let Some((range, entry)) = table.extents.get(addr) else { return Ok(Recalled::Unknown) };
        let is_freed = matches!(entry.what, What::Freed(_));
        if is_freed || !(hint.trusts() || entry.still_there(addr, drivers)) {
            return Ok(Recalled::Stale);
        }
        let found = entry.kind();
        if !hint.allows(found) {
            return Err(RawError::Kind { addr, said: hint, found });
        }
        // A range that reaches beyond may have grown since (gpu.md, VMM rule 5), or be one of
        // several extents.
        let fits = addr.checked_add(len).is_some_and(|end| end <= range.end);
        let region = match &entry.what {
            What::Device(root) if fits => part(root, addr, len, hint),
            What::Pinned(gpu) if fits => {
                // SAFETY: the caller's promise.
                let region = unsafe { over(base, len, (found, entry.id, gpu.clone())) };
                Some(region.lent(Watch::just_asked(), entry.driver.clone()))
            }
            _ => None,
        };
        Ok(region.map_or(Recalled::Stale, Recalled::Region))
    }

    /// Asks the drivers, and keeps their answer.
    ///
    /// # Safety
    /// As [`region`](Self::region).
    #[cold]
    unsafe fn ask(
        &self,
        base: NonNull<u8>,
        len: usize,
        hint: MemHint,
        drivers: &[Arc<dyn Driver>],
    ) -> Result<Region, RawError> {
        let addr = base.as_ptr() as usize;
        for driver in drivers {
            let extent = driver.classify(addr).map_err(|cause| RawError::Query { addr, cause })?;
            let Some(extent) = extent else { continue };
            if let MemKind::Managed(_) = extent.kind {
                return Err(RawError::Managed { addr });
            }
            if !hint.allows(extent.kind) {
                return Err(RawError::Kind { addr, said: hint, found: extent.kind });
            }
            let left = extent.end().saturating_sub(addr);
            if len <= left
                && let Some(root) = self.keep(base, &extent, driver)
            {
                return part(&root, addr, len, hint).ok_or(RawError::Beyond { addr, len, left });
            }
            if len > left && !lies_in(&**driver, addr, len, extent.kind) {
                return Err(RawError::Beyond { addr, len, left });
            }
            let Extent { base: start, kind, id, gpu, .. } = extent;
            // SAFETY: the caller's promise; the region frees nothing.
            let region = unsafe { over(base, len, (kind, id, gpu)) };
            let region = region.lent(watch(hint), Arc::downgrade(driver));
            if let MemKind::Device(_) = kind {
                self.change(|table| {
                    table.note(start..addr.saturating_add(len), &region);
                    ((), Vec::new())
                });
            }
            return Ok(region);
        }
        if let Some(kind) = self.was_device(addr) {
            return Err(Freed { addr, kind, again: false }.into());
        }
        if !hint.allows(MemKind::Host) {
            return Err(RawError::Kind { addr, said: hint, found: MemKind::Host });
        }
        // SAFETY: the caller's promise; no driver knows the memory, so it is host memory.
        Ok(unsafe { host(base, len) })
    }

    /// Keeps a driver's answer. Returns the root, if it is memory of a device; if another thread
    /// was first, that thread's root.
    fn keep(&self, at: NonNull<u8>, extent: &Extent, driver: &Arc<dyn Driver>) -> Option<Region> {
        let Extent { base, len, kind, id, ref gpu, .. } = *extent;
        // For some host memory the driver tells no end.
        if extent.end() == usize::MAX {
            return None;
        }
        let driver = Arc::downgrade(driver);
        let what = match kind {
            MemKind::Device(_) => {
                let start = NonNull::new(at.as_ptr().wrapping_sub(at.as_ptr() as usize - base))?;
                // SAFETY: an allocation exists as a whole or not at all, so as long as the caller
                // of `region` keeps its part. The table has the root longer, but gives out only
                // parts that a caller promises anew. References of the CPU are no question, since
                // it does not touch memory of a device.
                let root = unsafe { over(start, len, (kind, id, gpu.clone())) };
                What::Device(root.lent(Watch::each_time(), driver.clone()))
            }
            MemKind::Pinned => What::Pinned(gpu.clone()),
            _ => return None,
        };
        self.change(|table| {
            if let Some((range, entry)) = table.extents.get(base)
                && (range, entry.id, entry.kind()) == (base..extent.end(), id, kind)
                && entry.driver.strong_count() > 0
                && !matches!(entry.what, What::Freed(_))
            {
                return (entry.root().cloned(), Vec::new());
            }
            let entry = KnownEntry { id, driver, what };
            let root = entry.root().cloned();
            (root, table.extents.insert(base..extent.end(), entry))
        })
    }

    /// Records that no driver knows an address. Returns the kind of device memory that was there,
    /// as far as is known; the table then keeps this fact instead.
    fn was_device(&self, addr: usize) -> Option<MemKind> {
        if self.is_empty() {
            return None;
        }
        self.change(|table| {
            let Some((range, entry)) = table.extents.get(addr) else { return (None, Vec::new()) };
            if !matches!(entry.what, What::Freed(_)) {
                let gone = table.bury(range.start);
                return (table.extents.get(addr).map(|(_, entry)| entry.kind()), gone);
            }
            (Some(entry.kind()), Vec::new())
        })
    }

    /// Asks whether a few extents are still there, the next ones at each call, and removes those
    /// that are not. So peers' mappings of memory that was freed without a notice are closed, even
    /// if the program never gives such memory again. Called now and then.
    pub fn look_after(&self) {
        if self.is_empty() {
            return;
        }
        let (mut stale, mut next) = (Vec::new(), self.swept.load(Ordering::Relaxed));
        {
            let table = self.read();
            for _ in 0..SWEPT.min(table.extents.len()) {
                let Some((range, entry)) = table.extents.from(next) else { break };
                next = range.end;
                if !matches!(entry.what, What::Freed(_)) && !entry.still_there(range.start, &[]) {
                    stale.push((range, entry.id));
                }
            }
        }
        self.swept.store(next, Ordering::Relaxed);
        if stale.is_empty() {
            return;
        }
        self.change(|table| {
            let mut gone = Vec::new();
            for (range, id) in stale {
                // Another thread may have changed the extent meanwhile.
                if table.extents.get(range.start).is_some_and(|(_, entry)| entry.id == id) {
                    gone.extend(table.bury(range.start));
                }
            }
            ((), gone)
        });
    }

    /// Forgets all extents that a range overlaps: before memory is freed or unmapped. Returns the
    /// number of roots whose memory there is still held by regions, or by operations on regions.
    pub fn forget(&self, addr: usize, len: usize) -> usize {
        let range = addr..addr.saturating_add(len);
        self.change(|table| ((), table.extents.take(&range)));
        let table = self.read();
        let held = table.not_kept.iter().filter(|(other, root)| {
            !root.is_gone() && other.start < range.end && range.start < other.end
        });
        held.count()
    }
}

impl Table {
    /// Records that no driver knows the memory at an address any more. Returns the entries that
    /// this removes.
    fn bury(&mut self, addr: usize) -> Vec<(Range<usize>, KnownEntry)> {
        match self.extents.get(addr).map(|(range, entry)| (range, entry.freed())) {
            Some((range, Some(freed))) => self.extents.insert(range, freed),
            Some((range, None)) => self.extents.take(&range),
            None => Vec::new(),
        }
    }

    /// Notes a root that the table does not keep.
    fn note(&mut self, range: Range<usize>, root: &Region) {
        self.not_kept.retain(|(_, root)| !root.is_gone());
        self.not_kept.push((range, root.downgrade()));
    }
}

/// Makes a region of memory, which frees nothing.
///
/// # Safety
/// `len` bytes at `base` are memory of that kind. They stay allocated, and are not used through
/// Rust references, for as long as the region or a part of it is used.
unsafe fn over(
    base: NonNull<u8>,
    len: usize,
    (kind, id, gpu): (MemKind, AllocId, Option<Arc<dyn Gpu>>),
) -> Region {
    // SAFETY: the caller's promise; the region frees nothing.
    unsafe { Region::from_parts(base, len, kind, id, gpu, Box::new(())) }
}

/// Makes a region of host memory, which frees nothing.
///
/// # Safety
/// As [`over`], of host memory.
unsafe fn host(base: NonNull<u8>, len: usize) -> Region {
    // SAFETY: passed on.
    unsafe { over(base, len, (MemKind::Host, AllocId(0), None)) }
}

/// Returns the part of a root at an address.
fn part(root: &Region, addr: usize, len: usize, hint: MemHint) -> Option<Region> {
    root.part_of(addr.checked_sub(root.addr())?, len, watch(hint), Box::new(()))
}

/// Returns the check for memory whose driver was asked just now: none if the hint rules it out.
fn watch(hint: MemHint) -> Watch {
    if hint.trusts() { Watch::never() } else { Watch::just_asked() }
}

/// Returns `true` if the range lies in several extents of one kind, as a VMM mapping made of
/// several handles does (gpu.md, VMM rule 2).
fn lies_in(driver: &dyn Driver, addr: usize, len: usize, kind: MemKind) -> bool {
    driver.extents(addr, len).is_ok_and(|extents| extents.iter().all(|extent| extent.kind == kind))
}
