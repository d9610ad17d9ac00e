//! The receiver's side.

use super::granting::Ask;
use super::inflow::Inflow;
use super::packed::Asked;
use super::pull::Pull;
use super::showing::Showing;
use super::wire::{Offer, Verdict};
use super::{Bulk, Ended};
use crate::comp::{Completion, Status};
use crate::deadline::{Deadline, Deadlines};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::{Rank, Tag, UserContext};
use crate::progress::{Landing, Pass};
use crate::protocol::header::Message;
use crate::runtime::Inner;
use carrack_transports::contract::{Exposed, Payload, PeerMemory};
use carrack_transports::mem::copy::{check_kinds, copy_now};
use carrack_transports::mem::{Buffer, MemKind, SmallBytes};
use std::sync::Arc;

/// Where a large message goes.
pub(crate) enum Target {
    /// Into a receive that was posted.
    Receive {
        tag: Tag,
        buffer: Buffer,
        comp: Option<Arc<dyn Completion>>,
        user_context: UserContext,
        deadline: Deadline,
    },
    /// To a completion object, in the memory that it named or in fresh memory.
    Am { tag: Tag, buffer: Buffer, comp: Arc<dyn Completion> },
    /// Into a region of this rank: a put. Then its sender is told, and a completion object if there
    /// is one.
    Put { tag: Tag, buffer: Buffer, comp: Option<Arc<dyn Completion>>, token: u64 },
    /// A list of places in a region of this rank's, and the bytes of a put behind it.
    Pieces { buffer: Buffer, asked: Box<Asked> },
    /// Nowhere: whoever waited for it has given up.
    Nowhere,
}

/// A message that comes part by part.
pub(crate) struct Arriving {
    pub(super) from: Rank,
    pub(super) size: usize,
    pub(super) target: Target,
    pub(super) got: usize,
    /// How many bytes are to come: all, unless its sender has given up.
    pub(super) until: usize,
    /// Blocks on the way, where the target is memory of a GPU.
    pub(super) inflow: Option<Box<Inflow>>,
    /// How its sender will be asked for it.
    pub(super) ask: Option<Box<Ask>>,
    /// Bytes that its sender knows it may send.
    pub(super) told: usize,
    /// An engine has failed: what still comes goes nowhere, and then it ends with this.
    pub(super) lost: Option<Box<OpError>>,
    /// Nothing comes any more: it ends with this as soon as no engine is at it.
    ends_with: Option<Box<OpError>>,
    /// Its buffer, while its sender's NIC may write to it.
    pub(super) exposed: Option<Box<dyn Exposed>>,
    /// The same, chunk by chunk.
    pub(super) showing: Option<Box<Showing>>,
}

impl Arriving {
    pub(super) fn new(from: Rank, size: usize, mut target: Target) -> Self {
        let inflow = target.buffer().and_then(|buffer| Inflow::into(buffer, size));
        Self {
            from,
            size,
            target,
            got: 0,
            until: size,
            inflow,
            ask: None,
            told: 0,
            lost: None,
            ends_with: None,
            exposed: None,
            showing: None,
        }
    }

    pub(super) fn got(&self) -> usize {
        self.got
    }

    /// The blocks are given back; the buffer is the target's again.
    pub(super) fn lose(&mut self, error: OpError) {
        self.inflow = None;
        self.lost = Some(Box::new(error));
    }

    /// Whether an engine is still writing to its buffer: then it ends when that is done, with the
    /// error.
    pub(super) fn must_wait(&mut self, error: &dyn Fn(Rank) -> OpError) -> bool {
        let is_busy = self.is_busy();
        if is_busy {
            self.ends_with = Some(Box::new(error(self.from)));
        }
        is_busy
    }

    /// Whether it waits for nothing but an engine.
    pub(super) fn is_ending(&self) -> bool {
        self.ends_with.is_some()
    }

    /// With what it is to end now, if it is.
    pub(super) fn ends_with(&mut self) -> Option<Box<OpError>> {
        if self.ends_with.is_none() || self.is_busy() { None } else { self.ends_with.take() }
    }

