//! Two ranks of this process over shared memory, for tests.

use super::{Geometry, Shm};
use crate::contract::{Batch, Device, Identity, Link, PeerId, Transport as _};
use crate::mem::PacketPool;
use crate::mem::allocator::HostAllocator;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Returns the devices of ranks 0 and 1, and a link from 0 to 1 that is up.
pub(super) fn linked(geometry: Geometry) -> ([Arc<dyn Device>; 2], Arc<dyn Link>) {
    let transport = Shm::new(geometry);
    let info = transport.devices().unwrap().remove(0);
    let [zero, one] = [0, 1].map(|me| {
        let identity = Identity { me: PeerId(me), ranks: 2, secret: [7; 16] };
        let packets = PacketPool::new(Arc::new(HostAllocator), 4096, 64);
        transport.open(&info, identity).unwrap().device(Arc::new(packets)).unwrap()
    });
    let link = zero.connect(&one.address(), PeerId(1)).unwrap();
    let (mut batch, begun) = (Batch::new(32), Instant::now());
    while !link.is_up() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not connected");
        for device in [&one, &zero] {
            device.poll(&mut batch, &mut |batch: &mut Batch| _ = batch.drain());
        }
    }
    ([zero, one], link)
}
