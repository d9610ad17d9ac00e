//! The way of each control message to the transfer, region or object that it names.

use super::Pass;
use super::signal::{guarded, panicked};
use crate::boards::Note;
use crate::comp::{Completion, Snapshot};
use crate::datapath::{Change, Event, Flush, NO_COMP, Run, Target, WordRequest};
use crate::error::{OpError, ProgressError};
use crate::names::{Rank, RemoteComp, Tag};
use crate::op::OpContext;
use crate::protocol::header::Message;
use crate::protocol::rma::{Agent, agent};
use crate::protocol::rndv::Violation;
use crate::protocol::wire::{Control, Request, Rts, TransferVerdict};
use crate::region::{Refusal, RegionSlice};
use carrack_transports::contract::{Header, Payload};
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Buffer, MemKind, PacketSource};
use std::sync::Arc;

impl Pass<'_> {
    /// Handles a message of the runtime itself.
    ///
    /// # Errors
    /// The message is malformed.
    #[cold]
    pub(crate) fn of_runtime(
        &mut self,
        from: Rank,
        message: Message,
        header: Header,
        payload: Payload,
        comps: &Snapshot,
    ) -> Result<(), String> {
        match message {
            Message::Fragment { rx, offset } => {
                match self.on((from, rx), Event::Fragment { offset, payload }) {
                    true => Ok(()),
                    false => {
                        Err("it sent a fragment of a message that it was not asked for".into())
                    }
                }
            }
            Message::Introduce { name } => {
                self.device.transfers.introduced.introduce(from, name, &payload)
            }
            Message::Note { group, number } => {
                let note = Note::decode(from, number, small(&payload))
                    .ok_or("it tells a group nothing that makes sense")?;
                self.inner.boards.pin(group, note);
                Ok(())
            }
            Message::Control => {
                let control = Control::decode(header, small(&payload))?;
                self.control(from, control, comps)
            }
            other => Err(format!("{other:?} where none belongs")),
        }
    }

    fn control(&mut self, from: Rank, control: Control, comps: &Snapshot) -> Result<(), String> {
        match control {
            Control::Cts { tx: name, .. }
            | Control::CtsWrite { tx: name, .. }
            | Control::CtsChunk { tx: name, .. }
            | Control::Grant { tx: name, .. }
            | Control::FinWrite { rx: name, .. }
            | Control::Unwritten { rx: name, .. }
            | Control::Fin { name, .. } => {
                if !self.on((from, name), Event::Control(control)) {
                    return self.about_nothing(from, control);
                }
            }
            Control::Help { tx, wanted } => self.transfers().asked_to_help(from, tx, wanted),
            Control::Notify { comp, tag, size } => {
                // The bytes of the put may lie in GPU memory.
                let flushed = self.inner.regions.flush();
                self.tell(from, (comp, tag), size, flushed.map_err(OpError::Copy), comps);
            }
            Control::RtsPut { comp, tag, request } => {
                self.offered_put(from, comp, tag, request, comps);
            }
            Control::Get { comp, tag, request } => {
                self.asked_for(from, comp, tag, request, comps);
            }
            Control::Pieces { rx, request } => {
                let mut run = self.transfers();
                run.offered_pieces(from, rx, request);
                self.report(run);
            }
            Control::Atomic { swap, request } => self.asked_to_change(from, swap, request),
            Control::Hold { hold, turn } => self.inner.hold(self.device, from, hold, turn),
            Control::Where { region } => self.tell_where(from, region),
            Control::Here { region, place, len } => {
                self.device.remotes.answered(from, region, Some((place, len)));
            }
            Control::Nowhere { region } => self.device.remotes.answered(from, region, None),
            Control::Withdraw { region } => {
                let was_known = self.device.remotes.withdrawn(from, region);
                self.release(from, region, was_known);
            }
            Control::Release { region } => {
                self.inner.regions.released_by(from, Some(region), Some(self.device.index));
                // Collectives may wait for it.
                self.inner.boards.wake();
            }
        }
        Ok(())
    }

    /// Handles a message about an unknown transfer.
    fn about_nothing(&mut self, from: Rank, control: Control) -> Result<(), String> {
        match control {
            // The message has ended here, because its source failed.
            Control::Grant { .. } => {}
            Control::CtsChunk { window, .. } if window.at > 0 => {}
            Control::CtsChunk { .. } => {
                return Err("it wants to have written what was not offered to it".into());
            }
            _ => self.stray(from),
        }
        Ok(())
    }

    pub(crate) fn send_fin(&self, to: Rank, tx: u64, verdict: TransferVerdict) {
        self.device.control(self.inner, to, Control::Fin { name: tx, verdict });
    }
}

