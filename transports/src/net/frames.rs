//! Messages on a stream of bytes, each with its length in front: four bytes, little-endian.

use std::io::{self, ErrorKind, Write};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of a length.
const LENGTH: usize = size_of::<U32>();

/// A length that no frame of this connection has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {length} bytes, where {longest} are the most: it is no rank of Carrack's")]
pub struct TooLong {
    /// The length found.
    pub length: usize,
    /// The longest frame.
    pub longest: usize,
}

/// The frames of a stream, in whatever pieces it comes.
#[derive(Debug)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// Bytes at the front that have been taken.
    taken: usize,
    longest: usize,
}

impl Inbox {
    /// Creates an empty inbox, for frames up to this length.
    pub fn new(longest: usize) -> Self {
        Self { bytes: Vec::new(), taken: 0, longest }
    }

    /// Changes the length of the longest frame.
    pub fn allow(&mut self, longest: usize) {
        self.longest = longest;
    }

    /// Takes in a piece of the stream.
    pub fn extend(&mut self, piece: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend(piece);
    }

    /// Takes the next frame off, if all of it has come.
    ///
    /// # Errors
    /// Its length exceeds the longest frame. The stream makes no sense from there on.
    pub fn take(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        let rest = &self.bytes[self.taken..];
        let Ok((length, rest)) = U32::ref_from_prefix(rest) else { return Ok(None) };
        let length = length.get() as usize;
        if length > self.longest {
            return Err(TooLong { length, longest: self.longest });
        }
        let Some(frame) = rest.get(..length) else { return Ok(None) };
        let frame = frame.to_vec();
        self.taken += LENGTH + length;
        Ok(Some(frame))
    }

    /// Returns the bytes behind the frames that were taken.
    pub fn into_rest(mut self) -> Vec<u8> {
        self.bytes.split_off(self.taken)
    }

    /// Returns the number of bytes that have come and were not taken.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Frames that wait for room in a stream.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    /// Bytes at the front that have gone.
    sent: usize,
}

impl Outbox {
    /// Puts a frame behind the others.
    pub fn push(&mut self, frame: &[u8]) {
        let length = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        self.bytes.extend(U32::new(length).as_bytes());
        self.bytes.extend(frame);
    }

    /// Writes what there is room for.
    ///
    /// # Errors
    /// The stream's. That it is full, or not connected yet, is none.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while self.sent < self.bytes.len() {
            match to.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) =>
                {
                    if self.sent > self.bytes.len() / 2 {
                        self.bytes.drain(..self.sent);
                        self.sent = 0;
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.bytes.clear();
        self.sent = 0;
        Ok(())
    }

    /// Returns the number of bytes that wait.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Returns `true` if none wait.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A stream that takes a limited number of bytes at every second call.
    struct Narrow(Vec<u8>, usize, bool);

    impl Write for Narrow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.2 = !self.2;
            if self.2 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let some = bytes.len().min(self.1);
            self.0.extend(&bytes[..some]);
            Ok(some)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn frames_come_back_however_the_stream_is_cut(
            sent in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 0..9),
            cut in 1..30_usize,
        ) {
            let (mut outbox, mut stream) = (Outbox::default(), Narrow(Vec::new(), cut, true));
            sent.iter().for_each(|frame| outbox.push(frame));
            while !outbox.is_empty() {
                outbox.flush(&mut stream).unwrap();
            }
            let (mut inbox, mut got) = (Inbox::new(50), Vec::new());
            for piece in stream.0.chunks(cut) {
                inbox.extend(piece);
                while let Some(frame) = inbox.take().unwrap() {
                    got.push(frame);
                }
            }
            prop_assert!(inbox.is_empty());
            prop_assert_eq!(got, sent);
        }
    }

    #[test]
    fn a_length_beyond_the_bound_is_refused_before_its_bytes_are_waited_for() {
        for length in [51, u32::MAX, u32::from_le_bytes(*b"GET ")] {
            let mut inbox = Inbox::new(50);
            inbox.extend(&length.to_le_bytes());
            assert_eq!(inbox.take(), Err(TooLong { length: length as usize, longest: 50 }));
        }
    }

    #[test]
    fn a_frame_comes_byte_by_byte_and_a_truncated_one_never() {
        let (mut inbox, mut outbox, mut stream) = (Inbox::new(50), Outbox::default(), Vec::new());
        outbox.push(b"whole");
        outbox.flush(&mut stream).unwrap();
        for byte in &stream {
            assert_eq!(inbox.take(), Ok(None));
            inbox.extend(&[*byte]);
        }
        assert_eq!(inbox.take(), Ok(Some(b"whole".to_vec())));
        inbox.extend(&stream[..stream.len() - 1]);
        assert_eq!((inbox.take(), inbox.len()), (Ok(None), stream.len() - 1));
    }
}
