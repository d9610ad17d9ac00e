//! The reading end of a ring in which a hostile producer has written anything anywhere.
#![expect(unsafe_code, reason = "the ends of a ring are made by unsafe functions")]
#![no_main]

use arbitrary::Arbitrary;
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{MemMut, MemRef, Place};
use carrack_transports::sync::ring::heap::HeapSlots;
use carrack_transports::sync::ring::{BODY, Consumer, FIRST, MAX_PAYLOAD, Slots};
use libfuzzer_sys::fuzz_target;
use std::sync::atomic::Ordering;

#[derive(Arbitrary, Debug)]
enum Step {
    /// Writes a slot.
    Write { at: u8, control: u64, body: [u8; 16] },
    /// Writes a control word that is in turn: the sequence number is right, the rest is not known.
    InTurn { shape: u32 },
    /// Takes a record, into so much room.
    Take { room: u8 },
    /// Looks at a record and leaves it.
    Leave,
    /// Reads the records that are like the next one.
    Run,
}

fuzz_target!(|input: (u8, Vec<Step>)| {
    let (size, steps) = input;
    let slots = HeapSlots::new(1 << (size % 6));
    let capacity = slots.capacity();
    // SAFETY: the only reading end.
    let mut consumer = unsafe { Consumer::new(slots.clone()) };
    let mut taken_slots = 0_u64;
    for step in steps {
        match step {
            Step::Write { at, control, body } => {
                let at = usize::from(at) % capacity;
                // SAFETY: there is one thread, so no reader runs at the same time. A body has BODY
                // bytes, more than the 16 of `body`.
                unsafe {
                    assert!(body.len() <= BODY);
                    slots.write(at, |to| to.cast::<[u8; 16]>().write_unaligned(body));
                }
                slots.control(at).store(control, Ordering::Release);
            }
            Step::InTurn { shape } => {
                let at = taken_slots as usize & (capacity - 1);
                let control = u64::from(taken_slots as u32 + 1) | u64::from(shape) << 32;
                slots.control(at).store(control, Ordering::Release);
            }
            Step::Take { room } => {
                let mut to = vec![0xa5; usize::from(room) + 8];
                let taken = consumer.pop(|record| {
                    assert!(record.len() <= MAX_PAYLOAD);
                    let _ = record.header();
                    record.copy_to(&mut to[..usize::from(room)]);
                    Some(record.len())
                });
                assert_eq!(to[usize::from(room)..], [0xa5; 8], "written past the room");
                if let Ok(Some(len)) = taken {
                    taken_slots += if len <= 40 { 1 } else { 1 + (len as u64 - 40).div_ceil(56) };
                }
                assert!(slots.freed().load(Ordering::Relaxed) <= taken_slots);
            }
            Step::Run => {
                let Ok(Some(record)) = consumer.peek() else { continue };
                let Some(shape) = record.shape() else { continue };
                assert!(shape.len() <= FIRST);
                let mut number = 0;
                while let Some(place) = consumer.alike(&shape, number) {
                    let (place, len) = (place.as_ptr(), shape.len());
                    // SAFETY: the place of a payload of that length.
                    let bytes = unsafe { MemRef::from_raw(place, len, Place::Host) };
                    let mut to = [0; FIRST];
                    copy_now(MemMut::host(&mut to), bytes).unwrap();
                    number += 1;
                    assert!(number <= capacity, "a slot has one lap");
                }
            }
            Step::Leave => assert!(!matches!(consumer.pop(|_| None::<()>), Ok(Some(())))),
        }
    }
});
