//! The operations of a batch that are posted one by one. They are long pieces, pieces for a NIC,
//! and pieces that no engine copies together with others. Small pieces that only the owner reaches
//! are posted in packs. As many begin as there is room for; progress begins the others.

use super::join::Join;
use super::pack::Pack;
use super::{Batch, Piece};
use crate::api::buffer::{Buffer, SendBuffer};
use crate::api::post::options::{Outcome, Post};
use crate::api::post::place::RmaPlace;
use crate::api::post::rma::{Get, Put};
use crate::api::post::submit::Kind;
use crate::comp::Completion;
use crate::error::{OpError, PostError};
use crate::region::RemoteKey;
use carrack_transports::mem::RegionSlice;
use std::collections::VecDeque;
use std::sync::Arc;

/// The operations of a batch that have not begun. Its share in the join is that of the thread that
/// begins.
pub(in crate::api::post) struct Rest {
    parts: VecDeque<BatchPart>,
    is_put: bool,
    join: Arc<Join>,
}

enum BatchPart {
    Single(Single),
    Pack(Pack),
}

/// A piece with handles of its own.
struct Single {
    local: RegionSlice,
    rmr: RemoteKey,
    offset: u64,
}

impl Rest {
    /// Returns the rest: `alone` go one by one, `packed` many together.
    pub(super) fn new(
        alone: &[Piece<'_>],
        packed: &[Piece<'_>],
        is_put: bool,
        join: &Arc<Join>,
    ) -> Self {
        let single = |piece: &Piece<'_>| {
            // It was found to be within its region.
            let local = piece.local.slice(piece.range.start, piece.len())?;
            Some(BatchPart::Single(Single { local, rmr: piece.rmr.clone(), offset: piece.offset }))
        };
        let packs = Pack::all_of(packed).into_iter().map(BatchPart::Pack);
        Self {
            parts: alone.iter().filter_map(single).chain(packs).collect(),
            is_put,
            join: join.clone(),
        }
    }

    pub(in crate::api::post) fn join(&self) -> &Arc<Join> {
        &self.join
    }

    /// Returns `true` for a put.
    pub(in crate::api::post) fn is_put(&self) -> bool {
        self.is_put
    }

    /// Returns the bytes that are not in flight.
    pub(in crate::api::post) fn size(&self) -> usize {
        let size = |part: &BatchPart| match part {
            BatchPart::Single(single) => single.local.len(),
            BatchPart::Pack(pack) => pack.len(),
        };
        self.parts.iter().map(size).sum()
    }
}

impl Post<'_, Batch<'_>> {
    /// Begins as many parts as there is room for, each as an operation of its own, until one fails.
    /// Returns `true` if none is left.
    pub(in crate::api::post) fn go_on(&self, rest: &mut Rest) -> bool {
        let comp: Arc<dyn Completion> = rest.join.clone();
        while let Some(part) = rest.parts.front_mut() {
            if rest.join.has_failed() {
                rest.parts.clear();
                return true;
            }
            // The share is added first: the part may end on another thread before the call returns.
            rest.join.add();
            let begun = match part {
                BatchPart::Single(single) => self.begin_one(single, rest.is_put, &comp),
                BatchPart::Pack(pack) => self.begin_pack(pack, rest.is_put, &rest.join),
            };
            match begun {
                Ok(Outcome::Posted) => {}
                Ok(Outcome::Done(status)) => rest.join.take_back(status.error.map(|error| *error)),
                Ok(Outcome::Retry(_))
                | Err(PostError::OffersFull { .. } | PostError::BacklogFull { .. }) => {
                    rest.join.take_back(None);
                    return false;
                }
                Err(error) => {
                    let error = OpError::of_post(error, self.desc.rank);
                    // The batch was accepted: what of it did not begin is lost.
                    self.device_inner().losses.note_error(&error);
                    rest.join.take_back(Some(error));
                }
            }
            rest.parts.pop_front();
        }
        true
    }

    fn begin_one(
        &self,
        single: &Single,
        is_put: bool,
        comp: &Arc<dyn Completion>,
    ) -> Result<Outcome, PostError> {
        let place = RmaPlace { rmr: &single.rmr, offset: single.offset, notify: None };
        let buffer = Buffer::Region(single.local.clone());
        if is_put {
            let kind = Put { buffer: Some(SendBuffer::Owned(buffer)), place };
            Put::post(&mut self.single(kind, comp))
        } else {
            Get::post(&mut self.single(Get { buffer: Some(buffer), place }, comp))
        }
    }

    /// Returns one operation with the options of the batch.
    fn single<'p, K>(&'p self, kind: K, comp: &'p Arc<dyn Completion>) -> Post<'p, K> {
        Post { runtime: self.runtime, desc: self.desc.telling(comp), order: None, kind }
    }
}
