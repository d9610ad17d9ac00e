//! The two cores on which all sides are measured.

use std::ffi::OsStr;
use std::fs;
use std::process::Command;
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;

use crate::error::TaskError;

/// Two CPUs, by the numbers that the kernel gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Cores(pub(super) usize, pub(super) usize);

impl Cores {
    /// The first two that this process may use and that are not threads of one core.
    pub(super) fn choose() -> Result<Self, TaskError> {
        let allowed = sched_getaffinity(None).map_err(|errno| TaskError::Start {
            program: "sched_getaffinity".into(),
            source: errno.into(),
        })?;
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
        let first = cpus.next().unwrap_or_default();
        let siblings = siblings(first);
        match cpus.find(|cpu| !siblings.contains(cpu)) {
            Some(second) => Ok(Self(first, second)),
            None => Err(TaskError::Missing {
                what: "a second core".into(),
                remedy: "two sides that share one core measure the scheduler; run this on two cores, or name two \
                         threads of one with --cores",
            }),
        }
    }

    /// A command that runs `program` on the first of them, the second, or both.
    pub(super) fn pin(cpus: &[usize], program: impl AsRef<OsStr>) -> Command {
        let list: Vec<String> = cpus.iter().map(ToString::to_string).collect();
        let mut command = Command::new("taskset");
        command.args(["-c", &list.join(",")]).arg(program);
        command
    }
}

impl FromStr for Cores {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cpus: Option<Vec<usize>> = text.split(',').map(|cpu| cpu.trim().parse().ok()).collect();
        match cpus.as_deref() {
            Some([one, other]) if one != other => Ok(Self(*one, *other)),
            _ => Err("expected two different CPUs, for example 0,1".into()),
        }
    }
}

/// The CPUs that are threads of the same core; only itself where the kernel does not say.
fn siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    parse_list(&fs::read_to_string(path).unwrap_or_default())
}

/// Reads the kernel's lists, such as `0-3,8`; what cannot be read is left out.
fn parse_list(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_ranges_and_numbers() {
        assert_eq!(parse_list("0-2,8\n"), [0, 1, 2, 8]);
        assert_eq!(parse_list("5"), [5]);
        assert_eq!(parse_list(""), [0; 0]);
    }

    #[test]
    fn two_different_cpus_are_two_cores_and_nothing_else_is() {
        assert_eq!("2, 5".parse(), Ok(Cores(2, 5)));
        for wrong in ["", "1", "1,1", "1,2,3", "a,b"] {
            assert!(wrong.parse::<Cores>().is_err(), "{wrong}");
        }
    }
}
