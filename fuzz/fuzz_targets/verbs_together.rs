//! Short messages that a peer has sent in one request, over verbs.
#![no_main]

use carrack_transports::contract::{Payload, PeerId};
use carrack_transports::internals::verbs::OpenedAggregate;
use carrack_transports::mem::{HostAllocator, MemRef, PacketPool};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};

static POOL: LazyLock<PacketPool> =
    LazyLock::new(|| PacketPool::new(Arc::new(HostAllocator), 8 << 10, 1));

fuzz_target!(|bytes: &[u8]| {
    let Some(packet) = POOL.take_copy(MemRef::host(bytes)) else { return };
    let mut opened = OpenedAggregate::new(0, PeerId(7), Payload::Packet(packet));
    // What each takes: its header and length, and its bytes filled up to whole words.
    let mut taken = 0;
    while let Ok(Some(message)) = opened.next() {
        assert_eq!(message.from, PeerId(7));
        let len = message.bytes.as_slice().len();
        assert_eq!(bytes[taken + 24..taken + 24 + len], *message.bytes.as_slice());
        taken += 24 + len.next_multiple_of(8);
    }
    assert!(taken <= bytes.len());
});
