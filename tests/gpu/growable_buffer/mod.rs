//! `GrowableBuffer`: GPU memory that grows and shrinks where it lies. With simulated GPUs here, and
//! with real ones where `TEST_GPU=cuda` says so: one is enough, two are better.

mod alone;
mod between;
mod model;
mod posts;
mod readers;
mod refused;
mod rounds;

use crate::gpu_ordeals::exchange;
use crate::support::gpu_ranks::{Gpus, PATIENCE};
use crate::support::ranks::Role;
use crate::support::words::{filled, wrong};
use carrack::alloc::GrowableBuffer;
use carrack::region::Region;

/// Bytes of a stripe: two of what simulated GPUs, and NVIDIA's, allocate by.
const STRIPE: usize = 4 << 20;

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(2 * PATIENCE) else { return };
    match role.name.as_str() {
        "grows" => between::grows(&role),
        "longer" => between::longer(&role),
        "messages" => between::messages(&role),
        "killed" => between::killed(&role),
        "posts" => posts::rank(&role),
        "rounds" => rounds::rank(&role),
        other => panic!("no role {other}"),
    }
}

/// Reserves a buffer over all GPUs.
fn buffer(gpus: &Gpus, stripes: usize) -> GrowableBuffer {
    GrowableBuffer::reserve(&gpus.all, stripes * STRIPE).stripe(STRIPE).build().unwrap()
}

/// Returns a region for each stripe.
fn stripes(buffer: &GrowableBuffer) -> Vec<Region> {
    buffer.pieces(0, buffer.len()).unwrap()
}

fn fill(region: &Region, salt: u64) {
    region.whole().write(&filled(region.len(), salt)).unwrap();
}

#[track_caller]
fn check(region: &Region, salt: u64) {
    let found = wrong(&region.whole().to_vec().unwrap(), salt, 0);
    assert_eq!(found, None, "{} bytes of {salt}", region.len());
}
