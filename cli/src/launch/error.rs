//! Errors before a job runs.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// An error of the start of a job.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum LaunchError {
    /// There is no such program.
    #[error("no program {program:?}: looked for {looked}{hint}")]
    NotFound {
        /// As the user named it.
        program: PathBuf,
        /// Places that were searched, as readable text.
        looked: String,
        /// A remedy, or an empty string.
        hint: String,
    },

    /// There is such a file, but it cannot be run.
    #[error("{path:?} is not an executable file; make it one (`chmod +x`) or name another program")]
    NotExecutable {
        /// The file.
        path: PathBuf,
    },

    /// The job needs more descriptors than this user may have.
    #[error(
        "{ranks} ranks need about {needed} open files and the hard limit is {limit}; raise it \
         (`ulimit -Hn`) or start fewer ranks"
    )]
    TooManyFiles {
        /// The ranks asked for.
        ranks: u32,
        /// The descriptors they need.
        needed: u64,
        /// The hard limit.
        limit: u64,
    },

    /// The job has no ranks, or too many.
    #[error("{ranks} ranks: a job has 1 to {limit}")]
    Ranks {
        /// The ranks asked for.
        ranks: u32,
        /// The most there may be.
        limit: u32,
    },

    /// The system refused a call.
    #[error("{doing} failed: {source}; check the limits on processes and open files (`ulimit -a`)")]
    Os {
        /// The action that failed.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl LaunchError {
    /// The launcher's exit status: that of a shell where a shell has one.
    pub(crate) fn exit_status(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotExecutable { .. } => 126,
            Self::Ranks { .. } => 2,
            Self::TooManyFiles { .. } | Self::Os { .. } => 1,
        }
    }

    /// Makes an error of the system's refusal, with what was being done.
    pub(super) fn os<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Os { doing, source: source.into() }
    }
}
