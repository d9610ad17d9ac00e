//! The stream of a TCP connection over verbs, in pieces as they come.
#![no_main]

use carrack_transports::verbs::channel::Frames;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|pieces: Vec<Vec<u8>>| {
    let (mut whole, mut parts) = (Frames::default(), Frames::default());
    whole.extend(&pieces.concat());
    let mut from_parts = Vec::new();
    for piece in &pieces {
        parts.extend(piece);
        while let Some(message) = parts.next() {
            let wrong = message.is_err();
            from_parts.push(message);
            if wrong {
                break;
            }
        }
    }
    // However the stream was cut, up to the first that is wrong.
    for message in from_parts {
        let wrong = message.is_err();
        assert_eq!(whole.next(), Some(message));
        if wrong {
            return;
        }
    }
    assert_eq!(whole.next(), None);
});
