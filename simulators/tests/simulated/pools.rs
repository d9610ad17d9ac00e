//! Pools over allocators that keep their promise, and over those that do not.

#![expect(unsafe_code, reason = "GPU memory is handed over by address")]

use carrack_simulators::gpu::{FakeConfig, FakeDriver, FakeGpu};
use carrack_test_support::liar::{Liar, part};
use carrack_transports::gpu::{Driver, Flavour, Gpu};
use carrack_transports::mem::{
    AllocError, Chunk, GpuAllocator, HostAllocator, MemKind, Packet, PacketAllocator, PacketPool,
    PacketSource, PinnedAllocator,
};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const MIB: usize = 1 << 20;

/// Alignment of a slab in bytes, a cache line.
const ALIGN: usize = 64;

fn gpu_of(memory: usize) -> (FakeDriver, Arc<FakeGpu>) {
    let driver = FakeDriver::new(FakeConfig { memory, ..FakeConfig::devices(2) }).unwrap();
    let gpu = driver.gpu(0).unwrap();
    (driver, gpu)
}

#[test]
fn one_block_of_the_driver_is_cut_into_slabs() {
    let (driver, gpu) = gpu_of(64 * MIB);
    let pool = PacketPool::new(Arc::new(GpuAllocator::on(gpu)), 8 << 10, 512);
    let mut packets: Vec<Packet> = std::iter::from_fn(|| pool.take()).take(256).collect();
    assert_eq!(driver.counters().allocs, 1, "256 packets of 8 KiB are one block of 2 MiB");
    packets.extend(std::iter::from_fn(|| pool.take()));
    assert_eq!((packets.len(), pool.allocated(), driver.counters().allocs), (512, 512, 2));
    let mut places: Vec<usize> = packets.iter().map(Packet::addr).collect();
    places.sort_unstable();
    assert!(
        places.windows(2).all(|pair| pair[1] - pair[0] >= 8 << 10),
        "no packet overlaps another"
    );
    assert!(packets.iter().all(|packet| packet.as_slice().is_none()));
    drop(pool);
    assert_eq!(driver.counters().frees, 0, "packets keep their memory");
    drop(packets);
    assert_eq!(driver.counters().frees, 2);
}

#[test]
fn a_pool_on_a_gpu_that_is_full_says_so_and_grows_when_there_is_room() {
    let (_driver, gpu) = gpu_of(4 * MIB);
    let pool = PacketPool::new(Arc::new(GpuAllocator::on(gpu.clone())), 8 << 10, 512);
    let taken = gpu.allocate(2 * MIB, Flavour::Plain).unwrap();
    let packets: Vec<Packet> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(packets.len(), 256);
    let why = pool.last_failure().unwrap();
    assert!(matches!(&why, AllocError::Gpu(error) if error.code == 2), "{why}");
    assert!(!why.is_broken_promise() && why.to_string().contains("do not fit"), "{why}");
    drop(taken);
    assert!(pool.take().is_some(), "the rest has room now");
    assert_eq!(pool.last_failure(), None);
}

#[test]
fn memory_for_large_messages_is_of_the_allocators_kind_and_bounded() {
    let (driver, gpu) = gpu_of(16 * MIB);
    let pool = PacketPool::new(Arc::new(GpuAllocator::on(gpu.clone())), 8 << 10, 16);
    let region = pool.region(3 * MIB).unwrap();
    let known = driver.classify(region.addr()).unwrap().unwrap();
    assert_eq!((region.kind(), region.len(), region.id()), (known.kind, 3 * MIB, known.id));
    region.whole().write(&vec![7; 3 * MIB]).unwrap();
    assert_eq!(region.whole().to_vec().unwrap(), vec![7; 3 * MIB]);
    pool.limit_large(4 * MIB);
    let refused = pool.region(MIB + 1).unwrap_err();
    assert!(matches!(refused, AllocError::LargeLimit { used, .. } if used == 3 * MIB), "{refused}");
    let _small = pool.region(MIB).unwrap();
    drop(region);
    assert!(pool.region(2 * MIB).is_ok(), "what was dropped may be used again");
    pool.limit_large(usize::MAX);
    assert!(matches!(pool.region(100 * MIB), Err(AllocError::Gpu(error)) if error.code == 2));
}

