//! Which CPU each thread of a point runs on, and how it waits there.

use super::error::PerfError;
use super::seat::Pace;
use rustix::thread::{CpuSet, sched_setaffinity};

/// The CPUs that rank 0 and rank 1 may use.
pub(super) type Cpus = [Vec<usize>; 2];

/// A CPU for each of `threads` threads of both ranks, none of them twice; `None` when there are too few.
pub(super) fn cores(cpus: &Cpus, threads: usize) -> Option<Cpus> {
    let mut cores: Cpus = [Vec::new(), Vec::new()];
    // The rank with less choice goes first.
    let order = if cpus[1].len() < cpus[0].len() { [1, 0] } else { [0, 1] };
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
        let cpus = [vec![0, 1, 2, 3], vec![0, 1, 2, 3]];
        assert_eq!(cores(&cpus, 1), Some([vec![0], vec![1]]));
        assert_eq!(cores(&cpus, 2), Some([vec![0, 1], vec![2, 3]]));
        assert_eq!(cores(&cpus, 3), None);
    }

    #[test]
    fn a_rank_that_was_pinned_by_its_launcher_stays_there() {
        assert_eq!(cores(&[vec![0, 1], vec![0]], 1), Some([vec![1], vec![0]]));
        assert_eq!(cores(&[vec![5], vec![7]], 1), Some([vec![5], vec![7]]));
        assert_eq!(cores(&[vec![5], vec![5]], 1), None);
        assert_eq!(cores(&[vec![5], vec![7]], 2), None);
    }
}
