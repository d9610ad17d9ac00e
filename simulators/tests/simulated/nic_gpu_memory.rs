//! GPU memory that a NIC is to reach.

#![expect(unsafe_code, reason = "GPU memory is handed over by address")]

use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_simulators::nic::{Config, SimulatedNic};
use carrack_transports::contract::{Batch, Device, Exposed, Identity, Link, PeerId, Transport};
use carrack_transports::gpu::{Driver, Flavour, Gpu};
use carrack_transports::mem::{AllocId, Buffer, HostAllocator, PacketPool, Region};
use carrack_transports::verbs::VerbsOptions;
use std::ptr::NonNull;
use std::sync::Arc;

/// A device and its link to itself.
struct Fixture {
    driver: FakeDriver,
    link: Arc<dyn Link>,
    device: Arc<dyn Device>,
}

fn fixture() -> Fixture {
    let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
    let gpus: Vec<Arc<dyn Driver>> = vec![Arc::new(driver.clone())];
    let nic = Arc::new(SimulatedNic::new(Config { gpus, ..Config::default() }).unwrap());
    let transport = nic.transport(VerbsOptions::default());
    let identity = Identity { me: PeerId(0), ranks: 1, secret: [7; 16] };
    let domain = transport.open(&transport.devices().unwrap()[0], identity).unwrap();
    let packets = Arc::new(PacketPool::new(Arc::new(HostAllocator), 8 << 10, 4096));
    let device = domain.device(packets).unwrap();
    let link = device.connect(&device.address(), PeerId(0)).unwrap();
    let mut batch = Batch::new(8);
    while !link.is_up() {
        device.poll(&mut batch, &mut |batch: &mut Batch| _ = batch.drain());
        _ = batch.drain();
    }
    Fixture { driver, link, device }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.device.close();
    }
}

fn register(fixture: &Fixture, region: &Region) -> Result<Box<dyn Exposed>, String> {
    fixture.link.expose(Buffer::from(region.whole())).map_err(|(why, _)| why)
}

/// Returns a region as of memory that the program frees itself: nothing keeps what lies there.
fn lent(region: &Region, id: AllocId) -> Region {
    let base = NonNull::new(region.addr() as *mut u8).unwrap();
    let gpu = region.gpu().cloned();
    // SAFETY: only an engine reads and writes it, and that checks the memory.
    unsafe { Region::from_parts(base, region.len(), region.kind(), id, gpu, Box::new(())) }
}

#[test]
fn memory_that_was_freed_is_not_registered_nor_what_lies_there_since() {
    let fixture = fixture();
    let driver = &fixture.driver;
    let gpu = driver.gpu(0).unwrap();
    driver.faults().reuse_addresses(true);
    let region = gpu.allocate(5000, Flavour::Plain).unwrap();
    let (lent, addr) = (lent(&region, region.id()), region.addr());
    drop(register(&fixture, &lent).unwrap());
    drop(region);
    assert!(register(&fixture, &lent).map(drop).unwrap_err().contains("has been freed"));
    let next = gpu.allocate(5000, Flavour::Plain).unwrap();
    assert_eq!(next.addr(), addr);
    assert!(register(&fixture, &lent).map(drop).unwrap_err().contains("has been freed"));
    // That says nothing of the NIC and the GPU.
    register(&fixture, &next).unwrap();
}

/// dma-buf rule 4: it may be gone.
#[test]
fn a_registration_ends_without_a_question_to_the_driver() {
    let fixture = fixture();
    let driver = &fixture.driver;
    let gpu = driver.gpu(0).unwrap();
    for refuse in [false, true] {
        driver.faults().refuse_dmabufs(refuse);
        let region = gpu.allocate(5000, Flavour::Plain).unwrap();
        let exposed = register(&fixture, &lent(&region, region.id())).unwrap();
        drop(region);
        let before = driver.counters();
        drop(exposed);
        assert_eq!(driver.counters(), before);
    }
}

/// dma-buf rule 5.
#[test]
fn managed_memory_is_refused_by_name() {
    let fixture = fixture();
    let driver = &fixture.driver;
    let region = driver.gpu(0).unwrap().allocate(5000, Flavour::Managed).unwrap();
    let why = register(&fixture, &region).map(drop).unwrap_err();
    assert!(why.contains("managed"), "{why}");
}
