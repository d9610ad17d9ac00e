//! Nothing of a batch is moved before all of its pieces are known to be possible.

use super::{Batch, Faces, Many, Piece};
use crate::error::PostError;
use crate::post::options::Post;
use crate::post::rma::Place;
use crate::region::{Region, Rmr};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::copy::check_kinds;
use carrack_transports::mem::{Face, MemKind, Together};
use std::ops::Range;
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
        let mut apart = Apart::new();
        let mut at = 0;
        while let Some(Piece { local, rmr, .. }) = pieces.get(at) {
            // Most pieces are between the same two regions as the one before: what there is to know of these is found out once.
            let alike = |piece: &&Piece<'_>| std::ptr::eq(piece.rmr, *rmr) && piece.local.is(local);
            let run = pieces.iter().skip(at).take_while(alike).count();
            let way = self.way(&mut plan, (local, rmr), near, pieces.len() - at);
            let way = way.map_err(|cause| PostError::Piece { at, cause: Box::new(cause) })?;
            let run = pieces.get(at..at + run).unwrap_or_default();
            let planned = self.plan_run(&mut plan, &mut apart, way, (local, rmr), run);
            planned
                .map_err(|(behind, cause)| PostError::Piece { at: at + behind, cause: Box::new(cause) })?;
            at += run.len();
        }
        plan.together.retain(|together| together.count() > 0);
        if !apart.is_known {
            overlap(pieces, self.kind.is_put)?;
        }
        Ok(plan)
    }

    /// Pieces between one region here and one there, by one way; the first that is wrong, with its number among them.
    fn plan_run(
        &self,
        plan: &mut Plan<'a>,
        apart: &mut Apart,
        way: Way<'a>,
        (local, rmr): (&'a Region, &'a Rmr),
        run: &'a [Piece<'a>],
    ) -> Result<(), (usize, PostError)> {
        let is_put = self.kind.is_put;
        apart.enter(if is_put { (rmr.number(), rmr.offset()) } else { (0, local.addr() as u64) });
        let size = &mut plan.size;
        let mut checked = |piece: &Piece<'_>, limit: Limit| {
            let (start, len) = limit.check(piece)?;
            *size = size.saturating_add(len);
            apart.note(if is_put { piece.offset } else { start as u64 }, len);
            Ok((start, len))
        };
        let named = Limit { here: local.len(), there: rmr.len(), base: 0 };
        let of = |at: usize| move |cause| (at, cause);
        match way {
            Way::Alone => {
                for (at, piece) in run.iter().enumerate() {
                    if checked(piece, named).map_err(of(at))?.1 > 0 {
                        plan.rest.push(piece.clone());
                    }
                }
            }
            Way::Together(number, region, base) => {
                let limit = named.and_mapped(region, base);
                let (dst, src) = if is_put { (region, local) } else { (local, region) };
                let Some(together) = plan.together.get_mut(number) else { return Ok(()) };
                let mut between = together.between_these(dst, src);
                for (at, piece) in run.iter().enumerate() {
                    let (here, len) = checked(piece, limit).map_err(of(at))?;
                    let there = limit.there(piece);
                    let (to, from) = if is_put { (there, here) } else { (here, there) };
                    between.push(to, from, len);
                }
            }
            Way::Host(region, base) => {
                let limit = named.and_mapped(region, base);
                for (at, piece) in run.iter().enumerate() {
                    let (here, len) = checked(piece, limit).map_err(of(at))?;
                    if len > 0 {
                        let remote = (region, limit.there(piece));
                        plan.host.push(HostCopy { remote, local: (local, here), len });
                    }
                }
            }
        }
        Ok(())
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

/// Within what a piece has to lie: in bytes, here and there. Where the memory is mapped its name may say more than there is.
#[derive(Clone, Copy)]
struct Limit {
    here: usize,
    there: u64,
    /// Where in the mapped region that begins which the name names.
    base: usize,
}

impl Limit {
    fn and_mapped(self, region: &Region, base: usize) -> Self {
        let room = region.len().saturating_sub(base) as u64;
        Self { there: self.there.min(room), base, ..self }
    }

    /// Where a piece begins here, and its length.
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

    /// Where in the mapped region a piece begins that was checked.
    #[inline]
    fn there(self, piece: &Piece<'_>) -> usize {
        usize::try_from(piece.offset).unwrap_or(usize::MAX).saturating_add(self.base)
    }
}

#[cold]
fn outside_local(piece: &Piece<'_>, room: usize) -> PostError {
    PostError::OutsideLocal { range: piece.range.clone(), room }
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
    is_known: bool,
    /// What the last ones wrote to, and where it begins.
    memory: Option<(u64, u64)>,
    /// Where the last one ended in it.
    end: u64,
}

impl Apart {
    fn new() -> Self {
        Self { is_known: true, memory: None, end: 0 }
    }

    /// The next pieces write to this memory: its number, and where in it their places begin.
    fn enter(&mut self, memory: (u64, u64)) {
        if self.memory != Some(memory) {
            // Parts of one memory may lie in one another.
            self.is_known &= self.memory.is_none_or(|(last, _)| last < memory.0);
            (self.memory, self.end) = (Some(memory), 0);
        }
    }

    #[inline]
    fn note(&mut self, start: u64, len: usize) {
        if len > 0 {
            self.is_known &= start >= self.end;
            self.end = start + len as u64;
        }
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
            let mut apart = Apart::new();
            for piece in &pieces {
                apart.enter((0, 0));
                apart.note(target(piece, is_put, 0).1, piece.len());
            }
            prop_assert!(!(any && apart.is_known));
        }
    }

    #[test]
    fn pieces_in_the_order_of_their_targets_need_no_sorting() {
        let mut apart = Apart::new();
        let mut look = |memory, start| {
            apart.enter(memory);
            apart.note(start, 10);
            apart.is_known
        };
        assert!((0..10).all(|at| look((7, 0), at * 10)));
        assert!(look((8, 50), 0), "another memory, of a higher number");
        assert!(!look((8, 50), 9));
        for memory in [(8, 40), (7, 0)] {
            let mut apart = Apart::new();
            apart.enter((8, 50));
            apart.enter(memory);
            assert!(!apart.is_known, "{memory:?} may be the same bytes");
        }
    }
}
