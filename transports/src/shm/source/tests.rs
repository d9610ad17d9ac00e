use super::*;
use crate::contract::{Op, Polled, Submit};
use crate::mem::copy::copy_now;
use crate::mem::{MemMut, MemRef};
use crate::shm::Geometry;
use crate::shm::pair::linked;
use proptest::collection::vec;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// Messages with the same header, if none of them is lost.
const SAME: u64 = 5;

/// Keeps headers and bytes of messages in the order in which it gets them.
#[derive(Default)]
struct Collector {
    /// Messages that it still takes from their places.
    takes: usize,
    has_batch: bool,
    in_place: usize,
    /// Messages that it took behind others of their run.
    in_runs: usize,
    got: Vec<(u64, Vec<u8>)>,
}

impl Collector {
    fn keep(&mut self, header: Header, bytes: MemRef<'_>) {
        let mut copy = vec![0; bytes.len()];
        copy_now(MemMut::host(&mut copy), bytes).unwrap();
        self.got.push((header.0[0], copy));
    }
}

impl Matcher for Collector {
    fn match_in_place(&mut self, from: PeerId, header: Header, bytes: MemRef<'_>) -> bool {
        assert!(!self.has_batch && from == PeerId(0), "nothing is before it, and it has a sender");
        let takes = self.takes > 0;
        if takes {
            (self.takes, self.in_place) = (self.takes - 1, self.in_place + 1);
            self.keep(header, bytes);
        }
        takes
    }

    fn match_run(&mut self, from: PeerId, header: Header, run: HostViews<'_>) -> usize {
        let mut count = 0;
        while let Some(bytes) = run.get(count) {
            if !self.match_in_place(from, header, bytes) {
                break;
            }
            self.in_runs += usize::from(count > 0);
            count += 1;
        }
        count
    }

    fn match_all(&mut self, batch: &mut Batch) {
        for event in batch.drain() {
            if let Event::Arrived { header, payload, .. } = event {
                self.keep(header, payload.view());
            }
        }
        self.has_batch = true;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn messages_that_are_taken_in_place_and_others_come_once_and_in_order(
        steps in vec((vec(0_usize..9, 0..6), 0_usize..6), 2000),
    ) {
        let ([_zero, one], link) = linked(Geometry { slots: 64, chunks: 4, chunk_size: 4096 });
        let (mut batch, begun) = (Batch::new(4), Instant::now());
        let (mut receiver, mut sent) = (Collector::default(), Vec::new());
        for (lengths, takes) in steps {
            for length in lengths {
                let length = [0, 8, 8, 8, 40, 41, 200, 300, 4000][length];
                let number = sent.len() as u64;
                let bytes = vec![(number & 0xff) as u8; length];
                let header = Header([number / SAME, 0]);
                let op = Op::AmCopied { header, bytes: MemRef::host(&bytes) };
                if matches!(link.submit(op).unwrap(), Submit::Done) {
                    sent.push((number / SAME, bytes));
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
        // Far more than there are chunks: each was given back.
        prop_assert!(receiver.in_place > 40, "{}", receiver.in_place);
        prop_assert!(receiver.in_runs > 40, "{}", receiver.in_runs);
    }
}
