//! Nothing of a batch is moved before all of its pieces are known to be possible.

use super::{Batch, Faces, Many, Piece};
use crate::error::PostError;
use crate::post::options::Post;
use crate::post::rma::Place;
use crate::region::{Region, Rmr};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Face, MemKind, Together};
use std::sync::Arc;

/// How a batch is carried out.
#[derive(Default)]
pub(super) struct Plan<'p> {
    /// What engines are given together.
    pub(super) together: Vec<Together>,
    /// A face that an engine takes.
    pub(super) face: Option<(&'p Region, usize)>,
    /// What the CPU copies.
    pub(super) host: Vec<HostCopy<'p>>,
    /// A face that it copies, however many rows that has.
    pub(super) host_face: Option<(&'p Region, usize)>,
    /// What goes piece by piece.
    pub(super) rest: Vec<Piece<'p>>,
    /// What engines reach: memory that is mapped here, beside which kind of local memory.
    pub(super) mapped: Vec<(&'p Region, MemKind)>,
    /// Bytes, in all.
    pub(super) size: usize,
}

/// A piece that the CPU copies, whichever way.
pub(super) struct HostCopy<'p> {
    pub(super) remote: (&'p Region, usize),
    pub(super) local: (&'p Region, usize),
    pub(super) len: usize,
}

/// How pieces between two regions go.
#[derive(Clone, Copy)]
enum Way<'p> {
    /// With others of that number in the plan. The mapped region, and where in it the remote one begins.
    Together(usize, &'p Region, usize),
    Host(&'p Region, usize),
    Alone,
}

impl Plan<'_> {
    /// Whether the CPU does all of it, now.
    pub(super) fn is_at_once(&self) -> bool {
        self.together.is_empty() && self.face.is_none() && self.rest.is_empty()
    }

    /// Whether engines do all of it, and there is something.
    pub(super) fn is_engines(&self) -> bool {
        self.host.is_empty() && self.host_face.is_none() && self.rest.is_empty() && !self.is_at_once()
    }
}

impl<'a> Post<'_, Batch<'a>> {
    /// Whether a batch can be begun and is over at once, as far as is known without planning it.
    pub(super) fn all_at_once(&self) -> bool {
        let one = |local: &Region, rmr: &Rmr| {
            self.ends_at_once(&Place { rmr, offset: 0, signal: None }, local.kind())
        };
        self.order.is_none()
            && match self.kind.many {
                Many::Pieces(pieces) => pieces.iter().all(|piece| one(piece.local, piece.rmr)),
                Many::Face(Faces { local, rmr, .. }) => one(local, rmr),
            }
    }

    /// Checks all of it, and says how it is carried out. `near`: a GPU whose engines are to reach what is mapped for it.
    pub(super) fn plan(&self, near: Option<&Arc<dyn Gpu>>) -> Result<Plan<'a>, PostError> {
        self.check_rank()?;
        self.check_deadline()?;
        self.check_reach()?;
        match self.kind.many {
            Many::Pieces(pieces) => self.plan_pieces(pieces, near),
            Many::Face(faces) => self.plan_face(&faces, near),
        }
    }

    /// What there is to know of two regions, once for all pieces between them.
    fn way(
        &self,
        plan: &mut Plan<'a>,
        (local, rmr): (&'a Region, &'a Rmr),
        near: Option<&Arc<dyn Gpu>>,
        count: usize,
    ) -> Result<Way<'a>, PostError> {
        local.recheck().map_err(PostError::Freed)?;
        let place = Place { rmr, offset: 0, signal: None };
        let mapped = self.remote(&place, 0, local.gpu().or(near))?;
        let other = mapped.map_or(MemKind::Host, |(region, _)| region.kind());
        check_kinds(other, local.kind()).map_err(PostError::Memory)?;
        let Some((region, base)) = mapped else { return Ok(Way::Alone) };
        if region.kind().is_host() && local.kind().is_host() {
            return Ok(Way::Host(region, base));
        }
        let (dst, src) = if self.kind.is_put { (region, local) } else { (local, region) };
        if count == 0 {
            return Ok(Way::Alone);
        }
        let at = match plan.together.iter().position(|together| together.takes(dst, src)) {
            Some(at) => at,
            None => {
                let Some(together) = Together::between(dst, src, count) else { return Ok(Way::Alone) };
                plan.together.push(together);
                plan.together.len() - 1
            }
        };
        plan.mapped.push((region, local.kind()));
        Ok(Way::Together(at, region, base))
    }

    fn plan_pieces(
        &self,
        pieces: &'a [Piece<'a>],
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<Plan<'a>, PostError> {
        let mut plan = Plan::default();
        // Most pieces are between the same two regions as the one before.
        let mut last: Option<(&Region, &Rmr, Way<'a>)> = None;
        let mut apart = Apart::new(self.kind.is_put);
        for (at, piece) in pieces.iter().enumerate() {
            let of = |cause: PostError| PostError::Piece { at, cause: Box::new(cause) };
            let (local, rmr, len) = (piece.local, piece.rmr, piece.len());
            let way = match last {
                Some((region, same, way)) if std::ptr::eq(same, rmr) && region.is(local) => way,
                _ => self.way(&mut plan, (local, rmr), near, pieces.len() - at).map_err(of)?,
            };
            last = Some((local, rmr, way));
            let start = piece.range.start;
            if piece.range.end < start || piece.range.end > local.len() {
                return Err(of(PostError::OutsideLocal { range: piece.range.clone(), room: local.len() }));
            }
            if rmr.at(piece.offset, len as u64).is_none() {
                return Err(of(outside(piece.offset, len, rmr.len())));
            }
            if len == 0 {
                continue;
            }
            plan.size = plan.size.saturating_add(len);
            apart.note(piece, len);
            match way {
                Way::Alone => plan.rest.push(piece.clone()),
                Way::Together(number, region, base) => {
                    let remote = within(region, base, piece.offset, len).map_err(of)?;
                    let (here, there) = ((local, start), (region, remote));
                    let (dst, src) = if self.kind.is_put { (there, here) } else { (here, there) };
                    if let Some(together) = plan.together.get_mut(number) {
                        together.push(dst, src, len);
                    }
                }
                Way::Host(region, base) => {
                    let remote = within(region, base, piece.offset, len).map_err(of)?;
                    plan.host.push(HostCopy { remote: (region, remote), local: (local, start), len });
                }
            }
        }
        plan.together.retain(|together| together.count() > 0);
        if !apart.is_known {
            overlap(pieces, self.kind.is_put)?;
        }
        Ok(plan)
    }

    fn plan_face(&self, faces: &Faces<'a>, near: Option<&Arc<dyn Gpu>>) -> Result<Plan<'a>, PostError> {
        let Faces { local, ours, rmr, theirs } = *faces;
        let wrong = |which| move |cause| PostError::Face { which, cause };
        Face::grid(ours, theirs).map_err(wrong("local"))?;
        ours.check(local.len()).map_err(wrong("local"))?;
        theirs.check_within(rmr.len()).map_err(wrong("remote"))?;
        // Its bytes lie within memory, so they can be counted.
        let mut plan = Plan { size: ours.checked_len().unwrap_or(usize::MAX), ..Plan::default() };
        let way = self.way(&mut plan, (local, rmr), near, 1)?;
        if ours.is_empty() {
            plan.together.clear();
            return Ok(plan);
        }
        match way {
            Way::Together(_, region, base) => {
                // The name may have been forged: what is mapped decides.
                let room = region.len().saturating_sub(base);
                theirs.check(room).map_err(wrong("remote"))?;
                plan.together.clear();
                plan.face = Some((region, base));
            }
            Way::Host(region, base) => {
                let room = region.len().saturating_sub(base);
                theirs.check(room).map_err(wrong("remote"))?;
                plan.host_face = Some((region, base));
            }
            Way::Alone => {
                let piece = |(here, there): (usize, usize)| Piece {
                    local,
                    range: here..here + ours.count[0],
                    rmr,
                    offset: there as u64,
                };
                plan.rest.extend(faces.rows().map(piece));
            }
        }
        Ok(plan)
    }
}

#[cold]
fn outside(offset: u64, len: usize, room: u64) -> PostError {
    PostError::Outside { offset, len: len as u64, room }
}

/// Where a piece begins in memory that is mapped: the name of the memory may say more than there is.
#[inline]
fn within(region: &Region, base: usize, offset: u64, len: usize) -> Result<usize, PostError> {
    let at = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(base));
    match at {
        Some(at) if at.checked_add(len).is_some_and(|end| end <= region.len()) => Ok(at),
        _ => Err(outside(offset, len, region.len().saturating_sub(base) as u64)),
    }
}

