//! Machines that lack something: the runtime does without it, or says what is missing.

use crate::support::kernel;
use crate::support::ranks::{Ranks, Role, listing, lone_rank};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Job, OverShm, OverTcp, Watchdog, built, pattern, rng};
use carrack::settings::{AutoChoice, GpuChoice, Settings, TransportChoice};
use carrack::{PostError, Rank, Runtime, StartError, Synchronizer, Tag};
use carrack_transports::sync::barrier::Barrier;
use carrack_transports::sync::{BiasedLock, Queue, Sleepers, attention};
use rand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

// ---- what a shell can take away -----------------------------------------------------------------

/// Runs traffic between three ranks for which a shell has prepared something. It is skipped, with
/// the reason, where the shell cannot.
fn works_after(what: &str, preparation: &str) {
    let _watchdog = Watchdog::over(what);
    let script = format!("{preparation} && exec \"$@\"");
    let wrapper = ["unshare", "--mount", "--propagation", "private", "sh", "-c", &script, "sh"];
    let folder = std::env::temp_dir();
    let probe = Command::new(wrapper[0])
        .args(&wrapper[1..])
        .arg("true")
        .env("TEST_FOLDER", folder)
        .output();
    match probe {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            return println!("skipped: {what}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Err(error) => return println!("skipped: {what}: unshare: {error}"),
    }
    Ranks::start_under(&wrapper, "ordeals::traffic", 3, &[rng().random(), 0]).succeed();
}

const TINY_SHM: &str = "mount -t tmpfs -o size=1m tmpfs /dev/shm";
/// All of /tmp is read-only except the folder by which the ranks of the test find each other.
const READ_ONLY_TMP: &str = "mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp && mount \
    --bind $TEST_FOLDER $TEST_FOLDER && mount -o remount,bind,rw $TEST_FOLDER";
const LITTLE_LOCKED: &str = "ulimit -l 64";

#[test]
fn a_tiny_dev_shm_is_enough() {
    works_after("a tiny /dev/shm", TINY_SHM);
}

#[test]
fn tmp_need_not_be_writable() {
    works_after("a read-only /tmp", READ_ONLY_TMP);
}

#[test]
fn little_memory_that_can_be_locked_is_enough() {
    works_after("ulimit -l 64", LITTLE_LOCKED);
}

#[test]
fn a_machine_that_is_poor_in_all_of_these_is_enough() {
    works_after("all at once", &[TINY_SHM, READ_ONLY_TMP, LITTLE_LOCKED].join(" && "));
}

pub(crate) fn traffic(role: &Role) {
    let [seed, refused] = role.words[..] else { panic!("two words") };
    refuse(refused as usize);
    let runtime = role.runtime(OverShm::settings());
    let plan = Plan { seed, steps: 300, lanes: 1, large: 20, longest: 100_000, room: 16_384 };
    let taking = Taking::part(role, runtime.clone(), plan, None);
    taking.run();
    if refused == COPIES {
        let told = runtime.explain(Duration::from_secs(1));
        let other = &told[(role.rank as usize + 1) % 3];
        assert!(other.kinds.iter().any(|kind| kind.way.contains("not permitted")), "{other:?}");
    }
    role.meet("over", &runtime, 0..role.size);
}

// ---- what the kernel can refuse -----------------------------------------------------------------

const COPIES: u64 = 1;
const BARRIERS: u64 = 2;
const PROCESSES: u64 = 3;
const EVERYTHING: u64 = 4;
const MEMORY: u64 = 5;
const WRITES: u64 = 6;
const READS: u64 = 7;
const FILES: u64 = 8;

#[test]
fn a_kernel_that_refuses_copies_between_processes_costs_speed_only() {
    let _watchdog = Watchdog::over("copies");
    Ranks::start("ordeals::traffic", 3, &[rng().random(), COPIES]).succeed();
}

/// The receivers ask for help with large messages, and get none; or are helped with what they
/// cannot copy themselves.
#[test]
fn a_kernel_that_refuses_one_of_the_two_ways_costs_speed_only() {
    let _watchdog = Watchdog::over("one way");
    for refused in [WRITES, READS] {
        Ranks::start("ordeals::traffic", 3, &[rng().random(), refused]).succeed();
    }
}

#[test]
fn a_kernel_that_refuses_barriers_for_other_processes_costs_speed_only() {
    let _watchdog = Watchdog::over("barriers");
    Ranks::start("ordeals::traffic", 3, &[rng().random(), BARRIERS]).succeed();
}

/// Structures that rely on barriers which the kernel grants at the start, each by itself.
const RELIANT: [fn(); 4] = [
    || {
        let lock = BiasedLock::new(0);
        // This thread earns the bias, which another one then has to revoke.
        (0..1000).for_each(|_| *lock.lock() += 1);
        in_a_sandbox(|| *lock.lock() += 1);
    },
    || {
        let queue = Queue::new(4);
        assert!(queue.push(1).is_ok());
        in_a_sandbox(|| _ = queue.push(2));
    },
    || {
        let sleepers = Sleepers::new().unwrap();
        in_a_sandbox(|| drop(sleepers.enter()));
    },
    || {
        let granted = Barrier::between_processes();
        in_a_sandbox(|| attention::settle(granted));
    },
];

/// Does something in a thread that installs a filter first.
fn in_a_sandbox(what: impl FnOnce() + Send) {
    let sandboxed = || {
        refuse(BARRIERS as usize);
        what();
    };
    std::thread::scope(|scope| scope.spawn(sandboxed).join().unwrap());
}

#[test]
fn a_kernel_that_refuses_barriers_after_the_start_ends_the_rank_with_the_reason() {
    let _watchdog = Watchdog::over("sandbox");
    let granted = Barrier::between_processes();
    if !(granted.heavy && granted.reachable) {
        return println!("skipped: this kernel grants no barriers: {granted:?}");
    }
    for which in 0..RELIANT.len() as u64 {
        let rank = lone_rank("ordeals::sandbox", &[which]).output().unwrap();
        let said = String::from_utf8_lossy(&rank.stderr);
        assert_eq!(
            rank.status.signal(),
            Some(libc::SIGABRT),
            "number {which}: {}: {said}",
            rank.status
        );
        assert!(said.contains("membarrier") && said.contains("seccomp"), "number {which}: {said}");
    }
}

pub(crate) fn sandbox(role: &Role) {
    RELIANT[role.words[0] as usize]();
}

#[test]
fn a_kernel_without_descriptors_of_processes_is_enough() {
    let _watchdog = Watchdog::over("processes");
    Ranks::start("ordeals::traffic", 3, &[rng().random(), PROCESSES]).succeed();
}

#[test]
fn a_kernel_that_refuses_all_of_these_is_enough() {
    let _watchdog = Watchdog::over("everything");
    Ranks::start("ordeals::traffic", 3, &[rng().random(), EVERYTHING]).succeed();
}

#[test]
fn a_kernel_that_gives_no_shared_memory_is_named_as_the_reason() {
    let _watchdog = Watchdog::over("memory");
    Ranks::start("ordeals::no_memory", 2, &[MEMORY]).succeed();
}

#[test]
fn a_limit_of_files_that_shared_memory_exceeds_is_named_as_the_reason() {
    let _watchdog = Watchdog::over("file size");
    Ranks::start("ordeals::no_memory", 2, &[FILES]).succeed();
}

/// Takes system calls away from this thread, or long files from this process.
fn refuse(which: usize) {
    let copies = [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev];
    let refused = match which as u64 {
        COPIES => copies.to_vec(),
        READS => copies[..1].to_vec(),
        WRITES => copies[1..].to_vec(),
        BARRIERS => vec![libc::SYS_membarrier],
        PROCESSES => vec![libc::SYS_pidfd_open],
        EVERYTHING => [&copies[..], &[libc::SYS_membarrier, libc::SYS_pidfd_open]].concat(),
        MEMORY => vec![libc::SYS_memfd_create],
        FILES => {
            let limit = Rlimit { current: Some(4096), ..getrlimit(Resource::Fsize) };
            return setrlimit(Resource::Fsize, limit).unwrap();
        }
        _ => return,
    };
    kernel::refuses(&refused);
}

/// `CARRACK_KERNEL_COPY=off` gives no process access that the system refuses it.
#[test]
fn a_rank_that_has_no_kernel_copies_lets_no_process_at_its_memory() {
    let _watchdog = Watchdog::over("tracers");
    Ranks::start("ordeals::tracers", 2, &[0]).succeed();
    let ends = Ranks::start("ordeals::tracers", 1, &[1]).end();
    assert_eq!(
        ends[0].signal(),
        Some(libc::SIGSYS),
        "with kernel copies the request is made: {ends:?}"
    );
}

pub(crate) fn tracers(role: &Role) {
    let choice = if role.words[0] == 1 { AutoChoice::Auto } else { AutoChoice::Off };
    kernel::ends_at(libc::SYS_prctl, libc::PR_SET_PTRACER.cast_unsigned());
    let runtime = role.runtime(OverShm::settings().setting("kernel_copy", choice));
    runtime.barrier().unwrap();
    role.meet("over", &runtime, 0..role.size);
}

/// Runs the role: without shared memory there is no way to another process, and within one there
/// is.
pub(crate) fn no_memory(role: &Role) {
    refuse(role.words[0] as usize);
    let start = |settings| {
        Runtime::builder().settings(built(settings)).bootstrap(Box::new(role.bootstrap())).start()
    };
    let error = start(OverShm::settings()).unwrap_err();
    assert!(matches!(error, StartError::NoTransport(_)), "{error}");
    assert!(
        error.to_string().contains("shm") && error.to_string().contains("no shared memory"),
        "{error}"
    );
    let within = [TransportChoice::Loopback, TransportChoice::Shm];
    let runtime = start(Settings::builder().transports(within).gpu(GpuChoice::None)).unwrap();
    role.says("here");
    role.told("here", 1 - role.rank);
    assert!(runtime.post_send(Rank(role.rank), b"me", Tag(1)).try_submit().unwrap().is_done());
    let error = runtime.post_send(Rank(1 - role.rank), b"you", Tag(1)).try_submit().unwrap_err();
    assert!(
        matches!(&error, PostError::Unreachable { why, .. } if why.contains("no shared memory")),
        "{error}"
    );
    let error = runtime.allocate(100).unwrap_err();
    assert!(error.to_string().contains("the system gave no"), "{error}");
    role.meet("over", &runtime, 0..2);
}

// ---- few descriptors ----------------------------------------------------------------------------

#[test]
fn a_rank_that_runs_out_of_descriptors_is_told_so_and_goes_on_when_there_are_some() {
    let _watchdog = Watchdog::over("descriptors");
    Ranks::start("ordeals::few", 1, &[]).succeed();
}

/// Starts and connects two ranks in one process, with more and more descriptors until they
/// suffice.
pub(crate) fn few(_: &Role) {
    let whole = getrlimit(Resource::Nofile);
    let mut waited = 0;
    for spare in 0.. {
        assert!(spare < 100);
        let before = holdings();
        let spent = limit(spare);
        let ranks = Runtime::in_process_with(2, &built(OverShm::settings()));
        let outcome = ranks.map(|ranks| meet(&ranks, whole));
        setrlimit(Resource::Nofile, whole).unwrap();
        drop(spent);
        assert_eq!(holdings(), before, "what is left of a try with {spare} descriptors");
        match outcome {
            Ok(Meeting::Smooth) => {
                assert!(spare > 5 && waited > 2, "it was not poor");
                return;
            }
            Ok(Meeting::Late) => waited += 1,
            Err(error) => {
                eprintln!("with {spare} descriptors: {error}");
                assert!(
                    error.to_string().contains("open files"),
                    "with {spare} descriptors: {error}"
                );
            }
        }
    }
}

/// Descriptors lack for a moment, in the middle of any step of a connection, unknown to the peers.
#[test]
fn a_moment_without_descriptors_ends_no_rank_and_leaves_nothing() {
    let _watchdog = Watchdog::over("a moment");
    Ranks::start("ordeals::moment", 1, &[]).succeed();
}

pub(crate) fn moment(_: &Role) {
    let whole = getrlimit(Resource::Nofile);
    let before = holdings();
    let mut waited = 0;
    for spare in 0.. {
        assert!(spare < 100);
        let ranks = Runtime::in_process_with(2, &built(OverShm::settings())).unwrap();
        let spent = limit(spare);
        let meeting = meet(&ranks, whole);
        drop((spent, ranks));
        assert_eq!(holdings(), before, "what is left of a moment with {spare} descriptors");
        match meeting {
            Meeting::Smooth => break,
            Meeting::Late => waited += 1,
        }
    }
    assert!(waited > 5, "it was not poor: {waited}");
}

#[test]
fn posts_that_lack_a_descriptor_for_their_connection_leave_nothing() {
    let _watchdog = Watchdog::over("posts");
    Ranks::start("ordeals::posts", 1, &[]).succeed();
}

pub(crate) fn posts(_: &Role) {
    let whole = getrlimit(Resource::Nofile);
    for spare in 0..3 {
        let ranks = Runtime::in_process_with(2, &built(OverShm::settings())).unwrap();
        let before = holdings();
        let spent = limit(spare);
        for _ in 0..200 {
            let refused = ranks[0].post_send(Rank(1), b"x", Tag(1)).try_submit().unwrap_err();
            assert!(matches!(&refused, PostError::Lacking { rank: Rank(1), .. }), "{refused}");
            assert!(refused.to_string().contains("open files"), "{refused}");
        }
        setrlimit(Resource::Nofile, whole).unwrap();
        drop(spent);
        assert_eq!(holdings(), before, "descriptors, and segments that are mapped");
        meet(&ranks, whole);
    }
}

#[test]
fn a_message_that_waits_for_a_descriptor_is_pending_with_that_reason_on_either_side() {
    let _watchdog = Watchdog::over("short");
    for is_tcp in [0, 1] {
        let rank = lone_rank("ordeals::short", &[is_tcp]).output().unwrap();
        let told = String::from_utf8(rank.stderr).unwrap();
        assert!(rank.status.success(), "{told}");
        // Once, of all the times that it lacked a descriptor.
        let [line] =
            told.lines().filter(|line| line.starts_with("carrack: ")).collect::<Vec<_>>()[..]
        else {
            panic!("{told}");
        };
        assert!(
            line.contains("until this process has what it lacks: Too many open files"),
            "{line}"
        );
    }
}

/// Sends a message between two ranks of one process, with more and more descriptors until they
/// suffice.
pub(crate) fn short(role: &Role) {
    let is_tcp = role.words[0] == 1;
    let settings = if is_tcp { OverTcp::settings() } else { OverShm::settings() };
    let whole = getrlimit(Resource::Nofile);
    let cause = "Too many open files (os error 24): the limit is 256, raise it with `ulimit -n`";
    let mut told = [0; 2];
    for spare in 0.. {
        assert!(spare < 100);
        let ranks = Runtime::in_process_with(2, &built(settings.clone())).unwrap();
        let spent = limit(spare);
        ranks[0].post_send(Rank(1), b"x", Tag(1)).submit().unwrap();
        let start = Instant::now();
        while ranks[1].pending().unexpected == 0 && start.elapsed() < Duration::from_millis(200) {
            ranks.iter().for_each(|rank| _ = rank.progress().unwrap());
        }
        let has_come = ranks[1].pending().unexpected > 0;
        let tells = [0, 1].map(|rank: usize| ranks[rank].pending().to_string().contains(cause));
        let trouble = ranks[0].explain(Duration::ZERO).swap_remove(1).trouble;
        assert!(!tells[0] || trouble.is_some_and(|why| why.contains(cause)), "with {spare}");
        setrlimit(Resource::Nofile, whole).unwrap();
        drop(spent);
        assert_ne!(has_come, tells.contains(&true), "with {spare}: {}", ranks[0].pending());
        if has_come {
            assert!(told[0] > 0 && told[1] > 0, "{told:?}");
            return;
        }
        let waits = ranks[0].pending().to_string();
        let link = ["waits for a connection: Too many", "waits for the peer to accept the conn"];
        assert!(link.iter().any(|link| waits.contains(link)), "with {spare}: {waits}");
        told.iter_mut().zip(tells).for_each(|(told, tells)| *told += u32::from(tells));
        ranks[1]
            .wait(|| ranks[0].progress().is_err() || ranks[1].pending().unexpected > 0)
            .unwrap();
        assert!(ranks.iter().all(|rank| rank.pending().shortages.is_empty()));
    }
}

/// Descriptors of this process, and memory that it shares.
fn holdings() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        listing("/proc/self/fd").len(),
        maps.lines().filter(|line| line.contains("/memfd:carrack-")).count(),
    )
}

