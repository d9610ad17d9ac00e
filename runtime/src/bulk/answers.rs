//! The handling of the protocol messages that large messages and memory operations need.

use super::words::Change;
use super::{Flush, Target};
use crate::collective::Note;
use crate::comp::{Completion, Snapshot};
use crate::error::{OpError, ProgressError};
use crate::names::{Rank, RemoteComp, Tag};
use crate::op::OpContext;
use crate::progress::{Pass, guarded, panicked};
use crate::protocol::header::Message;
use crate::protocol::wire::{
    HelpWanted, Offer, Request, Verdict, Window, decode_clear, decode_landing, decode_place,
    decode_window, decode_writable, encode_place,
};
use crate::region::direct::Withdrawal;
use crate::region::{Refusal, RegionSlice};
use carrack_transports::contract::Payload;
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Buffer, MemKind, PacketSource, SmallBytes};
use std::sync::Arc;

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
        let place = self.inner.regions.tell(region, (self.device.index, from), link);
        self.device.control(self.inner, from, Message::Here { region }, encode_place(place));
    }

    /// Tells the owner of a region that this rank does not use it any more, once no operation on
    /// it is in flight.
    fn let_go(&self, owner: Rank, region: u64, was_known: bool) {
        let device = self.device;
        let before = device.bulk.now();
        if !was_known || !device.has_memory_operations(owner, before) {
            return device.control(
                self.inner,
                owner,
                Message::LetGo { region },
                SmallBytes::empty(),
            );
        }
        // Not behind the operations in flight. A NIC repeats a read whose answer it missed, and
        // such a request for revoked memory ends the connection. Some operations use another link,
        // too.
        let operation = OpContext::of_runtime(owner, Tag::default(), 0, None);
        device.bulk.flush(self.inner, Flush { before, operation, lets_go: Some(region) });
    }

    /// Tells those who know them that registrations have ended.
    #[cold]
    pub(crate) fn withdraw_regions(&mut self) {
        let devices = self.inner.devices().clone();
        for Withdrawal { number, device, rank } in self.inner.regions.withdrawals() {
            if let Some(device) = devices.iter().find(|other| other.0.index == device) {
                let message = Message::Withdraw { region: number };
                device.0.control(self.inner, rank, message, SmallBytes::empty());
            }
        }
    }

    /// Handles the offer of an active message: a large one, or one that its sender holds.
    #[cold]
    pub(crate) fn offered_am(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        offer: Offer,
        comps: &Snapshot,
    ) {
        if !self.takes_request(from) {
            return;
        }
        let Some(comp) = comps.get(name) else {
            // As with a small one: the sender's part is done.
            self.finish(from, offer.token, Verdict::Done);
            let size = usize::try_from(offer.size).unwrap_or(usize::MAX);
            self.complain(ProgressError::NoSuchCompletion { from, comp: name, size });
            return;
        };
        // A held one keeps its place among those that arrive whole.
        let is_held = usize::try_from(offer.size)
            .is_ok_and(|size| size <= self.device.host_pool.packet_size());
        if !self.queue_offer(comp, (from, tag), offer, is_held) {
            self.fetch_am(comp, comp.clone(), (from, tag), offer);
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
        offer: Offer,
    ) {
        let size = usize::try_from(offer.size).unwrap_or(usize::MAX);
        let refuse = |verdict: Verdict| self.finish(from, offer.token, verdict);
        // Bytes that are shared, and lists, cannot be filled in one piece.
        let fits = |buffer: &mut Buffer| buffer.len() >= size && buffer.view_mut().is_some();
        let named = guarded(|| comp.place(from, tag, size));
        let buffer = match named.map(|named| named.and_then(|mut it| fits(&mut it).then_some(it))) {
            Ok(Some(buffer)) => Ok(buffer),
            Ok(None) => self.device.place_for_large(size),
            Err(panic) => {
                refuse(Verdict::Failed);
                self.complain(panicked(from, panic.as_ref()));
                return;
            }
        };
        let buffer = match buffer {
            Ok(buffer) => buffer,
            Err(why) => {
                refuse(Verdict::Failed);
                tracing::warn!(%from, size, %why, "no memory for an active message");
                self.complain(ProgressError::NoMemory { from, size, why: Box::new(why) });
                return;
            }
        };
        let target = Target::Am { tag, buffer, comp: told };
        if let Some((Some(comp), status)) = self.device.accept(self.inner, from, offer, target) {
            self.signal_arrival(&comp, status);
        }
    }

    /// Handles one of the messages that large messages and memory operations need.
    ///
    /// # Errors
    /// The message is malformed.
    #[cold]
    pub(crate) fn bulk(
        &mut self,
        from: Rank,
        message: Message,
        payload: &Payload,
        comps: &Snapshot,
    ) -> Result<(), String> {
        let small = match payload {
            Payload::Small(bytes) => bytes.as_slice(),
            _ => &[],
        };
        if message.is_request() && !self.takes_request(from) {
            return Ok(());
        }
        match message {
            Message::Part { landing, offset } => self.part(from, landing, offset, payload),
            Message::Clear { token } => {
                let (bulk, chunk) = (&self.device.bulk, self.inner.settings.verbs_chunk());
                if let Some((landing, window)) = decode_window(small) {
                    return bulk.clear_window(from, (token, landing), window, chunk);
                }
                let known = match decode_writable(small) {
                    Some((landing, place)) => match bulk.is_for_chunks(from, token, chunk) {
                        Some(len) => {
                            let window = Window { at: 0, len, place };
                            return bulk.clear_window(from, (token, landing), window, chunk);
                        }
                        None => bulk.clear_to_write(from, token, landing, place),
                    },
                    None => {
                        let (landing, limit) =
                            decode_clear(small).ok_or("it clears an offer for nothing")?;
                        bulk.clear(from, token, landing, limit)
                    }
                };
                if !known {
                    self.stray(from);
                }
                Ok(())
            }
            Message::Written { landing } | Message::Unwritten { landing } => {
                let is_written = matches!(message, Message::Written { .. });
                let at = decode_landing(small).ok_or("it does not say what it has written")?;
                if self.device.bulk.shows_chunks(landing) {
                    return self.chunk(from, landing, at, is_written);
                }
                match is_written {
                    _ if at != 0 => Err("it has written what it was not asked to".into()),
                    true => self.written(from, landing),
                    false => self.unwritten(from, landing),
                }
            }
            Message::Where { region } => {
                self.tell_where(from, region);
                Ok(())
            }
            Message::Here { region } => {
                let place =
                    decode_place(small).ok_or("it says where a region is, and names no place")?;
                self.device.remotes.answered(from, region, place);
                Ok(())
            }
            Message::Withdraw { region } => {
                let was_known = self.device.remotes.withdrawn(from, region);
                self.let_go(from, region, was_known);
                Ok(())
            }
            Message::LetGo { region } => {
                self.inner.regions.let_go(Some((region, self.device.index)), from);
                Ok(())
            }
            Message::Grant { landing } => {
                let limit = decode_landing(small).ok_or("it has room for nothing")?;
                self.device.bulk.grant(from, landing, usize::try_from(limit).unwrap_or(usize::MAX));
                Ok(())
            }
            Message::Finish { token } => {
                let verdict = Verdict::decode(small).ok_or("it ends an offer without a verdict")?;
                let bulk = &self.device.bulk;
                let ended = bulk.finish(from, token, verdict).map(Some);
                // It may also end a request of this rank's, which ends so only if it was refused.
                let ended = ended.or_else(|| bulk.refuse(from, token, verdict));
                match ended {
                    Some(Some((comp, status))) => self.signal(comp.as_ref(), status),
                    Some(None) => {}
                    None => self.stray(from),
                }
                Ok(())
            }
            Message::Help { token } => {
                let wanted = HelpWanted::decode(small).ok_or("it wants help with nothing")?;
                self.asked_to_help(from, token, wanted);
                Ok(())
            }
            Message::Introduce { name } => {
                self.device.bulk.introduced.introduce(from, name, payload)
            }
            Message::Signal { comp, tag } => {
                let size = decode_landing(small).ok_or("it signals a put of no size")?;
                // The bytes of the put may lie in GPU memory.
                let flushed = self.inner.regions.flush();
                self.tell(from, (comp, tag), size, flushed.map_err(OpError::Copy), comps);
                Ok(())
            }
            Message::OfferPut { comp, tag } => {
                let request = Request::decode(small).ok_or("it offers a put to nowhere")?;
                self.offered_put(from, comp, tag, request, comps);
                Ok(())
            }
            Message::Get { comp, tag } => {
                let request = Request::decode(small).ok_or("it gets from nowhere")?;
                self.asked_for(from, comp, tag, request, comps);
                Ok(())
            }
            Message::Pieces { landing } => {
                let request = Request::decode(small).ok_or("it offers pieces to nowhere")?;
                self.offered_pieces(from, landing, request);
                Ok(())
            }
            Message::Note { group, number } => {
                let note = Note::decode(from, number, small)
                    .ok_or("it tells a group nothing that makes sense")?;
                if let Err(why) = self.inner.boards.pin(group, note) {
                    self.device.break_with(from, why);
                }
                Ok(())
            }
            Message::Hold { room, turn } => {
                self.hold(from, room, turn);
                Ok(())
            }
            Message::Atomic { swap } => {
                let request =
                    Request::decode(small).ok_or("it asks for an atomic operation nowhere")?;
                self.asked_to_change(from, swap, request);
                Ok(())
            }
            other => Err(format!("{other:?} where none belongs")),
        }
    }

    pub(crate) fn finish(&self, to: Rank, token: u64, verdict: Verdict) {
        self.device.control(self.inner, to, Message::Finish { token }, verdict.encode());
    }

    /// Returns the requested part of a region of this rank, or sends the refusal.
    fn meant(&self, from: Rank, request: &Request, len: u64) -> Option<RegionSlice> {
        match self.inner.regions.find(request.region, request.offset, len) {
            Ok(slice) => Some(slice),
            Err(Refusal::Stale) => {
                self.finish(from, request.token, Verdict::Stale);
                None
            }
            Err(Refusal::Outside) => {
                self.finish(from, request.token, Verdict::Outside);
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
        if name == NOBODY {
            return None;
        }
        let comp = comps.get(name).cloned();
        if comp.is_none() {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            self.complain(ProgressError::NoSuchCompletion { from, comp: name, size });
        }
        comp
    }

    /// Signals a completion object after another rank's operation on this rank's memory.
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
        let Request { token, first: size, second: addr, .. } = request;
        let Some(slice) = self.meant(from, &request, size) else { return };
        let comp = self.named(from, name, size, comps);
        let target = Target::Put { tag, buffer: Buffer::Region(slice), comp, token };
        if let Some((comp, status)) =
            self.device.accept(self.inner, from, Offer { size, token, addr, mapped: None }, target)
        {
            self.signal(comp.as_ref(), status);
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
        let Request { token, first: size, second: limit, .. } = request;
        let Some(slice) = self.meant(from, &request, size) else { return };
        let place = slice.view().place().kind();
        if slice.is_empty() || check_kinds(MemKind::Host, place).is_err() {
            // No rank gets zero bytes, or memory that cannot be copied to the host.
            return self.finish(from, token, Verdict::Failed);
        }
        let limit =
            if limit == 0 { usize::MAX } else { usize::try_from(limit).unwrap_or(usize::MAX) };
        let comp = self.named(from, name, size, comps);
        self.device.bulk.answer(from, (token, limit), Buffer::Region(slice), tag, comp);
    }

    /// Handles an atomic operation that this rank has to do.
    fn asked_to_change(&mut self, from: Rank, swap: bool, request: Request) {
        let Some(slice) = self.meant(from, &request, 8) else { return };
        let Request { token, first, second, .. } = request;
        if self.inner.regions.nic_of_words(request.region).is_some() {
            // The remote key says so: this one was damaged.
            tracing::warn!(%from, "a rank asks for an atomic operation on a word that is the \
                NIC's");
            return self.finish(from, token, Verdict::Failed);
        }
        match slice.kind() {
            MemKind::Device(_) => {
                let change = if swap {
                    Change::Swap { expected: first, new: second }
                } else {
                    Change::Add(first)
                };
                self.change_on_gpu(from, token, change, slice);
            }
            // No such memory is registered.
            MemKind::Managed(_) | MemKind::Unknown => self.finish(from, token, Verdict::Failed),
            MemKind::Host | MemKind::Pinned => {
                let (region, offset) = (slice.region(), slice.offset());
                let held = if swap {
                    region.compare_swap(offset, first, second)
                } else {
                    region.fetch_add(offset, first)
                };
                self.finish(from, token, held.map_or(Verdict::Word, Verdict::Held));
            }
        }
    }
}

/// The name that stands for no completion object.
pub(crate) const NOBODY: RemoteComp = RemoteComp(0);
