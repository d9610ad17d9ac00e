//! The receiver's side.

use super::Bulk;
use super::granting::Ask;
use super::inflow::Inflow;
use super::packed::Asked;
use super::pull::Pull;
use super::showing::Showing;
use crate::comp::Completion;
use crate::deadline::{Deadline, Deadlines};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::{Rank, Tag};
use crate::op::{Ended, OpContext};
use crate::progress::{Landing, Pass};
use crate::protocol::header::Message;
use crate::protocol::wire::{Offer, Verdict};
use crate::runtime::Inner;
use carrack_transports::contract::{Exposed, Payload, PeerMemory};
use carrack_transports::mem::copy::{check_kinds, copy_now};
use carrack_transports::mem::{Buffer, MemKind, SmallBytes};
use std::sync::Arc;

/// The destination of a large message.
pub(crate) enum Target {
    /// Into a receive that was posted.
    Receive { buffer: Buffer, op: OpContext },
    /// To a completion object, in the memory that it named or in fresh memory.
    Am { tag: Tag, buffer: Buffer, comp: Arc<dyn Completion> },
    /// Into a region of this rank: a put. Its sender is told at the end, and the completion object
    /// if there is one.
    Put { tag: Tag, buffer: Buffer, comp: Option<Arc<dyn Completion>>, token: u64 },
    /// A list of places in a region of this rank's, and the bytes of a put behind it.
    Pieces { buffer: Buffer, asked: Box<Asked> },
    /// None: the operation has ended.
    Nowhere,
}

/// A message that comes part by part.
pub(crate) struct Arriving {
    pub(super) from: Rank,
    pub(super) size: usize,
    pub(super) target: Target,
    pub(super) got: usize,
    /// Bytes that will arrive: all, unless the sender has failed.
    pub(super) until: usize,
    /// Blocks on the way, where the target is memory of a GPU.
    pub(super) inflow: Option<Box<Inflow>>,
    /// The request that is still to be sent.
    pub(super) ask: Option<Box<Ask>>,
    /// Bytes that the sender knows it may send.
    pub(super) told: usize,
    /// The error of an engine: later bytes are dropped, and then the message ends with it.
    pub(super) lost: Option<Box<OpError>>,
    /// The error that ends the message as soon as no engine uses its buffer. No bytes arrive any
    /// more.
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

    /// Gives the blocks back, and drops further bytes; the buffer is the target's again.
    pub(super) fn lose(&mut self, error: OpError) {
        self.inflow = None;
        self.lost = Some(Box::new(error));
    }

    /// Returns `true` if an engine is still writing to the buffer. The message then ends with the
    /// error when the engine is done.
    pub(super) fn must_wait(&mut self, error: &dyn Fn(Rank) -> OpError) -> bool {
        let is_busy = self.is_busy();
        if is_busy {
            self.ends_with = Some(Box::new(error(self.from)));
        }
        is_busy
    }

    /// Returns `true` if only an engine keeps it from ending.
    pub(super) fn is_ending(&self) -> bool {
        self.ends_with.is_some()
    }

    /// Takes the error with which it ends now, if it does.
    pub(super) fn ends_with(&mut self) -> Option<Box<OpError>> {
        if self.ends_with.is_none() || self.is_busy() { None } else { self.ends_with.take() }
    }

    fn is_busy(&mut self) -> bool {
        self.inflow.as_mut().is_some_and(|inflow| inflow.is_busy())
    }

    /// Takes the buffer back from the sender's NIC. Returns `true` if the NIC had it.
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

    /// Ends the message without its bytes, after waiting for an engine that uses its buffer. The
    /// buffer stays while the sender's NIC may write to it. Later bytes are dropped.
    pub(super) fn give_up(&mut self, error: OpError) -> Option<Ended> {
        if let (Some(inflow), Some(buffer)) = (&mut self.inflow, self.target.buffer()) {
            inflow.settle(buffer);
        }
        self.inflow = None;
        if self.until == 0 {
            self.take_back();
        }
        if matches!(self.ask.as_deref(), Some(Ask::Region(..))) {
            // The owner has not heard of this get: no bytes will come.
            self.until = 0;
        }
        let target = std::mem::replace(&mut self.target, Target::Nowhere);
        target.fail(self.from, self.size, error)
    }
}

impl Target {
    /// Returns the buffer for its bytes, if any.
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
            Self::Receive { op, .. } => op.tag,
            Self::Am { tag, .. } | Self::Put { tag, .. } => *tag,
            Self::Pieces { .. } | Self::Nowhere => Tag::default(),
        }
    }

    /// Returns `true` if it is for memory of this rank. Its sender is told only after the bytes
    /// are in place.
    pub(super) fn is_memory(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Pieces { .. })
    }

    /// Returns the deadline.
    pub(super) fn deadline(&self) -> Deadline {
        match self {
            Self::Receive { op, .. } => op.deadline,
            _ => Deadline::NEVER,
        }
    }

    pub(super) fn end(self, from: Rank, size: usize, error: Option<OpError>) -> Ended {
        let (op, buffer) = self.apart(from, size);
        op.end(buffer, error)
    }

    /// Returns the context of the operation whose bytes come from `from`, and its buffer.
    pub(super) fn apart(self, from: Rank, size: usize) -> (OpContext, Buffer) {
        let (tag, buffer, comp) = match self {
            Self::Receive { buffer, op } => {
                return (OpContext { rank: from, size, ..op }, buffer);
            }
            Self::Am { tag, buffer, comp } => (tag, buffer, Some(comp)),
            // The buffer is part of the region, and stays there.
            Self::Put { tag, comp, .. } => (tag, Buffer::Empty, comp),
            Self::Pieces { .. } | Self::Nowhere => (Tag::default(), Buffer::Empty, None),
        };
        (OpContext::of_runtime(from, tag, size, comp), buffer)
    }

    /// Ends it without its bytes. `None`: this rank has no operation for it, since the active
    /// message never arrived.
    pub(super) fn fail(self, from: Rank, size: usize, error: OpError) -> Option<Ended> {
        match self {
            Self::Receive { .. } => Some(self.end(from, size, Some(error))),
            Self::Am { .. } | Self::Put { .. } | Self::Pieces { .. } => None,
            Self::Nowhere => Some(self.end(from, size, None)),
        }
    }
}

