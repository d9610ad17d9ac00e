//! Nothing of a batch is moved before all of its pieces are known to be possible.

use super::apart::{OverlapCheck, overlap};
use super::pack::goes_with_others;
use super::{Batch, Many, Piece, StridedPair};
use crate::api::post::options::Post;
use crate::api::post::place::RmaPlace;
use crate::error::PostError;
use crate::protocol::rma::{Mover, mover};
use crate::region::{Region, RemoteKey};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{MemKind, Strided, Together};
use std::ops::Range;
use std::sync::Arc;

/// The plan of a batch.
#[derive(Default)]
pub(super) struct BatchPlan<'p> {
    /// The copies that engines get together.
    pub(super) together: Vec<Together>,
    /// A strided block that an engine takes.
    pub(super) strided: Option<(&'p Region, usize)>,
    /// The copies of the CPU.
    pub(super) host: Vec<HostRun<'p>>,
    /// A strided block that the CPU copies, of any number of rows.
    pub(super) host_strided: Option<(&'p Region, usize)>,
    /// The pieces that are operations of their own.
    pub(super) rest: Vec<Piece<'p>>,
    /// Small pieces that their owner has to reach.
    pub(super) packed: Vec<Piece<'p>>,
    /// Memory that engines reach, mapped here, and the kind of the local memory.
    pub(super) mapped: Vec<(&'p Region, MemKind)>,
    /// Bytes, in all.
    pub(super) size: usize,
}

/// Pieces that the CPU copies, whichever way: all between one region here and one there.
pub(super) struct HostRun<'p> {
    pub(super) local: &'p Region,
    /// The mapped region, and where in it the remote one begins.
    pub(super) remote: (&'p Region, usize),
    pub(super) pieces: &'p [Piece<'p>],
}

/// The path of pieces between two regions.
#[derive(Clone, Copy)]
enum PiecePath<'p> {
    /// One operation with the other pieces of that number in the plan. The mapped region, and where
    /// in it the remote one begins.
    Together(usize, &'p Region, usize),
    Host(&'p Region, usize),
    /// The region's owner moves the bytes, many pieces in one message.
    ByOwner,
    Alone,
}

impl<'p> BatchPlan<'p> {
    /// Leaves a piece to its owner, or to an operation of its own.
    fn leave(&mut self, piece: Piece<'p>, path: PiecePath<'p>) {
        match path {
            PiecePath::ByOwner if goes_with_others(&piece) => self.packed.push(piece),
            _ => self.rest.push(piece),
        }
    }
}

impl BatchPlan<'_> {
    /// Returns `true` if the CPU does all of it at once.
    pub(super) fn is_at_once(&self) -> bool {
        self.together.is_empty() && self.strided.is_none() && !self.has_rest()
    }

    /// Returns `true` if some pieces are operations of their own.
    pub(super) fn has_rest(&self) -> bool {
        !(self.rest.is_empty() && self.packed.is_empty())
    }

    /// Returns `true` if engines do all of it, and there is something to do.
    pub(super) fn is_engines(&self) -> bool {
        self.host.is_empty()
            && self.host_strided.is_none()
            && !self.has_rest()
            && !self.is_at_once()
    }
}

impl<'a> Post<'_, Batch<'a>> {
    /// Returns `true` if a batch can begin and complete at once, as far as known without a plan.
    pub(super) fn all_at_once(&self) -> bool {
        let one = |local: &Region, rmr: &RemoteKey| {
            self.ends_at_once(&RmaPlace { rmr, offset: 0, notify: None }, local.kind())
        };
        self.order.is_none()
            && match self.kind.many {
                Many::Pieces(pieces) => pieces.iter().all(|piece| one(piece.local, piece.rmr)),
                Many::Strided(StridedPair { local, rmr, .. }) => one(local, rmr),
            }
    }

    /// Checks the whole batch, and returns its plan. `near`: a GPU for whose engines the memory is
    /// mapped.
    pub(super) fn plan(&self, near: Option<&Arc<dyn Gpu>>) -> Result<BatchPlan<'a>, PostError> {
        self.check_rank()?;
        self.check_deadline()?;
        self.check_reach()?;
        match self.kind.many {
            Many::Pieces(pieces) => self.plan_pieces(pieces, near),
            Many::Strided(pair) => self.plan_strided(&pair, near),
        }
    }

    /// Returns the path between two regions, found once for all pieces between them.
    fn path(
        &self,
        plan: &mut BatchPlan<'a>,
        (local, rmr): (&'a Region, &'a RemoteKey),
        near: Option<&Arc<dyn Gpu>>,
        count: usize,
    ) -> Result<PiecePath<'a>, PostError> {
        local.recheck().map_err(PostError::Freed)?;
        let place = RmaPlace { rmr, offset: 0, notify: None };
        let mapped = self.remote(&place, 0, local.gpu().or(near))?;
        let other = mapped.map_or(MemKind::Host, |(region, _)| region.kind());
        check_kinds(other, local.kind()).map_err(PostError::Memory)?;
        let Some((region, base)) = mapped else {
            return Ok(if self.goes_by_nic(&place) {
                PiecePath::Alone
            } else {
                PiecePath::ByOwner
            });
        };
        if mover(Some(region.kind()), local.kind()) == Mover::Cpu {
            return Ok(PiecePath::Host(region, base));
        }
        let (dst, src) = if self.kind.is_put { (region, local) } else { (local, region) };
        if count == 0 {
            return Ok(PiecePath::Alone);
        }
        let at = match plan.together.iter().position(|together| together.takes(dst, src)) {
            Some(at) => at,
            None => {
                let Some(together) = Together::between(dst, src, count) else {
                    return Ok(PiecePath::Alone);
                };
                plan.together.push(together);
                plan.together.len() - 1
            }
        };
        plan.mapped.push((region, local.kind()));
        Ok(PiecePath::Together(at, region, base))
    }

    fn plan_pieces(
        &self,
        pieces: &'a [Piece<'a>],
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<BatchPlan<'a>, PostError> {
        let mut plan = BatchPlan::default();
        let mut check = OverlapCheck::new();
        let mut known = [None; PAIRS];
        let (mut at, mut found) = (0, 0);
        while let Some(first) = pieces.get(at) {
            let &Piece { local, rmr, .. } = first;
            // Most pieces are between the same two regions as recent ones, so the path is found
            // once.
            let before = known.iter().flatten().find(|(pair, _)| first.is_between(*pair));
            let path = match before {
                Some(&(_, path)) => path,
                None => {
                    let path = self.path(&mut plan, (local, rmr), near, pieces.len() - at);
                    let path =
                        path.map_err(|cause| PostError::Piece { at, cause: Box::new(cause) })?;
                    known[found % PAIRS] = Some(((local, rmr), path));
                    found += 1;
                    path
                }
            };
            let block = pieces.get(at..pieces.len().min(at + BLOCK)).unwrap_or_default();
            let other = block.iter().position(|piece| !piece.is_between((local, rmr)));
            let run = block.get(..other.unwrap_or(block.len())).unwrap_or_default();
            let planned = if self.kind.is_put {
                plan_run::<true>(&mut plan, &mut check, path, (local, rmr), run)
            } else {
                plan_run::<false>(&mut plan, &mut check, path, (local, rmr), run)
            };
            planned.map_err(|(behind, cause)| PostError::Piece {
                at: at + behind,
                cause: Box::new(cause),
            })?;
            at += run.len();
        }
        plan.together.retain(|together| together.count() > 0);
        if !check.is_known {
            overlap(pieces, self.kind.is_put)?;
        }
        Ok(plan)
    }

    fn plan_strided(
        &self,
        pair: &StridedPair<'a>,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<BatchPlan<'a>, PostError> {
        let StridedPair { local, ours, rmr, theirs } = *pair;
        let wrong = |which| move |cause| PostError::Strided { which, cause };
        Strided::grid(ours, theirs).map_err(wrong("local"))?;
        ours.check(local.len()).map_err(wrong("local"))?;
        theirs.check_within(rmr.len()).map_err(wrong("remote"))?;
        // Its bytes lie within memory, so they can be counted.
        let mut plan =
            BatchPlan { size: ours.checked_len().unwrap_or(usize::MAX), ..BatchPlan::default() };
        let path = self.path(&mut plan, (local, rmr), near, 1)?;
        if ours.is_empty() {
            plan.together.clear();
            return Ok(plan);
        }
        match path {
            PiecePath::Together(at, region, base) => {
                // The key may have been forged: the mapping decides.
                let room = region.len().saturating_sub(base);
                theirs.check(room).map_err(wrong("remote"))?;
                match plan.together.get_mut(at).filter(|together| together.goes_by_way()) {
                    Some(together) => add_rows(together, pair, (region, base), self.kind.is_put),
                    None => {
                        plan.together.clear();
                        plan.strided = Some((region, base));
                    }
                }
            }
            PiecePath::Host(region, base) => {
                let room = region.len().saturating_sub(base);
                theirs.check(room).map_err(wrong("remote"))?;
                plan.host_strided = Some((region, base));
            }
            PiecePath::ByOwner | PiecePath::Alone => {
                let piece = |(here, there): (usize, usize)| Piece {
                    local,
                    range: here..here + ours.count[0],
                    rmr,
                    offset: there as u64,
                };
                pair.rows().map(piece).for_each(|piece| plan.leave(piece, path));
            }
        }
        Ok(plan)
    }
}

