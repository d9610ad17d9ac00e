//! Words whose agent is a NIC, where messages take another path than through it: each rank has a
//! simulated NIC beside.
//!
//! | module | one idea |
//! |---|---|
//! | `beside` | ranks of one process, whose messages go through its queues |
//! | `nodes` | processes, whose messages go through shared memory |

use crate::support;
mod beside;
mod nodes;

/// What a rank of these tests does that is a process. Without a role, nothing.
#[test]
fn a_rank_in_its_role() {
    if let Some(role) = support::ranks::Role::of_this_process(std::time::Duration::from_secs(100)) {
        nodes::rank(&role);
    }
}
