//! Parking of operations that wait for events and streams, and their resumption.

use super::atomic::Atomic;
use super::options::{Match, Outcome, Post};
use super::order::{Order, Renamed};
use super::ordered::{Entry, Later, Remote, Said, Sort, Start, Waits, What};
use super::pieces::Carries;
use super::recv::Recv;
use super::rma::{BUSY, Get, Place, Put, own_or_take};
use crate::buffer::{Buffer, SendBuffer};
use crate::comp::Completion;
use crate::deadline::{Deadline, Deadlines};
use crate::device::DeviceInner;
use crate::error::{OpError, PostError};
use crate::matching::Ticket;
use crate::names::{DEFAULT_ENGINE, Rank};
use crate::op::Ended;
use crate::pending::PendingOp;
use crate::progress::{Landing, Pass, signal};
use crate::runtime::Inner;
use carrack_transports::gpu::{Gpu, Stream};
use carrack_transports::mem::MemKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a rank that ends waits for copies on streams of the user, which may wait for
/// anything.
const PATIENCE: Duration = Duration::from_secs(1);

impl<K> Post<'_, K> {
    /// Returns `true` if the limit of waiting operations is reached.
    pub(super) fn is_full(&self) -> bool {
        self.device_inner().ordered.count() as usize >= self.runtime.0.settings.offers()
    }

    /// Parks the operation. An error returns its parameters.
    #[allow(clippy::result_large_err, reason = "not the hot path")]
    pub(super) fn park(
        &self,
        order: &Order,
        what: What,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<(), (PostError, What)> {
        let number = self.runtime.0.streams.number();
        self.park_as(number, order, what, comp)
    }

    #[allow(clippy::result_large_err, reason = "not the hot path")]
    fn park_as(
        &self,
        number: u64,
        order: &Order,
        what: What,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<(), (PostError, What)> {
        let inner = &self.runtime.0;
        let (ready, comp) = match order.begin(inner, comp) {
            Ok(begun) => begun,
            Err(error) => return Err((error, what)),
        };
        let (rank, deadline, sort) = (self.desc.rank, self.desc.deadline, what.sort());
        let size = if sort == Sort::Receive { 0 } else { what.size() };
        let said = Said { op: self.desc.context(size, comp), required: self.desc.required };
        let later = Later { ready, runtime: Arc::downgrade(inner), said, what };
        let device = self.device_inner();
        let waits = Waits::Later(Some(Box::new(later)));
        device.push_ordered(order.stream(), Entry { number, rank, sort, waits });
        inner.deadlines.note(deadline);
        device.end_ordered_if_gone(inner, rank);
        Ok(())
    }
}

/// The buffer of a put or a get.
struct End<'g> {
    kind: MemKind,
    size: usize,
    gpu: Option<&'g Arc<dyn Gpu>>,
    /// It is that of a put.
    is_source: bool,
}

impl<K> Post<'_, K> {
    /// Begins a put or a get in its order: as a copy on the stream where possible, else it waits.
    /// The buffer is taken after all checks, and comes with a later error.
    fn begin_move(
        &self,
        order: &Order,
        place: &Place<'_>,
        end: End<'_>,
        take: impl FnOnce() -> Buffer,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, Box<(PostError, Option<Buffer>)>> {
        let End { kind, size, gpu, is_source } = end;
        let untaken = |error| Box::new((error, None));
        order.check_memory(kind).map_err(untaken)?;
        let near = order.gpu().map_err(untaken)?;
        let remote = self.remote(place, size as u64, gpu.or(near.as_ref())).map_err(untaken)?;
        if self.waits_to_notify(place.signal) {
            return Ok(BUSY);
        }
        if let Some((region, at)) = remote
            && size > 0
            && let Some(stream) = order.stream_for(region, kind)
            && let Some(slice) = region.slice(at, size)
        {
            let (buffer, remote) = (take(), Buffer::Region(slice));
            let ends = if is_source { (remote, buffer) } else { (buffer, remote) };
            let begun = self.transfer(place, ends, is_source, comp, Some(stream));
            return begun.map_err(|refused| {
                let (error, buffer) = *refused;
                Box::new((error, Some(buffer)))
            });
        }
        if self.is_full() {
            return Ok(BUSY);
        }
        let (buffer, remote) = (take(), Remote::of(place));
        let what = if is_source { What::Put(buffer, remote) } else { What::Get(buffer, remote) };
        let parked = self.park(order, what, comp);
        parked.map_err(|(error, what)| Box::new((error, Some(what.into_buffer()))))?;
        Ok(Outcome::Posted)
    }
}

