//! Messages of a process that has proved nothing yet: any, in any order.
#![no_main]

use carrack_transports::net::header::Protocol;
use carrack_transports::net::proof::{Claim, Handshake, Key, Role, Step};
use libfuzzer_sys::fuzz_target;

const PROTOCOL: Protocol = Protocol { tag: *b"fuzz", version: 1, longest: 256 };

fuzz_target!(|messages: Vec<(Option<u8>, Vec<u8>)>| {
    let key = Key::of(b"an unknown secret");
    for role in [Role::Dialer, Role::Listener] {
        let mut side = Handshake::new(role, PROTOCOL, key.clone(), Claim::default()).unwrap();
        for (kind, bytes) in &messages {
            // Half of them framed as a greeting is.
            let framed = kind.map(|kind| PROTOCOL.message(u32::from(kind % 8), &[bytes]));
            match side.hear(framed.as_ref().unwrap_or(bytes)) {
                Ok(Step::Proven(..)) => panic!("the secret is guessed"),
                Ok(Step::Say(reply)) => assert!(reply.len() <= PROTOCOL.longest),
                Ok(Step::Wait) => {}
                Err(_) => break,
            }
        }
    }
});
