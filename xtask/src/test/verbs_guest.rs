//! Real verbs, on RDMA devices that the kernel of a virtual machine simulates (Soft-RoCE).
//!
//! To add a test program: have each of its tests skip where there is no `RDMA_GUEST_NODE` in the
//! environment, and name it in [`CHECKS`]. Two guests run the same tests at once, and meet by
//! `RDMA_GUEST_ADDRESS` and `RDMA_GUEST_PEER`. A test that has a guest killed needs a check of its
//! own, by a filter: it is the run's last one.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::step::{Context, Outcome, Stopped};
use super::tally::{Repeated, Tally};
use crate::error::TaskError;
use crate::guest::{GUEST_FAILED, Host, Node, Plan, Wiring};
use crate::workspace::BUILD;
use What::{C, Shell, Tests};
use Wiring::{OneGuest, TwoGuests};
use children::{ChildError, Stream};

/// Something that is run in a guest, or in two.
struct Check {
    name: &'static str,
    what: What,
    wiring: Wiring,
    /// The status that it must end with.
    status: u8,
    /// Set for a check of minutes, in which time-outs run out. It runs with `--long` or
    /// `TEST_GUEST=all`.
    is_long: bool,
    /// Set if the guest's driver takes dma-bufs.
    has_dmabufs: bool,
}