/// Adds the rows of strided memory that goes through pinned blocks, as copies that go together. The
/// rows are known to lie within both sides.
#[cold]
#[inline(never)]
fn add_rows(
    together: &mut Together,
    pair: &StridedPair<'_>,
    (region, base): (&Region, usize),
    is_put: bool,
) {
    for (here, there) in pair.rows() {
        let (ours, theirs) = ((pair.local, here), (region, base + there));
        let (dst, src) = if is_put { (theirs, ours) } else { (ours, theirs) };
        together.push(dst, src, pair.ours.count[0]);
    }
}

/// Pairs of regions for which the path of pieces is cached: a program may put this many fields in
/// turns.
const PAIRS: usize = 8;

/// Pieces that are grouped by their regions, and then checked, while they are still in the cache.
const BLOCK: usize = 64;

/// Checks pieces between one region here and one there, which take one path, and adds them to the
/// plan. Returns the first that is wrong, with its number among them.
fn plan_run<'a, const IS_PUT: bool>(
    plan: &mut BatchPlan<'a>,
    check: &mut OverlapCheck,
    path: PiecePath<'a>,
    (local, rmr): (&'a Region, &'a RemoteKey),
    run: &'a [Piece<'a>],
) -> Result<(), (usize, PostError)> {
    check.enter(if IS_PUT { (rmr.number(), rmr.offset()) } else { (0, local.addr() as u64) });
    let named = Limit { here: local.len(), there: rmr.len() };
    match path {
        PiecePath::ByOwner | PiecePath::Alone => {
            for (at, piece) in run.iter().enumerate() {
                let (start, len) = named.check(piece).map_err(|cause| (at, cause))?;
                check.note(if IS_PUT { piece.offset } else { start as u64 }, len);
                plan.size = plan.size.saturating_add(len);
                if len > 0 {
                    plan.leave(piece.clone(), path);
                }
            }
        }
        PiecePath::Together(number, region, base) => {
            let limit = named.and_mapped(region, base);
            let Some(together) = plan.together.get_mut(number) else { return Ok(()) };
            let base = base.min(region.len());
            let (here, there) = (0..limit.here, base..base + limit.mapped());
            let (dst, src) = if IS_PUT {
                ((region, there), (local, here))
            } else {
                ((local, here), (region, there))
            };
            let mut places = Places::behind(check);
            let taken = together.between_parts(dst, src).is_some_and(|mut between| {
                between.extend(run, |piece| {
                    let (here, there, len) = places.note::<IS_PUT>(piece);
                    if IS_PUT { (there, here, len) } else { (here, there, len) }
                })
            });
            if !taken {
                return Err(limit.first_outside(run));
            }
            places.are_all_of(plan, check);
        }
        PiecePath::Host(region, base) => {
            let limit = named.and_mapped(region, base);
            let mut places = Places::behind(check);
            let (mut bits, mut ends) = (0, (0, 0));
            for piece in run {
                let (here, there, len) = places.note::<IS_PUT>(piece);
                // As long as the highest bit of none is set these are the sums.
                bits |= here | there | len;
                ends = (ends.0.max(here.wrapping_add(len)), ends.1.max(there.wrapping_add(len)));
            }
            if bits.cast_signed() < 0 || ends.0 > limit.here || ends.1 > limit.mapped() {
                return Err(limit.first_outside(run));
            }
            if places.size > 0 {
                plan.host.push(HostRun { local, remote: (region, base), pieces: run });
            }
            places.are_all_of(plan, check);
        }
    }
    Ok(())
}

