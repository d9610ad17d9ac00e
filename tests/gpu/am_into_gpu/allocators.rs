//! Allocators of the program's own: one over the driver's memory pools, and some that do not keep
//! their promise.

#![expect(unsafe_code, reason = "an allocator of packets vouches for its memory")]

use super::PATIENCE;
use super::roles::{Came, KINDS, SIZES, check, device_of, gpus, send};
use crate::support::liar::{Liar, part};
use carrack::packet::{
    AllocError, Chunk, GpuAllocator, HostAllocator, PacketAllocator, PacketPool, PacketSource,
};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::transports::mem::MemKind;
use carrack::{ProgressError, Rank, ResourceError, Runtime, Tag};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Memory of the driver's pools: `cuMemAllocAsync`, where the driver is NVIDIA's.
#[derive(Debug)]
struct Pooled {
    gpu: Arc<dyn Gpu>,
    asked: Arc<AtomicUsize>,
}

// SAFETY: each chunk is an allocation of its own, which its region keeps, and which only the chunk
// has.
unsafe impl PacketAllocator for Pooled {
    fn kind(&self) -> MemKind {
        MemKind::Device(self.gpu.info().uuid)
    }

    fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let region = self.gpu.allocate(layout.size(), Flavour::Pooled)?;
        Chunk::of_region(region)
            .ok_or(AllocError::OutOfMemory { bytes: layout.size(), kind: self.kind() })
    }
}

/// Messages land in the memory of an allocator that the program has written, large ones as well.
pub(crate) fn own(runtime: &Runtime) {
    let asked = Arc::new(AtomicUsize::new(0));
    let pooled = || {
        let gpu = gpus(runtime).pop().unwrap();
        Arc::new(Pooled { gpu, asked: asked.clone() }) as Arc<dyn PacketAllocator>
    };
    let device = device_of(runtime, Some(pooled()));
    let (came, name) = Came::register(runtime);
    runtime.barrier().unwrap();
    if runtime.rank() == Rank(0) {
        for (at, size) in SIZES.into_iter().enumerate() {
            send(runtime, &device, name, at % KINDS, (size, at as u64)).unwrap();
        }
        return;
    }
    let gpu = gpus(runtime).pop().unwrap();
    came.wait(runtime, SIZES.len());
    for status in &mut came.take() {
        let size = SIZES[status.tag.0 as usize];
        check(runtime, &gpu, status, size);
    }
    let large = SIZES.iter().filter(|&&size| size > runtime.max_eager()).count();
    assert_eq!(
        asked.load(Ordering::Relaxed),
        1 + large,
        "one block of packets, and one for each large message"
    );
}

/// Returns an allocator that claims that its memory is on a GPU.
fn says_on<F>(gpu: &Arc<dyn Gpu>, gives: F) -> Arc<dyn PacketAllocator>
where
    F: Fn(Layout) -> Result<Chunk, AllocError> + Send + Sync + 'static,
{
    Arc::new(Liar { kind: MemKind::Device(gpu.info().uuid), gpu: Some(gpu.clone()), gives })
}

fn of_flavour(
    gpu: &Arc<dyn Gpu>,
    flavour: Flavour,
) -> impl Fn(Layout) -> Result<Chunk, AllocError> + use<> {
    let gpu = gpu.clone();
    move |layout| Ok(Chunk::of_region(gpu.allocate(layout.size(), flavour)?).unwrap())
}

