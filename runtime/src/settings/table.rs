//! The table of the runtime's own settings. A new one is an entry here: its field, accessor,
//! setter, variable and line of `carrack info` all come from it. Transports have tables of their
//! own.

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
    /// Transports that may be used, the preferred one first.
    transports: Vec<TransportChoice>, seen as &[TransportChoice],
        "CARRACK_TRANSPORT", List, TransportChoice::USUAL.to_vec();

    /// Bytes of a packet; a longer message goes by rendezvous.
    packet_size: usize,
        "CARRACK_PACKET_SIZE", Bytes::between(256, 64 << 10).power_of_two(), 8 << 10;

    /// Packets that a pool may grow to.
    packets_max: usize,
        "CARRACK_PACKETS_MAX", Count::of("packets", 16, 1 << 20), 1024;

    /// Operations that the backlog of a peer holds before a post fails.
    backlog: usize,
        "CARRACK_BACKLOG", Count::of("operations", 1, 1 << 20), 1024;

    /// Budget in bytes for messages without a receive; above half of it senders are told to hold.
    /// Ranks of a job should have the same value.
    unexpected: usize,
        "CARRACK_UNEXPECTED", Bytes::between(4 << 10, 1 << 40), 8 << 20;

    /// Operations of a device that wait for their receivers before a post is a retry. Ranks of a
    /// job should have the same value.
    offers: usize,
        "CARRACK_OFFERS", Count::of("operations", 16, 1 << 24), 128 << 10;

    /// Progress by the program's own calls only, or also by a thread of the runtime.
    progress: ProgressChoice,
        "CARRACK_PROGRESS", Word, ProgressChoice::Caller;

    /// SIGUSR1 makes progress print the pending operations.
    dump: DumpChoice,
        "CARRACK_DUMP", Word, DumpChoice::Usr1;

    /// Seconds after which a blocking collective reports a rank that waits in another group; 0:
    /// never.
    mismatch_seconds: usize,
        "CARRACK_MISMATCH_SECONDS", Count::of("seconds", 0, 1 << 20), 10;

    /// Microseconds for which a waiting thread spins before it sleeps.
    spin: Duration,
        "CARRACK_SPIN_US", Micros::between(0, 1_000_000), Duration::from_micros(50);

    /// GPUs to use; `auto` uses NVIDIA's once the program has initialised CUDA.
    gpu: GpuChoice,
        "CARRACK_GPU", Word, GpuChoice::Auto;

    /// Copies of at most 8 KiB between GPUs by a resident kernel, which ends about 1 ms after the
    /// last one; not on a GPU that several such ranks share. A rank that turns it on does so for
    /// all ranks of its process.
    gpu_copier: bool,
        "CARRACK_GPU_COPIER", Flag, false;

    /// Simulated devices that the fake GPU has.
    fake_gpus: usize,
        "CARRACK_FAKE_GPUS", Count::of("devices", 1, 16), 2;

    /// Events that one call of progress takes from a device.
    poll_batch: usize,
        "CARRACK_POLL_BATCH", Count::of("events", 1, 1024), 32;

    /// Where a process finds its job: auto takes the first that is there, alone makes a process of
    /// mpiexec, mpirun or srun a job of one, the others demand one. It has no effect on ranks of
    /// `carrack run`.
    bootstrap: BootstrapChoice,
        "CARRACK_BOOTSTRAP", Word, BootstrapChoice::Auto;

    /// Port of rank 0, except under `carrack run`; 0: 1000 above MASTER_PORT, one made of Slurm's
    /// job and step, or with PMI and PMIx one that the kernel chooses.
    port: usize,
        "CARRACK_PORT", Port, 0;

    /// Seconds for which the ranks of such a job wait for each other.
    bootstrap_timeout: usize,
        "CARRACK_BOOTSTRAP_TIMEOUT", Count::of("seconds", 1, 1 << 20), 300;

    /// File of libpmix, for jobs of PMIx; auto: looked for.
    pmix: String, seen as &str,
        "CARRACK_PMIX", Text::such_as("/usr/lib/libpmix.so.2"), "auto".into();

    /// Refuses a job whose ranks have no secret.
    require_secret: bool,
        "CARRACK_REQUIRE_SECRET", Flag, false;
}

/// A `CARRACK_*` variable that is no setting: another program reads it, and [`Settings`] accepts
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved {
    /// The variable.
    pub variable: &'static str,
    /// The program that sets it, and its purpose.
    pub doc: &'static str,
}

/// Variables that the launcher sets, the job's secret, which is never shown, and variables of the
/// simulated NIC and of the carrack command.
pub const RESERVED: &[Reserved] = &[
    Reserved { variable: "CARRACK_RANK", doc: "Rank of this process; set by the launcher." },
    Reserved { variable: "CARRACK_SIZE", doc: "Number of ranks of the job; set by the launcher." },
    Reserved {
        variable: "CARRACK_BOOTSTRAP_FD",
        doc: "Descriptor of the socket to the launcher; set by the launcher.",
    },
    Reserved {
        variable: "CARRACK_JOB_SECRET",
        doc: "Secret by which ranks know each other that no launcher of ours has started.",
    },
    Reserved {
        variable: "CARRACK_SIMULATED_FABRIC",
        doc: "Network that simulated NICs are plugged into; read by these.",
    },
    Reserved {
        variable: "CARRACK_LOG",
        doc: "What the carrack command logs on stderr, as a filter of the tracing crate; RUST_LOG \
            where it is not set, else warn.",
    },
];
