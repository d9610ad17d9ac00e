//! The cores on which all sides are measured.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::process::Command;
use std::str::FromStr;

use fs_err as fs;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;

use crate::error::TaskError;

/// CPUs by the kernel's numbers, two at least. A row takes the first that it needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Cores(Vec<usize>);

impl Cores {
    /// Returns the CPUs that this process may use, one of each core.
    pub(super) fn choose() -> Result<Self, TaskError> {
        let allowed = sched_getaffinity(None).map_err(io::Error::from)?;
        let mut taken = BTreeSet::new();
        let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
        let chosen: Vec<usize> = cpus.filter(|cpu| taken.insert(core(*cpu))).collect();
        if chosen.len() < 2 {
            return Err(TaskError::Missing {
                what: "a second core".into(),
                remedy: "two sides that share one core measure the scheduler; run this on two \
                    cores, or name two threads of one with --cores",
            });
        }
        Ok(Self(chosen))
    }

    /// Returns these, if this process may use them.
    pub(super) fn allowed(self) -> Result<Self, TaskError> {
        let allowed = sched_getaffinity(None).map_err(io::Error::from)?;
        match self.0.iter().find(|cpu| **cpu >= CpuSet::MAX_CPU || !allowed.is_set(**cpu)) {
            None => Ok(self),
            Some(cpu) => Err(TaskError::Missing {
                what: format!("CPU {cpu} of --cores {self}"),
                remedy: "name CPUs that this process may use: `taskset -pc $$` shows them",
            }),
        }
    }

    /// Returns this number of them, or an error that names both numbers.
    pub(super) fn first(&self, count: usize) -> Result<&[usize], String> {
        let there = self.0.len();
        self.0.get(..count).ok_or_else(|| {
            format!("it takes {count} cores, and there are {there}; name more with --cores")
        })
    }

    /// Returns a command that runs `program` on these CPUs.
    pub(super) fn pin(cpus: &[usize], program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("taskset");
        command.args(["-c", &list(cpus)]).arg(program);
        command
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&list(&self.0))
    }
}

fn list(cpus: &[usize]) -> String {
    cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cpus: Option<Vec<usize>> = text.split(',').map(|cpu| cpu.trim().parse().ok()).collect();
        let different = |cpus: &Vec<_>| {
            cpus.len() > 1 && cpus.len() == cpus.iter().collect::<BTreeSet<&usize>>().len()
        };
        let cpus = cpus.filter(different).map(Self);
        cpus.ok_or_else(|| "expected two different CPUs or more, for example 0,1".into())
    }
}

/// Returns the list of a core's threads, which is the same for each of them. Where the kernel does
/// not have it, each CPU is a core.
fn core(cpu: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_cpus_are_cores_and_nothing_else_is() {
        assert_eq!("2, 5".parse(), Ok(Cores(vec![2, 5])));
        assert_eq!("2,5,0,1".parse(), Ok(Cores(vec![2, 5, 0, 1])));
        for wrong in ["", "1", "1,1", "1,2,1", "a,b"] {
            assert!(wrong.parse::<Cores>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_cpu_that_is_not_here_is_an_error_that_names_it() {
        assert!(Cores::choose().is_ok_and(|cores| cores.allowed().is_ok()));
        for far in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU, usize::MAX] {
            let error = Cores(vec![0, far]).allowed().unwrap_err().to_string();
            assert!(error.contains(&format!("CPU {far} of --cores 0,{far}")), "{error}");
        }
    }

    #[test]
    fn a_row_gets_the_first_cores_or_hears_that_there_are_too_few() {
        let cores = Cores(vec![4, 6, 8]);
        assert_eq!(cores.first(2), Ok(&[4, 6][..]));
        assert!(cores.first(4).unwrap_err().contains("takes 4 cores, and there are 3"));
    }
}
