//! Many puts or gets in one: pieces of regions, and strided blocks.
//!
//! | module | one idea |
//! |---|---|
//! | `check` | every piece is checked before any byte moves |
//! | `apart` | the test that no two pieces write the same byte |
//! | `begin` | the begin of a batch: copies by engines, by the CPU, and piece by piece |
//! | `join` | one end for all of it |
//! | `pack` | small pieces that their owner has to reach, many in one message |
//! | `rest` | the operations of their own, as many at a time as there is room for |
//!
//! Where the memory is mapped and a GPU's engine copies, it gets all pieces in one call of the
//! driver ([`Gpu::how_pieces_go`](carrack_transports::gpu::Gpu::how_pieces_go)). A
//! strided block takes one call as well. Copies to and from pageable host memory go through pinned
//! blocks, one call for each of those. Between host memory the CPU copies the pieces in a loop.
//! Small pieces that their owner has to reach go many in one message. All others are long, or for a
//! NIC: each piece, or each row of a strided block, is a put or get. The notification follows after
//! all have completed.

mod apart;
mod begin;
mod check;
mod join;
mod pack;
mod rest;

use super::PostBatch;
use super::options::{Outcome, Post, Tells};
use super::submit::Kind;
use crate::api::Runtime;
use crate::error::PostError;
use crate::names::{Rank, RemoteComp, Tag};
use crate::region::{Region, RemoteKey};
pub(super) use begin::Started;
use carrack_transports::gpu::Grid;
use carrack_transports::mem::Strided;
pub(super) use rest::Rest;
use std::ops::Range;

/// One piece of a batch: a part of a region of this rank's, and as many bytes of another rank's
/// memory.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// Memory of this rank's, of any kind.
    pub local: &'a Region,
    /// The range of it, in bytes.
    pub range: Range<usize>,
    /// The other rank's memory.
    pub rmr: &'a RemoteKey,
    /// The beginning of the piece in the memory of `rmr`, in bytes.
    pub offset: u64,
}

impl Piece<'_> {
    /// Returns `true` if it is between these two regions, the remote one by this very key.
    #[inline]
    fn is_between(&self, (local, rmr): (&Region, &RemoteKey)) -> bool {
        std::ptr::eq(self.rmr, rmr) && (std::ptr::eq(self.local, local) || self.local.is(local))
    }

    #[inline]
    fn len(&self) -> usize {
        self.range.end.saturating_sub(self.range.start)
    }
}

/// The parameters of a batch.
pub struct Batch<'a> {
    many: Many<'a>,
    is_put: bool,
    notify: Option<RemoteComp>,
}

#[derive(Clone, Copy)]
enum Many<'a> {
    Pieces(&'a [Piece<'a>]),
    Strided(StridedPair<'a>),
}

/// The strided blocks of both sides.
#[derive(Clone, Copy)]
struct StridedPair<'a> {
    local: &'a Region,
    ours: &'a Strided,
    rmr: &'a RemoteKey,
    theirs: &'a Strided,
}

impl StridedPair<'_> {
    /// Returns the beginning of each row in the local region and in the other rank's memory. Both
    /// have one shape.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (ours, theirs) = (*self.ours, *self.theirs);
        let grid = Grid { count: ours.count, dst_pitch: ours.pitch, src_pitch: theirs.pitch };
        grid.rows().map(move |(here, there)| (ours.offset + here, theirs.offset + there))
    }
}

