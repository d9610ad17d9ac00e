//! Licences, bans and sources of all dependencies, by cargo-deny. Advisories are left out: they
//! need the network.

use std::path::PathBuf;
use std::process::Command;

use super::step::{Context, Outcome, Stopped};
use crate::child;

pub(super) fn step(context: &mut Context) -> Outcome {
    let Some(program) = find(context).or_else(|| install(context)) else {
        return Stopped::skipped(
            "cargo-deny is not there, and could not be built (cargo install cargo-deny)",
        );
    };
    let mut command = Command::new(program);
    command.current_dir(&context.workspace.root).args([
        "--workspace",
        "check",
        "licenses",
        "bans",
        "sources",
    ]);
    Ok(context.run(&mut command)?)
}

/// The user's own cargo-deny, or the one that an earlier run built.
fn find(context: &Context) -> Option<PathBuf> {
    [PathBuf::from("cargo-deny"), context.workspace.tools().join("bin/cargo-deny")]
        .into_iter()
        .find(|program| child::answers(Command::new(program).arg("--version")))
}

/// Builds cargo-deny.
fn install(context: &Context) -> Option<PathBuf> {
    context.run(&mut context.workspace.install("cargo-deny")).ok().and_then(|()| find(context))
}
