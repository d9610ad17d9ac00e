//! Everything that progress moves: the core of a runtime.

use super::complaints::Complaints;
use super::drop_told;
use super::request::dump_on_signal;
use super::retries::Retries;
use super::signal::signal;
use crate::chores::Waiting;
use crate::comp::{Ranks, Registry};
use crate::datapath::{Carrier, Device, Port};
use crate::error::PostError;
use crate::matching::{Engines, MatchingEngine};
use crate::names::Rank;
use crate::op::{Ended, Ending, Holder};
use crate::settings::DumpChoice;
use crate::streams::Streams;
use carrack_transports::contract::{DownCause, close_all};
use carrack_transports::signals::SignalListener;
use parking_lot::MutexGuard;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// The core of a runtime.
pub(crate) struct Core {
    default_device: OnceLock<Device>,
    /// Set once a call, a thread or a future has made progress.
    is_driven: AtomicBool,
    /// Set once the start has succeeded.
    has_started: AtomicBool,
    pub(crate) engines: Engines,
    pub(crate) comps: Registry,
    /// Futures that have to be polled again.
    pub(crate) retries: Retries,
    /// Errors of progress that no call has returned yet.
    pub(crate) complaints: Complaints,
    /// Listener for SIGUSR1.
    _dump: Option<SignalListener>,
    /// Ranks that are known to be gone.
    down: Waiting<HashMap<Rank, DownCause>>,
    /// The words and operations that streams of GPUs wait for.
    pub(crate) streams: Streams,
    carrier: Carrier,
}

impl Deref for Core {
    type Target = Carrier;

    #[inline(always)]
    fn deref(&self) -> &Carrier {
        &self.carrier
    }
}

impl Ranks for Core {
    fn find_gone(&self, is_meant: &dyn Fn(Rank) -> bool) -> Option<(Rank, DownCause)> {
        let down = self.down();
        let (rank, cause) = down.iter().find(|(rank, _)| is_meant(**rank))?;
        Some((*rank, cause.clone()))
    }

    fn listen_to(&self, rank: Rank) {
        self.carrier.listen_to(self.default_device(), rank);
    }
}

impl Core {
    pub(crate) fn new(carrier: Carrier) -> Self {
        let chores = &carrier.chores;
        Self {
            default_device: OnceLock::new(),
            is_driven: AtomicBool::new(false),
            has_started: AtomicBool::new(false),
            engines: Engines::new(),
            comps: Registry::new(),
            retries: Retries::new(chores),
            complaints: Complaints::new(chores),
            _dump: dump_on_signal(carrier.settings.dump() == DumpChoice::Usr1, chores),
            down: Waiting::new(),
            streams: Streams::default(),
            carrier,
        }
    }

    /// Notes that something makes progress.
    #[inline]
    pub(crate) fn note_driven(&self) {
        if !self.is_driven() {
            self.is_driven.store(true, Ordering::Relaxed);
        }
    }

    /// Returns `true` if a call, a thread or a future has made progress before.
    #[inline]
    pub(crate) fn is_driven(&self) -> bool {
        self.is_driven.load(Ordering::Relaxed)
    }

    /// Notes that the start has succeeded.
    pub(crate) fn note_started(&self) {
        self.has_started.store(true, Ordering::Relaxed);
    }

    pub(crate) fn set_default_device(&self, device: Device) {
        let _ = self.default_device.set(device);
    }

    pub(crate) fn down(&self) -> MutexGuard<'_, HashMap<Rank, DownCause>> {
        self.down.lock()
    }

    /// Returns `true` if any rank is known to be gone.
    #[inline]
    pub(crate) fn any_down(&self) -> bool {
        !self.down.is_empty()
    }

    /// Shows `each` every place where operations wait: those of the runtime, then those of its
    /// devices, to which receives move on.
    pub(super) fn each_holder(&self, each: &mut dyn FnMut(&dyn Holder)) {
        let all: [&dyn Holder; 2] = [&self.streams, &self.boards];
        all.into_iter().for_each(&mut *each);
        self.engines.each().for_each(|engine| each(engine));
        let devices = self.devices().clone();
        devices.iter().for_each(|device| device.0.each_holder(self, each));
    }

    /// Notes that a rank is gone.
    pub(super) fn note_gone(&self, rank: Rank, cause: &DownCause, ended: &mut Vec<Ended>) {
        let mut down = self.down();
        down.entry(rank).or_insert_with(|| cause.clone());
        self.down.set_count(down.len());
        drop(down);
        // Pairs with the fence in `Engines::begin`.
        fence(Ordering::SeqCst);
        self.each_holder(&mut |holder| holder.end(&Ending::Gone(rank, cause), ended));
    }

    #[inline]
    pub(crate) fn default_device(&self) -> &Device {
        // Set before `start` gives the runtime out.
        match self.default_device.get() {
            Some(device) => device,
            None => unreachable!("a runtime is handed out with its default device"),
        }
    }

    pub(crate) fn engine(&self, index: u16) -> &MatchingEngine {
        match self.engines.get(index) {
            Some(engine) => engine,
            None => unreachable!("engines 0 and 1 are within the limit"),
        }
    }

    /// Ends parked operations with a gone rank. The thread that noted its end may have searched
    /// before an operation was parked.
    pub(crate) fn end_ordered_if_gone(&self, device: &Port, rank: Rank) {
        let by_route = device.known_route(rank).and_then(|route| route.down().cloned());
        let Some(cause) = by_route.or_else(|| self.down().get(&rank).cloned()) else { return };
        let mut ended = Vec::new();
        device.ordered.end(&Ending::Gone(rank, &cause), &mut ended);
        device.tell_later(ended);
    }

    /// Returns the reason of a rank's end, if progress has noticed it, or if there is no such rank.
    pub(crate) fn known_down(&self, rank: Rank) -> Option<DownCause> {
        if rank.0 >= self.size {
            let error = PostError::NoSuchRank { rank, last: self.size - 1 };
            return Some(DownCause::Lost(error.to_string()));
        }
        self.down().get(&rank).cloned()
    }

    /// Returns the reason of a rank's end, if progress or an operation has noticed it.
    pub(crate) fn told_down(&self, rank: Rank) -> Option<DownCause> {
        self.known_down(rank).or_else(|| {
            let devices = self.devices();
            devices.iter().find_map(|device| device.0.known_route(rank)?.told_down().cloned())
        })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        // Threads that sleep for futures hold no handle of the runtime: this wakes them at its end.
        self.sleepers.wake();
        self.exposures.end();
        self.complaints.end();
        // A peer may wait for a stream that waits here.
        self.streams.end(&Ending::Closing, &mut Vec::new());
        let devices = self.devices().clone();
        devices.iter().for_each(|device| device.0.set_closed());
        let lanes = devices.iter().flat_map(|device| device.0.lanes.iter());
        close_all(&lanes.map(|lane| &*lane.device).collect::<Vec<_>>());
        for why in [Ending::Closing, Ending::Closed] {
            let mut ended = Vec::new();
            self.each_holder(&mut |holder| holder.end(&why, &mut ended));
            for (comp, status) in ended {
                // The runtime ends, so a status for a full object is dropped.
                let _ = signal(comp.as_ref(), status);
            }
        }
        drop_told();
        // A rank that unwinds, or could not start, has not ended in order, so the launcher is not
        // told that it has.
        if !std::thread::panicking()
            && self.has_started.load(Ordering::Relaxed)
            && let Err(error) = self.bootstrap.finish()
        {
            tracing::debug!(%error, "the launcher did not hear that this rank has finished");
        }
    }
}
