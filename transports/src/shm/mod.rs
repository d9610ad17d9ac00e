//! The transport between processes of one node.
//!
//! | module | one idea |
//! |---|---|
//! | [`segment`] | the memory: a sealed memfd with a ring, its chunks, and flags |
//! | `handshake` | the messages by which a sender shows its segment to a receiver |
//! | `link` | the sending side: inline into the ring, or through a chunk |
//! | `device` | the receiving side, and the upkeep of both sides |
//! | `pending` | a pending connection, from its call to its welcome |
//! | `inbound` | the rings that lead here, and which of them polls look at |
//! | `source` | the ring of one sender: its records, and the messages in them |
//! | `chunks` | the chunks of a link, as its sender counts them |
//! | `answer` | the slot in which the answer to a message will lie |
//! | `export` | regions that peers map |
//! | `settings` | the settings of this transport |
//! | `kernel_copy` | copies from and to another process's memory by the kernel |
//!
//! A link is one-way. Its sender makes a segment, sends the descriptor over the receiver's socket,
//! and gets the receiver's page of bells and its eventfd. From then on messages move by loads and
//! stores alone. The socket stays open for one purpose: the peer is gone when the other end hangs
//! up or its process dies.
//!
//! Values that a peer can write are never trusted: see [`segment`] for the writer of each.

mod answer;
mod chunks;
mod device;
pub(crate) mod export;
pub(crate) mod handshake;
mod inbound;
mod kernel_copy;
mod link;
#[cfg(test)]
mod pair;
mod pending;
pub mod segment;
mod settings;
mod source;

pub use segment::Geometry;
pub use settings::ShmSettings;

use crate::contract::{
    Caps, Device, DeviceInfo, Domain, Exported, Identity, Imported, Locality, Transport,
    Unavailable, WireKey,
};
use crate::gpu::Gpu;
use crate::mem::{MapError, PacketSource, Region};
use crate::settings::AutoChoice;
use crate::sync::ring::{FIRST, MAX_PAYLOAD};
use rustix::io::Errno;
use std::sync::Arc;

/// The transport's name.
pub const NAME: &str = "shm";

/// The shared-memory transport.
#[derive(Debug, Clone)]
pub struct Shm {
    geometry: Geometry,
    kernel_copy: bool,
}

impl Shm {
    /// Makes the transport with rings and chunks of this size.
    pub fn new(geometry: Geometry) -> Self {
        Self { geometry, kernel_copy: true }
    }

    /// Makes the transport with these settings. `packet_size`: bytes.
    pub fn with(settings: &ShmSettings, packet_size: usize) -> Self {
        let [slots, chunks, chunk_size] =
            [settings.shm_slots(), settings.shm_chunks(), packet_size]
                .map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        let geometry = Geometry { slots, chunks, chunk_size };
        Self { geometry, kernel_copy: settings.kernel_copy() == AutoChoice::Auto }
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        // An attempt: a kernel or a container that refuses memfds or abstract sockets says so
        // here.
        segment::Segment::create(self.geometry).map_err(|error| {
            let limit = if error == Errno::FBIG { "; raise `ulimit -f`" } else { "" };
            Unavailable::new(NAME, format!("no shared memory: {error}{limit}"))
        })?;
        let namespace =
            handshake::SocketNamespace::here().map_err(|reason| Unavailable::new(NAME, reason))?;
        let note = format!(
            "memfd rings of {} slots, sockets in network namespace {}",
            self.geometry.slots, namespace.net_namespace
        );
        Ok(vec![DeviceInfo { name: "memory".into(), note }])
    }

    fn open(
        &self,
        _device: &DeviceInfo,
        identity: Identity,
    ) -> Result<Arc<dyn Domain>, Unavailable> {
        self.geometry.check().map_err(|reason| Unavailable::new(NAME, reason))?;
        if self.kernel_copy {
            kernel_copy::allow_peers();
        }
        let chunk = self.geometry.chunk_size as usize;
        let caps = Caps {
            am_inline: FIRST,
            am_copied: chunk.max(MAX_PAYLOAD),
            am_owned: 0,
            am_from_device: false,
            remote_memory: false,
            windows: false,
            polls_kernel: false,
            chunk: usize::MAX,
            locality: Locality::Node,
        };
        Ok(Arc::new(ShmDomain { transport: self.clone(), identity, caps }))
    }
}

struct ShmDomain {
    transport: Shm,
    identity: Identity,
    caps: Caps,
}

impl Domain for ShmDomain {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn export(&self, region: &Region) -> Result<Exported, MapError> {
        export::export(region)
    }

    fn import(&self, key: &WireKey, _: Option<&Arc<dyn Gpu>>) -> Result<Imported, MapError> {
        export::import(key)
    }

    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        if !packets.kind().is_host() {
            let reason =
                format!("it receives into host packets, not into {} memory", packets.kind());
            return Err(Unavailable::new(NAME, reason));
        }
        device::ShmDevice::open(&self.transport, self.identity.clone(), packets)
            .map(|device| -> Arc<dyn Device> { device })
    }
}
