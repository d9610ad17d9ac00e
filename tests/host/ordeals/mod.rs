//! Ranks under stress: peers that are killed or stopped, long traffic, poor machines, forks. Each
//! time all kinds of operations run between processes, and every one of them is accounted for.
//!
//! | module | one idea | more of it |
//! |---|---|---|
//! | `kills` | a rank is killed at a random moment | `TEST_KILLS=1000` |
//! | `stop` | a rank is stopped for a while, and goes on | `TEST_STOP_SECONDS=60` |
//! | `slow` | one of eight ranks is stopped or killed; the others go on | `TEST_SLOW=40` |
//! | `soak` | very many messages, and memory that does not grow | `TEST_SOAK=100000000` |
//! | `poor` | machines that lack something | |
//! | `fork` | children of a rank | |
//! | `forked_objects` | a child that drops what its parent has in use | |

mod fork;
mod forked_objects;
mod kills;
mod poor;
mod slow;
pub(crate) mod soak;
mod stop;

use crate::support::ranks::Role;
use std::time::Duration;

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let patience = 90 + stop::seconds() + 4 * slow::phases() + soak::messages() / 5000;
    let Some(role) = Role::of_this_process(Duration::from_secs(patience)) else { return };
    match role.name.as_str() {
        "exec" => fork::executes(&role),
        "fork" => fork::rank(&role),
        "forked-objects" => forked_objects::rank(&role),
        "few" => poor::few(&role),
        "leaves" => fork::leaves_a_child(&role),
        "kills" => kills::rank(&role),
        "moment" => poor::moment(&role),
        "no_memory" => poor::no_memory(&role),
        "sandbox" => poor::sandbox(&role),
        "posts" => poor::posts(&role),
        "short" => poor::short(&role),
        "slow" => slow::rank(&role),
        "soak" => soak::rank(&role),
        "stop" => stop::rank(&role),
        "tracers" => poor::tracers(&role),
        "traffic" => poor::traffic(&role),
        "unlinked" => fork::unlinked(&role),
        other => panic!("no role {other}"),
    }
}
