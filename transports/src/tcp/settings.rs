//! Settings of this transport.

use super::socket;
use crate::settings::form::{Bytes, Count, Text};

fn is_range(text: &str) -> bool {
    text == "auto" || socket::range(text).is_some()
}

crate::declare_settings! {
    /// Settings of the TCP transport.
    pub struct TcpSettings {
        /// Interfaces whose addresses peers dial; `auto`: all that are up.
        tcp_interface: String, seen as &str,
            "CARRACK_TCP_INTERFACE", Text::such_as("eth0 or ib0,eth0"), "auto".into();

        /// Ports for devices, one each, for firewalls; `auto`: the kernel's choice.
        ports: String, seen as &str,
            "CARRACK_PORTS", Text::of("40000-40999", is_range).noting(" (lower first)"),
            "auto".into();

        /// Congestion control; `auto`: the kernel's default.
        tcp_congestion: String, seen as &str,
            "CARRACK_TCP_CONGESTION", Text::such_as("cubic"), "auto".into();

        /// Most unacknowledged bytes of short messages to a peer.
        tcp_window: usize,
            "CARRACK_TCP_WINDOW", Bytes::between(256, 1 << 30), 1 << 20;

        /// Seconds until a peer whose kernel answers nothing is down; a rank that ends waits as
        /// long.
        peer_timeout: usize,
            "CARRACK_PEER_TIMEOUT", Count::of("seconds", 3, 86_400), 30;
    }
}
