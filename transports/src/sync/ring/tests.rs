use super::heap::HeapSlots;
use super::*;

fn ring(capacity: usize) -> (Producer<HeapSlots>, Consumer<HeapSlots>) {
    let slots = HeapSlots::new(capacity);
    // SAFETY: one end of each sort.
    unsafe { (Producer::new(slots.clone()), Consumer::new(slots)) }
}

fn taken(consumer: &mut Consumer<HeapSlots>) -> Option<(u8, [u64; 2], Vec<u8>)> {
    let take = |record: Record<'_, HeapSlots>| {
        let mut bytes = vec![0; record.len()];
        record.copy_to(&mut bytes);
        Some((record.kind, record.header(), bytes))
    };
    consumer.pop(take).unwrap()
}

#[test]
fn a_record_that_is_not_taken_stays() {
    let (mut producer, mut consumer) = ring(2);
    producer.push(5, [1, 2], MemRef::host(b"x")).unwrap();
    assert_eq!(consumer.pop(|_| None::<()>), Ok(None));
    assert_eq!(taken(&mut consumer), Some((5, [1, 2], b"x".to_vec())));
}

#[test]
fn miri_every_size_up_to_the_largest_arrives_to_the_last_byte() {
    let (mut producer, mut consumer) = ring(8);
    assert!(taken(&mut consumer).is_none(), "fresh memory is no record");
    for len in 0..=MAX_PAYLOAD {
        let payload: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
        producer.push(len as u8, [len as u64, 9], MemRef::host(&payload)).unwrap();
        assert_eq!(taken(&mut consumer), Some((len as u8, [len as u64, 9], payload)));
    }
    let long = vec![0; MAX_PAYLOAD + 1];
    assert_eq!(producer.push(0, [0; 2], MemRef::host(&long)), Err(PushError::Unfit));
}

#[test]
fn miri_a_full_ring_refuses_and_takes_again_once_slots_are_freed() {
    let (mut producer, mut consumer) = ring(8);
    let mut sent = 0_u64;
    while producer.push(0, [sent, 0], MemRef::host(&[])).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 8);
    assert_eq!(taken(&mut consumer).unwrap().1[0], 0);
    producer.push(0, [8, 0], MemRef::host(&[])).unwrap();
    for want in 1..=8 {
        assert_eq!(taken(&mut consumer).unwrap().1[0], want);
    }
    assert!(taken(&mut consumer).is_none());
    assert!(producer.is_drained());
}

#[test]
fn miri_records_of_a_run_have_kind_header_and_length_in_common() {
    let others = [(2, 7, &b"abc"[..]), (1, 8, b"abc"), (1, 7, b"ab"), (1, 7, &[0; 41])];
    // The run goes over the end of the ring at most offsets.
    for offset in 0..8 {
        for (kind, header, bytes) in others {
            let (mut producer, mut consumer) = ring(8);
            for _ in 0..offset {
                producer.push(0, [0; 2], MemRef::host(&[])).unwrap();
                taken(&mut consumer).unwrap();
            }
            for bytes in [b"abc", b"def", b"ghi"] {
                producer.push(1, [7, 7], MemRef::host(bytes)).unwrap();
            }
            producer.push(kind, [header, 7], MemRef::host(bytes)).unwrap();
            producer.push(1, [7, 7], MemRef::host(b"abc")).unwrap();
            let shape = consumer.peek().unwrap().unwrap().shape().unwrap();
            assert_eq!((shape.header(), shape.len()), ([7, 7], 3));
            for (number, expected) in [b"abc", b"def", b"ghi"].into_iter().enumerate() {
                let place = consumer.alike(&shape, number).unwrap();
                // SAFETY: the place of a payload of that length.
                let got = unsafe { place.cast::<[u8; 3]>().read() };
                assert_eq!(&got, expected);
            }
            assert_eq!(consumer.alike(&shape, 3), None, "{kind} {header} {bytes:?}");
            assert_eq!(consumer.alike(&shape, 7), None, "nothing is there");
            consumer.advance(3);
            assert_eq!(taken(&mut consumer), Some((kind, [header, 7], bytes.to_vec())));
        }
    }
}

#[test]
fn miri_a_payload_that_looks_like_a_control_word_is_not_taken_for_one() {
    let (mut producer, mut consumer) = ring(4);
    // The second slot of this record is full of the control word that a record at its position
    // in the next lap would have.
    let forged = control_word(5, 1, 7, 0).to_le_bytes();
    let payload: Vec<u8> = forged.iter().copied().cycle().take(FIRST + NEXT).collect();
    producer.push(1, [0; 2], MemRef::host(&payload)).unwrap();
    assert!(taken(&mut consumer).is_some());
    for _ in 0..3 {
        producer.push(2, [0; 2], MemRef::host(&[])).unwrap();
        assert_eq!(taken(&mut consumer).unwrap().0, 2);
    }
    assert!(taken(&mut consumer).is_none());
}

#[test]
fn a_hostile_producer_gets_an_error_and_no_access() {
    for (slots, len) in [(0, 0), (2, 40), (1, 41), (4, 209), (255, 9), (4, u16::MAX), (5, 250)] {
        let (producer, mut consumer) = ring(8);
        let control = control_word(0, slots, 0, usize::from(len));
        producer.slots().control(0).store(control, Ordering::Release);
        let error = consumer.pop(|_| Some(())).unwrap_err();
        assert_eq!(error, Corrupt::Shape { slots: slots as u8, len });
    }
}

#[test]
fn a_record_of_more_slots_than_the_ring_has_is_refused() {
    let (producer, mut consumer) = ring(2);
    producer.slots().control(0).store(control_word(0, 4, 0, 208), Ordering::Release);
    assert!(consumer.pop(|_| Some(())).is_err());
}

#[test]
fn a_hostile_consumer_gets_an_error_and_no_access() {
    let (mut producer, consumer) = ring(2);
    producer.push(0, [0; 2], MemRef::host(&[])).unwrap();
    producer.push(0, [0; 2], MemRef::host(&[])).unwrap();
    consumer.slots().freed().store(3, Ordering::Release);
    let corrupt = Corrupt::Freed { freed: 3, sent: 2, before: 0 };
    assert_eq!(producer.push(0, [0; 2], MemRef::host(&[])), Err(PushError::Corrupt(corrupt)));
}

#[test]
fn miri_two_threads_stream_through_a_small_ring() {
    let count = if cfg!(miri) { 100 } else { 200_000_u64 };
    let (mut producer, mut consumer) = ring(16);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for at in 0..count {
                let payload = vec![at as u8; (at % 209) as usize];
                while producer.push(3, [at, !at], MemRef::host(&payload)).is_err() {
                    std::thread::yield_now();
                }
            }
        });
        for at in 0..count {
            let (kind, header, bytes) = loop {
                match taken(&mut consumer) {
                    Some(record) => break record,
                    None => std::thread::yield_now(),
                }
            };
            assert_eq!((kind, header), (3, [at, !at]));
            assert_eq!(bytes, vec![at as u8; (at % 209) as usize]);
        }
    });
}