/// Transfers.
impl<'a> Pass<'a> {
    /// Begins work on transfers, which is reported afterwards.
    pub(super) fn transfers(&self) -> Run<'a> {
        Run::new(self.inner, self.device)
    }

    /// Reports the results of work on transfers.
    #[inline(always)]
    pub(super) fn report(&mut self, run: Run<'_>) {
        self.moved |= run.moved;
        if run.has_reports() {
            self.report_all(run);
        }
    }

    fn report_all(&mut self, run: Run<'_>) {
        let Run { ended, arrivals, violations, .. } = run;
        for (comp, status) in ended {
            self.signal_received(comp.as_ref(), status);
        }
        for (comp, status) in arrivals {
            self.signal_arrival(&comp, status);
        }
        for (by, violation) in violations {
            match violation {
                Violation::Stray => self.stray(by),
                Violation::Broken(why) => self.broken(by, why.into()),
            }
        }
    }

    /// Lets a transfer handle an event. Returns `false` if there is no such transfer.
    pub(super) fn on(&mut self, at: (Rank, u64), event: Event) -> bool {
        let mut run = self.transfers();
        let is_there = run.on(at, event);
        self.report(run);
        is_there
    }
}

/// Returns the bytes of a control message.
fn small(payload: &Payload) -> &[u8] {
    match payload {
        Payload::Small(bytes) => bytes.as_slice(),
        _ => &[],
    }
}

/// Regions that NICs reach.
impl Pass<'_> {
    /// Sends a rank the remote key of a region, for its NIC.
    fn tell_where(&self, from: Rank, region: u64) {
        let route = self.device.route(from);
        if let (Some(route), Some(nic)) = (route, self.inner.regions.nic_of_words(region)) {
            route.shows_words(nic);
        }
        let linked =
            route.and_then(|route| route.linked()).filter(|linked| linked.caps.remote_memory);
        let link = linked.map(|linked| &*linked.link);
        let answer = |answer| self.device.control(self.inner, from, answer);
        let here = |place, len| answer(Control::Here { region, place, len });
        let devices = self.inner.devices().clone();
        let index = self.device.index;
        let told = devices.get(index as usize).and_then(|device| {
            self.inner.regions.tell(region, (index, from), (&device.0, link), here)
        });
        if told.is_none() {
            answer(Control::Nowhere { region });
        }
    }

    /// Tells the owner of a region that this rank does not use it any more, once no operation on
    /// it is in flight.
    fn release(&self, owner: Rank, region: u64, was_known: bool) {
        let device = self.device;
        let before = device.transfers.now();
        if !was_known || !device.has_memory_operations(owner, before) {
            return device.control(self.inner, owner, Control::Release { region });
        }
        // The release must not be sent behind operations in flight. A NIC repeats a read whose
        // answer it missed, and a repeated read of revoked memory ends the connection. Some
        // operations also use another link.
        let operation = OpContext::of_runtime(owner, Tag::default(), 0, None);
        Flush { before, operation, releases: Some(region) }.begin(self.inner, device);
    }
}

/// Active messages that come by an RTS.
impl Pass<'_> {
    /// Handles the RTS of an active message: a large one, or one that its sender holds.
    #[cold]
    pub(crate) fn offered_am(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        rts: Rts,
        comps: &Snapshot,
    ) {
        let Some(comp) = comps.get(name) else {
            // The sender has done its part, as with a small message.
            self.send_fin(from, rts.tx, TransferVerdict::Done);
            let size = usize::try_from(rts.size).unwrap_or(usize::MAX);
            self.complain(ProgressError::NoSuchCompletion { from, comp: name, size });
            return;
        };
        // A held message keeps its place among messages that arrive whole.
        let is_held =
            usize::try_from(rts.size).is_ok_and(|size| size <= self.device.host_pool.packet_size());
        if !self.queue_offer(comp, (from, tag), rts, is_held) {
            self.fetch_am(comp, comp.clone(), (from, tag), rts);
        }
    }

    /// Finds a buffer for an offered active message, and has it fetched. `comp` names the buffer;
    /// `told` gets the status.
    #[cold]
    pub(crate) fn fetch_am(
        &mut self,
        comp: &Arc<dyn Completion>,
        told: Arc<dyn Completion>,
        (from, tag): (Rank, Tag),
        rts: Rts,
    ) {
        let size = usize::try_from(rts.size).unwrap_or(usize::MAX);
        let refuse = |verdict: TransferVerdict| self.send_fin(from, rts.tx, verdict);
        // Bytes that are shared, and lists, cannot be filled in one piece.
        let fits = |buffer: &mut Buffer| buffer.len() >= size && buffer.view_mut().is_some();
        let named = guarded(|| comp.place(from, tag, size));
        let buffer = match named.map(|named| named.and_then(|mut it| fits(&mut it).then_some(it))) {
            Ok(Some(buffer)) => Ok(buffer),
            Ok(None) => self.device.place_for_large(size),
            Err(panic) => {
                refuse(TransferVerdict::Failed);
                self.complain(panicked(from, panic.as_ref()));
                return;
            }
        };
        let buffer = match buffer {
            Ok(buffer) => buffer,
            Err(why) => {
                refuse(TransferVerdict::Failed);
                tracing::warn!(%from, size, %why, "no memory for an active message");
                self.complain(ProgressError::NoMemory { from, size, why: Box::new(why) });
                return;
            }
        };
        let target = Target::Am { tag, buffer, comp: told };
        let ended =
            self.device.accept(self.inner, (from, rts), target, self.gathering.as_deref_mut());
        if let Some((Some(comp), status)) = ended {
            self.signal_arrival(&comp, status);
        }
    }
}

