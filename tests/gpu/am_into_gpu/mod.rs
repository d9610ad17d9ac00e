//! Active messages into memory of a GPU: of every length, from memory of every kind, over shared
//! memory between processes and within one. They run on simulated GPUs, and on real ones with
//! `TEST_GPU=cuda`.

mod allocators;
mod roles;

use crate::support::ranks::{Ranks, Role};
use crate::support::{Job, OverLoopback, OverShm, Watchdog};
use carrack::Runtime;
use carrack::settings::{GpuChoice, SettingsBuilder};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);

/// Part of two ranks: rank 0 sends, into memory of a GPU of rank 1.
type Play = fn(&Runtime);

const ROLES: [(&str, Play); 6] = [
    ("lands", roles::lands),
    ("order", roles::order),
    ("full", roles::full),
    ("own", allocators::own),
    ("lies", allocators::lies),
    ("little", allocators::little),
];

fn settings<J: Job>() -> SettingsBuilder {
    let real = std::env::var_os("TEST_GPU").is_some_and(|gpu| gpu == "cuda");
    J::settings().gpu(if real { GpuChoice::Cuda } else { GpuChoice::Fake }).packets_max(64)
}

fn play(name: &str, runtime: &Runtime) {
    let (_, role) = ROLES.iter().find(|(role, _)| *role == name).unwrap();
    role(runtime);
    runtime.barrier().unwrap();
}

/// Runs a role between two processes, over shared memory; and between two threads of one, over the
/// loopback.
fn between_ranks(name: &str) {
    let _watchdog = Watchdog::over(name);
    Ranks::start(&format!("am_into_gpu::{name}"), 2, &[]).succeed();
    std::thread::scope(|scope| {
        for runtime in OverLoopback::ranks_with(2, settings::<OverLoopback>()) {
            scope.spawn(move || play(name, &runtime));
        }
    });
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    play(&role.name, &role.runtime(settings::<OverShm>()));
}

#[test]
fn messages_of_every_length_from_memory_of_every_kind_land_on_the_gpu_and_can_be_kept() {
    between_ranks("lands");
}

#[test]
fn thousands_of_messages_are_handed_over_in_the_order_in_which_they_were_sent() {
    between_ranks("order");
}

#[test]
fn a_large_message_for_which_there_is_no_memory_is_an_error_on_both_sides() {
    between_ranks("full");
}

#[test]
fn a_program_brings_an_allocator_of_its_own() {
    between_ranks("own");
}

#[test]
fn an_allocator_that_lies_is_refused_before_any_message_comes() {
    between_ranks("lies");
}

#[test]
fn messages_wait_while_there_is_too_little_memory_for_their_packets() {
    between_ranks("little");
}
