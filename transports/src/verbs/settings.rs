//! Settings of this transport.

use crate::settings::SwitchChoice;
use crate::settings::form::{Auto, Bytes, Count, Text, Word};

crate::declare_settings! {
    /// Settings of the verbs transport, over real and over simulated devices.
    pub struct VerbsSettings {
        /// RDMA device and port, as mlx5_0 or mlx5_0:2; of several, each rank of a node takes
        /// another one. auto: the fastest, and of those the nearest, in turn.
        verbs_device: String, seen as &str,
            "CARRACK_VERBS_DEVICE", Text::such_as("mlx5_0:1 or mlx5_0,mlx5_1"), "auto".into();

        /// RDMA devices over which a rank distributes its large messages, at most; they are named,
        /// or equally fast and near.
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

        /// Time after which a NIC sends again: 4.096 µs times two to the power of this; 18 or more
        /// with Soft-RoCE.
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

        /// Bytes of a large message that are registered with a NIC at a time; registered memory
        /// goes whole.
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

        /// Connections of a rank whose queue pairs have a thread domain of their own, at most; 0:
        /// none.
        verbs_thread_domains: usize,
            "CARRACK_VERBS_THREAD_DOMAINS", Count::of("connections", 0, 1 << 16), 64;
    }
}
