//! Table of allocated addresses in the windows, with their allocations.

use super::error::{OUT_OF_MEMORY, error};
use super::memory::Alias;
use carrack_transports::gpu::{GpuError, Rights};
use carrack_transports::mem::{AllocId, MemKind};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Origin of an allocation, which decides the forms of its export.
#[derive(Debug)]
pub(super) enum Origin {
    /// Allocated here as `cuMemAlloc` does.
    Plain(OwnedFd),
    /// Allocated here as the VMM calls do.
    Shareable(OwnedFd),
    /// Allocated here from the pool.
    Pooled(OwnedFd),
    /// Allocated here as memory that moves, though it does not.
    Managed,
    /// Opened from another process's handle.
    Opened,
}

/// One allocation.
#[derive(Debug)]
pub(super) struct Allocation {
    /// Requested bytes.
    pub(super) len: usize,
    /// Occupied bytes.
    pub(super) span: usize,
    /// The device that owns it.
    pub(super) ordinal: usize,
    /// The device in whose window it lies: another than the owner only at reserved addresses.
    pub(super) window: usize,
    pub(super) kind: MemKind,
    pub(super) id: AllocId,
    pub(super) context: Option<u64>,
    pub(super) alias: Arc<Alias>,
    pub(super) origin: Origin,
    /// Rights of each device, if they were stated; else all that reach it read and write.
    pub(super) access: Option<Vec<(usize, Rights)>>,
}

/// Addresses of one device.
#[derive(Debug)]
struct Space {
    window: Range<usize>,
    /// Start of the search for room: addresses are reused as late as possible, so that stale ones
    /// are detected.
    cursor: usize,
    last_freed: Option<Range<usize>>,
}

/// All allocations of a driver, by address.
#[derive(Debug)]
pub(super) struct Table {
    entries: BTreeMap<usize, Allocation>,
    /// Reserved addresses: the end of each range, by its start.
    reserved: BTreeMap<usize, usize>,
    spaces: Vec<Space>,
}

impl Table {
    /// Creates an empty table over the devices' windows.
    pub(super) fn new(windows: impl Iterator<Item = Range<usize>>) -> Self {
        let space = |window: Range<usize>| Space { cursor: window.start, window, last_freed: None };
        Self {
            entries: BTreeMap::new(),
            reserved: BTreeMap::new(),
            spaces: windows.map(space).collect(),
        }
    }

    /// Returns the allocation that `addr` lies in, with its base.
    pub(super) fn find(&self, addr: usize) -> Option<(usize, &Allocation)> {
        let (base, entry) = self.entries.range(..=addr).next_back()?;
        (addr - base < entry.len).then_some((*base, entry))
    }

    /// Returns the bytes of a device that allocations made here occupy.
    pub(super) fn used(&self, ordinal: usize) -> usize {
        let own = |entry: &&Allocation| {
            entry.ordinal == ordinal && !matches!(entry.origin, Origin::Opened)
        };
        self.entries.values().filter(own).map(|entry| entry.span).sum()
    }

    /// Finds room for `span` bytes in a device's window; `reuse` tries the address freed last
    /// first.
    pub(super) fn room(
        &self,
        call: &'static str,
        ordinal: usize,
        span: usize,
        reuse: bool,
    ) -> Result<usize, GpuError> {
        let full = || error(call, OUT_OF_MEMORY, "the device's window of addresses is full");
        let space = self.spaces.get(ordinal).ok_or_else(full)?;
        let last = space.last_freed.as_ref().filter(|last| reuse && last.len() >= span);
        if let Some(last) = last.filter(|last| self.is_free(last.start, span)) {
            return Ok(last.start);
        }
        self.gap(space.cursor..space.window.end, span)
            .or_else(|| self.gap(space.window.clone(), span))
            .ok_or_else(full)
    }

    /// Enters an allocation at a place that `room` found, or that is free within reserved
    /// addresses.
    pub(super) fn insert(&mut self, base: usize, entry: Allocation) {
        self.advance(entry.window, base, entry.span);
        self.entries.insert(base, entry);
    }

    /// Removes an allocation.
    pub(super) fn remove(&mut self, base: usize) -> Option<Allocation> {
        let entry = self.entries.remove(&base)?;
        if !self.is_reserved(base)
            && let Some(space) = self.spaces.get_mut(entry.window)
        {
            space.last_freed = Some(base..base + entry.span);
        }
        Some(entry)
    }

    /// Reserves addresses at a place that `room` found in a device's window: `room` does not
    /// return them again.
    pub(super) fn reserve(&mut self, ordinal: usize, base: usize, span: usize) {
        self.advance(ordinal, base, span);
        self.reserved.insert(base, base + span);
    }

    /// Releases reserved addresses.
    pub(super) fn release(&mut self, base: usize) {
        self.reserved.remove(&base);
    }

    /// Returns `true` if no allocation lies in a range.
    pub(super) fn is_empty(&self, addr: usize, span: usize) -> bool {
        let before = self.entries.range(..addr + span).next_back();
        before.is_none_or(|(base, entry)| base + entry.span <= addr)
    }

