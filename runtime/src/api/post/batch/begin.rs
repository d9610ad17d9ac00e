//! The begin of a batch.

use super::check::{BatchPlan, HostRun};
use super::join::Join;
use super::rest::Rest;
use super::{Batch, Many, Owned, StridedPair};
use crate::api::post::options::{Outcome, Post, RetryReason};
use crate::api::post::order::Order;
use crate::api::post::ordered::OrderedOp;
use crate::api::post::rma::{BUSY, tell};
use crate::comp::{Completion, Status};
use crate::datapath::{Landing, Moving};
use crate::error::{OpError, PostError};
use crate::region::Region;
use carrack_transports::gpu::Stream;
use carrack_transports::mem::{Buffer, CopyError, Hosts, Strided, StridedRefused, start_strided};
use parking_lot::Mutex;
use std::sync::Arc;

/// The progress of a batch.
pub(in crate::api::post) enum Started {
    Done(Status),
    InFlight,
    /// Too many operations wait for peers already: nothing was begun.
    Full(RetryReason),
    /// The pieces that there was room for are in flight.
    Partly(Rest),
}

impl Post<'_, Batch<'_>> {
    /// Begins it, in its order if it has one.
    pub(super) fn begin(&self, comp: Option<&Arc<dyn Completion>>) -> Result<Outcome, PostError> {
        if self.waits_to_notify(self.kind.notify) {
            return Ok(BUSY);
        }
        if let Some(order) = &self.order
            && !order.is_met()?
        {
            return self.begin_in_order(order, comp);
        }
        match self.begin_now(comp, false)? {
            Started::Done(status) => Ok(Outcome::Done(status)),
            Started::InFlight => Ok(Outcome::Posted),
            Started::Full(_) => Ok(BUSY),
            Started::Partly(rest) => {
                let join: Arc<dyn Completion> = rest.join().clone();
                match self.park(&Order::default(), OrderedOp::Rest(Box::new(rest)), Some(&join)) {
                    Ok(()) => Ok(Outcome::Posted),
                    // It cannot fail without an event and a stream; an error would end the batch.
                    Err((error, _)) => {
                        let error = Some(Box::new(OpError::of_post(error, self.desc.rank)));
                        let status = Status { error, ..self.nothing_left() };
                        self.runtime.0.tell(self.device_inner(), Some(&join), status);
                        Ok(Outcome::Posted)
                    }
                }
            }
        }
    }

    /// Returns the status with which the thread that has begun the parts gives up its share.
    pub(in crate::api::post) fn nothing_left(&self) -> Status {
        self.status(0)
    }

    fn status(&self, size: usize) -> Status {
        self.desc.context(size, None).status(Buffer::Empty, None)
    }

    /// Begins it, now. `has_waited`: it stands among those that wait already, so their number does
    /// not matter.
    pub(in crate::api::post) fn begin_now(
        &self,
        comp: Option<&Arc<dyn Completion>>,
        has_waited: bool,
    ) -> Result<Started, PostError> {
        let plan = self.plan(None)?;
        if plan.is_at_once() {
            self.copy_all(&plan).map_err(PostError::Memory)?;
            if let Some(name) = self.kind.notify {
                tell(
                    &self.runtime.0,
                    self.device_inner(),
                    self.desc.rank,
                    (name, self.desc.tag),
                    plan.size,
                );
            }
            return Ok(Started::Done(self.status(plan.size)));
        }
        if plan.has_rest() && !has_waited && self.is_full() {
            return Ok(Started::Full(RetryReason::Unanswered));
        }
        let join = self.join(plan.size, comp);
        let BatchPlan { together, strided, host, rest, packed, .. } = plan;
        // A strided block has one part only, so the CPU copies none of it here.
        let staging = &self.runtime.0.staging;
        let engines =
            together.into_iter().map(|together| Moving::start_together(together, staging));
        let strided = strided.into_iter().map(|ends| self.start_strided(ends, None));
        self.land_each(engines.chain(strided), &join, None)?;
        if !join.has_failed()
            && let Err(error) = host.iter().try_for_each(|one| one.copy(self.kind.is_put))
        {
            // The copy cannot fail: both ends are host memory within bounds. Parts may be in
            // flight.
            join.add();
            join.take_back(Some(OpError::Copy(error)));
        }
        let mut rest = Rest::new(&rest, &packed, self.kind.is_put, &join);
        if !self.go_on(&mut rest) {
            return Ok(Started::Partly(rest));
        }
        Ok(match join.release(None) {
            // As if it had ended later: it was begun.
            Some(status) if status.error.is_some() => {
                self.runtime.0.tell(self.device_inner(), comp, status);
                Started::InFlight
            }
            Some(status) => Started::Done(status),
            None => Started::InFlight,
        })
    }

    /// Lets the CPU copy all of it, a strided block row by row.
    fn copy_all(&self, plan: &BatchPlan<'_>) -> Result<(), CopyError> {
        let is_put = self.kind.is_put;
        plan.host.iter().try_for_each(|one| one.copy(is_put))?;
        let (Some((region, base)), Many::Strided(pair)) = (plan.host_strided, self.kind.many)
        else {
            return Ok(());
        };
        let len = pair.ours.count[0];
        let rows = pair.rows().map(|(here, there)| (here, base + there, len));
        copy_each((pair.local, region), rows, is_put)
    }

