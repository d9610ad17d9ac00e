//! Polls devices, and carries out what the events ask for.
//!
//! ```text
//! poll ──► ordered: messages meet receives ──► the device is free for other threads ──► copies, completions
//! ```
//!
//! Matching happens before another thread can poll the device, so messages meet receives in the order
//! in which they came. Everything else, handlers included, happens outside all locks.
//!
//! What cannot be delivered now (a full queue, no packet) is deferred, and nothing is taken off the
//! device until it is: so a slow consumer pushes back on its peers, and memory stays bounded.

use crate::comp::{Completion, Snapshot, Status};
use crate::device::{Device, DeviceInner, Outstanding};
use crate::error::{OpError, ProgressError};
use crate::matching::{Receive, Unexpected};
use crate::names::{Rank, RemoteComp, Tag, UserContext};
use crate::peer::backlog::Step;
use crate::protocol::header::Message;
use crate::runtime::{Inner, Runtime};
use carrack_transports::contract::{Batch, DownCause, Event, Header, OpFailure, Payload, Polled};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, PacketSource, Transfer};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What is still to be done about an event.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// An active message.
    Am { from: Rank, comp: RemoteComp, tag: Tag, payload: Payload },
    /// A message that has met its receive.
    Matched(Box<(Unexpected, Receive)>),
    /// An operation that a link had is over.
    Ended { token: u64, buffer: Buffer, outcome: Result<(), OpFailure> },
    /// A peer is gone.
    Down { rank: Rank, cause: DownCause },
    /// A peer sent nonsense.
    Fault(ProgressError),
}

/// What could not be delivered.
pub(crate) enum Deferred {
    /// All of it.
    Delivery(Delivery),
    /// The last step: its completion object had no room.
    Status(Arc<dyn Completion>, Status),
}

/// A message on its way into memory that an engine has to write.
pub(crate) struct Landing {
    transfer: Transfer,
    comp: Option<Arc<dyn Completion>>,
    rank: Rank,
    tag: Tag,
    size: usize,
    user_context: UserContext,
}

impl Landing {
    pub(crate) fn into_status(self, error: OpError) -> (Option<Arc<dyn Completion>>, Status) {
        self.end(Some(error))
    }

    fn end(self, error: Option<OpError>) -> (Option<Arc<dyn Completion>>, Status) {
        let Self { transfer, comp, rank, tag, size, user_context } = self;
        let (buffer, _) = transfer.into_buffers();
        (comp, Status { rank, tag, size, user_context, buffer, error: error.map(Box::new) })
    }
}

impl Outstanding {
    pub(crate) fn into_status(self, error: OpError) -> (Option<Arc<dyn Completion>>, Status) {
        self.end(Buffer::Empty, Some(error))
    }

    fn end(self, buffer: Buffer, error: Option<OpError>) -> (Option<Arc<dyn Completion>>, Status) {
        let Self { rank, tag, size, user_context, comp } = self;
        (comp, Status { rank, tag, size, user_context, buffer, error: error.map(Box::new) })
    }
}

impl Receive {
    pub(crate) fn into_status(self, error: OpError) -> (Option<Arc<dyn Completion>>, Status) {
        let Self { rank, tag, buffer, comp, user_context } = self;
        (comp, Status { rank, tag, size: 0, user_context, buffer, error: Some(Box::new(error)) })
    }
}

impl std::fmt::Debug for Receive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Receive({} B from {}, {:?})", self.buffer.len(), self.rank, self.tag)
    }
}

/// What a thread keeps from one progress call to the next, so that none allocates.
struct Scratch {
    batch: Batch,
    deliveries: Vec<Delivery>,
    runtime: u64,
    comps: Snapshot,
}