/// The places of a run's pieces, and summary facts. The loop has no branch for a single piece.
struct Places {
    size: usize,
    /// The end of the last target.
    end: u64,
    /// Set if a target begins before the end of the one before.
    is_back: bool,
}

impl Places {
    fn behind(check: &OverlapCheck) -> Self {
        Self { size: 0, end: check.end, is_back: false }
    }

    /// Returns the local and remote beginning of a piece, and its length, which is meaningless if
    /// its end lies before its start.
    #[inline(always)]
    fn note<const IS_PUT: bool>(&mut self, piece: &Piece<'_>) -> (usize, usize, usize) {
        let Range { start, end } = piece.range;
        let len = end.wrapping_sub(start);
        let target = if IS_PUT { piece.offset } else { start as u64 };
        self.is_back |= target < self.end;
        self.end = target.wrapping_add(len as u64);
        self.size = self.size.wrapping_add(len);
        (start, usize::try_from(piece.offset).unwrap_or(usize::MAX), len)
    }

    /// Adds a run to the plan, once all of its places are known to lie within memory.
    fn are_all_of(self, plan: &mut BatchPlan<'_>, check: &mut OverlapCheck) {
        plan.size = plan.size.saturating_add(self.size);
        check.is_known &= !self.is_back;
        check.end = self.end;
    }
}

