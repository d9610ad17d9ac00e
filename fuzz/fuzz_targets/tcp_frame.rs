//! Heads and addresses of the TCP transport, which a peer sends: each is read or refused, and what
//! was read is written as it came.
#![no_main]

use carrack_transports::contract::AddressBlob;
use carrack_transports::internals::tcp::{Frame, HEAD, TcpAddress};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(head) = bytes.first_chunk::<HEAD>()
        && let Ok(frame) = Frame::decode(*head, 8192)
    {
        assert_eq!(Frame::decode(frame.encode(), 8192), Ok(frame));
    }
    let blob = AddressBlob(bytes.to_vec());
    if let Some(address) = TcpAddress::decode(&blob) {
        assert_eq!(TcpAddress::decode(&address.encode()), Some(address));
    }
});
