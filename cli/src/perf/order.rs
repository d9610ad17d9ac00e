//! Orders of rank 0 to the other ranks.

use super::error::PerfError;
use carrack::{Rank, Runtime, Tag};
use serde::{Deserialize, Serialize};

/// Tag apart from those of seats, which count from 0.
const TAG: Tag = Tag(1 << 32);
/// Room for an order.
const ROOM: usize = 64;

/// An order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Go to the point of this number.
    Point(usize),
    /// Compare a payload that is made of this seed.
    Check(u64),
    /// Run a round of this number of messages.
    Round(u64),
    /// End.
    Stop,
}

impl Order {
    fn encode(self) -> Vec<u8> {
        // Plain data: it has a form in JSON.
        serde_json::to_vec(&self).unwrap_or_default()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Gives it to all others.
    pub(super) fn give(self, runtime: &Runtime) -> Result<(), PerfError> {
        let bytes = self.encode();
        for to in (1..runtime.size()).map(Rank) {
            runtime.post_send(to, &bytes[..], TAG).wait()?;
        }
        Ok(())
    }

    /// Waits for one. Does not burn a core.
    pub(super) fn take(runtime: &Runtime, from: Rank) -> Result<Self, PerfError> {
        let status = runtime.post_recv(from, vec![0; ROOM], TAG).wait()?;
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
        assert_eq!(Order::decode(&[0; ROOM]), None);
        assert_eq!(Order::decode(&[4; 3]), None);
    }
}
