//! Messages of a process that connects over TCP to set up verbs, and the published address.
#![no_main]

use carrack_transports::contract::AddressBlob;
use carrack_transports::internals::verbs::{MAX_MESSAGE, RdmaAddress, SetupMessage};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = SetupMessage::decode(bytes) {
        let encoded = message.encode();
        assert!(encoded.len() <= MAX_MESSAGE);
        // A refusal's text is made readable and cut; everything else comes back as it was.
        if !matches!(message, SetupMessage::Refusal(_)) {
            assert_eq!(SetupMessage::decode(&encoded).as_ref(), Ok(&message));
        }
        if let SetupMessage::Hello(end) | SetupMessage::Welcome(end) = message {
            if end.check(8192).is_ok() {
                assert!(end.window > 0 && end.queue_pair < 1 << 24);
            }
        }
    }
    if let Some(address) = RdmaAddress::decode(&AddressBlob(bytes.to_vec())) {
        assert_eq!(address.encode().0, bytes);
        let _ = address.reach(&address);
    }
});