thread_local! {
    static SCRATCH: RefCell<Option<Box<Scratch>>> = const { RefCell::new(None) };
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a completion object's `signal`.
pub(crate) fn in_handler() -> bool {
    IN_HANDLER.get()
}

/// Why a status could not be given to its completion object.
pub(crate) enum SignalError {
    Full(Arc<dyn Completion>, Box<Status>),
    Panicked(ProgressError),
}

/// Gives a status to a completion object: the one place where users' code is called.
#[inline]
pub(crate) fn signal(comp: Option<&Arc<dyn Completion>>, status: Status) -> Result<(), SignalError> {
    let Some(comp) = comp else {
        if let Some(error) = &status.error {
            tracing::warn!(%error, "an operation without a completion object failed");
        }
        return Ok(());
    };
    let rank = status.rank;
    let outer = IN_HANDLER.replace(true);
    let result = catch_unwind(AssertUnwindSafe(|| comp.signal(status)));
    IN_HANDLER.set(outer);
    match result {
        Ok(Ok(())) => Ok(()),
        Ok(Err(status)) => Err(SignalError::Full(comp.clone(), Box::new(status))),
        Err(panic) => Err(SignalError::Panicked(panicked(rank, panic.as_ref()))),
    }
}

#[cold]
fn panicked(from: Rank, panic: &(dyn std::any::Any + Send)) -> ProgressError {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message =
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into());
    tracing::error!(%from, message, "a completion handler panicked");
    ProgressError::HandlerPanicked { from, message }
}

impl Runtime {
    /// Makes progress on the default device: takes in messages, moves on what waits, calls completion
    /// objects. Never blocks. Any thread may call it, several at once; not from a completion handler.
    ///
    /// Returns whether anything moved.
    ///
    /// # Errors
    /// Something needs attention; all the rest was done, and the next call goes on.
    #[inline]
    pub fn progress(&self) -> Result<bool, ProgressError> {
        self.0.progress(&self.0.default_device().0)
    }

    /// Makes progress on one device.
    #[inline]
    pub fn progress_device(&self, device: &Device) -> Result<bool, ProgressError> {
        self.0.progress(&device.0)
    }

    /// Makes progress on all devices.
    pub fn progress_all(&self) -> Result<bool, ProgressError> {
        let mut moved = false;
        let devices = self.0.devices().clone();
        for device in &devices {
            moved |= self.0.progress(&device.0)?;
        }
        Ok(moved)
    }
}

/// One progress call's findings.
struct Pass<'a> {
    inner: &'a Inner,
    device: &'a DeviceInner,
    error: Option<ProgressError>,
    moved: bool,
}

impl Inner {
    pub(crate) fn progress(&self, device: &DeviceInner) -> Result<bool, ProgressError> {
        if in_handler() {
            return Err(ProgressError::InHandler);
        }
        let mut scratch = SCRATCH.take().unwrap_or_else(|| {
            let batch = Batch::new(self.settings.poll_batch());
            Box::new(Scratch { batch, deliveries: Vec::new(), runtime: 0, comps: Snapshot::default() })
        });
        if scratch.runtime != self.id {
            scratch.runtime = self.id;
            scratch.comps = Snapshot::default();
        }
        let mut pass = Pass { inner: self, device, error: None, moved: false };
        pass.run(&mut scratch);
        let Pass { error, moved, .. } = pass;
        SCRATCH.set(Some(scratch));
        if moved {
            self.sleepers.wake();
        }
        match error {
            None => Ok(moved),
            Some(error) => Err(error),
        }
    }
}

