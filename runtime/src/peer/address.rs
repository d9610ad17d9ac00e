//! The addresses that devices publish.

use carrack_transports::contract::AddressBlob;
use carrack_transports::net::parts::{self, Rest};
use zerocopy::little_endian::U16;

/// Returns the key of a device's addresses in the bootstrap's table.
pub(crate) fn key(rank: u32, device: u32) -> String {
    format!("device/{rank}/{device}")
}

/// Encodes one device's addresses, one for each transport: its name and its address.
pub(crate) fn encode(addresses: &[(&'static str, AddressBlob)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, address) in addresses {
        parts::push::<U16>(&mut bytes, name.as_bytes());
        parts::push::<U16>(&mut bytes, &address.0);
    }
    bytes
}

/// Decodes a peer's addresses, or returns `None` if they are malformed.
pub(crate) fn decode(bytes: &[u8]) -> Option<Vec<(String, AddressBlob)>> {
    let (mut rest, mut addresses) = (Rest(bytes), Vec::new());
    while rest.end().is_none() {
        let name = rest.text::<U16>()?.to_owned();
        addresses.push((name, AddressBlob(rest.part::<U16>()?.to_vec())));
    }
    Some(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        let list = [("shm", AddressBlob(vec![1, 2, 3])), ("loopback", AddressBlob(vec![]))];
        let back = decode(&encode(&list)).unwrap();
        assert_eq!(back, list.map(|(name, blob)| (name.to_string(), blob)));
    }

    proptest! {
        #[test]
        fn whatever_was_published_is_a_list_or_nothing(bytes in vec(any::<u8>(), 0..64)) {
            let _ = decode(&bytes);
        }
    }
}
