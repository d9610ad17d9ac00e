//! Ranks of other launchers: a PMI-1 server that is played here, over inherited sockets and by
//! address, and tasks with Slurm's variables.
//!
//! Under a real launcher, [`a_rank_in_its_role`] with the role `fence` is a rank of its job.

use crate::support::built;
use crate::support::children::{Watched as _, started, succeeded, unset};
use crate::tcp_bootstrap::{free_port, without_launchers};
use carrack::bootstrap::Source;
use carrack::bootstrap::pmi::Reply;
use carrack::settings::Settings;
use children::Running;
use parking_lot::Mutex;
use rustix::io::{FdFlags, fcntl_setfd};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const ROLE: &str = "TEST_LAUNCHER_ROLE";
const WATCHDOG: Duration = Duration::from_secs(120);
/// The status of a rank that hung.
const HUNG: i32 = 97;
/// The status of a rank that ends without an end of its runtime.
const ABRUPT: i32 = 3;

/// A fault of the server: on this command it does that.
type Fault = (&'static str, Deed);

#[derive(Clone, Copy, PartialEq)]
enum Deed {
    Says(&'static str),
    HangsUp,
    IsSilent,
}

/// A server with PMI-1, as Hydra and Slurm have it.
struct Server {
    size: usize,
    table: Mutex<BTreeMap<String, String>>,
    barrier: Barrier,
    fault: Option<Fault>,
}

impl Server {
    fn new(size: usize, fault: Option<Fault>) -> Arc<Self> {
        Arc::new(Self { size, table: Mutex::default(), barrier: Barrier::new(size), fault })
    }

    /// Serves a rank, and returns the commands that it has sent. `told`: the size that a rank which
    /// has connected is told.
    fn serve(&self, stream: impl Read, mut to_rank: impl Write, told: usize) -> Vec<String> {
        let mut commands = Vec::new();
        for line in BufReader::new(stream).lines() {
            let Ok(line) = line else { break };
            let request = Reply::parse(line.as_bytes()).unwrap();
            let field = |name: &str| request.get(name).unwrap_or_default().to_owned();
            let command = field("cmd");
            commands.push(command.clone());
            let answer = match (self.fault, &*command) {
                (Some((on, Deed::Says(words))), command) if on == command => words.to_owned(),
                (Some((on, Deed::HangsUp)), command) if on == command => break,
                (Some((on, Deed::IsSilent)), command) if on == command => continue,
                (_, "initack") => format!(
                    "cmd=initack rc=0\ncmd=set size={told}\ncmd=set rank={}\ncmd=set debug=0",
                    field("pmiid")
                ),
                (_, "init") => "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2".into(),
                (_, "get_my_kvsname") => "rc=0 kvsname=kvs_ä cmd=my_kvsname".into(),
                (_, "put") => {
                    assert_eq!(field("kvsname"), "kvs_ä");
                    self.table.lock().insert(field("key"), field("value"));
                    "cmd=put_result rc=0".into()
                }
                (_, "barrier_in") => {
                    self.barrier.wait();
                    "cmd=barrier_out tag=0".into()
                }
                (_, "get") if field("key") == "PMI_process_mapping" => {
                    "cmd=get_result rc=0 value=(vector,(0,2,2))".into()
                }
                (_, "get") => match self.table.lock().get(&field("key")) {
                    Some(value) => format!("cmd=get_result value={value} rc=0"),
                    None => "cmd=get_result rc=1".into(),
                },
                (_, "finalize") => "cmd=finalize_ack rc=0".into(),
                (_, other) => panic!("{other}"),
            };
            if to_rank.write_all(format!("{answer}\n").as_bytes()).is_err() {
                break;
            }
        }
        commands
    }
}

/// A rank, and what the server hears from it.
type Rank = (Running, JoinHandle<Vec<String>>);

/// Starts the program as a rank that inherits its socket.
fn by_socket(server: &Arc<Server>, mut command: Command, rank: usize) -> Rank {
    let (ours, theirs) = UnixStream::pair().unwrap();
    fcntl_setfd(&theirs, FdFlags::empty()).unwrap();
    command.env("PMI_FD", theirs.as_raw_fd().to_string());
    command.env("PMI_RANK", rank.to_string()).env("PMI_SIZE", server.size.to_string());
    let started = started(command);
    let (server, told) = (server.clone(), server.size);
    (started, thread::spawn(move || server.serve(ours.try_clone().unwrap(), ours, told)))
}

/// Starts the program as a rank that connects to the server, and is told that size.
fn by_port(server: &Arc<Server>, mut command: Command, rank: usize, told: usize) -> Rank {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    command.env("PMI_PORT", listener.local_addr().unwrap().to_string());
    command.env("PMI_ID", rank.to_string());
    let started = started(command);
    let server = server.clone();
    let served = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        server.serve(stream.try_clone().unwrap(), stream, told)
    });
    (started, served)
}

