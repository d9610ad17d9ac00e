//! Everything of a rank by which bytes come and go.

use super::mapped::{Exposures, Unmapped};
use super::port::{Device, Port};
use super::words::Words;
use crate::boards::Boards;
use crate::comp::Status;
use crate::error::OpError;
use crate::local::Local;
use crate::names::Rank;
use crate::peer::{Absent, Suspects};
use crate::protocol::flow::Hold;
use crate::region::Regions;
use crate::staging::Staging;
use crate::undelivered::UnexpectedBudget;
use carrack_transports::mem::KnownMemory;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Everything of a rank by which bytes come and go.
pub(crate) struct Carrier {
    devices: RwLock<Vec<Device>>,
    /// Set if there are devices other than the default one.
    has_further_devices: AtomicBool,
    /// Lock that is held while a device is made.
    pub(crate) making_devices: Mutex<()>,
    pub(crate) regions: Arc<Regions>,
    /// Lock that is held while XOFF of a peer to one device is noted for all devices.
    noting_off: Mutex<()>,
    /// Messages that wait for their receives.
    pub(crate) unexpected: UnexpectedBudget,
    pub(crate) absent: Absent,
    pub(crate) suspects: Suspects,
    pub(crate) boards: Boards,
    /// GPU memory in which messages lie.
    pub(crate) exposures: Exposures,
    /// The reasons why GPU memory of other ranks was not mapped.
    pub(crate) unmapped: Unmapped,
    /// Host memory on the way to and from GPUs.
    pub(crate) staging: Arc<Staging>,
    /// Words of GPUs that are being changed for peers.
    pub(crate) words: Words,
    local: Local,
}

impl Deref for Carrier {
    type Target = Local;

    #[inline(always)]
    fn deref(&self) -> &Local {
        &self.local
    }
}

impl Carrier {
    pub(crate) fn new(local: Local) -> Self {
        let (settings, chores) = (&local.settings, &local.chores);
        Self {
            devices: RwLock::default(),
            has_further_devices: AtomicBool::new(false),
            making_devices: Mutex::new(()),
            regions: Arc::new(Regions::new()),
            noting_off: Mutex::new(()),
            unexpected: UnexpectedBudget::new(settings.unexpected(), settings.packet_size()),
            absent: Absent::new(chores),
            suspects: Suspects::new(chores),
            boards: Boards::new(local.rank, local.size),
            exposures: Exposures::default(),
            unmapped: Unmapped::default(),
            staging: Arc::default(),
            words: Words::new(chores),
            local,
        }
    }

    /// Notes the end of an operation: the peer of one that was late is silent.
    #[inline]
    pub(crate) fn note_end(&self, status: &Status) {
        if let Some(OpError::TimedOut(rank)) = status.error.as_deref() {
            self.suspects.add(&self.local, *rank);
        }
    }

    pub(crate) fn devices(&self) -> RwLockReadGuard<'_, Vec<Device>> {
        self.devices.read()
    }

    pub(crate) fn add_device(&self, device: Device) {
        let mut devices = self.devices.write();
        devices.push(device);
        self.has_further_devices.store(devices.len() > 1, Ordering::Release);
        drop(devices);
        (0..self.size).map(Rank).for_each(|peer| self.note_off(peer));
    }

    /// Notes the hold that a peer tells a device.
    pub(crate) fn hold(&self, device: &Port, peer: Rank, hold: Hold, turn: u64) {
        device.hold(peer, hold, turn);
        self.note_off(peer);
    }

    /// Notes for all devices that a peer has told XOFF to one of them, or to none any more. A
    /// message that comes by one device may be replied to by another. A device whose peer is gone
    /// hears no XON any more.
    pub(crate) fn note_off(&self, peer: Rank) {
        let _noting = self.noting_off.lock();
        let devices = self.devices();
        let routes = || devices.iter().filter_map(|device| device.0.known_route(peer));
        if routes().all(|route| route.down().is_some() || !route.was_told_off()) {
            routes().for_each(|route| route.set_off(false));
        } else {
            for device in &*devices {
                device.0.deaf.set_refused();
                device.0.route(peer).inspect(|route| route.set_off(true));
            }
        }
    }

    /// Returns `true` if there are devices other than the default one: without the lock, as
    /// progress asks each time.
    #[inline]
    pub(crate) fn has_further_devices(&self) -> bool {
        self.has_further_devices.load(Ordering::Acquire)
    }

    #[cold]
    pub(crate) fn look_after_domains(&self) {
        self.look_for_absent();
        KnownMemory::of_the_process().look_after();
        self.exposures.withdraw_gone();
        for device in self.devices().iter() {
            device.0.transfers.introduced.release_withdrawn();
        }
        for (_, domain) in &self.domains {
            domain.look_after();
        }
        for driver in &self.drivers {
            driver.look_after();
        }
    }

    /// Makes the link to an awaited rank, now or when the rank has published its address. The end
    /// of a rank must be noticed even if nothing was ever sent to it.
    #[cold]
    pub(crate) fn listen_to(&self, device: &Device, rank: Rank) {
        if self.is_absent(device, rank) {
            self.look_out_for(device.0.index, rank);
        }
    }

    /// Notes a rank that has published no address of a device, to be looked for again.
    #[cold]
    pub(crate) fn look_out_for(&self, device: u32, rank: Rank) {
        if self.absent.add(device, rank) {
            // Threads that sleep already do not watch the bootstrap.
            self.sleepers.wake();
        }
    }

    /// Looks again for all ranks that are waited for.
    #[cold]
    pub(crate) fn look_for_absent(&self) {
        if self.absent.is_empty() {
            return;
        }
        let devices = self.devices().clone();
        let mut found = self.absent.all();
        found.retain(|&(index, rank)| {
            !devices.get(index as usize).is_some_and(|device| self.is_absent(device, rank))
        });
        // They stay on the list until now, so that a thread that goes to sleep meanwhile watches
        // for them.
        self.absent.remove(&found);
    }

    /// Tries to make the link to a rank. Returns `true` if the rank has published no address yet.
    fn is_absent(&self, Device(device): &Device, rank: Rank) -> bool {
        let Some(route) = device.route(rank).filter(|route| route.linked().is_none()) else {
            return false;
        };
        match route.link(self, device) {
            Ok(linked) => linked.is_none(),
            Err(error) => {
                tracing::debug!(%error, rank = rank.0, "no link to a rank that is waited for");
                // A collective that waits for the rank asks for the reason itself.
                self.boards.wake();
                false
            }
        }
    }
}
