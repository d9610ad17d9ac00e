//! Lock-free structures, each with a proof.
//!
//! | module | one idea | where it is used |
//! |---|---|---|
//! | [`ring`] | one producer, one consumer, slots with sequence numbers | shm, in shared memory |
//! | [`attention`] | a consumer's notice that it has stopped looking | shm |
//! | [`bells`] | bells of many rings: a two-level bit set | shm, in shared memory |
//! | [`split`] | copying of one message by its receiver and its sender | shm, in shared memory |
//! | [`revocable`] | a revocable right to use another process's object | shm, in shared memory |
//! | [`free_list`] | a stack of indices | packet pools, slabs |
//! | [`handles`] | handles that a thread has left, and gives out again | receives |
//! | [`queue`] | a bounded queue for any number of producers and consumers | completion queues |
//! | [`slab`] | values under a token that carries a generation | operations in flight |
//! | [`try_lock`] | a lock that is tried, not waited for | matching, slabs |
//! | [`biased_lock`] | the same, free of charge for its usual thread | devices, links |
//! | `alone` | a step that one thread takes without an atomic exchange | [`queue`] |
//! | [`barrier`] | a barrier, free on one side | [`attention`], [`biased_lock`], [`sleepers`] |
//! | [`sleepers`] | threads that sleep until a bell rings | waiting |
//! | [`chores`] | what progress has to do, in one word | progress |
//! | [`earliest`] | the earliest of many points in time | deadlines |
//! | [`hurdles`] | a count and two flags that one load finds absent | routes to peers |
//! | [`aside`] | places that many threads put aside for the next poller | verbs |
//! | [`ticks`] | numbers that only grow, with listeners | barriers of groups |
//!
//! Atomics and cells come from `primitives` only (a test below checks). So under `--cfg
//! loom` every structure here that threads share is model-checked; those on the heap also run
//! under Miri. Structures in shared memory are `repr(C)` and generic over the location of their
//! bytes.

mod alone;
pub mod aside;
pub mod attention;
pub mod barrier;
pub mod bells;
pub mod biased_lock;
pub mod chores;
pub mod earliest;
pub mod free_list;
pub mod handles;
pub mod hurdles;
pub(crate) mod primitives;
pub mod queue;
pub mod revocable;
pub mod ring;
pub mod slab;
pub mod sleepers;
pub mod split;
pub mod ticks;
pub mod try_lock;

pub use aside::Aside;
pub use biased_lock::BiasedLock;
#[cfg(not(loom))]
pub use biased_lock::losses_of_this_thread;
pub use chores::{Chores, Waiting};
pub use earliest::Earliest;
pub use free_list::FreeList;
pub use handles::Handles;
pub use hurdles::Hurdles;
pub use queue::{Queue, QueuePermit};
pub use revocable::Revocable;
pub use slab::Slab;
pub use sleepers::Sleepers;
pub use split::Split;
pub use ticks::Ticks;
pub use try_lock::TryLock;

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    /// An atomic or a cell from elsewhere would be left out of loom's models.
    #[test]
    fn the_structures_take_atomics_and_cells_from_primitives_outside_of_their_tests() {
        let mut open = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src/sync"))];
        while let Some(path) = open.pop() {
            if path.is_dir() {
                open.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let tests = ["\n#[cfg(test)]\nmod ", "\n#[cfg(all(test"];
            let end = tests.iter().filter_map(|begin| text.find(begin)).min();
            let exempt = ["primitives", "models", "tests"]
                .contains(&path.file_stem().unwrap().to_str().unwrap());
            for line in text[..end.unwrap_or(text.len())].lines().filter(|_| !exempt) {
                let code = line.split("//").next().unwrap().replace("primitives::sync", "");
                let foreign = code.contains("sync::atomic") || code.contains("cell::UnsafeCell");
                assert!(!foreign, "{}: {line}", path.display());
            }
        }
    }
}
