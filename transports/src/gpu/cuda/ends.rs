//! Where the resident copier may go.

use super::device::CudaGpu;
use super::home::{Home, lock};
use super::peer;
use super::sys::ContextHandle;
use super::vmm;
use crate::gpu::{Pieces, Rights};
use crate::mem::AllocId;
use std::ops::Range;
use std::sync::{Mutex, PoisonError, RwLock};

/// Memory that the library keeps until its last region is dropped, in the order of addresses. Of
/// this the driver need not be asked. It is looked for at each copy, and there are few pieces: a
/// list, in which a place is found by some fifty instructions less than in a tree (`gpu_costs`).
#[derive(Debug, Default)]
pub(super) struct Kept(RwLock<Vec<Range<usize>>>);

impl Kept {
    /// Memory that is there.
    pub(super) fn note(&self, start: usize, len: usize) {
        let mut kept = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let at = kept.partition_point(|one| one.start < start);
        let end = start.saturating_add(len);
        match kept.get_mut(at).filter(|one| one.start == start) {
            Some(one) => one.end = end,
            None => kept.insert(at, start..end),
        }
    }

    /// It is about to be given back.
    pub(super) fn forget(&self, start: usize) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).retain(|one| one.start != start);
    }

    /// The memory that has these bytes.
    fn around(&self, addr: usize, end: usize) -> Option<Range<usize>> {
        let kept = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let one = kept.get(kept.partition_point(|one| one.start <= addr).checked_sub(1)?)?;
        (end <= one.end).then(|| one.clone())
    }
}

/// Allocations remembered.
const REMEMBERED: usize = 16;

/// Where the kernel may go in memory of the program's own, and of other devices. An engine is
/// refused by the driver where it may not; a kernel that goes there takes the context along. So the
/// driver is asked about each allocation once, and about its identity each time: one that was freed
/// is nobody's.
#[derive(Default)]
pub(super) struct Ends(Mutex<Known>);

#[derive(Default)]
struct Known {
    allocations: Vec<Allocation>,
    /// Which is forgotten next.
    oldest: usize,
    /// How often it was said that something is to be forgotten.
    generation: u64,
}

#[derive(Clone, Copy)]
struct Allocation {
    start: usize,
    end: usize,
    id: AllocId,
    is_reached: bool,
}

impl Ends {
    /// Memory of the program's there is looked at anew.
    pub(super) fn forget(&self, range: &Range<usize>) {
        lock(&self.0).forget(range);
    }

    pub(super) fn is_reached(&self, gpu: &CudaGpu, home: &Home, addr: usize, len: usize) -> bool {
        self.reached_around(gpu, home, addr, len).is_some()
    }

    /// Whether both ends of all of these are. Often all lie in one allocation on each side, and
    /// else mostly in one of a few.
    pub(super) fn are_all_reached(&self, gpu: &CudaGpu, home: &Home, pieces: &Pieces) -> bool {
        let Some((to, from, len)) = pieces.numbers().next() else { return true };
        let reached =
            |addr: usize, len: usize| self.reached_around(gpu, home, addr, len).unwrap_or(0..0);
        let (targets, sources) = (reached(to, len), reached(from, len));
        let has = |reach: &Range<usize>, all: &Range<usize>| {
            reach.start <= all.start && all.end <= reach.end
        };
        if has(&targets, &pieces.all().to) && has(&sources, &pieces.all().from) {
            return true;
        }
        let (mut targets, mut sources) = (Reached::of(targets), Reached::of(sources));
        pieces.numbers().all(|(to, from, len)| {
            targets.have(to, len, reached) && sources.have(from, len, reached)
        })
    }

    /// The memory that has these bytes, if it is reached.
    fn reached_around(
        &self,
        gpu: &CudaGpu,
        home: &Home,
        addr: usize,
        len: usize,
    ) -> Option<Range<usize>> {
        let end = addr.checked_add(len)?;
        if let Some(kept) = home.kept.around(addr, end) {
            return Some(kept);
        }
        let holds = |one: &&Allocation| one.start <= addr && end <= one.end;
        let (known, generation) = {
            let all = lock(&self.0);
            (all.allocations.iter().find(holds).copied(), all.generation)
        };
        if let Some(known) = known
            && gpu.shared.buffer_id(addr) == Ok(Some(known.id))
        {
            return known.is_reached.then_some(known.start..known.end);
        }
        let found = look(gpu, home, addr)?;
        lock(&self.0).note(found, generation);
        (end <= found.end && found.is_reached).then_some(found.start..found.end)
    }
}

