//! The chores apart from messages: backlogs that can continue, engines that are done, peers that
//! are gone.

use super::Pass;
use crate::datapath::{AT_ONCE, BacklogStep, Device, Fetched, Landing, Owed, Start};
use crate::error::OpError;
use crate::names::Rank;
use crate::op::{Ending, OpContext};
use crate::peer::backlog::Parked;
use crate::protocol::flow::{Bound, Hold};
use crate::protocol::wire::{Control, TransferVerdict};
use carrack_transports::contract::DownCause;
use carrack_transports::mem::CopyError;

impl Pass<'_> {
    /// Moves on the operations in backlogs.
    #[cold]
    pub(super) fn move_backlogs(&mut self) {
        for rank in self.device.busy_ranks() {
            let Some(route) = self.device.known_route(rank).cloned() else { continue };
            let mut ended = Vec::new();
            if let Some(cause) = route.down() {
                // One thread parked an operation while another thread failed the backlog.
                self.device.end_backlog(&route, &Ending::Down(rank, cause), &mut ended);
            } else if route.linked().is_none() {
                match route.link(self.inner, self.device) {
                    Ok(Some(_)) => self.moved = true,
                    Ok(None) => continue,
                    Err(error) => {
                        let cause = error.into_cause();
                        self.device.end_backlog(&route, &Ending::Down(rank, &cause), &mut ended);
                    }
                }
            }
            if let Some(linked) = route.linked()
                && let Some(mut backlog) = route.try_backlog()
            {
                while let Some(front) = backlog.front_mut() {
                    let step = front.step(self.inner, self.device, linked);
                    if matches!(step, BacklogStep::Waits | BacklogStep::Held) {
                        if matches!(step, BacklogStep::Held)
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
                    if let BacklogStep::Ended(outcome) = step {
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

    /// Ends the copies that engines have finished.
    ///
    /// `ended` is empty, before and after: room for those that are done.
    pub(super) fn move_landings(&mut self, ended: &mut Vec<Landing>) {
        let mut turn = self.device.landings.take_turn();
        loop {
            self.device.landings.take_done(&mut turn, ended);
            // Further copies that have ended are taken out only if `ended` was full.
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
        if let (Ok(()), Some(comp)) = (&outcome, landing.notify) {
            let OpContext { rank, tag, size, .. } = landing.op;
            let notify = Control::Notify { comp, tag, size: size as u64 };
            self.device.control(self.inner, rank, notify);
        }
        if let Some(owed) = landing.owed.take()
            && self.pay(landing, *owed, outcome.as_ref().err())
        {
            return;
        }
        let is_message = landing.is_message();
        let (comp, status) = landing.end(outcome.err().map(OpError::Copy));
        match is_message {
            true => self.signal_received(comp.as_ref(), status),
            false => self.signal(comp.as_ref(), status),
        }
    }

    /// Sends the peer the message that it waits for. Returns `true` if the operation goes on: the
    /// fetch does not count, and the parts are requested.
    fn pay(&mut self, landing: &mut Landing, owed: Owed, error: Option<&CopyError>) -> bool {
        let Fetched { tx, from } = match owed {
            Owed::Fetched(fetched) => fetched,
            Owed::Pieces(carried) => {
                let mut run = self.transfers();
                run.carried_out(landing.op.rank, *carried, error);
                run.tell_later();
                return false;
            }
        };
        if error.is_none() && from.region().is_none() {
            // The owner withdrew the region meanwhile, so the bytes may not be the message.
            self.device.ask_again(self.inner, landing, tx);
            return true;
        }
        let verdict = if error.is_none() { TransferVerdict::Done } else { TransferVerdict::Failed };
        self.send_fin(landing.op.rank, tx, verdict);
        false
    }

    #[cold]
    pub(super) fn peer_down(&mut self, rank: Rank, cause: DownCause) {
        let Some(route) = self.device.route(rank).cloned() else { return };
        let cause = match cause {
            // It was looked for, since another of its devices has closed in order.
            DownCause::Gone(_) if route.is_sought() => DownCause::Closed,
            cause => cause,
        };
        if !route.set_down(cause.clone()) {
            return;
        }
        tracing::info!(%rank, device = self.device.index, %cause, "peer down");
        self.device.transfers.introduced.forget(rank);
        self.device.remotes.forget(rank);
        self.device.holds.forget(rank);
        for (_, domain) in &self.inner.domains {
            domain.a_peer_has_gone();
        }
        // A peer that closed one device in order may have others. Where it was not found, or the
        // bootstrap says that it was lost, the links of other devices tell of its end, behind its
        // last messages. It is gone when none is left.
        let is_closed = matches!(cause, DownCause::Closed);
        let is_unfound =
            matches!(cause, DownCause::Gone(_) | DownCause::Lost(_)) && !route.was_up();
        let is_left = |device: &Device| match device.0.known_route(rank) {
            Some(route) if route.down().is_some() => false,
            Some(route) => is_closed || is_unfound && route.linked().is_some(),
            None => is_closed,
        };
        let is_gone = !self.inner.devices().iter().any(is_left);
        if is_closed && !is_gone {
            self.look_for_others(rank);
        }
        self.inner.regions.released_by(rank, None, (!is_gone).then_some(self.device.index));
        // Collectives may wait for it.
        self.inner.boards.wake();
        self.end_peer(rank, &cause, is_gone);
    }

    /// Looks for the peer of a device that has closed where there was no link to it: a rank that
    /// ends closes all its devices, and the default one last.
    fn look_for_others(&self, rank: Rank) {
        let is_default = self.device.index == 0;
        for device in self.inner.devices().iter().filter(|it| is_default || it.0.index == 0) {
            let Some(route) = device.0.route(rank) else { continue };
            let linked = route.linked();
            if route.down().is_none() && linked.is_none_or(|linked| !linked.link.is_up()) {
                route.seek();
            }
            if route.down().is_none() && linked.is_none() {
                self.inner.look_out_for(device.0.index, rank);
            }
        }
    }

    /// Ends the operations of this device that wait for a peer, and all others if it `is_gone`.
    #[cold]
    fn end_peer(&mut self, rank: Rank, cause: &DownCause, is_gone: bool) {
        self.inner.note_off(rank);
        let mut ended = Vec::new();
        let down = Ending::Down(rank, cause);
        self.device.each_holder(self.inner, &mut |holder| holder.end(&down, &mut ended));
        if is_gone {
            self.inner.note_gone(rank, cause, &mut ended);
        }
        for (comp, status) in ended {
            self.signal(comp.as_ref(), status);
        }
    }

    /// Looks at everything that waits, if the earliest deadline has passed.
    #[cold]
    pub(super) fn expire(&mut self) {
        let left = &self.inner.deadlines;
        let Some(now) = left.due() else { return };
        let mut ended = Vec::new();
        self.inner.each_holder(&mut |holder| holder.end(&Ending::Late(now, left), &mut ended));
        for (comp, status) in ended {
            self.moved = true;
            self.inner.note_end(&status);
            self.signal(comp.as_ref(), status);
        }
    }

    /// Tells ranks to hold, or to continue once there is room again.
    #[cold]
    pub(super) fn move_holds(&self) {
        let (inner, device) = (self.inner, self.device);
        let bound = Bound(inner.settings.backlog());
        let now = |rank, told: Hold| {
            let waiting = device.known_route(rank).map_or(0, |route| route.waiting());
            let is_off = bound.is_off(waiting, told.is_off);
            Hold { room: inner.unexpected.room(told.room), is_off }
        };
        let (news, turn) = device.holds.news(now);
        for (rank, hold) in news {
            device.control(inner, rank, Control::Hold { hold, turn });
        }
    }

    /// Hands over the messages that have landed, from the front of the reorder queue. One at a
    /// time, outside its lock: handing over calls users' code.
    #[cold]
    pub(super) fn move_reorder_queue(&mut self) {
        while let Some((comp, status)) = self.device.reorder_queue.take_first() {
            self.signal_reordered(comp.as_ref(), status);
            self.moved = true;
        }
    }

    /// Moves on the operations that wait for events and streams of the user.
    #[cold]
    pub(super) fn move_ordered(&mut self) {
        let Some((mut copied, begin)) = self.device.ordered.take_ready() else { return };
        for landing in &mut copied {
            self.landed(landing);
        }
        if begin.is_empty() {
            return;
        }
        let device = self.inner.devices().get(self.device.index as usize).cloned();
        let Some(device) = device else { return };
        for (number, later) in begin {
            let rank = later.op().rank;
            match later.begin(&device) {
                Start::Again(later) => {
                    self.device.ordered.put_back(number, later, &self.inner.deadlines);
                    self.inner.end_ordered_if_gone(self.device, rank);
                    continue;
                }
                Start::InFlight(name) => self.inner.streams.rename(number, name),
                Start::Done((comp, status)) => {
                    // Its deadline may have passed since progress looked for late ones.
                    self.inner.note_end(&status);
                    self.device.ordered.note_loss(number, &status);
                    self.signal(comp.as_ref(), status);
                }
            }
            self.moved = true;
            self.device.ordered.forget(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Runtime;
    use crate::protocol::flow::Room;

    #[test]
    fn xoff_by_one_device_is_for_all_and_ends_with_the_peer_there() {
        let ranks = Runtime::in_process(2).unwrap();
        let other = ranks[0].device().build().unwrap();
        let (core, one, peer) = (&ranks[0].0, &ranks[0].default_device().0, Rank(1));
        let off = Hold { room: Room::Any, is_off: true };
        core.hold(one, peer, off, 1);
        assert!(other.0.route(peer).unwrap().is_off() && other.0.deaf.was_refused());
        // The other device has no link that would notice the end.
        let mut pass = Pass::new(core, one);
        pass.peer_down(peer, DownCause::Protocol("it is a test".into()));
        assert!(!other.0.route(peer).unwrap().is_off(), "it waits for a word to go on for ever");
        // A word that comes late changes nothing.
        core.hold(one, peer, off, 2);
        assert!(!other.0.route(peer).unwrap().is_off());
    }
}
