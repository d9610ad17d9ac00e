//! Counters of resident copiers.

use carrack::transports::gpu::{CopierState, Gpu};
use std::sync::Arc;

/// Kernels launched, and copies given to them; nothing of a copier that could not be made.
pub fn counts(gpu: &dyn Gpu) -> (u64, u64) {
    match gpu.copier() {
        CopierState::On { launches, copies } => (launches, copies),
        other => panic!("a copier, and not {other:?}"),
    }
}

/// Copies given to kernels of any of these devices: what two have a part in, is one's or the
/// other's.
pub fn copies(gpus: &[Arc<dyn Gpu>]) -> u64 {
    let of = |gpu: &Arc<dyn Gpu>| match gpu.copier() {
        CopierState::On { copies, .. } => copies,
        CopierState::Refused(why) => panic!("a copier is refused: {why}"),
        _ => 0,
    };
    gpus.iter().map(of).sum()
}

/// Does something until a kernel has had a part in it: what comes before one runs is an engine's.
#[track_caller]
pub fn until_by_copier(gpus: &[Arc<dyn Gpu>], mut copy: impl FnMut()) {
    loop {
        let before = copies(gpus);
        copy();
        if copies(gpus) > before {
            return;
        }
    }
}
