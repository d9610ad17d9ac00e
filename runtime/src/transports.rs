//! Parts of the transports' crate for a program that brings a transport, a GPU driver or a packet
//! allocator of its own, or works with GPUs itself.
//!
//! | for | see |
//! |---|---|
//! | GPUs, their memory, streams and events | [`gpu`] |
//! | a driver of GPUs | [`gpu::Driver`] |
//! | memory of all kinds, and copies | [`mem`] |
//! | an allocator of packets | [`mem::PacketAllocator`] |
//! | a transport | [`contract`] |
//! | its settings | [`declare_settings!`], [`declare_choice!`]; [`settings`] |
//!
//! The crate `carrack-transports` has them, and promises nothing about what else is in it.

pub use carrack_transports::{contract, declare_choice, declare_settings, gpu, mem, settings};
