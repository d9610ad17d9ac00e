//! Resources that a process has of the system and of a driver, for tests of leaks.

use super::gpu_ranks::{Gpus, are_real};
use super::ranks::listing;

/// Resources of a rank.
#[derive(Debug)]
pub struct Possessions {
    pub descriptors: usize,
    pub mappings: usize,
    /// Allocations and openings of a simulated driver.
    pub live: Option<[u64; 3]>,
}

impl Possessions {
    pub fn of_this_process(gpus: &Gpus) -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let live = gpus.fake.as_ref().map(|fake| {
            let counters = fake.counters();
            [
                counters.allocs - counters.frees,
                counters.opens - counters.closes,
                counters.maps - counters.unmaps,
            ]
        });
        Self { descriptors: listing("/proc/self/fd").len(), mappings: maps.lines().count(), live }
    }

    /// Returns `true` if no count has grown. The kernel joins and splits neighbouring mappings,
    /// and a real driver makes its own, so the number of mappings has some slack.
    pub fn within(&self, other: &Self) -> bool {
        let slack = if are_real() { 32 } else { 8 };
        assert_eq!(self.live.is_some(), other.live.is_some(), "the driver is counted or not");
        let mut live = self.live.iter().flatten().zip(other.live.iter().flatten());
        self.descriptors <= other.descriptors
            && self.mappings <= other.mappings + slack
            && live.all(|(now, before)| now <= before)
    }
}
