//! The regions of this rank, by numbers that other ranks send.

use super::{Region, RegionSlice};
use crate::error::RegisterError;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Regions that a rank can have registered.
const LIMIT: usize = 1 << 20;

/// The table. A number carries a generation: one that is late or forged finds nothing.
#[derive(Default)]
pub(crate) struct Regions {
    slots: Mutex<Vec<Slot>>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    region: Option<Region>,
}

/// Why another rank's operation is not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// There is no such region, or not any more.
    Stale,
    /// It reaches beyond the region.
    Outside,
}

impl Regions {
    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, region: Region) -> Result<(u32, u32), RegisterError> {
        let mut slots = self.slots();
        let at = slots.iter().position(|slot| slot.region.is_none()).unwrap_or(slots.len());
        let index = u32::try_from(at).ok().filter(|_| at < LIMIT).ok_or(RegisterError::TooMany(LIMIT))?;
        if at == slots.len() {
            slots.push(Slot::default());
        }
        let slot = &mut slots[at];
        slot.generation = slot.generation.wrapping_add(1);
        slot.region = Some(region);
        Ok((index, slot.generation))
    }

    pub(super) fn remove(&self, index: u32, generation: u32) {
        let mut slots = self.slots();
        if let Some(slot) = slots.get_mut(index as usize).filter(|slot| slot.generation == generation) {
            slot.region = None;
        }
    }

    /// A part of a region, by what another rank calls it.
    pub(crate) fn find(&self, number: u64, offset: u64, len: u64) -> Result<RegionSlice, Refusal> {
        let (index, generation) = (number as u32, (number >> 32) as u32);
        let slots = self.slots();
        let slot = slots.get(index as usize).filter(|slot| slot.generation == generation);
        let region = slot.and_then(|slot| slot.region.as_ref()).ok_or(Refusal::Stale)?;
        let fits = |number: u64| usize::try_from(number).ok();
        fits(offset)
            .zip(fits(len))
            .and_then(|(offset, len)| region.slice(offset, len))
            .ok_or(Refusal::Outside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_finds_its_region_and_no_other() {
        let regions = Regions::default();
        let number = |(index, generation): (u32, u32)| u64::from(generation) << 32 | u64::from(index);
        let first = regions.insert(Region::host(10)).unwrap();
        let second = regions.insert(Region::host(20)).unwrap();
        assert_eq!(regions.find(number(first), 2, 8).unwrap().len(), 8);
        assert_eq!(regions.find(number(first), 2, 9).unwrap_err(), Refusal::Outside);
        assert_eq!(regions.find(number(second), u64::MAX, 1).unwrap_err(), Refusal::Outside);
        regions.remove(first.0, first.1);
        assert_eq!(regions.find(number(first), 0, 1).unwrap_err(), Refusal::Stale);
        let again = regions.insert(Region::host(30)).unwrap();
        assert_eq!(again.0, first.0, "the place is used again");
        assert_eq!(regions.find(number(first), 0, 1).unwrap_err(), Refusal::Stale);
        assert_eq!(regions.find(number(again), 0, 30).unwrap().len(), 30);
        regions.remove(first.0, first.1);
        assert!(regions.find(number(again), 0, 30).is_ok(), "a registration that is over ends no other");
        assert_eq!(regions.find(77, 0, 0).unwrap_err(), Refusal::Stale);
    }
}
