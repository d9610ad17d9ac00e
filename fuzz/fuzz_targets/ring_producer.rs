//! The writing end of a ring whose consumer says anything about the slots that it has freed.
#![expect(unsafe_code, reason = "the ends of a ring are made by unsafe functions")]
#![no_main]

use arbitrary::Arbitrary;
use carrack_transports::mem::MemRef;
use carrack_transports::sync::ring::heap::HeapSlots;
use carrack_transports::sync::ring::{MAX_PAYLOAD, Producer, PushError, Slots};
use libfuzzer_sys::fuzz_target;
use std::sync::atomic::Ordering;

#[derive(Arbitrary, Debug)]
enum Step {
    Push { kind: u8, len: u8 },
    Freed(u64),
    FreedMore(u8),
}

fuzz_target!(|steps: Vec<Step>| {
    let slots = HeapSlots::new(8);
    // SAFETY: the only writing end.
    let mut producer = unsafe { Producer::new(slots.clone()) };
    for step in steps {
        match step {
            Step::Push { kind, len } => {
                let payload = vec![kind; usize::from(len)];
                match producer.push(kind, [7; 2], MemRef::host(&payload)) {
                    Err(PushError::Unfit) => assert!(payload.len() > MAX_PAYLOAD),
                    Ok(()) | Err(PushError::Full | PushError::Corrupt(_)) => {}
                }
            }
            Step::Freed(freed) => slots.freed().store(freed, Ordering::Release),
            Step::FreedMore(more) => {
                slots.freed().fetch_add(u64::from(more % 9), Ordering::Release);
            }
        }
    }
});
