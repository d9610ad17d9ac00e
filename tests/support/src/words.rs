//! Bytes that depend on their place and on a number, quick to make and to check: a word is one
//! multiplication.

/// Returns a number that looks like none of its neighbours.
pub fn mix(number: u64) -> u64 {
    let mut word = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Returns the word at a place: odd multipliers, so two places, or two salts, never have the same.
#[inline(always)]
fn word(salt: u64, at: u64) -> [u8; 8] {
    at.wrapping_mul(0xd6e8_feb8_6659_fd93).wrapping_add(salt).rotate_left(23).to_le_bytes()
}

/// Fills what begins with word number `first` of a message.
pub fn fill(bytes: &mut [u8], salt: u64, first: u64) {
    let (words, rest) = bytes.as_chunks_mut::<8>();
    let count = words.len() as u64;
    for (at, place) in (first..).zip(words) {
        *place = word(salt, at);
    }
    let last = word(salt, first + count);
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Returns the first place at which the bytes are not what `fill` makes.
pub fn wrong(bytes: &[u8], salt: u64, first: u64) -> Option<usize> {
    let (words, rest) = bytes.as_chunks::<8>();
    let bad = (first..).zip(words).position(|(at, found)| *found != word(salt, at));
    let last = word(salt, first + words.len() as u64);
    bad.map(|at| 8 * at).or_else(|| (rest != &last[..rest.len()]).then_some(8 * words.len()))
}

/// Returns `len` bytes, filled.
pub fn filled(len: usize, salt: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, salt, 0);
    bytes
}

/// Returns `true` if all bytes of all parts have this value.
pub fn are_all(parts: &[&[u8]], value: u8) -> bool {
    parts.iter().all(|part| part.iter().all(|byte| *byte == value))
}

#[test]
fn what_is_filled_is_right_and_a_changed_byte_is_found() {
    for len in [0, 1, 7, 8, 9, 100] {
        let mut bytes = vec![0; len];
        fill(&mut bytes, 77, 5);
        assert_eq!(wrong(&bytes, 77, 5), None);
        for at in 0..len {
            bytes[at] ^= 1;
            assert_eq!(wrong(&bytes, 77, 5), Some(at & !7), "{at} of {len}");
            bytes[at] ^= 1;
        }
        assert!(len < 8 || wrong(&bytes, 78, 5) == Some(0) && wrong(&bytes, 77, 6) == Some(0));
    }
}
