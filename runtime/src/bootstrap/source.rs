//! The source in which a process finds its job.
//!
//! Variables of several launchers at once are normal: what a launcher within a Slurm job starts has
//! those of both. So the order counts ([`Source::find`]), and what only a launcher's own processes
//! have: an open socket, a server that answers.

#![forbid(unsafe_code)]

use std::env;
use std::fmt;

use carrack_transports::net::adopt;

use super::error::BootstrapError;
use super::launchers::{self, LAUNCHERS, Launcher};
use super::protocol::{FD_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE};
use super::tcp::variables::{RANK, RUN_ID, WORLD_SIZE};
use super::{Bootstrap, FromEnvironment, FromLauncher, InProcess, exchange, pmi, pmix, slurm};
use crate::settings::{BootstrapChoice, Settings};

/// Variables by which a process is found to be a rank. Without them, and without those of
/// `carrack run`, it is a job of one.
pub const VARIABLES: [&str; 7] =
    [RANK, WORLD_SIZE, RUN_ID, pmix::NAMESPACE, adopt::PMI, pmi::PORT, slurm::SIZE];

/// A place where a process can find its job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The socket of `carrack run`.
    Carrack,
    /// Torchrun's variables.
    Torchrun,
    /// A PMIx server.
    Pmix,
    /// A PMI-1 server.
    Pmi,
    /// The variables of a task of Slurm's `srun`.
    Slurm,
    /// None: the process is a job of one.
    Alone,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Carrack => "carrack run",
            Self::Torchrun => "torchrun's variables",
            Self::Pmix => pmix::PMIX,
            Self::Pmi => pmi::PMI,
            Self::Slurm => "Slurm's variables",
            Self::Alone => "none: a job of one",
        })
    }
}

impl Source {
    /// Returns the source that this process uses, which is the first that is there. The order is
    /// `carrack run`, torchrun, PMIx, PMI, torchrun's variables of another launcher, Slurm's
    /// variables. A source that `CARRACK_BOOTSTRAP` demands comes before all but the first.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::OtherLauncher`] when a launcher started this process as one of several,
    /// and none of the sources is there; [`BootstrapError::Exchange`] when one is demanded in vain.
    pub fn find(settings: &Settings) -> Result<Self, BootstrapError> {
        Self::choose(settings.bootstrap(), &variable, adopt::has_pmi())
    }

    fn choose(
        choice: BootstrapChoice,
        variable: &impl Fn(&str) -> Option<String>,
        has_pmi_socket: bool,
    ) -> Result<Self, BootstrapError> {
        let has = |name: &str| variable(name).is_some();
        let torchrun = || (has(RANK) || has(WORLD_SIZE)).then_some(Self::Torchrun);
        let pmix = || has(pmix::NAMESPACE).then_some(Self::Pmix);
        let pmi = || (has_pmi_socket || has(pmi::PORT)).then_some(Self::Pmi);
        let slurm = || has(slurm::SIZE).then_some(Self::Slurm);
        let auto = || {
            let agents = || torchrun().filter(|_| has(RUN_ID));
            // A launcher within Slurm leaves Slurm's variables to its processes.
            let is_other = |one: &Launcher| one.mark != slurm::SIZE && one.is_marked(variable);
            let slurm = || slurm().filter(|_| !LAUNCHERS.iter().any(is_other));
            agents().or_else(pmix).or_else(pmi).or_else(torchrun).or_else(slurm)
        };
        let (found, launcher, marks) = match choice {
            _ if [FD_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE].iter().any(|name| has(name)) => {
                return Ok(Self::Carrack);
            }
            BootstrapChoice::Auto => (auto(), "", ""),
            BootstrapChoice::Alone => return Ok(Self::Alone),
            BootstrapChoice::Carrack => (None, "carrack run", FD_VARIABLE),
            BootstrapChoice::Torchrun => (torchrun(), "torchrun", RANK),
            BootstrapChoice::Pmi => (pmi(), pmi::PMI, "PMI_FD with an open socket, or PMI_PORT"),
            BootstrapChoice::Pmix => (pmix(), pmix::PMIX, pmix::NAMESPACE),
            BootstrapChoice::Slurm => (slurm(), slurm::SLURM, slurm::SIZE),
        };
        let is_one = |size: &str| variable(size).is_some_and(|size| size == "1");
        match found {
            Some(Self::Pmi) if is_one(pmi::SIZE) => Ok(Self::Alone),
            Some(Self::Slurm) if is_one(slurm::SIZE) => Ok(Self::Alone),
            Some(source) => Ok(source),
            None if choice == BootstrapChoice::Auto => {
                launchers::refuse(variable).map(|()| Self::Alone)
            }
            None => {
                let why = format!(
                    "CARRACK_BOOTSTRAP is {choice}, and this process does not have {marks}"
                );
                Err(BootstrapError::Exchange { launcher, why })
            }
        }
    }

    /// Joins the job.
    ///
    /// # Errors
    ///
    /// The errors of [`FromLauncher::from_env`], [`FromEnvironment::from_env`],
    /// [`InProcess::alone`]; [`BootstrapError::Exchange`] of the other launchers.
    pub fn join(self, settings: &Settings) -> Result<Box<dyn Bootstrap>, BootstrapError> {
        match self {
            Self::Carrack => boxed(FromLauncher::from_env()?),
            Self::Torchrun => boxed(FromEnvironment::from_env(settings)?),
            Self::Pmix => boxed(Some(exchange::enter(pmix::failed, pmix::connect, settings)?)),
            Self::Pmi => boxed(Some(exchange::enter(pmi::failed, pmi::connect, settings)?)),
            Self::Slurm => {
                boxed(Some(FromEnvironment::join(&slurm::invitation(variable, settings)?)?))
            }
            Self::Alone => boxed(None::<InProcess>),
        }
    }
}

