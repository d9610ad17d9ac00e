use super::*;
use crate::contract::{Op, Polled, Submit};
use crate::mem::copy::copy_now;
use crate::mem::{MemMut, MemRef};
use crate::shm::Geometry;
use crate::shm::pair::linked;
use proptest::collection::vec;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// Keeps numbers and bytes of messages in the order in which it gets them.
#[derive(Default)]
struct Collector {
    takes: bool,
    has_batch: bool,
    alone: usize,
    in_place: usize,
    got: Vec<(u64, Vec<u8>)>,
}

impl Matcher for Collector {
    fn match_alone(&mut self, message: &SmallArrival) -> bool {
        assert!(!self.has_batch, "it is not alone");
        if self.takes {
            self.alone += 1;
            self.got.push((message.header.0[0], message.bytes.as_slice().to_vec()));
        }
        self.takes
    }

    fn match_in_place(&mut self, from: PeerId, header: Header, bytes: MemRef<'_>) -> bool {
        assert!(!self.has_batch && from == PeerId(0), "it is alone, and has a sender");
        if self.takes {
            self.in_place += 1;
            let mut copy = vec![0; bytes.len()];
            copy_now(MemMut::host(&mut copy), bytes).unwrap();
            self.got.push((header.0[0], copy));
        }
        self.takes
    }

    fn match_all(&mut self, batch: &mut Batch) {
        for event in batch.drain() {
            if let Event::Arrived { header, payload, .. } = event {
                let mut bytes = vec![0; payload.len()];
                copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
                self.got.push((header.0[0], bytes));
            }
        }
        self.has_batch = true;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn messages_that_come_alone_and_others_come_once_and_in_order(
        steps in vec((vec(0_usize..9, 0..3), any::<bool>()), 2000),
    ) {
        let ([_zero, one], link) = linked(Geometry { slots: 64, chunks: 4, chunk_size: 4096 });
        let (mut batch, begun) = (Batch::new(4), Instant::now());
        let (mut receiver, mut sent) = (Collector::default(), Vec::new());
        for (lengths, takes) in steps {
            for length in lengths {
                let length = [0, 8, 8, 8, 40, 41, 200, 300, 4000][length];
                let number = sent.len() as u64;
                let bytes = vec![(number & 0xff) as u8; length];
                let header = Header([number, 0]);
                let op = Op::AmCopied { header, bytes: MemRef::host(&bytes) };
                if matches!(link.submit(op).unwrap(), Submit::Done) {
                    sent.push((number, bytes));
                }
            }
            (receiver.takes, receiver.has_batch) = (takes, false);
            let before = receiver.got.len();
            let polled = one.poll(&mut batch, &mut receiver);
            prop_assert_eq!(polled == Polled::Some, receiver.got.len() > before);
            prop_assert!(batch.is_empty());
        }
        while receiver.got.len() < sent.len() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", receiver.got.len());
            receiver.has_batch = false;
            one.poll(&mut batch, &mut receiver);
        }
        prop_assert_eq!(receiver.got, sent);
        prop_assert!(receiver.alone > 100, "{}", receiver.alone);
        // Far more than there are chunks: each was given back.
        prop_assert!(receiver.in_place > 40, "{}", receiver.in_place);
    }
}
