//! Which CPU each thread of a point runs on, and how it waits there.

use super::error::PerfError;
use super::seat::Pace;
use rustix::thread::{CpuSet, sched_setaffinity};

/// CPUs of each rank.
pub(super) type Cpus = Vec<Vec<usize>>;

/// A CPU for each of `threads` threads of all ranks, none of them twice; `None` when there are too few.
pub(super) fn cores(cpus: &Cpus, threads: usize) -> Option<Cpus> {
    let mut cores: Cpus = vec![Vec::new(); cpus.len()];
    // A rank with less choice goes before others.
    let mut order: Vec<_> = (0..cpus.len()).collect();
    order.sort_by_key(|&rank| cpus[rank].len());
    for rank in order {
        let free = cpus[rank].iter().filter(|cpu| !cores.iter().any(|taken| taken.contains(cpu)));
        let taken = free.copied().take(threads).collect();
        cores[rank] = taken;
    }
    cores.iter().all(|cores| cores.len() == threads).then_some(cores)
}

/// How threads wait: they poll when each can have a core of its own.
pub(super) fn pace(cpus: &Cpus, threads: usize) -> Pace {
    if cores(cpus, threads).is_some() { Pace::Spin } else { Pace::Sleep }
}

/// Lets the calling thread run on these CPUs only.
pub(super) fn run_on(cpus: &[usize]) -> Result<(), PerfError> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu);
    }
    sched_setaffinity(None, &set).map_err(PerfError::system("pinning a thread (sched_setaffinity)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_may_run_anywhere_share_the_cpus_out() {
        let cpus = vec![vec![0, 1, 2, 3]; 2];
        assert_eq!(cores(&cpus, 1), Some(vec![vec![0], vec![1]]));
        assert_eq!(cores(&cpus, 2), Some(vec![vec![0, 1], vec![2, 3]]));
        assert_eq!(cores(&cpus, 3), None);
        assert_eq!(cores(&vec![vec![0, 1, 2, 3]; 4], 1), Some(vec![vec![0], vec![1], vec![2], vec![3]]));
    }

    #[test]
    fn a_rank_that_was_pinned_by_its_launcher_stays_there() {
        assert_eq!(cores(&vec![vec![0, 1], vec![0]], 1), Some(vec![vec![1], vec![0]]));
        assert_eq!(cores(&vec![vec![5], vec![7]], 1), Some(vec![vec![5], vec![7]]));
        assert_eq!(cores(&vec![vec![5], vec![5]], 1), None);
        assert_eq!(cores(&vec![vec![5], vec![7]], 2), None);
    }
}
