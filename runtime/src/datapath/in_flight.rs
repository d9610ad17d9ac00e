//! The transfers of a device, and the work of the thread that continues one.

use super::carrier::Carrier;
use super::kernel_copy::PullStep;
use super::port::Port;
use super::rx::RxOp;
use super::tx::TxOp;
use super::{At, Transfers};
use crate::comp::{Completion, Status};
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::Rank;
use crate::op::{Ended, Ending, Few, Flow, Holder, OpContext, OpEntry, OpKind, PendingOp, Taken};
use crate::protocol::rndv::Violation;
use crate::protocol::wire::{Control, TransferVerdict};
use crate::undelivered::About;
use carrack_transports::contract::Payload;
use carrack_transports::mem::Buffer;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A transfer in the table of its device.
pub(crate) enum InFlight {
    Tx(TxOp),
    Rx(RxOp),
    Flush(Flush),
}

/// Something that happens to a transfer.
pub(crate) enum Event {
    /// A message of the peer about it.
    Control(Control),
    /// A fragment of it.
    Fragment { offset: u64, payload: Payload },
    /// The transfer begins: its way is chosen, and its bytes are asked for.
    Begin,
    /// Progress looks at it.
    Go,
    /// A chunk of the window that begins at `at` has completed.
    ChunkEnded { at: usize, failed: Option<OpError> },
    /// The owner of the memory has refused the message that asks for its bytes.
    Refused(OpError),
    /// The kernel has copied a piece of it, or could not.
    Pulled(PullStep),
    /// The RTS was not sent.
    Unsent,
    /// The transfer's deadline has passed.
    Expired,
    /// The peer is gone.
    Down(OpError),
}

/// A flush that waits until all operations on a peer's memory have completed.
pub(crate) struct Flush {
    /// Operations that began before this name have to complete.
    pub(crate) before: u64,
    pub(crate) operation: OpContext,
    /// A region of the peer that this rank does not use any more: its owner is told after the
    /// flush.
    pub(crate) releases: Option<u64>,
}

impl OpEntry for InFlight {
    type Event = Event;

    fn peer(&self) -> Rank {
        match self {
            Self::Tx(tx) => tx.peer(),
            Self::Rx(rx) => rx.peer(),
            Self::Flush(flush) => flush.operation.rank,
        }
    }

    fn kind(&self) -> OpKind {
        match self {
            Self::Tx(tx) => tx.kind(),
            Self::Rx(rx) => rx.kind(),
            Self::Flush(_) => OpKind::Flush,
        }
    }

    fn deadline(&self) -> Deadline {
        match self {
            Self::Tx(tx) => tx.deadline(),
            Self::Rx(rx) => rx.deadline(),
            Self::Flush(flush) => flush.operation.deadline,
        }
    }
}

impl InFlight {
    fn on(&mut self, run: &mut Run<'_>, at: At, event: Event) -> Flow {
        match self {
            Self::Tx(tx) => tx.on(run, event),
            Self::Rx(rx) => rx.on(run, event),
            Self::Flush(flush) => flush.on(run, at, event),
        }
    }

    /// Ends it when the runtime ends, and waits for an engine that is at work.
    fn close(self, run: &mut Run<'_>) {
        match self {
            Self::Tx(tx) => tx.close(run),
            Self::Rx(rx) => rx.close(run),
            Self::Flush(Flush { operation, .. }) => {
                run.end(operation.end(Buffer::Empty, Some(OpError::Closed)));
            }
        }
    }

    /// Describes it, for diagnostics.
    fn pending(&self) -> PendingOp {
        match self {
            Self::Tx(tx) => tx.pending(),
            Self::Rx(rx) => rx.pending(),
            Self::Flush(flush) => {
                flush.operation.pending("flush", "earlier operations on its memory")
            }
        }
    }
}

impl Flush {
    pub(crate) fn begin(self, carrier: &Carrier, device: &Port) {
        let name = device.transfers.now();
        let mut run = Run::new(carrier, device);
        run.begin(name, InFlight::Flush(self), Some(Event::Go));
        run.tell_later();
    }

