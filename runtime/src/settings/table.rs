//! The table of the runtime's own settings. A new one is an entry here: its field, accessor,
//! setter, variable, line of `carrack info` and row of docs/configuration.md all come from it.
//! Transports have tables of their own.

use super::SettingsBuilder;
use super::choice::{BootstrapChoice, DumpChoice, GpuChoice, ProgressChoice};
use super::declare::setters;
use carrack_transports::declare_settings;
use carrack_transports::registry::{TransportChoice, TransportSettings};
use carrack_transports::settings::form::{
    Bytes, Count, Flag, Form, List, Micros, Port, Text, Word,
};
use std::time::Duration;

macro_rules! settings {
    ($($entry:tt)*) => {
        declare_settings! {
            /// The settings of a runtime, all checked. See the [module](crate::settings) for where
            /// they come from.
            pub struct Settings {
                $($entry)*
                of_transports: TransportSettings;
            }
        }

        setters! { $($entry)* }
    };
}

settings! {
    /// Transports, the preferred first.
    transports: Vec<TransportChoice>, seen as &[TransportChoice],
        "CARRACK_TRANSPORT", List, TransportChoice::USUAL.to_vec();

    /// Size of a packet; a longer message uses rendezvous.
    packet_size: usize,
        "CARRACK_PACKET_SIZE", Bytes::between(256, 64 << 10).power_of_two(), 8 << 10;

    /// Packets that a pool may grow to.
    packets_max: usize,
        "CARRACK_PACKETS_MAX", Count::of("packets", 16, 1 << 20), 1024;

    /// Operations in a peer's backlog before a post fails.
    backlog: usize,
        "CARRACK_BACKLOG", Count::of("operations", 1, 1 << 20), 1024;

    /// Budget for messages without a receive; above half of it senders are told to hold.
    /// Should be equal on all ranks.
    unexpected: usize,
        "CARRACK_UNEXPECTED", Bytes::between(4 << 10, 1 << 40), 8 << 20;

    /// Operations of a device that wait for their receivers before a post is a retry. Should be
    /// equal on all ranks.
    offers: usize,
        "CARRACK_OFFERS", Count::of("operations", 16, 1 << 24), 128 << 10;

    /// Callers of progress; `thread` adds one of the runtime, so messages may change places.
    progress: ProgressChoice,
        "CARRACK_PROGRESS", Word, ProgressChoice::Caller;

    /// SIGUSR1 makes progress print the pending operations.
    dump: DumpChoice,
        "CARRACK_DUMP", Word, DumpChoice::Usr1;

    /// Seconds until a blocking collective reports a rank that waits in another group; 0: never.
    mismatch_seconds: usize,
        "CARRACK_MISMATCH_SECONDS", Count::of("seconds", 0, 1 << 20), 10;

    /// Time that a waiting thread spins before it sleeps.
    spin: Duration,
        "CARRACK_SPIN_US", Micros::between(0, 1_000_000), Duration::from_micros(50);

    /// Events that one progress call takes from a peer.
    poll_batch: usize,
        "CARRACK_POLL_BATCH", Count::of("events", 1, 1024), 32;

    /// GPUs to use. `auto`: NVIDIA's once the program has initialised CUDA; `cuda` initialises it
    /// at the start and fails without a GPU; `fake` simulates; `none` ignores all.
    gpu: GpuChoice,
        "CARRACK_GPU", Word, GpuChoice::Auto;

    /// Resident copier for small copies between GPUs.
    gpu_copier: bool,
        "CARRACK_GPU_COPIER", Flag, false;

    /// Simulated devices of `CARRACK_GPU=fake`.
    fake_gpus: usize,
        "CARRACK_FAKE_GPUS", Count::of("devices", 1, 16), 2;

    /// Source of the job, except under `carrack run`. `auto`: the first that is there; `alone`: a
    /// job of one rank.
    bootstrap: BootstrapChoice,
        "CARRACK_BOOTSTRAP", Word, BootstrapChoice::Auto;

    /// Port of rank 0, except under `carrack run`; 0: the launcher's.
    port: usize,
        "CARRACK_PORT", Port, 0;

    /// Seconds for ranks to find each other, except under `carrack run`.
    bootstrap_timeout: usize,
        "CARRACK_BOOTSTRAP_TIMEOUT", Count::of("seconds", 1, 1 << 20), 300;

    /// File of libpmix; `auto`: looked for.
    pmix: String, seen as &str,
        "CARRACK_PMIX", Text::such_as("/usr/lib/libpmix.so.2"), "auto".into();

    /// Refuses a job without a secret.
    require_secret: bool,
        "CARRACK_REQUIRE_SECRET", Flag, false;
}

/// A `CARRACK_*` variable that is no setting, and that [`Settings`] accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved {
    /// The variable.
    pub variable: &'static str,
    /// The program or person that sets it.
    pub set_by: &'static str,
    /// The meaning of the variable.
    pub doc: &'static str,
}

const fn reserved(variable: &'static str, set_by: &'static str, doc: &'static str) -> Reserved {
    Reserved { variable, set_by, doc }
}

/// Variables that are no settings. The job's secret is never shown.
pub const RESERVED: &[Reserved] = &[
    reserved("CARRACK_RANK", "carrack run", "Rank of the process."),
    reserved("CARRACK_SIZE", "carrack run", "Number of ranks."),
    reserved("CARRACK_BOOTSTRAP_FD", "carrack run", "Socket to the launcher."),
    reserved("CARRACK_TRIAL", "Carrack", "Trial to make."),
    reserved(
        "CARRACK_JOB_SECRET",
        "user",
        "Secret of a job by torchrun's or Slurm's variables, or `--nodes`; at least 16 bytes.",
    ),
    reserved("CARRACK_SIMULATED_FABRIC", "user", "Network that simulated NICs belong to."),
    reserved(
        "CARRACK_LOG",
        "user",
        "Log filter of the `carrack` command, else `RUST_LOG` or `warn`.",
    ),
];
