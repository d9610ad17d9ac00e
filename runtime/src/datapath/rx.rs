//! The actions of receivers.

use super::At;
use super::in_flight::{Event, Run};
use super::inflow::Inflow;
use super::kernel_copy::{Pull, PullStep};
use super::target::Target;
use super::tx::abandon;
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::Rank;
use crate::op::{Flow, OpKind, PendingOp};
use crate::protocol::rndv::{Actions, Limits, RndvReceiver, RxAction, RxEvent, Scheme, Violation};
use crate::protocol::wire::{Control, TransferVerdict};
use carrack_transports::contract::{Exposed, ExposedChunks, Payload, PeerMemoryError};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, CopyError, MemKind};

/// Shorter messages go in fragments: copying them takes less time than a registration with a NIC.
/// An estimate; on ConnectX devices a registration takes some tens of microseconds.
pub(crate) const WRITTEN: usize = 32 << 10;

/// A transfer to this rank (a message, a put, or the answer to a get), with its destination.
pub(crate) struct RxOp {
    from: Rank,
    /// Kind of the operation, also when its target is gone.
    kind: OpKind,
    target: Target,
    rx: RndvReceiver,
    means: Means,
    is_listed: bool,
    /// The error of an engine, with which the message ends when all bytes have come.
    lost: Option<Box<OpError>>,
    /// The event that ends it as soon as no engine uses its buffer, and its error.
    failing: Option<Box<(RxEvent, OpError)>>,
}

/// The means by which bytes come, apart from fragments that the CPU copies.
pub(super) enum Means {
    None,
    /// Blocks on the way to a GPU.
    Inflow(Box<Inflow>),
    /// The buffer, while its sender's NIC may write to it.
    Exposed(Box<dyn Exposed>),
    /// The same, chunk by chunk, and the largest number of bytes of a chunk.
    Chunks(Box<dyn ExposedChunks>, usize),
    /// The kernel's copy.
    Pull(Pull),
}

impl RxOp {
    pub(super) fn new(from: Rank, target: Target, rx: RndvReceiver, means: Means) -> Self {
        let (is_listed, lost, failing) = (false, None, None);
        let kind = target.kind();
        Self { from, kind, target, rx, means, is_listed, lost, failing }
    }

    pub(super) fn peer(&self) -> Rank {
        self.from
    }

    pub(super) fn kind(&self) -> OpKind {
        self.kind
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.target.deadline()
    }

    /// Returns the sender's name for the message.
    pub(super) fn tx(&self) -> u64 {
        self.rx.tx()
    }

    pub(super) fn size(&self) -> usize {
        self.rx.size()
    }

    /// Returns the kernel's copy, and the buffer for it.
    pub(super) fn pull(&mut self) -> Option<(&mut Pull, Option<&mut Buffer>)> {
        match &mut self.means {
            Means::Pull(pull) => Some((pull, self.target.buffer())),
            _ => None,
        }
    }

    /// Returns the same, and the bytes of the message.
    pub(super) fn parts(&mut self) -> Option<(&mut Pull, Option<&mut Buffer>, usize)> {
        let size = self.size();
        self.pull().map(|(pull, buffer)| (pull, buffer, size))
    }

    pub(super) fn pending(&self) -> PendingOp {
        let size = self.rx.size() as u64;
        let (what, waits_for) = match &self.means {
            Means::Pull(pull) => ("message on its way here", pull.waits_for().into()),
            _ => {
                let waits_for = format!("its fragments, {} B have come", self.rx.got());
                ("message or get on its way here", waits_for)
            }
        };
        PendingOp { what, rank: self.from, tag: self.target.tag(), size, waits_for }
    }

