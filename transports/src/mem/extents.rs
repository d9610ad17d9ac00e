//! Map from ranges of addresses, which do not overlap, to values, with a limit on their number.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The ranges. A range that was not looked up lately makes room for a new one (second chance). The
/// hand passes once over each range that was looked up since it last came by.
#[derive(Debug)]
pub(super) struct Extents<T> {
    by_base: BTreeMap<usize, ExtentSlot<T>>,
    limit: usize,
    /// Address at which the search for room goes on.
    hand: usize,
}

#[derive(Debug)]
struct ExtentSlot<T> {
    end: usize,
    used: AtomicBool,
    value: T,
}

impl<T> Extents<T> {
    /// Makes a map for at most `limit` ranges; the least limit is 1.
    pub(super) const fn bounded(limit: usize) -> Self {
        Self { by_base: BTreeMap::new(), limit: if limit == 0 { 1 } else { limit }, hand: 0 }
    }

    /// Returns the number of ranges.
    pub(super) fn len(&self) -> usize {
        self.by_base.len()
    }

    /// Returns the range that an address lies in.
    pub(super) fn get(&self, addr: usize) -> Option<(Range<usize>, &T)> {
        let (base, slot) =
            self.by_base.range(..=addr).next_back().filter(|(_, slot)| addr < slot.end)?;
        // Most readers find it set: a store each time would take the cache line from other
        // threads.
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some((*base..slot.end, &slot.value))
    }

    /// Returns the first range that begins at an address or behind it, or else the first of all:
    /// for callers that go round. It does not count as a look-up.
    pub(super) fn from(&self, addr: usize) -> Option<(Range<usize>, &T)> {
        let next = self.by_base.range(addr..).next().or_else(|| self.by_base.first_key_value());
        next.map(|(base, slot)| (*base..slot.end, &slot.value))
    }

    /// Enters a range. Returns the ranges that it replaces: all that it overlaps, and one more
    /// where there was no room. An empty range is itself returned.
    pub(super) fn insert(&mut self, range: Range<usize>, value: T) -> Vec<(Range<usize>, T)> {
        if range.is_empty() {
            return vec![(range, value)];
        }
        let mut gone = self.take(&range);
        if self.by_base.len() >= self.limit {
            gone.extend(self.evict());
        }
        let slot = ExtentSlot { end: range.end, used: AtomicBool::new(true), value };
        self.by_base.insert(range.start, slot);
        gone
    }

    /// Removes all ranges that a range overlaps.
    pub(super) fn take(&mut self, range: &Range<usize>) -> Vec<(Range<usize>, T)> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.by_base.range(..range.start).next_back();
        let before = before.filter(|(_, slot)| slot.end > range.start).map(|(base, _)| *base);
        let within = self.by_base.range(range.clone()).map(|(base, _)| *base);
        let bases: Vec<usize> = before.into_iter().chain(within).collect();
        bases.into_iter().filter_map(|base| self.remove(base)).collect()
    }

    fn remove(&mut self, base: usize) -> Option<(Range<usize>, T)> {
        let slot = self.by_base.remove(&base)?;
        Some((base..slot.end, slot.value))
    }

    /// Removes a range that was not looked up since the hand last came by.
    fn evict(&mut self) -> Option<(Range<usize>, T)> {
        loop {
            let next = self.by_base.range_mut(self.hand..).next().map(|(base, slot)| (*base, slot));
            let Some((base, slot)) = next else {
                if self.by_base.is_empty() {
                    return None;
                }
                // Go round once more; no range is marked as used by now.
                self.hand = 0;
                continue;
            };
            // No overflow: a range at the last address would be empty.
            self.hand = base.saturating_add(1);
            if !std::mem::take(slot.used.get_mut()) {
                return self.remove(base);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum ExtentStep {
        Insert(Range<usize>),
        Take(Range<usize>),
        Get(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<ExtentStep>> {
        // Few addresses, so that ranges meet; some at the end of the address space.
        let start = prop_oneof![4 => 0_usize..64, 1 => usize::MAX - 16..usize::MAX];
        let range = (start, 0_usize..12).prop_map(|(start, len)| start..start.saturating_add(len));
        let addr = prop_oneof![4 => 0_usize..80, 1 => usize::MAX - 16..=usize::MAX];
        let step = prop_oneof![
            4 => range.clone().prop_map(ExtentStep::Insert),
            1 => range.prop_map(ExtentStep::Take),
            3 => addr.prop_map(ExtentStep::Get),
        ];
        proptest::collection::vec(step, 1..80)
    }

    fn overlaps(one: &Range<usize>, other: &Range<usize>) -> bool {
        !one.is_empty() && !other.is_empty() && one.start < other.end && other.start < one.end
    }

    /// Removes the returned ranges from the model, and checks that all overlapping ones are among
    /// them. Returns the number of the others.
    fn leave(
        model: &mut Vec<(Range<usize>, usize)>,
        by: &Range<usize>,
        gone: &[(Range<usize>, usize)],
    ) -> usize {
        let must: Vec<_> = model.iter().filter(|(range, _)| overlaps(range, by)).cloned().collect();
        assert!(must.iter().all(|one| gone.contains(one)), "{must:?} of {gone:?}");
        assert!(gone.iter().all(|one| model.contains(one)), "{gone:?} was never there");
        model.retain(|one| !gone.contains(one));
        gone.len() - must.len()
    }

    proptest! {
        #[test]
        fn it_answers_as_a_list_of_ranges_does(limit in 1_usize..9, steps in steps()) {
            let mut extents = Extents::bounded(limit);
            let mut model: Vec<(Range<usize>, usize)> = Vec::new();
            for (at, step) in steps.into_iter().enumerate() {
                match step {
                    ExtentStep::Insert(range) if range.is_empty() => {
                        prop_assert_eq!(extents.insert(range.clone(), at), [(range, at)]);
                    }
                    ExtentStep::Insert(range) => {
                        let gone = extents.insert(range.clone(), at);
                        let stay = model.iter().filter(|(one, _)| !overlaps(one, &range));
                        let room = limit - stay.count();
                        let evicted = leave(&mut model, &range, &gone);
                        prop_assert_eq!(evicted, usize::from(room == 0));
                        model.push((range, at));
                    }
                    ExtentStep::Take(range) => {
                        let gone = extents.take(&range);
                        prop_assert_eq!(leave(&mut model, &range, &gone), 0);
                    }
                    ExtentStep::Get(addr) => {
                        let known = model.iter().find(|(range, _)| range.contains(&addr));
                        let found = extents.get(addr).map(|(range, value)| (range, *value));
                        prop_assert_eq!(found, known.cloned());
                    }
                }
                prop_assert_eq!(extents.len(), model.len());
                prop_assert!(model.len() <= limit);
            }
        }
    }

    #[test]
    fn what_is_looked_up_stays_and_what_is_not_makes_room() {
        let mut extents = Extents::bounded(3);
        for base in [10, 20, 30] {
            assert!(extents.insert(base..base + 5, base).is_empty());
        }
        // All are marked as used: the hand passes each once, and then takes the first.
        assert_eq!(extents.insert(40..45, 40), [(10..15, 10)]);
        for turn in 5..20 {
            assert!(extents.get(22).is_some(), "it is looked up before each");
            let base = turn * 10;
            let gone = extents.insert(base..base + 5, base);
            assert_eq!(gone.len(), 1);
            assert_ne!(gone[0].1, 20);
        }
    }
}
