//! Steps of `--long`: hours, by hand.

use std::process::Command;

use super::miri::{need_nightly, nightly};
use super::step::{Context, Outcome, Stopped};
use super::steps;
use crate::{apt, files};

/// Tests of one machine, one after the other.
const HOST: &str = "test --release --test host -- --include-ignored --test-threads 1";

/// Seconds of each fuzz target.
const FUZZING: u32 = 300;

/// Tests with a thousand kills, 10^8 messages, and a rank that is stopped for a minute.
pub(super) fn soak(context: &mut Context) -> Outcome {
    let mut command = context.workspace.cargo(HOST);
    command
        .args(["--nocapture", "ordeals::kills::", "ordeals::soak::", "ordeals::stop::"])
        .env("TEST_KILLS", "1000")
        .env("TEST_SOAK", "100000000")
        .env("TEST_STOP_SECONDS", "60")
        .env("TEST_PATIENCE", "20");
    context.run_tests(&mut command)
}

/// Checks that libraries and programs compile for 64-bit ARM. No linker for it is needed.
pub(super) fn aarch64(context: &mut Context) -> Outcome {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    if context.run(Command::new("rustup").args(["target", "add", TARGET])).is_err() {
        return Stopped::skipped("rustup could not add the standard library of 64-bit ARM");
    }
    let check = format!("check --workspace --lib --bins --target {TARGET}");
    Ok(context.run(&mut context.workspace.cargo(&check))?)
}

/// Tests two nodes: faults that last, 10^8 messages over connections that are cut, and Slurm.
pub(super) fn nodes(context: &mut Context) -> Outcome {
    steps::need_nodes()?;
    let slurm = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmix-dev";
    if let Err(error) = apt::see_to(slurm) {
        say!("without Slurm: {error}");
    }
    let mut command = context.workspace.cargo(HOST);
    command
        .args(["--nocapture", "nodes::", "cuts::", "--skip", "launchers_of_mpi"])
        .env("TEST_CUTS", "100000000")
        .env("TEST_FAULTS", "10000000")
        .env("TEST_PATIENCE", "4");
    context.run_tests(&mut command)
}

/// Messages of more than 4 GiB, which need 16 GiB of memory.
pub(super) fn huge(context: &mut Context) -> Outcome {
    context.run_tests(context.workspace.cargo(HOST).arg("huge::"))
}

/// Runs the unit tests of the runtime, whose memory is its own, under AddressSanitizer.
pub(super) fn sanitizer(context: &mut Context) -> Outcome {
    need_nightly(context)?;
    let mut command = nightly(context);
    command
        // A target of its own: build scripts and macros are built without.
        .args(["test", "-p", "carrack", "--lib", "--target", "x86_64-unknown-linux-gnu"])
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env("CARGO_TARGET_DIR", context.workspace.target.join("sanitizer"));
    context.run_tests(&mut command)
}

/// Runs every target of `fuzz/`, some minutes each.
pub(super) fn fuzz(context: &mut Context) -> Outcome {
    if !children::answers(Command::new("cargo").args(["fuzz", "--version"])) {
        return Stopped::skipped("there is no cargo-fuzz (cargo install cargo-fuzz)");
    }
    let targets = files::matching(&context.workspace.root, "fuzz/fuzz_targets/*.rs");
    if targets.is_empty() {
        return Err(Stopped::Failed("there is nothing in fuzz/fuzz_targets".into()));
    }
    let limit = format!("-max_total_time={FUZZING}");
    for name in targets.iter().filter_map(|target| target.file_stem()) {
        let mut command = nightly(context);
        context.run(command.args(["fuzz", "run"]).arg(name).args(["--", &limit]))?;
    }
    Ok(())
}
