//! Which addresses of the windows are allocated, and as what: pure bookkeeping.

use super::error::{OUT_OF_MEMORY, error};
use super::memory::Alias;
use carrack_transports::gpu::{GpuError, Rights};
use carrack_transports::mem::{AllocId, MemKind};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Where an allocation came from, which decides how it can be exported.
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
pub(super) struct Entry {
    /// Bytes that were asked for.
    pub(super) len: usize,
    /// Bytes that it takes up.
    pub(super) span: usize,
    /// The device that owns it.
    pub(super) ordinal: usize,
    /// The device in whose window it lies: another one's at most where addresses were reserved.
    pub(super) window: usize,
    pub(super) kind: MemKind,
    pub(super) id: AllocId,
    pub(super) context: Option<u64>,
    pub(super) alias: Arc<Alias>,
    pub(super) origin: Origin,
    /// What devices may do, where that was said of each; else all that reach it read and write.
    pub(super) access: Option<Vec<(usize, Rights)>>,
}

/// Addresses of one device.
#[derive(Debug)]
struct Space {
    window: Range<usize>,
    /// Where the search for room begins: reuse as late as possible, so that a stale address is
    /// found out.
    cursor: usize,
    last_freed: Option<Range<usize>>,
}

/// All allocations of a driver, by address.
#[derive(Debug)]
pub(super) struct Table {
    entries: BTreeMap<usize, Entry>,
    /// Reserved addresses: where each range of them begins and ends.
    reserved: BTreeMap<usize, usize>,
    spaces: Vec<Space>,
}

impl Table {
    /// A table of nothing, over each device's window.
    pub(super) fn new(windows: impl Iterator<Item = Range<usize>>) -> Self {
        let space = |window: Range<usize>| Space { cursor: window.start, window, last_freed: None };
        Self {
            entries: BTreeMap::new(),
            reserved: BTreeMap::new(),
            spaces: windows.map(space).collect(),
        }
    }

    /// The allocation that `addr` lies in, with its base.
    pub(super) fn find(&self, addr: usize) -> Option<(usize, &Entry)> {
        let (base, entry) = self.entries.range(..=addr).next_back()?;
        (addr - base < entry.len).then_some((*base, entry))
    }

    /// Bytes of a device that allocations made here take up.
    pub(super) fn used(&self, ordinal: usize) -> usize {
        let own =
            |entry: &&Entry| entry.ordinal == ordinal && !matches!(entry.origin, Origin::Opened);
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
    pub(super) fn insert(&mut self, base: usize, entry: Entry) {
        self.advance(entry.window, base, entry.span);
        self.entries.insert(base, entry);
    }

    /// Takes an allocation out.
    pub(super) fn remove(&mut self, base: usize) -> Option<Entry> {
        let entry = self.entries.remove(&base)?;
        if !self.is_reserved(base)
            && let Some(space) = self.spaces.get_mut(entry.window)
        {
            space.last_freed = Some(base..base + entry.span);
        }
        Some(entry)
    }

    /// Reserves addresses at a place that `room` found in a device's window: `room` finds none
    /// there any more.
    pub(super) fn reserve(&mut self, ordinal: usize, base: usize, span: usize) {
        self.advance(ordinal, base, span);
        self.reserved.insert(base, base + span);
    }

    /// Gives reserved addresses back.
    pub(super) fn release(&mut self, base: usize) {
        self.reserved.remove(&base);
    }

    /// Whether no allocation lies in a range.
    pub(super) fn is_empty(&self, addr: usize, span: usize) -> bool {
        let before = self.entries.range(..addr + span).next_back();
        before.is_none_or(|(base, entry)| base + entry.span <= addr)
    }

    /// Whether an address is a reserved one.
    pub(super) fn is_reserved(&self, addr: usize) -> bool {
        self.reserved.range(..=addr).next_back().is_some_and(|(_, end)| addr < *end)
    }

    /// The next search begins behind what was placed by one.
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

    /// Where the last of what overlaps a range ends: an allocation, or reserved addresses.
    fn behind(&self, addr: usize, span: usize) -> Option<usize> {
        let entry =
            self.entries.range(..addr + span).next_back().map(|(base, entry)| base + entry.span);
        let reserved = self.reserved.range(..addr + span).next_back().map(|(_, end)| *end);
        entry.max(reserved).filter(|end| *end > addr)
    }

    fn gap(&self, within: Range<usize>, span: usize) -> Option<usize> {
        let mut at = within.start;
        while within.end.saturating_sub(at) >= span {
            // Whatever begins before that overlaps it, too.
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

    fn entry(len: usize, span: usize, id: u64) -> Entry {
        let fd = create("test", GRANULE).unwrap();
        let alias = Arc::new(Alias::map("test", GRANULE, &fd).unwrap());
        let (kind, origin) = (MemKind::Unknown, Origin::Plain(fd));
        let access = None;
        Entry {
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
        // Memory of another device's within them.
        table.insert(200, Entry { ordinal: 1, ..entry(50, 100, 2) });
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
