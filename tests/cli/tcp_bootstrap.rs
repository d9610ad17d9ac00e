//! Ranks that no launcher of ours has started: processes with torchrun's variables, which find each
//! other over TCP.
//!
//! The programs are the carrack command, or this very test in a role (see `a_rank_in_its_role`). No
//! test asserts how long something takes; the watchdog only turns a hang into a failure.

#![expect(unsafe_code, reason = "a rank forks")]

use crate::support::built;
use crate::support::children::{Watched as _, started, succeeded, unset};
use carrack::bootstrap::launchers::LAUNCHERS;
use carrack::bootstrap::source::VARIABLES;
use carrack::bootstrap::{Bootstrap, BootstrapError, FromEnvironment};
use carrack::settings::Settings;
use carrack::{CompQueue, Matching, PeerState, Rank, Runtime, Synchronizer, Tag, WaitError};
use children::{Running, Stream};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};
use std::net::TcpListener;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const ROLE: &str = "TEST_TCP_ROLE";
const WATCHDOG: Duration = Duration::from_secs(120);
/// The status of a rank that hung.
const HUNG: i32 = 97;

/// Makes a process a rank of a job whose rank 0 is found at this port.
fn rank(mut command: Command, rank: u32, size: u32, port: u16) -> Command {
    unset(&mut command, &["TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"])
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", size.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", "29500")
        .env("CARRACK_PORT", port.to_string())
        .env("CARRACK_JOB_SECRET", "a secret of this very test");
    command
}

fn perf(number: u32, port: u16) -> Command {
    let mut command = Command::new(built::carrack());
    command.args(["perf", "latency", "--json", "--seconds", "0.05", "--size", "8"]);
    rank(command, number, 2, port)
}

fn role(name: &str, number: u32, size: u32, port: u16) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "tcp_bootstrap::a_rank_in_its_role", "--nocapture", "--test-threads=1"])
        .env(ROLE, name);
    rank(command, number, size, port)
}

/// Returns a free port outside of the range from which the kernel gives ports to other sockets.
pub(crate) fn free_port() -> u16 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let here = std::process::id().wrapping_mul(16);
    let mut ports = std::iter::repeat_with(|| {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        10_000 + (here.wrapping_add(number) % 20_000) as u16
    });
    ports.find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok()).unwrap()
}

#[test]
fn a_rank_that_looks_for_rank_0_in_vain_says_so_before_it_gives_up() {
    let mut command = perf(1, free_port());
    command.env("CARRACK_BOOTSTRAP_TIMEOUT", "8");
    let heard = started(command).ends();
    assert!(!heard.status.success());
    let is_news = |line: &&str| line.starts_with("carrack: rank 1 waits for rank 0 at 127.0.0.1");
    assert_eq!(heard.stderr.lines().filter(is_news).count(), 1, "{}", heard.stderr);
    assert!(heard.stderr.contains("Connection refused"), "{}", heard.stderr);
}

#[test]
fn rank_0_that_waits_in_vain_says_for_whom_before_it_gives_up() {
    let port = free_port();
    let of_twelve = |rank| {
        let mut command = role("meet", rank, 12, port);
        command.env("CARRACK_BOOTSTRAP_TIMEOUT", "8");
        started(command)
    };
    let ranks = [of_twelve(0), of_twelve(3)];
    let [zero, three] = ranks.map(|rank| rank.ends());
    let is_news = |line: &&str| line.contains("carrack: rank 0 waits for ");
    let news: Vec<_> = zero.stderr.lines().filter(is_news).collect();
    let [line] = news[..] else { panic!("{}", zero.stderr) };
    assert!(
        line.contains("waits for 10 of 12 ranks, ")
            && line.ends_with("1, 2, 4, 5, 6, 7, 8, 9, ..."),
        "{line}"
    );
    assert!(!three.stderr.lines().any(|line| is_news(&line)), "{}", three.stderr);
}

