//! Ranks that are waited for and have published no address.

use crate::chores::Waiting;
use crate::device::DeviceInner;
use crate::names::Rank;
use crate::runtime::Inner;

/// Ranks that are waited for and have published no address, each with a device's number. The
/// runtime looks for each again before a thread sleeps, and now and then in progress: the end of a
/// rank is heard of over a link only.
pub(crate) struct Absent(Waiting<Vec<(u32, Rank)>>);

impl Absent {
    pub(crate) fn new() -> Self {
        Self(Waiting::new())
    }

    /// Returns `true` if there is no such rank.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Inner {
    /// Makes the link to an awaited rank, now or when the rank has published its address. The end
    /// of a rank must be noticed even if nothing was ever sent to it.
    #[cold]
    pub(crate) fn listen_to(&self, rank: Rank) {
        let device = &self.default_device().0;
        if self.is_absent(device, rank) {
            self.look_out_for(device, rank);
        }
    }

    /// Notes a rank that has published no address of a device, to be looked for again.
    #[cold]
    pub(crate) fn look_out_for(&self, device: &DeviceInner, rank: Rank) {
        let mut ranks = self.absent.0.lock();
        if ranks.contains(&(device.index, rank)) {
            return;
        }
        ranks.push((device.index, rank));
        self.absent.0.set_count(ranks.len());
        drop(ranks);
        // Threads that sleep already do not watch the bootstrap.
        self.sleepers.wake();
    }

    /// Looks again for all ranks that are waited for.
    #[cold]
    pub(crate) fn look_for_absent(&self) {
        if self.absent.is_empty() {
            return;
        }
        let devices = self.devices().clone();
        let mut found = self.absent.0.lock().clone();
        found.retain(|&(index, rank)| {
            !devices.get(index as usize).is_some_and(|device| self.is_absent(&device.0, rank))
        });
        // They stay on the list until now: a thread that goes to sleep meanwhile watches for them.
        let mut ranks = self.absent.0.lock();
        ranks.retain(|rank| !found.contains(rank));
        self.absent.0.set_count(ranks.len());
    }

    /// Tries to make the link to a rank. Returns `true` if the rank has published no address yet.
    fn is_absent(&self, device: &DeviceInner, rank: Rank) -> bool {
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
