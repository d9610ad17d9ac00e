//! Regions that NICs reach by themselves.
//!
//! ```text
//! user of the region                     owner
//!   ask (region) ─────────────────────►  registers the region with its NIC, and notes the user
//!   ◄─────── told (region, place, length)
//!   the NIC writes and reads
//!                                        the registration ends, within the call that ends it
//!   ◄────────────────── withdraw (region)
//!   release (region) ─────────────────►  after its last operation there; after the last user's,
//!                                        the NIC deregisters the region
//! ```
//!
//! A NIC knows no generations: an access to unregistered memory breaks the connection. So the
//! owner knows every rank that has a region's place, and keeps the NIC's registration while one
//! may use it. Until a rank has the place, and for operations that a NIC does not take, the
//! owner's progress carries them out.
//!
//! A withdrawal goes ahead of all that the owner sends the user afterwards. Collectives of the
//! owner wait until their members have released the region, since a third rank may be faster than a
//! withdrawal.

use super::Regions;
use crate::chores::Waiting;
use crate::names::Rank;
use carrack_transports::contract::{Exposed, Link, RemotePlace};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::{Buffer, CopyError, MemKind};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// The knowledge of a peer's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Knowledge {
    /// The place is not known, and the owner was not asked.
    Nothing,
    /// The owner was asked.
    Asked,
    /// The place of the region, and its length.
    Place(RemotePlace, u64),
    /// The owner has refused it.
    Refused,
    /// The region's registration has ended.
    Ended,
}

/// A peer's region, as one device knows it. A user of the place holds the lock until the NIC has
/// the operation.
#[derive(Debug)]
pub(crate) struct RemoteRegion(RwLock<Knowledge>);

impl RemoteRegion {
    pub(crate) fn look(&self) -> RwLockReadGuard<'_, Knowledge> {
        self.0.read()
    }

    /// Returns `true` if this caller has to ask.
    pub(crate) fn begin_to_ask(&self) -> bool {
        let mut knowledge = self.0.write();
        let is_first = *knowledge == Knowledge::Nothing;
        if is_first {
            *knowledge = Knowledge::Asked;
        }
        is_first
    }

    /// Returns `true` if its owner has answered.
    pub(crate) fn is_told(&self) -> bool {
        !matches!(*self.look(), Knowledge::Nothing | Knowledge::Asked)
    }

    fn set(&self, known: Knowledge) {
        *self.0.write() = known;
    }
}

/// The regions of peers that a device has asked about.
#[derive(Default)]
pub(crate) struct Remotes(Mutex<HashMap<(Rank, u64), Arc<RemoteRegion>>>);

impl Remotes {
    fn all(&self) -> MutexGuard<'_, HashMap<(Rank, u64), Arc<RemoteRegion>>> {
        self.0.lock()
    }

    /// Returns the entry of a region.
    pub(crate) fn of(&self, owner: Rank, number: u64) -> Arc<RemoteRegion> {
        let fresh = || Arc::new(RemoteRegion(RwLock::new(Knowledge::Nothing)));
        self.all().entry((owner, number)).or_insert_with(fresh).clone()
    }

    /// Notes the owner's answer. An unexpected answer is harmless: the owner sends the place of
    /// its own memory.
    pub(crate) fn answered(&self, owner: Rank, number: u64, place: Option<(RemotePlace, u64)>) {
        let all = self.all();
        let Some(remote) = all.get(&(owner, number)) else { return };
        remote.set(place.map_or(Knowledge::Refused, |(place, len)| Knowledge::Place(place, len)));
        drop(all);
        let by = if place.is_some() { "the NIC" } else { "its owner" };
        tracing::info!(%owner, by, "a remote region is reached without being mapped");
    }

    /// Ends a registration. No thread uses the place afterwards. Returns `true` if the region was
    /// known.
    pub(crate) fn withdrawn(&self, owner: Rank, number: u64) -> bool {
        let gone = self.all().remove(&(owner, number));
        if let Some(remote) = &gone {
            remote.set(Knowledge::Ended);
        }
        gone.is_some()
    }

    /// Forgets a gone rank with its regions.
    pub(crate) fn forget(&self, owner: Rank) {
        self.all().retain(|(rank, _), _| *rank != owner);
    }
}

