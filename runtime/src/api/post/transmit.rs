//! The way of a message that is sent.

use super::desc::OpDesc;
use super::options::{Outcome, Post, RetryReason, Sending};
use super::order::Order;
use super::waiting::{Waiter, step};
use crate::api::Runtime;
use crate::api::buffer::{Buffer, SendBuffer};
use crate::comp::{Completion, Status};
use crate::datapath::Port;
use crate::deadline::Deadline;
use crate::error::PostError;
use crate::op::OnLink;
use crate::peer::backlog::{Parked, Stage};
use crate::peer::route::{Linked, Route};
use crate::progress::{in_handler, replies_to};
use crate::protocol::eager::{Plan, plan};
use crate::protocol::flow::Bound;
use crate::protocol::header::Message;
use carrack_transports::contract::{Busy, Header, Op, OpToken, Short, Submit, SubmitError};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{CopyError, MemMut, MemRef, PacketSource, SmallBytes};
use std::sync::Arc;
use std::time::Duration;

/// Time that a call that waits for a link sleeps before it checks for the reason.
const LINKING: Duration = Duration::from_millis(100);

/// A message to send, without its bytes.
#[derive(Clone, Copy)]
pub(super) struct OutgoingMessage<'a> {
    runtime: &'a Runtime,
    device: &'a Port,
    route: &'a Arc<Route>,
    header: Header,
    desc: OpDesc<'a>,
    order: Option<&'a Order>,
}

impl<'a> OutgoingMessage<'a> {
    #[inline]
    pub(super) fn of<K>(
        post: &Post<'a, K>,
        order: Option<&'a Order>,
        header: Header,
    ) -> Result<Self, PostError> {
        post.check_rank()?;
        post.check_deadline()?;
        let device = post.device_inner();
        let no_such_rank =
            || PostError::NoSuchRank { rank: post.desc.rank, last: post.runtime.0.size - 1 };
        Ok(Self {
            runtime: post.runtime,
            device,
            route: device.route(post.desc.rank).ok_or_else(no_such_rank)?,
            header,
            desc: post.desc,
            order,
        })
    }

    /// Returns `true` if it is the reply of a handler to the sender of its message. It is always
    /// accepted.
    fn is_reply(&self) -> bool {
        replies_to(self.runtime.0.id, self.desc.rank)
    }

    /// Returns `true` if the peer takes only replies now, and this is none. A collective's
    /// message makes no handler reply.
    #[cold]
    fn is_off(&self) -> bool {
        let is_collective = || Message::decode(self.header).is_ok_and(Message::is_collective);
        self.route.is_off() && !self.is_reply() && !is_collective()
    }

    #[inline]
    fn status(&self, size: usize, buffer: Buffer) -> Status {
        self.desc.context(size, None).status(buffer, None)
    }
}

/// Sends borrowed bytes, at most a packet of them, to a linked peer, in `try_submit` and without
/// rare options. Everything else, errors included, goes through [`submit_short`] and [`transmit`],
/// which check the same conditions with the same results. It exists because `transmit`'s
/// bookkeeping takes longer than a small message.
#[inline(always)]
pub(super) fn transmit_short<K>(
    post: &mut Post<'_, K>,
    bytes: Option<&[u8]>,
    header: Header,
) -> Option<Outcome> {
    if !post.desc.mode.is_ordinary() {
        return None;
    }
    let bytes = bytes?;
    match give_short(post, bytes, header)? {
        Short::Done => {
            post.desc.mode.spend();
            post.device_inner().deaf.sent(bytes.len());
            // This does not use `OpContext::status`, so that the fields are written into the
            // caller's outcome.
            let OpDesc { rank, tag, user_context, .. } = post.desc;
            let (size, buffer) = (bytes.len(), Buffer::Empty);
            Some(Outcome::Done(Status { rank, tag, size, user_context, buffer, error: None }))
        }
        Short::Busy(busy) => Some(Outcome::Retry(RetryReason::of(busy))),
        Short::Ask => None,
    }
}