    pub(super) fn on(&mut self, run: &mut Run<'_>, event: Event) -> Flow {
        let mut fragment = None;
        let (event, error) = match event {
            Event::Begin => (RxEvent::Begin(self.choose(run)), None),
            Event::Go => {
                self.is_listed = false;
                if let Some(failing) = self.failing.take() {
                    let (event, error) = *failing;
                    return self.fail(run, event, error);
                }
                match self.step(run) {
                    Some(event) => (event, None),
                    None => return self.stay(run),
                }
            }
            Event::Fragment { offset, payload } => {
                let len = payload.len();
                fragment = Some(payload);
                (RxEvent::Fragment { offset, len }, None)
            }
            Event::Control(Control::FinWrite { at, .. }) => (RxEvent::FinWrite { at }, None),
            Event::Control(Control::Unwritten { at, .. }) => (RxEvent::Unwritten { at }, None),
            Event::Control(Control::Fin { verdict, .. }) => match verdict.error(self.from) {
                Some(error) => return self.fail(run, RxEvent::Fin(verdict), error),
                None => (RxEvent::Fin(verdict), None),
            },
            Event::Refused(error) => {
                return self.fail(run, RxEvent::Fin(TransferVerdict::Failed), error);
            }
            Event::Expired if self.is_engine_busy() => {
                // The deadline has passed, so it is checked again soon.
                let (at, deadline) = (self.at(), self.deadline());
                run.device.transfers.expect_by(at, deadline);
                run.carrier.deadlines.note(deadline);
                return Flow::Stays;
            }
            Event::Expired => (RxEvent::Expired, Some(OpError::TimedOut(self.from))),
            Event::Down(error) => {
                if self.kind == OpKind::Memory {
                    run.device.losses.note_error(&error);
                }
                return self.fail(run, RxEvent::Down, error);
            }
            Event::Pulled(step) => return self.pulled(run, step),
            Event::Control(_) | Event::ChunkEnded { .. } | Event::Unsent => {
                run.violated(self.from, Violation::Stray);
                return Flow::Stays;
            }
        };
        self.handle(run, event, fragment, error)
    }

    /// Returns its peer and its name.
    pub(super) fn at(&self) -> At {
        (self.from, self.rx.name())
    }

    /// Ends the operation with an error, now or when the engine that fills its buffer is done.
    fn fail(&mut self, run: &mut Run<'_>, event: RxEvent, error: OpError) -> Flow {
        // Nothing comes from a peer that is gone, whatever it has said before.
        let (event, error) = match self.failing.take() {
            Some(failing) if matches!(failing.0, RxEvent::Down) => *failing,
            _ => (event, error),
        };
        if self.is_engine_busy() {
            self.failing = Some(Box::new((event, error)));
            return self.stay(run);
        }
        self.handle(run, event, None, Some(error))
    }

    /// Handles an event of the protocol, and carries out its actions. `error` is that of the event.
    fn handle(
        &mut self,
        run: &mut Run<'_>,
        event: RxEvent,
        mut fragment: Option<Payload>,
        mut error: Option<OpError>,
    ) -> Flow {
        let (mut next, mut actions) = (Some(event), Actions::new());
        loop {
            if let Some(event) = next.take() {
                let (chunk, nics) = match &self.means {
                    Means::Chunks(chunks, len) => (*len, chunks.nics()),
                    _ => (usize::MAX, 1),
                };
                let limits = Limits { chunk, nics };
                if let Err(violation) = self.rx.on(event, &limits, &mut actions) {
                    run.violated(self.from, violation);
                }
            }
            let Some(action) = actions.pop_front() else { return self.stay(run) };
            match action {
                RxAction::Send(control) => run.device.control(run.carrier, self.from, control),
                RxAction::Store(offset) => {
                    if let Some(payload) = fragment.take()
                        && let Err(why) = self.store(offset, &payload)
                    {
                        // The sender broke the protocol and the bytes are missing, so all
                        // operations with it end.
                        run.violated(self.from, Violation::Broken(why));
                        return self.stay(run);
                    }
                }
                RxAction::Show { at, len } => {
                    if let Means::Chunks(chunks, _) = &mut self.means {
                        next = Some(match chunks.show(at, len) {
                            Ok(place) => RxEvent::Shown { at, len, place },
                            Err(why) => {
                                tracing::info!(from = %self.from, why, "a message goes on in \
                                    fragments");
                                RxEvent::NotShown
                            }
                        });
                    }
                }
                RxAction::Hide(at) => {
                    if let Means::Chunks(chunks, _) = &mut self.means {
                        chunks.hide(at);
                    }
                }
                RxAction::Flush => self.flush(),
                RxAction::TakeBack => self.take_back(),
                RxAction::Choose => next = Some(RxEvent::Begin(self.by_fragments())),
                RxAction::Arrived => {
                    self.arrived(run);
                    return Flow::Ends;
                }
                RxAction::Fail => {
                    let error = error.take().unwrap_or(OpError::Refused(self.from));
                    self.give_up(run, error);
                }
                RxAction::Leave => {
                    self.release(run);
                    return Flow::Ends;
                }
            }
        }
    }

