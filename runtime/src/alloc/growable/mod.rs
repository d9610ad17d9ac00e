//! GPU memory that grows and shrinks in place.
//!
//! ```text
//!             0        stripe     2 stripes            len                       capacity
//!   addresses |--------|----------|----------- ... ----|- - - - - - - - - - - - -|
//!   memory of   GPU 0    GPU 1      GPU 0                none yet
//! ```
//!
//! Addresses are reserved once. Memory is mapped there, and unmapped, by whole stripes, which the
//! GPUs provide in turn. Growing copies nothing, and addresses that kernels and registrations hold
//! stay valid.
//!
//! Each stripe is an allocation of its own, and is freed by itself. A region may cover any number
//! of stripes. It may cover stripes of several GPUs if copies can cross their borders, which is
//! tried once.

mod across;
mod error;
mod reserve;

pub use error::GrowableError;
pub use reserve::GrowableBuilder;

use crate::api::{Withdrawn, withdraw};
use crate::region::Region;
use carrack_transports::gpu::{Access, Gpu, Reservation};
use carrack_transports::mem::SoleRegion;
use std::sync::{Arc, OnceLock};

/// Memory of one or several GPUs at constant addresses, with a length that changes.
///
/// The GPUs that provide the memory read and write all of it, by kernels at [`addr`](Self::addr)
/// and by copy engines. Further GPUs [read and write](GrowableBuilder::writers) it or
/// [read](GrowableBuilder::readers) it, as the builder names them. A part of the buffer is a
/// [`Region`] that is registered, posted and copied like any other. Regions keep their stripes,
/// and the buffer does not shrink below them.
///
/// Peers map the registered parts, and keep using them while the buffer grows. A remote key covers
/// its region's length only. Register new memory as a region of its own, or together with the old.
/// New memory is not cleared.
///
/// ```
/// use carrack::alloc::GrowableBuffer;
/// # use carrack::Runtime;
/// # use carrack::settings::{GpuChoice, Settings};
/// # let settings = Settings::builder().gpu(GpuChoice::Fake).build()?;
/// # let runtime = Runtime::builder().settings(settings).start()?;
/// # let gpus = runtime.gpu_drivers()[0].devices()?;
/// let mut buffer = GrowableBuffer::reserve(&gpus, 1 << 30).stripe(4 << 20).build()?;
/// buffer.grow_to(1)?;
/// assert_eq!((buffer.len(), buffer.capacity()), (4 << 20, 1 << 30));
/// let first = buffer.region(0, 5)?;
/// first.whole().write(b"hello")?;
/// let addr = first.addr();
///
/// buffer.grow_to(100 << 20)?;
/// assert_eq!(buffer.region(0, 5)?.whole().to_vec()?, b"hello");
/// assert_eq!(buffer.region(0, 5)?.addr(), addr);
/// // Its first stripe is in use.
/// assert!(buffer.shrink_to(0).is_err());
/// drop(first);
/// buffer.shrink_to(0)?;
/// assert!(buffer.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct GrowableBuffer {
    /// The stripes that are mapped, from the beginning on. Dropped before the reservation.
    stripes: Vec<Region>,
    /// The GPUs that provide the stripes, in turn.
    gpus: Vec<Arc<dyn Gpu>>,
    access: Vec<Access>,
    stripe: usize,
    /// The divisor of a stripe's length.
    granularity: usize,
    capacity: usize,
    reservation: Reservation,
    /// Set once a trial has shown that copies cross from one GPU's memory into the next one's.
    goes_across: OnceLock<()>,
}

