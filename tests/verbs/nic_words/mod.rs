//! Words whose agent is a NIC, where messages take another path: each rank has a simulated NIC in
//! addition.
//!
//! | module | one idea |
//! |---|---|
//! | `one_process` | ranks of one process, whose messages go through its queues |
//! | `nodes` | processes, whose messages go through shared memory |

use crate::support;
mod nodes;
mod one_process;

/// Plays the role of a rank that is a process. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    if let Some(role) = support::ranks::Role::of_this_process(std::time::Duration::from_secs(100)) {
        nodes::rank(&role);
    }
}