    /// Lists it for progress, if that can continue it.
    fn stay(&mut self, run: &Run<'_>) -> Flow {
        let wants = self.rx.wants_to_go() || self.failing.is_some();
        if wants && !std::mem::replace(&mut self.is_listed, true) {
            run.device.transfers.list(self.at());
        }
        Flow::Stays
    }

    fn is_engine_busy(&mut self) -> bool {
        match &mut self.means {
            Means::Inflow(inflow) => inflow.is_busy(),
            _ => false,
        }
    }

    /// Moves the engine on, and takes blocks for further bytes: at least one if no earlier message
    /// of the sender has had a turn.
    fn step(&mut self, run: &mut Run<'_>) -> Option<RxEvent> {
        let (Means::Inflow(inflow), Some(buffer)) = (&mut self.means, self.target.buffer()) else {
            return Some(RxEvent::Blocks(0));
        };
        let must = !run.blocks_for.contains(&self.from);
        run.blocks_for.push(self.from);
        match inflow.step(buffer, &run.carrier.staging, must) {
            Ok(stepped) => {
                run.moved |= stepped.moved;
                let granted = inflow.granted();
                Some(if stepped.is_complete { RxEvent::Placed } else { RxEvent::Blocks(granted) })
            }
            Err(cause) => {
                // The engine has failed: the blocks go back, and further bytes are dropped.
                self.means = Means::None;
                self.lost = Some(Box::new(OpError::Copy(cause)));
                run.moved = true;
                Some(RxEvent::Lost)
            }
        }
    }

