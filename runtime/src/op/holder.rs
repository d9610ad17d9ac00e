//! Places where operations wait, and the reasons why they end there.

use super::{Ended, OpContext, PendingOp};
use crate::deadline::{Deadline, Deadlines};
use crate::error::OpError;
use crate::names::Rank;
use carrack_transports::contract::DownCause;

/// A place where operations wait.
///
/// `Core::each_holder` and `Port::each_holder` enumerate the holders. Ends of peers, deadlines, the
/// list of pending operations, the end of a runtime and the wait for idleness reach them by that
/// alone. A holder takes operations out under its lock, and ends them without the lock: the drop of
/// a buffer may run code of the user.
pub(crate) trait Holder {
    /// Ends the operations that `why` concerns. Operations that a link or an engine has may end
    /// only by that.
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>);

    /// Describes the operations, for diagnostics.
    fn list(&self, list: &mut dyn FnMut(PendingOp));

    /// Returns the number of operations. Receives do not count.
    fn count(&self) -> usize;
}

/// The reason why operations end before they are done.
#[derive(Clone, Copy)]
pub(crate) enum Ending<'a> {
    /// The link to a peer is down: holders of its device hear of it.
    Down(Rank, &'a DownCause),
    /// A rank is gone: all holders hear of it. Operations that need a device's link end by `Down`.
    Gone(Rank, &'a DownCause),
    /// The time is that late. Deadlines that have not passed are noted again.
    Late(Deadline, &'a Deadlines),
    /// The runtime ends. Copies on streams wait for `Closed`, since the streams may wait for other
    /// operations.
    Closing,
    /// All other operations have ended, and their completion objects were signalled.
    Closed,
}

impl Ending<'_> {
    /// Returns `true` if an operation that can end now ends by this.
    pub(crate) fn takes(&self, op: &OpContext) -> bool {
        match *self {
            Self::Down(rank, _) | Self::Gone(rank, _) => op.rank == rank,
            Self::Late(now, left) => left.passes(op.deadline, now),
            Self::Closing | Self::Closed => true,
        }
    }

    /// Returns the error of an operation with `rank`.
    pub(crate) fn error(&self, rank: Rank) -> OpError {
        match *self {
            Self::Down(_, cause) | Self::Gone(_, cause) => {
                OpError::PeerDown { rank, cause: cause.clone() }
            }
            Self::Late(..) => OpError::TimedOut(rank),
            Self::Closing | Self::Closed => OpError::Closed,
        }
    }
}