impl Pass<'_> {
    #[inline]
    fn run(&mut self, scratch: &mut Scratch) {
        if self.device.has_backlogs() {
            self.move_backlogs();
        }
        if !self.device.landing.is_empty() {
            self.move_landings();
        }
        if !self.device.deferred.is_empty() && !self.retry_deferred(scratch) {
            return;
        }
        for lane in &self.device.lanes {
            let Scratch { batch, deliveries, .. } = &mut *scratch;
            let polled = lane.device.poll(batch, &mut |batch| self.in_order(batch, deliveries));
            if polled == Polled::Some {
                self.moved = true;
                self.inner.comps.refresh(&mut scratch.comps);
                self.deliver_all(scratch);
            }
        }
    }

    /// Runs before another thread can poll the device: messages meet receives.
    #[inline]
    fn in_order(&self, batch: &mut Batch, deliveries: &mut Vec<Delivery>) {
        for event in batch.drain() {
            match event {
                Event::Arrived { from, header, payload } => {
                    let from = self.device.rank_of(from);
                    if let Some(delivery) = self.arrived(from, header, payload) {
                        deliveries.push(delivery);
                    }
                }
                Event::Completion { token, buffer, outcome } => {
                    deliveries.push(Delivery::Ended { token: token.0, buffer, outcome });
                }
                Event::PeerDown { peer, cause } => {
                    deliveries.push(Delivery::Down { rank: self.device.rank_of(peer), cause });
                }
                // Connected, and whatever later transports report: the backlog is looked at in any case.
                _ => {}
            }
        }
    }

    #[inline]
    fn arrived(&self, from: Rank, header: Header, payload: Payload) -> Option<Delivery> {
        let malformed = |why: String| Some(Delivery::Fault(ProgressError::Malformed { from, why }));
        match Message::decode(header) {
            Ok(Message::Am { comp, tag }) => Some(Delivery::Am { from, comp, tag, payload }),
            Ok(Message::Send { engine, policy, tag }) => {
                let Some(engine) = self.inner.engines.get(engine) else {
                    return malformed(format!("it names matching engine {engine}"));
                };
                let message = Unexpected { from, tag, payload };
                let met = engine.arrive(policy, message, |payload| self.settle(payload));
                met.map(|pair| Delivery::Matched(Box::new(pair)))
            }
            Err(why) => malformed(why),
        }
    }

    /// A message has to wait for its receive. What was lent goes back to its sender if there is a packet to
    /// keep it in; if not, the sender runs out of what it can lend, and that is its backpressure.
    fn settle(&self, payload: Payload) -> Payload {
        match payload {
            Payload::Loan(loan) => match self.device.host_pool.take_copy(loan.view()) {
                Some(packet) => Payload::Packet(packet),
                None => Payload::Loan(loan),
            },
            other => other,
        }
    }

    /// Delivers what was found, in order; defers what cannot be delivered now and all that is behind it.
    #[inline]
    fn deliver_all(&mut self, scratch: &mut Scratch) {
        let mut deliveries = std::mem::take(&mut scratch.deliveries);
        let mut stuck = !self.device.deferred.is_empty();
        for delivery in deliveries.drain(..) {
            if stuck {
                self.defer(Deferred::Delivery(delivery));
            } else if let Err(deferred) = self.deliver(delivery, &scratch.comps) {
                self.defer(deferred);
                stuck = true;
            }
        }
        scratch.deliveries = deliveries;
    }

    fn defer(&self, what: Deferred) {
        let mut deferred = self.device.deferred.lock();
        deferred.push_back(what);
        self.device.deferred.set_count(deferred.len());
    }

    /// Whether nothing is deferred any more.
    #[cold]
    fn retry_deferred(&mut self, scratch: &mut Scratch) -> bool {
        self.inner.comps.refresh(&mut scratch.comps);
        loop {
            // One at a time, outside the lock: delivering calls users' code.
            let Some(mut deferred) = self.device.deferred.try_lock() else { return false };
            let Some(next) = deferred.pop_front() else { return true };
            let behind = deferred.len() + 1;
            drop(deferred);
            let retried = match next {
                Deferred::Delivery(delivery) => self.deliver(delivery, &scratch.comps),
                Deferred::Status(comp, status) => self.signal(Some(&comp), status),
            };
            let mut deferred = self.device.deferred.lock();
            match retried {
                Ok(()) => {
                    self.moved = true;
                    self.device.deferred.set_count(deferred.len());
                }
                Err(again) => {
                    let error = match &again {
                        Deferred::Status(comp, _) => ProgressError::CompletionFull(comp.describe(), behind),
                        Deferred::Delivery(_) => ProgressError::NoPacket(behind),
                    };
                    deferred.push_front(again);
                    self.device.deferred.set_count(deferred.len());
                    self.complain(error);
                    return false;
                }
            }
        }
    }

    fn complain(&mut self, error: ProgressError) {
        if self.error.is_none() {
            self.error = Some(error);
        }
    }

    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn signal(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) -> Result<(), Deferred> {
        match signal(comp, status) {
            Ok(()) => Ok(()),
            Err(SignalError::Full(comp, status)) => Err(Deferred::Status(comp, *status)),
            Err(SignalError::Panicked(error)) => {
                self.complain(error);
                Ok(())
            }
        }
    }

    /// As `signal`, for what is in no order with the device's messages.
    fn signal_or_defer(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        if let Err(deferred) = self.signal(comp, status) {
            self.defer(deferred);
        }
    }

    #[inline]
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn deliver(&mut self, delivery: Delivery, comps: &Snapshot) -> Result<(), Deferred> {
        match delivery {
            Delivery::Am { from, comp, tag, payload } => match comps.get(comp) {
                Some(object) => self.deliver_am(from, (comp, object), tag, payload),
                None => {
                    self.complain(ProgressError::NoSuchCompletion { from, comp, size: payload.len() });
                    Ok(())
                }
            },
            Delivery::Matched(pair) => {
                let (message, receive) = *pair;
                match self.device.land(message, receive) {
                    Some((comp, status)) => self.signal(comp.as_ref(), status),
                    None => Ok(()),
                }
            }
            Delivery::Ended { token, buffer, outcome } => {
                let Some(operation) = self.device.outstanding.take(token) else {
                    tracing::error!(token, "a transport ended an operation that it did not have");
                    return Ok(());
                };
                let error = outcome.err().map(|failure| OpError::of(failure, operation.rank));
                let (comp, status) = operation.end(buffer, error);
                self.signal(comp.as_ref(), status)
            }
            Delivery::Down { rank, cause } => {
                self.peer_down(rank, cause);
                Ok(())
            }
            Delivery::Fault(error) => {
                tracing::warn!(%error, "a message was dropped");
                self.complain(error);
                Ok(())
            }
        }
    }

    #[inline]
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn deliver_am(
        &mut self,
        from: Rank,
        (name, comp): (RemoteComp, &Arc<dyn Completion>),
        tag: Tag,
        payload: Payload,
    ) -> Result<(), Deferred> {
        let size = payload.len();
        let wait = |payload| Err(Deferred::Delivery(Delivery::Am { from, comp: name, tag, payload }));
        let pool = &self.device.pool;
        if !pool.kind().is_host() && size > 0 {
            // The payload's place is the GPU. What a transport has put there already stays; all else lands.
            let source = match payload {
                Payload::Packet(packet) if packet.kind() == pool.kind() => {
                    let status = arrival(from, tag, size, Buffer::Packet(packet));
                    return self.signal(Some(comp), status);
                }
                Payload::Packet(packet) => Buffer::Packet(packet),
                Payload::Small(small) => Buffer::Small(small),
                Payload::Loan(loan) => match self.keep(&loan) {
                    Some(buffer) => buffer,
                    None => return wait(Payload::Loan(loan)),
                },
            };
            let Some(packet) = pool.take_with_len(size) else { return wait(unkeep(source)) };
            return match Transfer::start(Buffer::Packet(packet), source) {
                Ok(transfer) => {
                    let comp = Some(comp.clone());
                    let landing = Landing {
                        transfer,
                        comp,
                        rank: from,
                        tag,
                        size,
                        user_context: UserContext::default(),
                    };
                    self.device.add_landing(landing);
                    Ok(())
                }
                Err(refused) => {
                    let mut status = arrival(from, tag, size, refused.src);
                    status.error = Some(Box::new(OpError::Copy(refused.cause)));
                    self.signal(Some(comp), status)
                }
            };
        }
        let buffer = match payload {
            Payload::Small(small) => Buffer::Small(small),
            Payload::Packet(packet) => Buffer::Packet(packet),
            Payload::Loan(loan) => match self.keep(&loan) {
                Some(buffer) => buffer,
                None => return wait(Payload::Loan(loan)),
            },
        };
        self.signal(Some(comp), arrival(from, tag, size, buffer))
    }

    /// Copies what was lent into a packet.
    fn keep(&self, loan: &carrack_transports::contract::Loan) -> Option<Buffer> {
        self.device.host_pool.take_copy(loan.view()).map(Buffer::Packet)
    }

    /// Moves on what waits in backlogs.
    #[cold]
    fn move_backlogs(&mut self) {
        for rank in self.device.busy_ranks() {
            let Some(route) = self.device.known_route(rank).cloned() else { continue };
            let mut ended = Vec::new();
            if route.linked().is_none() {
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
                    let step = front.step(self.device, linked);
                    if matches!(step, Step::Waits) {
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
                self.signal_or_defer(comp.as_ref(), status);
            }
        }
    }

    /// Looks which engines are done.
    #[cold]
    fn move_landings(&mut self) {
        let mut ended = Vec::new();
        if let Some(mut landings) = self.device.landing.try_lock() {
            for landing in landings.extract_if(.., |landing| landing.transfer.poll().is_some()) {
                ended.push(landing);
            }
            self.device.landing.set_count(landings.len());
        }
        for mut landing in ended {
            self.moved = true;
            let outcome = landing.transfer.poll().unwrap_or(Ok(()));
            let (comp, status) = landing.end(outcome.err().map(OpError::Copy));
            self.signal_or_defer(comp.as_ref(), status);
        }
    }

    #[cold]
    fn peer_down(&mut self, rank: Rank, cause: DownCause) {
        let Some(route) = self.device.route(rank).cloned() else { return };
        if !route.set_down(cause.clone()) {
            return;
        }
        tracing::info!(%rank, device = self.device.index, %cause, "peer down");
        let mut ended = self.device.fail_backlog(&route, &cause);
        // A peer that closed one device in order may have others. It is gone when none is left.
        let is_gone = !matches!(cause, DownCause::Closed) || {
            let devices = self.inner.devices();
            devices.iter().all(|device| device.0.known_route(rank).is_none_or(|route| route.down().is_some()))
        };
        if is_gone {
            self.inner.down().entry(rank).or_insert_with(|| cause.clone());
            for engine in self.inner.engines.each() {
                let receives = engine.receives_from(rank).into_iter();
                ended.extend(
                    receives.map(|r| r.into_status(OpError::PeerDown { rank, cause: cause.clone() })),
                );
            }
        }
        for (comp, status) in ended {
            self.signal_or_defer(comp.as_ref(), status);
        }
    }
}