/// Runs the role: each lie is an error of the device's making, which names it.
pub(crate) fn lies(runtime: &Runtime) {
    if runtime.rank() == Rank(0) {
        return;
    }
    let gpus = gpus(runtime);
    let gpu = &gpus[0];
    let refused = |allocator: Arc<dyn PacketAllocator>| {
        let pool = runtime.packet_pool(allocator);
        match runtime.device().packet_pool(&pool).build() {
            Err(ResourceError::Packets(why)) => {
                assert!(pool.take().is_none() && pool.allocated() == 0, "nothing of it is used");
                why
            }
            other => panic!("{other:?}"),
        }
    };
    let said = MemKind::Device(gpu.info().uuid);
    let is = |why: AllocError, kind: MemKind| match why {
        AllocError::WrongKind { said: word, found, .. } => assert_eq!((word, found), (said, kind)),
        other => panic!("{other}"),
    };
    is(refused(says_on(gpu, |layout| HostAllocator.allocate(layout))), MemKind::Host);
    is(refused(says_on(gpu, of_flavour(gpu, Flavour::Pinned))), MemKind::Pinned);
    is(refused(says_on(gpu, of_flavour(gpu, Flavour::Managed))), MemKind::Managed(gpu.info().uuid));
    if let [_, .., other] = &gpus[..] {
        is(
            refused(says_on(gpu, of_flavour(other, Flavour::Plain))),
            MemKind::Device(other.info().uuid),
        );
    }
    let plain = Arc::new(GpuAllocator::on(gpu.clone()));
    let whole = Layout::from_size_align(2 << 20, 64).unwrap();
    let whole = Arc::new(plain.allocate(whole).unwrap());
    let short = {
        let whole = whole.clone();
        refused(says_on(gpu, move |layout| Ok(part(&whole, 0, layout.size() - 1))))
    };
    assert!(matches!(short, AllocError::TooShort { got, want, .. } if got == want - 1), "{short}");
    let askew = {
        let whole = whole.clone();
        refused(says_on(gpu, move |layout| Ok(part(&whole, 8, layout.size()))))
    };
    assert!(matches!(askew, AllocError::Misaligned { base, .. } if base % 64 == 8), "{askew}");
    let nowhere = refused(says_on(gpu, |layout| {
        let base = NonNull::new(std::ptr::without_provenance_mut(64)).unwrap();
        // SAFETY: no memory lies there, which is the lie; the device refuses it before any access.
        Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(())) })
    }));
    assert!(matches!(nowhere, AllocError::Nowhere { base: 64, .. }), "{nowhere}");
    // What one pool has, another cannot get; once it is given back, it can.
    let again = |offset: usize| {
        let whole = whole.clone();
        says_on(gpu, move |layout| Ok(part(&whole, offset, layout.size())))
    };
    let first = runtime.packet_pool(again(0));
    let packet = first.take().expect("it is as good as any");
    let overlap = refused(again(4096));
    assert!(
        matches!(overlap, AllocError::Overlap { other, .. } if other == packet.addr()),
        "{overlap}"
    );
    drop((first, packet));
    assert!(runtime.packet_pool(again(4096)).take().is_some());
    // Memory of a GPU that is said to be the host's: the CPU would go there.
    let gives = of_flavour(gpu, Flavour::Plain);
    let host = runtime.packet_pool(Arc::new(Liar { kind: MemKind::Host, gpu: None, gives }));
    assert!(host.take().is_none());
    let why = host.last_failure().unwrap();
    assert!(
        matches!(why, AllocError::WrongKind { said: MemKind::Host, found, .. } if found == said),
        "{why}"
    );
    // And no lie, but more than there is.
    let huge = PacketPool::new(plain, gpu.info().memory as usize / 8, 16);
    let why = match runtime.device().packet_pool(&huge).build() {
        Err(ResourceError::Packets(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(matches!(&why, AllocError::Gpu(error) if error.code == 2), "{why}");
}

/// Runs the role: the GPU has no more memory, then it has, and what came meanwhile has waited.
pub(crate) fn little(runtime: &Runtime) {
    const COUNT: usize = 300;
    let (came, name) = Came::register(runtime);
    if runtime.rank() == Rank(0) {
        let device = device_of(runtime, None);
        runtime.barrier().unwrap();
        for at in 0..COUNT {
            send(runtime, &device, name, 0, (64, at as u64)).unwrap();
        }
        return;
    }
    let gpu = gpus(runtime).pop().unwrap();
    let is_full = Arc::new(AtomicBool::new(false));
    let allocator = {
        let (gpu, is_full) = (gpu.clone(), is_full.clone());
        move |layout: Layout| {
            // More than there is: the driver itself refuses it.
            let more =
                if is_full.swap(true, Ordering::Relaxed) { gpu.info().memory as usize } else { 0 };
            let layout = Layout::from_size_align(layout.size() + more, layout.align()).unwrap();
            GpuAllocator::on(gpu.clone()).allocate(layout)
        }
    };
    // One block holds 256 packets.
    let drivers = runtime.gpu_drivers().to_vec();
    let pool = PacketPool::checked_by(drivers, says_on(&gpu, allocator), 8192, 512);
    let _device = runtime.device().packet_pool(&pool).build().unwrap();
    runtime.barrier().unwrap();
    let error = loop {
        if let Err(error) = runtime.progress_all() {
            break error;
        }
    };
    assert!(
        matches!(
            &error,
            ProgressError::NoPacketMemory(why, _) if matches!(&**why, AllocError::Gpu(why)
                if why.code == 2)
        ),
        "{error}"
    );
    assert_eq!(came.count(), 256, "those for which there are packets have come");
    for _ in 0..100 {
        assert!(runtime.progress_all().is_ok(), "it is told once");
    }
    assert_eq!(came.count(), 256);
    is_full.store(false, Ordering::Relaxed);
    runtime.wait_for(PATIENCE, || came.count() == COUNT).unwrap();
    for (at, status) in came.take().iter_mut().enumerate() {
        assert_eq!(status.tag, Tag(at as u64));
        check(runtime, &gpu, status, 64);
    }
}
