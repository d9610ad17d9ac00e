//! Submits that passed their checks before a side closed, and reach the queue after the close.

use super::*;
use crate::contract::Submit;
use crate::mem::{HostAllocator, PacketPool, Region};

fn device(me: u32) -> LoopbackDevice {
    let identity = Identity { me: PeerId(me), ranks: 2, secret: [7; 16] };
    let packets = Arc::new(PacketPool::new(Arc::new(HostAllocator), 4096, 16));
    Loopback::new(4096).domain(identity).open_device(packets).unwrap()
}

fn ends_of(device: &LoopbackDevice) -> usize {
    let (mut batch, mut ends) = (Batch::new(8), 0);
    while device.poll(&mut batch, &mut |_| {}) == Polled::Some {
        ends += batch.drain().filter(|event| matches!(event, Event::Completion { .. })).count();
    }
    ends
}

#[test]
fn an_operation_that_comes_to_its_queue_behind_a_close_ends_once() {
    let region = Region::host(100);
    for sender_closes in [false, true] {
        let (here, there) = (device(0), device(1));
        let link = here.link_to(&there.address(), PeerId(1)).unwrap();
        if sender_closes {
            here.close()
        } else {
            there.close()
        }
        let submitted = link.push(|_| {
            let mut packet = there.inbox.packets.take().unwrap();
            packet.set_len(region.len());
            let whole = Buffer::from(region.whole());
            let transfer = Transfer::start(Buffer::Packet(packet), whole).unwrap();
            let payload = OnItsWay::Landing(transfer, Sender(here.inbox.clone(), OpToken(1)));
            Ok(Message { header: Header([0; 2]), payload })
        });
        assert_eq!(submitted, Submit::Posted);
        assert_eq!(ends_of(&here), 1, "the sender closes: {sender_closes}");
        ends_of(&there);
        assert_eq!(ends_of(&here), 0, "twice; the sender closes: {sender_closes}");
    }
}
