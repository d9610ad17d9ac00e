//! Memory of simulated GPUs, which no CPU can touch, at both ends of every operation.

#![expect(unsafe_code, reason = "registrations of memory, and libibverbs by its functions")]

use crate::verbs::*;
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_simulators::nic::{Config, Visibility};
use carrack_transports::gpu::{Driver, Flavour, Gpu, HandleForm, HandleKey};
use carrack_transports::mem::Region;
use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{AccessFlags, MemoryRegion};
use std::os::fd::AsFd;
use std::sync::Arc;

const LEN: usize = 100_000;

fn bench() -> (Bench, FakeDriver) {
    let driver = FakeDriver::new(FakeConfig::devices(2)).unwrap();
    let gpus: Vec<Arc<dyn Driver>> = vec![Arc::new(driver.clone())];
    (Bench::simulated(Config { gpus, ..Config::devices(2) }), driver)
}

/// Registers memory of a GPU by its address.
fn register(node: &Node, region: &Region, access: AccessFlags) -> MemoryRegion {
    let addr = std::ptr::with_exposed_provenance_mut(region.addr());
    // SAFETY: the tests keep the memory until the registration has ended.
    unsafe { node.domain.register(addr, region.len(), access) }
        .expect("memory of a GPU is registered")
}

fn piece(region: &MemoryRegion, at: usize, len: usize) -> ibv::ibv_sge {
    ibv::ibv_sge { addr: (region.addr() + at) as u64, length: len as u32, lkey: region.lkey() }
}

#[test]
fn memory_of_gpus_is_sent_received_written_and_read() {
    let (bench, driver) = bench();
    let (qa, qb) = bench.connect(&Options::default());
    let near = driver.gpu(0).unwrap().allocate(LEN, Flavour::Plain).unwrap();
    let far = driver.gpu(1).unwrap().allocate(LEN, Flavour::Plain).unwrap();
    let (a, b) = (register(&bench.a, &near, all_access()), register(&bench.b, &far, all_access()));
    let sent = pattern(LEN, 1);
    near.whole().write(&sent).unwrap();
    post_receive(&qb, 1, &[piece(&b, 0, LEN)]);
    Request::send(&[piece(&a, 0, LEN)]).post(&qa);
    bench.a.success();
    bench.b.success();
    assert!(far.whole().to_vec().unwrap() == sent);
    let sent = pattern(LEN, 2);
    near.whole().write(&sent).unwrap();
    Request::write(&[piece(&a, 0, LEN)], (b.addr() as u64, b.rkey())).post(&qa);
    bench.a.success();
    assert!(far.whole().to_vec().unwrap() == sent);
    let there = pattern(LEN, 3);
    far.whole().write(&there).unwrap();
    Request::read(&[piece(&a, 0, LEN)], (b.addr() as u64, b.rkey())).post(&qa);
    bench.a.success();
    assert!(near.whole().to_vec().unwrap() == there);
    // One to 64 bytes, which real devices may put into the completion.
    for len in 1..=64 {
        Request::read(&[piece(&a, 64, len)], (b.addr() as u64, b.rkey())).post(&qa);
        bench.a.success();
    }
    assert!(near.whole().to_vec().unwrap()[64..128] == there[..64]);
    drop((a, b));
}

#[test]
fn words_of_gpus_are_changed_by_the_nic() {
    let (bench, driver) = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let far = driver.gpu(0).unwrap().allocate(64, Flavour::Shareable).unwrap();
    let b = register(&bench.b, &far, all_access());
    far.whole().write(&41_u64.to_ne_bytes()).unwrap();
    let a = bench.a.buffer(8);
    let word = (b.addr() as u64, b.rkey());
    Request::fetch_add(a.whole(), word, 1).post(&qa);
    bench.a.success();
    assert_eq!(a.word(0), 41);
    Request::compare_swap(a.whole(), word, 42, 7).post(&qa);
    bench.a.success();
    assert_eq!(a.word(0), 42);
    assert_eq!(far.slice(0, 8).unwrap().to_vec().unwrap(), 7_u64.to_ne_bytes());
    drop(b);
}

#[test]
fn memory_of_a_gpu_behind_a_descriptor_is_registered_as_a_dma_buf() {
    let (bench, driver) = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let gpu = driver.gpu(0).unwrap();
    let far = gpu.allocate(LEN, Flavour::Shareable).unwrap();
    let handle = gpu.export(&far, HandleForm::Fd).unwrap();
    let HandleKey::Fd(fd) = &handle.key else { panic!("no descriptor: {handle:?}") };
    // SAFETY: the tests keep the memory until the registration has ended.
    let b = unsafe {
        bench.b.domain.register_dmabuf(fd.as_fd(), 4096, 8192, 0x20_0000_1000, all_access())
    };
    let b = b.unwrap();
    let a = bench.a.buffer(8192);
    let sent = a.fill(4);
    Request::write(&[a.whole()], (0x20_0000_1000, b.rkey())).post(&qa);
    bench.a.success();
    assert!(far.slice(4096, 8192).unwrap().to_vec().unwrap() == sent);
    drop(b);
}

