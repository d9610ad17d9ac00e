//! The beginning of transfers to this rank: messages that were offered, gets and their answers.

use super::At;
use super::carrier::Carrier;
use super::in_flight::{Event, InFlight, Run};
use super::kernel_copy::{Gathering, Pull};
use super::landing::Landing;
use super::port::Port;
use super::rx::{Means, RxOp};
use super::target::Target;
use crate::error::OpError;
use crate::names::Rank;
use crate::op::{Ended, OpContext};
use crate::protocol::rndv::{Ask, RndvReceiver};
use crate::protocol::wire::{Control, Rts, TransferVerdict};
use carrack_transports::contract::PeerMemory;
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Buffer, MemKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Port {
    /// Answers an RTS. Returns a status if the message ends here: an empty one, one that was copied
    /// at once because it came alone, or an error.
    pub(crate) fn accept(
        &self,
        carrier: &Carrier,
        (from, rts): (Rank, Rts),
        mut target: Target,
        gathering: Option<&mut Gathering>,
    ) -> Option<Ended> {
        let send_fin = |verdict: TransferVerdict| {
            self.control(carrier, from, Control::Fin { name: rts.tx, verdict });
        };
        let room = target.buffer().map_or(0, |buffer| buffer.len());
        let Some(size) = usize::try_from(rts.size).ok().filter(|&size| size <= room) else {
            send_fin(TransferVerdict::Truncated { message: rts.size, buffer: room as u64 });
            let message = usize::try_from(rts.size).unwrap_or(usize::MAX);
            return target.fail(from, message, OpError::Truncated { message, buffer: room });
        };
        if let Some(cause) = self.known_route(from).and_then(|route| route.down()) {
            // The peer sent the RTS before its end. Its bytes are lost, and its addresses are
            // invalid.
            let error = OpError::PeerDown { rank: from, cause: cause.clone() };
            return target.fail(from, size, error);
        }
        if size == 0 {
            send_fin(TransferVerdict::Done);
            return Some(target.end(from, 0, None));
        }
        if let Some(mapped) = rts.mapped {
            match self.fetch(carrier, (from, rts), mapped, target) {
                Ok(()) => return None,
                Err(back) => target = back,
            }
        }
        let place = target.buffer().map_or(MemKind::Host, |buffer| buffer.view().place().kind());
        if let Err(cause) = check_kinds(place, MemKind::Host) {
            send_fin(TransferVerdict::Failed);
            return target.fail(from, size, OpError::Copy(cause));
        }
        // Bytes for a GPU arrive in blocks, which the kernel does not copy.
        let memory = if place.is_host() { self.peer_memory(carrier, from, rts.addr) } else { None };
        let Some(memory) = memory else {
            self.receive(carrier, (from, size, target), Ask::Rts(rts.tx));
            return None;
        };
        let rx = RndvReceiver::copied(self.transfers.now(), size, rts.tx);
        let rx = RxOp::new(from, target, rx, Means::Pull(Pull::new(rts.addr, memory)));
        let mut run = Run::new(carrier, self);
        // Where others wait already, it has its turn behind them.
        match gathering.filter(|_| self.transfers.pulls.is_empty()) {
            None => run.pull_later(rx, None),
            Some(gathering) if gathering.is_alone => {
                self.transfers.alone.fetch_add(1, Ordering::AcqRel);
                run.pull_alone(rx);
                self.transfers.alone.fetch_sub(1, Ordering::AcqRel);
            }
            Some(gathering) => run.pull_later(gathering.take(&self.transfers, rx)?, None),
        }
        let arrival = run.arrivals.pop().map(|(comp, status)| (Some(comp), status));
        let ended = arrival.or_else(|| run.ended.pop_front());
        run.tell_later();
        ended
    }

    /// Returns the sender's memory if the kernel may copy from it.
    fn peer_memory(&self, carrier: &Carrier, from: Rank, addr: u64) -> Option<Arc<dyn PeerMemory>> {
        if addr == 0 {
            return None;
        }
        let route = self.route(from)?;
        let linked = match route.linked() {
            Some(linked) => linked,
            None => route.link(carrier, self).ok()??,
        };
        linked.peer_memory()
    }

    /// Begins a transfer to this rank. Returns its name.
    pub(super) fn receive(
        &self,
        carrier: &Carrier,
        (from, size, target): (Rank, usize, Target),
        ask: Ask,
    ) -> u64 {
        let name = self.transfers.now();
        let rx = RxOp::new(from, target, RndvReceiver::new(name, size, ask), Means::None);
        let mut run = Run::new(carrier, self);
        run.begin(name, InFlight::Rx(rx), Some(Event::Begin));
        run.tell_later();
        name
    }

    /// Asks for the bytes of a message whose fetch may have read withdrawn memory.
    pub(crate) fn ask_again(&self, carrier: &Carrier, landing: &mut Landing, tx: u64) {
        let (buffer, op) = (landing.transfer.take_buffers().0, landing.op.take());
        let (from, size) = (op.rank, op.size);
        let target = Target::Receive { buffer, op };
        self.receive(carrier, (from, size, target), Ask::Rts(tx));
    }

    /// Gets bytes from the owner of a region, which answers.
    pub(crate) fn get(&self, carrier: &Carrier, (buffer, op): (Buffer, OpContext), ask: Ask) {
        let (from, size) = (op.rank, op.size);
        self.receive(carrier, (from, size, Target::Get { buffer, op }), ask);
    }

    /// Expects bytes that the caller is about to request. Returns their name, for the owner.
    pub(crate) fn expect_answer(&self, carrier: &Carrier, buffer: Buffer, op: OpContext) -> u64 {
        let (from, size) = (op.rank, op.size);
        self.receive(carrier, (from, size, Target::Get { buffer, op }), Ask::Elsewhere)
    }

    /// Ends a transfer to this rank whose request was refused.
    pub(crate) fn refuse_answer(&self, carrier: &Carrier, at: At, error: OpError) {
        let mut run = Run::new(carrier, self);
        run.on(at, Event::Refused(error));
        run.tell_later();
    }
}