    fn on(&mut self, run: &mut Run<'_>, at: At, event: Event) -> Flow {
        let peer = self.operation.rank;
        let error = match event {
            Event::Expired => Some(OpError::TimedOut(peer)),
            Event::Go if run.device.has_memory_operations(peer, self.before) => {
                run.device.transfers.list(at);
                return Flow::Stays;
            }
            Event::Go => {
                let lost = run.device.losses.cause(peer);
                lost.map(|cause| OpError::PeerDown { rank: peer, cause })
            }
            // It is listed. Operations that an engine is at end well, though the peer has gone.
            _ => return Flow::Stays,
        };
        if let Some(region) = self.releases {
            // None of them uses the region any more, whether they were lost or not.
            run.device.control(run.carrier, peer, Control::Release { region });
        }
        run.moved = true;
        run.end(self.operation.take().end(Buffer::Empty, error));
        Flow::Ends
    }
}

/// One call's work on transfers: it collects what is reported after it, outside of the table.
pub(crate) struct Run<'a> {
    pub(crate) carrier: &'a Carrier,
    pub(crate) device: &'a Port,
    pub(crate) moved: bool,
    pub(crate) ended: Few<Ended>,
    /// Messages of peers to completion objects, whole and in place.
    pub(crate) arrivals: Vec<(Arc<dyn Completion>, Status)>,
    pub(crate) violations: Vec<(Rank, Violation)>,
    /// Peers that have had a turn: of fragments to them, and of blocks for fragments from them.
    pub(super) sent_to: Vec<Rank>,
    pub(super) blocks_for: Vec<Rank>,
}

impl<'a> Run<'a> {
    pub(crate) fn new(carrier: &'a Carrier, device: &'a Port) -> Self {
        Self {
            carrier,
            device,
            moved: false,
            ended: Few::new(),
            arrivals: Vec::new(),
            violations: Vec::new(),
            sent_to: Vec::new(),
            blocks_for: Vec::new(),
        }
    }

    /// Returns `true` if it has something to report.
    #[inline]
    pub(crate) fn has_reports(&self) -> bool {
        !(self.ended.is_empty() && self.arrivals.is_empty() && self.violations.is_empty())
    }

    /// Reports the end of an operation. Whichever thread has heard of its deadline ends it here.
    pub(super) fn end(&mut self, ended: Ended) {
        self.carrier.note_end(&ended.1);
        self.ended.push_back(ended);
    }

    /// Reports a message of a peer to a completion object.
    pub(super) fn arrive(&mut self, comp: Arc<dyn Completion>, status: Status) {
        self.arrivals.push((comp, status));
    }

    pub(super) fn violated(&mut self, by: Rank, violation: Violation) {
        self.violations.push((by, violation));
    }

    /// Lets a transfer handle an event. Returns `false` if there is no such transfer.
    pub(crate) fn on(&mut self, at: At, event: Event) -> bool {
        let table = &self.device.transfers.table;
        table.on(at, event, |transfer, event| transfer.on(self, at, event)).is_none()
    }

    /// Puts a transfer back that was taken out.
    pub(super) fn give_back(&mut self, at: At, transfer: Box<InFlight>, flow: Flow) {
        let table = &self.device.transfers.table;
        table.give_back(at, transfer, flow, |transfer, event| transfer.on(self, at, event));
    }

    /// Adds a transfer, which then handles `event`. One whose peer is gone ends; a flush does when
    /// the operations before it have.
    pub(super) fn begin(&mut self, name: u64, transfer: InFlight, event: Option<Event>) {
        let (at, deadline) = ((transfer.peer(), name), transfer.deadline());
        match self.device.transfers.table.add(name, transfer, event.is_some()) {
            Ok(out) => {
                // After the insertion: a thread that searches for late operations finds the
                // transfer, or this deadline.
                self.carrier.deadlines.note(deadline);
                if let (Some(event), Some(mut transfer)) = (event, out) {
                    let flow = transfer.on(self, at, event);
                    self.give_back(at, transfer, flow);
                }
            }
            Err((mut transfer, Some(cause))) => {
                let error = OpError::PeerDown { rank: at.0, cause };
                transfer.on(self, at, Event::Down(error));
            }
            Err((_, None)) => {
                self.violated(at.0, Violation::Broken("it uses a name twice"));
            }
        }
    }

