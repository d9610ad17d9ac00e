//! Where a process finds its job.
//!
//! Variables of several launchers at once are normal: within a Slurm job, a launcher that Slurm
//! started has left its own, and what it started in turn inherits both. So the order counts
//! ([`Source::find`]), and what only processes of a launcher itself can have: an open socket, a
//! server that answers.

#![forbid(unsafe_code)]

use std::env;
use std::fmt;

use carrack_transports::net::adopt;

use super::error::BootstrapError;
use super::launchers::{self, LAUNCHERS, Launcher};
use super::pmi::{self, Pmi};
use super::pmix::{self, Pmix};
use super::protocol::{FD_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE};
use super::tcp::variables::{RANK, RUN_ID, WORLD_SIZE};
use super::{Alone, Bootstrap, FromEnvironment, FromLauncher, exchange, slurm};
use crate::settings::{BootstrapChoice, Settings};

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
    /// Returns the source that this process is to use: the first that is there of `carrack run`,
    /// torchrun, PMIx, PMI, torchrun's variables of another launcher, Slurm's variables. A source
    /// that `CARRACK_BOOTSTRAP` demands comes before all but the first.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::OtherLauncher`] when a launcher started this process as one of several,
    /// and none of the sources is there; [`BootstrapError::NotThere`] when the source that
    /// `CARRACK_BOOTSTRAP` demands is not.
    pub fn find(settings: &Settings) -> Result<Self, BootstrapError> {
        Self::choose(settings.bootstrap(), &variable, adopt::pmi().is_ok())
    }

    fn choose(
        choice: BootstrapChoice,
        variable: &impl Fn(&str) -> Option<String>,
        has_pmi_socket: bool,
    ) -> Result<Self, BootstrapError> {
        let has = |name: &str| variable(name).is_some();
        let has_torchruns = has(RANK) || has(WORLD_SIZE);
        let pmix = || has(pmix::NAMESPACE).then_some(Self::Pmix);
        let pmi = || (has_pmi_socket || has(pmi::PORT)).then_some(Self::Pmi);
        let slurm = || has(slurm::SIZE).then_some(Self::Slurm);
        let auto = || {
            let torchrun = || has_torchruns.then_some(Self::Torchrun);
            let agents = || torchrun().filter(|_| has(RUN_ID));
            // The variables alone do not tell a task from what a launcher within Slurm has started.
            let is_other = |one: &Launcher| one.mark != slurm::SIZE && one.is_marked(variable);
            let slurm = || slurm().filter(|_| !LAUNCHERS.iter().any(is_other));
            agents().or_else(pmix).or_else(pmi).or_else(torchrun).or_else(slurm)
        };
        let (found, marks) = match choice {
            _ if [FD_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE].iter().any(|name| has(name)) => {
                return Ok(Self::Carrack);
            }
            BootstrapChoice::Auto => (auto(), ""),
            BootstrapChoice::Alone if has_torchruns => (Some(Self::Torchrun), ""),
            BootstrapChoice::Alone => return Ok(Self::Alone),
            BootstrapChoice::Carrack => (None, FD_VARIABLE),
            BootstrapChoice::Torchrun => (has_torchruns.then_some(Self::Torchrun), RANK),
            BootstrapChoice::Pmi => (pmi(), "PMI_FD with an open socket, or PMI_PORT"),
            BootstrapChoice::Pmix => (pmix(), pmix::NAMESPACE),
            BootstrapChoice::Slurm => (slurm(), slurm::SIZE),
        };
        let size = match found {
            Some(Self::Pmi) => variable(pmi::SIZE),
            Some(Self::Slurm) => variable(slurm::SIZE),
            _ => None,
        };
        match found {
            Some(_) if size.is_some_and(|size| size == "1") => Ok(Self::Alone),
            Some(source) => Ok(source),
            None if choice == BootstrapChoice::Auto => {
                launchers::refuse(variable).map(|()| Self::Alone)
            }
            None => Err(BootstrapError::NotThere { choice: choice.to_string(), marks }),
        }
    }

    /// Joins the job.
    ///
    /// # Errors
    ///
    /// Those of [`FromLauncher::from_env`], [`FromEnvironment::from_env`] and [`Alone::new`];
    /// [`BootstrapError::Exchange`] and [`BootstrapError::Told`] of the other launchers.
    pub fn join(self, settings: &Settings) -> Result<Box<dyn Bootstrap>, BootstrapError> {
        Ok(match self {
            Self::Carrack => match FromLauncher::from_env()? {
                Some(rank) => Box::new(rank),
                None => Box::new(Alone::new()?),
            },
            Self::Torchrun => match FromEnvironment::from_env(settings)? {
                Some(rank) => Box::new(rank),
                None => Box::new(Alone::new()?),
            },
            Self::Pmix => {
                exchange::only_once(pmix::PMIX)?;
                let pmix = Box::new(Pmix::connect(variable, settings)?);
                Box::new(exchange::enter(pmix::PMIX, pmix, settings)?)
            }
            Self::Pmi => {
                exchange::only_once(pmi::PMI)?;
                let pmi = Box::new(Pmi::connect(variable, settings)?);
                Box::new(exchange::enter(pmi::PMI, pmi, settings)?)
            }
            Self::Slurm => {
                Box::new(FromEnvironment::join(&slurm::invitation(variable, settings)?)?)
            }
            Self::Alone => Box::new(Alone::new()?),
        })
    }
}

fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}
