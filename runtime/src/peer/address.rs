//! The addresses that devices publish.

use carrack_transports::contract::AddressBlob;

/// Returns the key of a device's addresses in the bootstrap's table.
pub(crate) fn key(rank: u32, device: u32) -> String {
    format!("device/{rank}/{device}")
}

/// Encodes one device's addresses, one for each transport: `count 8 | (name length 8, name, length
/// 16, address)*`.
pub(crate) fn encode(addresses: &[(&'static str, AddressBlob)]) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(addresses.len()).unwrap_or(u8::MAX)];
    for (name, address) in addresses {
        bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        bytes.extend(name.as_bytes());
        bytes.extend(u16::try_from(address.0.len()).unwrap_or(u16::MAX).to_le_bytes());
        bytes.extend(&address.0);
    }
    bytes
}

/// Decodes a peer's addresses, or returns `None` if they are malformed.
pub(crate) fn decode(mut bytes: &[u8]) -> Option<Vec<(String, AddressBlob)>> {
    let mut take = |len: usize| {
        let (head, rest) = bytes.split_at_checked(len)?;
        bytes = rest;
        Some(head)
    };
    let count = take(1)?[0];
    let mut addresses = Vec::new();
    for _ in 0..count {
        let len = usize::from(take(1)?[0]);
        let name = String::from_utf8(take(len)?.to_vec()).ok()?;
        let len = usize::from(u16::from_le_bytes(take(2)?.try_into().ok()?));
        addresses.push((name, AddressBlob(take(len)?.to_vec())));
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
