//! The CPU of a rank.

use clap::ValueEnum;
use rustix::thread::CpuSet;

/// Placement of ranks on CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bind {
    /// Rank i on the i-th CPU that the launcher may use, round robin when there are fewer.
    Core,
    /// No binding: the kernel places the rank.
    None,
}

/// Returns a set with the one CPU that this rank is pinned to.
pub(super) fn cpu_of(rank: u32, allowed: &[usize]) -> Option<CpuSet> {
    let turn = (rank as usize).checked_rem(allowed.len())?;
    let mut set = CpuSet::new();
    set.set(allowed[turn]);
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_the_allowed_cpus_in_turn() {
        let allowed = [2, 5, 6];
        for (rank, cpu) in [(0, 2), (1, 5), (2, 6), (3, 2), (4, 5)] {
            let set = cpu_of(rank, &allowed).unwrap();
            assert_eq!(set.count(), 1);
            assert!(set.is_set(cpu), "rank {rank}");
        }
        assert!(cpu_of(0, &[]).is_none());
    }
}