enum What {
    /// A C program of `xtask/guest`, whose output is of libtest's form.
    C(&'static str),
    /// Tests of a target of Cargo's, one after the other: its name, and what the program is told.
    Tests(&'static str, &'static str),
    /// Lines for the shell. The first guest's end by a result of libtest's form.
    Shell(&'static str),
}

const fn check(name: &'static str, wiring: Wiring, what: What) -> Check {
    Check { name, what, wiring, status: 0, is_long: false, has_dmabufs: false }
}

const fn long(name: &'static str, wiring: Wiring, what: What) -> Check {
    Check { is_long: true, ..check(name, wiring, what) }
}

/// Time for the tests of one program.
const TESTS: Duration = Duration::from_secs(15 * 60);

const LAST_WORDS: usize = 20;

/// Factor of the tests' time limits on an emulated processor.
const PATIENCE: &str = "6";

/// The part of the conformance suite that a NIC's ways can change, and that an emulated processor
/// does in a few minutes. The other modules run by hand (docs/testing.md).
const CONFORMANCE: &str = "--ignored contract::verbs:: ending::verbs:: large::verbs:: \
    matrix::verbs:: memory::verbs:: nic_words::verbs:: order::verbs:: outcomes::verbs:: \
    pressure::verbs:: a_sender_that_does_not_listen_is_told_to";

const FAILURES: &str = "verbs_guest::network:: verbs_guest::kills:: verbs_guest::poor:: \
    verbs_guest::gpus::a_driver";

/// Ends with status 7.
const LEAVES_ONE_RUNNING: &str = "(sleep 1000; echo never) & head -c 3000000 /dev/zero | od -v; \
    echo 'test result: ok. 1 passed'; exit 7";

const KILLS_THE_OTHER: &str = "\
test -e /sys/class/infiniband/rxe0 || exit 3
test $RDMA_GUEST_NODE = 0 || exec sleep 1000
busybox ping -c 1 -w 30 $RDMA_GUEST_PEER >&2 || exit 4
echo kill 1 >$RDMA_GUEST_HOST
while busybox ping -c 1 -w 1 $RDMA_GUEST_PEER >&2; do :; done
echo 'test result: ok. 1 passed'";

const CHECKS: &[Check] = &[
    check("soft_device", OneGuest, C("soft_device.c")),
    Check {
        status: 7,
        ..check(
            "a_commands_status_and_output_come_back_and_what_it_leaves_running_is_ended",
            OneGuest,
            Shell(LEAVES_ONE_RUNNING),
        )
    },
    check("a_guest_is_killed_while_the_other_one_goes_on", TwoGuests, Shell(KILLS_THE_OTHER)),
    check("conformance", OneGuest, Tests("conformance", CONFORMANCE)),
    check("conformance between two nodes", TwoGuests, Tests("host", "apart::nodes::")),
    long(
        "networks that fail, ranks that are killed, and want of everything",
        OneGuest,
        Tests("verbs", FAILURES),
    ),
    // Without Carrack: what its default time-out is trusted to keep away.
    long("soft_device_repeats", OneGuest, C("soft_device_repeats.c")),
    // The driver is built from the kernel's source, which is 170 MB to download.
    Check {
        has_dmabufs: true,
        ..long("dma-bufs", OneGuest, Tests("verbs", "verbs_guest::gpus::a_gpu"))
    },
    long("two nodes", TwoGuests, Tests("verbs", "verbs_guest::nodes::")),
    long("a node is killed", TwoGuests, Tests("verbs", "verbs_guest::loss::")),
];

/// Time of the checks on two quiet cores, with a margin: one that is cut off counts as failed.
const NEEDED: Duration = Duration::from_secs(15 * 60);

/// Runs the checks that take some minutes, or all where `TEST_GUEST=all` says so.
pub(super) fn step(context: &mut Context) -> Outcome {
    let all = std::env::var("TEST_GUEST").is_ok_and(|which| which == "all");
    checks(context, |check| all || !check.is_long)
}

/// Runs the other checks.
pub(super) fn long_step(context: &mut Context) -> Outcome {
    checks(context, |check| check.is_long)
}

fn checks(context: &mut Context, which: impl Fn(&&Check) -> bool) -> Outcome {
    let began = Instant::now();
    if context.limit < NEEDED {
        let left = context.limit.as_secs() / 60;
        return Stopped::skipped(format!(
            "{left} minutes are left of about twelve: run `cargo xtask test --only \"verbs guest\"`"
        ));
    }
    let host = Host::prepare(&context.workspace, &Default::default()).or_else(Stopped::skipped)?;
    let mut failed = Vec::new();
    for check in CHECKS.iter().filter(which) {
        let mut plan = plan(context, &host, check)?;
        plan.limit = plan.limit.min(context.limit.saturating_sub(began.elapsed()));
        let place = if check.wiring == TwoGuests { "two guests" } else { "a guest" };
        say!("\n     In {place}: {}", check.name);
        if let Err(why) = run(context, &host, check, &plan) {
            say!("error: {}: {why}", check.name);
            failed.push(check.name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Stopped::Failed(format!("failed: {}", failed.join(", "))))
}

fn plan(context: &Context, host: &Host, check: &Check) -> Result<Plan, TaskError> {
    let root = &context.workspace.root;
    let mut plan = match check.what {
        C(source) => {
            let program = host.compile(&root.join("xtask/guest").join(source))?;
            Plan::new(vec![program.into()], root.clone())
        }
        Tests(target, arguments) => {
            build_programs(context)?;
            let arguments = ["--test-threads", "1"].into_iter().chain(arguments.split(' '));
            let arguments: Vec<_> = arguments.map(OsString::from).collect();
            let mut plan = Plan::of_test(&context.workspace, target, &arguments)?;
            plan.environment.push(("TEST_PATIENCE".into(), PATIENCE.into()));
            plan.limit = TESTS;
            plan
        }
        Shell(line) => Plan::new(["sh", "-c", line].map(OsString::from).into(), root.clone()),
    };
    plan.wiring = check.wiring;
    if check.has_dmabufs {
        host.take_dmabufs(&mut plan)?;
    }
    Ok(plan)
}

/// Builds the carrack command and the examples, which some tests start: nothing is built in a
/// guest. The selection is of the workspace, so that its crates have the features that its tests
/// have.
fn build_programs(context: &Context) -> Result<(), ChildError> {
    let mut command = context.workspace.cargo("build --workspace --bins --examples");
    children::run(&mut command, BUILD, |_| {})
}

/// Runs a check and counts its tests. Those of two guests are the same: the first one's count.
fn run(context: &mut Context, host: &Host, check: &Check, plan: &Plan) -> Result<(), String> {
    let mut tally = Tally::default();
    // Of a line for the shell, only a failure's last words are printed.
    let (mut words, mut repeated) = (VecDeque::new(), [Repeated::default(), Repeated::default()]);
    let mut is_again = false;
    let status = loop {
        let status = host.run(plan, false, |said| {
            let line = said.marked(plan.wiring);
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if said.node == Node(0) && said.stream == Stream::Out {
                tally.read(&String::from_utf8_lossy(&said.bytes));
            }
            if let (Some(repeated), Stream::Out) =
                (repeated.get_mut(usize::from(said.node.0)), said.stream)
            {
                repeated.read(String::from_utf8_lossy(&said.bytes).trim_end());
            }
            if !matches!(check.what, Shell(_)) {
                say!("{line}");
            }
            words.push_back(line);
            words.drain(..words.len().saturating_sub(LAST_WORDS));
        });
        // No program ends a kernel without an error of that kernel.
        if is_again || !matches!(status, Ok(GUEST_FAILED)) || children::interrupted() {
            break status;
        }
        let what = format!("warning: a guest ended without a status: {} runs again", check.name);
        say!("{what}");
        // Tests that failed before the guest's end are named at the end of the run.
        let failed = std::mem::take(&mut repeated).into_iter().flat_map(|it| it.lines);
        context.repeated.lines.extend(std::iter::once(what).chain(failed));
        (is_again, tally, words) = (true, Tally::default(), VecDeque::new());
    };
    let wanted = check.status;
    let outcome = match status {
        Err(error) => Err(error.to_string()),
        Ok(status) if status != wanted => Err(format!("status {status}, and not {wanted}")),
        Ok(_) if tally.is_empty() => Err("no test ran: is its filter out of date?".into()),
        Ok(_) => Ok(()),
    };
    if outcome.is_ok() && matches!(check.what, Shell(_)) {
        say!("test guest::{} ... ok", check.name);
    }
    if outcome.is_err() {
        if matches!(check.what, Shell(_)) {
            words.iter().for_each(|line| say!("{line}"));
        }
        let failed = repeated.into_iter().flat_map(|it| it.lines).collect::<Vec<_>>();
        context.repeated.lines.push(format!("In guests: {}", check.name));
        // A test that has aborted its process is in no list of failures.
        context.repeated.lines.extend(if failed.is_empty() { words.into() } else { failed });
        // Also where only the second guest knows of it, or a test has aborted its process.
        tally.at_least_one_failed();
    }
    context.tally.add(tally);
    outcome
}