/// Returns a program without variables of any launcher.
fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    unset(&mut command, &["TORCHELASTIC_RUN_ID"]);
    without_launchers(&mut command);
    command
}

fn role(name: &str) -> Command {
    let mut command = program(&std::env::current_exe().unwrap());
    command.args(["--exact", "other_launchers::a_rank_in_its_role", "--nocapture"]).env(ROLE, name);
    command
}

#[test]
fn an_example_runs_as_a_job_of_a_pmi_server() {
    let example = built::examples().join("ring_p2p");
    let server = Server::new(3, None);
    let ranks: Vec<_> =
        (0..3).rev().map(|rank| by_socket(&server, program(&example), rank)).collect();
    for (rank, _) in ranks {
        succeeded(&rank.ends());
    }
    let server = Server::new(2, None);
    let ranks: Vec<_> = (0..2).map(|rank| by_port(&server, program(&example), rank, 2)).collect();
    for (rank, _) in ranks {
        succeeded(&rank.ends());
    }
}

#[test]
fn ranks_know_their_place_and_the_server_hears_of_their_end() {
    let server = Server::new(4, None);
    let ranks = (0..4).map(|rank| match rank % 2 {
        0 => by_socket(&server, role("fence"), rank),
        _ => by_port(&server, role("fence"), rank, 4),
    });
    for (number, (rank, served)) in ranks.collect::<Vec<_>>().into_iter().enumerate() {
        let said = succeeded(&rank.ends());
        let place = number % 2;
        let expected = format!("rank {number} of 4, place {place}, by PMI");
        assert!(said.contains(&expected), "{expected}: {said}");
        let commands = served.join().unwrap();
        assert_eq!(commands.last().unwrap(), "finalize", "{commands:?}");
        assert_eq!(commands.iter().filter(|command| *command == "finalize").count(), 1);
    }
}

#[test]
fn a_rank_that_ends_abruptly_says_no_farewell_and_the_others_are_told() {
    let server = Server::new(2, None);
    let ranks: Vec<_> = (0..2).map(|rank| by_socket(&server, role("abrupt"), rank)).collect();
    for (number, (rank, served)) in ranks.into_iter().enumerate() {
        let output = rank.ends();
        let commands = served.join().unwrap();
        if number == 1 {
            assert_eq!(output.status.code(), Some(ABRUPT));
            assert!(!commands.contains(&"finalize".into()), "{commands:?}");
        } else {
            assert!(succeeded(&output).contains("rank 1 left without ending its runtime"));
        }
    }
}

