//! Pieces of a batch that are operations of their own: what no engine is given together with others, and what its owner or a
//! NIC has to reach. As many are begun as there is room for; progress goes on with the others.

use super::join::Join;
use super::{Batch, Piece};
use crate::buffer::{Buffer, SendBuffer};
use crate::comp::Completion;
use crate::error::{OpError, PostError};
use crate::post::options::{Allow, Kind, Outcome, Post};
use crate::post::rma::{Get, Place, Put};
use crate::region::Rmr;
use carrack_transports::mem::RegionSlice;
use std::collections::VecDeque;
use std::sync::Arc;

/// What is left of a batch. Its share in the join is that of who begins.
pub(in crate::post) struct Rest {
    pieces: VecDeque<Single>,
    is_put: bool,
    join: Arc<Join>,
}

/// A piece with handles of its own.
struct Single {
    local: RegionSlice,
    rmr: Rmr,
    offset: u64,
}

impl Rest {
    pub(super) fn new(pieces: &[Piece<'_>], is_put: bool, join: &Arc<Join>) -> Self {
        let single = |piece: &Piece<'_>| {
            // It was found to be within its region.
            let local = piece.local.slice(piece.range.start, piece.len())?;
            Some(Single { local, rmr: piece.rmr.clone(), offset: piece.offset })
        };
        Self { pieces: pieces.iter().filter_map(single).collect(), is_put, join: join.clone() }
    }

    pub(in crate::post) fn join(&self) -> &Arc<Join> {
        &self.join
    }

    /// Whether it is put.
    pub(in crate::post) fn is_put(&self) -> bool {
        self.is_put
    }

    /// Bytes that are not under way.
    pub(in crate::post) fn size(&self) -> usize {
        self.pieces.iter().map(|single| single.local.len()).sum()
    }
}

impl Post<'_, Batch<'_>> {
    /// Begins as many pieces as there is room for; whether none is left. Each is an operation of its own, as long as none has failed.
    pub(in crate::post) fn go_on(&self, rest: &mut Rest) -> bool {
        let comp: Arc<dyn Completion> = rest.join.clone();
        while let Some(single) = rest.pieces.front() {
            if rest.join.has_failed() {
                rest.pieces.clear();
                return true;
            }
            // First: it may be over on another thread before the call returns.
            rest.join.add();
            match self.begin_one(single, rest.is_put, &comp) {
                Ok(Outcome::Posted) => {}
                Ok(Outcome::Done(status)) => rest.join.take_back(status.error.map(|error| *error)),
                Ok(Outcome::Retry(_)) | Err(PostError::OffersFull { .. } | PostError::BacklogFull { .. }) => {
                    rest.join.take_back(None);
                    return false;
                }
                Err(error) => rest.join.take_back(Some(OpError::of_post(error, self.rank))),
            }
            rest.pieces.pop_front();
        }
        true
    }

    fn begin_one(
        &self,
        single: &Single,
        is_put: bool,
        comp: &Arc<dyn Completion>,
    ) -> Result<Outcome, PostError> {
        let place = Place { rmr: &single.rmr, offset: single.offset, signal: None };
        let buffer = Buffer::Region(single.local.clone());
        if is_put {
            let kind = Put { buffer: Some(SendBuffer::Owned(buffer)), place };
            Put::post(&mut self.single(kind, comp))
        } else {
            Get::post(&mut self.single(Get { buffer: Some(buffer), place }, comp))
        }
    }

    /// One operation with what was said of the batch.
    fn single<'p, K>(&'p self, kind: K, comp: &'p Arc<dyn Completion>) -> Post<'p, K> {
        Post {
            runtime: self.runtime,
            rank: self.rank,
            tag: self.tag,
            device: self.device,
            comp: Some(comp),
            user_context: self.user_context,
            allow: Allow::ALL,
            required: self.required,
            deadline: self.deadline,
            order: None,
            kind,
        }
    }
}
