//! The TCP bootstrap's tree, with neighbours that send any bytes, cut anywhere.
#![no_main]

use arbitrary::Arbitrary;
use carrack::bootstrap::Departure;
use carrack::bootstrap::protocol::{Frame, MAX_FRAME};
use carrack::bootstrap::tcp::tree::{Side, Tree};
use carrack::bootstrap::tcp::wire::{Envelope, Inbox};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Bytes(Vec<u8>),
    Put { key: u8, value: u8 },
    Get { key: u8 },
    Value { key: u8, value: u8 },
    Fence { number: u8 },
    FenceDone { number: u8 },
    Gone { rank: u8 },
    Finished,
    Refused,
}

fuzz_target!(|input: (bool, Vec<(u8, Step)>)| {
    let (is_top, steps) = input;
    // Two neighbours below, and one above unless it is the top; this rank itself is the last.
    let sides = [Side::Below(0), Side::Below(1), if is_top { Side::Own } else { Side::Above }, Side::Own];
    let mut tree = Tree::new(3, u32::from(!is_top), 20);
    tree.attach(0, 4);
    tree.attach(1, 5);
    let mut inboxes = [(); 3].map(|()| Some(Inbox::default()));
    for (from, step) in steps {
        let from = usize::from(from % 4);
        let key = |key: u8| format!("key{}", key % 4);
        let frame = match step {
            Step::Bytes(bytes) => {
                if let Some(Some(inbox)) = inboxes.get_mut(from) {
                    inbox.push(&bytes);
                }
                None
            }
            Step::Put { key: k, value } => Some(Frame::Put { key: key(k), value: vec![value] }),
            Step::Get { key: k } => Some(Frame::Get { key: key(k) }),
            Step::Value { key: k, value } => Some(Frame::Value { key: key(k), value: vec![value] }),
            Step::Fence { number } => Some(Frame::Fence { number: u64::from(number) }),
            Step::FenceDone { number } => Some(Frame::FenceDone { number: u64::from(number) }),
            Step::Gone { rank } => Some(Frame::Gone { rank: u32::from(rank), how: Departure::Disconnected }),
            Step::Finished => Some(Frame::Finished),
            Step::Refused => Some(Frame::Refused { why: String::from("no") }),
        };
        let mut handle = |side, envelope| match tree.handle(side, envelope) {
            Ok(out) => {
                for (to, envelope) in out {
                    assert!(to != Side::Above || !is_top);
                    let mut bytes = Vec::new();
                    envelope.write(&mut bytes);
                    let mut inbox = Inbox::default();
                    inbox.push(&bytes);
                    assert_eq!(inbox.take(), Ok(Some(envelope)));
                }
                true
            }
            Err(_) => false,
        };
        let mut goes_on = true;
        if let Some(frame) = frame {
            goes_on = handle(sides[from], Envelope { rank: 7, frame });
        } else if let Some(Some(inbox)) = inboxes.get_mut(from) {
            goes_on = loop {
                match inbox.take() {
                    Ok(Some(envelope)) => {
                        if !handle(sides[from], envelope) {
                            break false;
                        }
                    }
                    Ok(None) => break inbox.len() <= 8 + MAX_FRAME,
                    Err(_) => break false,
                }
            };
        }
        if !goes_on && from < 3 {
            inboxes[from] = None;
            tree.cut(sides[from], 9, Departure::Misbehaved);
        }
    }
});