impl Runtime {
    /// Writes pieces of this rank's memory into the memory of `rank`, as one operation. It has one
    /// completion, and one notification ([`remote_comp`](Post::remote_comp)), which gets the number
    /// of all bytes.
    ///
    /// It completes when all bytes are visible there. No two pieces may have a target byte in
    /// common. Their order is undefined: where both sides are this rank's memory, no piece may
    /// read what another one writes, which is not checked. The status holds no buffer: the batch
    /// keeps the memory alive until its end, and the program must not change it before. A batch of
    /// no pieces completes at once, and notifies.
    ///
    /// ```
    /// # use carrack::{Piece, Rank, Runtime, buffer::Region};
    /// # let ranks: Result<[Runtime; 2], _> = Runtime::in_process(2)?.try_into();
    /// # let [zero, one] = ranks.map_err(|_| "two ranks")?;
    /// let (field, ghost) = (Region::host(800), one.allocate(80)?);
    /// let registered = one.register_memory(&ghost)?;
    /// let rmr = registered.remote_key();
    /// // Every tenth number goes there, side by side.
    /// let piece = |at: usize| {
    ///     let range = at * 80..at * 80 + 8;
    ///     Piece { local: &field, range, rmr: &rmr, offset: at as u64 * 8 }
    /// };
    /// let pieces: Vec<_> = (0..10).map(piece).collect();
    /// zero.post_put_batch(Rank(1), &pieces).wait()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When it is posted, before any byte moves: [`PostError::Piece`] names the piece and its
    /// error. The piece reaches beyond its region on either side, or its region is of another rank
    /// or not registered any more. [`PostError::Overlap`] names two pieces that write the same
    /// bytes; the test covers each registration, but not two of the same memory. If an engine or
    /// the peer fails later, the status has the error, no notification is sent, and some pieces
    /// may be written.
    pub fn post_put_batch<'a>(&'a self, rank: Rank, pieces: &'a [Piece<'a>]) -> PostBatch<'a> {
        self.post_many(rank, true, Many::Pieces(pieces))
    }

    /// Fills pieces of this rank's memory from the memory of `rank`, as one operation: as
    /// [`post_put_batch`](Self::post_put_batch), the other way. The notification says that the
    /// memory has been read.
    ///
    /// # Errors
    /// As there.
    pub fn post_get_batch<'a>(&'a self, rank: Rank, pieces: &'a [Piece<'a>]) -> PostBatch<'a> {
        self.post_many(rank, false, Many::Pieces(pieces))
    }

    /// Writes a strided block of a region of this rank to one of the same shape in the memory of
    /// `rank`, as one operation. A strided block is rows, and planes of rows, at regular distances.
    /// `theirs` lies within the memory of `rmr`. Otherwise as
    /// [`post_put_batch`](Self::post_put_batch).
    ///
    /// # Errors
    /// As there; [`PostError::Strided`] if a block has no valid shape, or is not within its memory.
    pub fn post_put_strided<'a>(
        &'a self,
        rank: Rank,
        local: &'a Region,
        ours: &'a Strided,
        rmr: &'a RemoteKey,
        theirs: &'a Strided,
    ) -> PostBatch<'a> {
        self.post_many(rank, true, Many::Strided(StridedPair { local, ours, rmr, theirs }))
    }

    /// Fills a strided block of a region of this rank from one of the same shape in the memory of
    /// `rank`. It is [`post_put_strided`](Self::post_put_strided) the other way.
    ///
    /// # Errors
    /// As there.
    pub fn post_get_strided<'a>(
        &'a self,
        rank: Rank,
        local: &'a Region,
        ours: &'a Strided,
        rmr: &'a RemoteKey,
        theirs: &'a Strided,
    ) -> PostBatch<'a> {
        self.post_many(rank, false, Many::Strided(StridedPair { local, ours, rmr, theirs }))
    }

    fn post_many<'a>(&'a self, rank: Rank, is_put: bool, many: Many<'a>) -> PostBatch<'a> {
        Post::new(self, rank, Tag::default(), Batch { many, is_put, notify: None })
    }
}

impl Tells for Batch<'_> {
    fn tell(&mut self, comp: RemoteComp) {
        self.notify = Some(comp);
    }
}

impl Kind for Batch<'_> {
    const NAME: &'static str = "a batch of gets";

    fn may_end_unseen(&self) -> bool {
        self.is_put
    }

    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.once(|this| {
            this.begin_or_wait(|this| this.all_at_once(), |this, comp| this.begin(comp))
        })
    }
}

/// A batch with handles of its own, while it waits for its event.
pub(super) struct Owned {
    many: OwnedMany,
    is_put: bool,
    notify: Option<RemoteComp>,
    pub(super) size: usize,
}

enum OwnedMany {
    Pieces(Vec<(Region, Range<usize>, RemoteKey, u64)>),
    Strided { local: Region, ours: Strided, rmr: RemoteKey, theirs: Strided },
}

impl Owned {
    fn of(batch: &Batch<'_>, size: usize) -> Self {
        let many = match batch.many {
            Many::Pieces(pieces) => {
                let owned = |piece: &Piece<'_>| {
                    (piece.local.clone(), piece.range.clone(), piece.rmr.clone(), piece.offset)
                };
                OwnedMany::Pieces(pieces.iter().map(owned).collect())
            }
            Many::Strided(StridedPair { local, ours, rmr, theirs }) => {
                let (local, rmr) = (local.clone(), rmr.clone());
                OwnedMany::Strided { local, ours: *ours, rmr, theirs: *theirs }
            }
        };
        Self { many, is_put: batch.is_put, notify: batch.notify, size }
    }

    pub(super) fn is_put(&self) -> bool {
        self.is_put
    }

    /// Does something with it as it was posted.
    pub(super) fn with<R>(&self, use_it: impl FnOnce(Batch<'_>) -> R) -> R {
        let (is_put, notify) = (self.is_put, self.notify);
        match &self.many {
            OwnedMany::Pieces(list) => {
                let pieces: Vec<_> = list
                    .iter()
                    .map(|(local, range, rmr, offset)| Piece {
                        local,
                        range: range.clone(),
                        rmr,
                        offset: *offset,
                    })
                    .collect();
                use_it(Batch { many: Many::Pieces(&pieces), is_put, notify })
            }
            OwnedMany::Strided { local, ours, rmr, theirs } => {
                let many = Many::Strided(StridedPair { local, ours, rmr, theirs });
                use_it(Batch { many, is_put, notify })
            }
        }
    }
}

impl Batch<'_> {
    /// Returns a batch of no pieces, by which the rest of another batch goes on.
    pub(super) fn nothing() -> Self {
        Self { many: Many::Pieces(&[]), is_put: true, notify: None }
    }
}