/// Sends a short message as `transmit_short`, in `submit` and `wait`.
#[inline]
pub(super) fn submit_short<K>(
    post: &mut Post<'_, K>,
    bytes: Option<&[u8]>,
    header: Header,
) -> Option<Outcome> {
    let mode = post.desc.mode;
    // In a handler even a call that would end at once must not wait.
    if mode.is_spent() || mode.may_retry() || mode.waits() && in_handler() {
        return None;
    }
    let bytes = bytes?;
    let Short::Done = give_short(post, bytes, header)? else { return None };
    post.desc.mode.spend();
    post.device_inner().deaf.sent(bytes.len());
    if mode.submits() && post.desc.comp.is_none() {
        return Some(Outcome::Posted);
    }
    let status = post.desc.context(bytes.len(), None).status(Buffer::Empty, None);
    Some(match mode.submits() {
        true => tell_now(post.runtime, post.device_inner(), post.desc.comp, status),
        false => Outcome::Done(status),
    })
}

/// Gives a message of at most a packet to the link, if it has no rare option. A gone peer has a
/// better error than a full ring: then the result is `None`.
#[inline(always)]
fn give_short<K>(post: &Post<'_, K>, bytes: &[u8], header: Header) -> Option<Short> {
    if post.desc.required.is_some() || post.order.is_some() || post.desc.deadline.is_some() {
        return None;
    }
    let device = post.device_inner();
    let route = device.known_route(post.desc.rank)?;
    let linked = route.linked()?;
    let is_inline = bytes.len() <= linked.caps.am_inline;
    let fits = || bytes.len() <= linked.caps.am_copied.min(device.host_pool.packet_size());
    if !(is_inline || fits()) || !route.is_clear() || device.is_closed() {
        return None;
    }
    if device.deaf.has_to_listen() {
        return None;
    }
    let [first, second] = header.0;
    let answer = match post.desc.mode.has_more() && is_inline {
        false => linked.link.am_short((first, second), bytes),
        true => linked.link.am_more((first, second), bytes),
    };
    match answer {
        Short::Busy(_) if route.down().is_some() => None,
        answer => Some(answer),
    }
}

/// Tells the completion object of an operation that has ended within `submit`.
#[inline(never)]
pub(super) fn tell_now(
    runtime: &Runtime,
    device: &Port,
    comp: Option<&Arc<dyn Completion>>,
    status: Status,
) -> Outcome {
    if comp.is_some() {
        runtime.0.tell(device, comp, status);
        runtime.0.sleepers.wake();
    }
    Outcome::Posted
}

/// The result of one attempt.
enum Attempt {
    Done,
    Posted,
    Busy(RetryReason),
    /// The operation has to go through the backlog: it waits for an event, or for a copy.
    Park,
}

/// Sends a message as its options allow.
#[inline]
pub(super) fn transmit(
    out: &OutgoingMessage<'_>,
    sending: &mut Sending<'_>,
) -> Result<Outcome, PostError> {
    if out.desc.mode.waits() {
        return transmit_and_wait(out, sending);
    }
    match attempt(out, sending)? {
        Attempt::Done => {
            let size = sending.buffer.as_ref().map_or(0, SendBuffer::len);
            // Borrowed bytes stay, for `again`. An owned buffer goes into the status.
            let buffer = match &mut sending.buffer {
                Some(SendBuffer::Borrowed(_)) | None => Buffer::Empty,
                owned => match owned.take() {
                    Some(SendBuffer::Owned(buffer)) => buffer,
                    _ => Buffer::Empty,
                },
            };
            let status = out.status(size, buffer);
            if !out.desc.mode.submits() {
                return Ok(Outcome::Done(status));
            }
            Ok(tell_now(out.runtime, out.device, out.desc.comp, status))
        }
        Attempt::Posted => {
            // An owned buffer was taken, and an empty one left. Borrowed bytes are free.
            sending.buffer =
                sending.buffer.take().filter(|buffer| matches!(buffer, SendBuffer::Borrowed(_)));
            out.runtime.0.deadlines.note(out.desc.deadline);
            Ok(Outcome::Posted)
        }
        Attempt::Busy(reason) if out.desc.mode.may_retry() => Ok(Outcome::Retry(reason)),
        Attempt::Busy(_) | Attempt::Park => park(out, sending),
    }
}

