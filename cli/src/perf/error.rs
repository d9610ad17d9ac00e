//! Errors of `perf`, each with its remedy.

use super::sides::Kind;
use crate::launch::LaunchError;
use crate::own_ranks::is_usage;
use carrack::RemoteKeyError;
use carrack::settings::SettingsError;
use carrack::transports::contract::DownCause;
use carrack::transports::gpu::GpuError;
use carrack::transports::mem::CopyError;
use carrack::{
    AwaitError, CollectiveError, OpError, PostError, ProgressError, Rank, RegisterError,
    ResourceError, StartError, WaitError,
};
use std::collections::TryReserveError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// An error that ended the measurement, or prevented it.
#[derive(Debug, Error)]
pub(super) enum PerfError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error(
        "there is no room for {most} bytes on this machine: {why}; ask for less by --size (-m of \
        put_get_bench)"
    )]
    Room { most: usize, why: TryReserveError },
    #[error(
        "all but --op barrier is measured between two ranks, and this job has {0}: start two \
        (`--ranks 2`, or `carrack run -n 2`)"
    )]
    Ranks(u32),
    #[error("--ranks {asked}, but the launcher started {started}: leave it out, or start {asked}")]
    RanksOfLauncher { asked: u32, started: u32 },
    #[error(
        "there is nothing to measure: barrier, put_batch, put_seen and put_done have a latency \
        only, and fetch_add a latency and a rate; ask for one of them"
    )]
    NoPoints,
    #[error(
        "--transport loopback reaches within one process only, and a launcher started two: run \
        perf without the launcher"
    )]
    LoopbackBetweenProcesses,
    #[error("memory {kind}: there is no GPU ({why}); CARRACK_GPU=fake gives simulated ones")]
    NoGpu { kind: Kind, why: String },
    #[error("memory {kind}: there is no such device; {driver} has {there}: name one of these")]
    NoDevice { kind: Kind, driver: &'static str, there: String },
    #[error(
        "--op {op} works with {works_with} only, and not with --mem {given}: give that, or leave \
        {op} out of --op"
    )]
    OtherMemory { op: &'static str, works_with: &'static str, given: String },
    #[error("{0} was started with other arguments than this rank: start all ranks with the same")]
    DifferentArguments(Rank),
    #[error("{rank} is gone: {cause}; {}", .cause.remedy())]
    PeerGone { rank: Rank, cause: DownCause },
    #[error("another thread of this rank failed: look for its error first")]
    GivenUp,
    #[error("{from} gave an unknown order: start all ranks from the same build")]
    Order { from: Rank },
    #[error(
        "a message of {size} bytes ({what}) came out different at byte {at}: the figures are \
        worthless; please report this"
    )]
    Corrupt { what: &'static str, size: usize, at: usize },
    #[error(
        "a message of {size} bytes ({what}) came with a length of {got}: the figures are \
        worthless; please report this"
    )]
    Length { what: &'static str, size: usize, got: usize },
    #[error(
        "{added} was added to a word, and it holds {held}: the figures are worthless; please \
        report this"
    )]
    Sum { added: u64, held: u64 },
    #[error(
        "a rank left a barrier {early} ns before another one had come: the figures are worthless; \
        please report this"
    )]
    Barrier { early: u64 },
    #[error("an operation with {peer} failed: {why}")]
    Arrival { peer: Rank, why: String },
    #[error(
        "--plot or --plot-percentiles {path:?}: {why}; name a file in a folder that you may write \
        to"
    )]
    Plot { path: PathBuf, why: String },
    #[error("writing to stdout failed: {0}; check the file or pipe that it goes to")]
    Output(#[from] io::Error),
    #[error("{doing} failed: {source}; check the limits of this user (`ulimit -a`)")]
    System { doing: &'static str, source: io::Error },
    #[error("a round of {0} operations measured nothing; please report this")]
    Nothing(u64),
    #[error("a thread of this rank panicked; please report this, with what the panic says")]
    Panicked,
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Resource(#[from] ResourceError),
    #[error(transparent)]
    Post(#[from] PostError),
    #[error(transparent)]
    Op(#[from] OpError),
    #[error(transparent)]
    Await(#[from] AwaitError),
    #[error(transparent)]
    Progress(#[from] ProgressError),
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Boxed: it is several times the size of all others, and every call of a measured loop returns
    /// one or none.
    #[error(transparent)]
    Collective(#[from] Box<CollectiveError>),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Register(#[from] RegisterError),
    #[error(transparent)]
    Name(#[from] RemoteKeyError),
}

impl PerfError {
    /// Returns `true` if the command line or the environment is the cause.
    pub(super) fn is_usage(&self) -> bool {
        match self {
            Self::Start(error) => is_usage(error),
            Self::Settings(_)
            | Self::Ranks(_)
            | Self::LoopbackBetweenProcesses
            | Self::DifferentArguments(_)
            | Self::OtherMemory { .. }
            | Self::RanksOfLauncher { .. }
            | Self::NoPoints => true,
            _ => false,
        }
    }

    /// Makes an error of the system's refusal, with what was being done.
    pub(super) fn system<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { doing, source: source.into() }
    }
}

impl From<CollectiveError> for PerfError {
    fn from(error: CollectiveError) -> Self {
        Self::Collective(Box::new(error))
    }
}
