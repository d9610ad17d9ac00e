//! The regions of this rank, by numbers that other ranks send.

use super::direct::AllTold;
use super::{Region, RegionSlice};
use crate::error::RegisterError;
use crate::protocol::rkey::{number, of_number};
use carrack_transports::contract::{Exported, Exposed, WireKey};
use parking_lot::{Mutex, MutexGuard};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Regions that a rank can have registered.
const LIMIT: usize = 1 << 20;

/// The table. A number carries a generation, so a late or forged one finds nothing.
pub(crate) struct Regions {
    slots: Mutex<RegionSlots>,
    /// The regions that NICs of other ranks reach.
    pub(super) told: AllTold,
    /// The first generation: numbers of an earlier runtime of this rank do not recur.
    first: u32,
    /// The number of regions whose words have a NIC as coherence owner. Written under the lock of
    /// the slots.
    by_nic: AtomicUsize,
}

/// A NIC that does the atomic operations on the words of a region.
#[derive(Clone)]
pub(super) struct NicAgent {
    pub(super) transport: &'static str,
    pub(super) exposed: Arc<dyn Exposed>,
}

#[derive(Default)]
struct RegionSlots {
    all: Vec<RegionSlot>,
    free: Vec<u32>,
}

#[derive(Default)]
struct RegionSlot {
    generation: u32,
    region: Option<Registered>,
}

/// A region, as long as its registration stands.
struct Registered {
    region: Region,
    keys: Arc<Keys>,
    /// `None`: its owner is the agent of its words.
    agent: Option<NicAgent>,
}

impl Registered {
    /// Returns `true` if it overlaps a range of addresses.
    fn reaches(&self, range: &Range<usize>) -> bool {
        let end = self.region.addr().saturating_add(self.region.len());
        !range.is_empty() && self.region.addr() < range.end && range.start < end
    }
}

/// The exports by which peers map a region, as long as its registration stands.
#[derive(Default)]
pub(super) struct Keys(Mutex<Option<Vec<(&'static str, Exported)>>>);

impl Keys {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<(&'static str, Exported)>>> {
        self.0.lock()
    }

    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(Vec::new()))))
    }

    /// Adds an export. If the registration was withdrawn meanwhile, the export ends at once.
    pub(super) fn add(&self, transport: &'static str, exported: Exported) {
        if let Some(keys) = &mut *self.lock() {
            keys.push((transport, exported));
        }
    }

    /// Returns each export's key with its transport's name; none if the registration was
    /// withdrawn.
    pub(super) fn named(&self) -> Vec<(String, WireKey)> {
        let keys = self.lock();
        let named = keys
            .iter()
            .flatten()
            .map(|(name, exported)| ((*name).to_owned(), exported.key.clone()));
        named.collect()
    }
}

/// The reason why another rank's operation is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The region does not exist, or not any more.
    Stale,
    /// The operation reaches beyond the region.
    Outside,
}

impl Regions {
    pub(crate) fn new() -> Self {
        let first = RandomState::new().build_hasher().finish() as u32;
        let (slots, by_nic) = (Mutex::default(), AtomicUsize::new(0));
        Self { slots, told: AllTold::new(), first, by_nic }
    }