#[inline]
fn attempt(out: &OutgoingMessage<'_>, sending: &mut Sending<'_>) -> Result<Attempt, PostError> {
    let Some(buffer) = sending.buffer.as_mut() else { return Err(PostError::Spent) };
    if out.device.is_closed() {
        return Err(out.device.why_closed());
    }
    let Some(linked) = out.route.linked() else { return first_use(out, sending) };
    if let Some(path) = out.desc.required.filter(|path| *path != linked.transport) {
        return Err(linked.wrong_path(out.desc.rank, path));
    }
    // An active message of a packet's length has its place in a packet.
    let packet = out.device.host_pool.packet_size();
    let maps = !buffer.kind().is_host()
        && (Message::is_send(out.header) || buffer.len() > packet)
        && out.runtime.0.may_map(linked);
    let mut plan = plan(buffer.kind(), buffer.len(), &linked.caps, packet, maps);
    if !out.route.is_open() && (!out.route.is_open_to_replies() || out.is_off()) {
        return match out.route.down() {
            Some(cause) => Err(PostError::PeerDown { rank: out.desc.rank, cause: cause.clone() }),
            None => Ok(Attempt::Busy(RetryReason::Backlog)),
        };
    }
    if out.order.is_some() {
        return Ok(Attempt::Park);
    }
    if out.device.deaf.has_to_listen() {
        // The thread that makes progress may be asleep, since no message has come.
        out.runtime.0.sleepers.wake();
        return Ok(Attempt::Busy(RetryReason::Unheard));
    }
    let is_held = matches!(plan, Plan::Copy | Plan::HandOver) && out.route.is_held();
    if is_held {
        plan = Plan::Offer;
    }
    let size = buffer.len();
    let submitted = match (plan, buffer) {
        (Plan::Copy, buffer) => {
            linked.link.submit(Op::AmCopied { header: out.header, bytes: buffer.view() })
        }
        (Plan::HandOver, SendBuffer::Owned(buffer)) => return hand_over(out, linked, buffer),
        (Plan::Offer, buffer) => return offer(out, linked, buffer, is_held),
        (Plan::Map, SendBuffer::Owned(buffer)) => return offer_mapped(out, linked, buffer),
        _ => return Ok(Attempt::Park),
    };
    match submitted {
        Ok(Submit::Done) => {
            out.device.deaf.sent(size);
            Ok(Attempt::Done)
        }
        Ok(Submit::Posted) => Ok(Attempt::Posted),
        Ok(Submit::Busy(busy)) => match out.route.down() {
            // The device has noticed the peer's end, the link has not.
            Some(cause) => Err(PostError::PeerDown { rank: out.desc.rank, cause: cause.clone() }),
            None => Ok(Attempt::Busy(RetryReason::of(busy))),
        },
        Err(error) => Err(refused(out, error)),
    }
}

/// Offers a message. Borrowed bytes are copied: pass an owned buffer to avoid that.
#[cold]
fn offer(
    out: &OutgoingMessage<'_>,
    linked: &Linked,
    buffer: &mut SendBuffer<'_>,
    is_held: bool,
) -> Result<Attempt, PostError> {
    if !out.device.transfers.may_offer(out.header, is_held) {
        return Ok(Attempt::Busy(RetryReason::Unanswered));
    }
    let operation = out.desc.context(buffer.len(), out.desc.comp.cloned());
    let transfers = &out.device.transfers;
    let submitted = match buffer {
        SendBuffer::Owned(buffer) => transfers.offer(linked, out.header, operation, buffer, None),
        SendBuffer::Borrowed(bytes) => {
            transfers.offer(linked, out.header, operation, &mut own(out.device, bytes), None)
        }
    };
    match submitted {
        Ok(Submit::Busy(busy)) => Ok(Attempt::Busy(RetryReason::of(busy))),
        Ok(_) => Ok(Attempt::Posted),
        Err(error) => Err(refused(out, error)),
    }
}