/// Memory that is reached, of the last few places that were asked about.
struct Reached {
    ranges: [Range<usize>; 8],
    /// Which is forgotten next.
    oldest: usize,
}

impl Reached {
    fn of(first: Range<usize>) -> Self {
        let mut ranges = [const { 0..0 }; 8];
        ranges[0] = first;
        Self { ranges, oldest: 1 }
    }

    /// Whether it has these bytes; `ask` tells the memory around them, which is empty if they are
    /// not reached.
    #[inline]
    fn have(
        &mut self,
        addr: usize,
        len: usize,
        ask: impl Fn(usize, usize) -> Range<usize>,
    ) -> bool {
        let has = |all: &Range<usize>| all.start <= addr && addr < all.end && len <= all.end - addr;
        if self.ranges.iter().any(has) {
            return true;
        }
        let found = ask(addr, len);
        let is_reached = has(&found);
        self.ranges[self.oldest] = found;
        self.oldest = (self.oldest + 1) % self.ranges.len();
        is_reached
    }
}

impl Known {
    fn forget(&mut self, range: &Range<usize>) {
        self.generation += 1;
        self.take_out(range);
    }

    fn take_out(&mut self, range: &Range<usize>) {
        self.allocations.retain(|one| one.end <= range.start || range.end <= one.start);
    }

    /// Remembers an allocation, in the place of those whose addresses it has; unless something was
    /// forgotten since it was looked at.
    fn note(&mut self, found: Allocation, generation: u64) {
        if generation != self.generation {
            return;
        }
        self.take_out(&(found.start..found.end));
        if self.allocations.len() < REMEMBERED {
            return self.allocations.push(found);
        }
        self.oldest = (self.oldest + 1) % REMEMBERED;
        if let Some(oldest) = self.allocations.get_mut(self.oldest) {
            *oldest = found;
        }
    }
}

/// What lies at an address, and whether kernels of this device's context reach it.
#[cold]
fn look(gpu: &CudaGpu, home: &Home, addr: usize) -> Option<Allocation> {
    let facts = gpu.shared.facts(addr).ok()??;
    let is_reached = match facts.context {
        // Memory of VMM and of pools: reached by whom it was told to be.
        ContextHandle::NULL => vmm::rights_at(gpu, addr) == Ok(Some(Rights::ReadWrite)),
        // Its own, and what was opened in it from another process.
        context if context == home.context.raw => true,
        // A peer's.
        context => usize::try_from(facts.ordinal).ok().is_some_and(|at| {
            let is_primary = || gpu.shared.gpus().ok()?.get(at)?.is_primary(context).ok();
            peer::is_enabled(home, at) && is_primary() == Some(true)
        }),
    };
    Some(Allocation {
        start: facts.start,
        end: facts.start.checked_add(facts.size)?,
        id: facts.id,
        is_reached,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_kept_is_found_by_all_of_its_bytes_until_it_is_given_back() {
        let kept = Kept::default();
        assert_eq!(kept.around(0, 1), None);
        for (start, len) in [(0x3000, 0x100), (0x1000, 0x1000), (0x2000, 0x10)] {
            kept.note(start, len);
        }
        for (addr, end, wanted) in [
            (0x0fff, 0x1001, None),
            (0x1000, 0x2000, Some(0x1000..0x2000)),
            (0x1fff, 0x2000, Some(0x1000..0x2000)),
            (0x1fff, 0x2001, None),
            (0x2008, 0x2010, Some(0x2000..0x2010)),
            (0x2010, 0x2011, None),
            (0x30ff, 0x3100, Some(0x3000..0x3100)),
            (0x3100, 0x3101, None),
        ] {
            assert_eq!(kept.around(addr, end), wanted, "{addr:#x}");
        }
        // It is noted again, and is longer; what nobody has noted is forgotten in vain.
        kept.note(0x2000, 0x20);
        kept.forget(0x1800);
        assert_eq!(kept.around(0x2010, 0x2020), Some(0x2000..0x2020));
        kept.forget(0x2000);
        assert_eq!(kept.around(0x2000, 0x2001), None);
        assert_eq!(kept.around(0x1000, 0x1001), Some(0x1000..0x2000));
    }
}
