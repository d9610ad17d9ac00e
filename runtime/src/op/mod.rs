//! Operations that do not end within their call.

mod context;
mod few;
mod holder;
mod losses;
mod on_link;
mod pending;
mod slots;
mod table;

pub(crate) use context::{Ended, OpContext};
pub(crate) use few::Few;
pub(crate) use holder::{Ending, Holder};
pub(crate) use losses::Losses;
pub(crate) use on_link::{Continuation, OnLink, OnLinks};
pub use pending::PendingOp;
pub(crate) use table::{Flow, OpEntry, OpKind, OpTable, Taken};
