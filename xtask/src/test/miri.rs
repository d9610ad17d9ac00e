//! Miri, where a nightly has it or can get it: a fresh machine may have stable only.

use std::process::Command;

use super::step::{Context, Outcome, Stopped};
use crate::workspace::clean;

pub(super) fn step(context: &mut Context) -> Outcome {
    install(context)?;
    let mut command = nightly(context);
    command
        .args(["miri", "test", "-p", "carrack-transports", "--lib", "miri_"])
        // Isolation would refuse the clock, which waits with a deadline read. Leaks stay errors.
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .env("CARGO_TARGET_DIR", context.workspace.target.join("miri"));
    context.run_tests(&mut command)
}

/// Sees to it that `cargo +nightly miri` works, or says why it cannot.
fn install(context: &Context) -> Outcome {
    need_nightly(context)?;
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add", "miri", "rust-src", "--toolchain", "nightly"]);
    let there = || children::answers(nightly(context).args(["miri", "--version"]));
    if !context.have(there, &mut rustup) {
        return Stopped::skipped("the nightly toolchain has no Miri, and rustup could not add it");
    }
    // Builds the standard library that Miri interprets, which needs the component rust-src.
    let set_up = || context.run(nightly(context).args(["miri", "setup"])).is_ok();
    if context.have(set_up, &mut rustup) {
        return Ok(());
    }
    Stopped::skipped("`cargo +nightly miri setup` failed, with what is printed above")
}

/// Skips a step where there is no nightly toolchain.
pub(super) fn need_nightly(context: &Context) -> Outcome {
    if children::answers(nightly(context).arg("--version")) {
        return Ok(());
    }
    Stopped::skipped("there is no nightly toolchain (rustup toolchain install nightly)")
}

/// Returns rustup's `cargo +nightly`. The cargo that runs this task says in the environment which
/// toolchain it is of, which would win over the `+`.
pub(super) fn nightly(context: &Context) -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly").current_dir(&context.workspace.root);
    clean(&mut command);
    for ours in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "LD_LIBRARY_PATH"] {
        command.env_remove(ours);
    }
    command
}
