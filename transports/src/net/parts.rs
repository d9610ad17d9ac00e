//! Bytes that travel: structs of fixed layout, and parts with their length in front.
//!
//! All bytes may come from another process, so each read is checked against what is left.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Struct that travels as it lies in memory.
pub trait Layout: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + 'static> Layout for T {}

/// Length in front of a part.
pub trait Length: Layout {
    /// Returns the length as it travels; the largest there is, if `len` is larger.
    fn of(len: usize) -> Self;

    /// Returns the number of bytes.
    fn bytes(&self) -> usize;
}

impl Length for U16 {
    fn of(len: usize) -> Self {
        u16::try_from(len).unwrap_or(u16::MAX).into()
    }

    fn bytes(&self) -> usize {
        self.get().into()
    }
}

impl Length for U32 {
    fn of(len: usize) -> Self {
        u32::try_from(len).unwrap_or(u32::MAX).into()
    }

    fn bytes(&self) -> usize {
        self.get() as usize
    }
}

/// Appends a part behind its length. A part that is longer than `L` can say is cut.
pub fn push<L: Length>(to: &mut Vec<u8>, part: &[u8]) {
    let len = L::of(part.len());
    to.extend(len.as_bytes());
    to.extend(&part[..len.bytes()]);
}

/// Returns the beginning of a text, of at most `longest` bytes.
pub fn cut(text: &str, longest: usize) -> &str {
    // `str::floor_char_boundary`, which the oldest supported Rust lacks.
    let end = (0..=longest.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// Bytes that are still to be read. Each call takes some from their front, or returns `None` if
/// they are fewer.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'a>(pub &'a [u8]);

impl<'a> Rest<'a> {
    /// Takes a struct.
    pub fn head<T: Layout>(&mut self) -> Option<&'a T> {
        let (head, rest) = T::ref_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(head)
    }

    /// Takes that many bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// Takes a part that [`push`] has appended.
    pub fn part<L: Length>(&mut self) -> Option<&'a [u8]> {
        let len = self.head::<L>()?.bytes();
        self.bytes(len)
    }

    /// Takes a part that is text.
    pub fn text<L: Length>(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.part::<L>()?).ok()
    }

    /// Returns `Some` if all bytes were read.
    pub fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_come_back_in_order_and_no_cut_bytes_are_read(
            parts: Vec<Vec<u8>>, text: String, at: prop::sample::Index,
        ) {
            let mut bytes = Vec::new();
            parts.iter().for_each(|part| push::<U16>(&mut bytes, part));
            push::<U32>(&mut bytes, text.as_bytes());
            let read = |bytes: &[u8]| {
                let mut rest = Rest(bytes);
                let read: Option<Vec<_>> =
                    parts.iter().map(|_| Some(rest.part::<U16>()?.to_vec())).collect();
                let text = rest.text::<U32>()?.to_owned();
                rest.end()?;
                Some((read?, text))
            };
            prop_assert_eq!(read(&bytes), Some((parts.clone(), text)));
            prop_assert_eq!(read(&bytes[..at.index(bytes.len())]), None);
            bytes.push(0);
            prop_assert_eq!(read(&bytes), None);
        }
    }

    #[test]
    fn a_part_is_as_long_as_its_length_says_and_a_text_ends_between_characters() {
        let mut bytes = Vec::new();
        push::<U16>(&mut bytes, &[7; 70_000]);
        assert_eq!(Rest(&bytes).part::<U16>().map(<[u8]>::len), Some(65_535));
        assert_eq!(bytes.len(), 2 + 65_535);
        assert_eq!(cut("aäö", 2), "a");
        assert_eq!(cut("aäö", 3), "aä");
        assert_eq!(cut("aäö", 9), "aäö");
    }
}
