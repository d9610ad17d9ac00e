//! Operations that do not end within their call.

mod context;
mod on_link;
mod table;

pub(crate) use context::{Ended, OpContext};
pub(crate) use on_link::{Next, OnLink, OnLinks};
pub(crate) use table::{Entry, Flow, Kind, OpTable};
