//! PTX run by software, lane by lane. It shows that the text of a kernel does as it should. It
//! shows neither the time of a real device nor its memory's order.
//!
//! It knows the instructions of the resident copier's kernel, and panics at others.

mod block;
mod text;

pub use block::{Block, garbage};
pub use text::Program;
