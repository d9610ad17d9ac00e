//! The transport over TCP, for nodes without RDMA.
//!
//! | module | one idea |
//! |---|---|
//! | `calls` | connections that come in |
//! | `device` | the sockets of a device, and a poll |
//! | `hot` | the sockets that a poll reads directly |
//! | `looks` | when a poll reads the epoll set |
//! | `link` | a link, as the runtime has it: messages are gathered |
//! | `outgoing` | the sending end of a connection: dials, greets, sends again after a cut |
//! | `shared` | state that links and the device share |
//! | `ends` | ends of peers, reported behind what they sent before |
//! | `flusher` | the thread that sends what was left for a poll that does not come |
//! | `outflow` | the bytes that are owed to the peer, until they are acknowledged |
//! | `incoming` | the receiving end: bytes become messages, and puts land in windows |
//! | `windows` | buffers that peers' puts are scattered into, until they are taken back |
//! | `pending` | connections that have not proved themselves |
//! | `frame` | the heads between the bytes |
//! | `wire` | the first messages of a connection |
//! | `address` | published addresses |
//! | `socket` | system calls on sockets |
//! | `settings` | the settings of this transport |
//!
//! A connection carries bytes both ways, and has a sending and a receiving end on each side. A link
//! is one-way, as the contract says: it takes a sending end to its peer's device that serves no
//! link, or dials. So the kernel's acknowledgements of both ways ride on data. With a connection
//! for each link the kernel would send one packet more for each small message. Of two devices that
//! dial each other, the one with the higher key gives way.
//!
//! All bytes of a link go over one connection (`docs/adr/0015-tcp-by-system-calls.md`).
//!
//! # Cuts
//!
//! The bytes of each way are counted from its beginning, and stay with the sender until the
//! receiver has acknowledged them. Messages stay in a copy of [`TcpSettings::tcp_window`] bytes at
//! most, puts in the user's buffer. A connection that breaks between living processes is made anew.
//! Each side then says how many bytes it has, and the other goes on behind them. So nothing is lost
//! and nothing is doubled.
//!
//! # Ends
//!
//! A peer is gone when it says so, or when its kernel says that no process listens at its address
//! any more. A peer that had a connection may be closing, and has at least a second to make another
//! one. It is also gone when its kernel has not answered for `CARRACK_PEER_TIMEOUT`. A process that
//! computes or is stopped is there, since its kernel answers for it.

pub(crate) mod address;
mod calls;
mod closing;
mod device;
mod ends;
mod flusher;
pub(crate) mod frame;
mod hot;
mod incoming;
mod link;
mod looks;
mod outflow;
mod outgoing;
mod pending;
mod settings;
mod shared;
mod socket;
#[cfg(test)]
mod tests;
mod windows;
mod wire;

pub use settings::TcpSettings;

use crate::contract::{
    Caps, Device, DeviceInfo, Domain, Identity, Locality, Transport, Unavailable,
};
use crate::mem::{PacketSource, SmallBytes};
use crate::net::interfaces;
use std::sync::Arc;
use std::time::Duration;

/// The transport's name.
pub const NAME: &str = "tcp";

/// Values of the settings.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Largest message in bytes, at most the size of a packet.
    pub packet_size: usize,
    /// Interfaces whose addresses are published, comma-separated; `auto`: all.
    pub interface: String,
    /// Ports to listen at, as `A-B`; empty: the kernel's choice.
    pub ports: String,
    /// Congestion control; empty: the kernel's default.
    pub congestion: String,
    /// Bytes of copied messages that a peer has not acknowledged, at most.
    pub window: usize,
    /// Time after which a peer whose kernel answers nothing counts as gone.
    pub timeout: Duration,
}

impl TcpOptions {
    /// Returns the options of these settings. `packet_size`: bytes.
    pub fn of(settings: &TcpSettings, packet_size: usize) -> Self {
        let named = |text: &str| if text == "auto" { String::new() } else { text.into() };
        Self {
            packet_size,
            interface: settings.tcp_interface().into(),
            ports: named(settings.ports()),
            congestion: named(settings.tcp_congestion()),
            window: settings.tcp_window(),
            timeout: Duration::from_secs(settings.peer_timeout() as u64),
        }
    }
}

impl Default for TcpOptions {
    /// Returns the defaults of the settings, for messages of 8 KiB.
    fn default() -> Self {
        Self {
            packet_size: 8 << 10,
            interface: "auto".into(),
            ports: String::new(),
            congestion: String::new(),
            window: 1 << 20,
            timeout: Duration::from_secs(30),
        }
    }
}

/// The TCP transport.
#[derive(Debug, Clone)]
pub struct Tcp {
    options: TcpOptions,
}

impl Tcp {
    /// Makes the transport.
    pub fn new(options: TcpOptions) -> Self {
        Self { options }
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        let found = interfaces::reachable(&self.options.interface)
            .map_err(|error| Unavailable::new(NAME, format!("CARRACK_TCP_INTERFACE: {error}")))?;
        let names: Vec<_> =
            found.iter().map(|at| format!("{} ({})", at.address, at.name)).collect();
        if names.is_empty() {
            return Err(Unavailable::new(
                NAME,
                "this machine has no network address: bring an interface up",
            ));
        }
        Ok(vec![DeviceInfo { name: "sockets".into(), note: names.join(", ") }])
    }

    fn open(
        &self,
        _device: &DeviceInfo,
        identity: Identity,
    ) -> Result<Arc<dyn Domain>, Unavailable> {
        let caps = Caps {
            am_inline: SmallBytes::MAX,
            am_copied: self.options.packet_size,
            am_owned: 0,
            am_from_device: false,
            remote_memory: false,
            windows: true,
            polls_kernel: true,
            chunk: usize::MAX,
            locality: Locality::Network,
        };
        Ok(Arc::new(TcpDomain { options: self.options.clone(), identity, caps }))
    }
}

struct TcpDomain {
    options: TcpOptions,
    identity: Identity,
    caps: Caps,
}

impl Domain for TcpDomain {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        if !packets.kind().is_host() {
            let reason =
                format!("it receives into host packets, not into {} memory", packets.kind());
            return Err(Unavailable::new(NAME, reason));
        }
        let (options, identity) = (self.options.clone(), self.identity.clone());
        Ok(device::TcpDevice::open(options, identity, packets)?)
    }
}
