//! The upkeep apart from messages: backlogs that can move on, engines that are done, peers that
//! are gone.

use super::{Fetched, Landing, Owed, Pass};
use crate::error::OpError;
use crate::names::Rank;
use crate::op::OpContext;
use crate::peer::backlog::{Parked, Step};
use crate::protocol::wire::{Control, Verdict};
use carrack_transports::contract::DownCause;
use carrack_transports::mem::CopyError;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// Calls of progress of which one also asks for a copy that is not the oldest.
const EACH: usize = 4;

/// Copies that are taken out before their objects are signaled. More would allocate a larger list
/// each time.
const AT_ONCE: usize = 16;

/// Takes out the copies that are done, from one on to the first that is not, as long as there is
/// room for them. Those that stay are moved up once, for there may be thousands.
#[inline]
fn take_done(landings: &mut VecDeque<Landing>, at: usize, done: &mut Vec<Landing>) {
    let is_over = |landing: &mut Landing| landing.transfer.is_over(at == 0);
    // Most of the time the first one is not done, and that is all.
    if !landings.get_mut(at).is_some_and(is_over) {
        return;
    }
    let most = landings.len().min(at + AT_ONCE.saturating_sub(done.len()));
    let count = landings.range_mut(at..most).position(|landing| !is_over(landing));
    done.extend(landings.drain(at..count.map_or(most, |count| at + count)));
}

impl Pass<'_> {
    /// Moves on the operations in backlogs.
    #[cold]
    pub(super) fn move_backlogs(&mut self) {
        for rank in self.device.busy_ranks() {
            let Some(route) = self.device.known_route(rank).cloned() else { continue };
            let mut ended = Vec::new();
            if let Some(cause) = route.down() {
                // Parked by one thread while another failed the waiting ones.
                ended.extend(self.device.fail_backlog(&route, cause));
            } else if route.linked().is_none() {
                match route.link(self.inner, self.device) {
                    Ok(Some(_)) => {}
                    Ok(None) => continue,
                    Err(error) => {
                        let cause = DownCause::Refused(error.to_string());
                        ended.extend(self.device.fail_backlog(&route, &cause));
                    }
                }
            }
            if let Some(linked) = route.linked()
                && let Some(mut backlog) = route.try_backlog()
            {
                while let Some(front) = backlog.front_mut() {
                    let step = front.step(self.inner, self.device, linked);
                    if matches!(step, Step::Waits | Step::Held) {
                        if matches!(step, Step::Held)
                            && let Some(at) = backlog.iter().position(Parked::is_of_runtime)
                            && let Some(own) = backlog.remove(at)
                        {
                            backlog.push_front(own);
                            continue;
                        }
                        break;
                    }
                    let Some(parked) = backlog.pop_front() else { break };
                    self.moved = true;
                    if let Step::Ended(outcome) = step {
                        ended.push(parked.into_status(outcome.err()));
                    }
                }
                route.set_waiting(backlog.len());
                if backlog.is_empty() {
                    self.device.not_busy(rank);
                }
            }
            for (comp, status) in ended {
                self.signal(comp.as_ref(), status);
            }
        }
    }

    /// Finds the copies that engines have finished. Engines work in order, and polling an event
    /// takes as long as a small message. So only the oldest copy in flight is polled, and now and
    /// then one of the others in turn, since there are several engines. One that is known to end
    /// after the oldest is not polled.
    ///
    /// `ended` is empty, before and after: room for those that are done.
    pub(super) fn move_landings(&mut self, ended: &mut Vec<Landing>) {
        // Two threads may take the same turn: it only selects the next landing to poll.
        let turn = self.device.landing_turn.load(Ordering::Relaxed);
        self.device.landing_turn.store(turn.wrapping_add(1), Ordering::Relaxed);
        let mut asks_another = turn.is_multiple_of(EACH);
        while let Some(mut landings) = self.device.landing.try_lock() {
            take_done(&mut landings, 0, ended);
            if ended.len() < AT_ONCE
                && std::mem::take(&mut asks_another)
                && let Some(others @ 1..) = landings.len().checked_sub(1)
            {
                let at = 1 + turn / EACH % others;
                if let (Some(oldest), Some(other)) = (landings.front(), landings.get(at))
                    && !other.transfer.is_behind(&oldest.transfer)
                {
                    take_done(&mut landings, at, ended);
                }
            }
            if ended.is_empty() {
                break;
            }
            self.device.landing.set_count(landings.len());
            drop(landings);
            let are_all = ended.len() < AT_ONCE;
            for landing in &mut *ended {
                self.landed(landing);
            }
            ended.clear();
            if are_all {
                break;
            }
        }
    }

    /// Ends a copy whose transfer has ended.
    #[inline]
    pub(crate) fn landed(&mut self, landing: &mut Landing) {
        self.moved = true;
        let outcome = landing.transfer.failure().map_or(Ok(()), Err);
        if let (Ok(()), Some(comp)) = (&outcome, landing.signal) {
            let OpContext { rank, tag, size, .. } = landing.op;
            let signal = Control::Signal { comp, tag, size: size as u64 };
            self.device.control(self.inner, rank, signal);
        }
        if let Some(owed) = landing.owed.take()
            && self.pay(landing, *owed, outcome.as_ref().err())
        {
            return;
        }
        let (comp, status) = landing.end(outcome.err().map(OpError::Copy));
        self.signal(comp.as_ref(), status);
    }

    /// Sends the peer the message that it waits for. Returns `true` if the operation goes on: the
    /// fetch does not count, and the parts are requested.
    fn pay(&mut self, landing: &mut Landing, owed: Owed, error: Option<&CopyError>) -> bool {
        let Fetched { tx, from } = match owed {
            Owed::Fetched(fetched) => fetched,
            Owed::Pieces(carried) => {
                self.device.carried_out(self.inner, landing.op.rank, *carried, error);
                return false;
            }
        };
        if error.is_none() && from.region().is_none() {
            // It was withdrawn meanwhile: the bytes found there need not be the message.
            self.device.ask_again(self.inner, landing, tx);
            return true;
        }
        let verdict = if error.is_none() { Verdict::Done } else { Verdict::Failed };
        self.finish(landing.op.rank, tx, verdict);
        false
    }

    #[cold]
    pub(super) fn peer_down(&mut self, rank: Rank, cause: DownCause) {
        let Some(route) = self.device.route(rank).cloned() else { return };
        if !route.set_down(cause.clone()) {
            return;
        }
        tracing::info!(%rank, device = self.device.index, %cause, "peer down");
        self.device.transfers.introduced.forget(rank);
        self.device.remotes.forget(rank);
        for (_, domain) in &self.inner.domains {
            domain.somebody_has_gone();
        }
        let mut ended = self.device.fail_backlog(&route, &cause);
        ended.extend(self.device.fail_transfers(self.inner, rank, &cause));
        let error = || OpError::PeerDown { rank, cause: cause.clone() };
        ended.extend(self.device.fail_ordered(rank, &error));
        // A peer that closed one device in order may have others. It is gone when none is left.
        let is_gone = !matches!(cause, DownCause::Closed) || {
            let devices = self.inner.devices();
            devices.iter().all(|device| {
                device.0.known_route(rank).is_some_and(|route| route.down().is_some())
            })
        };
        if is_gone {
            ended.extend(self.inner.note_gone(rank, &cause));
            self.inner.regions.let_go(None, rank);
        }
        for (comp, status) in ended {
            self.signal(comp.as_ref(), status);
        }
    }
}
