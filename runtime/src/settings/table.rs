//! The table of settings. A new setting is an entry here: its field, accessor, setter, variable and
//! line of `carrack info` all come from it.

use std::time::Duration;

use super::choice::{
    BootstrapChoice, DumpChoice, GpuChoice, GpuIpcChoice, KernelCopyChoice, ProgressChoice,
    SwitchChoice, TransportChoice,
};
use super::declare::settings;
use super::form::{Auto, Bytes, Count, Flag, List, Micros, Port, Text, Word};

settings! {
    /// Transports that may be used, the preferred one first.
    transports: Vec<TransportChoice>, seen as &[TransportChoice],
        "CARRACK_TRANSPORT", List,
        vec![TransportChoice::Loopback, TransportChoice::Shm, TransportChoice::Verbs];

    /// Bytes of a packet; a longer message goes by rendezvous.
    packet_size: usize,
        "CARRACK_PACKET_SIZE", Bytes::between(256, 64 << 10).power_of_two(), 8 << 10;

    /// Packets that a pool may grow to.
    packets_max: usize,
        "CARRACK_PACKETS_MAX", Count::of("packets", 16, 1 << 20), 1024;

    /// 64-byte slots of a shared-memory ring.
    shm_slots: usize,
        "CARRACK_SHM_SLOTS", Count::of("slots", 8, 64 << 10).power_of_two(), 256;

    /// Packet-sized chunks of a shared-memory link, for each direction.
    shm_chunks: usize,
        "CARRACK_SHM_CHUNKS", Count::of("chunks", 1, 64), 32;

    /// RDMA device and port, as mlx5_0 or mlx5_0:2; of several, each rank of a node takes another
    /// one. auto: the fastest, and of those the nearest, in turn.
    verbs_device: String, seen as &str,
        "CARRACK_VERBS_DEVICE", Text::such_as("mlx5_0:1 or mlx5_0,mlx5_1"), String::from("auto");

    /// RDMA devices over which a rank distributes its large messages, at most; they are named, or
    /// equally fast and near.
    verbs_rails: usize,
        "CARRACK_VERBS_RAILS", Count::of("devices", 1, 16), 1;

    /// Index of the port's GID; auto: by its type and address family.
    verbs_gid: Option<usize>,
        "CARRACK_VERBS_GID", Auto::or("a GID", 0, 255), None;

    /// Traffic class of RoCE and of InfiniBand's global routes.
    verbs_traffic_class: usize,
        "CARRACK_VERBS_TRAFFIC_CLASS", Count::of("the class", 0, 255), 0;

    /// Service level of InfiniBand, and priority of RoCE where it is not in IP's headers.
    verbs_service_level: usize,
        "CARRACK_VERBS_SERVICE_LEVEL", Count::of("the level", 0, 15), 0;

    /// Hop limit of global routes.
    verbs_hop_limit: usize,
        "CARRACK_VERBS_HOP_LIMIT", Count::of("hops", 1, 255), 64;

    /// Time after which a NIC sends again: 4.096 µs times two to the power of this; 18 or more with
    /// Soft-RoCE.
    verbs_timeout: usize,
        "CARRACK_VERBS_TIMEOUT", Count::of("doublings", 1, 31), 18;

    /// Times that a NIC sends again before the peer counts as gone; Soft-RoCE takes 7 for
    /// "for ever".
    verbs_retries: usize,
        "CARRACK_VERBS_RETRIES", Count::of("times", 0, 7), 6;

    /// Requests that a queue pair holds.
    verbs_depth: usize,
        "CARRACK_VERBS_DEPTH", Count::of("requests", 16, 32 << 10), 128;

    /// Receives that a device posts to its NIC; half of its packets at most.
    verbs_receives: usize,
        "CARRACK_VERBS_RECEIVES", Count::of("receives", 8, 32 << 10), 256;

    /// Bytes of a large message that are registered with a NIC at a time; registered memory goes
    /// whole.
    verbs_chunk: usize,
        "CARRACK_VERBS_CHUNK", Bytes::between(64 << 10, 1 << 30), 4 << 20;

    /// On-demand paging of the user's host memory, where the NIC supports it; registering then
    /// locks no memory.
    verbs_odp: SwitchChoice,
        "CARRACK_VERBS_ODP", Word, SwitchChoice::Off;

    /// Relaxed ordering: the NIC may write the user's host memory out of order, completions
    /// excepted.
    verbs_relaxed_ordering: SwitchChoice,
        "CARRACK_VERBS_RELAXED_ORDERING", Word, SwitchChoice::Off;

    /// Connections of a rank whose queue pairs have a thread domain of their own, at most; 0: none.
    verbs_thread_domains: usize,
        "CARRACK_VERBS_THREAD_DOMAINS", Count::of("connections", 0, 1 << 16), 64;

    /// Copies of large messages from process to process by the kernel, where it allows that.
    kernel_copy: KernelCopyChoice,
        "CARRACK_KERNEL_COPY", Word, KernelCopyChoice::Auto;

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

    /// Mapping of GPU memory between ranks of one node, where the driver allows that.
    gpu_ipc: GpuIpcChoice,
        "CARRACK_GPU_IPC", Word, GpuIpcChoice::Auto;

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

    /// Job of a process that another launcher (mpiexec, mpirun, srun) started as one of several:
    /// auto refuses to start, alone makes it a job of one rank. It has no effect on ranks of
    /// `carrack run` and torchrun.
    bootstrap: BootstrapChoice,
        "CARRACK_BOOTSTRAP", Word, BootstrapChoice::Auto;

    /// Port of rank 0 in a job of torchrun's variables; 0: 1000 above MASTER_PORT.
    port: usize,
        "CARRACK_PORT", Port, 0;

    /// Seconds for which the ranks of such a job wait for each other.
    bootstrap_timeout: usize,
        "CARRACK_BOOTSTRAP_TIMEOUT", Count::of("seconds", 1, 1 << 20), 300;
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