/// A program that fails shows its error only when its runtime has ended.
#[test]
fn rank_0_that_ends_before_others_says_for_whom_it_stays() {
    let gate = std::env::temp_dir().join(format!("carrack-stays-{}", std::process::id()));
    let _ = std::fs::remove_file(&gate);
    let port = free_port();
    let ranks = [0, 1, 2].map(|number| {
        let mut command = role("early 0", number, 3, port);
        command.env(GATE, &gate);
        started(command)
    });
    let [mut zero, one, two] = ranks;
    let is_news = |line: &String| line.starts_with("carrack: rank 0 has ended, but its process");
    let news = std::iter::from_fn(|| zero.next_line(Stream::Err, WATCHDOG)).find(is_news);
    std::fs::write(&gate, b"").unwrap();
    let ended = [zero, one, two].map(Running::ends);
    std::fs::remove_file(&gate).unwrap();
    let names = "until 2 of 3 ranks have too, since they meet by its store: rank 1, 2";
    assert!(news.is_some_and(|line| line.ends_with(names)));
    for rank in &ended {
        succeeded(rank);
        assert!(!rank.stderr.contains("has ended"), "it says so twice, or another does");
    }
}

/// Runs the role: rank 0 ends while the others work on.
fn early() {
    let runtime = Runtime::start().unwrap();
    runtime.barrier().unwrap();
    let gate = std::env::var_os(GATE).unwrap();
    while runtime.rank() != Rank(0) && !std::path::Path::new(&gate).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn perf_measures_between_two_shells() {
    let port = free_port();
    // In the order in which it has to wait.
    let one = started(perf(1, port));
    let zero = started(perf(0, port));
    let said = succeeded(&zero.ends());
    succeeded(&one.ends());
    assert!(said.lines().any(|line| line.contains("latency_us")), "{said}");
}

#[test]
fn a_runtime_of_nineteen_processes_meets() {
    let port = free_port();
    let ranks: Vec<_> = (0..19).rev().map(|rank| started(role("meet", rank, 19, port))).collect();
    for rank in ranks {
        assert!(succeeded(&rank.ends()).contains("met 19"));
    }
}

#[test]
fn a_rank_that_is_killed_is_named_to_all_others() {
    const SIZE: u32 = 5;
    for victim in [0, 3] {
        let port = free_port();
        let mut ranks: Vec<_> = (0..SIZE)
            .map(|rank| started(role(&format!("outlive {victim}"), rank, SIZE, port)))
            .collect();
        // Not before all have passed their fence, and are on their way into the next.
        ranks.iter_mut().for_each(|rank| rank.hears("here"));
        ranks[victim as usize].signal(Signal::KILL);
        for (number, rank) in ranks.into_iter().enumerate() {
            let output = rank.ends();
            if number as u32 != victim {
                succeeded(&output);
            }
        }
    }
}

#[test]
fn a_rank_that_cannot_start_is_named_to_all_others() {
    for victim in [0, 2] {
        let port = free_port();
        let started = |rank| {
            let mut command = role(&format!("unfit {victim}"), rank, 3, port);
            command.env("CARRACK_TRANSPORT", "tcp");
            started(command)
        };
        for rank in [0, 1, 2].map(started) {
            succeeded(&rank.ends());
        }
    }
}

#[test]
fn a_wrong_secret_is_an_error_of_all_ranks_at_once() {
    let port = free_port();
    let zero = started(perf(0, port));
    let mut wrong = perf(1, port);
    wrong.env("CARRACK_JOB_SECRET", "a secret of another test");
    let output = started(wrong).ends();
    let complaint = &output.stderr;
    assert!(!output.status.success());
    assert!(
        complaint.contains(&format!("127.0.0.1:{port}"))
            && complaint.contains("CARRACK_JOB_SECRET"),
        "{complaint}"
    );
    // Not after the time in which ranks may come, which is longer than the watchdog.
    let output = zero.ends();
    let said = &output.stderr;
    assert!(!output.status.success());
    // The bootstrap says so, or what waits for the rank.
    let why = ["rank 1 came with another job secret", "rank 1 is gone: it came with another job"];
    assert!(why.iter().any(|why| said.contains(why)), "{said}");
    assert!(
        !said.contains("of this very test") && !complaint.contains("of another test"),
        "a secret is shown"
    );
}

#[test]
fn a_rank_that_is_started_twice_is_an_error_of_all_ranks_at_once() {
    for numbers in [[1, 0, 0], [0, 1, 1]] {
        let port = free_port();
        // Without rank 2 no rank gets past the start.
        let barrier = |number| {
            let mut command = Command::new(built::carrack());
            command.args(["perf", "latency", "--op", "barrier"]);
            rank(command, number, 3, port)
        };
        let ended = numbers.map(|number| started(barrier(number))).map(Running::ends);
        let is_named = |said: &str| {
            ["was started twice", "is there already", "has come before"]
                .iter()
                .any(|why| said.contains(why))
        };
        // A rank may hear of it from another rank, whose own words say more.
        let is_told = |said: &str| is_named(said) || said.contains("says rank 0, where");
        for output in &ended {
            assert!(!output.status.success() && is_told(&output.stderr), "{}", output.stderr);
        }
        let is_refused = |said: &str| said.contains("is not let into the job");
        assert_eq!(ended.iter().filter(|output| is_refused(&output.stderr)).count(), 1);
    }
}

#[test]
fn without_a_secret_it_works_and_warns() {
    let port = free_port();
    let of = |number| {
        let mut command = perf(number, port);
        command.env_remove("CARRACK_JOB_SECRET");
        started(command)
    };
    let (zero, one) = (of(0), of(1));
    let output = zero.ends();
    succeeded(&output);
    succeeded(&one.ends());
    assert!(output.stderr.contains("carrack: no CARRACK_JOB_SECRET"));
}

#[test]
fn what_is_wrong_with_the_variables_is_said_without_waiting_for_any_rank() {
    for (name, value, expected) in [
        ("RANK", "2", "RANK is 2, not below WORLD_SIZE=2"),
        ("MASTER_PORT", "none", "MASTER_PORT is \"none\", which is not a number"),
        ("CARRACK_JOB_SECRET", "short", "CARRACK_JOB_SECRET has 5 bytes"),
        ("CARRACK_PORT", "65536", "CARRACK_PORT=65536 is not allowed"),
        ("LOCAL_RANK", "2", "LOCAL_RANK is 2, not below WORLD_SIZE=2"),
        ("LOCAL_WORLD_SIZE", "1", "LOCAL_RANK is 1, not below LOCAL_WORLD_SIZE=1"),
    ] {
        let mut command = perf(1, free_port());
        command.env(name, value);
        let output = started(command).ends();
        let complaint = &output.stderr;
        assert!(!output.status.success() && complaint.contains(expected), "{complaint}");
    }
}

/// Starts the ranks of `nodes` nodes like torchrun, in another order. While torchrun numbers the
/// ranks of a node consecutively, other launchers deal ranks out to nodes in turn.
fn dealt_out(role_name: &str, nodes: u32, each: u32, variables: &[(&str, &str)]) -> Vec<Running> {
    let port = free_port();
    let start = |number: u32| {
        let mut command = role(role_name, number, nodes * each, port);
        command
            .env("LOCAL_RANK", (number / nodes).to_string())
            .env("LOCAL_WORLD_SIZE", each.to_string());
        command.env("GROUP_RANK", (number % nodes).to_string()).envs(variables.iter().copied());
        started(command)
    };
    (0..nodes * each).map(start).collect()
}

#[test]
fn ranks_that_are_dealt_out_in_turn_know_their_places_on_their_nodes() {
    for (number, rank) in dealt_out("place", 2, 2, &[]).into_iter().enumerate() {
        let said = succeeded(&rank.ends());
        assert!(
            said.contains(&format!("place {} on its node", number / 2)),
            "rank {number}: {said}"
        );
    }
}

/// Two nodes with one rank each: both take the first device that is named. The second one is none.
#[test]
fn a_rank_takes_the_device_of_its_place_on_its_node() {
    let devices = [("CARRACK_TRANSPORT", "verbs-simulated"), ("CARRACK_VERBS_DEVICE", "sim0,none")];
    for rank in dealt_out("meet", 2, 1, &devices) {
        assert!(succeeded(&rank.ends()).contains("met 2"));
    }
}

#[test]
fn under_carrack_run_its_ranks_are_its_own() {
    let mut command = Command::new(built::carrack());
    command.args(["run", "-n", "2", "--"]).arg(std::env::current_exe().unwrap());
    command
        .args(["--exact", "tcp_bootstrap::a_rank_in_its_role", "--nocapture", "--test-threads=1"])
        .env(ROLE, "meet");
    // Variables by which no process could join.
    let output = started(rank(command, 7, 9, free_port())).ends();
    assert!(succeeded(&output).contains("met 2"));
}

/// Actions of ranks that wait for one which has not started.
const WAITS: [&str; 5] = ["barrier", "receive", "send", "blocking send", "asked for others"];
const LATE: u32 = 2;
/// The file that lets the late rank start.
const GATE: &str = "TEST_TCP_GATE";

/// A rank that waits sleeps until the other one has published its address, however it was started.
/// The ranks look at their own clocks of processor time.
#[test]
fn ranks_that_wait_for_one_which_has_not_started_leave_their_cores_alone() {
    // Not in Cargo's folder: the test also runs where there is no Cargo.
    let gate = std::env::temp_dir().join(format!("carrack-gate-{}", std::process::id()));
    let _ = std::fs::remove_file(&gate);
    let mut jobs = Vec::new();
    for what in WAITS {
        let (name, port) = (format!("late {what}"), free_port());
        let mut command = Command::new(built::carrack());
        command.args(["run", "-n", "3", "--"]).arg(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "tcp_bootstrap::a_rank_in_its_role",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ROLE, &name);
        let job = std::iter::once(rank(command, 7, 9, port));
        jobs.extend(job.chain((0..3).map(|number| role(&name, number, 3, port))));
    }
    let spawn = |mut command: Command| {
        started({
            // The report that is asked for would open a GPU, which takes a core for a second.
            command.env(GATE, &gate).env("CARRACK_GPU", "none");
            command
        })
    };
    let mut jobs: Vec<_> = jobs.into_iter().map(spawn).collect();
    for (at, job) in jobs.iter_mut().enumerate() {
        // Of each four the first is a launcher, and the last is late.
        if at % 4 != 3 {
            job.hears("waits");
        }
    }
    std::thread::sleep(Duration::from_secs(2));
    std::fs::write(&gate, b"").unwrap();
    for job in jobs {
        succeeded(&job.ends());
    }
    std::fs::remove_file(&gate).unwrap();
}

fn late(what: &str) {
    let number = std::env::var("CARRACK_RANK").or(std::env::var("RANK")).unwrap();
    let is_late = number == LATE.to_string();
    let gate = std::env::var_os(GATE).unwrap();
    while is_late && !std::path::Path::new(&gate).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let runtime = Runtime::start().unwrap();
    let done = Synchronizer::new(1);
    println!("waits");
    let (begun, used) = (Instant::now(), clock_gettime(ClockId::ProcessCPUTime));
    match what {
        "barrier" => {}
        "send" if !is_late => {
            runtime.post_send(Rank(LATE), vec![1; 8], Tag(1)).comp(&done).submit().unwrap();
            drop(done.wait(&runtime).unwrap());
        }
        "blocking send" if !is_late => {
            runtime.post_send(Rank(LATE), vec![1; 8], Tag(1)).wait().unwrap();
        }
        "send" | "blocking send" => {
            for from in 0..LATE {
                runtime.post_recv(Rank(from), vec![0; 8], Tag(1)).wait().unwrap();
            }
        }
        // `asked for others`: an answer of the bootstrap's comes that no call takes.
        _ if !is_late => {
            if what != "receive" {
                assert_eq!(runtime.explain(Duration::ZERO).len(), 3);
            }
            let received =
                runtime.post_recv(Rank(LATE), vec![0; 8], Tag(1)).comp(&done).try_submit();
            assert!(received.unwrap().is_posted());
            drop(done.wait(&runtime).unwrap());
        }
        _ => {
            for to in 0..LATE {
                runtime.post_send(Rank(to), vec![1; 8], Tag(1)).submit().unwrap();
            }
        }
    }
    runtime.barrier().unwrap();
    let (waited, now) = (begun.elapsed(), clock_gettime(ClockId::ProcessCPUTime));
    let burnt = Duration::try_from(now).unwrap() - Duration::try_from(used).unwrap();
    println!("burnt {burnt:?} of {waited:?}");
    assert!(is_late || burnt < waited / 10, "{what}: {burnt:?} of {waited:?}");
}

/// A forked child has all sockets of rank 0, and keeps them open when rank 0 closes them.
#[test]
fn a_forked_child_that_lives_on_keeps_no_rank_from_its_end_and_takes_no_core() {
    for transport in ["shm", "tcp"] {
        for end in ["leaves", "dies"] {
            let (name, port) = (format!("forks {end}"), free_port());
            let [mut zero, one] = [0, 1].map(|number| {
                let mut command = role(&name, number, 2, port);
                command.env("CARRACK_TRANSPORT", transport);
                started(command)
            });
            zero.hears("has ended");
            assert_eq!(one.ends().status.success(), end == "leaves", "{transport}");
        }
    }
}

fn forks(end: &str) {
    let runtime = Runtime::start().unwrap();
    let other = Rank(1 - runtime.rank().0);
    let exchange = |tag| {
        let receive = runtime.post_recv(other, vec![0; 1], tag).start();
        runtime.post_send(other, b"x", tag).wait().unwrap();
        runtime.block_on(receive).unwrap().unwrap();
    };
    exchange(Tag(1));
    if runtime.rank() == Rank(1) {
        exchange(Tag(2));
        return if end == "dies" { crate::support::ranks::die() } else { drop(runtime) };
    }
    // SAFETY: the child has this thread alone, and only sleeps until the parent ends.
    if unsafe { libc::fork() } == 0 {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        loop {
            std::thread::sleep(WATCHDOG);
        }
    }
    exchange(Tag(2));
    runtime.wait(|| matches!(runtime.peer_state(other), PeerState::Down(_))).unwrap();
    let used = clock_gettime(ClockId::ProcessCPUTime);
    let waited = runtime.wait_for(Duration::from_millis(500), || false);
    assert!(matches!(waited, Err(WaitError::TimedOut(_))), "{waited:?}");
    let used = clock_gettime(ClockId::ProcessCPUTime) - used;
    assert!(used.tv_sec == 0 && used.tv_nsec < 50_000_000, "{used:?} of half a second");
    drop(runtime);
    let port: u16 = std::env::var("CARRACK_PORT").unwrap().parse().unwrap();
    drop(TcpListener::bind(("127.0.0.1", port)).expect("the port is the next job's"));
    println!("has ended");
    // The child lives until the other rank has ended.
    std::thread::sleep(WATCHDOG);
}

#[test]
fn what_a_rank_has_sent_before_it_was_lost_comes_where_nothing_was_sent_to_it() {
    for transport in ["shm", "tcp"] {
        let port = free_port();
        let [zero, _one] = [0, 1].map(|number| {
            let mut command = role("last words", number, 2, port);
            command.env("CARRACK_TRANSPORT", transport);
            started(command)
        });
        succeeded(&zero.ends());
    }
}

/// Runs the role: rank 0 asks for the address of the other when it knows that this is lost.
fn last_words() {
    let runtime = Runtime::start().unwrap();
    let words = [1, 2].map(Tag);
    if runtime.rank() == Rank(1) {
        let first = runtime.post_send(Rank(0), b"x", Tag(0));
        first.matching(Matching::TagOnly).wait().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        for tag in words {
            runtime.post_send(Rank(0), b"x", tag).wait().unwrap();
        }
        // A message that follows another closely leaves with the next progress.
        let _ = runtime.wait_for(Duration::from_millis(100), || false);
        crate::support::ranks::die();
    }
    runtime.post_recv(Rank::ANY, vec![0; 1], Tag(0)).wait().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let came = CompQueue::new(2);
    for tag in words {
        runtime.post_recv(Rank(1), vec![0; 1], tag).comp(&came).submit().unwrap();
    }
    for tag in words {
        let status = came.wait_pop(&runtime).unwrap();
        assert_eq!(status.ok().unwrap().tag, tag);
    }
    runtime.wait(|| matches!(runtime.peer_state(Rank(1)), PeerState::Down(_))).unwrap();
}

/// Returns this very test as a process of a launcher that sets these variables, and no others.
fn started_by(variables: &[(&str, &str)]) -> Command {
    let mut command = role("meet", 0, 1, 0);
    without_launchers(&mut command);
    command.envs(variables.iter().copied());
    command
}

/// Removes the variables by which launchers are known.
pub(crate) fn without_launchers(command: &mut Command) {
    let of_launchers =
        LAUNCHERS.iter().flat_map(|launcher| [launcher.mark, launcher.rank, launcher.size]);
    let ours = ["CARRACK_PORT", "CARRACK_JOB_SECRET"];
    let names = of_launchers.filter(|name| !name.is_empty()).chain(VARIABLES).chain(ours);
    for name in names {
        command.env_remove(name);
    }
}

/// Variables that real launchers set for one of two processes. No process here has a descriptor
/// 999; a low one could be one that another test hands to its children.
const OF_LAUNCHERS: [(&str, &[(&str, &str)]); 5] = [
    ("Hydra", &[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "999"), ("MPI_LOCALRANKID", "1")]),
    (
        "Open MPI",
        &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "1")],
    ),
    // Slurm's variables lack some.
    ("Slurm", &[("SLURM_LOCALID", "x"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")]),
    ("PMIx", &[("CARRACK_PMIX", "/no/libpmix"), ("PMIX_NAMESPACE", "job"), ("PMIX_RANK", "1")]),
    ("PMI", &[("PMI_RANK", "1"), ("PMI_SIZE", "2")]),
];

#[test]
fn a_process_of_a_launcher_whose_job_cannot_be_joined_says_so_and_does_not_run_alone() {
    for (launcher, variables) in OF_LAUNCHERS {
        let output = started(started_by(variables)).ends();
        let complaint = &output.stderr;
        assert!(!output.status.success(), "{launcher}: it ran alone");
        for part in [launcher, variables[0].0, "CARRACK_BOOTSTRAP=alone"] {
            assert!(complaint.contains(part), "{launcher}: no {part} in {complaint}");
        }
    }
}

#[test]
fn a_process_of_such_a_launcher_runs_alone_if_it_is_told_to_or_is_the_only_one() {
    for (_, variables) in OF_LAUNCHERS {
        let mut command = started_by(variables);
        command.env("CARRACK_BOOTSTRAP", "alone");
        assert!(succeeded(&started(command).ends()).contains("met 1"));
    }
    let batch_script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")];
    let only_one = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
    for variables in [&batch_script[..], &only_one] {
        assert!(succeeded(&started(started_by(variables)).ends()).contains("met 1"));
    }
}

#[test]
fn torchruns_variables_and_carrack_runs_win_over_those_of_another_launcher() {
    for (_, variables) in OF_LAUNCHERS {
        let port = free_port();
        let ranks = [1, 0].map(|number| {
            let mut command = role("meet", number, 2, port);
            command.envs(variables.iter().copied()).env("TORCHELASTIC_RUN_ID", "x");
            started(command)
        });
        for rank in ranks {
            assert!(succeeded(&rank.ends()).contains("met 2"));
        }
        let mut run = Command::new(built::carrack());
        run.args(["run", "-n", "2", "--"]).arg(std::env::current_exe().unwrap());
        run.args([
            "--exact",
            "tcp_bootstrap::a_rank_in_its_role",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(ROLE, "meet");
        run.envs(variables.iter().copied()).env("CARRACK_BOOTSTRAP", "alone");
        assert!(succeeded(&started(run).ends()).contains("met 2"));
    }
}

#[test]
fn the_carrack_command_works_under_such_a_launcher_where_it_starts_no_ranks_and_else_names_it() {
    let (launcher, variables) = OF_LAUNCHERS[0];
    let carrack = |args: &[&str]| {
        let mut command = Command::new(built::carrack());
        command
            .args(args)
            .envs(variables.iter().copied())
            .env_remove("RANK")
            .env_remove("WORLD_SIZE");
        started(command).ends()
    };
    for args in [&["--help"][..], &["info"], &["run", "-n", "1", "--", "true"]] {
        succeeded(&carrack(args));
    }
    for args in [
        &["explain"][..],
        &["perf", "latency", "--size", "8"],
        &["perf", "--transport", "loopback"],
    ] {
        let output = carrack(args);
        let complaint = &output.stderr;
        assert!(!output.status.success() && complaint.contains(launcher), "{args:?}: {complaint}");
    }
}

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    std::thread::spawn(|| {
        std::thread::sleep(WATCHDOG);
        std::process::exit(HUNG);
    });
    match role.split_once(' ') {
        None if role == "place" => {
            let job = FromEnvironment::from_env(&Settings::from_env().unwrap()).unwrap().unwrap();
            println!("place {} on its node", job.place_on_node());
            job.fence().unwrap();
            job.finish().unwrap();
        }
        None => {
            let runtime = Runtime::start().unwrap_or_else(|error| panic!("{error}"));
            let ranks = runtime.allgather(&runtime.rank().0.to_le_bytes()).unwrap();
            let numbers =
                ranks.iter().map(|bytes| u32::from_le_bytes(bytes.as_slice().try_into().unwrap()));
            assert!(numbers.eq(0..runtime.size()));
            runtime.barrier().unwrap();
            println!("met {}", runtime.size());
        }
        Some(("late", what)) => late(what),
        Some(("early", _)) => early(),
        Some(("forks", end)) => forks(end),
        Some(("last", _)) => last_words(),
        Some(("unfit", victim)) => {
            let settings = Settings::from_env().unwrap();
            let job = FromEnvironment::from_env(&settings).unwrap().unwrap();
            job.fence().unwrap();
            let is_victim = job.rank().to_string() == victim;
            let congestion = if is_victim { "none such" } else { "auto" };
            let settings = Settings::builder().setting("tcp_congestion", congestion);
            let builder = Runtime::builder().settings(settings.build().unwrap());
            match builder.bootstrap(Box::new(job)).start() {
                Ok(runtime) => assert!(!is_victim && runtime.barrier().is_err()),
                // Another rank needs rank 0 for its own start.
                Err(error) => {
                    let names_zero = victim == "0" && error.to_string().contains("rank 0");
                    assert!(is_victim || names_zero, "{error}");
                }
            }
        }
        Some((_, victim)) => {
            let victim: u32 = victim.parse().unwrap();
            let job = FromEnvironment::from_env(&Settings::from_env().unwrap()).unwrap().unwrap();
            job.fence().unwrap();
            println!("here");
            if job.rank() == victim {
                loop {
                    std::thread::park();
                }
            }
            let error = job.fence().unwrap_err();
            assert!(
                matches!(error, BootstrapError::RankGone { rank, .. } if rank == victim),
                "{error}"
            );
            let _ = job.finish();
        }
    }
}
