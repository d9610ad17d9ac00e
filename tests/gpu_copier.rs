//! Small copies by a resident kernel: that they are copies as others are, in the order of others, and that the kernel holds nobody up.
//! With simulated GPUs here, and with real ones where `TEST_GPU=cuda` says so.
//!
//! | module | one idea |
//! |---|---|
//! | `alone` | one process and its devices |
//! | `between` | ranks that put to each other, and die |

mod support;

#[path = "gpu_copier/alone.rs"]
mod alone;
#[path = "gpu_copier/between.rs"]
mod between;

use carrack::transports::gpu::{CopierState, Gpu};
use std::sync::Arc;
use std::time::Duration;
use support::ranks::Role;

const PATIENCE: Duration = Duration::from_secs(100);

/// What a rank of these tests does. Without a role, nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "puts" => between::puts(&role),
        "signals" => between::signals(&role),
        "batches" => between::batches(&role),
        "kills" => between::kills(&role),
        "told" => between::told_of(&role),
        other => panic!("no role {other}"),
    }
}

/// Kernels launched, and copies given to them; nothing of a copier that cannot be had.
fn counts(gpu: &dyn Gpu) -> (u64, u64) {
    match gpu.copier() {
        CopierState::On { launches, copies } => (launches, copies),
        other => panic!("a copier, and not {other:?}"),
    }
}

/// Copies given to kernels of any of these devices: what two have a part in, is one's or the other's.
fn copies(gpus: &[Arc<dyn Gpu>]) -> u64 {
    let of = |gpu: &Arc<dyn Gpu>| match gpu.copier() {
        CopierState::On { copies, .. } => copies,
        CopierState::Refused(why) => panic!("a copier is refused: {why}"),
        _ => 0,
    };
    gpus.iter().map(of).sum()
}

/// Does something until a kernel has had a part in it: what comes before one runs is an engine's.
#[track_caller]
fn until_by_copier(gpus: &[Arc<dyn Gpu>], mut copy: impl FnMut()) {
    loop {
        let before = copies(gpus);
        copy();
        if copies(gpus) > before {
            return;
        }
    }
}
