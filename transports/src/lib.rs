//! Access to hardware and to other processes, and the lock-free structures. Nearly all unsafe code
//! of Carrack is here, in the leaf modules that need it.
//!
//! In the order in which a message passes through:
//!
//! | module | one idea |
//! |---|---|
//! | [`contract`] | the traits of every transport: `Transport`, `Domain`, `Device`, `Link` |
//! | [`settings`] | the declaration of settings, each in its owner's folder |
//! | [`mem`] | memory and its kinds, the one copy function, packets and their pools |
//! | [`gpu`] | GPUs behind one trait: NVIDIA's, or those of a driver that the program brings |
//! | [`loopback`] | the transport within a process: the reference, and the test transport |
//! | [`shm`] | the transport between processes of one node: rings and chunks in sealed memfds |
//! | [`cuda_ipc`] | GPU memory of other processes of the node, mapped |
//! | [`verbs`] | RDMA devices through libibverbs, opened at run time |
//! | [`tcp`] | the transport between nodes without RDMA |
//! | [`registry`] | the transports by name, and their making |
//! | [`net`] | framed, bounded, authenticated connections between processes |
//! | [`dynamic`] | libraries that are opened at run time |
//! | [`fnv`] | a short hash, the same in all processes |
//! | [`fork`] | detection of forks: is this still the process that made an object? |
//! | [`signals`] | signals to the process that become chores of progress |
//! | [`stderr`] | lines to the user, from a library whose log few programs show |
//! | [`trial`] | attempts in a process of their own, because they may cost it its GPU context |
//! | [`sync`] | rings, queues, free lists: model-checked |
//!
//! This crate knows links, memory and operations. Tags, matching, protocols and completion objects
//! belong to the runtime, as UCX divides UCT and UCP.

#![warn(clippy::cast_possible_truncation)]
#![cfg_attr(test, allow(clippy::cast_possible_truncation))]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]
#![cfg_attr(
    not(feature = "internals"),
    allow(unreachable_pub, reason = "wire formats are public to that feature's users alone")
)]

#[cfg(not(loom))]
pub mod clock;
#[cfg(not(loom))]
pub mod contract;
#[cfg(not(loom))]
pub mod cuda_ipc;
pub mod dynamic;
pub mod fnv;
pub mod fork;
pub mod gpu;
#[cfg(all(feature = "internals", not(loom)))]
pub mod internals;
#[cfg(not(loom))]
pub mod loopback;
pub mod mem;
pub mod net;
#[cfg(not(loom))]
pub mod registry;
#[cfg(not(loom))]
pub mod settings;
#[cfg(not(loom))]
pub mod shm;
#[cfg(not(loom))]
pub mod signals;
pub mod stderr;
pub mod sync;
#[cfg(not(loom))]
pub mod tcp;
pub mod trial;
#[cfg(not(loom))]
mod upkeep;
#[cfg(not(loom))]
pub mod verbs;
