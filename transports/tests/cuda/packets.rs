//! Packets in memory of a program's own allocator, over the driver's memory pools: raw calls, as a
//! program makes them.

use crate::support::{need, payload};
use crate::user;
use carrack_transports::gpu::{Driver, Flavour, Gpu};
use carrack_transports::mem::copy::copy_and_wait;
use carrack_transports::mem::{
    AllocError, Buffer, Chunk, GpuAllocator, MemKind, MemRef, PacketAllocator, PacketPool,
    PacketSource,
};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;

/// CUDA objects that a program already has: a context, and a stream of its own.
#[derive(Debug, Clone, Copy)]
struct Own {
    context: usize,
    stream: usize,
}

#[derive(Debug)]
struct FromPool {
    gpu: Arc<dyn Gpu>,
    own: Own,
}

struct Memory(usize, Own);

impl Drop for Memory {
    fn drop(&mut self) {
        let before = user::current();
        user::set_current(self.1.context);
        user::free_to_pool(self.0, self.1.stream);
        user::set_current(before);
    }
}

// SAFETY: each chunk is an allocation of its own of that device, at least as aligned as a packet,
// and freed with its owner.
unsafe impl PacketAllocator for FromPool {
    fn kind(&self) -> MemKind {
        MemKind::Device(self.gpu.info().uuid)
    }

    fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
        let none = AllocError::OutOfMemory { bytes: layout.size(), kind: self.kind() };
        let before = user::current();
        user::set_current(self.own.context);
        let ptr = user::alloc_from_pool(0, layout.size(), self.own.stream);
        user::set_current(before);
        let memory = Memory(ptr.ok_or(none.clone())?, self.own);
        let base = NonNull::new(memory.0 as *mut u8).ok_or(none)?;
        // SAFETY: allocated above, for this chunk alone, until its owner is dropped.
        Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(memory)) })
    }
}

fn own(gpu: &Arc<dyn Gpu>) -> Arc<FromPool> {
    let context = user::primary(0);
    user::set_current(context);
    Arc::new(FromPool { gpu: gpu.clone(), own: Own { context, stream: user::stream(1) } })
}

/// Packets lie in the program's memory, and hold the bytes that the library's engines copy there.
#[test]
fn packets_of_a_programs_own_memory_pool() {
    let Some((driver, gpus)) = need(1) else { return };
    let gpu = &gpus[0];
    let pool = PacketPool::checked_by(vec![Arc::new(driver)], own(gpu), 8192, 300);
    let mut packets: Vec<_> = std::iter::from_fn(|| pool.take_with_len(8192)).collect();
    assert_eq!(packets.len(), 304, "{:?}", pool.last_failure());
    for (seed, packet) in (0..).zip(&mut packets) {
        assert!(packet.as_slice().is_none(), "no CPU goes there");
        assert_eq!(driver.classify(packet.addr()).unwrap().unwrap().kind, pool.kind());
        copy_and_wait(packet.view_mut(), MemRef::host(&payload(8192, seed))).unwrap();
    }
    for (seed, packet) in (0..).zip(packets) {
        assert_eq!(Buffer::Packet(packet).to_vec().unwrap(), payload(8192, seed));
    }
    let large = pool.region((5 << 20) + 1).unwrap();
    large.whole().write(&payload((5 << 20) + 1, 9)).unwrap();
    assert_eq!(large.whole().to_vec().unwrap(), payload((5 << 20) + 1, 9));
    let known = driver.classify(large.addr()).unwrap().unwrap();
    assert_eq!((large.kind(), large.id()), (known.kind, known.id));
}

/// More memory than the device has is an error, for the program's pool and for the library's.
#[test]
fn more_packets_than_there_is_memory_are_an_error() {
    let Some((_, gpus)) = need(1) else { return };
    let gpu = &gpus[0];
    let memory = usize::try_from(gpu.info().memory).unwrap();
    for allocator in [own(gpu) as Arc<dyn PacketAllocator>, Arc::new(GpuAllocator::on(gpu.clone()))]
    {
        // Allocated at once, so that other tests keep having memory.
        let pool = PacketPool::new(allocator, memory / 8, 16);
        assert!(pool.take().is_none());
        let why = pool.last_failure().unwrap();
        assert!(!why.is_broken_promise(), "{why}");
        assert!(pool.region(2 * memory).is_err());
    }
}

/// Memory that the driver reports as another kind is not used.
#[test]
fn memory_that_is_not_what_its_allocator_says_is_refused() {
    let Some((driver, gpus)) = need(1) else { return };
    let (gpu, uuid) = (&gpus[0], gpus[0].info().uuid);

    /// Gives the same memory again and again.
    #[derive(Debug)]
    struct Gives(MemKind, Option<Arc<dyn Gpu>>, usize);

    // SAFETY: it breaks the promise on purpose; the pool finds that out before it uses the memory.
    unsafe impl PacketAllocator for Gives {
        fn kind(&self) -> MemKind {
            self.0
        }
        fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
            self.1.as_ref()
        }
        fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
            let base = NonNull::new(self.2 as *mut u8).unwrap();
            // SAFETY: false on purpose: the memory is not of that kind.
            Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(())) })
        }
    }

    let refused = |kind, on: Option<&Arc<dyn Gpu>>, addr| {
        let allocator = Arc::new(Gives(kind, on.cloned(), addr));
        let pool = PacketPool::checked_by(vec![Arc::new(driver)], allocator, 8192, 16);
        assert!(pool.take().is_none(), "it was used");
        pool.last_failure().unwrap()
    };
    let kind = MemKind::Device(uuid);
    for (flavour, found) in [
        (Flavour::Pinned, MemKind::Pinned),
        (Flavour::Managed, MemKind::Managed(uuid)),
        (Flavour::Plain, MemKind::Device(uuid)),
    ] {
        let memory = gpu.allocate(2 << 20, flavour).unwrap();
        let (said, on) = if found == kind { (MemKind::Host, None) } else { (kind, Some(gpu)) };
        let why = refused(said, on, memory.addr());
        assert_eq!(why, AllocError::WrongKind { at: memory.addr(), said, found });
    }
    if let [_, other, ..] = &gpus[..] {
        let memory = other.allocate(2 << 20, Flavour::Plain).unwrap();
        let found = MemKind::Device(other.info().uuid);
        assert_eq!(
            refused(kind, Some(gpu), memory.addr()),
            AllocError::WrongKind { at: memory.addr(), said: kind, found }
        );
    }
}