    /// Gives copies to engines, or to a stream. An error, if none was begun.
    fn land_each(
        &self,
        begun: impl Iterator<Item = Result<Moving, CopyError>>,
        join: &Arc<Join>,
        stream: Option<&Arc<dyn Stream>>,
    ) -> Result<(), PostError> {
        let device = self.device_inner();
        let mut is_first = true;
        for transfer in begun {
            let transfer = match transfer {
                Ok(transfer) => transfer,
                Err(error) if is_first => return Err(PostError::Memory(error)),
                Err(error) => {
                    join.add();
                    join.take_back(Some(OpError::Copy(error)));
                    return Ok(());
                }
            };
            is_first = false;
            join.add();
            let landing = Landing {
                transfer,
                op: self.desc.context(join.op.size, Some(join.clone())),
                gives_source: self.kind.is_put,
                notify: None,
                name: device.transfers.now(),
                owed: None,
            };
            match stream {
                Some(stream) => {
                    device.ordered.push_copy(self.runtime.0.streams.number(), stream, landing)
                }
                None => device.landings.add(landing),
            }
        }
        Ok(())
    }

    fn start_strided(
        &self,
        (region, base): (&Region, usize),
        stream: Option<&dyn Stream>,
    ) -> Result<Moving, CopyError> {
        let Many::Strided(StridedPair { local, ours, theirs, .. }) = self.kind.many else {
            return Err(CopyError::TooLong { len: 0, room: 0 });
        };
        // Both were checked when it was planned.
        let theirs = Strided { offset: base + theirs.offset, ..*theirs };
        let ends = if self.kind.is_put {
            ((region, &theirs), (local, ours))
        } else {
            ((local, ours), (region, &theirs))
        };
        match start_strided(ends.0, ends.1, stream) {
            Ok(Some(transfer)) => Ok(Moving::Engine(transfer)),
            Err(StridedRefused::Copy(error)) => Err(error),
            Ok(None) | Err(StridedRefused::Strided(_)) => {
                Err(CopyError::Unknown { dst: ends.0.0.kind(), src: ends.1.0.kind() })
            }
        }
    }

    fn join(&self, size: usize, comp: Option<&Arc<dyn Completion>>) -> Arc<Join> {
        Arc::new(Join {
            op: self.desc.context(size, comp.cloned()),
            runtime: Arc::downgrade(&self.runtime.0),
            device: self.device_inner().index,
            notify: self.kind.notify,
            state: Mutex::default(),
        })
    }

    /// Begins it in its order: on the stream, if engines do all of it and reach all of it, or it
    /// waits.
    #[cold]
    fn begin_in_order(
        &self,
        order: &Order,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        match self.kind.many {
            Many::Pieces(pieces) => {
                pieces.iter().try_for_each(|piece| order.check_memory(piece.local.kind()))?;
            }
            Many::Strided(StridedPair { local, .. }) => order.check_memory(local.kind())?,
        }
        let near = order.gpu()?;
        let plan = self.plan(near.as_ref())?;
        let stream = order.stream().filter(|_| {
            let on_stream = |&(region, kind)| order.stream_for(region, kind).is_some();
            plan.is_engines() && plan.mapped.iter().all(on_stream)
        });
        if let Some(stream) = stream {
            let join = self.join(plan.size, comp);
            let BatchPlan { together, strided, .. } = plan;
            let engines =
                together.into_iter().map(|one| one.start_on(&**stream).map(Moving::Engine));
            let strided = strided.into_iter().map(|ends| self.start_strided(ends, Some(&**stream)));
            self.land_each(engines.chain(strided), &join, Some(stream))?;
            if let Some(status) = join.release(None) {
                self.runtime.0.tell(self.device_inner(), comp, status);
            }
            return Ok(Outcome::Posted);
        }
        if self.is_full() {
            return Ok(BUSY);
        }
        let what = OrderedOp::Batch(Box::new(Owned::of(&self.kind, plan.size)));
        self.park(order, what, comp).map(|()| Outcome::Posted).map_err(|(error, _)| error)
    }
}

impl HostRun<'_> {
    fn copy(&self, is_put: bool) -> Result<(), CopyError> {
        let (region, base) = self.remote;
        let places = self.pieces.iter().filter(|piece| piece.len() > 0).map(|piece| {
            let there = usize::try_from(piece.offset).unwrap_or(usize::MAX);
            (piece.range.start, there.saturating_add(base), piece.len())
        });
        copy_each((self.local, region), places, is_put)
    }
}

/// Lets the CPU copy between local and remote places, which are known to be within their regions.
fn copy_each(
    (local, remote): (&Region, &Region),
    mut places: impl Iterator<Item = (usize, usize, usize)>,
    is_put: bool,
) -> Result<(), CopyError> {
    if is_put {
        let hosts = Hosts::between(remote, local)?;
        places.try_for_each(|(here, there, len)| hosts.copy(there, here, len))
    } else {
        let hosts = Hosts::between(local, remote)?;
        places.try_for_each(|(here, there, len)| hosts.copy(here, there, len))
    }
}