impl<K> Post<'_, K> {
    /// Begins an operation `now` if it has no order, or if its order is over; else `later`.
    #[inline]
    pub(super) fn in_order(
        &mut self,
        now: impl FnOnce(&mut Self) -> Result<Outcome, PostError>,
        later: impl FnOnce(&mut Self, &Order) -> Result<Outcome, PostError>,
    ) -> Result<Outcome, PostError> {
        let Some(order) = self.order.take() else { return now(self) };
        let begun = match order.is_over() {
            Ok(true) => now(self),
            Ok(false) => later(self, &order),
            Err(error) => Err(error),
        };
        self.order = Some(order);
        begun
    }
}

impl Post<'_, Put<'_>> {
    /// Begins it in its order.
    #[cold]
    pub(super) fn begin_later(
        &self,
        order: &Order,
        given: &mut Option<SendBuffer<'_>>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let buffer = given.as_ref().ok_or(PostError::Spent)?;
        let gpu = buffer.gpu().cloned();
        let end =
            End { kind: buffer.kind(), size: buffer.len(), gpu: gpu.as_ref(), is_source: true };
        let mut borrowed = None;
        let take = || {
            let (owned, bytes) = own_or_take(self.device_inner(), given);
            borrowed = bytes;
            owned
        };
        self.begin_move(order, &self.kind.place, end, take, comp).map_err(|refused| {
            let (error, taken) = *refused;
            if let Some(buffer) = taken {
                *given = Some(borrowed.map_or(SendBuffer::Owned(buffer), SendBuffer::Borrowed));
            }
            error
        })
    }
}

impl Post<'_, Get<'_>> {
    /// Begins it in its order.
    #[cold]
    pub(super) fn begin_later(
        &self,
        order: &Order,
        given: &mut Option<Buffer>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let buffer = given.as_mut().ok_or(PostError::Spent)?;
        if buffer.view_mut().is_none() {
            return Err(PostError::ReadOnly("Bytes"));
        }
        let gpu = buffer.gpu().cloned();
        let end =
            End { kind: buffer.kind(), size: buffer.len(), gpu: gpu.as_ref(), is_source: false };
        let take = || given.take().unwrap_or_default();
        self.begin_move(order, &self.kind.place, end, take, comp).map_err(|refused| {
            let (error, taken) = *refused;
            if taken.is_some() {
                *given = taken;
            }
            error
        })
    }
}

impl Post<'_, Atomic<'_>> {
    /// Begins it in its order.
    #[cold]
    pub(super) fn begin_later(
        &self,
        order: &Order,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let place = &self.kind.place;
        match place.rmr.nic() {
            None => drop(self.remote(place, 8, None)?),
            Some(_) => drop(self.check_place(place, 8)?),
        }
        self.wait_for(order, comp)
    }

    /// Parks the operation until its order lets it begin.
    pub(super) fn wait_for(
        &self,
        order: &Order,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let Atomic { place, operation, .. } = &self.kind;
        if self.is_full() {
            return Ok(BUSY);
        }
        let parked = self.park(order, What::Atomic(*operation, Remote::of(place)), comp);
        parked.map(|()| Outcome::Posted).map_err(|(error, _)| error)
    }
}

impl Post<'_, super::atomic::ToFlush> {
    /// Begins it in its order, and behind all operations on the rank's memory that have not begun.
    #[cold]
    pub(super) fn begin_in_order(
        &self,
        order: Option<&Order>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        if self.is_full() {
            return Ok(BUSY);
        }
        let parked = self.park(order.unwrap_or(&Order::default()), What::Flush, comp);
        parked.map(|()| Outcome::Posted).map_err(|(error, _)| error)
    }
}