    fn is_busy(&mut self) -> bool {
        self.inflow.as_mut().is_some_and(|inflow| inflow.is_busy())
    }

    /// Takes its buffer back from its sender's NIC, if that had it. Whether it had.
    pub(super) fn take_back(&mut self) -> bool {
        let back = match (self.exposed.take(), self.showing.take()) {
            (Some(exposed), _) => exposed.take_back(),
            (None, Some(showing)) => showing.take_back(),
            (None, None) => return false,
        };
        if let Some(buffer) = self.target.buffer() {
            *buffer = back;
        }
        true
    }

    /// Ends it without its bytes, and without its buffer while its sender's NIC may write to it;
    /// waits for an engine that is at it. What still comes goes nowhere.
    pub(super) fn give_up(&mut self, error: OpError) -> Option<Ended> {
        if let (Some(inflow), Some(buffer)) = (&mut self.inflow, self.target.buffer()) {
            inflow.settle(buffer);
        }
        self.inflow = None;
        if self.until == 0 {
            self.take_back();
        }
        if matches!(self.ask.as_deref(), Some(Ask::Region(..))) {
            // A get that its owner has not heard of: nothing will come.
            self.until = 0;
        }
        let target = std::mem::replace(&mut self.target, Target::Nowhere);
        target.fail(self.from, self.size, error)
    }
}

impl Target {
    /// Where its bytes go, if anywhere.
    pub(super) fn buffer(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Receive { buffer, .. }
            | Self::Am { buffer, .. }
            | Self::Put { buffer, .. }
            | Self::Pieces { buffer, .. } => Some(buffer),
            Self::Nowhere => None,
        }
    }

    pub(super) fn tag(&self) -> Tag {
        match self {
            Self::Receive { tag, .. } | Self::Am { tag, .. } | Self::Put { tag, .. } => *tag,
            Self::Pieces { .. } | Self::Nowhere => Tag::default(),
        }
    }

    /// Whether it is for this rank's memory: its sender is told when that is as it wants it, and
    /// not before.
    pub(super) fn is_memory(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Pieces { .. })
    }

    /// By when it has to be there.
    pub(super) fn deadline(&self) -> Deadline {
        match self {
            Self::Receive { deadline, .. } => *deadline,
            _ => Deadline::NEVER,
        }
    }

    pub(super) fn end(self, from: Rank, size: usize, error: Option<OpError>) -> Ended {
        let (tag, buffer, comp, user_context) = match self {
            Self::Receive { tag, buffer, comp, user_context, .. } => {
                (tag, buffer, comp, user_context)
            }
            Self::Am { tag, buffer, comp } => (tag, buffer, Some(comp), UserContext::default()),
            // Its buffer is the region's, and stays there.
            Self::Put { tag, comp, .. } => (tag, Buffer::Empty, comp, UserContext::default()),
            Self::Pieces { .. } | Self::Nowhere => {
                (Tag::default(), Buffer::Empty, None, UserContext::default())
            }
        };
        (comp, Status { rank: from, tag, size, user_context, buffer, error: error.map(Box::new) })
    }

    /// Ends it without its bytes. `None`: an active message that never came is nobody's operation
    /// here.
    pub(super) fn fail(self, from: Rank, size: usize, error: OpError) -> Option<Ended> {
        match self {
            Self::Receive { .. } => Some(self.end(from, size, Some(error))),
            Self::Am { .. } | Self::Put { .. } | Self::Pieces { .. } => None,
            Self::Nowhere => Some(self.end(from, size, None)),
        }
    }
}