#[test]
fn without_a_driver_memory_of_a_gpu_is_not_registered() {
    let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
    let bench = Bench::simulated(Config::devices(2));
    let region = driver.gpu(0).unwrap().allocate(LEN, Flavour::Plain).unwrap();
    let addr = std::ptr::with_exposed_provenance_mut(region.addr());
    // SAFETY: as above.
    let refused = unsafe { bench.a.domain.register(addr, LEN, all_access()) };
    assert_eq!(refused.err().map(|why| why.errno), Some(libc::EFAULT));
}

#[test]
fn a_range_that_leaves_its_allocation_is_not_registered() {
    let (bench, driver) = bench();
    let region = driver.gpu(0).unwrap().allocate(4096, Flavour::Plain).unwrap();
    let addr = std::ptr::with_exposed_provenance_mut(region.addr());
    // SAFETY: as above; it is refused.
    let refused = unsafe { bench.a.domain.register(addr, 1 << 30, all_access()) };
    assert_eq!(refused.err().map(|why| why.errno), Some(libc::EFAULT));
}

#[test]
fn an_engine_that_fails_fails_the_operation_and_not_the_nic() {
    use carrack_simulators::gpu::{FailAt, Which};
    let (bench, driver) = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let far = driver.gpu(0).unwrap().allocate(LEN, Flavour::Plain).unwrap();
    let b = register(&bench.b, &far, all_access());
    let a = bench.a.buffer(64);
    driver.faults().fail_copies(FailAt::Event, Which::Nth(1), 700);
    Request::write(&[a.whole()], (b.addr() as u64, b.rkey())).post(&qa);
    assert_eq!(bench.a.completion().status, ibv::IBV_WC_REM_OP_ERR);
    drop(b);
}

#[test]
fn late_writes_may_be_those_to_gpus_alone() {
    let (bench, driver) = bench();
    bench.nic().faults().write_visibility(Visibility::WithRead, true);
    let (qa, _qb) = bench.connect(&Options::default());
    let far = driver.gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
    let on_gpu = register(&bench.b, &far, all_access());
    let (a, on_host) = (bench.a.buffer(64), bench.b.buffer(64));
    let sent = a.fill(1);
    far.whole().write(&[0; 64]).unwrap();
    let target = (on_gpu.addr() as u64, on_gpu.rkey());
    Request::write(&[a.whole()], target).post(&qa);
    Request::write(&[a.whole()], on_host.remote(0)).post(&qa);
    bench.a.success();
    bench.a.success();
    assert_eq!((on_host.read(0..64), far.whole().to_vec().unwrap()), (sent.clone(), vec![0; 64]));
    // The flush: a read of a byte behind the writes.
    Request::read(&[a.piece(0..1)], target).post(&qa);
    bench.a.success();
    assert_eq!(far.whole().to_vec().unwrap(), sent);
    drop(on_gpu);
}

#[test]
fn what_is_read_into_a_gpu_may_be_seen_late_until_the_gpu_is_flushed() {
    let (bench, driver) = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let near = driver.gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
    near.whole().write(&[0; 64]).unwrap();
    let (on_gpu, there) = (register(&bench.a, &near, all_access()), bench.b.buffer(64));
    let sent = there.fill(1);
    bench.nic().faults().write_visibility(Visibility::WithRead, true);
    Request::read(&[piece(&on_gpu, 0, 64)], there.remote(0)).post(&qa);
    bench.a.success();
    assert_eq!(near.whole().to_vec().unwrap(), [0; 64]);
    bench.nic().flush();
    assert_eq!(near.whole().to_vec().unwrap(), sent);
    drop(on_gpu);
}

#[test]
fn what_lies_behind_a_descriptor_counts_as_memory_of_a_gpu() {
    let (bench, driver) = bench();
    bench.nic().faults().write_visibility(Visibility::WithRead, true);
    let (qa, _qb) = bench.connect(&Options::default());
    let far = driver.gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
    far.whole().write(&[0; 64]).unwrap();
    let lent = far.gpu().unwrap().export_dmabuf(far.addr(), 64).unwrap();
    let iova = far.addr() as u64;
    // SAFETY: as above.
    let b = unsafe {
        bench.b.domain.register_dmabuf(lent.fd.as_fd(), lent.offset, 64, iova, all_access())
    };
    let (a, b) = (bench.a.buffer(64), b.unwrap());
    let sent = a.fill(1);
    Request::write(&[a.whole()], (iova, b.rkey())).post(&qa);
    bench.a.success();
    assert_eq!(far.whole().to_vec().unwrap(), [0; 64]);
    bench.nic().flush();
    assert_eq!(far.whole().to_vec().unwrap(), sent);
    drop(b);
}