/// Where a piece writes: in which memory, from where to where.
#[inline]
fn target(piece: &Piece<'_>, is_put: bool, len: usize) -> (u64, u64, u64) {
    let (memory, start) = if is_put {
        (piece.rmr.number(), piece.rmr.offset() + piece.offset)
    } else {
        (0, (piece.local.addr() + piece.range.start) as u64)
    };
    (memory, start, start + len as u64)
}

/// Whether pieces come in the order of their targets: then a look at each is enough to know that none overlap.
struct Apart {
    is_put: bool,
    is_known: bool,
    memory: u64,
    end: u64,
}

impl Apart {
    fn new(is_put: bool) -> Self {
        Self { is_put, is_known: true, memory: 0, end: 0 }
    }

    #[inline]
    fn note(&mut self, piece: &Piece<'_>, len: usize) {
        let (memory, start, end) = target(piece, self.is_put, len);
        self.is_known &= (memory, start) >= (self.memory, self.end) || (self.end == 0);
        (self.memory, self.end) = (memory, end);
    }
}

/// Finds two pieces that write the same byte: of pieces in the order of their targets, two neighbours do if any do.
#[cold]
fn overlap(pieces: &[Piece<'_>], is_put: bool) -> Result<(), PostError> {
    let ends = pieces.iter().enumerate().filter(|(_, piece)| piece.len() > 0);
    let mut targets: Vec<_> = ends.map(|(at, piece)| (target(piece, is_put, piece.len()), at)).collect();
    targets.sort_unstable();
    for pair in targets.windows(2) {
        if let [((memory, _, end), one), ((same, start, _), other)] = pair
            && memory == same
            && start < end
        {
            let (first, second) = (*one.min(other), *one.max(other));
            return Err(PostError::Overlap { first, second });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The name of so many bytes of some rank's.
    fn rmr(len: u64) -> Rmr {
        let words = [7, 0, len].map(u64::to_le_bytes);
        Rmr::from_bytes(&[&1_u32.to_le_bytes()[..], &words.concat()].concat()).unwrap()
    }

    proptest! {
        #[test]
        fn two_pieces_that_write_the_same_byte_are_found_and_none_else(
            places in proptest::collection::vec((0_u64..200, 0_usize..8), 0..24), is_put: bool,
        ) {
            let local = Region::host(256);
            let rmr = rmr(256);
            let piece = |&(at, len): &(u64, usize)| {
                let start = if is_put { 0 } else { at as usize };
                Piece { local: &local, range: start..start + len, rmr: &rmr, offset: at }
            };
            let pieces: Vec<_> = places.iter().map(piece).collect();
            let share = |a: &(u64, usize), b: &(u64, usize)| {
                a.0.max(b.0) < (a.0 + a.1 as u64).min(b.0 + b.1 as u64)
            };
            let any = (0..places.len()).any(|at| places[at + 1..].iter().any(|other| share(&places[at], other)));
            let found = overlap(&pieces, is_put);
            match &found {
                Ok(()) => prop_assert!(!any),
                Err(PostError::Overlap { first, second }) => {
                    prop_assert!(first < second && share(&places[*first], &places[*second]));
                }
                Err(other) => panic!("{other}"),
            }
            // The short look never says that pieces are apart which are not.
            let mut apart = Apart::new(is_put);
            pieces.iter().filter(|piece| piece.len() > 0).for_each(|piece| apart.note(piece, piece.len()));
            prop_assert!(!(any && apart.is_known));
        }
    }

    #[test]
    fn pieces_in_the_order_of_their_targets_need_no_sorting() {
        let (local, rmr) = (Region::host(64), rmr(1000));
        let mut apart = Apart::new(true);
        for at in 0..10 {
            apart.note(&Piece { local: &local, range: 0..10, rmr: &rmr, offset: at * 10 }, 10);
        }
        assert!(apart.is_known);
        apart.note(&Piece { local: &local, range: 0..10, rmr: &rmr, offset: 99 }, 10);
        assert!(!apart.is_known);
    }
}