/// Operations on this rank's memory that it carries out.
impl Pass<'_> {
    /// Returns the requested part of a region of this rank, or sends the refusal.
    fn meant(&self, from: Rank, request: &Request, len: u64) -> Option<RegionSlice> {
        match self.inner.regions.find(request.region, request.offset, len) {
            Ok(slice) => Some(slice),
            Err(Refusal::Stale) => {
                self.send_fin(from, request.name, TransferVerdict::Stale);
                None
            }
            Err(Refusal::Outside) => {
                self.send_fin(from, request.name, TransferVerdict::Outside);
                None
            }
        }
    }

    /// Returns the completion object that a put or a get names, if it names one that exists.
    fn named(
        &mut self,
        from: Rank,
        name: RemoteComp,
        size: u64,
        comps: &Snapshot,
    ) -> Option<Arc<dyn Completion>> {
        if name == NO_COMP {
            return None;
        }
        let comp = comps.get(name).cloned();
        if comp.is_none() {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            self.complain(ProgressError::NoSuchCompletion { from, comp: name, size });
        }
        comp
    }

    /// Notifies a completion object of another rank's operation on this rank's memory.
    fn tell(
        &mut self,
        from: Rank,
        (name, tag): (RemoteComp, Tag),
        size: u64,
        outcome: Result<(), OpError>,
        comps: &Snapshot,
    ) {
        let Some(comp) = self.named(from, name, size, comps) else { return };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let status =
            OpContext::of_runtime(from, tag, size, None).status(Buffer::Empty, outcome.err());
        self.signal_arrival(&comp, status);
    }

    /// Handles a put that this rank has to carry out.
    fn offered_put(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        request: Request,
        comps: &Snapshot,
    ) {
        let Request { name: tx, first: size, second: addr, .. } = request;
        let Some(slice) = self.meant(from, &request, size) else { return };
        let comp = self.named(from, name, size, comps);
        let target = Target::Put { tag, buffer: Buffer::Region(slice), comp, tx };
        let rts = Rts { size, tx, addr, mapped: None };
        let ended =
            self.device.accept(self.inner, (from, rts), target, self.gathering.as_deref_mut());
        if let Some((Some(comp), status)) = ended {
            self.signal_arrival(&comp, status);
        }
    }

    /// Handles a get that this rank has to answer.
    fn asked_for(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        request: Request,
        comps: &Snapshot,
    ) {
        let Request { name: rx, first: size, second: limit, .. } = request;
        let Some(slice) = self.meant(from, &request, size) else { return };
        let place = slice.view().place().kind();
        if slice.is_empty() || check_kinds(MemKind::Host, place).is_err() {
            // A rank gets at least one byte, of memory that can be copied to the host.
            return self.send_fin(from, rx, TransferVerdict::Failed);
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let comp = self.named(from, name, size, comps);
        let mut run = self.transfers();
        self.device.answer(&mut run, from, (rx, limit), Buffer::Region(slice), (tag, comp));
        self.report(run);
    }

    /// Handles an atomic operation that this rank has to do.
    fn asked_to_change(&mut self, from: Rank, swap: bool, request: Request) {
        let Some(slice) = self.meant(from, &request, 8) else { return };
        let Request { name: tx, first, second, .. } = request;
        let is_nics = self.inner.regions.nic_of_words(request.region).is_some();
        match agent(is_nics, Some(slice.kind())) {
            Agent::Nic => {
                // The remote key says so: this one was damaged.
                tracing::warn!(%from, "a rank asks for an atomic operation on a word that is the \
                    NIC's");
                self.send_fin(from, tx, TransferVerdict::Failed);
            }
            Agent::Owner => {
                let change = if swap {
                    Change::Swap { expected: first, new: second }
                } else {
                    Change::Add(first)
                };
                let request = WordRequest { from, token: tx, device: self.device.index, change };
                match self.inner.change_on_gpu(slice, request) {
                    Ok(()) => self.moved |= self.inner.move_words(),
                    Err(verdict) => self.send_fin(from, tx, verdict),
                }
            }
            Agent::Cpu => {
                let (region, offset) = (slice.region(), slice.offset());
                let held = if swap {
                    region.compare_swap(offset, first, second)
                } else {
                    region.fetch_add(offset, first)
                };
                self.send_fin(from, tx, held.map_or(TransferVerdict::Word, TransferVerdict::Held));
            }
        }
    }
}