#[test]
fn pinned_packets_are_for_the_cpu_as_well() {
    let (_driver, gpu) = gpu_of(4 * MIB);
    let pool = PacketPool::new(Arc::new(PinnedAllocator::near(gpu)), 100, 1);
    let packet = pool.take_with_len(100).unwrap();
    assert_eq!((packet.kind(), packet.as_slice().map(<[u8]>::len)), (MemKind::Pinned, Some(100)));
}

// ---- allocators that lie ------------------------------------------------------------------------

/// Creates a pool over an allocator that says it is the host's.
fn lying(
    gives: impl Fn(Layout) -> Result<Chunk, AllocError> + Send + Sync + 'static,
) -> PacketPool {
    PacketPool::new(Arc::new(Liar { kind: MemKind::Host, gpu: None, gives }), 64, 64)
}

/// Creates a pool over an allocator that says it is a GPU's.
fn lying_on(
    gpu: &Arc<FakeGpu>,
    gives: impl Fn(Layout) -> Result<Chunk, AllocError> + Send + Sync + 'static,
) -> PacketPool {
    let kind = MemKind::Device(gpu.info().uuid);
    let gpu: Arc<dyn Gpu> = gpu.clone();
    PacketPool::new(Arc::new(Liar { kind, gpu: Some(gpu), gives }), 8 << 10, 512)
}

#[track_caller]
fn refused(pool: &PacketPool) -> AllocError {
    assert!(pool.take().is_none(), "memory that was a lie is used");
    assert!(pool.take().is_none());
    let why = pool.last_failure().unwrap();
    assert!(why.is_broken_promise(), "{why}");
    assert_eq!(pool.allocated() % 256, 0);
    why
}

#[test]
fn memory_that_is_too_short_or_misaligned_or_nowhere_is_named_and_not_used() {
    let why = refused(&lying(|layout| {
        HostAllocator.allocate(Layout::from_size_align(layout.size() / 2, layout.align()).unwrap())
    }));
    assert!(matches!(why, AllocError::TooShort { got: 512, want: 1024, .. }), "{why}");
    let why = refused(&lying(|layout| {
        let larger = Layout::from_size_align(layout.size() + 64, layout.align()).unwrap();
        Ok(part(&Arc::new(HostAllocator.allocate(larger)?), 8, layout.size()))
    }));
    assert!(matches!(why, AllocError::Misaligned { align: ALIGN, .. }), "{why}");
    for at in [64, usize::MAX - 63] {
        let why = refused(&lying(move |layout| {
            let base = NonNull::new(std::ptr::without_provenance_mut(at)).unwrap();
            // SAFETY: it is not, which is the lie.
            Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(())) })
        }));
        assert!(matches!(why, AllocError::Nowhere { base, .. } if base == at), "{why}");
    }
}

#[test]
fn memory_that_is_in_use_already_is_named_and_not_used() {
    let (_driver, gpu) = gpu_of(64 * MIB);
    let whole = Arc::new(GpuAllocator::on(gpu.clone()).allocate(layout(8 * MIB)).unwrap());
    // The second block begins in the midst of the first.
    let twice = {
        let (whole, turn) = (whole.clone(), AtomicUsize::new(0));
        lying_on(&gpu, move |layout| {
            Ok(part(&whole, turn.fetch_add(1, Ordering::Relaxed) * MIB, layout.size()))
        })
    };
    let packets: Vec<Packet> = std::iter::from_fn(|| twice.take()).collect();
    assert_eq!(packets.len(), 256, "the first block is as good as any");
    let base = whole.base().as_ptr() as usize;
    let why = refused(&twice);
    let AllocError::Overlap { base: second, other, other_len, .. } = why else { panic!("{why}") };
    assert_eq!((second, other, other_len), (base + MIB, base, 2 * MIB));
    // Another pool's is as well known, and free again when that pool is gone.
    let other = {
        let whole = whole.clone();
        move |layout: Layout| Ok(part(&whole, MIB, layout.size()))
    };
    let why = refused(&lying_on(&gpu, other.clone()));
    assert!(matches!(why, AllocError::Overlap { .. }), "{why}");
    drop((packets, twice));
    assert!(lying_on(&gpu, other).take().is_some());
}

