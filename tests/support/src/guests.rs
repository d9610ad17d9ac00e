//! Variables of a program in a guest of `cargo xtask rdma-guest`, and the start of its ranks,
//! which join those of the other guest.

use std::process::{Command, Stdio};

/// A NIC that never gives up. It sends a lost packet again after a second (4.096 µs times 2 to the
/// power of 18). Soft-RoCE takes seven retries for "for ever". However little of the processor a
/// guest gets, nothing ends but by what a test does. A shorter time would run out on a loaded
/// machine where nothing is lost.
pub const NEVER_GIVES_UP: [(&str, &str); 2] =
    [("CARRACK_VERBS_TIMEOUT", "18"), ("CARRACK_VERBS_RETRIES", "7")];

/// Returns a variable that tells a program in a guest about itself.
pub fn told(name: &str) -> Option<String> {
    std::env::var(format!("RDMA_GUEST_{name}")).ok()
}

/// Returns `true` if this run has `guests` guests, and else prints the skipped test.
pub fn is_in_guests(what: &str, guests: &str) -> bool {
    let here = told("NODES");
    let is_there = here.as_deref() == Some(guests);
    if !is_there {
        let program = env!("CARGO_CRATE_NAME");
        println!(
            "skipped: {what}: cargo xtask rdma-guest --nodes {guests} --test {program} runs it"
        );
    }
    is_there
}

/// Returns the number of this guest.
pub fn node() -> u32 {
    told("NODE").map_or(0, |number| number.parse().expect("a number"))
}

/// Port on which rank 0 of a test's job listens. Each test has its own, so that none meets the
/// remains of another.
#[derive(Clone, Copy)]
pub struct Port(pub u16);

/// Tells a process how to join.
pub fn joining(command: &mut Command, port: Port) -> &mut Command {
    let root = if node() == 0 { told("ADDRESS") } else { told("PEER") };
    command
        .env("MASTER_ADDR", root.unwrap())
        .env("MASTER_PORT", "29500")
        .env("CARRACK_PORT", port.0.to_string())
        .env("CARRACK_JOB_SECRET", "a secret of two guests")
        .envs(NEVER_GIVES_UP)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
}
