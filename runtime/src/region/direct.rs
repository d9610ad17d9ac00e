//! Regions that NICs reach by themselves.
//!
//! ```text
//! user of the region                     owner
//!   ask (region) ─────────────────────►  registers the region with its NIC, and notes the user
//!   ◄─────── told (region, place, length)
//!   the NIC writes and reads
//!                                        the registration ends
//!   ◄────────────────── withdraw (region)
//!   let go (region) ──────────────────►  after its last operation there; after the last user's,
//!                                        the NIC deregisters the region
//! ```
//!
//! A NIC knows no generations: an access to unregistered memory breaks the connection. So the
//! owner knows every rank that has a region's place, and keeps the NIC's registration while one
//! may use it. Until a rank has the place, and for operations that a NIC does not take, the
//! owner's progress carries them out.

use super::Regions;
use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use carrack_transports::contract::{Exposed, Link, RemotePlace};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::{Buffer, CopyError, MemKind};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::sync::Arc;

/// The knowledge of a peer's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Knowledge {
    /// There is no place, and the owner was not asked.
    Nothing,
    /// Its owner was asked.
    Asked,
    /// The place of the region, and its length.
    Place(RemotePlace, u64),
    /// The owner has refused it.
    Refused,
    /// Its registration has ended.
    Ended,
}

/// A peer's region, as one device knows it. A user of the place holds the lock until the NIC has
/// the operation.
#[derive(Debug)]
pub(crate) struct Remote(RwLock<Knowledge>);

impl Remote {
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
pub(crate) struct Remotes(Mutex<HashMap<(Rank, u64), Arc<Remote>>>);

impl Remotes {
    fn all(&self) -> MutexGuard<'_, HashMap<(Rank, u64), Arc<Remote>>> {
        self.0.lock()
    }

    /// Returns the entry of a region.
    pub(crate) fn of(&self, owner: Rank, number: u64) -> Arc<Remote> {
        let fresh = || Arc::new(Remote(RwLock::new(Knowledge::Nothing)));
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

/// A region of this rank that NICs of others reach.
struct Shown {
    exposed: Arc<dyn Exposed>,
    /// Through which device.
    device: u32,
    /// The ranks that know of it.
    by: Vec<Rank>,
}

/// The news for a rank that a region's registration has ended.
pub(crate) struct Withdrawal {
    pub(crate) number: u64,
    pub(crate) device: u32,
    pub(crate) rank: Rank,
}

/// The places that other ranks were told.
pub(super) struct AllTold {
    /// Its count is that of regions in GPU memory whose GPUs need a flush before NICs' writes are
    /// visible.
    told: Waiting<Told>,
    /// The ranks to tell that registrations have ended.
    withdrawals: Waiting<Vec<Withdrawal>>,
}

#[derive(Default)]
struct Told {
    /// The entries by the region's number, one for each device.
    standing: HashMap<u64, Vec<Shown>>,
    /// Regions whose registration has ended, and that other ranks still know.
    leaving: Vec<(u64, Shown)>,
}

impl Told {
    /// Returns the GPUs that need a flush before NICs' writes are visible.
    fn flushes(&self) -> impl Iterator<Item = &Arc<dyn Gpu>> {
        let leaving = self.leaving.iter().map(|(_, one)| one);
        self.standing.values().flatten().chain(leaving).filter_map(|one| one.exposed.flush())
    }
}

impl AllTold {
    pub(super) fn new(chores: &Chores) -> Self {
        Self {
            told: Waiting::new(),
            withdrawals: Waiting::for_progress(chores, Chore::Withdrawals),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock()
    }

    /// Updates the count after a region was shown or removed.
    fn count(&self, told: &Told) {
        self.told.set_count(told.flushes().count());
    }

    /// Ends a registration: the ranks that know of it will be told.
    pub(super) fn withdraw(&self, number: u64) {
        let mut told = self.lock();
        let Some(shown) = told.standing.remove(&number) else { return };
        // Entries without users, as those ranks are gone.
        let (unused, used): (Vec<_>, Vec<_>) = shown.into_iter().partition(|one| one.by.is_empty());
        let mut withdrawals = self.withdrawals.lock();
        for one in used {
            let device = one.device;
            withdrawals.extend(one.by.iter().map(|&rank| Withdrawal { number, device, rank }));
            told.leaving.push((number, one));
        }
        self.withdrawals.set_count(withdrawals.len());
        drop(withdrawals);
        self.count(&told);
        drop(told);
        // Without the locks: the drop of a region may run any code.
        drop(unused);
    }
}

impl Regions {
    /// Returns the place of a region for a rank, by the NIC of the link to that rank. `None`: there
    /// is no such region or NIC, or the NIC refuses the region.
    pub(crate) fn tell(
        &self,
        number: u64,
        (device, rank): (u32, Rank),
        link: Option<&dyn Link>,
    ) -> Option<(RemotePlace, u64)> {
        // Checked first: if the registration ends meanwhile there is no region, and no rank gets a
        // place without this.
        let words = self.words(number);
        let region = self.find(number, 0, 0).ok()?.region().clone();
        let mut told = self.told.lock();
        let shown = told.standing.entry(number).or_default();
        let at = shown.iter().position(|one| one.device == device);
        if at.is_none() {
            let exposed = match words {
                // The NIC that is the coherence owner of its words has it registered, and is
                // reached over any path of messages.
                Some(words) => Ok(words.exposed),
                None => link?.expose(Buffer::Region(region.whole())).map(Arc::from),
            };
            match exposed {
                Ok(exposed) => shown.push(Shown { exposed, device, by: Vec::new() }),
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
        let place = one.exposed.place();
        self.told.count(&told);
        drop(told);
        // The registration may have ended meanwhile: the region is then withdrawn behind this
        // answer.
        if self.find(number, 0, 0).is_err() {
            self.told.withdraw(number);
        }
        Some((place, region.len() as u64))
    }

    /// Flushes NICs' writes to regions in GPU memory, on GPUs that need it.
    ///
    /// # Errors
    /// A GPU's driver has refused: it may not be seen.
    pub(crate) fn flush(&self) -> Result<(), CopyError> {
        if self.told.told.is_empty() {
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

    /// Takes the ranks to tell that registrations have ended.
    pub(crate) fn withdrawals(&self) -> Vec<Withdrawal> {
        let mut withdrawals = self.told.withdrawals.lock();
        self.told.withdrawals.set_count(0);
        std::mem::take(&mut withdrawals)
    }

    /// Notes that a rank does not use a region of a device any more, or no region at all after its
    /// end (`None`). The NIC deregisters a region without users.
    pub(crate) fn released_by(&self, which: Option<(u64, u32)>, rank: Rank) {
        let mut told = self.told.lock();
        for (number, one) in &mut told.leaving {
            if which.is_none_or(|which| which == (*number, one.device)) {
                one.by.retain(|by| *by != rank);
            }
        }
        if which.is_none() {
            for one in told.standing.values_mut().flatten() {
                one.by.retain(|by| *by != rank);
            }
        }
        let gone: Vec<_> = told.leaving.extract_if(.., |(_, one)| one.by.is_empty()).collect();
        self.told.count(&told);
        drop(told);
        // Outside the lock: the drop of a region may run any code.
        drop(gone);
    }
}
