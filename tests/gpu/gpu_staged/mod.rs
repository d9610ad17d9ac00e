//! GPU memory that cannot be mapped: messages, puts, gets and atomic operations between processes,
//! through blocks of pinned host memory and with the owner's help. The same steps also run on
//! memory that can be mapped. They run on simulated GPUs, and on real ones with `TEST_GPU=cuda`,
//! without the tests that need injected faults.

mod bounds;
mod endings;
mod matrix;

use crate::support;
use crate::support::gpu_ranks::completed;
use crate::support::gpus::{are_real as is_real, of as gpus};
use crate::support::ranks::{Ranks, Role};
use crate::support::{Job, OverShm, Watchdog, built};
use carrack::settings::{AutoChoice, GpuChoice, SettingsBuilder};
use carrack::transports::gpu::Flavour;
use carrack::transports::mem::Region;
use carrack::{Buffer, PostError, Rank, Runtime, Status};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(110);
/// Bytes of a block of the staging pipeline.
const BLOCK: usize = 512 << 10;
/// Blocks of a pool.
const BLOCKS: u64 = 4;

#[test]
fn every_operation_between_every_pair_of_kinds_in_every_length() {
    let _watchdog = Watchdog::over("matrix");
    for ipc in [0, 1] {
        Ranks::start("gpu_staged::matrix", 2, &[ipc]).succeed();
    }
}

#[test]
fn atomic_operations_of_several_ranks_on_one_word_are_one_after_the_other_whatever_its_kind() {
    let _watchdog = Watchdog::over("words");
    for ipc in [0, 1] {
        Ranks::start("gpu_staged::words", 3, &[ipc]).succeed();
    }
}

#[test]
fn managed_memory_is_refused_by_name() {
    let _watchdog = Watchdog::over("managed");
    for ipc in [0, 1] {
        Ranks::start("gpu_staged::managed", 2, &[ipc]).succeed();
    }
}

#[test]
fn a_message_longer_than_its_receive_is_an_error_and_writes_nothing() {
    let _watchdog = Watchdog::over("truncated");
    for ipc in [0, 1] {
        Ranks::start("gpu_staged::truncated", 2, &[ipc]).succeed();
    }
}

#[test]
fn a_peer_that_is_killed_in_the_midst_ends_what_was_staged_with_it_and_nothing_is_lost() {
    let _watchdog = Watchdog::over("killed");
    for way in 0..endings::WAYS {
        Ranks::start("gpu_staged::killed", 3, &[way]).succeed_except(Rank(1));
    }
}

#[test]
fn what_an_engine_is_at_ends_when_the_engine_is_done_and_no_rank_waits_for_that() {
    if is_real() {
        return println!("skipped: a real engine cannot be held");
    }
    let _watchdog = Watchdog::over("held");
    for way in 0..endings::WAYS {
        Ranks::start("gpu_staged::held", 2, &[way]).succeed_except(Rank(1));
    }
}

#[test]
fn an_engine_that_fails_in_the_midst_ends_the_operation_on_both_sides_and_no_other() {
    if is_real() {
        return println!("skipped: a real engine fails at no order");
    }
    let _watchdog = Watchdog::over("failing");
    Ranks::start("gpu_staged::failing", 2, &[]).succeed();
}

#[test]
fn a_receive_that_is_late_gets_its_buffer_back_and_its_sender_comes_to_an_end() {
    let _watchdog = Watchdog::over("late");
    Ranks::start("gpu_staged::late", 2, &[]).succeed();
}

#[test]
fn a_peer_that_is_silent_keeps_no_other_from_the_gpu() {
    let _watchdog = Watchdog::over("silent");
    Ranks::start("gpu_staged::silent", 3, &[]).succeed();
}

#[test]
fn without_pinned_memory_everything_still_arrives() {
    if is_real() {
        return println!("skipped: a real driver has pinned memory");
    }
    let _watchdog = Watchdog::over("poor");
    Ranks::start("gpu_staged::poor", 2, &[]).succeed();
}

#[test]
fn a_quarter_of_a_gibibyte_needs_no_more_host_memory_than_a_few_blocks() {
    let _watchdog = Watchdog::over("bounded");
    Ranks::start("gpu_staged::bounded", 2, &[]).succeed();
}

#[test]
fn many_messages_of_several_peers_share_the_blocks_and_all_arrive() {
    let _watchdog = Watchdog::over("crowd");
    Ranks::start("gpu_staged::crowd", 3, &[]).succeed();
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "matrix" => matrix::every_pair(&role),
        "words" => matrix::words(&role),
        "managed" => matrix::managed(&role),
        "truncated" => matrix::truncated(&role),
        "killed" => endings::killed(&role),
        "held" => endings::held(&role),
        "failing" => endings::failing(&role),
        "late" => endings::late(&role),
        "silent" => endings::silent(&role),
        "poor" => bounds::poor(&role),
        "bounded" => bounds::bounded(&role),
        "crowd" => bounds::crowd(&role),
        other => panic!("no such role: {other}"),
    }
}

fn settings(ipc: bool) -> SettingsBuilder {
    let choice = if ipc { AutoChoice::Auto } else { AutoChoice::Off };
    OverShm::settings().gpu(support::gpus::choice()).setting("gpu_ipc", choice)
}

/// Starts a rank that maps nothing. Where its driver is simulated, it misbehaves to order, and has
/// so much memory.
fn with_driver(role: &Role, memory: usize) -> (Runtime, Option<FakeDriver>) {
    if is_real() {
        return (role.runtime(settings(false)), None);
    }
    let driver =
        FakeDriver::new(FakeConfig { devices: 2, memory, ..FakeConfig::default() }).unwrap();
    let runtime = Runtime::builder()
        .settings(built(settings(false).gpu(GpuChoice::None)))
        .bootstrap(Box::new(role.bootstrap()))
        .gpu_driver(Arc::new(driver.clone()))
        .start()
        .unwrap();
    (runtime, Some(driver))
}

fn device(runtime: &Runtime, len: usize) -> Region {
    gpus(runtime)[0].allocate(len, Flavour::Plain).unwrap()
}

fn sent(
    runtime: &Runtime,
    to: u32,
    buffer: impl Into<Buffer>,
    tag: u64,
) -> Result<Status, PostError> {
    let mut buffer = Some(buffer.into());
    completed(runtime, |done| {
        let buffer = buffer.take().unwrap();
        runtime.post_send(Rank(to), buffer, carrack::Tag(tag)).comp(done).submit()
    })
}

fn received(
    runtime: &Runtime,
    from: u32,
    buffer: impl Into<Buffer>,
    tag: u64,
) -> Result<Status, PostError> {
    let mut buffer = Some(buffer.into());
    completed(runtime, |done| {
        runtime.post_recv(Rank(from), buffer.take().unwrap(), carrack::Tag(tag)).comp(done).submit()
    })
}
