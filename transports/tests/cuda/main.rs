//! The CUDA driver on real GPUs: every rule of gpu.md that this layer can show, named at its test.
//!
//! Without a device each test says so and passes; with `TEST_REQUIRE_GPU=1` it fails. Tests of
//! two devices need two. Tests between processes start this program again, for the one test
//! [`child`], with a role in an environment variable and a socket as standard input.
//!
//! `cargo test --release -p carrack-transports --test cuda -- --nocapture` shows what was skipped
//! and what the driver said; `-- --ignored --nocapture figures` measures.

#![expect(unsafe_code, reason = "kernels, copies and memory of the driver")]
#![allow(unreachable_pub, reason = "the modules of one program")]

mod busy;
mod contexts;
mod copier;
mod copies;
mod figures;
mod kernels;
mod kinds;
mod packets;
mod pieces;
mod processes;
mod reserved;
mod roles;
mod streams;
mod support;
mod user;
mod waits;

/// Not a test by itself: the role of a process that another test started.
#[test]
fn child() {
    roles::play();
}
