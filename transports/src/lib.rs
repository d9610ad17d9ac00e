//! What talks to hardware and to other processes, and the lock-free structures. All the unsafe code
//! of Carrack is here, in the leaf modules that need it.
//!
//! In the order in which a message passes through:
//!
//! | module | one idea |
//! |---|---|
//! | [`contract`] | what every transport promises: [`Transport`](contract::Transport), [`Domain`](contract::Domain), [`Device`](contract::Device), [`Link`](contract::Link) |
//! | [`mem`] | memory and its kinds, the one copy function, packets and their pools |
//! | [`gpu`] | GPUs behind one trait: none, simulated, NVIDIA's |
//! | [`loopback`] | the transport within a process: the reference, and the test transport |
//! | [`shm`] | the transport between processes of one node: rings and chunks in sealed memfds |
//! | [`cuda_ipc`] | GPU memory of other processes of the node, mapped |
//! | [`verbs`] | RDMA devices through libibverbs, opened at run time |
//! | [`net`] | framed, bounded, authenticated connections between processes |
//! | [`fork`] | whether this is still the process that something belongs to |
//! | [`signals`] | signals to the process that become chores of progress |
//! | [`trial`] | what is tried in a process of its own, because it may cost it its GPU context |
//! | [`sync`] | rings, queues, free lists: model-checked |
//!
//! This crate knows links, memory and operations. It knows nothing of tags, matching, protocols or
//! completion objects: those are the runtime's (UCX's cut between UCT and UCP).

#![warn(clippy::cast_possible_truncation)]
#![cfg_attr(test, allow(clippy::cast_possible_truncation))]

#[cfg(not(loom))]
pub mod clock;
#[cfg(not(loom))]
pub mod contract;
#[cfg(not(loom))]
pub mod cuda_ipc;
pub mod fork;
pub mod gpu;
#[cfg(not(loom))]
pub mod loopback;
pub mod mem;
pub mod net;
#[cfg(not(loom))]
pub mod shm;
#[cfg(not(loom))]
pub mod signals;
pub mod sync;
pub mod trial;
#[cfg(not(loom))]
mod upkeep;
#[cfg(not(loom))]
pub mod verbs;
