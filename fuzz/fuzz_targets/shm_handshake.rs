//! Messages of a process that connects over shared memory, and the published address.
#![no_main]

use carrack_transports::contract::AddressBlob;
use carrack_transports::shm::handshake::{Address, MAX_MESSAGE, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Message::decode(bytes) {
        let encoded = message.encode();
        assert!(encoded.len() <= MAX_MESSAGE);
        // A refusal's text is made readable and cut; everything else comes back as it was.
        if !matches!(message, Message::Refusal(_)) {
            assert_eq!(Message::decode(&encoded), Ok(message));
        }
    }
    if let Some(address) = Address::decode(&AddressBlob(bytes.to_vec())) {
        assert_eq!(address.encode().0, bytes);
    }
});
