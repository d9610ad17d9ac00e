//! The steps, in the order in which they run: the quick ones first, then builds and tests, then
//! what may be skipped.

use std::process::Command;
use std::time::Duration;

use super::step::{Context, Outcome, Step};
use super::{deny, layout, miri, msrv, room, verbs_guest};
use crate::child;
use crate::rules;

const fn minutes(count: u64) -> Duration {
    Duration::from_secs(60 * count)
}

/// The profile of the tests that run optimised: a release without optimisation across crates
/// (`Cargo.toml` says why).
const OPTIMISED: &str = "optimised";

/// All steps.
pub(super) const ALL: &[Step] = &[
    Step { name: "room", quick: true, optional: false, limit: minutes(1), body: room::step },
    Step { name: "format", quick: true, optional: false, limit: minutes(2), body: format },
    Step {
        name: "source rules",
        quick: true,
        optional: false,
        limit: minutes(1),
        body: source_rules,
    },
    Step { name: "msrv", quick: true, optional: false, limit: minutes(1), body: msrv::step },
    Step { name: "clippy", quick: true, optional: false, limit: minutes(10), body: clippy },
    Step {
        name: "test, debug",
        quick: true,
        optional: false,
        limit: minutes(20),
        body: test_debug,
    },
    Step { name: "doc", quick: false, optional: false, limit: minutes(10), body: doc },
    Step {
        name: "build, release",
        quick: false,
        optional: false,
        limit: minutes(15),
        body: build_release,
    },
    Step {
        name: "test, release",
        quick: false,
        optional: false,
        limit: minutes(25),
        body: test_release,
    },
    Step { name: "loom", quick: false, optional: false, limit: minutes(12), body: loom },
    Step { name: "miri", quick: false, optional: true, limit: minutes(12), body: miri::step },
    Step { name: "layout", quick: false, optional: true, limit: minutes(12), body: layout::step },
    Step { name: "cargo-deny", quick: false, optional: true, limit: minutes(12), body: deny::step },
    Step {
        name: "verbs guest",
        quick: false,
        optional: true,
        limit: minutes(20),
        body: verbs_guest::step,
    },
];

fn format(context: &mut Context) -> Outcome {
    if !has_component(context, "fmt", "rustfmt") {
        return Outcome::Skipped("rustfmt is not there, and rustup could not add it".into());
    }
    context.run(context.workspace.cargo().args(["fmt", "--all", "--check"])).into()
}

fn source_rules(context: &mut Context) -> Outcome {
    match rules::check(&context.workspace.root) {
        Ok(findings) => {
            for warning in &findings.warnings {
                println!("warning: {warning}");
            }
            for violation in &findings.violations {
                println!("error: {violation}");
            }
            match findings.violations.len() {
                0 => Outcome::Passed,
                count => Outcome::Failed(format!("{count} violations, listed above")),
            }
        }
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn clippy(context: &mut Context) -> Outcome {
    if !has_component(context, "clippy", "clippy") {
        return Outcome::Skipped("clippy is not there, and rustup could not add it".into());
    }
    // Not through RUSTFLAGS: that would compile every dependency anew, here and again without.
    let arguments = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    context.run(context.workspace.cargo().args(arguments)).into()
}

fn doc(context: &mut Context) -> Outcome {
    let mut command = context.workspace.cargo();
    command.args(["doc", "--no-deps", "--workspace"]).env("RUSTDOCFLAGS", "-D warnings");
    context.run(&mut command).into()
}

fn build_release(context: &mut Context) -> Outcome {
    // The examples are built as the tests are; each that is optimised across crates takes half a
    // minute.
    let arguments = ["build", "--release", "--workspace", "--bins", "--example", "readme"];
    context.run(context.workspace.cargo().args(arguments)).into()
}

fn test_debug(context: &mut Context) -> Outcome {
    // Process tests start our own binaries, which `cargo test` builds only for packages that have
    // such tests.
    let build = ["build", "--workspace", "--examples", "--bins"];
    if let Err(error) = context.run(context.workspace.cargo().args(build)) {
        return Outcome::Failed(error.to_string());
    }
    let mut command = context.workspace.cargo();
    context.run_tests(command.args(["test", "--workspace", "--no-fail-fast"]))
}

fn test_release(context: &mut Context) -> Outcome {
    if !context.workspace.has_integration_tests() {
        return Outcome::Skipped("there are no integration tests yet".into());
    }
    let build = ["build", "--profile", OPTIMISED, "--workspace", "--examples", "--bins"];
    if let Err(error) = context.run(context.workspace.cargo().args(build)) {
        return Outcome::Failed(error.to_string());
    }
    let mut command = context.workspace.cargo();
    command.args(["test", "--profile", OPTIMISED, "--workspace", "--no-fail-fast", "--test", "*"]);
    let all = context.run_tests(&mut command);
    // As they run where there are many cores: simulated NICs of many tests have stood in each
    // other's way.
    let mut command = context.workspace.cargo();
    command.args([
        "test",
        "--profile",
        OPTIMISED,
        "--test",
        "verbs_faults",
        "--test",
        "verbs_chunks",
    ]);
    let crowded = context.run_tests(command.args(["--", "--test-threads", "32"]));
    // What is shipped is counted as it is shipped.
    let mut command = context.workspace.cargo();
    let counted = context.run_tests(command.args([
        "test",
        "--release",
        "--test",
        "verbs_instructions",
        "--test",
        "gpu_costs",
    ]));
    [all, crowded]
        .into_iter()
        .find(|outcome| !matches!(outcome, Outcome::Passed))
        .unwrap_or(counted)
}

fn loom(context: &mut Context) -> Outcome {
    let mut command = context.workspace.cargo();
    command
        .args(["test", "-p", "carrack-transports", "--release", "--lib", "loom_"])
        .env("RUSTFLAGS", "--cfg loom")
        // Models with more preemptions grow beyond reason; loom's own advice is that two or three
        // find the bugs.
        .env("LOOM_MAX_PREEMPTIONS", "3")
        // Its flags differ from all other steps': in one directory each would undo the other's
        // work.
        .env("CARGO_TARGET_DIR", context.workspace.target.join("loom"));
    context.run_tests(&mut command)
}

/// Whether `cargo SUBCOMMAND` is there, if need be after rustup has added its component.
fn has_component(context: &Context, subcommand: &str, component: &str) -> bool {
    let there = || child::answers(context.workspace.cargo().args([subcommand, "--version"]));
    there() || {
        let mut rustup = Command::new("rustup");
        context.run(rustup.args(["component", "add", component])).is_ok() && there()
    }
}
