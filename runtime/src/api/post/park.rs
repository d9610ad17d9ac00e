//! Parking of operations that wait for events and streams, and their resumption.

use super::atomic::Atomic;
use super::options::{Match, Outcome, Post};
use super::order::{Order, Renamed};
use super::ordered::{Later, OrderedOp, OwnedPlace, Said};
use super::pieces::Carries;
use super::place::RmaPlace;
use super::recv::Recv;
use super::rma::{BUSY, Get, Put, own_or_take};
use crate::api::buffer::{Buffer, SendBuffer};
use crate::comp::{Completion, Ranks};
use crate::datapath::{OrderedEntry, Sort, Waits};
use crate::error::PostError;
use crate::matching::ReceiveName;
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::MemKind;
use std::sync::Arc;

impl<K> Post<'_, K> {
    /// Returns `true` if the limit of waiting operations is reached.
    pub(super) fn is_full(&self) -> bool {
        self.device_inner().ordered.len() >= self.runtime.0.settings.offers()
    }

    /// Parks the operation. An error returns its parameters.
    #[allow(clippy::result_large_err, reason = "not the hot path")]
    pub(super) fn park(
        &self,
        order: &Order,
        ordered: OrderedOp,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<(), (PostError, OrderedOp)> {
        let number = self.runtime.0.streams.number();
        self.park_as(number, order, ordered, comp)
    }

    #[allow(clippy::result_large_err, reason = "not the hot path")]
    fn park_as(
        &self,
        number: u64,
        order: &Order,
        ordered: OrderedOp,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<(), (PostError, OrderedOp)> {
        let inner = &self.runtime.0;
        let (ready, comp) = match order.begin(inner, comp) {
            Ok(begun) => begun,
            Err(error) => return Err((error, ordered)),
        };
        let (rank, deadline, sort) = (self.desc.rank, self.desc.deadline, ordered.sort());
        let size = if sort == Sort::Receive { 0 } else { ordered.size() };
        let said = Said { op: self.desc.context(size, comp), required: self.desc.required };
        let later = Later { ready, runtime: Arc::downgrade(inner), said, ordered };
        let device = self.device_inner();
        let waits = Waits::Later(Some(Box::new(later)));
        device.ordered.push(order.stream(), OrderedEntry { number, rank, sort, waits });
        inner.deadlines.note(deadline);
        inner.end_ordered_if_gone(device, rank);
        Ok(())
    }
}

/// The buffer of a put or a get.
struct LocalBuffer<'g> {
    kind: MemKind,
    size: usize,
    gpu: Option<&'g Arc<dyn Gpu>>,
    /// `true` for the buffer of a put.
    is_source: bool,
}

impl<K> Post<'_, K> {
    /// Begins a put or a get in its order: as a copy on the stream where possible, else it waits.
    /// The buffer is taken after all checks, and comes with a later error.
    fn begin_move(
        &self,
        order: &Order,
        place: &RmaPlace<'_>,
        local: LocalBuffer<'_>,
        take: impl FnOnce() -> Buffer,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, Box<(PostError, Option<Buffer>)>> {
        let LocalBuffer { kind, size, gpu, is_source } = local;
        let untaken = |error| Box::new((error, None));
        order.check_memory(kind).map_err(untaken)?;
        let near = order.gpu().map_err(untaken)?;
        let remote = self.remote(place, size as u64, gpu.or(near.as_ref())).map_err(untaken)?;
        if self.waits_to_notify(place.notify) {
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
        let (buffer, remote) = (take(), OwnedPlace::of(place));
        let ordered =
            if is_source { OrderedOp::Put(buffer, remote) } else { OrderedOp::Get(buffer, remote) };
        let parked = self.park(order, ordered, comp);
        parked.map_err(|(error, ordered)| Box::new((error, Some(ordered.into_buffer()))))?;
        Ok(Outcome::Posted)
    }
}

impl<K> Post<'_, K> {
    /// Begins an operation `now` if it has no order, or if its order waits for nothing more; else
    /// `later`.
    #[inline]
    pub(super) fn in_order(
        &mut self,
        now: impl FnOnce(&mut Self) -> Result<Outcome, PostError>,
        later: impl FnOnce(&mut Self, &Order) -> Result<Outcome, PostError>,
    ) -> Result<Outcome, PostError> {
        let Some(order) = self.order.take() else { return now(self) };
        let begun = match order.is_met() {
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
        let local = LocalBuffer {
            kind: buffer.kind(),
            size: buffer.len(),
            gpu: gpu.as_ref(),
            is_source: true,
        };
        let mut borrowed = None;
        let take = || {
            let (owned, bytes) = own_or_take(self.device_inner(), given);
            borrowed = bytes;
            owned
        };
        self.begin_move(order, &self.kind.place, local, take, comp).map_err(|refused| {
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
        if !buffer.has_view_mut() {
            return Err(PostError::ReadOnly("Bytes"));
        }
        let gpu = buffer.gpu().cloned();
        let local = LocalBuffer {
            kind: buffer.kind(),
            size: buffer.len(),
            gpu: gpu.as_ref(),
            is_source: false,
        };
        let take = || given.take().unwrap_or_default();
        self.begin_move(order, &self.kind.place, local, take, comp).map_err(|refused| {
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
        let parked = self.park(order, OrderedOp::Atomic(*operation, OwnedPlace::of(place)), comp);
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
        // Only a link tells of the rank's end. Once the rank has gone, the flush ends by that.
        if let Err(error) = self.check_reach() {
            tracing::debug!(%error, rank = self.desc.rank.0, "no link to a rank that is flushed");
        }
        let parked = self.park(order.unwrap_or(&Order::default()), OrderedOp::Flush, comp);
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
        if order.is_met()? {
            return self.post_now();
        }
        let buffer = self.kind.owned().ok_or(PostError::Spent)?;
        if !buffer.has_view_mut() {
            return Err(PostError::ReadOnly("Bytes"));
        }
        order.check_memory(buffer.kind())?;
        if self.is_full() {
            return self.called(Ok(BUSY));
        }
        let Match { engine, .. } = self.kind.matching;
        let engine = engine.unwrap_or_else(|| runtime.engines.default_engine()).clone();
        let number = runtime.streams.number();
        let name = ReceiveName::of_parked(&engine, policy, rank, self.desc.tag, number);
        let renamed = Renamed::of(self.desc.comp.cloned(), number, &self.runtime.0);
        let Recv { buffer, .. } = self.kind.take();
        match self.park_as(number, order, OrderedOp::Recv(buffer, policy, engine), Some(&renamed)) {
            Ok(()) => {
                self.kind.name = Some(name);
                if policy.looks_at_rank() {
                    runtime.listen_to(rank);
                }
                Ok(Outcome::Posted)
            }
            Err((error, ordered)) => {
                self.kind.hold(ordered.into_buffer());
                Err(error)
            }
        }
    }
}
