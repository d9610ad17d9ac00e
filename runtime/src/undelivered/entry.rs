//! Deliveries that wait, one by one.

use super::{Kept, UnexpectedBudget};
use crate::comp::{Completion, Status};
use crate::names::{Rank, Tag};
use crate::protocol::wire::Rts;
use carrack_transports::contract::Payload;
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{AllocError, MemMut, MemRef};
use parking_lot::Mutex;
use std::sync::Arc;

/// A delivery that waits.
pub(crate) struct QueuedDelivery {
    /// The object to signal: the queue's object, or one that passes statuses on to it.
    pub(crate) comp: Arc<dyn Completion>,
    pub(crate) what: Delivery,
}

pub(crate) enum Delivery {
    /// The end of an operation, or a message of a peer, and its cost. Handlers reply only to
    /// messages, so what it is about stays with it.
    Status(Status, Option<Kept>, About),
    /// An active message that still needs a packet.
    Message { from: Rank, tag: Tag, payload: Payload, kept: Kept },
    /// The RTS of an active message. Its bytes are with the sender.
    Rts { from: Rank, tag: Tag, rts: Rts },
    /// An offered message that is being fetched.
    Fetch(Arc<Fetch>, Rank),
}

/// Completion object of an offered message while it is fetched, which keeps the status.
#[derive(Default)]
pub(crate) struct Fetch(Mutex<Option<Status>>);

impl Fetch {
    pub(crate) fn take(&self) -> Option<Status> {
        self.0.lock().take()
    }
}

impl Completion for Fetch {
    fn signal(&self, status: Status) -> Result<(), Status> {
        *self.0.lock() = Some(status);
        Ok(())
    }

    fn describe(&self) -> String {
        "a message that is fetched".into()
    }
}

/// The subject of a status.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    /// An operation of this rank's.
    Operation,
    /// A receive of this rank's, or another operation that a peer has ended.
    Received,
    /// A message or a notification of a peer's, whose bytes are in the buffer that they were
    /// fetched or written to.
    Arrival,
    /// An active message that came whole.
    Whole,
}

/// The reason why a delivery has to wait.
pub(crate) enum Obstacle {
    /// The completion object has no room.
    Full,
    /// No packet is left, or there is no memory for one.
    Packet(Option<AllocError>),
    /// An engine or a link still works on it.
    InFlight,
}

impl QueuedDelivery {
    /// Returns `true` if it can be tried.
    pub(crate) fn is_ready(&self) -> bool {
        match &self.what {
            // Only this entry holds the object, so the status has come, or the sender is gone.
            Delivery::Fetch(fetch, _) => Arc::strong_count(fetch) == 1,
            Delivery::Status(..) | Delivery::Message { .. } | Delivery::Rts { .. } => true,
        }
    }

    /// Returns the cost that it is charged with.
    pub(crate) fn kept(&self) -> Option<Kept> {
        match self.what {
            Delivery::Status(_, kept, _) => kept,
            Delivery::Message { kept, .. } => Some(kept),
            Delivery::Rts { .. } | Delivery::Fetch(..) => None,
        }
    }

    /// Returns the rank that has sent it, or the peer of the operation.
    pub(crate) fn rank(&self) -> Rank {
        match &self.what {
            Delivery::Status(status, ..) => status.rank,
            Delivery::Message { from, .. }
            | Delivery::Rts { from, .. }
            | Delivery::Fetch(_, from) => *from,
        }
    }

    /// Moves the bytes of a message that came whole out of its packet, and frees the packet.
    /// Returns the old and the new cost; `None` if it has no packet.
    pub(crate) fn leave_packet(&mut self, unexpected: &UnexpectedBudget) -> Option<(Kept, Kept)> {
        let before = self.kept().filter(|kept| kept.is_packet())?;
        let (from, tag, bytes) = match &self.what {
            Delivery::Message { from, tag, payload, .. } => {
                (*from, *tag, host_copy(payload.view())?)
            }
            Delivery::Status(status, ..) => {
                (status.rank, status.tag, host_copy(status.buffer.view())?)
            }
            Delivery::Rts { .. } | Delivery::Fetch(..) => return None,
        };
        let payload = Payload::Aside(bytes);
        let kept = unexpected.kept(&payload);
        self.what = Delivery::Message { from, tag, payload, kept };
        Some((before, kept))
    }
}

fn host_copy(bytes: MemRef<'_>) -> Option<Vec<u8>> {
    let mut copy = vec![0; bytes.len()];
    copy_now(MemMut::host(&mut copy), bytes).is_ok().then_some(copy)
}