    /// Looks at the transfers whose turn has come.
    #[cold]
    pub(crate) fn move_transfers(&mut self) {
        let transfers = &self.device.transfers;
        // One thread at a time: the turns of a peer, and so its blocks, are counted in this run.
        let Some(_turn) = transfers.turn.try_lock() else { return };
        for at in transfers.listed.take() {
            match transfers.take_out(at) {
                Some(mut transfer) => {
                    let flow = transfer.on(self, at, Event::Go);
                    self.give_back(at, transfer, flow);
                }
                // Another thread carries it on, unless it has ended.
                None if transfers.table.has(at) => transfers.list(at),
                None => {}
            }
        }
    }

    /// Sends the FIN of a message, or of an operation on this rank's memory.
    pub(super) fn send_fin(&self, to: Rank, tx: u64, verdict: TransferVerdict) {
        self.device.control(self.carrier, to, Control::Fin { name: tx, verdict });
    }

    /// Leaves the reports to progress, for callers that hold locks.
    pub(crate) fn tell_later(self) {
        if !self.has_reports() {
            return;
        }
        let arrivals = self.arrivals.into_iter().map(|(comp, status)| (Some(comp), status));
        let ended = self.ended.chain(arrivals);
        self.device.undelivered.tell_later(About::Received, ended);
        for (by, violation) in self.violations {
            if let Violation::Broken(why) = violation {
                self.device.break_with(by, why.into());
            }
        }
    }

    /// Returns the ends of operations, for a caller that signals them. Leaves the other reports to
    /// progress.
    pub(crate) fn into_ended(mut self) -> Vec<Ended> {
        let ended = std::mem::replace(&mut self.ended, Few::new());
        self.tell_later();
        ended.into_iter().collect()
    }
}

/// The transfers of a device, as a place where operations wait.
pub(super) struct OfDevice<'a>(pub(super) &'a Carrier, pub(super) &'a Port);

impl Holder for OfDevice<'_> {
    /// Ends the transfers that `why` concerns. A transfer with an engine at work ends when the
    /// engine is done. A rank that may use a buffer is first kept from that. A rank that is stopped
    /// in the middle of a copy keeps the buffer.
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        let Self(carrier, device) = *self;
        let (mut run, table) = (Run::new(carrier, device), &device.transfers.table);
        match *why {
            Ending::Down(rank, cause) => {
                for name in table.fail(rank, cause) {
                    run.on((rank, name), Event::Down(why.error(rank)));
                }
            }
            Ending::Late(now, left) => {
                for at in table.expire(now, left) {
                    run.on(at, Event::Expired);
                }
            }
            Ending::Closing => {
                for transfer in table.drain() {
                    transfer.close(&mut run);
                }
            }
            Ending::Gone(..) | Ending::Closed => {}
        }
        ended.extend(run.into_ended());
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        self.1.transfers.table.each(|transfer| list(transfer.pending()));
    }

    fn count(&self) -> usize {
        let transfers = &self.1.transfers;
        // One that moves into the table is found in one of the two places, or in both.
        let alone = transfers.alone.load(Ordering::Acquire);
        alone + transfers.table.count() + transfers.packed.count()
    }
}

impl Transfers {
    /// Takes a transfer out whose RTS was not sent. `None`: it has ended, or the thread that
    /// carries it on ends it.
    pub(super) fn take_unsent(&self, at: At) -> Option<Box<InFlight>> {
        match self.table.take(at, Event::Unsent) {
            Taken::Out(transfer, _) => Some(transfer),
            Taken::Queued | Taken::Unknown(_) => None,
        }
    }

    /// Takes a transfer out, unless another thread is handling its events.
    pub(super) fn take_out(&self, at: At) -> Option<Box<InFlight>> {
        self.table.try_take(at)
    }

    /// Removes a transfer that was taken out.
    pub(super) fn remove(&self, at: At) {
        self.table.remove(at);
    }

    /// Gives a transfer that could not end at its deadline a further one.
    pub(super) fn expect_by(&self, at: At, deadline: Deadline) {
        self.table.expect_by(at, deadline);
    }
}
