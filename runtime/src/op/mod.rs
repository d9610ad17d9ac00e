//! Operations that do not end within their call.

mod context;

pub(crate) use context::{Ended, OpContext};
