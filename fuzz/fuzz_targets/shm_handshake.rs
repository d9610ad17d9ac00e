//! Messages of a process that connects over shared memory, and the published address.
#![no_main]

use carrack_transports::contract::AddressBlob;
use carrack_transports::internals::shm::{HandshakeMessage, MAX_MESSAGE, ShmAddress};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = HandshakeMessage::decode(bytes) {
        let encoded = message.encode();
        assert!(encoded.len() <= MAX_MESSAGE);
        // A refusal's text is made readable and cut; everything else comes back as it was.
        if !matches!(message, HandshakeMessage::Refusal(_)) {
            assert_eq!(HandshakeMessage::decode(&encoded), Ok(message));
        }
    }
    if let Some(address) = ShmAddress::decode(&AddressBlob(bytes.to_vec())) {
        assert_eq!(address.encode().0, bytes);
    }
});
