//! FNV-1a: a short hash of what is not secret, the same in all processes.

/// Hash of nothing.
pub const BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// Returns the hash of bytes.
pub const fn of(bytes: &[u8]) -> u64 {
    let (mut hash, mut at) = (BASIS, 0);
    while at < bytes.len() {
        hash = with(hash, bytes[at] as u64);
        at += 1;
    }
    hash
}

/// Returns a hash with one more byte, or with a longer word in its place.
pub const fn with(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0100_0000_01b3)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the test suite of draft-eastlake-fnv, appendix C.
    #[test]
    fn the_hash_is_that_of_the_specification() {
        assert_eq!(of(b""), BASIS);
        assert_eq!(of(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(of(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
