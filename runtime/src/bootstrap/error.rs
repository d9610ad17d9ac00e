//! Errors before ranks know each other.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use rustix::io::Errno;
use thiserror::Error;

use super::protocol::BadFrame;

/// The remedy where another program has the port of rank 0.
pub(super) const ANOTHER_PORT: &str = "give `carrack run --at` or MASTER_PORT another port, or \
    set CARRACK_PORT to one that is free on the machine of rank 0, the same for all ranks";

/// A rank's way of leaving its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Departure {
    /// The rank ended its runtime in order.
    Finished,
    /// The rank's process exited with this status, without having ended its runtime.
    Exited(i32),
    /// The rank's process was killed by this signal.
    Killed(i32),
    /// The rank closed its connection without having ended its runtime.
    Disconnected,
    /// The rank broke the protocol, and was cut off.
    Misbehaved,
    /// The rank has not come to the job in time.
    NeverCame,
    /// A process came as this rank, and does not hold the job's secret.
    OtherSecret,
    /// Two processes came as this rank.
    CameTwice,
    /// The rank, or another that was missing, has another size of the job.
    OtherSize,
}

impl Departure {
    /// Returns `true` if the rank announced its end.
    pub const fn is_orderly(self) -> bool {
        matches!(self, Self::Finished)
    }

    /// Returns what to do about it, beyond its own words.
    const fn remedy(self) -> &'static str {
        match self.forbids_start() {
            true => "then start the job again",
            false => "look for its own messages first, and start the job again",
        }
    }

    /// Returns `true` if the job cannot start because of it.
    pub(crate) const fn forbids_start(self) -> bool {
        matches!(self, Self::OtherSecret | Self::CameTwice | Self::OtherSize)
    }
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished => f.write_str("has already ended its runtime"),
            Self::Exited(status) => {
                write!(f, "exited with status {status} without ending its runtime")
            }
            Self::Killed(signal) => write!(f, "was killed by signal {signal}"),
            Self::Disconnected => f.write_str("left without ending its runtime"),
            Self::Misbehaved => f.write_str("was cut off because it sent bad frames"),
            Self::NeverCame => f.write_str(
                "has not come to the job in time (CARRACK_BOOTSTRAP_TIMEOUT says how many seconds \
                it has)",
            ),
            Self::OtherSecret => f.write_str(
                "came with another job secret: set CARRACK_JOB_SECRET to the same text on all \
                ranks, or on none",
            ),
            Self::CameTwice => f.write_str(
                "was started twice: give each process a RANK of its own, and end what is left of \
                earlier jobs",
            ),
            Self::OtherSize => f.write_str(
                "or another missing rank has another WORLD_SIZE than rank 0: give all ranks the \
                same, or all nodes the same --nodes and -n",
            ),
        }
    }
}