    /// Copies a fragment to its place.
    fn store(&mut self, offset: usize, payload: &Payload) -> Result<(), &'static str> {
        let cannot = "it sent a fragment that cannot be copied";
        if let Means::Inflow(inflow) = &mut self.means {
            return inflow.take(offset, payload);
        }
        let Some(buffer) = self.target.buffer() else { return Ok(()) };
        let room = buffer.view_mut().ok_or(cannot)?.part(offset, payload.len());
        copy_now(room, payload.view()).map_err(|_| cannot)
    }

    /// Lets the GPU see what the NIC has written.
    fn flush(&mut self) {
        if let Means::Exposed(exposed) = &self.means
            && let Some(gpu) = exposed.flush()
            && let Err(cause) = gpu.flush_remote_writes()
        {
            let dst = MemKind::Device(gpu.info().uuid);
            let error = CopyError::Engine { dst, src: MemKind::Host, cause };
            self.lost = Some(Box::new(OpError::Copy(error)));
        }
    }

    /// Takes the buffer back from the sender's NIC.
    fn take_back(&mut self) {
        let back = match std::mem::replace(&mut self.means, Means::None) {
            Means::Exposed(exposed) => exposed.take_back(),
            Means::Chunks(chunks, _) => chunks.take_back(),
            other => {
                self.means = other;
                return;
            }
        };
        if let Some(buffer) = self.target.buffer() {
            *buffer = back;
        }
    }

    /// Ends the operation without its bytes. The buffer stays while the sender may write to it.
    fn give_up(&mut self, run: &mut Run<'_>, error: OpError) {
        run.moved = true;
        let is_timeout = matches!(error, OpError::TimedOut(_));
        match std::mem::replace(&mut self.means, Means::None) {
            Means::Inflow(mut inflow) => {
                if let Some(buffer) = self.target.buffer() {
                    inflow.settle(buffer);
                }
            }
            Means::Pull(mut pull) => {
                if is_timeout {
                    pull.keep(self.target.buffer().map(std::mem::take));
                    self.means = Means::Pull(pull);
                } else if pull.is_helped() && !run.device.is_revoked(self.from) {
                    abandon(
                        self.target.buffer().map(std::mem::take).unwrap_or_default(),
                        self.from,
                    );
                }
            }
            other => self.means = other,
        }
        let target = std::mem::replace(&mut self.target, Target::Nowhere);
        if let Some(ended) = target.fail(self.from, self.rx.size(), error) {
            run.end(ended);
        }
    }

    /// Ends the operation, whose bytes are all on this side: in place, or lost.
    fn arrived(&mut self, run: &mut Run<'_>) {
        run.moved = true;
        let (from, size, lost) = (self.from, self.rx.size(), self.lost.take());
        let verdict = if lost.is_none() { TransferVerdict::Done } else { TransferVerdict::Failed };
        match std::mem::replace(&mut self.target, Target::Nowhere) {
            Target::Pieces { buffer, asked } => run.carry_out(from, *asked, &buffer),
            target @ Target::Put { tx, .. } => {
                run.device.control(run.carrier, from, Control::Fin { name: tx, verdict });
                match lost {
                    None => run.end(target.end(from, size, None)),
                    Some(error) => tracing::warn!(%from, %error, "a put could not be carried out"),
                }
            }
            target => {
                let is_am = matches!(target, Target::Am { .. });
                match target.end(from, size, lost.map(|error| *error)) {
                    (Some(comp), status) if is_am => run.arrive(comp, status),
                    ended => run.end(ended),
                }
            }
        }
    }

    /// Ends it when the runtime ends, after waiting for an engine that uses its buffer.
    pub(super) fn close(mut self, run: &mut Run<'_>) {
        self.take_back();
        if !self.rx.has_ended() {
            self.give_up(run, OpError::Closed);
        }
        self.release(run);
    }

    /// Releases the buffer of an operation that has timed out, unless its sender may still write to
    /// it: then the memory stays taken.
    fn release(&mut self, run: &Run<'_>) {
        if let Means::Pull(pull) = &mut self.means
            && pull.is_helped()
            && !run.device.is_revoked(self.from)
            && let Some(buffer) = pull.take_kept()
        {
            abandon(buffer, self.from);
        }
    }
}

impl RxOp {
    /// Chooses the scheme, and prepares its means.
    fn choose(&mut self, run: &Run<'_>) -> Scheme {
        self.in_chunks(run).or_else(|| self.as_a_whole(run)).unwrap_or_else(|| self.by_fragments())
    }

    fn by_fragments(&mut self) -> Scheme {
        let size = self.rx.size();
        match self.target.buffer().and_then(|buffer| Inflow::into(buffer, size)) {
            Some(inflow) => {
                self.means = Means::Inflow(inflow);
                Scheme::Staged
            }
            None => {
                self.means = Means::None;
                Scheme::Fragments
            }
        }
    }

    /// Returns `true` if the sender's NIC may write the message. It may write no answer to a get,
    /// and no put: with a reachable region a put has no RTS.
    fn may_be_written(&self) -> bool {
        self.rx.tx() != 0 && !self.target.is_memory()
    }

