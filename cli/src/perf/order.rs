//! Orders of rank 0 to the other ranks.

use super::error::PerfError;
use carrack::{Rank, Runtime, Tag};

/// Apart from the tags of seats, which count from 0.
const TAG: Tag = Tag(1 << 32);
/// Bytes of an order.
const LENGTH: usize = 16;

/// An order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Go to the point of this number.
    Point(u64),
    /// Compare a payload that is made of this seed.
    Check(u64),
    /// Run a round of this number of messages.
    Round(u64),
    /// End.
    Stop,
}

impl Order {
    fn encode(self) -> [u8; LENGTH] {
        let (kind, number) = match self {
            Self::Point(number) => (1_u64, number),
            Self::Check(number) => (2, number),
            Self::Round(number) => (3, number),
            Self::Stop => (4, 0),
        };
        let mut bytes = [0; LENGTH];
        bytes[..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, number) = bytes.split_first_chunk::<8>()?;
        let number = u64::from_le_bytes(number.try_into().ok()?);
        match u64::from_le_bytes(*kind) {
            1 => Some(Self::Point(number)),
            2 => Some(Self::Check(number)),
            3 => Some(Self::Round(number)),
            4 => Some(Self::Stop),
            _ => None,
        }
    }

    /// Gives it to all others.
    pub(super) fn give(self, runtime: &Runtime) -> Result<(), PerfError> {
        let bytes = self.encode();
        for to in (1..runtime.size()).map(Rank) {
            runtime.post_send(to, &bytes, TAG).wait()?;
        }
        Ok(())
    }

    /// Waits for one. Does not burn a core.
    pub(super) fn take(runtime: &Runtime, from: Rank) -> Result<Self, PerfError> {
        let status = runtime.post_recv(from, vec![0; LENGTH], TAG).wait()?;
        status.bytes().and_then(Self::decode).ok_or(PerfError::Order { from })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_heard_as_it_was_given_and_nonsense_is_none() {
        for order in [Order::Point(3), Order::Check(u64::MAX), Order::Round(1 << 40), Order::Stop] {
            assert_eq!(Order::decode(&order.encode()), Some(order));
        }
        assert_eq!(Order::decode(&[0; LENGTH]), None);
        assert_eq!(Order::decode(&[4; 3]), None);
    }
}
