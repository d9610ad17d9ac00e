//! What a process has of the system's and of a driver's: for tests that nothing is lost on the way.

use super::gpu_ranks::{Gpus, are_real};
use super::ranks::listing;

/// What a rank has.
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

    /// Whether there is no more of anything than before. The kernel joins mappings that are
    /// neighbours, and splits them; a real driver maps for itself, too.
    pub fn within(&self, other: &Self) -> bool {
        let slack = if are_real() { 32 } else { 8 };
        self.descriptors <= other.descriptors && self.mappings <= other.mappings + slack
    }
}
