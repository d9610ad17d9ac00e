//! Ranks of a command that no launcher started: the command starts itself again as a job.

use crate::launch::{Job, LaunchError, run_job};
use carrack::bootstrap::launchers::LAUNCHERS;
use carrack::bootstrap::protocol::RANK_VARIABLE;
use carrack::bootstrap::tcp::variables::{RANK, WORLD_SIZE};
use carrack::bootstrap::{BootstrapError, Source};
use carrack::settings::Settings;
use carrack::{CollectiveError, Runtime, StartError};
use rustix::thread::{CpuSet, sched_getaffinity};
use std::ffi::OsString;

/// Returns `true` if a launcher started this process as a rank.
///
/// # Errors
/// The errors of [`Source::find`].
pub(crate) fn is_rank(settings: &Settings) -> Result<bool, StartError> {
    Ok(Source::find(settings)? != Source::Alone)
}

/// Returns `true` if the runtime did not start because a variable is wrong.
pub(crate) fn is_usage(error: &StartError) -> bool {
    use BootstrapError::{Environment, NoSecret, Variable};
    matches!(
        error,
        StartError::Settings(_)
            | StartError::Bootstrap(Environment { .. } | NoSecret | Variable { .. })
    )
}

/// Returns the text of the rank that a launcher gave to this process.
pub(crate) fn rank() -> Option<String> {
    let text = |name: &str| std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
    let torchruns = || text(RANK).filter(|_| text(WORLD_SIZE).is_some());
    let others = || LAUNCHERS.iter().find(|one| one.is_marked(text)).and_then(|one| text(one.rank));
    text(RANK_VARIABLE).or_else(torchruns).or_else(others)
}

/// Runs this command line again as a job of `ranks` ranks with the variables of `env`, and returns
/// its exit status.
pub(crate) fn run_ranks(ranks: u32, env: Vec<(OsString, OsString)>) -> Result<u8, LaunchError> {
    run_job(&Job { env, ..Job::of_this_program(std::env::args_os().skip(1), ranks) })
}

/// Gathers the texts of all ranks, in the order of ranks.
pub(crate) fn gather(runtime: &Runtime, text: &str) -> Result<Vec<String>, Box<CollectiveError>> {
    let texts = runtime.allgatherv(text.as_bytes())?;
    Ok(texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
}

/// Returns the CPUs that this thread may use, in order; none when the kernel does not say.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// Formats CPU numbers as Linux lists them: `0-3,8`.
pub(crate) fn cpu_list(cpus: &[usize]) -> String {
    let runs = cpus.chunk_by(|one, next| one + 1 == *next);
    let shown = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        [one] => one.to_string(),
        [] => String::new(),
    });
    shown.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_listed_as_linux_lists_them() {
        assert_eq!(cpu_list(&[]), "");
        assert_eq!(cpu_list(&[3]), "3");
        assert_eq!(cpu_list(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
    }
}