/// Offers a message that the receiver fetches from a GPU. If that is not possible, the message
/// goes through the backlog, which copies it.
#[cold]
fn offer_mapped(
    out: &OutgoingMessage<'_>,
    linked: &Linked,
    buffer: &mut Buffer,
) -> Result<Attempt, PostError> {
    let operation = out.desc.context(buffer.len(), out.desc.comp.cloned());
    match out.device.offer_mapped(&out.runtime.0, linked, out.header, operation, buffer) {
        None => Ok(Attempt::Park),
        Some(Ok(Submit::Busy(busy))) => Ok(Attempt::Busy(RetryReason::of(busy))),
        Some(Ok(_)) => Ok(Attempt::Posted),
        Some(Err(error)) => Err(refused(out, error)),
    }
}

/// Hands the buffer to the link, which gives it back when it is done.
#[cold]
fn hand_over(
    out: &OutgoingMessage<'_>,
    linked: &Linked,
    buffer: &mut Buffer,
) -> Result<Attempt, PostError> {
    let operation = out.desc.context(buffer.len(), out.desc.comp.cloned());
    let Ok(token) = out.device.outstanding.insert(OnLink::of(operation)) else {
        return Ok(Attempt::Busy(RetryReason::NoPacket));
    };
    match linked.link.submit(Op::AmOwned { header: out.header, buffer, token: OpToken(token) }) {
        Ok(Submit::Posted) => Ok(Attempt::Posted),
        other => {
            out.device.outstanding.take(token);
            match other {
                Ok(Submit::Busy(busy)) => Ok(Attempt::Busy(RetryReason::of(busy))),
                Ok(_) => Ok(Attempt::Done),
                Err(error) => Err(refused(out, error)),
            }
        }
    }
}

#[cold]
fn first_use(out: &OutgoingMessage<'_>, sending: &mut Sending<'_>) -> Result<Attempt, PostError> {
    // An operation that is submitted waits in the backlog, also for a shortage of this process.
    let linked = match out.desc.mode.may_retry() {
        true => out.route.try_link(&out.runtime.0, out.device),
        false => out.route.link(&out.runtime.0, out.device),
    };
    match linked? {
        Some(_) => attempt(out, sending),
        None => Ok(Attempt::Busy(RetryReason::of(Busy::Connecting))),
    }
}

#[cold]
fn refused(out: &OutgoingMessage<'_>, error: SubmitError) -> PostError {
    let rank = out.desc.rank;
    match error {
        SubmitError::TooLong { len, max } => {
            PostError::Memory(CopyError::TooLong { len, room: max })
        }
        SubmitError::Kind(kind) => PostError::Memory(CopyError::Unknown {
            dst: carrack_transports::mem::MemKind::Host,
            src: kind,
        }),
        SubmitError::Down { cause, .. } => {
            out.route.tell_down(&cause);
            PostError::PeerDown { rank, cause }
        }
        SubmitError::Lacking(why) => PostError::Lacking { rank, why },
        SubmitError::Address(_) | SubmitError::Unregistered(_) => {
            PostError::Unreachable { rank, why: error.to_string() }
        }
    }
}

