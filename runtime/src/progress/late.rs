//! Operations whose deadline has passed.

use super::Pass;
use crate::deadline::{Deadline, Deadlines};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::op::Ended;

impl Pass<'_> {
    /// Looks at everything that waits, if the earliest deadline has passed. An operation only ever
    /// goes from one place to a later one in the order of this search, or is noted anew: so none
    /// slips through.
    #[cold]
    pub(super) fn expire(&mut self) {
        let left = &self.inner.deadlines;
        let Some(now) = left.due() else { return };
        let mut ended = Vec::new();
        for engine in self.inner.engines.each() {
            let late = engine.expired_receives(now, left).into_iter();
            ended.extend(late.map(|receive| {
                let rank = receive.op.rank;
                receive.into_status(OpError::TimedOut(rank))
            }));
        }
        let devices = self.inner.devices().clone();
        for device in &devices {
            ended.extend(device.0.expire_ordered(now, left));
            ended.extend(device.0.expire_backlogs(now, left));
        }
        for device in &devices {
            self.expire_transfers(&device.0, now);
        }
        for (comp, status) in ended {
            self.moved = true;
            self.inner.suspect(status.rank);
            self.signal(comp.as_ref(), status);
        }
        // Members of groups wait for a limited time, too.
        self.inner.boards.wake();
    }
}

impl DeviceInner {
    /// Takes operations whose deadline has passed out of the backlogs, except those that an engine
    /// copies.
    fn expire_backlogs(&self, now: Deadline, left: &Deadlines) -> Vec<Ended> {
        let mut ended = Vec::new();
        for rank in self.busy_ranks() {
            let Some(route) = self.known_route(rank) else { continue };
            let mut backlog = route.backlog();
            let mut kept = std::collections::VecDeque::with_capacity(backlog.len());
            for parked in backlog.drain(..) {
                if parked.op.deadline.has_passed(now) && parked.is_idle() {
                    let rank = parked.op.rank;
                    ended.push(parked.into_status(Some(OpError::TimedOut(rank))));
                } else {
                    left.note(parked.op.deadline);
                    kept.push_back(parked);
                }
            }
            *backlog = kept;
            route.set_waiting(backlog.len());
            if backlog.is_empty() {
                self.not_busy(rank);
            }
        }
        ended
    }
}
