//! Roles of two ranks: the first sends, and the packets of the second's second device lie on a
//! GPU.

use super::PATIENCE;
use crate::support::words::{are_all, fill, wrong};
use carrack::packet::{GpuAllocator, PacketAllocator, PacketPool, PacketSource};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::transports::mem::copy::copy_and_wait;
use carrack::transports::mem::{MemKind, MemRef};
use carrack::{
    Buffer, Device, Handler, OpError, PostError, ProgressError, Rank, RemoteComp, Runtime, Status,
    Synchronizer, Tag,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// In place, in one slot and in several, in a chunk, as long as a packet, and longer.
pub(crate) const SIZES: [usize; 12] =
    [0, 1, 8, 40, 41, 208, 209, 4096, 8192, 8193, 100_001, (3 << 20) + 1];
const PACKET: usize = 8192;

/// Borrowed bytes, a vector, pinned memory, and memory of each of two devices.
pub(crate) const KINDS: usize = 5;

const POISON: u8 = 0xa9;

pub(crate) fn gpus(runtime: &Runtime) -> Vec<Arc<dyn Gpu>> {
    runtime
        .gpu_drivers()
        .iter()
        .find_map(|driver| driver.devices().ok())
        .expect("a driver with devices")
}

fn filled(len: usize, salt: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, salt, 0);
    bytes
}

/// Returns the device that messages come to. Its packets are on the last GPU that there is, or as
/// the allocator says.
pub(crate) fn device_of(runtime: &Runtime, allocator: Option<Arc<dyn PacketAllocator>>) -> Device {
    if runtime.rank() == Rank(0) {
        return runtime.device().build().unwrap();
    }
    let last =
        || Arc::new(GpuAllocator::on(gpus(runtime).pop().unwrap())) as Arc<dyn PacketAllocator>;
    let pool = runtime.packet_pool(allocator.unwrap_or_else(last));
    runtime.device().packet_pool(&pool).build().unwrap()
}

/// Statuses that have come to a handler.
#[derive(Default, Clone)]
pub(crate) struct Came(Arc<Mutex<Vec<Status>>>);

impl Came {
    /// Registers a place for messages, by the name that it has on both ranks.
    pub(crate) fn register(runtime: &Runtime) -> (Self, RemoteComp) {
        let came = Self::default();
        let into = came.clone();
        let handler = Handler::new(move |status| into.0.lock().push(status));
        (came, runtime.register_comp(&handler).unwrap())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.lock().len()
    }

    pub(crate) fn wait(&self, runtime: &Runtime, count: usize) {
        runtime.wait_for(PATIENCE, || self.count() >= count).expect("they come");
    }

