//! Settings of this transport.

use crate::settings::form::{Auto, Bytes, Count, Flag, Text};

crate::declare_settings! {
    /// Settings of the verbs transport, over real and over simulated devices.
    pub struct VerbsSettings {
        /// Device and port; of several, each rank of a node takes another. `auto`: the fastest,
        /// then the nearest, in turn.
        verbs_device: String, seen as &str,
            "CARRACK_VERBS_DEVICE", Text::such_as("mlx5_0:1 or mlx5_0,mlx5_1"), "auto".into();

        /// Most NICs for a rank's large messages; named, or equally fast and near.
        verbs_rails: usize,
            "CARRACK_VERBS_RAILS", Count::of("devices", 1, 16), 1;

        /// Index of the port's GID; `auto`: by type and address family.
        verbs_gid: Option<usize>,
            "CARRACK_VERBS_GID", Auto::or("a GID", 0, 255), None;

        /// Traffic class of RoCE and of InfiniBand's global routes.
        verbs_traffic_class: usize,
            "CARRACK_VERBS_TRAFFIC_CLASS", Count::of("the class", 0, 255), 0;

        /// Service level of InfiniBand; priority of RoCE where IP headers lack it.
        verbs_service_level: usize,
            "CARRACK_VERBS_SERVICE_LEVEL", Count::of("the level", 0, 15), 0;

        /// Hop limit of global routes.
        verbs_hop_limit: usize,
            "CARRACK_VERBS_HOP_LIMIT", Count::of("hops", 1, 255), 64;

        /// Retransmission time-out: 4.096 µs × 2^value; 18 or more for Soft-RoCE.
        verbs_timeout: usize,
            "CARRACK_VERBS_TIMEOUT", Count::of("doublings", 1, 31), 18;

        /// Retransmissions before the peer counts as gone; Soft-RoCE takes 7 for "forever".
        verbs_retries: usize,
            "CARRACK_VERBS_RETRIES", Count::of("times", 0, 7), 6;

        /// Requests that a queue pair holds.
        verbs_depth: usize,
            "CARRACK_VERBS_DEPTH", Count::of("requests", 16, 32 << 10), 128;

        /// Receives that a device posts to its NIC; at most half of its packets.
        verbs_receives: usize,
            "CARRACK_VERBS_RECEIVES", Count::of("receives", 8, 32 << 10), 256;

        /// Bytes of a large message registered at a time; registered memory goes whole.
        verbs_chunk: usize,
            "CARRACK_VERBS_CHUNK", Bytes::between(64 << 10, 1 << 30), 4 << 20;

        /// On-demand paging of user's host memory, where the NIC supports it.
        verbs_odp: bool,
            "CARRACK_VERBS_ODP", Flag, false;

        /// Lets the NIC write user's host memory out of order, completions excepted.
        verbs_relaxed_ordering: bool,
            "CARRACK_VERBS_RELAXED_ORDERING", Flag, false;

        /// Most connections of a rank with own thread domains; 0: none.
        verbs_thread_domains: usize,
            "CARRACK_VERBS_THREAD_DOMAINS", Count::of("connections", 0, 1 << 16), 64;
    }
}
