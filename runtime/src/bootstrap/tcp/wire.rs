//! Frames on a stream of bytes: `length 32 | rank 32 | frame`, the length that of what follows it.

#![forbid(unsafe_code)]

use super::super::protocol::{BadFrame, Frame, MAX_FRAME};

/// Bytes of the rank in front of a frame.
const RANK: usize = 4;

/// A frame, and the rank that it is about: whose it is on the way up, whom it concerns on the way
/// down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The rank.
    pub rank: u32,
    /// The frame.
    pub frame: Frame,
}

impl Envelope {
    /// Appends it to what is to be sent.
    pub fn write(&self, bytes: &mut Vec<u8>) {
        let frame = self.frame.encode();
        // A frame is far shorter than 4 GiB.
        let len = u32::try_from(RANK + frame.len()).unwrap_or(u32::MAX);
        bytes.extend(len.to_le_bytes());
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(frame);
    }
}

/// What has come, up to the frame that is not whole yet.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// Where the next frame begins.
    at: usize,
}

impl Inbox {
    /// Takes in bytes as they come.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.at > 0 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        self.bytes.extend(bytes);
    }

    /// Bytes that are here and not taken.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Whether nothing is here.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The next frame, if it is whole.
    ///
    /// # Errors
    ///
    /// [`BadFrame`]; nothing that follows can be read then.
    pub fn take(&mut self) -> Result<Option<Envelope>, BadFrame> {
        let waiting = &self.bytes[self.at..];
        let Some((len, rest)) = waiting.split_first_chunk() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        // Before anything is waited for: a frame's length is what a stranger would lie about.
        if len > RANK + MAX_FRAME {
            return Err(BadFrame::TooLong { field: "frame", len, limit: RANK + MAX_FRAME });
        }
        let Some(envelope) = rest.get(..len) else { return Ok(None) };
        let (rank, frame) =
            envelope.split_first_chunk().ok_or(BadFrame::Short { field: "rank" })?;
        let envelope = Envelope { rank: u32::from_le_bytes(*rank), frame: Frame::decode(frame)? };
        self.at += 4 + len;
        Ok(Some(envelope))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn envelopes() -> impl Strategy<Value = Vec<Envelope>> {
        let frame = prop_oneof![
            ("[a-z]{0,9}", proptest::collection::vec(any::<u8>(), 0..40))
                .prop_map(|(key, value)| Frame::Put { key, value }),
            "[a-z]{0,9}".prop_map(|key| Frame::Get { key }),
            any::<u64>().prop_map(|number| Frame::Fence { number }),
            Just(Frame::Finished),
        ];
        proptest::collection::vec(
            (any::<u32>(), frame).prop_map(|(rank, frame)| Envelope { rank, frame }),
            0..8,
        )
    }

    proptest! {
        #[test]
        fn frames_come_back_however_the_stream_is_cut(sent in envelopes(), cut in 1..30_usize) {
            let mut bytes = Vec::new();
            sent.iter().for_each(|envelope| envelope.write(&mut bytes));
            let (mut inbox, mut got) = (Inbox::default(), Vec::new());
            for piece in bytes.chunks(cut) {
                inbox.push(piece);
                while let Some(envelope) = inbox.take().unwrap() {
                    got.push(envelope);
                }
            }
            prop_assert!(inbox.is_empty());
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn garbage_ends_in_an_error_or_waits_for_no_more_than_a_frame(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let mut inbox = Inbox::default();
            inbox.push(&bytes);
            while let Ok(Some(_)) = inbox.take() {}
        }
    }

    #[test]
    fn a_length_beyond_the_bound_is_refused_before_its_bytes_are_waited_for() {
        for len in [(RANK + MAX_FRAME + 1) as u32, u32::MAX] {
            let mut inbox = Inbox::default();
            inbox.push(&len.to_le_bytes());
            assert!(matches!(inbox.take(), Err(BadFrame::TooLong { .. })));
        }
        let mut inbox = Inbox::default();
        inbox.push(&[3, 0, 0, 0, 1, 2, 3]);
        assert!(matches!(inbox.take(), Err(BadFrame::Short { .. })));
    }
}
