//! Submits that passed their checks before a side closed, and reach the queue after the close.

use super::*;
use crate::contract::{Op, Submit};
use crate::mem::{HostAllocator, MemRef, PacketPool, Region};
use std::time::{Duration, Instant};

fn device(me: u32) -> LoopbackDevice {
    let identity = Identity { me: PeerId(me), ranks: 2, secret: [7; 16] };
    let packets = Arc::new(PacketPool::new(Arc::new(HostAllocator), 4096, 16));
    Loopback::new(4096).domain(identity).open_device(packets).unwrap()
}

fn ends_of(device: &LoopbackDevice) -> usize {
    let (mut batch, mut ends) = (Batch::new(8), 0);
    while device.poll(&mut batch, &mut |_: &mut Batch| {}) == Polled::Some {
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
            let payload = OnItsWay::Landing(transfer, SendNotice(here.inbox.clone(), OpToken(1)));
            Ok(LoopbackMessage { header: Header([0; 2]), payload })
        });
        assert_eq!(submitted, Submit::Posted);
        assert_eq!(ends_of(&here), 1, "the sender closes: {sender_closes}");
        ends_of(&there);
        assert_eq!(ends_of(&here), 0, "twice; the sender closes: {sender_closes}");
    }
}

#[test]
fn who_polls_only_while_the_word_is_not_zero_gets_every_message() {
    const EACH: usize = 2000;
    let (receiver, senders) = (device(0), [1, 2, 3].map(device));
    let word = receiver.news().unwrap();
    assert_eq!(word.load(Ordering::Acquire), 0);
    std::thread::scope(|scope| {
        for sender in &senders {
            let link = sender.link_to(&receiver.address(), PeerId(0)).unwrap();
            scope.spawn(move || {
                for _ in 0..EACH {
                    while !matches!(
                        link.submit(Op::AmCopied {
                            header: Header([0; 2]),
                            bytes: MemRef::host(&[1; 8])
                        }),
                        Ok(Submit::Done)
                    ) {
                        std::thread::yield_now();
                    }
                }
                link
            });
        }
        let (mut batch, mut arrived) = (Batch::new(8), 0);
        let until = Instant::now() + Duration::from_secs(60);
        while arrived < EACH * senders.len() {
            assert!(Instant::now() < until, "{arrived} messages have arrived");
            if word.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
                continue;
            }
            receiver.poll(&mut batch, &mut |_: &mut Batch| {});
            let arrivals = batch.drain().filter(|event| matches!(event, Event::Arrived { .. }));
            arrived += arrivals.count();
        }
    });
}