impl DeviceInner {
    /// Takes an offer up. `Some` when that is all there is to it: an error.
    pub(crate) fn accept(
        &self,
        runtime: &Inner,
        from: Rank,
        offer: Offer,
        mut target: Target,
    ) -> Option<Ended> {
        let finish = |verdict: Verdict| {
            self.control(runtime, from, Message::Finish { token: offer.token }, verdict.encode());
        };
        let room = target.buffer().map_or(0, |buffer| buffer.len());
        let Some(size) = usize::try_from(offer.size).ok().filter(|&size| size <= room) else {
            finish(Verdict::Truncated { message: offer.size, buffer: room as u64 });
            let message = usize::try_from(offer.size).unwrap_or(usize::MAX);
            return target.fail(from, message, OpError::Truncated { message, buffer: room });
        };
        if let Some(cause) = self.known_route(from).and_then(|route| route.down()) {
            // It offered before it went. Its bytes are gone with it, and what is at their address
            // now is not known.
            let error = OpError::PeerDown { rank: from, cause: cause.clone() };
            return target.fail(from, size, error);
        }
        if size == 0 {
            finish(Verdict::Done);
            return Some(target.end(from, 0, None));
        }
        if let Some(mapped) = offer.mapped {
            match self.fetch(runtime, (from, offer), mapped, target) {
                Ok(()) => return None,
                Err(back) => target = back,
            }
        }
        let place = target.buffer().map_or(MemKind::Host, |buffer| buffer.view().place().kind());
        if let Err(cause) = check_kinds(place, MemKind::Host) {
            finish(Verdict::Failed);
            return target.fail(from, size, OpError::Copy(cause));
        }
        // Onto a GPU they go block by block.
        let memory =
            if place.is_host() { self.peer_memory(runtime, from, offer.addr) } else { None };
        match memory {
            Some(memory) => {
                let pull = Box::new(Pull::new(from, (size, target), offer, memory));
                let mut pulls = self.bulk.pulls.lock();
                pulls.push_back(pull);
                self.bulk.pulls.set_count(pulls.len());
            }
            None => self.ask_for_parts(runtime, offer.token, (from, size, target)),
        }
        self.end_if_gone(runtime, from);
        None
    }

    /// The sender's memory, if the kernel copies from it.
    fn peer_memory(&self, runtime: &Inner, from: Rank, addr: u64) -> Option<Arc<dyn PeerMemory>> {
        if addr == 0 || !runtime.settings.kernel_copy().is_allowed() {
            return None;
        }
        let route = self.route(from)?;
        let linked = match route.linked() {
            Some(linked) => linked,
            None => route.link(runtime, self).ok()??,
        };
        linked.peer_memory()
    }

    /// Asks for the parts of a message that was fetched from where it may not have been any more.
    pub(crate) fn ask_again(
        &self,
        runtime: &Inner,
        landing: &mut Landing,
        token: u64,
        deadline: Deadline,
    ) {
        let Landing { rank: from, tag, size, user_context, .. } = *landing;
        let (buffer, comp) = (landing.transfer.take_buffers().0, landing.comp.take());
        let target = Target::Receive { tag, buffer, comp, user_context, deadline };
        self.ask_for_parts(runtime, token, (from, size, target));
    }
}

impl Bulk {
    /// A part has come. The message, when it was the last one; `Err` when there is no such message.
    fn take_part(
        &self,
        from: Rank,
        landing: u64,
        offset: u64,
        part: &Payload,
    ) -> Result<Option<Arriving>, String> {
        let mut all = self.arriving.lock();
        let arriving = all.get_mut(&landing).filter(|one| one.from == from);
        let arriving = arriving.ok_or("it sent a part of a message that it was not asked for")?;
        if arriving.exposed.is_some() || arriving.showing.is_some() {
            return Err("it sent a part of a message that it is to write".into());
        }
        let len = part.len();
        let inside = usize::try_from(offset).ok().filter(|offset| {
            offset.checked_add(len).is_some_and(|end| end <= arriving.size) && len > 0
        });
        let offset = inside.ok_or("it sent a part that lies outside its message")?;
        if let Some(inflow) = &mut arriving.inflow {
            // It is over when the last block is put down.
            inflow.take(offset, part)?;
            arriving.got += len;
            return Ok(None);
        }
        if arriving.lost.is_none()
            && let Some(buffer) = arriving.target.buffer()
        {
            let room = buffer.view_mut().ok_or("the buffer cannot be written")?.part(offset, len);
            copy_now(room, part.view()).map_err(|error| error.to_string())?;
        }
        arriving.got += len;
        if arriving.got < arriving.until {
            return Ok(None);
        }
        let whole = all.remove(&landing);
        self.arriving.set_count(all.len());
        Ok(whole)
    }
}

