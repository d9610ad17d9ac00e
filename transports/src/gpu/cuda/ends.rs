//! Memory that the resident copier may access.

use super::device::CudaGpu;
use super::home::Home;
use super::peer;
use super::sys::ContextHandle;
use super::vmm;
use crate::gpu::{Pieces, Rights};
use crate::mem::AllocId;
use parking_lot::{Mutex, RwLock};
use std::ops::Range;

/// Memory that the library keeps until its last region is dropped, in the order of addresses. The
/// driver need not be asked about it. The lookup happens at each copy, and there are few entries:
/// a sorted list needs some fifty instructions less than a tree (`gpu_costs`).
#[derive(Debug, Default)]
pub(super) struct Kept(RwLock<Vec<Range<usize>>>);

impl Kept {
    /// Adds memory.
    pub(super) fn note(&self, start: usize, len: usize) {
        let mut kept = self.0.write();
        let at = kept.partition_point(|one| one.start < start);
        let end = start.saturating_add(len);
        match kept.get_mut(at).filter(|one| one.start == start) {
            Some(one) => one.end = end,
            None => kept.insert(at, start..end),
        }
    }

    /// Removes memory that is about to be given back.
    pub(super) fn forget(&self, start: usize) {
        self.0.write().retain(|one| one.start != start);
    }

    /// Returns the memory that contains these bytes.
    fn around(&self, addr: usize, end: usize) -> Option<Range<usize>> {
        let kept = self.0.read();
        let one = kept.get(kept.partition_point(|one| one.start <= addr).checked_sub(1)?)?;
        (end <= one.end).then(|| one.clone())
    }
}

/// Number of allocations that are remembered.
const REMEMBERED: usize = 16;

/// Memory of the program's own, and of other devices, that the kernel may access. An engine's
/// illegal access is refused by the driver; a kernel's ends the context. So the driver is asked
/// once about the rights of each allocation, and each time about its identity, which a freed
/// allocation loses.
#[derive(Default)]
pub(super) struct Ends(Mutex<Known>);

#[derive(Default)]
struct Known {
    allocations: Vec<KnownAllocation>,
    /// Index of the entry that is replaced next.
    oldest: usize,
    /// Number of calls of `forget`.
    generation: u64,
}

#[derive(Clone, Copy)]
struct KnownAllocation {
    start: usize,
    end: usize,
    id: AllocId,
    is_reached: bool,
}

impl Ends {
    /// Forgets what is known of the program's memory in a range.
    pub(super) fn forget(&self, range: &Range<usize>) {
        self.0.lock().forget(range);
    }

    pub(super) fn is_reached(&self, gpu: &CudaGpu, home: &Home, addr: usize, len: usize) -> bool {
        self.reached_around(gpu, home, addr, len).is_some()
    }

    /// Returns `true` if the kernel reaches both ends of all of these copies. Often all lie in one
    /// allocation on each side, else mostly in a few.
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

    /// Returns the memory that contains these bytes, if it is reached.
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
        let holds = |one: &&KnownAllocation| one.start <= addr && end <= one.end;
        let (known, generation) = {
            let all = self.0.lock();
            (all.allocations.iter().find(holds).copied(), all.generation)
        };
        if let Some(known) = known
            && gpu.shared.buffer_id(addr) == Ok(Some(known.id))
        {
            return known.is_reached.then_some(known.start..known.end);
        }
        let found = look(gpu, home, addr)?;
        self.0.lock().note(found, generation);
        (end <= found.end && found.is_reached).then_some(found.start..found.end)
    }
}

/// Reached memory of the last few lookups.
struct Reached {
    ranges: [Range<usize>; 8],
    /// Index of the entry that is replaced next.
    oldest: usize,
}

impl Reached {
    fn of(first: Range<usize>) -> Self {
        let mut ranges = [const { 0..0 }; 8];
        ranges[0] = first;
        Self { ranges, oldest: 1 }
    }

    /// Returns `true` if these bytes are reached. `ask` returns the memory around them, which is
    /// empty if they are not.
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

    /// Remembers an allocation, in place of those that its addresses overlap. Does nothing if
    /// something was forgotten since the allocation was looked up.
    fn note(&mut self, found: KnownAllocation, generation: u64) {
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

/// Looks up the allocation at an address, and whether kernels of this device's context reach it.
/// it.
#[cold]
fn look(gpu: &CudaGpu, home: &Home, addr: usize) -> Option<KnownAllocation> {
    let facts = gpu.shared.facts(addr).ok()??;
    let is_reached = match facts.context {
        // Memory of VMM and of pools: reached by the devices that were given access.
        ContextHandle::NULL => vmm::rights_at(gpu, addr) == Ok(Some(Rights::ReadWrite)),
        // The context's own memory, and memory opened in it from another process.
        context if context == home.context.raw => true,
        // A peer's.
        context => usize::try_from(facts.ordinal).ok().is_some_and(|at| {
            let is_primary = || gpu.shared.gpus().ok()?.get(at)?.is_primary(context).ok();
            peer::is_enabled(home, at) && is_primary() == Some(true)
        }),
    };
    Some(KnownAllocation {
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
        // Noting memory again with another length replaces the entry; forgetting unknown memory
        // has no effect.
        kept.note(0x2000, 0x20);
        kept.forget(0x1800);
        assert_eq!(kept.around(0x2010, 0x2020), Some(0x2000..0x2020));
        kept.forget(0x2000);
        assert_eq!(kept.around(0x2000, 0x2001), None);
        assert_eq!(kept.around(0x1000, 0x1001), Some(0x1000..0x2000));
    }
}