impl GrowableBuffer {
    /// Returns a builder of a buffer on these GPUs, in turn, that grows to `most` bytes, rounded
    /// up to whole stripes. Addresses cost no memory: reserve the largest length that the buffer
    /// can need.
    pub fn reserve(gpus: &[Arc<dyn Gpu>], most: usize) -> GrowableBuilder<'_> {
        GrowableBuilder::new(gpus, most)
    }

    fn empty(
        gpus: Vec<Arc<dyn Gpu>>,
        access: Vec<Access>,
        reservation: Reservation,
        (capacity, stripe, granularity): (usize, usize, usize),
    ) -> Self {
        let (stripes, goes_across) = (Vec::new(), OnceLock::new());
        Self { stripes, gpus, access, stripe, granularity, capacity, reservation, goes_across }
    }

    /// Returns the first address of the buffer, for kernels of its GPUs. It never changes.
    pub fn addr(&self) -> usize {
        self.reservation.addr()
    }

    /// Returns the length in bytes: whole stripes.
    pub fn len(&self) -> usize {
        self.stripes.len() * self.stripe
    }

    /// Returns `true` if no stripe is mapped.
    pub fn is_empty(&self) -> bool {
        self.stripes.is_empty()
    }

    /// Returns the bytes that the buffer can grow to: whole stripes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the bytes of a stripe.
    pub fn stripe(&self) -> usize {
        self.stripe
    }

    /// Returns the GPUs that provide the memory, in turn.
    pub fn gpus(&self) -> &[Arc<dyn Gpu>] {
        &self.gpus
    }

    /// Returns the access rights of all GPUs: those that provide the memory, writers and readers.
    pub fn access(&self) -> &[Access] {
        &self.access
    }

    /// Makes the buffer at least `len` bytes long: maps the missing stripes behind the present
    /// ones. Present bytes keep their place and content, also for work of GPUs and peers that is
    /// in flight.
    ///
    /// # Errors
    /// [`Beyond`](GrowableError::Beyond): the reservation is shorter.
    /// [`NotAllocated`](GrowableError::NotAllocated): a GPU has too little memory. The stripes
    /// that this call had allocated were freed.
    pub fn grow_to(&mut self, len: usize) -> Result<(), GrowableError> {
        if len > self.capacity {
            return Err(GrowableError::Beyond { len, capacity: self.capacity });
        }
        let (held, stripe) = (self.len(), self.stripe);
        let turns = self.gpus.iter().cycle().zip(0..len.div_ceil(stripe)).skip(self.stripes.len());
        let mut fresh = Vec::new();
        for (gpu, number) in turns {
            let allocate =
                || gpu.allocate_at(&self.reservation, number * stripe, stripe, &self.access);
            // Memory that other processes have released may suffice. `withdraw` asks for its
            // users, and so frees it.
            let again = |_| {
                let _ = withdraw(self.addr() + number * stripe, stripe);
                allocate()
            };
            match allocate().or_else(again) {
                Ok(region) => fresh.push(region),
                Err(cause) => {
                    // Last first, the order in which a shrinking buffer frees them.
                    while fresh.pop().is_some() {}
                    let gpu = gpu.info().uuid;
                    return Err(GrowableError::NotAllocated { len, held, stripe, gpu, cause });
                }
            }
        }
        self.stripes.append(&mut fresh);
        Ok(())
    }

    /// Gives back the stripes behind the first `len` bytes. The caller ensures that no kernel uses
    /// them any more.
    ///
    /// Other processes may have mapped registered memory, or memory that messages were sent from.
    /// They close it after they have dropped its remote keys ([`RemoteKey`](crate::RemoteKey)) and
    /// are idle in progress, or have called progress about 16 000 times. Until then this call
    /// fails.
    ///
    /// # Errors
    /// [`InUse`](GrowableError::InUse): part of it is registered, in an operation, held as a
    /// region, or mapped by other processes. Nothing has changed; the error has the length to
    /// which the buffer can shrink.
    pub fn shrink_to(&mut self, len: usize) -> Result<(), GrowableError> {
        let keep = len.div_ceil(self.stripe);
        if keep >= self.stripes.len() {
            return Ok(());
        }
        let stripe = self.stripe;
        let in_use =
            |stripes, processes| GrowableError::InUse { len, used: stripes * stripe, processes };
        let is_held = |(at, region): (usize, &Region)| {
            (at >= keep && region.is_held_elsewhere()).then_some(at + 1)
        };
        if let Some(stripes) = self.stripes.iter().enumerate().rev().find_map(is_held) {
            return Err(in_use(stripes, Vec::new()));
        }
        // Peers are told to close the memory that messages came from. Raw regions of its addresses
        // are the program's.
        let Withdrawn { regions, processes } =
            withdraw(self.addr() + keep * self.stripe, self.len() - keep * self.stripe);
        if regions > 0 || !processes.is_empty() {
            let is_in_use = |region: &Region| {
                let found = withdraw(region.addr(), region.len());
                found.regions > 0 || !found.processes.is_empty()
            };
            // If no stripe is in use any more, its last user has released it meanwhile.
            if let Some(last) = self.stripes.iter().skip(keep).rposition(is_in_use) {
                return Err(in_use(keep + last + 1, processes));
            }
        }
        self.cut(keep).map_err(|stripes| in_use(stripes, Vec::new()))
    }

    /// Takes all stripes after the first `keep`, or none. The error is the number of stripes that
    /// have to stay.
    fn cut(&mut self, keep: usize) -> Result<(), usize> {
        let mut taken: Vec<SoleRegion> = Vec::new();
        while self.stripes.len() > keep {
            let Some(last) = self.stripes.pop() else { break };
            match last.into_sole() {
                Ok(sole) => taken.push(sole),
                // Another thread has just got a reference through a weak one.
                Err(region) => {
                    self.stripes.push(region);
                    let stripes = self.stripes.len();
                    self.stripes.extend(taken.into_iter().rev().map(SoleRegion::into_region));
                    return Err(stripes);
                }
            }
        }
        // Last first, as in `grow_to`.
        drop(taken);
        Ok(())
    }

    /// Returns a range as a region, within one stripe or across several. A region on several GPUs
    /// counts as memory of the first one, whose engines copy it. Peers map all of it for one GPU of
    /// theirs.
    ///
    /// The first range that lies on several GPUs starts a trial. Each GPU copies across such
    /// borders, in memory that is allocated for the trial. No documentation of the driver says that
    /// such copies work. The trial takes some milliseconds.
    ///
    /// # Errors
    /// [`Outside`](GrowableError::Outside), [`OnSeveral`](GrowableError::OnSeveral).
    pub fn region(&self, offset: usize, len: usize) -> Result<Region, GrowableError> {
        let outside = || GrowableError::Outside { offset, len, held: self.len() };
        let (first, last) = self.touched(offset, len).ok_or_else(outside)?;
        let within = offset - first * self.stripe;
        if first == last {
            return self
                .stripes
                .get(first)
                .and_then(|one| one.subregion(within, len))
                .ok_or_else(outside);
        }
        if self.gpus.len() > 1 && self.goes_across.get().is_none() {
            let (stripe, gpus) = (self.stripe, self.gpus.len().min(last - first + 1));
            across::copies_go_across(&self.gpus, &self.access, self.granularity)
                .map_err(|cause| GrowableError::OnSeveral { offset, len, stripe, gpus, cause })?;
            self.goes_across.get_or_init(|| ());
        }
        let all = self.stripes.get(first..=last).map(<[Region]>::to_vec).and_then(Region::joined);
        all.and_then(|all| all.subregion(within, len)).ok_or_else(outside)
    }

    /// Returns a range as regions, one for each stripe that it touches, in order. Each lies on one
    /// GPU. Register each by itself, and put or get them together as a batch.
    ///
    /// # Errors
    /// [`Outside`](GrowableError::Outside).
    pub fn pieces(&self, offset: usize, len: usize) -> Result<Vec<Region>, GrowableError> {
        let outside = || GrowableError::Outside { offset, len, held: self.len() };
        let (first, last) = self.touched(offset, len).ok_or_else(outside)?;
        let piece = |number: usize| {
            let begins = number * self.stripe;
            let (from, to) = (offset.max(begins), (offset + len).min(begins + self.stripe));
            self.stripes.get(number)?.subregion(from - begins, to - from)
        };
        (first..=last).map(piece).collect::<Option<_>>().ok_or_else(outside)
    }

    /// Returns the first and the last stripe that a range touches, or `None` if it is not in the
    /// buffer.
    fn touched(&self, offset: usize, len: usize) -> Option<(usize, usize)> {
        let end = offset.checked_add(len).filter(|end| len > 0 && *end <= self.len())?;
        Some((offset / self.stripe, (end - 1) / self.stripe))
    }
}

