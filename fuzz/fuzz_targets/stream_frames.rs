//! The frames of a stream, in pieces as they come.
#![no_main]

use carrack_transports::net::frames::Inbox;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|pieces: Vec<Vec<u8>>| {
    let (mut whole, mut parts) = (Inbox::new(300), Inbox::new(300));
    whole.extend(&pieces.concat());
    let mut from_parts = Vec::new();
    'pieces: for piece in &pieces {
        parts.extend(piece);
        loop {
            match parts.take() {
                Ok(None) => break,
                Ok(Some(frame)) => from_parts.push(Ok(frame)),
                Err(why) => {
                    from_parts.push(Err(why));
                    break 'pieces;
                }
            }
        }
    }
    // However the stream was cut, up to the first that is wrong.
    for frame in from_parts {
        let wrong = frame.is_err();
        assert_eq!(whole.take().transpose(), Some(frame));
        if wrong {
            return;
        }
    }
    assert_eq!(whole.take(), Ok(None));
});
