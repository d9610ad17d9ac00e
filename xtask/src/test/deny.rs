//! Licences, bans and sources of all dependencies, by cargo-deny. Advisories are left out: they
//! need the network.

use std::path::PathBuf;
use std::process::Command;

use super::step::{Context, Outcome};
use crate::child;

pub(super) fn step(context: &mut Context) -> Outcome {
    let Some(program) = find(context).or_else(|| install(context)) else {
        return Outcome::Skipped(
            "cargo-deny is not there, and could not be built (cargo install cargo-deny)".into(),
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
    context.run(&mut command).into()
}

/// The user's own cargo-deny, or the one that an earlier run built.
fn find(context: &Context) -> Option<PathBuf> {
    [PathBuf::from("cargo-deny"), ours(context)]
        .into_iter()
        .find(|program| child::answers(Command::new(program).arg("--version")))
}

/// Builds cargo-deny into the target directory; without optimisation, since that takes half the
/// time and it runs for a second.
fn install(context: &Context) -> Option<PathBuf> {
    let mut command = context.workspace.cargo();
    command
        .args(["install", "--locked", "--debug", "cargo-deny", "--root"])
        .arg(context.workspace.target.join("tools"))
        .env("CARGO_TARGET_DIR", context.workspace.target.join("tools/build"));
    context.run(&mut command).ok().and_then(|()| find(context))
}

fn ours(context: &Context) -> PathBuf {
    context.workspace.target.join("tools/bin/cargo-deny")
}