impl Post<'_, Recv<'_>> {
    /// Posts it in its order.
    #[cold]
    pub(super) fn post_in_order(&mut self, order: &Order) -> Result<Outcome, PostError> {
        let (rank, runtime, device) = (self.desc.rank, &self.runtime.0, self.device_inner());
        if device.is_closed() {
            return Err(device.why_closed());
        }
        self.check_deadline()?;
        let policy = self.kind.matching.of_receive(rank, self.desc.tag)?;
        if policy.looks_at_rank() {
            self.check_rank()?;
            order.check_peer(runtime, rank)?;
        }
        if order.is_over()? {
            return self.post_now();
        }
        let buffer = self.kind.owned().ok_or(PostError::Spent)?;
        if buffer.view_mut().is_none() {
            return Err(PostError::ReadOnly("Bytes"));
        }
        order.check_memory(buffer.kind())?;
        if self.is_full() {
            return self.called(Ok(BUSY));
        }
        let Match { engine, .. } = self.kind.matching;
        let engine = engine.unwrap_or_else(|| runtime.engine(DEFAULT_ENGINE)).clone();
        let number = runtime.streams.number();
        let ticket = Ticket::of_parked(&engine, policy, rank, self.desc.tag, number);
        let renamed = Renamed::of(self.desc.comp.cloned(), number, runtime);
        let Recv { buffer, .. } = self.kind.take();
        match self.park_as(number, order, What::Recv(buffer, policy, engine), Some(&renamed)) {
            Ok(()) => {
                self.kind.ticket = Some(ticket);
                if policy.looks_at_rank() {
                    runtime.listen_to(rank);
                }
                Ok(Outcome::Posted)
            }
            Err((error, what)) => {
                self.kind.hold(what.into_buffer());
                Err(error)
            }
        }
    }
}

impl DeviceInner {
    fn push_ordered(&self, stream: Option<&Arc<dyn Stream>>, entry: Entry) {
        let mut ordered = self.ordered.lock();
        ordered.push(stream, entry);
        self.ordered.set_count(ordered.len());
    }

    /// Notes a copy in flight on a stream of the user.
    pub(super) fn add_copy(&self, runtime: &Inner, stream: &Arc<dyn Stream>, landing: Landing) {
        let (number, rank) = (runtime.streams.number(), landing.op.rank);
        let waits = Waits::Copy(Box::new(landing));
        self.push_ordered(Some(stream), Entry { number, rank, sort: Sort::Memory, waits });
    }

    /// Returns `true` if operations on a rank's memory have still to begin, or are copies on
    /// streams.
    pub(super) fn orders_memory(&self, rank: Rank) -> bool {
        !self.ordered.is_empty() && self.ordered.lock().has_memory(rank, u64::MAX)
    }

    /// Takes out operations that have not begun.
    fn take_later(&self, mut is_meant: impl FnMut(&Entry, &Later) -> bool) -> Vec<Later> {
        if self.ordered.is_empty() {
            return Vec::new();
        }
        let mut ordered = self.ordered.lock();
        let taken = ordered.remove(|entry| match &entry.waits {
            Waits::Later(Some(later)) => is_meant(entry, later),
            Waits::Later(None) | Waits::Copy(_) => false,
        });
        self.ordered.set_count(ordered.len());
        let later = taken.into_iter().filter_map(|entry| match entry.waits {
            Waits::Later(later) => later.map(|later| *later),
            Waits::Copy(_) => None,
        });
        later.collect()
    }

    /// Ends operations that wait for a gone rank. Returns the statuses to signal.
    #[cold]
    pub(crate) fn fail_ordered(&self, rank: Rank, error: &dyn Fn() -> OpError) -> Vec<Ended> {
        let meant = self.take_later(|entry, _| entry.rank == rank);
        meant.into_iter().map(|later| later.end(error())).collect()
    }

    /// Ends parked operations with a gone rank. The thread that noted its end may have looked
    /// before this one was parked.
    fn end_ordered_if_gone(&self, runtime: &Inner, rank: Rank) {
        let by_route = self.known_route(rank).and_then(|route| route.down().cloned());
        let Some(cause) = by_route.or_else(|| runtime.down().get(&rank).cloned()) else { return };
        self.tell_later(
            self.fail_ordered(rank, &|| OpError::PeerDown { rank, cause: cause.clone() }),
        );
    }

    /// Takes out the operations whose deadline has passed.
    pub(crate) fn expire_ordered(&self, now: Deadline, left: &Deadlines) -> Vec<Ended> {
        let late = self.take_later(|_, later| {
            let is_late = later.said.op.deadline.has_passed(now);
            if !is_late {
                left.note(later.said.op.deadline);
            }
            is_late
        });
        late.into_iter()
            .map(|later| {
                let rank = later.said.op.rank;
                later.end(OpError::TimedOut(rank))
            })
            .collect()
    }

    /// Takes a receive out that has not been posted.
    pub(crate) fn cancel_ordered(&self, number: u64) -> Option<Ended> {
        let later = self.take_later(|entry, _| entry.number == number).pop()?;
        Some(later.end(OpError::Cancelled))
    }

