//! The CPU of each thread of a point, and its way of waiting.

use super::error::PerfError;
use super::seat::Pace;
use rustix::thread::{CpuSet, sched_setaffinity};

/// CPUs of each rank.
pub(super) type Cpus = Vec<Vec<usize>>;

/// Returns a CPU for each of `threads` threads of all ranks, none of them twice; `None` when there
/// are too few. As long as there are enough, they are on cores of their own. Two threads that share
/// a core take turns, also when one of them only waits.
pub(super) fn cores(cpus: &Cpus, threads: usize) -> Option<Cpus> {
    spread(cpus, threads, core_of)
}

/// Returns the core that a CPU is a thread of, by its first thread; the CPU itself where the kernel
/// does not say.
fn core_of(cpu: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let siblings = std::fs::read_to_string(path).unwrap_or_default();
    siblings.split([',', '-', '\n']).next().and_then(|first| first.parse().ok()).unwrap_or(cpu)
}

fn spread(cpus: &Cpus, threads: usize, core_of: impl Fn(usize) -> usize) -> Option<Cpus> {
    let mut cores: Cpus = vec![Vec::new(); cpus.len()];
    let mut taken = Vec::new();
    // A rank with less choice goes before others.
    let mut order: Vec<_> = (0..cpus.len()).collect();
    order.sort_by_key(|&rank| cpus[rank].len());
    for rank in order {
        for _ in 0..threads {
            let free = || cpus[rank].iter().copied().filter(|cpu| !taken.contains(cpu));
            let alone =
                free().find(|&cpu| taken.iter().all(|&other| core_of(other) != core_of(cpu)));
            let cpu = alone.or_else(|| free().next())?;
            taken.push(cpu);
            cores[rank].push(cpu);
        }
    }
    Some(cores)
}

/// Returns the way of waiting: threads poll when each can have a core of its own.
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

    fn cores(cpus: &Cpus, threads: usize) -> Option<Cpus> {
        spread(cpus, threads, |cpu| cpu)
    }

    #[test]
    fn threads_of_one_core_are_taken_only_when_there_are_no_other_cores() {
        // Each core has two threads, side by side.
        let pairs = |cpus: &Cpus, threads| spread(cpus, threads, |cpu| cpu / 2);
        let all = vec![vec![0, 1, 2, 3]; 2];
        assert_eq!(pairs(&all, 1), Some(vec![vec![0], vec![2]]));
        assert_eq!(pairs(&all, 2), Some(vec![vec![0, 2], vec![1, 3]]));
        assert_eq!(pairs(&vec![vec![0, 1]; 2], 1), Some(vec![vec![0], vec![1]]));
        assert!(core_of(usize::MAX) == usize::MAX, "a CPU that no machine has");
    }

    #[test]
    fn ranks_that_may_run_anywhere_share_the_cpus_out() {
        let cpus = vec![vec![0, 1, 2, 3]; 2];
        assert_eq!(cores(&cpus, 1), Some(vec![vec![0], vec![1]]));
        assert_eq!(cores(&cpus, 2), Some(vec![vec![0, 1], vec![2, 3]]));
        assert_eq!(cores(&cpus, 3), None);
        assert_eq!(
            cores(&vec![vec![0, 1, 2, 3]; 4], 1),
            Some(vec![vec![0], vec![1], vec![2], vec![3]])
        );
    }

    #[test]
    fn a_rank_that_was_pinned_by_its_launcher_stays_there() {
        assert_eq!(cores(&vec![vec![0, 1], vec![0]], 1), Some(vec![vec![1], vec![0]]));
        assert_eq!(cores(&vec![vec![5], vec![7]], 1), Some(vec![vec![5], vec![7]]));
        assert_eq!(cores(&vec![vec![5], vec![5]], 1), None);
        assert_eq!(cores(&vec![vec![5], vec![7]], 2), None);
    }
}
