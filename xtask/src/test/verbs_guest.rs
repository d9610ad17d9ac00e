//! Real verbs, on the RDMA devices that the kernel of a small virtual machine simulates
//! (Soft-RoCE).
//!
//! To add a test program: write it as any other of Cargo's, have each of its tests skip where there
//! is no `RDMA_GUEST_NODE` in the environment, and name it in [`CHECKS`]. In two guests the same
//! tests run in both at once, in the same order, and meet by the addresses in `RDMA_GUEST_ADDRESS`
//! and `RDMA_GUEST_PEER`. A test that has a guest killed needs a line of its own, by a filter: it
//! is the run's last one.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use super::step::{Context, Outcome};
use super::tally::Tally;
use crate::child;
use crate::error::TaskError;
use crate::guest::{Host, Node, Plan, Stream, TestProgram, Wiring};

/// Something that is run in a guest, or in two.
struct Check {
    name: &'static str,
    what: What,
    wiring: Wiring,
    /// The status that it must end with.
    status: u8,
    /// It takes minutes, in which time-outs run out. It runs with `--long` or `TEST_GUEST=all`.
    is_long: bool,
    /// Its driver takes dma-bufs.
    has_dmabufs: bool,
}

impl Check {
    /// Tests of a target of Cargo's.
    const fn tests(
        name: &'static str,
        wiring: Wiring,
        target: &'static str,
        arguments: &'static [&'static str],
    ) -> Self {
        Self {
            name,
            what: What::Tests(target, arguments),
            wiring,
            status: 0,
            is_long: false,
            has_dmabufs: false,
        }
    }

    /// The same, only where it is asked for.
    const fn long(self) -> Self {
        Self { is_long: true, ..self }
    }

    /// The same, where the driver takes dma-bufs.
    const fn with_dmabufs(self) -> Self {
        Self { has_dmabufs: true, ..self }
    }
}