/// An error of a bootstrap call, with one variant for each possible reaction of the caller.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootstrapError {
    /// A variable of the launcher's is missing or wrong.
    #[error(
        "{name} {problem}; start the program with `carrack run -n N -- PROGRAM`, or unset \
         CARRACK_BOOTSTRAP_FD, CARRACK_RANK and CARRACK_SIZE to run it alone"
    )]
    Variable {
        /// The variable's name.
        name: &'static str,
        /// The problem with its value.
        problem: String,
    },

    /// The launcher and this program do not speak the same protocol.
    #[error(
        "the launcher speaks version {theirs} of the bootstrap protocol and this program version \
         {ours}; build `carrack` and the program from the same version of Carrack"
    )]
    Version {
        /// This program's version.
        ours: u32,
        /// The launcher's.
        theirs: u32,
    },

    /// A key or value exceeds its bound.
    #[error(
        "{what} of {len} bytes exceeds the bootstrap's limit of {limit}; the bootstrap is for \
         addresses: send larger data as messages after start-up"
    )]
    TooLarge {
        /// The item that is too large.
        what: &'static str,
        /// The length of the value in bytes.
        len: usize,
        /// The limit in bytes.
        limit: usize,
    },

    /// The key already has another value.
    #[error(
        "the key {key:?} already has another value; a key is written once: put a new value under a \
         new key, such as one with the rank's number in it"
    )]
    AlreadyPut {
        /// The key.
        key: String,
    },

    /// The launcher, or rank 0 without `carrack run`, refused a frame of this rank, and reads no
    /// more of them.
    #[error(
        "what this rank sent was refused, and the rank has been cut off: {why}; build `carrack` \
        and the program from the same version of Carrack"
    )]
    Refused {
        /// The reason.
        why: String,
    },

    /// A rank has left the job, so the awaited value or fence cannot come.
    #[error("rank {rank} {how}; {}", how.remedy())]
    RankGone {
        /// The rank that left.
        rank: u32,
        /// The rank's way of leaving.
        how: Departure,
    },

    /// The launcher has gone away.
    #[error(
        "the launcher of this job is gone; end this process, and start the job again with \
         `carrack run`"
    )]
    LauncherGone,

    /// A variable of torchrun or of Carrack is missing or wrong.
    #[error("{name} {problem}{}", advice(name))]
    Environment {
        /// The variable's name.
        name: &'static str,
        /// The problem with its value.
        problem: String,
    },

    /// Another launcher started this process as a rank of a job that it cannot find.
    #[error(
        "{launcher} started this process as a rank of its own job ({variables}), and Carrack \
         finds no way into it: no PMIX_NAMESPACE, no PMI_PORT, no PMI_FD with an open socket, \
         which only the program itself inherits; start the program with \
         `carrack run -n N -- PROGRAM`, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as \
         torchrun does, or set CARRACK_BOOTSTRAP=slurm for Slurm's variables, or \
         CARRACK_BOOTSTRAP=alone to run each process as a job of one"
    )]
    OtherLauncher {
        /// The launcher's name.
        launcher: &'static str,
        /// The variables that show it, with their values.
        variables: String,
    },

    /// The job of a launcher, or of the source that `CARRACK_BOOTSTRAP` demands, cannot be joined.
    #[error(
        "the job of {launcher} cannot be joined: {why}; CARRACK_BOOTSTRAP can name another way to \
         find the job, and CARRACK_BOOTSTRAP=alone makes each process a job of one"
    )]
    Exchange {
        /// The launcher, or its way of exchange.
        launcher: &'static str,
        /// Reason.
        why: String,
    },

    /// No job can be started from an MPI communicator.
    #[error(
        "no job can be started from the MPI communicator: {why}; `carrack run` starts one without \
        MPI"
    )]
    Mpi {
        /// Reason, and what to do.
        why: String,
    },

    /// The job has no secret, and the user requires one.
    #[error(
        "this job has no secret, and CARRACK_REQUIRE_SECRET is on; set CARRACK_JOB_SECRET to the \
         same 16 bytes or more on all ranks"
    )]
    NoSecret,

    /// Rank 0 cannot listen at its port.
    #[error(
        "rank 0 cannot listen at {address}: {source}; if another job or program has that port, \
         {ANOTHER_PORT}, or unset it: a second job of this process cannot have the same"
    )]
    Listen {
        /// The address and port.
        address: String,
        /// The system's reason.
        source: io::Error,
    },

    /// A rank that this one has to connect to was not there in time.
    #[error(
        "{who} was not reached at {address} within {seconds} s ({why}); check that it has been \
         started there, that MASTER_ADDR, MASTER_PORT and CARRACK_PORT, or --at, are the same for \
         all ranks, and that no firewall is in between; CARRACK_BOOTSTRAP_TIMEOUT is how many \
         seconds to try"
    )]
    NotReached {
        /// The rank, in words.
        who: String,
        /// The address that was tried.
        address: String,
        /// Time that this rank tried, in seconds.
        seconds: u64,
        /// The result of the last try.
        why: String,
    },

    /// Rank 0, or another program at its address, does not accept this process as a rank of its
    /// job.
    #[error("this process is not let into the job at {address}: {why}")]
    NotAdmitted {
        /// The address that it called.
        address: String,
        /// Reason, and what to do.
        why: String,
    },

    /// Rank 0, which has the store of addresses, is gone.
    #[error(
        "the connection to rank {rank} at {address} is gone, through which this rank found the \
         others; look for that rank's own messages first, and start the job again"
    )]
    StoreGone {
        /// The rank.
        rank: u32,
        /// The address of that rank.
        address: String,
    },

    /// The bootstrap was used in a forked child.
    #[error(
        "this process is a fork of the one that made the bootstrap: call exec in the child, or \
         start the runtime after the fork"
    )]
    Forked,

    /// The launcher sent a frame that this program does not understand.
    #[error("the launcher sent a bad frame ({0}); build both from the same version of Carrack")]
    BadFrame(#[from] BadFrame),

    /// The system refused a call.
    #[error("{doing} failed: {source}; check the limits on open files (`ulimit -n`) and memory")]
    Os {
        /// The action that failed.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl BootstrapError {
    /// Returns the error of a step that the system refused.
    pub(super) fn os(doing: &'static str, errno: Errno) -> Self {
        Self::Os { doing, source: errno.into() }
    }
}

/// Returns what to do about a variable: those of Carrack say it themselves.
fn advice(name: &str) -> &'static str {
    if name.starts_with("CARRACK_") {
        return "";
    }
    "; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does, or unset RANK and \
     WORLD_SIZE to run the program alone"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_gone_is_told_with_one_advice() {
        let text = |how| BootstrapError::RankGone { rank: 1, how }.to_string();
        let twice = text(Departure::CameTwice);
        assert!(twice.ends_with("what is left of earlier jobs; then start the job again"));
        let exited = text(Departure::Exited(3));
        assert!(exited.ends_with("; look for its own messages first, and start the job again"));
    }
}
