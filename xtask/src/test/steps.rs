//! The steps, in the order in which they run: those of the default tier first.

use std::process::Command;
use std::time::Duration;

use super::step::{Context, Outcome, Step, Stopped, Tier};
use super::{deny, launchers, layout, long, miri, msrv, room, verbs_guest};
use crate::apt;

/// Returns a step with a time limit in minutes.
const fn step(
    name: &'static str,
    tier: Tier,
    minutes: u64,
    body: fn(&mut Context) -> Outcome,
) -> Step {
    Step { name, tier, optional: false, limit: Duration::from_secs(60 * minutes), body }
}

/// The profile of the tests that run optimised: a release without optimisation across crates
/// (`Cargo.toml` says why).
const OPTIMISED: &str = "optimised";

/// All steps.
pub(super) const ALL: &[Step] = &[
    step("room", Tier::Default, 1, room::step),
    step("msrv", Tier::Default, 1, msrv::step),
    step("test", Tier::Default, 25, test),
    step("format", Tier::Full, 2, format),
    step("clippy", Tier::Full, 10, clippy),
    step("test, slow", Tier::Full, 20, test_slow),
    step("doc", Tier::Full, 10, doc),
    step("test, optimised", Tier::Full, 25, test_optimised),
    step("instructions", Tier::Full, 15, instructions).optional(),
    step("loom", Tier::Full, 12, loom),
    step("miri", Tier::Full, 12, miri::step).optional(),
    step("layout", Tier::Full, 12, layout::step).optional(),
    step("cargo-deny", Tier::Full, 12, deny::step).optional(),
    step("launchers", Tier::Full, 12, launchers::step).optional(),
    step("nodes", Tier::Full, 12, nodes).optional(),
    step("verbs guest", Tier::Full, 20, verbs_guest::step).optional(),
    step("aarch64", Tier::Long, 20, long::aarch64).optional(),
    step("launchers, long", Tier::Long, 20, launchers::long_step).optional(),
    step("nodes, long", Tier::Long, 240, long::nodes).optional(),
    step("soak", Tier::Long, 240, long::soak),
    step("huge", Tier::Long, 60, long::huge),
    step("sanitizer", Tier::Long, 60, long::sanitizer).optional(),
    step("fuzz", Tier::Long, 120, long::fuzz).optional(),
    step("verbs guest, long", Tier::Long, 120, verbs_guest::long_step).optional(),
];

fn format(context: &mut Context) -> Outcome {
    need(context, "fmt", "rustfmt")?;
    Ok(context.run(&mut context.workspace.cargo("fmt --all --check"))?)
}

fn clippy(context: &mut Context) -> Outcome {
    need(context, "clippy", "clippy")?;
    // Not through RUSTFLAGS: that would compile every dependency anew, here and again without.
    let all = "clippy --workspace --all-targets -- -D warnings";
    // As users build it, without simulators.
    let product = "clippy -p carrack --lib -- -D warnings";
    context.run(&mut context.workspace.cargo(all))?;
    Ok(context.run(&mut context.workspace.cargo(product))?)
}

fn doc(context: &mut Context) -> Outcome {
    let mut command = context.workspace.cargo("doc --no-deps --workspace");
    Ok(context.run(command.env("RUSTDOCFLAGS", "-D warnings"))?)
}

fn test(context: &mut Context) -> Outcome {
    // Tests start our binaries, which `cargo test` builds only for packages with such tests.
    context.run(&mut context.workspace.cargo("build --workspace --examples --bins"))?;
    let mut all = context.workspace.cargo("test --workspace --no-fail-fast");
    context.run_tests(all.env("RUST_TEST_THREADS", threads()))
}

/// Returns the tests that run at a time: many wait for a time limit, or for another process. Four
/// at a time left a third of two cores idle.
fn threads() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores.max(8).to_string()
}

/// Ignored tests that need more than time: RDMA devices, 16 GiB of memory, a reader of figures,
/// network namespaces.
const NEEDS_MORE: [&str; 8] =
    ["--skip", "::verbs::", "--skip", "huge::", "--skip", "figures::", "--skip", "nodes::"];

/// Tests whose `#[ignore]` begins with "full".
fn test_slow(context: &mut Context) -> Outcome {
    let slow = "test --workspace --no-fail-fast --lib --bins --tests -- --ignored";
    let mut slow = context.workspace.cargo(slow);
    context.run_tests(slow.args(NEEDS_MORE).env("RUST_TEST_THREADS", threads()))
}

/// The programs in which threads and processes race. Optimisation changes their timing, and what
/// the compiler assumes of their memory.
const CONCURRENT: &str = "--test conformance --test host --test verbs";

fn test_optimised(context: &mut Context) -> Outcome {
    let optimised = |context: &Context, words: &str| {
        context.workspace.cargo(&format!("test --profile {OPTIMISED} --no-fail-fast {words}"))
    };
    let mut all = optimised(context, &format!("{CONCURRENT} -- --include-ignored"));
    let all = context.run_tests(all.args(NEEDS_MORE));
    // As they run where there are many cores: simulated NICs of many tests have stood in each
    // other's way.
    let crowded = "--test verbs -- --test-threads 32 verbs_faults:: verbs_chunks::";
    let crowded = context.run_tests(&mut optimised(context, crowded));
    all.and(crowded)
}

/// Faults between two nodes, which are network namespaces.
fn nodes(context: &mut Context) -> Outcome {
    need_nodes()?;
    let launchers = ["a_second_rank_0", "carrack", "torchruns"];
    let launchers = launchers.map(|name| format!("nodes::launchers::{name}"));
    let options = "test --workspace --test host -- --ignored --nocapture --test-threads 1";
    context.run_tests(context.workspace.cargo(options).arg("nodes::faults::").args(launchers))
}

/// Sees to it that this machine can have nodes.
pub(super) fn need_nodes() -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Stopped::skipped("only root can make network namespaces");
    }
    Ok(apt::see_to("iproute2 util-linux")?)
}

/// Counts instructions of the release build, which is the one that ships.
fn instructions(context: &mut Context) -> Outcome {
    apt::see_to("valgrind")?;
    let build = "build --release --workspace --bins --example readme";
    context.run(&mut context.workspace.cargo(build))?;
    let count = "test --release --test costs -- --show-output";
    context.run_tests(&mut context.workspace.cargo(count))
}

fn loom(context: &mut Context) -> Outcome {
    let mut command = context.workspace.cargo("test -p carrack-transports --release --lib loom_");
    command
        .env("RUSTFLAGS", "--cfg loom")
        // Models grow with preemptions; loom's own advice is that two or three find the bugs.
        .env("LOOM_MAX_PREEMPTIONS", "3")
        // Its flags differ from other steps', whose work they would undo in the same directory.
        .env("CARGO_TARGET_DIR", context.workspace.target.join("loom"));
    context.run_tests(&mut command)
}

/// Sees to it that `cargo SUBCOMMAND` is there, adding rustup's component if necessary.
fn need(context: &Context, subcommand: &str, component: &str) -> Outcome {
    let version = format!("{subcommand} --version");
    let there = || children::answers(&mut context.workspace.cargo(&version));
    let mut rustup = Command::new("rustup");
    rustup.args(["component", "add", component]);
    if context.have(there, &mut rustup) {
        return Ok(());
    }
    Stopped::skipped(format!("{component} is not there, and rustup could not add it"))
}