/// Returns this rank, or a job of one.
fn boxed<B: Bootstrap + 'static>(rank: Option<B>) -> Result<Box<dyn Bootstrap>, BootstrapError> {
    Ok(match rank {
        Some(rank) => Box::new(rank),
        None => Box::new(InProcess::alone()?),
    })
}

/// Returns a variable of the environment.
pub(super) fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use BootstrapChoice::Auto;

    type Variables<'a> = &'a [(&'a str, &'a str)];

    const TORCHRUN: Variables<'_> = &[(RANK, "1"), (WORLD_SIZE, "2")];
    const AGENT: Variables<'_> = &[(RUN_ID, "x")];
    const PMIX: Variables<'_> = &[(pmix::NAMESPACE, "job"), ("PMIX_RANK", "1")];
    const HYDRA: Variables<'_> =
        &[("PMI_FD", "7"), ("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1")];
    const PMI_PORT: Variables<'_> = &[(pmi::PORT, "host:1"), ("PMI_ID", "1")];
    const TASK: Variables<'_> = &[(slurm::SIZE, "2"), ("SLURM_PROCID", "1")];

    fn chosen(
        choice: BootstrapChoice,
        variables: &[Variables<'_>],
        has_pmi_socket: bool,
    ) -> Result<Source, String> {
        let variables = variables.concat();
        let variable = |wanted: &str| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        };
        Source::choose(choice, &variable, has_pmi_socket).map_err(|error| error.to_string())
    }

    #[test]
    fn of_several_launchers_the_innermost_one_is_chosen() {
        let open = |variables: &[Variables<'_>]| chosen(Auto, variables, true);
        let none = |variables: &[Variables<'_>]| chosen(Auto, variables, false);
        let ours = &[(FD_VARIABLE, "3")][..];
        assert_eq!(open(&[ours, TORCHRUN, AGENT, PMIX, HYDRA, TASK]), Ok(Source::Carrack));
        // The ranks of an agent inherit what `srun --mpi=...` has told it.
        assert_eq!(open(&[TORCHRUN, AGENT, PMIX, HYDRA, TASK]), Ok(Source::Torchrun));
        assert_eq!(open(&[TORCHRUN, PMIX, TASK]), Ok(Source::Pmix));
        assert_eq!(open(&[TORCHRUN, HYDRA, TASK]), Ok(Source::Pmi));
        assert_eq!(none(&[TORCHRUN, PMI_PORT, TASK]), Ok(Source::Pmi));
        assert_eq!(none(&[TORCHRUN, HYDRA, TASK]), Ok(Source::Torchrun), "PMI_FD is closed");
        assert_eq!(none(&[TASK]), Ok(Source::Slurm));
        assert_eq!(none(&[AGENT]), Ok(Source::Alone), "an agent itself is no rank");
        assert_eq!(none(&[]), Ok(Source::Alone));
    }

    #[test]
    fn a_job_that_is_not_found_is_an_error_and_not_a_job_of_one() {
        for variables in [&[HYDRA][..], &[HYDRA, TASK]] {
            let error = chosen(Auto, variables, false).unwrap_err();
            assert!(error.contains("Hydra") && error.contains("PMI_FD"), "{error}");
        }
        let stale = [TASK, &[("PMI_FD", "7"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")]];
        let error = chosen(Auto, &stale, false).unwrap_err();
        assert!(error.contains("CARRACK_BOOTSTRAP=slurm"), "{error}");
        assert_eq!(chosen(BootstrapChoice::Slurm, &stale, false), Ok(Source::Slurm));
    }

    #[test]
    fn the_only_process_of_a_launcher_is_alone() {
        let hydra = [("PMI_RANK", "0"), (pmi::SIZE, "1"), ("MPI_LOCALRANKID", "0")];
        assert_eq!(chosen(Auto, &[&hydra], true), Ok(Source::Alone));
        assert_eq!(chosen(Auto, &[&hydra], false), Ok(Source::Alone));
        assert_eq!(chosen(Auto, &[&[(slurm::SIZE, "1")]], false), Ok(Source::Alone));
    }

    #[test]
    fn a_source_that_is_demanded_is_taken_or_is_an_error() {
        use BootstrapChoice::{Alone, Carrack, Pmi, Pmix, Slurm, Torchrun};
        let all = [TORCHRUN, AGENT, PMIX, HYDRA, TASK];
        for (choice, source) in [
            (Torchrun, Source::Torchrun),
            (Pmix, Source::Pmix),
            (Pmi, Source::Pmi),
            (Slurm, Source::Slurm),
            (Alone, Source::Alone),
        ] {
            assert_eq!(chosen(choice, &all, true), Ok(source));
        }
        for choice in [Carrack, Torchrun, Pmix, Pmi, Slurm] {
            let error = chosen(choice, &[], false).unwrap_err();
            assert!(error.contains(&format!("CARRACK_BOOTSTRAP is {choice}")), "{error}");
        }
    }
}
