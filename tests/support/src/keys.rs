//! Remote keys that no owner gives out.

use carrack::RemoteKey;
use carrack_transports::fnv;

/// Bytes of a key in front of the transports' keys: owner, number, offset and length.
const HEAD: usize = 4 + 3 * 8;

/// Returns the key with its bytes changed. The hash at its end is that of the changed bytes.
pub fn forged(rmr: &RemoteKey, change: impl FnOnce(&mut Vec<u8>)) -> RemoteKey {
    let mut bytes = rmr.to_bytes();
    bytes.truncate(bytes.len() - size_of::<u64>());
    change(&mut bytes);
    bytes.extend(fnv::of(&bytes).to_le_bytes());
    RemoteKey::from_bytes(&bytes).unwrap()
}

/// Returns the key with another length, in bytes.
pub fn with_len(rmr: &RemoteKey, len: u64) -> RemoteKey {
    forged(rmr, |bytes| bytes[HEAD - 8..HEAD].copy_from_slice(&len.to_le_bytes()))
}

/// Returns the key without any by which a transport could map the region.
pub fn without_keys(rmr: &RemoteKey) -> RemoteKey {
    forged(rmr, |bytes| bytes.truncate(HEAD))
}

/// Returns the key, with the transports' keys of another.
pub fn with_keys_of(rmr: &RemoteKey, other: &RemoteKey) -> RemoteKey {
    let other = other.to_bytes();
    forged(rmr, |bytes| {
        bytes.truncate(HEAD);
        bytes.extend(&other[HEAD..other.len() - size_of::<u64>()]);
    })
}