    /// Lets the sender's NIC write to the first chunk of a long message's buffer.
    fn in_chunks(&mut self, run: &Run<'_>) -> Option<Scheme> {
        let linked = run.device.known_route(self.from)?.linked()?;
        let chunk = linked.caps.chunk.max(1);
        let may = self.may_be_written() && self.rx.size() > chunk && linked.caps.windows;
        let buffer = self.target.buffer().filter(|buffer| may && buffer.kind().is_host())?;
        let (why, back) = match linked.link.expose_chunks(std::mem::take(buffer)) {
            Err(refused) => refused,
            Ok(mut chunks) => match chunks.show(0, chunk) {
                Ok(place) => {
                    self.means = Means::Chunks(chunks, chunk);
                    return Some(Scheme::Chunks(place, chunk));
                }
                Err(why) => (why, chunks.take_back()),
            },
        };
        tracing::debug!(from = %self.from, why, "a message comes in fragments");
        *buffer = back;
        None
    }

    /// Lets the sender's NIC write to the destination of a message, where that is possible and
    /// pays. The destination is host memory, or GPU memory that this rank's NIC reaches, which then
    /// needs no blocks.
    fn as_a_whole(&mut self, run: &Run<'_>) -> Option<Scheme> {
        let linked = run.device.known_route(self.from)?.linked()?;
        let may = self.may_be_written() && self.rx.size() >= WRITTEN && linked.caps.windows;
        let buffer = self.target.buffer().filter(|_| may)?;
        match linked.link.expose(std::mem::take(buffer)) {
            Ok(exposed) => {
                let place = exposed.place_of_message();
                self.means = Means::Exposed(exposed);
                Some(Scheme::Whole(place))
            }
            Err((why, back)) => {
                tracing::debug!(from = %self.from, why, "a message comes in fragments");
                *buffer = back;
                None
            }
        }
    }

    /// Handles the result of a step of the kernel's copy.
    pub(super) fn pulled(&mut self, run: &mut Run<'_>, step: PullStep) -> Flow {
        match step {
            PullStep::Copied | PullStep::Waits => Flow::Stays,
            PullStep::Ended => self.is_pulled(run),
            PullStep::Failed(PeerMemoryError::Refused(why)) => {
                run.refuse_peer_memory(self.from, why);
                self.is_not_pulled(run)
            }
            PullStep::Failed(PeerMemoryError::Gone(cause)) => {
                self.has_failed(run, OpError::PeerDown { rank: self.from, cause })
            }
            PullStep::Failed(PeerMemoryError::Failed(why)) => {
                self.has_failed(run, OpError::Transfer { rank: self.from, why })
            }
        }
    }

    /// Ends the kernel's copy: the bytes are in place.
    fn is_pulled(&mut self, run: &mut Run<'_>) -> Flow {
        // A put's verdict follows its arrival, whichever way it came.
        if !self.target.is_memory() {
            let fin = Control::Fin { name: self.rx.tx(), verdict: TransferVerdict::Done };
            run.device.control(run.carrier, self.from, fin);
        }
        self.means = Means::None;
        // Unless its operation has timed out.
        if !self.rx.has_ended() {
            self.arrived(run);
        }
        Flow::Ends
    }

    /// Ends the kernel's copy: it was refused, and the bytes come another way.
    fn is_not_pulled(&mut self, run: &mut Run<'_>) -> Flow {
        self.means = Means::None;
        let scheme = self.choose(run);
        self.handle(run, RxEvent::Begin(scheme), None, None)
    }

    /// Ends the kernel's copy with an error.
    fn has_failed(&mut self, run: &mut Run<'_>, error: OpError) -> Flow {
        let fin = Control::Fin { name: self.rx.tx(), verdict: TransferVerdict::Failed };
        run.device.control(run.carrier, self.from, fin);
        self.means = Means::None;
        self.handle(run, RxEvent::Down, None, Some(error))
    }
}
