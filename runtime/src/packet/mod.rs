//! Packets: what messages land in, and where their memory comes from.
//!
//! The default pool allocates host memory. A pool over another [`PacketAllocator`], given to a
//! device ([`DeviceBuilder::packet_pool`](crate::DeviceBuilder::packet_pool)), makes active
//! messages land in memory of your choice: on a GPU with [`GpuAllocator`], or with one of your own.
//! Handlers then get a [`Packet`] whose bytes safe code cannot touch, and may keep it: it returns
//! to its pool when it is dropped, on whichever thread.
//! [`Buffer::device_addr`](crate::Buffer::device_addr) is its address, for a kernel.
//!
//! | message | lands in |
//! |---|---|
//! | without bytes | nothing: an empty buffer |
//! | of up to a packet's length | a packet; with one thread that makes progress they are handed over in the order in which they came |
//! | longer | a region of the same allocator's, freed when it is dropped; [`PacketPool::limit_large`] bounds these |
//!
//! While there is no packet, messages wait with their senders, and progress says why:
//! [`NoPacket`](crate::ProgressError::NoPacket) when they are out,
//! [`NoPacketMemory`](crate::ProgressError::NoPacketMemory) when the GPU is full. A longer message
//! for which there is no memory is an error on both sides. An allocator that gives what it must not
//! is refused when the device is made.

pub use carrack_transports::mem::{
    AllocError, Chunk, GpuAllocator, HostAllocator, Packet, PacketAllocator, PacketPool,
    PacketSource, PinnedAllocator,
};
