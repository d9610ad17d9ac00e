use super::heap::HeapSlots;
use super::*;
use loom::thread;

#[test]
fn loom_records_arrive_whole_and_in_order_over_several_laps() {
    loom::model(|| {
        let slots = HeapSlots::new(2);
        // SAFETY: the only reading end.
        let mut consumer = unsafe { Consumer::new(slots.clone()) };
        let producer = thread::spawn(move || {
            // SAFETY: the only writing end.
            let mut producer = unsafe { Producer::new(slots) };
            let mut sent = 0_u64;
            // Three records into two slots: the third needs a slot back.
            for _ in 0..6 {
                if sent < 3
                    && producer.push(1, [sent, !sent], MemRef::host(&[sent as u8; 3])).is_ok()
                {
                    sent += 1;
                }
                thread::yield_now();
            }
            sent
        });
        let mut got = 0_u64;
        let mut look = |got: &mut u64| {
            let taken = consumer.pop(|record| {
                let mut bytes = [0; 3];
                record.copy_to(&mut bytes);
                Some((record.header(), bytes))
            });
            if let Some((header, bytes)) = taken.unwrap() {
                assert_eq!((header, bytes), ([*got, !*got], [*got as u8; 3]));
                *got += 1;
            }
        };
        for _ in 0..2 {
            look(&mut got);
            thread::yield_now();
        }
        let sent = producer.join().unwrap();
        for _ in 0..3 {
            look(&mut got);
        }
        assert_eq!(got, sent);
        assert!(sent >= 2);
    });
}
