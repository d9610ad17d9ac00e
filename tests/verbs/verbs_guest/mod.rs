//! The transport over verbs on a real kernel, with the Soft-RoCE devices of
//! `cargo xtask rdma-guest`. Ranks in processes meet faults of networks and nodes, and low limits.
//! Elsewhere each test is skipped, and says so.
//!
//! | module | one idea | guests |
//! |---|---|---|
//! | `course` | traffic of all kinds of operations between ranks, and how it may end | |
//! | `network` | packets that are lost, repeated, spoilt, late; cuts; a port that goes down | 1 |
//! | `gpus` | dma-bufs of simulated GPUs' memory | 1 |
//! | `kills` | a rank is killed | 1 |
//! | `poor` | little memory to lock, few of everything | 1 |
//! | `nodes` | ranks on two nodes: the examples, a cut | 2 |
//! | `loss` | a node is killed: the last test of a run | 2 |

mod course;
mod gpus;
mod kills;
mod loss;
mod network;
mod nodes;
mod poor;

use crate::support::guests::{is_in_guests, node, told};
use crate::support::ranks::Role;
use std::time::Duration;

/// Time limit of a rank: the processor is emulated.
const PATIENCE: Duration = Duration::from_secs(280);

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "course" => course::rank(&role),
        "few" => poor::few(&role),
        "little_locked" => poor::little_locked(&role),
        other => panic!("no role {other}"),
    }
}