enum What {
    /// A C program of `xtask/guest`, whose output is of libtest's form.
    C(&'static str),
    /// Tests of a target of Cargo's: its name, and what the program is told.
    Tests(&'static str, &'static [&'static str]),
    /// Lines for the shell, which count as one test. The first guest's end by saying [`END`].
    Shell(&'static str),
}

/// A build of all that the tests start, on a slow machine.
const BUILD: Duration = Duration::from_secs(20 * 60);

/// For the tests of one program.
const TESTS: Duration = Duration::from_secs(15 * 60);

const END: &str = "the end";

const LAST_WORDS: usize = 20;

/// Factor of the tests' time limits on an emulated processor.
const PATIENCE: &str = "6";

/// Of the conformance suite what a NIC's ways can change, and an emulated processor does in a few
/// minutes.
const CONFORMANCE: &[&str] = &[
    "--ignored",
    "--test-threads",
    "1",
    "contract::verbs::",
    "ending::verbs::",
    "large::verbs::",
    "matrix::verbs::",
    "memory::verbs::",
    "nic_words::verbs::",
    "order::verbs::",
    "outcomes::verbs::",
    "pressure::verbs::",
    "a_sender_that_does_not_listen_is_told_to",
];

const CHECKS: &[Check] = &[
    Check {
        name: "soft_device",
        what: What::C("soft_device.c"),
        wiring: Wiring::OneGuest,
        status: 0,
        is_long: false,
        has_dmabufs: false,
    },
    Check {
        name: "a_commands_status_and_output_come_back_and_what_it_leaves_running_is_ended",
        what: What::Shell(
            "(sleep 1000; echo never) & head -c 3000000 /dev/zero | od -v; echo the end; exit 7",
        ),
        wiring: Wiring::OneGuest,
        status: 7,
        is_long: false,
        has_dmabufs: false,
    },
    Check {
        name: "a_guest_is_killed_while_the_other_one_goes_on",
        what: What::Shell(
            "test -e /sys/class/infiniband/rxe0 || exit 3\n\
             test $RDMA_GUEST_NODE = 0 || exec sleep 1000\n\
             busybox ping -c 1 -w 30 $RDMA_GUEST_PEER >&2 || exit 4\n\
             echo kill 1 >$RDMA_GUEST_HOST\n\
             while busybox ping -c 1 -w 1 $RDMA_GUEST_PEER >&2; do :; done\n\
             echo the end",
        ),
        wiring: Wiring::TwoGuests,
        status: 0,
        is_long: false,
        has_dmabufs: false,
    },
    // The other modules run by hand (docs/testing.md).
    Check::tests("conformance", Wiring::OneGuest, "conformance", CONFORMANCE),
    Check::tests(
        "conformance between two nodes",
        Wiring::TwoGuests,
        "host",
        &["--test-threads", "1", "apart::nodes::"],
    ),
    Check::tests(
        "networks that fail, ranks that are killed, and want of everything",
        Wiring::OneGuest,
        "verbs",
        &[
            "--test-threads",
            "1",
            "verbs_guest::network::",
            "verbs_guest::kills::",
            "verbs_guest::poor::",
            "verbs_guest::gpus::a_driver",
        ],
    )
    .long(),
    // Without Carrack: what its default time-out is trusted to keep away.
    Check {
        name: "soft_device_repeats",
        what: What::C("soft_device_repeats.c"),
        wiring: Wiring::OneGuest,
        status: 0,
        is_long: true,
        has_dmabufs: false,
    },
    // The driver is built from the kernel's source, which is 170 MB to download.
    Check::tests(
        "dma-bufs",
        Wiring::OneGuest,
        "verbs",
        &["--test-threads", "1", "verbs_guest::gpus::a_gpu"],
    )
    .with_dmabufs()
    .long(),
    Check::tests(
        "two nodes",
        Wiring::TwoGuests,
        "verbs",
        &["--test-threads", "1", "verbs_guest::nodes::"],
    )
    .long(),
    Check::tests(
        "a node is killed",
        Wiring::TwoGuests,
        "verbs",
        &["--test-threads", "1", "verbs_guest::loss::"],
    )
    .long(),
];

/// Time of the checks on a machine with two quiet cores, with a margin. One that is cut off would
/// count as failed.
const NEEDED: Duration = Duration::from_secs(15 * 60);

/// The checks that take some minutes, or all where `TEST_GUEST=all` says so.
pub(super) fn step(context: &mut Context) -> Outcome {
    let all = std::env::var("TEST_GUEST").is_ok_and(|which| which == "all");
    checks(context, false, all)
}

/// The other checks.
pub(super) fn long_step(context: &mut Context) -> Outcome {
    checks(context, true, false)
}

fn checks(context: &mut Context, is_long: bool, all: bool) -> Outcome {
    let began = Instant::now();
    if context.limit < NEEDED {
        let left = context.limit.as_secs() / 60;
        return Outcome::Skipped(format!(
            "{left} minutes are left, and it takes about twelve; `cargo xtask test --only \"verbs \
            guest\"` runs it alone"
        ));
    }
    let host = match Host::prepare(&context.workspace, &Default::default()) {
        Ok(host) => host,
        Err(error) => return Outcome::Skipped(error.to_string()),
    };
    let mut failed = Vec::new();
    for check in CHECKS {
        if check.is_long != is_long && !all {
            continue;
        }
        let mut plan = match plan(context, &host, check) {
            Ok(plan) => plan,
            // Missing headers are named in a skip; code that does not compile is a failure.
            Err(error @ TaskError::Packages { .. }) => return Outcome::Skipped(error.to_string()),
            Err(error) => return Outcome::Failed(error.to_string()),
        };
        plan.limit = plan.limit.min(context.limit.saturating_sub(began.elapsed()));
        println!(
            "\n     In {}: {}",
            if check.wiring == Wiring::TwoGuests { "two guests" } else { "a guest" },
            check.name
        );
        if let Err(why) = run(context, &host, check, &plan) {
            println!("error: {}: {why}", check.name);
            failed.push(check.name);
        }
    }
    if failed.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("failed: {}", failed.join(", ")))
    }
}

fn plan(context: &Context, host: &Host, check: &Check) -> Result<Plan, TaskError> {
    let root = &context.workspace.root;
    let mut plan = match check.what {
        What::C(source) => {
            let program = host.compile(&root.join("xtask/guest").join(source))?;
            Plan::new(vec![program.into()], root.clone())
        }
        What::Tests(target, arguments) => {
            build_programs(context)?;
            let arguments: Vec<_> = arguments.iter().map(OsString::from).collect();
            let mut plan = TestProgram::build(&context.workspace, target)?.plan(&arguments);
            plan.environment.push(("TEST_PATIENCE".into(), PATIENCE.into()));
            plan.limit = TESTS;
            plan
        }
        What::Shell(line) => Plan::new(["sh", "-c", line].map(OsString::from).into(), root.clone()),
    };
    plan.wiring = check.wiring;
    if check.has_dmabufs {
        host.take_dmabufs(&mut plan)?;
    }
    Ok(plan)
}

/// The carrack command and the examples, which some tests start: nothing is built in a guest.
fn build_programs(context: &Context) -> Result<(), TaskError> {
    for what in
        [&["--package", "carrack-cli"][..], &["--package", "carrack-workspace", "--examples"]]
    {
        let mut command = context.workspace.cargo();
        command.args(["build", "--quiet"]).args(what);
        child::run(&mut command, BUILD, |_| {})?;
    }
    Ok(())
}

/// Runs a check and counts its tests. Those of two guests are the same ones: they are counted where
/// the first guest says so.
fn run(context: &mut Context, host: &Host, check: &Check, plan: &Plan) -> Result<(), String> {
    let mut tally = Tally::default();
    let mut last = String::new();
    // Of a line for the shell, only a failure's last words are printed.
    let mut words = VecDeque::new();
    let status = host.run(plan, false, |said| {
        let line = String::from_utf8_lossy(&said.bytes);
        let line = line.trim_end();
        let marked = if plan.wiring == Wiring::TwoGuests {
            format!("[{}] {line}", said.node)
        } else {
            line.to_owned()
        };
        if matches!(check.what, What::Shell(_)) {
            words.push_back(marked);
            words.drain(..words.len().saturating_sub(LAST_WORDS));
        } else {
            println!("{marked}");
        }
        if said.node == Node(0) && said.stream == Stream::Out {
            tally.read(line);
            line.clone_into(&mut last);
        }
    });
    let mut outcome = match status {
        Err(error) => Err(error.to_string()),
        Ok(status) if status != check.status => {
            Err(format!("status {status}, and not {}", check.status))
        }
        Ok(_) => Ok(()),
    };
    match check.what {
        What::Shell(_) if outcome.is_ok() && last != END => {
            outcome = Err(format!("its last line is {last:?}, and not {END:?}"));
        }
        What::Shell(_) if outcome.is_ok() => {
            println!("test guest::{} ... ok", check.name);
            tally.one_passed();
        }
        _ if outcome.is_ok() && tally.is_empty() => {
            outcome = Err("no test ran: is its filter out of date?".into())
        }
        _ => {}
    }
    if outcome.is_err() {
        words.iter().for_each(|line| println!("{line}"));
        // Also where only the second guest knows of it, or a test has aborted its process.
        tally.at_least_one_failed();
    }
    context.tally.add(tally);
    outcome
}