    /// Returns `true` if an address is a reserved one.
    pub(super) fn is_reserved(&self, addr: usize) -> bool {
        self.reserved.range(..=addr).next_back().is_some_and(|(_, end)| addr < *end)
    }

    /// Moves the start of the next search behind a new place.
    fn advance(&mut self, window: usize, base: usize, span: usize) {
        if !self.is_reserved(base)
            && let Some(space) = self.spaces.get_mut(window)
        {
            space.cursor = base + span;
        }
    }

    fn is_free(&self, addr: usize, span: usize) -> bool {
        self.behind(addr, span).is_none()
    }

    /// Returns the end of the last allocation or reservation that overlaps a range.
    fn behind(&self, addr: usize, span: usize) -> Option<usize> {
        let entry =
            self.entries.range(..addr + span).next_back().map(|(base, entry)| base + entry.span);
        let reserved = self.reserved.range(..addr + span).next_back().map(|(_, end)| *end);
        entry.max(reserved).filter(|end| *end > addr)
    }

    fn gap(&self, within: Range<usize>, span: usize) -> Option<usize> {
        let mut at = within.start;
        while within.end.saturating_sub(at) >= span {
            // Every start before that end overlaps, too.
            let Some(end) = self.behind(at, span) else { return Some(at) };
            at = end;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::{GRANULE, create};
    use super::*;

    fn entry(len: usize, span: usize, id: u64) -> Allocation {
        let fd = create("test", GRANULE).unwrap();
        let alias = Arc::new(Alias::map("test", GRANULE, &fd).unwrap());
        let (kind, origin) = (MemKind::Unknown, Origin::Plain(fd));
        let access = None;
        Allocation {
            len,
            span,
            ordinal: 0,
            window: 0,
            kind,
            id: AllocId(id),
            context: None,
            alias,
            origin,
            access,
        }
    }

    #[test]
    fn an_address_belongs_to_the_allocation_that_covers_it_and_to_no_neighbour() {
        let mut table = Table::new(std::iter::once(1000..2000));
        table.insert(1000, entry(90, 100, 1));
        table.insert(1100, entry(100, 100, 2));
        let id = |addr| table.find(addr).map(|(base, entry)| (base, entry.id.0));
        assert_eq!(id(999), None);
        assert_eq!(id(1000), Some((1000, 1)));
        assert_eq!(id(1089), Some((1000, 1)));
        assert_eq!(id(1090), None);
        assert_eq!(id(1100), Some((1100, 2)));
        assert_eq!(id(1199), Some((1100, 2)));
        assert_eq!(id(1200), None);
    }

    #[test]
    fn addresses_are_reused_late_or_at_once_as_ordered() {
        let mut table = Table::new(std::iter::once(0..400));
        for (at, id) in [(0, 1), (100, 2)] {
            assert_eq!(table.room("test", 0, 100, false).unwrap(), at);
            table.insert(at, entry(100, 100, id));
        }
        table.remove(0).unwrap();
        assert_eq!(table.room("test", 0, 100, false).unwrap(), 200);
        assert_eq!(table.room("test", 0, 100, true).unwrap(), 0);
        assert_eq!(table.room("test", 0, 200, true).unwrap(), 200, "it does not fit where it was");
        table.insert(200, entry(200, 200, 3));
        assert_eq!(
            table.room("test", 0, 100, false).unwrap(),
            0,
            "the window is used up, so from its start"
        );
        table.insert(0, entry(100, 100, 4));
        assert_eq!(table.room("test", 0, 1, false).unwrap_err().code, OUT_OF_MEMORY);
        assert_eq!(table.room("test", 0, 1, true).unwrap_err().code, OUT_OF_MEMORY);
        assert_eq!(table.used(0), 400);
    }

    #[test]
    fn reserved_addresses_are_passed_over_and_what_lies_there_changes_no_search() {
        let mut table = Table::new([0..400, 1000..1400].into_iter());
        table.insert(0, entry(100, 100, 1));
        assert_eq!(table.room("test", 0, 200, false).unwrap(), 100);
        table.reserve(0, 100, 200);
        assert_eq!(table.room("test", 0, 100, false).unwrap(), 300);
        assert_eq!(table.room("test", 0, 101, false).unwrap_err().code, OUT_OF_MEMORY);
        // Memory of another device within them.
        table.insert(200, Allocation { ordinal: 1, ..entry(50, 100, 2) });
        assert!(table.is_empty(100, 100) && !table.is_empty(100, 101) && !table.is_empty(299, 1));
        assert_eq!((table.used(0), table.used(1)), (100, 100));
        assert_eq!(table.find(249).map(|(base, entry)| (base, entry.id.0)), Some((200, 2)));
        table.remove(200).unwrap();
        assert!(table.is_empty(100, 200));
        assert_eq!(
            table.room("test", 0, 100, true).unwrap(),
            300,
            "what was freed there is no room"
        );
        table.release(100);
        table.remove(0).unwrap();
        assert_eq!(table.room("test", 0, 100, true).unwrap(), 0);
        table.insert(300, entry(100, 100, 3));
        assert_eq!(table.room("test", 0, 300, false).unwrap(), 0, "all of it in one piece again");
    }
}