/// A device through which other ranks are told of regions.
pub(crate) trait Withdraws: Send + Sync {
    /// Tells a rank that the registration of a region has ended.
    fn withdraw(&self, user: Rank, region: u64);
}

/// A region of this rank that NICs of others reach.
struct DirectRegion {
    exposed: Arc<dyn Exposed>,
    /// Its addresses.
    range: Range<usize>,
    /// The device through which they reach it, after its number.
    device: u32,
    through: Weak<dyn Withdraws>,
    /// The ranks that know of it.
    by: Vec<Rank>,
}

/// The places that other ranks were told.
pub(super) struct AllTold {
    /// Places, with a count: that of regions in GPU memory whose GPUs need a flush before NICs'
    /// writes are visible.
    regions: Waiting<DirectRegions>,
    /// The number of regions that leave.
    leaving: AtomicUsize,
}

#[derive(Default)]
struct DirectRegions {
    /// The entries by the region's number, one for each device.
    standing: HashMap<u64, Vec<DirectRegion>>,
    /// Regions whose registration has ended, and that other ranks still know.
    leaving: Vec<(u64, DirectRegion)>,
}

impl DirectRegions {
    /// Returns the GPUs that need a flush before NICs' writes are visible.
    fn flushes(&self) -> impl Iterator<Item = &Arc<dyn Gpu>> {
        let leaving = self.leaving.iter().map(|(_, one)| one);
        self.standing.values().flatten().chain(leaving).filter_map(|one| one.exposed.flush())
    }
}

