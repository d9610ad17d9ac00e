//! Licences, bans and sources of all dependencies, by cargo-deny. Advisories need the network.

use std::process::Command;

use super::step::{Context, Outcome, Stopped};

pub(super) fn step(context: &mut Context) -> Outcome {
    // The user's own, or the one that an earlier run built.
    let programs = ["cargo-deny".into(), context.workspace.tools().join("bin/cargo-deny")];
    let answers = |program: &_| children::answers(Command::new(program).arg("--version"));
    let mut install = context.workspace.install("cargo-deny");
    if !context.have(|| programs.iter().any(answers), &mut install) {
        return Stopped::skipped(
            "cargo-deny is not there, and could not be built (cargo install cargo-deny)",
        );
    }
    let program = programs.iter().find(|program| answers(program)).unwrap_or(&programs[0]);
    let arguments = ["--workspace", "check", "licenses", "bans", "sources"];
    let mut command = Command::new(program);
    Ok(context.run(command.args(arguments).current_dir(&context.workspace.root))?)
}