impl std::fmt::Debug for GrowableBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (addr, len, capacity, stripe) = (self.addr(), self.len(), self.capacity, self.stripe);
        write!(
            f,
            "GrowableBuffer({addr:#x}+{len} of {capacity}, stripes of {stripe} on {} GPUs)",
            self.gpus.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::gpu::{Driver, Gpu};

    const STRIPE: usize = 2 << 20;

    #[test]
    fn all_stripes_are_put_back_if_one_of_them_is_held_meanwhile() {
        let driver = FakeDriver::new(FakeConfig::devices(2)).unwrap();
        let mut buffer =
            GrowableBuffer::reserve(&driver.devices().unwrap(), 5 * STRIPE).build().unwrap();
        buffer.grow_to(5 * STRIPE).unwrap();
        let places =
            |buffer: &GrowableBuffer| buffer.stripes.iter().map(Region::addr).collect::<Vec<_>>();
        let before = places(&buffer);
        for (at, stripe) in buffer.stripes.iter().enumerate() {
            stripe.whole().write(&vec![at as u8; STRIPE]).unwrap();
        }
        for held in 0..5 {
            let taken = buffer.stripes[held].clone();
            assert_eq!(buffer.cut(0), Err(held + 1));
            assert_eq!(places(&buffer), before);
            drop(taken);
        }
        for (at, stripe) in buffer.stripes.iter().enumerate() {
            assert!(stripe.whole().to_vec().unwrap().iter().all(|byte| *byte == at as u8));
        }
        assert_eq!((buffer.cut(1), buffer.len(), driver.counters().frees), (Ok(()), STRIPE, 4));
    }

    #[test]
    fn a_buffer_shrinks_and_grows_while_others_look_for_its_regions_by_weak_handles() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
        let mut buffer = GrowableBuffer::reserve(&[gpu], 3 * STRIPE).build().unwrap();
        for round in 0..300_u32 {
            buffer.grow_to(3 * STRIPE).unwrap();
            let weak: Vec<_> = buffer.stripes.iter().map(Region::downgrade).collect();
            std::thread::scope(|threads| {
                threads.spawn(|| (0..50).for_each(|at| drop(weak[at % 3].upgrade())));
                match buffer.shrink_to(0) {
                    Ok(()) => assert!(buffer.is_empty()),
                    Err(GrowableError::InUse { used, .. }) => {
                        assert!(used > 0 && buffer.len() == 3 * STRIPE, "round {round}");
                    }
                    Err(other) => panic!("{other}"),
                }
            });
            buffer.shrink_to(0).unwrap();
            assert_eq!(driver.counters().allocs, driver.counters().frees);
        }
    }
}