    fn slots(&self) -> MutexGuard<'_, RegionSlots> {
        self.slots.lock()
    }

    pub(super) fn insert(
        &self,
        region: Region,
        agent: Option<NicAgent>,
    ) -> Result<(u32, u32, Arc<Keys>), RegisterError> {
        let mut slots = self.slots();
        if agent.is_some() || self.by_nic.load(Ordering::Relaxed) > 0 {
            let range = region.addr()..region.addr().saturating_add(region.len());
            let mut registered = slots.all.iter().filter_map(|slot| slot.region.as_ref());
            if registered
                .any(|other| other.agent.is_some() != agent.is_some() && other.reaches(&range))
            {
                return Err(RegisterError::OtherAgent { addr: region.addr(), len: region.len() });
            }
        }
        let index = match slots.free.pop() {
            Some(index) => index,
            None if slots.all.len() < LIMIT => {
                slots.all.push(RegionSlot { generation: self.first, region: None });
                slots.all.len() as u32 - 1
            }
            None => return Err(RegisterError::TooMany(LIMIT)),
        };
        let slot = &mut slots.all[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        let keys = Keys::new();
        self.by_nic.fetch_add(usize::from(agent.is_some()), Ordering::Relaxed);
        slot.region = Some(Registered { region, keys: keys.clone(), agent });
        Ok((index, slot.generation, keys))
    }

    pub(super) fn remove(&self, index: u32, generation: u32) {
        let mut slots = self.slots();
        let slot = slots.all.get_mut(index as usize).filter(|slot| slot.generation == generation);
        let gone = slot.and_then(|slot| slot.region.take());
        if gone.is_some() {
            slots.free.push(index);
        }
        self.by_nic.fetch_sub(count_by_nic(&gone), Ordering::Relaxed);
        drop(slots);
        if gone.is_some() {
            self.told.withdraw(number((index, generation)));
        }
        drop(gone);
    }

    /// Ends the registrations that overlap a range of addresses, even if their `Mr` still exists.
    /// Returns their number, and that of ended ones that NICs of other ranks reach.
    pub(crate) fn withdraw(&self, range: &Range<usize>) -> (usize, usize) {
        let reaches =
            |slot: &RegionSlot| slot.region.as_ref().is_some_and(|one| one.reaches(range));
        let mut slots = self.slots();
        let RegionSlots { all, free } = &mut *slots;
        let reached = all.iter_mut().zip(0..).filter(|(slot, _)| reaches(slot));
        let gone: Vec<_> = reached
            .filter_map(|(slot, index)| {
                let region = slot.region.take()?;
                free.push(index);
                Some((region, number((index, slot.generation))))
            })
            .collect();
        self.by_nic.fetch_sub(count_by_nic(gone.iter().map(|(one, _)| one)), Ordering::Relaxed);
        drop(slots);
        for (one, number) in &gone {
            let ended = one.keys.lock().take();
            drop(ended);
            self.told.withdraw(*number);
        }
        (gone.len(), self.told.count_leaving(range))
    }

    /// Returns the NIC that is the coherence owner of a region's words. `None` if there is none,
    /// or no such region.
    pub(super) fn agent(&self, number: u64) -> Option<NicAgent> {
        if self.by_nic.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (index, generation) = of_number(number);
        let slots = self.slots();
        let slot = slots.all.get(index as usize).filter(|slot| slot.generation == generation)?;
        slot.region.as_ref()?.agent.clone()
    }

    /// Returns the transport whose NIC, and not this rank, is the coherence owner of a region's
    /// words.
    pub(crate) fn nic_of_words(&self, number: u64) -> Option<&'static str> {
        self.agent(number).map(|agent| agent.transport)
    }

    /// Returns a part of a region, by its number in messages.
    pub(crate) fn find(&self, number: u64, offset: u64, len: u64) -> Result<RegionSlice, Refusal> {
        let (index, generation) = of_number(number);
        let slots = self.slots();
        let slot = slots.all.get(index as usize).filter(|slot| slot.generation == generation);
        let region = &slot.and_then(|slot| slot.region.as_ref()).ok_or(Refusal::Stale)?.region;
        region.recheck().map_err(|_| Refusal::Stale)?;
        let fits = |number: u64| usize::try_from(number).ok();
        fits(offset)
            .zip(fits(len))
            .and_then(|(offset, len)| region.slice(offset, len))
            .ok_or(Refusal::Outside)
    }
}

/// Counts the regions whose words have a NIC as coherence owner.
fn count_by_nic<'a>(gone: impl IntoIterator<Item = &'a Registered>) -> usize {
    gone.into_iter().filter(|one| one.agent.is_some()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_finds_its_region_and_no_other() {
        let regions = Regions::new();
        let insert = |len| {
            let (index, generation, _) = regions.insert(Region::host(len), None).unwrap();
            (index, generation)
        };
        let (first, second) = (insert(10), insert(20));
        assert_eq!(regions.find(number(first), 2, 8).unwrap().len(), 8);
        assert_eq!(regions.find(number(first), 2, 9).unwrap_err(), Refusal::Outside);
        assert_eq!(regions.find(number(second), u64::MAX, 1).unwrap_err(), Refusal::Outside);
        regions.remove(first.0, first.1);
        assert_eq!(regions.find(number(first), 0, 1).unwrap_err(), Refusal::Stale);
        let again = insert(30);
        assert_eq!(again.0, first.0, "the place is used again");
        assert_eq!(regions.find(number(first), 0, 1).unwrap_err(), Refusal::Stale);
        assert_eq!(regions.find(number(again), 0, 30).unwrap().len(), 30);
        regions.remove(first.0, first.1);
        assert!(
            regions.find(number(again), 0, 30).is_ok(),
            "a registration that has ended ends no other"
        );
        assert_eq!(regions.find(77, 0, 0).unwrap_err(), Refusal::Stale);
    }

    #[test]
    fn what_reaches_into_a_range_is_withdrawn_and_nothing_else() {
        let regions = Regions::new();
        let whole = Region::host(100);
        let parts =
            [(0, 10), (10, 10), (20, 10)].map(|(at, len)| whole.subregion(at, len).unwrap());
        let numbers = parts.map(|part| {
            let (index, generation, keys) = regions.insert(part, None).unwrap();
            keys.add("transport", Exported::new(WireKey(vec![1]), ()));
            (number((index, generation)), keys)
        });
        let stand = || numbers.each_ref().map(|(number, _)| regions.find(*number, 0, 1).is_ok());
        assert_eq!(regions.withdraw(&(whole.addr() + 30..whole.addr() + 99)).0, 0);
        assert_eq!(
            regions.withdraw(&(whole.addr() + 5..whole.addr() + 5)).0,
            0,
            "a range of nothing"
        );
        assert_eq!(regions.withdraw(&(whole.addr() + 9..whole.addr() + 11)).0, 2);
        assert_eq!(stand(), [false, false, true]);
        assert_eq!(numbers.each_ref().map(|(_, keys)| keys.named().len()), [0, 0, 1]);
        numbers[0].1.add("late", Exported::new(WireKey(vec![2]), ()));
        assert!(numbers[0].1.named().is_empty(), "what comes too late ends at once");
        assert_eq!(regions.withdraw(&(0..usize::MAX)).0, 1);
        assert_eq!(stand(), [false; 3]);
        let mut again = [(); 4].map(|()| regions.insert(Region::host(1), None).unwrap().0);
        again.sort_unstable();
        assert_eq!(again, [0, 1, 2, 3], "places are used again");
    }
}
