//! Simulated hardware, for tests and for machines without it: GPUs, RDMA devices, and the PTX of
//! the resident copier run by software. They stand behind the same traits and tables as the real
//! ones.
//!
//! | module | one idea |
//! |---|---|
//! | [`gpu`] | simulated GPUs, whose memory really faults when the CPU touches it |
//! | [`nic`] | simulated RDMA devices: a libibverbs in software |
//! | [`ptx`] | a block of GPU threads that carries out PTX, lane by lane |
//!
//! Nothing here says anything of the speed or the timing of real hardware.

#![warn(clippy::cast_possible_truncation)]
#![cfg_attr(test, allow(clippy::cast_possible_truncation))]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod gpu;
pub mod nic;
pub mod ptx;