impl AllTold {
    pub(super) fn new() -> Self {
        Self { regions: Waiting::new(), leaving: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, DirectRegions> {
        self.regions.lock()
    }

    /// Updates the counts after a region was shown or removed.
    fn count(&self, regions: &DirectRegions) {
        self.regions.set_count(regions.flushes().count());
        self.leaving.store(regions.leaving.len(), Ordering::Release);
    }

    /// Ends a registration, and tells the ranks that know of it.
    pub(super) fn withdraw(&self, number: u64) {
        let mut regions = self.lock();
        let Some(shown) = regions.standing.remove(&number) else { return };
        // Entries without users, as those ranks are gone.
        let (unused, used): (Vec<_>, Vec<_>) = shown.into_iter().partition(|one| one.by.is_empty());
        // Under the lock, so behind the answer with the place.
        let devices: Vec<_> = used.iter().map(|one| one.through.upgrade()).collect();
        for (one, device) in used.iter().zip(&devices) {
            let Some(device) = device else { continue };
            one.by.iter().for_each(|&rank| device.withdraw(rank, number));
        }
        regions.leaving.extend(used.into_iter().map(|one| (number, one)));
        self.count(&regions);
        drop(regions);
        // Without the lock: the drop of a region or a device may run any code.
        drop((unused, devices));
    }

    /// Counts the ended registrations of a range of addresses that NICs of other ranks reach.
    pub(super) fn count_leaving(&self, range: &Range<usize>) -> usize {
        let regions = self.lock();
        let reaches =
            |one: &DirectRegion| one.range.start < range.end && range.start < one.range.end;
        regions.leaving.iter().filter(|(_, one)| reaches(one)).count()
    }
}

impl Regions {
    /// Answers a rank with the place and the length of a region, by the NIC of the link to that
    /// rank. `None`: there is no such region or NIC, or the NIC refuses the region.
    pub(crate) fn tell(
        &self,
        number: u64,
        (device, rank): (u32, Rank),
        (through, link): (&Arc<impl Withdraws + 'static>, Option<&dyn Link>),
        answer: impl FnOnce(RemotePlace, u64),
    ) -> Option<()> {
        // Declared first: it is dropped without the lock.
        let region;
        let mut regions = self.told.lock();
        // Under the lock: if the registration ends from now on, the withdrawal finds the entry.
        let agent = self.agent(number);
        region = self.find(number, 0, 0).ok()?.region().clone();
        let shown = regions.standing.entry(number).or_default();
        let at = shown.iter().position(|one| one.device == device);
        if at.is_none() {
            let exposed = match agent {
                // The NIC that is the coherence owner of its words has it registered, and is
                // reached over any path of messages.
                Some(agent) => Ok(agent.exposed),
                None => link?.expose(Buffer::Region(region.whole())).map(Arc::from),
            };
            match exposed {
                Ok(exposed) => {
                    let range = region.addr()..region.addr().saturating_add(region.len());
                    let (through, by) = (Arc::downgrade(through), Vec::new());
                    shown.push(DirectRegion { exposed, range, device, through, by });
                }
                Err((why, _)) => {
                    tracing::info!(why, "a region is not made known to the NIC");
                    return None;
                }
            }
        }
        let at = at.unwrap_or(shown.len() - 1);
        let one = shown.get_mut(at)?;
        if !one.by.contains(&rank) {
            one.by.push(rank);
        }
        answer(one.exposed.place(), region.len() as u64);
        self.told.count(&regions);
        Some(())
    }

    /// Flushes NICs' writes to regions in GPU memory, on GPUs that need it.
    ///
    /// # Errors
    /// A GPU's driver has refused: it may not be seen.
    pub(crate) fn flush(&self) -> Result<(), CopyError> {
        if self.told.regions.is_empty() {
            return Ok(());
        }
        let mut gpus: Vec<Arc<dyn Gpu>> = Vec::new();
        for gpu in self.told.lock().flushes() {
            if gpus.iter().all(|known| known.info().uuid != gpu.info().uuid) {
                gpus.push(gpu.clone());
            }
        }
        for gpu in gpus {
            let dst = MemKind::Device(gpu.info().uuid);
            let failed = |cause| CopyError::Engine { dst, src: MemKind::Host, cause };
            gpu.flush_remote_writes().map_err(failed)?;
        }
        Ok(())
    }

    /// Returns `true` if NICs of some ranks reach regions whose registration has ended.
    #[inline]
    pub(crate) fn is_leaving(&self) -> bool {
        self.told.leaving.load(Ordering::Acquire) > 0
    }

    /// Returns `true` if the NIC of such a rank reaches a region whose registration has ended.
    pub(crate) fn is_leaving_to(&self, is_such: impl Fn(Rank) -> bool) -> bool {
        let regions = self.told.lock();
        regions.leaving.iter().any(|(_, one)| one.by.iter().any(|&rank| is_such(rank)))
    }

    /// Notes that a rank does not use a region through a device any more. `None`: it uses none,
    /// through none. The NIC deregisters a region without users.
    pub(crate) fn released_by(&self, rank: Rank, region: Option<u64>, device: Option<u32>) {
        let mut regions = self.told.lock();
        let is_released = |one: &DirectRegion| device.is_none_or(|device| device == one.device);
        for (number, one) in &mut regions.leaving {
            if is_released(one) && region.is_none_or(|region| region == *number) {
                one.by.retain(|by| *by != rank);
            }
        }
        if region.is_none() {
            for one in regions.standing.values_mut().flatten().filter(|one| is_released(one)) {
                one.by.retain(|by| *by != rank);
            }
        }
        let gone: Vec<_> = regions.leaving.extract_if(.., |(_, one)| one.by.is_empty()).collect();
        self.told.count(&regions);
        drop(regions);
        // Outside the lock: the drop of a region may run any code.
        drop(gone);
    }
}