impl DeviceInner {
    /// Accepts an offer. Returns a status if the message ends here: an empty one, or an error.
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
            // The peer sent the offer before it went. Its bytes are gone, and its addresses mean
            // nothing now.
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
        // Bytes for a GPU go block by block.
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

    /// Returns the sender's memory if the kernel may copy from it.
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

    /// Asks for the parts of a message whose fetch may have read withdrawn memory.
    pub(crate) fn ask_again(&self, runtime: &Inner, landing: &mut Landing, token: u64) {
        let (buffer, op) = (landing.transfer.take_buffers().0, landing.op.take());
        let (from, size) = (op.rank, op.size);
        let target = Target::Receive { buffer, op };
        self.ask_for_parts(runtime, token, (from, size, target));
    }
}

impl Bulk {
    /// Takes a part in. Returns the message after its last part. `Err`: there is no such message.
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
            // The message is complete when its last block is copied.
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
    /// Ends a request that the peer has refused. The outer `None`: there was no such request, or
    /// the verdict is no refusal. The inner `None`: this rank has no operation for it, or an
    /// engine still uses the buffer.
    pub(crate) fn refuse(&self, by: Rank, landing: u64, verdict: Verdict) -> Option<Option<Ended>> {
        let error = verdict.error(by)?;
        // Parts that another thread has yet to take in are valid, though no operation needs them.
        self.refuse_with(by, landing, &error, |size| match verdict {
            Verdict::Broken { sent } => usize::try_from(sent).map_or(size, |sent| sent.min(size)),
            _ => 0,
        })
    }

    /// Ends an expected message with an error. `until` computes the bytes that are sent in spite
    /// of it.
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

    /// Ends the messages whose deadline has passed. Their later parts are dropped.
    pub(crate) fn expire_arriving(&self, now: Deadline, left: &Deadlines) -> Vec<Ended> {
        let mut ended = Vec::new();
        for one in self.arriving.lock().values_mut() {
            let deadline = one.target.deadline();
            // A message that an engine works on is looked at again soon.
            if !deadline.has_passed(now) || one.is_busy() {
                left.note(deadline);
                continue;
            }
            let error = OpError::TimedOut(one.from);
            ended.extend(one.give_up(error));
        }
        ended
    }

    /// Returns `true` if a get from a peer is in flight that began before `name`.
    pub(super) fn gets_from(&self, peer: Rank, before: u64) -> bool {
        self.arriving.lock().iter().any(|(&name, one)| one.from == peer && name < before)
    }

    /// Returns a name that is smaller than that of every later operation.
    pub(crate) fn now(&self) -> u64 {
        self.name()
    }

    /// Returns `true` if an operation on a peer's memory is in flight that began before `name`.
    pub(crate) fn has_memory_operations(&self, peer: Rank, before: u64) -> bool {
        self.sends_to_memory(peer, before)
            || self.gets_from(peer, before)
            || self.packed.has(peer, before)
    }
}

impl Pass<'_> {
    /// Handles a part of a message.
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

    /// Ends a message whose bytes are all on this side: in place, or lost.
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
    /// It is never refused. The operations that such messages answer bound their number.
    pub(crate) fn control(&self, runtime: &Inner, to: Rank, message: Message, payload: SmallBytes) {
        self.control_or_later(runtime, to, message, payload, || None);
    }

    /// Sends as `control` does. If the message has to wait, the completion object from `late` is
    /// signaled when it is sent, or when its peer is down.
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
                let error = OpError::PeerDown { rank: to, cause: cause.clone() };
                let op = OpContext::of_runtime(to, Tag::default(), 0, Some(comp));
                self.tell_later([op.end(Buffer::Empty, Some(error))]);
            }
            return;
        }
        let linked = match route.linked() {
            Some(linked) => Some(linked),
            None => route.link(runtime, self).ok().flatten(),
        };
        self.send_control(route, linked, message.encode(), payload, late);
    }

    /// Ends an operation with a peer that went meanwhile. Another thread may have handled the
    /// peer's end before this operation was noted, and would not end it.
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
            let op = OpContext::of_runtime(Rank(1), Tag(1), 0, None);
            let (buffer, deadline) = (Buffer::Vec(vec![0; 1000]), Deadline::NEVER);
            let target = Target::Receive { buffer, op: OpContext { deadline, ..op } };
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
