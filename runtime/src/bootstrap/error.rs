//! What can go wrong before ranks know each other.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use rustix::io::Errno;
use thiserror::Error;

use super::protocol::BadFrame;

/// How a rank left its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Departure {
    /// It ended its runtime in order.
    Finished,
    /// Its process exited with this status, without having ended its runtime.
    Exited(i32),
    /// Its process was killed by this signal.
    Killed(i32),
    /// It closed its connection without having ended its runtime.
    Disconnected,
    /// It sent what no Carrack rank sends, and was cut off.
    Misbehaved,
}

impl Departure {
    /// Whether the rank said that it was ending, so that nothing of it was lost.
    pub const fn is_orderly(self) -> bool {
        matches!(self, Self::Finished)
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
        }
    }
}

/// Why a bootstrap call failed. One variant for each way in which a caller can react.
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
        /// What is wrong with it.
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
        /// What is too large.
        what: &'static str,
        /// Its length in bytes.
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

    /// The launcher refused something that this rank sent, and listens to it no more.
    #[error("the launcher refused what this rank sent and has cut it off: {why}")]
    Refused {
        /// The launcher's reason.
        why: String,
    },

    /// A rank has left the job, so what was waited for cannot happen.
    #[error("rank {rank} {how}; look for its own messages first, and start the job again")]
    RankGone {
        /// The rank that left.
        rank: u32,
        /// How it left.
        how: Departure,
    },

    /// The launcher has gone away.
    #[error(
        "the launcher of this job is gone; end this process, and start the job again with \
         `carrack run`"
    )]
    LauncherGone,

    /// The bootstrap was used in a forked child.
    #[error(
        "this bootstrap belongs to process {made_in} and was used in its forked child {used_in}; \
         call exec in the child, or start the runtime after the fork"
    )]
    Forked {
        /// The process that made it.
        made_in: i32,
        /// The process that used it.
        used_in: i32,
    },

    /// The launcher sent what this program does not understand.
    #[error("the launcher sent a bad frame ({0}); build both from the same version of Carrack")]
    BadFrame(#[from] BadFrame),

    /// The system refused a call.
    #[error("{doing} failed: {source}; check the limits on open files (`ulimit -n`) and memory")]
    Os {
        /// What was being done.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl BootstrapError {
    /// The system's refusal, with what was being done.
    pub(super) fn os(doing: &'static str, errno: Errno) -> Self {
        Self::Os { doing, source: errno.into() }
    }
}