#[cold]
fn outside(offset: u64, len: usize, room: u64) -> PostError {
    PostError::Outside { offset, len: len as u64, room }
}

/// The bounds of a piece, in bytes: local and remote.
#[derive(Clone, Copy)]
struct Limit {
    here: usize,
    there: u64,
}

impl Limit {
    /// Limits the remote length to the mapped memory: a remote key may claim more.
    fn and_mapped(self, region: &Region, base: usize) -> Self {
        let room = region.len().saturating_sub(base) as u64;
        Self { there: self.there.min(room), ..self }
    }

    /// Returns the bytes of mapped memory that the key names.
    fn mapped(self) -> usize {
        usize::try_from(self.there).unwrap_or(usize::MAX)
    }

    /// Returns the local beginning of a piece, and its length.
    #[inline]
    fn check(self, piece: &Piece<'_>) -> Result<(usize, usize), PostError> {
        let Range { start, end } = piece.range;
        if end < start || end > self.here {
            return Err(outside_local(piece, self.here));
        }
        let len = end - start;
        if piece.offset > self.there || len as u64 > self.there - piece.offset {
            return Err(outside(piece.offset, len, self.there));
        }
        Ok((start, len))
    }

    /// Finds the first piece outside of its memory, which exists.
    #[cold]
    fn first_outside(self, run: &[Piece<'_>]) -> (usize, PostError) {
        let wrong = |(at, piece)| self.check(piece).err().map(|cause| (at, cause));
        let found = run.iter().enumerate().find_map(wrong);
        found.unwrap_or_else(|| (0, outside(0, 0, self.there)))
    }
}

#[cold]
fn outside_local(piece: &Piece<'_>, room: usize) -> PostError {
    PostError::OutsideLocal { range: piece.range.clone(), room }
}
