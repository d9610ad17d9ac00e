//! Errors before a job runs.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::USAGE;

/// An error of the start of a job.
#[derive(Debug, Error)]
pub(crate) enum LaunchError {
    /// `looked`: places that were searched. `hint`: a remedy.
    #[error("no program {program:?}: looked for {looked}{hint}")]
    NotFound { program: PathBuf, looked: String, hint: String },
    #[error("{path:?} is not an executable file; make it one (`chmod +x`) or name another program")]
    NotExecutable { path: PathBuf },
    /// The job needs more descriptors than this user may have.
    #[error(
        "{ranks} ranks need about {needed} open files and the hard limit is {limit}; raise it \
         (`ulimit -Hn`) or start fewer ranks"
    )]
    TooManyFiles { ranks: u32, needed: u64, limit: u64 },
    #[error("{0}")]
    Nodes(String),
    /// End of the launcher. The error ends a keeper, and is never printed.
    #[error("the launcher is gone")]
    LauncherGone,
    #[error("{doing} failed: {source}; check the limits on processes and open files (`ulimit -a`)")]
    Os { doing: &'static str, source: io::Error },
}

impl LaunchError {
    /// Returns the launcher's exit status: that of a shell where a shell has one.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotExecutable { .. } => 126,
            Self::Nodes(_) => USAGE,
            Self::TooManyFiles { .. } | Self::Os { .. } | Self::LauncherGone => 1,
        }
    }
}

/// Conversion of a refused system call to an error that says what was being done.
pub(super) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, LaunchError>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, doing: &'static str) -> Result<T, LaunchError> {
        self.map_err(|source| LaunchError::Os { doing, source: source.into() })
    }
}
