//! Packets: what messages land in, and where their memory comes from.
//!
//! The default pool allocates host memory. A pool over another [`PacketAllocator`], given to a device
//! ([`DeviceBuilder::packet_pool`](crate::DeviceBuilder::packet_pool)), makes active messages land in memory
//! of your choice: on a GPU with [`GpuAllocator`]. Handlers then get a [`Packet`] whose bytes safe code
//! cannot touch, and may keep it: it returns to its pool when it is dropped.

pub use carrack_transports::mem::{
    AllocError, Chunk, GpuAllocator, HostAllocator, Packet, PacketAllocator, PacketPool, PacketSource,
    PinnedAllocator,
};
