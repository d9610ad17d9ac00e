//! A frame between the launcher and a rank.
#![no_main]

use carrack::bootstrap::protocol::{Frame, MAX_FRAME};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Frame::hello_version(bytes);
    if let Ok(frame) = Frame::decode(bytes) {
        let encoded = frame.encode();
        assert!(encoded.len() <= MAX_FRAME);
        assert_eq!(encoded, bytes, "there is one way to write a frame");
    }
});
