//! Ranks with GPUs under stress. Masks differ, memory is of every kind, rounds are thousands, and
//! ranks are killed during copies. Memory is withdrawn in use, and programs use their devices
//! meanwhile. They run on simulated GPUs, and on real ones with `TEST_GPU=cuda`.
//!
//! | module | one idea | more of it |
//! |---|---|---|
//! | `exchange` | the common part: two ranks that use each other's memory | |
//! | `masks` | ranks that see other devices, or in another order | |
//! | `kinds` | memory of every kind goes by its way, or by another for a reason | |
//! | `rounds` | resources that are given back are free again | `TEST_ROUNDS=10000` |
//! | `kills` | a rank is killed while engines copy from and to its memory | `TEST_KILLS=100` |
//! | `closing` | memory goes when its last importer has closed it | |
//! | `own_threads` | the program's own threads use the devices at the same time | |
//! | `other_path` | memory is mapped whatever path messages take | |
//! | `several` | memory made of several VMM allocations | |
//! | `same_process` | ranks of one process: the pointer itself | |

mod closing;
pub(crate) mod exchange;
mod kills;
mod kinds;
mod masks;
mod other_path;
mod own_threads;
mod rounds;
mod same_process;
mod several;

use crate::support::ranks::Role;
use std::time::Duration;

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let patience = Duration::from_secs(110 + rounds::count() / 20);
    let Some(role) = Role::of_this_process(patience) else { return };
    match role.name.as_str() {
        "own_threads" => own_threads::rank(&role),
        "closing" => closing::rank(&role),
        "in_flight" => closing::in_flight(&role),
        "kills" => kills::rank(&role),
        "kinds" => kinds::rank(&role),
        "masks" => masks::rank(&role),
        "refused" => kinds::refused(&role),
        "no_descriptors" => kinds::no_descriptors(&role),
        "rounds" => rounds::rank(&role),
        "several" => several::rank(&role),
        other => panic!("no role {other}"),
    }
}
