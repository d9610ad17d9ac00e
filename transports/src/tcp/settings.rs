//! Settings of this transport.

use super::socket;
use crate::settings::form::{Bytes, Count, Text};

fn is_range(text: &str) -> bool {
    text == "auto" || socket::range(text).is_some()
}

crate::declare_settings! {
    /// Settings of the TCP transport.
    pub struct TcpSettings {
        /// Network interfaces whose addresses peers dial, separated by commas; auto: all that are
        /// up.
        tcp_interface: String, seen as &str,
            "CARRACK_TCP_INTERFACE", Text::such_as("eth0 or ib0,eth0"), "auto".into();

        /// Ports of which each device takes one, for firewalls; auto: the kernel's choice.
        ports: String, seen as &str,
            "CARRACK_PORTS", Text::of("40000-40999", is_range), "auto".into();

        /// Congestion control of TCP, as the kernel names it; auto: the kernel's default.
        tcp_congestion: String, seen as &str,
            "CARRACK_TCP_CONGESTION", Text::such_as("cubic"), "auto".into();

        /// Bytes of short messages to a peer that it has not acknowledged yet, at most.
        tcp_window: usize,
            "CARRACK_TCP_WINDOW", Bytes::between(256, 1 << 30), 1 << 20;

        /// Time after which a peer whose kernel answers nothing counts as gone, in seconds.
        peer_timeout: usize,
            "CARRACK_PEER_TIMEOUT", Count::of("seconds", 3, 86_400), 30;
    }
}