impl Bulk {
    /// What was asked for is not to be had. The outer `None`: nothing was, under that name, or that
    /// is no refusal; the inner: it was nobody's operation here, or an engine is at it.
    pub(crate) fn refuse(&self, by: Rank, landing: u64, verdict: Verdict) -> Option<Option<Ended>> {
        let error = verdict.error(by)?;
        // Parts that another thread has yet to take in are no nonsense, though nobody wants them.
        self.refuse_with(by, landing, &error, |size| match verdict {
            Verdict::Broken { sent } => usize::try_from(sent).map_or(size, |sent| sent.min(size)),
            _ => 0,
        })
    }

    /// Ends what was to come, with an error. `until`: so many of its bytes are sent.
    pub(super) fn refuse_with(
        &self,
        by: Rank,
        landing: u64,
        error: &OpError,
        until: impl FnOnce(usize) -> usize,
    ) -> Option<Option<Ended>> {
        let mut all = self.arriving.lock();
        let one = all.get_mut(&landing).filter(|one| one.from == by)?;
        one.until = until(one.size);
        if one.must_wait(&|_| error.clone()) {
            return Some(None);
        }
        let ended = one.give_up(error.clone());
        let over = if one.got >= one.until { all.remove(&landing) } else { None };
        self.arriving.set_count(all.len());
        drop(all);
        drop(over);
        Some(ended)
    }

    /// Ends what has not arrived in time. Its parts may still come, and go nowhere.
    pub(crate) fn expire_arriving(&self, now: Deadline, left: &Deadlines) -> Vec<Ended> {
        let mut ended = Vec::new();
        for one in self.arriving.lock().values_mut() {
            let deadline = one.target.deadline();
            // What an engine is at is looked at again, soon.
            if !deadline.has_passed(now) || one.is_busy() {
                left.note(deadline);
                continue;
            }
            let error = OpError::TimedOut(one.from);
            ended.extend(one.give_up(error));
        }
        ended
    }

    /// Whether a get from a peer is under way that began before `name`.
    pub(super) fn gets_from(&self, peer: Rank, before: u64) -> bool {
        self.arriving.lock().iter().any(|(&name, one)| one.from == peer && name < before)
    }

    /// A name that everything that begins from now on comes after.
    pub(crate) fn now(&self) -> u64 {
        self.name()
    }

    /// Whether an operation on a peer's memory is under way that began before `name`.
    pub(crate) fn has_memory_operations(&self, peer: Rank, before: u64) -> bool {
        self.sends_to_memory(peer, before)
            || self.gets_from(peer, before)
            || self.packed.has(peer, before)
    }
}

impl Pass<'_> {
    /// A part of a message.
    pub(crate) fn part(
        &mut self,
        from: Rank,
        landing: u64,
        offset: u64,
        part: &Payload,
    ) -> Result<(), String> {
        if let Some(whole) = self.device.bulk.take_part(from, landing, offset, part)? {
            self.arrived(whole.from, whole.size, whole.target, whole.lost);
        }
        Ok(())
    }

    /// All bytes of a message are on this side: in place, or lost.
    pub(super) fn arrived(
        &mut self,
        from: Rank,
        size: usize,
        target: Target,
        lost: Option<Box<OpError>>,
    ) {
        if let Target::Pieces { buffer, asked } = target {
            return self.carry_out(from, *asked, &buffer);
        }
        if let Target::Put { token, .. } = &target {
            let verdict = if lost.is_none() { Verdict::Done } else { Verdict::Failed };
            self.device.control(
                self.inner,
                from,
                Message::Finish { token: *token },
                verdict.encode(),
            );
        }
        let is_peers = matches!(target, Target::Am { .. });
        let ended = match lost {
            None => Some(target.end(from, size, None)),
            Some(error) if matches!(target, Target::Put { .. }) => {
                tracing::warn!(%from, %error, "a put could not be carried out");
                None
            }
            Some(error) => Some(target.end(from, size, Some(*error))),
        };
        match ended {
            Some((Some(comp), status)) if is_peers => self.signal_arrival(&comp, status),
            Some((comp, status)) => self.signal(comp.as_ref(), status),
            None => {}
        }
    }
}