fn arrival(rank: Rank, tag: Tag, size: usize, buffer: Buffer) -> Status {
    Status { rank, tag, size, user_context: UserContext::default(), buffer, error: None }
}

/// The payload that a buffer was made of, for another try.
fn unkeep(buffer: Buffer) -> Payload {
    match buffer {
        Buffer::Packet(packet) => Payload::Packet(packet),
        Buffer::Small(small) => Payload::Small(small),
        _ => Payload::Small(carrack_transports::mem::SmallBytes::empty()),
    }
}

impl DeviceInner {
    fn add_landing(&self, landing: Landing) {
        let mut landings = self.landing.lock();
        landings.push(landing);
        self.landing.set_count(landings.len());
    }

    /// Puts a message into the buffer of the receive that it met. The completion object and its status, or
    /// nothing when an engine is at it.
    pub(crate) fn land(
        &self,
        message: Unexpected,
        receive: Receive,
    ) -> Option<(Option<Arc<dyn Completion>>, Status)> {
        let Unexpected { from, tag, payload } = message;
        let Receive { mut buffer, comp, user_context, .. } = receive;
        let size = payload.len();
        let status = |buffer, error: Option<OpError>| Status {
            rank: from,
            tag,
            size,
            user_context,
            buffer,
            error: error.map(Box::new),
        };
        if size > buffer.len() {
            let error = OpError::Truncated { message: size, buffer: buffer.len() };
            return Some((comp, status(buffer, Some(error))));
        }
        if buffer.kind().is_host() && payload.view().place().is_host() {
            let copied = match buffer.view_mut() {
                Some(target) => copy_now(target, payload.view()),
                None => Ok(()),
            };
            drop(payload);
            return Some((comp, status(buffer, copied.err().map(OpError::Copy))));
        }
        let source = match payload {
            Payload::Small(small) => Buffer::Small(small),
            Payload::Packet(packet) => Buffer::Packet(packet),
            // An engine takes its time, and what was lent must go back soon.
            Payload::Loan(loan) => {
                let mut kept = match self.host_pool.take_with_len(size) {
                    Some(packet) => Buffer::Packet(packet),
                    None => Buffer::Vec(vec![0; size]),
                };
                if let Some(target) = kept.view_mut()
                    && let Err(error) = copy_now(target, loan.view())
                {
                    return Some((comp, status(buffer, Some(OpError::Copy(error)))));
                }
                kept
            }
        };
        match Transfer::start(buffer, source) {
            Ok(transfer) => {
                self.add_landing(Landing { transfer, comp, rank: from, tag, size, user_context });
                None
            }
            Err(refused) => Some((comp, status(refused.dst, Some(OpError::Copy(refused.cause))))),
        }
    }
}