#[test]
fn a_bad_server_is_an_error_and_never_a_hang() {
    let failing: [(usize, Fault, &str); 9] = [
        (0, ("init", Deed::Says("\u{1}\u{2}nonsense")), "no field `cmd`"),
        (0, ("init", Deed::HangsUp), "hung up"),
        (0, ("init", Deed::IsSilent), "not answered in time"),
        (0, ("init", Deed::Says("cmd=response_to_init rc=1")), "refused `cmd=init` (rc=1)"),
        (0, ("get_my_kvsname", Deed::Says("cmd=my_kvsname rc=0")), "has no `kvsname`"),
        (0, ("put", Deed::Says("cmd=put_result rc=-1")), "refused `cmd=put` (rc=-1)"),
        (0, ("barrier_in", Deed::IsSilent), "not answered in time"),
        // Nothing was put.
        (1, ("barrier_in", Deed::Says("cmd=barrier_out")), "refused `cmd=get` (rc=1)"),
        (1, ("barrier_in", Deed::Says("cmd=abort")), "answered with `abort`"),
    ];
    for (rank, fault, words) in failing {
        for is_called in [false, true] {
            let server = Server::new(2, Some(fault));
            let mut command = role("fence");
            command.env("CARRACK_BOOTSTRAP_TIMEOUT", "1");
            let (started, _) = match is_called {
                false => by_socket(&server, command, rank),
                true => by_port(&server, command, rank, 2),
            };
            let output = started.ends();
            let complaint = &output.stderr;
            assert!(!output.status.success() && output.status.code() != Some(HUNG));
            assert!(complaint.contains("job of PMI") && complaint.contains(words), "{complaint}");
        }
    }
}

#[test]
fn sizes_that_contradict_each_other_are_named() {
    let server = Server::new(2, None);
    let mut zero = role("fence");
    zero.env("CARRACK_BOOTSTRAP_TIMEOUT", "2");
    let (zero, _) = by_port(&server, zero, 0, 2);
    let (one, _) = by_port(&server, role("fence"), 1, 3);
    let output = one.ends();
    let complaint = &output.stderr;
    assert!(!output.status.success());
    assert!(complaint.contains("told of 3 ranks, and rank 0 of 2"), "{complaint}");
    assert!(!zero.ends().status.success());
}

#[test]
fn what_keeps_rank_0_from_listening_is_the_error_of_all_ranks() {
    let taken = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let server = Server::new(2, None);
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let mut command = role("fence");
            command.env("CARRACK_PORT", &port);
            by_socket(&server, command, rank)
        })
        .collect();
    for (number, (rank, _)) in ranks.into_iter().enumerate() {
        let output = rank.ends();
        let complaint = &output.stderr;
        assert!(!output.status.success(), "rank {number} has started");
        assert!(complaint.contains("rank 0 cannot listen"), "rank {number}: {complaint}");
        assert_eq!(complaint.contains("rank 0 has failed"), number == 1, "{complaint}");
    }
}

/// Returns a task of a step that is on one node.
fn task(rank: u32, size: u32, job: u32) -> Command {
    let mut command = role("fence");
    for (name, value) in [
        ("SLURM_PROCID", rank),
        ("SLURM_STEP_NUM_TASKS", size),
        ("SLURM_LOCALID", rank),
        ("SLURM_NODEID", 0),
        ("SLURM_STEP_NUM_NODES", 1),
        ("SLURM_JOB_ID", job),
        ("SLURM_STEP_ID", 0),
    ] {
        command.env(name, value.to_string());
    }
    command
}

#[test]
fn tasks_meet_by_slurms_variables_and_rank_0_warns_without_a_secret() {
    let ranks: Vec<_> =
        (0..3).rev().map(|rank| started(task(rank, 3, std::process::id()))).collect();
    for (rank, started) in (0..3).rev().zip(ranks) {
        let output = started.ends();
        let expected = format!("rank {rank} of 3, place {rank}, by Slurm's variables");
        assert!(succeeded(&output).contains(&expected));
        let warned = output.stderr.contains("no CARRACK_JOB_SECRET");
        assert_eq!(warned, rank == 0);
    }
}