    /// Takes the operations that have not begun, and the copies that streams still have: the
    /// runtime ends.
    pub(crate) fn end_ordered(&self) -> (Vec<Ended>, Vec<Landing>) {
        let later = self.take_later(|_, _| true);
        let ended = later.into_iter().map(|later| later.end(OpError::Closed)).collect();
        let mut ordered = self.ordered.lock();
        let copies = ordered.remove(|_| true).into_iter().filter_map(|entry| match entry.waits {
            Waits::Copy(landing) => Some(*landing),
            Waits::Later(_) => None,
        });
        let copies = copies.collect();
        self.ordered.set_count(0);
        (ended, copies)
    }

    /// Returns `true` if operations other than receives wait.
    pub(crate) fn orders_sent(&self) -> bool {
        !self.ordered.is_empty()
            && self.ordered.lock().entries().any(|entry| entry.sort != Sort::Receive)
    }

    pub(crate) fn list_ordered(&self, list: &mut dyn FnMut(PendingOp)) {
        for entry in self.ordered.lock().entries() {
            let (what, rank, tag, size, waits_for) = match &entry.waits {
                Waits::Later(None) => continue,
                Waits::Later(Some(later)) => {
                    let waits_for = match entry.sort {
                        Sort::Flush => "what was posted before it, and was to begin after an event",
                        Sort::Memory if matches!(&later.what, What::Atomic(_, remote) if remote.is_nics()) => {
                            "the way to the NIC that is its word's agent, or the event that it \
                            was ordered after"
                        }
                        Sort::Memory if matches!(&later.what, What::Rest(_)) => {
                            "room among what waits for the rank's answer"
                        }
                        Sort::Memory | Sort::Receive => "the event that it was ordered after",
                    };
                    let op = &later.said.op;
                    (later.what.name(), op.rank, op.tag, later.what.size(), waits_for)
                }
                Waits::Copy(landing) => (
                    "copy on a stream",
                    landing.op.rank,
                    landing.op.tag,
                    landing.op.size,
                    "the stream to come to its end",
                ),
            };
            list(PendingOp { what, rank, tag, size: size as u64, waits_for: waits_for.into() });
        }
    }
}

/// Waits for copies on streams at the end of the runtime, for a limited time. A copy that does not
/// end keeps its memory.
#[cold]
pub(crate) fn end_copies(copies: Vec<Landing>) {
    let until = Instant::now() + PATIENCE;
    for mut landing in copies {
        while landing.transfer.poll(false).is_none() && Instant::now() < until {
            std::thread::yield_now();
        }
        let (comp, status) = if landing.transfer.poll(false).is_some() {
            landing.into_status(OpError::Closed)
        } else {
            let Landing { transfer, op, .. } = landing;
            tracing::warn!(rank = %op.rank, size = op.size, "a copy on a stream has not ended: its memory stays for \
                the stream");
            transfer.abandon();
            op.end(Buffer::Empty, Some(OpError::Closed))
        };
        // A full object cannot be waited for any more.
        let _ = signal(comp.as_ref(), status);
    }
}

impl Pass<'_> {
    /// Moves on the operations that wait for events and streams of the user.
    #[cold]
    pub(crate) fn move_ordered(&mut self) {
        let Some(mut ordered) = self.device.ordered.try_lock() else { return };
        let (mut copied, begin) = ordered.ready();
        self.device.ordered.set_count(ordered.len());
        drop(ordered);
        for landing in &mut copied {
            self.landed(landing);
        }
        if begin.is_empty() {
            return;
        }
        let device = self.inner.devices().get(self.device.index as usize).cloned();
        let Some(device) = device else { return };
        for (number, later) in begin {
            let rank = later.said.op.rank;
            match later.begin(&device) {
                Start::Again(later) => {
                    if let Some(entry) = self.device.ordered.lock().entry(number) {
                        entry.waits = Waits::Later(Some(Box::new(later)));
                    }
                    self.device.end_ordered_if_gone(self.inner, rank);
                    continue;
                }
                Start::UnderWay(ticket) => self.inner.streams.rename(number, ticket),
                Start::Over((comp, status)) => self.signal(comp.as_ref(), status),
            }
            self.moved = true;
            let mut ordered = self.device.ordered.lock();
            ordered.remove(|entry| entry.number == number);
            self.device.ordered.set_count(ordered.len());
        }
    }
}