/// Leaves exactly `spare` free descriptors, while the returned files are open and the limit stays.
fn limit(spare: usize) -> Vec<File> {
    let low = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, low).unwrap();
    let mut spent: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    spent.truncate(spent.len() - spare);
    spent
}

enum Meeting {
    /// A meeting with enough descriptors.
    Smooth,
    /// A message that came once the limit was raised.
    Late,
}

/// Has both ranks send to each other. What they have not come to by themselves they come to with
/// the `whole` limit.
fn meet(ranks: &[Runtime], whole: Rlimit) -> Meeting {
    let arrived = Synchronizer::new(2);
    for (rank, other) in [(0, Rank(1)), (1, Rank(0))] {
        let mut receive = ranks[rank].post_recv(other, vec![0; 100], Tag(1)).comp(&arrived);
        assert!(receive.try_submit().unwrap().is_posted());
    }
    let start = Instant::now();
    let (mut sent, mut meeting) = ([false; 2], Meeting::Smooth);
    while !arrived.test() {
        for (rank, other) in [(0, Rank(1)), (1, Rank(0))] {
            ranks[rank].progress().unwrap();
            assert_eq!(ranks[rank].peer_down(other), None);
            if !sent[rank] {
                match ranks[rank].post_send(other, &pattern(1, 100)[..], Tag(1)).try_submit() {
                    Ok(outcome) => sent[rank] = !outcome.is_retry(),
                    Err(PostError::Lacking { why, .. }) => {
                        assert!(why.contains("open files"), "{why}")
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
        if start.elapsed() > Duration::from_millis(100) && matches!(meeting, Meeting::Smooth) {
            setrlimit(Resource::Nofile, whole).unwrap();
            meeting = Meeting::Late;
        }
    }
    for status in arrived.take().unwrap() {
        assert_eq!(status.ok().unwrap().bytes().unwrap(), pattern(1, 100));
    }
    meeting
}