#[test]
fn a_job_without_a_secret_is_refused_where_one_is_required() {
    let mut command = task(0, 2, 1);
    command.env("CARRACK_REQUIRE_SECRET", "1");
    let output = started(command).ends();
    let complaint = &output.stderr;
    assert!(
        !output.status.success() && complaint.contains("CARRACK_REQUIRE_SECRET"),
        "{complaint}"
    );
}

#[test]
fn ranks_of_several_nodes_meet_that_carrack_run_starts_on_each() {
    let at = format!("127.0.0.1:{}", free_port());
    let run = |node: &str| {
        let mut command = program(built::carrack());
        command.args(["run", "-n", "2", "--nodes", "2", "--node", node, "--at", &at, "--"]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "other_launchers::a_rank_in_its_role", "--nocapture"]);
        // Ranks of a job in a job are those of the inner one.
        command.env(ROLE, "fence").env("CARRACK_RANK", "0").env("CARRACK_SIZE", "1");
        command
    };
    let nodes = ["1", "0"].map(|node| started(run(node)));
    for (node, started) in [1, 0].into_iter().zip(nodes) {
        let said = succeeded(&started.ends());
        for place in 0..2 {
            let rank = 2 * node + place;
            let rest = format!("rank {rank} of 4, place {place}, by torchrun's variables");
            let is_there =
                |line: &str| line.starts_with(&format!("[{rank}] ")) && line.ends_with(&rest);
            assert!(said.lines().any(is_there), "{rest}: {said}");
        }
    }
    let beyond = started(run("2")).ends();
    let complaint = beyond.stderr;
    assert!(!beyond.status.success() && complaint.contains("--node 2 is not below"), "{complaint}");
}

#[test]
fn ranks_are_told_by_carrack_run_that_rank_0_has_ended_before_they_reached_it() {
    let start = |(each, status): (&'static str, u32)| {
        let at = format!("127.0.0.1:{}", free_port());
        let nodes = ["1", "0"].map(|node| {
            let mut command = program(built::carrack());
            command.args(["run", "-n", each, "--nodes", "2", "--node", node, "--at", &at, "--"]);
            let script = format!("[ $RANK = 0 ] && exit {status}; exec \"$@\"");
            command.args(["sh", "-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
            command.args(["--exact", "other_launchers::a_rank_in_its_role", "--nocapture"]);
            command.env(ROLE, "fence");
            (node, started(command))
        });
        let told = format!("at {at}: rank 0 exited with status {status}");
        (each, told, nodes)
    };
    for (each, told, nodes) in [("1", 0), ("1", 3), ("2", 0)].map(start) {
        for (node, started) in nodes {
            let output = started.ends();
            let said = output.stdout + &output.stderr;
            let has_others = (each, node) != ("1", "0");
            assert_eq!(said.contains(&told), has_others, "node {node}: {said}");
        }
    }
}

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    thread::spawn(|| {
        thread::sleep(WATCHDOG);
        std::process::exit(HUNG);
    });
    let settings = Settings::from_env().unwrap();
    let source = Source::find(&settings).unwrap_or_else(|error| panic!("{error}"));
    let job = source.join(&settings).unwrap_or_else(|error| panic!("{error}"));
    if role == "abrupt" {
        job.fence().unwrap();
        if job.rank() == 1 {
            std::process::exit(ABRUPT);
        }
        return println!("{}", job.fence().unwrap_err());
    }
    let (rank, size, place) = (job.rank(), job.size(), job.place_on_node());
    job.put(&format!("here/{rank}"), &rank.to_le_bytes()).unwrap();
    job.fence().unwrap();
    for other in 0..size {
        let value = loop {
            match job.get(&format!("here/{other}")).unwrap() {
                Some(value) => break value,
                None => thread::yield_now(),
            }
        };
        assert_eq!(value, other.to_le_bytes());
    }
    println!("rank {rank} of {size}, place {place}, by {source}");
    job.finish().unwrap();
}
