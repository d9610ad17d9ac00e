//! Packets: the buffers that messages land in, and the source of their memory.
//!
//! The default pool allocates host memory. A device may get a pool over another [`PacketAllocator`]
//! ([`DeviceBuilder::packet_pool`](crate::DeviceBuilder::packet_pool)). Active messages then land
//! in its memory: a GPU's with [`GpuAllocator`], or any other with an allocator of your own.
//! Handlers then get a [`Packet`] whose bytes safe code cannot touch, and may keep it. It returns
//! to its pool when it is dropped, on any thread.
//! [`Buffer::device_addr`](crate::Buffer::device_addr) is its address, for a kernel.
//!
//! | message | lands in |
//! |---|---|
//! | without bytes | nothing: an empty buffer |
//! | of up to a packet's length | a packet |
//! | longer | a region of the same allocator, freed when it is dropped |
//!
//! With one thread that makes progress, messages in packets are handed over in order of arrival.
//! [`PacketPool::limit_large`] bounds the regions.
//!
//! While no packet is available, messages wait with their senders, and progress reports the reason.
//! It is [`NoPacket`](crate::ProgressError::NoPacket) if all are in use, and
//! [`NoPacketMemory`](crate::ProgressError::NoPacketMemory) if the GPU is full. A longer message
//! without memory for it is an error on both sides. An allocator whose memory is not of its
//! promised kind is refused when the device is made.

pub use carrack_transports::mem::{
    AllocError, Chunk, GpuAllocator, HostAllocator, Packet, PacketAllocator, PacketPool,
    PacketSource, PinnedAllocator,
};