    pub(crate) fn take(&self) -> Vec<Status> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Sends one active message, and waits until its buffer is free.
pub(crate) fn send(
    runtime: &Runtime,
    device: &Device,
    name: RemoteComp,
    kind: usize,
    (size, tag): (usize, u64),
) -> Result<Status, OpError> {
    let bytes = filled(size, tag);
    if kind == 0 {
        return completed(runtime, |done| {
            let am = runtime.post_am(Rank(1), bytes, name).device(device).tag(Tag(tag));
            am.comp(done).submit()
        });
    }
    let mut buffer = Some(holding(&gpus(runtime), kind, &bytes));
    completed(runtime, |done| {
        let am =
            runtime.post_am(Rank(1), buffer.take().unwrap(), name).device(device).tag(Tag(tag));
        am.comp(done).submit()
    })
}

fn completed(
    runtime: &Runtime,
    submit: impl FnOnce(&Synchronizer) -> Result<(), PostError>,
) -> Result<Status, OpError> {
    let done = Synchronizer::new(1);
    submit(&done).unwrap();
    runtime.wait_for(PATIENCE, || done.test()).expect("it comes to an end");
    done.take().unwrap().remove(0).ok()
}

fn holding(gpus: &[Arc<dyn Gpu>], kind: usize, bytes: &[u8]) -> Buffer {
    let len = bytes.len().max(1);
    let region = match kind {
        1 => return bytes.to_vec().into(),
        2 => gpus[0].allocate(len, Flavour::Pinned),
        3 => gpus[0].allocate(len, Flavour::Plain),
        _ => gpus[gpus.len() - 1].allocate(len, Flavour::Shareable),
    };
    let slice = region.unwrap().slice(0, bytes.len()).unwrap();
    if !bytes.is_empty() {
        slice.write(bytes).unwrap();
    }
    slice.into()
}

/// Writes poison into all packets that there are.
fn poison(pool: &PacketPool) {
    let mut all: Vec<_> = std::iter::from_fn(|| pool.take_with_len(PACKET)).collect();
    assert_eq!(all.len(), 64);
    for packet in &mut all {
        copy_and_wait(packet.view_mut(), MemRef::host(&[POISON; PACKET])).unwrap();
    }
}

/// Looks at all that can be known of a message: it lies on that GPU, and holds what was sent and
/// nothing else.
pub(crate) fn check(runtime: &Runtime, gpu: &Arc<dyn Gpu>, status: &mut Status, size: usize) {
    let (tag, buffer) = (status.tag, &mut status.buffer);
    assert!(status.error.is_none(), "{:?}", status.error);
    assert_eq!((status.rank, status.size, buffer.len()), (Rank(0), size, size), "{tag:?}");
    if size == 0 {
        return;
    }
    let kind = MemKind::Device(gpu.info().uuid);
    assert_eq!(buffer.kind(), kind, "{tag:?}, {size} B");
    assert!(buffer.as_slice().is_none(), "safe code is shown no bytes on a GPU");
    let addr = buffer.device_addr().expect("an address for a kernel");
    for at in [addr, addr + size - 1] {
        let known = runtime.gpu_drivers().iter().find_map(|driver| driver.classify(at).unwrap());
        assert_eq!(known.unwrap().kind, kind, "the driver knows it");
    }
    assert_eq!(wrong(&buffer.to_vec().unwrap(), tag.0, 0), None, "{tag:?}, {size} B");
    assert_eq!(matches!(buffer, Buffer::Packet(_)), size <= PACKET);
}

/// Messages of all lengths, from memory of all kinds.
pub(crate) fn lands(runtime: &Runtime) {
    let device = device_of(runtime, None);
    let (came, name) = Came::register(runtime);
    if runtime.rank() == Rank(1) {
        poison(device.packet_pool());
    }
    runtime.barrier().unwrap();
    let all = || (0..KINDS).flat_map(|kind| SIZES.map(|size| (kind, size)));
    if runtime.rank() == Rank(0) {
        for (at, (kind, size)) in all().enumerate() {
            send(runtime, &device, name, kind, (size, at as u64)).unwrap();
        }
        // They come back, from the memory in which they landed.
        for (at, (_, size)) in all().enumerate() {
            let back = completed(runtime, |done| {
                runtime.post_recv(Rank(1), vec![0; size], Tag(at as u64)).comp(done).submit()
            });
            let bytes = back.unwrap().buffer.to_vec().unwrap();
            assert_eq!((bytes.len(), wrong(&bytes, at as u64, 0)), (size, None));
        }
        return;
    }
    let gpu = gpus(runtime).pop().unwrap();
    came.wait(runtime, all().count());

    let mut kept = came.take();
    kept.sort_by_key(|status| status.tag.0);
    for (status, (_, size)) in kept.iter_mut().zip(all()) {
        check(runtime, &gpu, status, size);
        let mut buffer = Some(std::mem::take(&mut status.buffer));
        let back = completed(runtime, |done| {
            let send = runtime.post_send(Rank(0), buffer.take().unwrap(), status.tag);
            send.comp(done).submit()
        });
        status.buffer = back.unwrap().buffer;
        // Only the payload lies in the chunk: there is no header before it or behind it.
        if let Buffer::Packet(packet) = &mut status.buffer {
            packet.set_len(PACKET);
            let rest = status.buffer.to_vec().unwrap().split_off(size);
            assert!(are_all(&[&rest], POISON), "{size} B: something else is in the chunk");
        }
    }
    // They are kept until now, and go back from another thread.
    let pool = device.packet_pool();
    let packets = kept.iter().filter(|status| matches!(status.buffer, Buffer::Packet(_))).count();
    assert_eq!(packets, KINDS * SIZES.iter().filter(|&&size| (1..=PACKET).contains(&size)).count());
    let free: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(free.len(), 64 - packets);
    std::thread::spawn(move || drop(kept)).join().unwrap();
    let again: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(again.len(), packets);
}

/// Sends more messages than the pool has packets, so that it runs dry repeatedly. Some are checked
/// in the handler, and all for their order.
pub(crate) fn order(runtime: &Runtime) {
    const COUNT: u64 = 3000;
    let size = |at: u64| [8, 0, 8192, 40, 1000, 41, 209, 3][(at % 8) as usize];
    let device = device_of(runtime, None);
    let next = Arc::new(Mutex::new(0));
    let handler = {
        let next = next.clone();
        Handler::new(move |status| {
            let mut next = next.lock();
            assert_eq!((status.tag, status.size), (Tag(*next), size(*next)));
            if next.is_multiple_of(7) {
                assert_eq!(wrong(&status.buffer.to_vec().unwrap(), *next, 0), None);
            }
            *next += 1;
        })
    };
    let name = runtime.register_comp(&handler).unwrap();
    runtime.barrier().unwrap();
    if runtime.rank() == Rank(0) {
        for at in 0..COUNT {
            let bytes = filled(size(at), at);
            let mut am = runtime.post_am(Rank(1), bytes, name).device(&device).tag(Tag(at));
            while am.try_submit().unwrap().is_retry() {
                runtime.progress_all().unwrap();
            }
        }
        runtime.wait_drained(&device, PATIENCE).unwrap();
        return;
    }
    // A handler that panicked would be an error of progress.
    runtime.wait_for(PATIENCE, || *next.lock() == COUNT).unwrap();
}

/// Runs the role: a large message finds no room where it is to go. Both sides are told, and the
/// next one finds room.
pub(crate) fn full(runtime: &Runtime) {
    let device = device_of(runtime, None);
    let (came, name) = Came::register(runtime);
    if runtime.rank() == Rank(1) {
        device.packet_pool().limit_large(1 << 20);
    }
    runtime.barrier().unwrap();
    if runtime.rank() == Rank(0) {
        for kind in [1, 3] {
            // Not before the other rank looks for the error: who makes progress meanwhile would be
            // told of it.
            runtime.post_recv(Rank(1), vec![0], Tag(77)).wait().unwrap();
            let refused = send(runtime, &device, name, kind, (2 << 20, 1)).unwrap_err();
            assert!(matches!(refused, OpError::Refused(_)), "{refused}");
            send(runtime, &device, name, kind, (1 << 20, 2)).unwrap();
        }
        return;
    }
    let gpu = gpus(runtime).pop().unwrap();
    for _ in 0..2 {
        runtime.post_send(Rank(0), &[1], Tag(77)).submit().unwrap();
        let error = loop {
            match runtime.progress_all() {
                Ok(_) => assert_eq!(came.count(), 0, "there is no room for it"),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error, ProgressError::NoMemory { from: Rank(0), size, .. } if size == 2 << 20),
            "{error}"
        );
        assert!(error.to_string().contains("large message"), "the reason: {error}");
        came.wait(runtime, 1);
        check(runtime, &gpu, &mut came.take()[0], 1 << 20);
    }
}