impl DeviceInner {
    /// Sends one of the runtime's own messages: now, or from the backlog as soon as there is room.
    /// It is never refused, and its number is bounded by that of the operations which it answers.
    pub(crate) fn control(&self, runtime: &Inner, to: Rank, message: Message, payload: SmallBytes) {
        self.control_or_later(runtime, to, message, payload, || None);
    }

    /// As `control`; if it has to wait, what `late` gives is told when it is on its way, or never
    /// will be.
    pub(crate) fn control_or_later(
        &self,
        runtime: &Inner,
        to: Rank,
        message: Message,
        payload: SmallBytes,
        late: impl FnOnce() -> Option<Arc<dyn Completion>>,
    ) {
        let Some(route) = self.route(to) else { return };
        if let Some(cause) = route.down() {
            if let Some(comp) = late() {
                let (tag, user_context, size) = Default::default();
                let error = Some(Box::new(OpError::PeerDown { rank: to, cause: cause.clone() }));
                let status =
                    Status { rank: to, tag, size, user_context, buffer: Buffer::Empty, error };
                self.tell_later([(Some(comp), status)]);
            }
            return;
        }
        let linked = match route.linked() {
            Some(linked) => Some(linked),
            None => route.link(runtime, self).ok().flatten(),
        };
        self.send_control(route, linked, message.encode(), payload, late);
    }

    /// After something with a peer was noted here: if the peer went meanwhile, on another thread,
    /// that thread may have looked before it was noted, and nobody else would end it.
    pub(crate) fn end_if_gone(&self, runtime: &Inner, peer: Rank) {
        let Some(cause) = self.known_route(peer).and_then(|route| route.down()) else { return };
        let error = |rank| OpError::PeerDown { rank, cause: cause.clone() };
        self.tell_later(self.fail_bulk(runtime, Some(peer), &error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chores::Chores;

    #[test]
    fn parts_that_were_on_their_way_when_their_sender_gave_up_are_no_nonsense() {
        let bulk = Bulk::new(10, &Chores::default());
        let part = Payload::Aside(vec![1; 100]);
        let expect = |landing| {
            let (tag, user_context, comp) = (Tag(1), UserContext::default(), None);
            let (buffer, deadline) = (Buffer::Vec(vec![0; 1000]), Deadline::NEVER);
            let target = Target::Receive { tag, buffer, comp, user_context, deadline };
            bulk.arriving.lock().insert(landing, Arriving::new(Rank(1), 1000, target));
        };
        expect(5);
        assert!(bulk.take_part(Rank(1), 5, 0, &part).unwrap().is_none());
        assert!(bulk.refuse(Rank(2), 5, Verdict::Failed).is_none(), "it is another rank's");
        assert!(bulk.refuse(Rank(1), 5, Verdict::Done).is_none(), "that is no refusal");
        let ended = bulk.refuse(Rank(1), 5, Verdict::Broken { sent: 200 }).unwrap();
        let status = ended.expect("the receive ends").1;
        assert!(matches!(status.error.as_deref(), Some(OpError::Refused)));
        assert_eq!(status.buffer.len(), 1000);
        assert!(
            bulk.take_part(Rank(1), 5, 100, &part).unwrap().is_some(),
            "the last that was sent"
        );
        assert!(bulk.take_part(Rank(1), 5, 200, &part).is_err());
        expect(6);
        assert!(bulk.refuse(Rank(1), 6, Verdict::Failed).is_some());
        assert!(bulk.take_part(Rank(1), 6, 0, &part).is_err(), "none was sent");
    }
}