/// Puts the message at the end of the peer's backlog, with bytes of its own.
#[cold]
fn park(out: &OutgoingMessage<'_>, sending: &mut Sending<'_>) -> Result<Outcome, PostError> {
    let (backlog, is_reply) = (out.runtime.0.settings.backlog(), out.is_reply());
    let holds_off = out.device.holds.holds_off(out.desc.rank);
    let limit = Bound(backlog).limit(is_reply, out.is_off(), holds_off);
    if let Some(cause) = out.route.down() {
        return Err(PostError::PeerDown { rank: out.desc.rank, cause: cause.clone() });
    }
    let Some(given) = sending.buffer.as_ref() else { return Err(PostError::Spent) };
    let mut comp = out.desc.comp.cloned();
    let mut event = None;
    if let Some(order) = out.order {
        order.check_memory(given.kind())?;
        // Before the stream is made to wait.
        if out.route.waiting() >= limit {
            return backlog_is_full(out, backlog);
        }
        let (first, released) = order.begin(&out.runtime.0, out.desc.comp)?;
        (event, comp) = (Some(first), released);
    }
    let buffer = sending.buffer.take().ok_or(PostError::Spent)?;
    let borrowed = match &buffer {
        SendBuffer::Borrowed(bytes) => Some(*bytes),
        SendBuffer::Owned(_) => None,
    };
    let size = buffer.len();
    let owned = match buffer {
        SendBuffer::Borrowed(bytes) => own(out.device, bytes),
        SendBuffer::Owned(buffer) => buffer,
    };
    let stage = match event {
        Some(event) => Stage::After(event, owned),
        None => Stage::Ready(owned),
    };
    let parked = Parked {
        header: out.header,
        op: out.desc.context(size, comp),
        required: out.desc.required,
        stage,
    };
    match out.device.park(out.route, parked, limit) {
        Ok(()) => {
            out.runtime.0.deadlines.note(out.desc.deadline);
            // Borrowed bytes are free, and stay for `again`.
            sending.buffer = borrowed.map(SendBuffer::Borrowed);
            if is_reply && out.route.waiting() > backlog {
                out.device.holds.add_replies(out.desc.rank);
            }
            Ok(Outcome::Posted)
        }
        Err(parked) => {
            let owned = parked.stage.into_buffer();
            sending.buffer = Some(borrowed.map_or(SendBuffer::Owned(owned), SendBuffer::Borrowed));
            backlog_is_full(out, backlog)
        }
    }
}

fn backlog_is_full(out: &OutgoingMessage<'_>, limit: usize) -> Result<Outcome, PostError> {
    if out.desc.mode.may_retry() {
        return Ok(Outcome::Retry(RetryReason::Backlog));
    }
    Err(PostError::BacklogFull { rank: out.desc.rank, limit })
}

/// Copies borrowed bytes: in place, into a packet, or to the heap.
pub(super) fn own(device: &Port, bytes: &[u8]) -> Buffer {
    if let Some(mut small) = SmallBytes::zeroed(bytes.len()) {
        let _ = copy_now(MemMut::host(small.as_mut_slice()), MemRef::host(bytes));
        return Buffer::Small(small);
    }
    match device.host_pool.take_copy(MemRef::host(bytes)) {
        Some(packet) => Buffer::Packet(packet),
        None => Buffer::Vec(bytes.to_vec()),
    }
}

/// Transmits for `wait`: the outcome is `Done`.
#[cold]
fn transmit_and_wait(
    out: &OutgoingMessage<'_>,
    sending: &mut Sending<'_>,
) -> Result<Outcome, PostError> {
    if in_handler() {
        return Err(PostError::WouldBlock);
    }
    let waiter = Waiter::new();
    let inner = OutgoingMessage { desc: out.desc.telling(waiter.as_completion()), ..*out };
    loop {
        match transmit(&inner, sending)? {
            Outcome::Retry(_) => {
                if out.desc.deadline.is_some() && out.desc.deadline.has_passed(Deadline::now()) {
                    return Err(PostError::TimedOut(out.desc.rank));
                }
                if out.route.linked().is_none() {
                    wait_for_link(out);
                } else {
                    step(out.runtime, out.device);
                }
            }
            Outcome::Posted => {
                return waiter.status(out.runtime).map(Outcome::Done);
            }
            done @ Outcome::Done(_) => {
                waiter.spare();
                return Ok(done);
            }
        }
    }
}

/// Sleeps until there is a link to the rank, which may not have started.
fn wait_for_link(out: &OutgoingMessage<'_>) {
    let inner = &out.runtime.0;
    inner.look_out_for(out.device.index, out.desc.rank);
    inner.deadlines.note(out.desc.deadline);
    let ends_wait =
        || out.route.linked().is_some() || out.desc.deadline.has_passed(Deadline::now());
    // A forked process has nothing to wait for: the next try fails with that error.
    let _ = inner.wait_keeping(&ends_wait, Some(LINKING));
}
