//! PTX run by software, lane by lane: shows that the text of a kernel does as it should, and
//! nothing of a real device, neither its time nor its memory's order.
//!
//! It knows the instructions of the resident copier's kernel, and panics at others.

mod block;
mod text;

pub use block::{Block, garbage};
pub use text::Program;