#[test]
fn memory_of_another_kind_than_was_said_is_named_and_not_used() {
    let (driver, gpu) = gpu_of(64 * MIB);
    let other = driver.gpu(1).unwrap();
    // On a GPU, says the allocator.
    let gives = |gpu: Arc<FakeGpu>, flavour: Flavour| {
        move |layout: Layout| Ok(Chunk::of_region(gpu.allocate(layout.size(), flavour)?).unwrap())
    };
    for (found, pool) in [
        (MemKind::Host, lying_on(&gpu, |layout| HostAllocator.allocate(layout))),
        (MemKind::Pinned, lying_on(&gpu, gives(gpu.clone(), Flavour::Pinned))),
        (MemKind::Managed(gpu.info().uuid), lying_on(&gpu, gives(gpu.clone(), Flavour::Managed))),
        (MemKind::Device(other.info().uuid), lying_on(&gpu, gives(other.clone(), Flavour::Plain))),
    ] {
        let why = refused(&pool);
        let AllocError::WrongKind { said, found: told, .. } = why else { panic!("{why}") };
        assert_eq!((said, told), (MemKind::Device(gpu.info().uuid), found));
        assert!(matches!(pool.region(MIB), Err(AllocError::WrongKind { .. })));
    }
    // An allocation that ends before its chunk does: the rest belongs to no allocation.
    let short = lying_on(&gpu, {
        let gpu = gpu.clone();
        move |layout| {
            let region = gpu.allocate(layout.size() / 2, Flavour::Plain)?;
            let base = NonNull::new(region.addr() as *mut u8).unwrap();
            // SAFETY: it is half as long, which is the lie.
            Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(region)) })
        }
    });
    assert!(matches!(refused(&short), AllocError::WrongKind { found: MemKind::Host, .. }));
    // The host's, says the allocator: then a driver that is known has to be asked.
    let host = Liar { kind: MemKind::Host, gpu: None, gives: gives(gpu.clone(), Flavour::Plain) };
    let pool = PacketPool::checked_by(vec![Arc::new(driver.clone())], Arc::new(host), 64, 16);
    assert!(matches!(refused(&pool), AllocError::WrongKind { said: MemKind::Host, .. }));
}

#[test]
fn an_allocator_that_cannot_say_what_it_has_is_not_even_asked() {
    let (driver, gpu) = gpu_of(4 * MIB);
    let uuid = gpu.info().uuid;
    let other: Arc<dyn Gpu> = driver.gpu(1).unwrap();
    let own: Arc<dyn Gpu> = gpu;
    for (kind, gpu) in [
        (MemKind::Unknown, None),
        (MemKind::Managed(uuid), Some(own)),
        (MemKind::Device(uuid), None),
        (MemKind::Device(uuid), Some(other)),
    ] {
        let gives = |_| -> Result<Chunk, AllocError> { panic!("it was asked") };
        let pool = PacketPool::new(Arc::new(Liar { kind, gpu, gives }), 64, 16);
        assert!(matches!(refused(&pool), AllocError::Unsuitable { .. }));
    }
}

fn layout(len: usize) -> Layout {
    Layout::from_size_align(len, ALIGN).unwrap()
}
