//! `carrack run`, with real processes: the environment of ranks, the user's view, and the absence
//! of leftovers.
//!
//! The programs are shell one-liners, or this very test binary in a role (see
//! `a_rank_in_its_role`). Every job has a mark in its environment, by which survivors are found in
//! /proc. No test asserts a duration; the watchdog only turns a hang into a failure.

#![expect(unsafe_code, reason = "code runs between fork and exec")]

mod killing;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg,
};
use std::collections::BTreeSet;
use std::fs;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::built::carrack;
use crate::support::children::{Watched as _, started, succeeded};
use carrack::bootstrap::{Bootstrap, BootstrapError, FromLauncher};
use children::{Heard, Running, Stream};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process};

const WATCHDOG: Duration = Duration::from_secs(120);
const ROLE: &str = "CARRACK_TEST_ROLE";

/// Two processes a rank, of which one is a grandchild of the keeper.
const TWO_SLEEPERS: &str = "sleep 1000 & echo ready; sleep 1000";

/// Returns the command `carrack run -n RANKS OPTIONS -- PROGRAM`.
fn job(ranks: u32, options: &[&str], program: &[&str]) -> Command {
    let mut command = Command::new(carrack());
    command
        .args(["run", "-n", &ranks.to_string()])
        .args(options)
        .arg("--")
        .args(program)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // A shell starts its background jobs with SIGINT ignored, and `nohup` its program with SIGHUP:
    // either may have started this test.
    // SAFETY: `signal` is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    command
}

/// Closes the reader of a job's stderr before the job starts.
fn unheard(mut job: Command) -> Command {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    job.stderr(writer);
    job
}

/// Returns a job whose ranks run a shell script.
fn script(ranks: u32, options: &[&str], script: &str) -> Command {
    job(ranks, options, &["sh", "-c", script])
}

/// Returns a job whose ranks are this test in a role.
fn role(ranks: u32, role: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let program =
        [test.to_str().unwrap(), "--exact", "launcher::a_rank_in_its_role", "--nocapture"];
    let mut job = job(ranks, &[], &program);
    job.env(ROLE, role);
    job
}

/// Runs a job to its end and checks that it left nothing behind.
#[track_caller]
fn ran(mut job: Command) -> Heard {
    Running::start(&mut job).unwrap().ends_with_all()
}

/// Starts a job and waits until `lines` lines of its output have come.
fn start(mut job: Command, lines: usize) -> Running {
    let mut running = Running::start(&mut job).unwrap();
    for seen in 0..lines {
        let line = running.next_line(Stream::Out, WATCHDOG);
        assert!(line.is_some(), "no more than {seen} lines came");
    }
    running
}

/// Returns the keeper: the launcher's only child.
fn keeper(running: &Running) -> Pid {
    let launcher = running.id().to_string();
    let is_keeper = |pid: &Pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1));
        parent == Some(launcher.as_str())
    };
    running.processes().find(is_keeper).unwrap()
}

/// Returns the lines of all ranks, which come in any order.
fn lines(heard: &Heard) -> BTreeSet<&str> {
    heard.stdout.lines().collect()
}

#[test]
fn every_rank_knows_its_number_and_its_lines_are_tagged_with_it() {
    let run =
        ran(script(3, &[], "echo out $CARRACK_RANK of $CARRACK_SIZE; echo err $CARRACK_RANK >&2"));
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    assert_eq!(lines(&run), BTreeSet::from(["[0] out 0 of 3", "[1] out 1 of 3", "[2] out 2 of 3"]));
    assert_eq!(
        run.stderr.lines().collect::<BTreeSet<_>>(),
        BTreeSet::from(["[0] err 0", "[1] err 1", "[2] err 2"])
    );
}

#[test]
fn without_tags_lines_come_as_they_are() {
    let run = ran(script(2, &["--no-tag"], "echo rank $CARRACK_RANK"));
    assert_eq!((run.status.code(), lines(&run)), (Some(0), BTreeSet::from(["rank 0", "rank 1"])));
}

/// CUDA's library starts a thread in any process that uses it, the launcher of `carrack perf`
/// included. The kernel may give that thread the signal that a child has ended.
#[test]
fn a_job_ends_also_where_a_library_has_a_thread_in_the_launcher() {
    if Command::new("cc").arg("--version").output().is_err() {
        return println!("skipped: no C compiler (cc) to make such a library with");
    }
    let given = std::env::var_os("TEST_SCRATCH").map(std::path::PathBuf::from);
    let folder = given.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let (source, library) =
        (folder.join("thread.c"), folder.join(format!("thread-{}.so", std::process::id())));
    let text = "#include <pthread.h>\n#include <unistd.h>\n\
        static void *nap(void *none) { for (;;) pause(); return none; }\n\
        __attribute__((constructor)) static void start(void) { pthread_t one; pthread_create(&one, \
        0, nap, 0); }\n";
    fs::write(&source, text).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-lpthread");
    assert!(compiler.status().unwrap().success(), "the C compiler failed");
    for _ in 0..10 {
        let mut job = job(2, &[], &["true"]);
        job.env("LD_PRELOAD", &library);
        assert_eq!(ran(job).status.code(), Some(0));
    }
    fs::remove_file(library).unwrap();
}

#[test]
fn the_first_rank_that_fails_decides_the_status_and_the_others_are_ended() {
    let run = ran(script(4, &[], "[ $CARRACK_RANK = 2 ] && exit 3; sleep 1000"));
    assert_eq!(run.status.code(), Some(3));
    assert!(run.stderr.contains("rank 2 exited with status 3; ending the "), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "the others' ends are no news: {}", run.stderr);
}

/// The rank ends with status 0, so the launcher ends no other rank for it. It ends before the
/// others look for it, or after they have waited for some time.
#[test]
fn ranks_that_meet_are_told_of_one_that_never_comes() {
    for when in ["exit 0", "sleep 1; exit 0"] {
        let explain = format!(
            "[ $CARRACK_RANK = 1 ] && {{ {when}; }}; exec '{}' explain",
            carrack().display()
        );
        let run = ran(script(3, &[], &explain));
        assert_eq!(run.status.code(), Some(1));
        // The first rank that reports it has the others ended. A rank that has heard it from
        // another names the missing rank.
        let told = |line: &str| line.contains("] carrack: barrier: ") && line.contains("rank 1");
        assert!(run.stderr.lines().any(told), "{when}: {}", run.stderr);
    }
}

#[test]
fn ranks_that_meet_are_told_of_one_that_there_is_no_path_to() {
    let explain = format!(
        "[ $CARRACK_RANK = 1 ] && export CARRACK_TRANSPORT=loopback; exec '{}' \
        explain",
        carrack().display()
    );
    let run = ran(script(3, &[], &explain));
    assert_eq!(run.status.code(), Some(1));
    let told = |line: &str| {
        line.contains("] carrack: barrier: ")
            && (line.contains("rank 1")
                || (line.contains("cannot be reached") && line.contains("CARRACK_TRANSPORT")))
    };
    assert!(run.stderr.lines().any(told), "{}", run.stderr);
}

#[test]
fn a_rank_killed_by_a_signal_is_named_with_the_signal() {
    let run = ran(script(2, &[], "[ $CARRACK_RANK = 1 ] && kill -KILL $$; sleep 1000"));
    assert_eq!(run.status.code(), Some(137));
    assert!(run.stderr.contains("rank 1 was killed by signal 9 (SIGKILL)"), "{}", run.stderr);
}

#[test]
fn ranks_that_ignore_being_asked_to_end_are_killed() {
    let run = ran(script(
        2,
        &[],
        "[ $CARRACK_RANK = 1 ] && exit 5; trap '' TERM; sleep 1000 & wait; sleep 1000",
    ));
    assert_eq!(run.status.code(), Some(5));
}

#[test]
fn a_stopped_rank_is_ended_too() {
    let run = ran(script(2, &[], "[ $CARRACK_RANK = 1 ] && sleep 0.3 && exit 5; kill -STOP $$"));
    assert_eq!(run.status.code(), Some(5));
}

#[test]
fn a_program_that_does_not_exist_is_one_clear_error() {
    let run = ran(job(4, &[], &["no-such-program"]));
    assert_eq!(run.status.code(), Some(127));
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(
        run.stderr.contains("no-such-program") && run.stderr.contains("PATH"),
        "{}",
        run.stderr
    );
    let run = ran(job(1, &[], &["./examples/no-such-example"]));
    assert_eq!(run.status.code(), Some(127));
    assert!(
        run.stderr.contains("cargo build") && run.stderr.contains("--examples"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_file_that_is_no_program_is_one_clear_error() {
    let run = ran(job(4, &[], &["/proc/version"]));
    assert_eq!(run.status.code(), Some(126));
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
}

#[test]
fn a_program_that_only_the_attempt_shows_to_be_broken_is_one_clear_error() {
    let file = std::env::temp_dir().join(format!("carrack-broken-program-{}", std::process::id()));
    fs::write(&file, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let run = ran(job(2, &[], &[file.to_str().unwrap()]));
    fs::remove_file(&file).unwrap();
    assert_eq!(run.status.code(), Some(127), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains("rank 0 could not be started"), "{}", run.stderr);
}

#[test]
fn a_program_is_found_next_to_the_carrack_command() {
    // `carrack` is not in PATH, and is found in the folder of the command itself.
    let mut job = job(1, &["--no-tag"], &["carrack", "--help"]);
    job.env("PATH", "/nowhere");
    let run = ran(job);
    assert_eq!(run.status.code(), Some(0), "{}", run.stderr);
    assert!(run.stdout.contains("run"), "{}", run.stdout);
}

#[test]
fn a_job_that_is_warned_of_runs_though_stderr_is_closed() {
    let ranks = thread::available_parallelism().unwrap().get() + 1;
    let ranks = u32::try_from(ranks).unwrap();
    let mut job = unheard(job(ranks, &["--bind", "core", "--no-tag"], &["echo", "here"]));
    job.env("CARRACK_LOG", "no=filter=at=all");
    let run = ran(job);
    assert_eq!((run.status.code(), run.stdout.lines().count()), (Some(0), ranks as usize));
}

#[test]
fn an_error_of_the_launcher_has_its_status_though_stderr_is_closed() {
    assert_eq!(ran(unheard(job(2, &[], &["no-such-program"]))).status.code(), Some(127));
}

#[test]
fn a_command_that_logs_ends_well_though_stderr_is_closed() {
    let mut explain = Command::new(carrack());
    explain.arg("explain").env("CARRACK_LOG", "trace").stdout(Stdio::piped());
    assert!(succeeded(&ran(unheard(explain))).contains("loopback"));
}

#[test]
fn a_number_of_ranks_out_of_range_is_refused() {
    for ranks in [0, 4097] {
        let run = ran(job(ranks, &[], &["true"]));
        assert_eq!(run.status.code(), Some(2));
        assert!(run.stderr.contains("1 to 4096 ranks"), "{}", run.stderr);
    }
}

#[test]
fn what_ranks_leave_in_the_background_ends_with_the_job() {
    let run = ran(script(2, &[], "setsid sh -c 'sleep 1000 & sleep 1000' & echo done"));
    assert_eq!(
        (run.status.code(), lines(&run)),
        (Some(0), BTreeSet::from(["[0] done", "[1] done"]))
    );
}

#[test]
fn a_job_that_takes_too_long_is_ended() {
    let run = ran(script(2, &["--timeout", "0.3"], TWO_SLEEPERS));
    assert_eq!(run.status.code(), Some(124));
    assert!(run.stderr.contains("--timeout"), "{}", run.stderr);
}

#[test]
fn output_for_which_there_is_no_room_ends_the_job_with_the_reason() {
    let mut job = script(2, &[], "echo here; sleep 1000");
    job.stdout(fs::File::create("/dev/full").unwrap());
    let run = ran(job);
    let said = &run.stderr;
    assert!(said.contains("stdout") && said.contains("No space left on device"), "{said}");
    assert_eq!(run.status.code(), Some(1), "{said}");
}

#[test]
fn no_line_is_lost_where_stdout_is_full_and_does_not_block() {
    let mut job = script(2, &["--no-tag"], "seq 1 20000");
    let (mut reader, writer) = std::io::pipe().unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    job.stdout(writer).stderr(Stdio::inherit());
    let child = Running::start(&mut job).unwrap();
    drop(job);
    // The ranks fill it meanwhile.
    thread::sleep(Duration::from_millis(500));
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(child.ends().status.success());
    assert_eq!(text.lines().count(), 2 * 20000);
}

#[test]
fn lines_are_whole_although_all_ranks_write_both_streams_to_one_pipe() {
    // 200 lines of 5,000 characters, longer than what a pipe takes in one piece.
    let line = "awk -v r=$CARRACK_RANK 'BEGIN { l = sprintf(\"%5000s\", \"\"); gsub(/ /, r, l); \
                for (i = 0; i < 200; i++) print l }'";
    let mut job = script(4, &[], &format!("{line} & {line} >&2; wait"));
    let (mut reader, writer) = std::io::pipe().unwrap();
    job.stdout(writer.try_clone().unwrap()).stderr(writer);
    let child = Running::start(&mut job).unwrap();
    drop(job);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(child.ends().status.success());
    assert_eq!(text.lines().count(), 4 * 2 * 200);
    for line in text.lines() {
        let rank = &line[1..2];
        assert_eq!(line, format!("[{rank}] {}", rank.repeat(5000)));
    }
}

#[test]
fn an_unfinished_last_line_is_printed() {
    let mut job = script(2, &[], "printf 'the end of %s' $CARRACK_RANK");
    let (mut reader, writer) = std::io::pipe().unwrap();
    job.stdout(writer);
    ran(job);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let lines: BTreeSet<_> = text.split_inclusive('\n').collect();
    assert_eq!(lines, BTreeSet::from(["[0] the end of 0\n", "[1] the end of 1\n"]));
}

#[test]
fn a_very_long_line_comes_in_pieces_and_nothing_is_lost() {
    let run = ran(script(1, &[], "head -c 200000 /dev/zero | tr '\\0' x; echo; echo short"));
    let lines: Vec<_> = run.stdout.lines().map(|line| line.strip_prefix("[0] ").unwrap()).collect();
    assert_eq!(
        lines.iter().map(|line| line.len()).collect::<Vec<_>>(),
        [65536, 65536, 65536, 3392, 5]
    );
    assert!(lines[..4].iter().all(|line| line.bytes().all(|byte| byte == b'x')));
}

#[test]
fn rank_0_has_the_launchers_stdin_and_the_others_have_none() {
    let mut job = job(3, &[], &["cat"]);
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"hello\n").unwrap();
    drop(writer);
    job.stdin(reader);
    assert_eq!(succeeded(&ran(job)), "[0] hello\n");
}

#[test]
fn a_rank_inherits_one_descriptor_more_than_a_program_started_directly() {
    let count = "ls /proc/self/fd | wc -l";
    let directly = Command::new("sh").args(["-c", count]).stdin(Stdio::null()).output().unwrap();
    let directly: u32 = String::from_utf8(directly.stdout).unwrap().trim().parse().unwrap();
    let run = ran(script(3, &["--no-tag"], count));
    assert_eq!(lines(&run), BTreeSet::from([(directly + 1).to_string().as_str()]));
}

#[test]
fn a_rank_has_the_users_signals_and_limits_and_not_the_keepers() {
    let show = "cat /proc/self/status; ulimit -n";
    let directly = Command::new("sh").args(["-c", show]).output().unwrap();
    let directly = String::from_utf8(directly.stdout).unwrap();
    let run = ran(script(1, &["--no-tag"], show));
    let signals = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        // Up to 31: the two after it are the C library's own. And without those that `job` sets.
        let set = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];
        let mask = set.into_iter().fold(0x7fff_ffff, |mask, signal| mask & !(1 << (signal - 1)));
        u64::from_str_radix(line.trim(), 16).unwrap() & mask
    };
    for name in ["SigBlk:", "SigIgn:"] {
        assert_eq!(signals(&run.stdout, name), signals(&directly, name), "{name}");
    }
    assert_eq!(run.stdout.lines().last(), directly.lines().last(), "open files");
}

#[test]
fn ranks_are_pinned_one_to_a_cpu_when_asked() {
    let run = ran(script(2, &["--bind", "core"], "grep Cpus_allowed_list /proc/self/status"));
    assert_eq!(run.status.code(), Some(0));
    for line in run.stdout.lines() {
        let cpus = line.split_once('\t').unwrap().1;
        assert!(cpus.parse::<u32>().is_ok(), "one CPU: {line}");
    }
    let run = ran(job(4096, &["--bind", "core", "--timeout", "0.001"], &["true"]));
    assert!(run.stderr.contains("warning: 4096 ranks share"), "{}", run.stderr);
}

#[test]
fn ranks_exchange_values_through_the_launcher_and_meet_at_fences() {
    let run = ran(role(8, "exchange"));
    assert_eq!(run.status.code(), Some(0), "{}{}", run.stdout, run.stderr);
    for rank in 0..8 {
        assert!(run.stdout.contains(&format!("[{rank}] exchanged with 8")), "{}", run.stdout);
    }
}

#[test]
fn a_fence_fails_and_names_the_rank_that_died() {
    let run = ran(role(3, "die"));
    assert_eq!(run.status.code(), Some(137));
    for rank in [0, 2] {
        let told = format!("[{rank}] the fence failed: rank 1 was killed by signal 9");
        assert!(run.stdout.contains(&told), "{}", run.stdout);
    }
}

#[test]
fn a_fence_fails_when_a_rank_has_ended_without_reaching_it() {
    let run = ran(role(3, "leave"));
    assert_eq!(run.status.code(), Some(0), "{}{}", run.stdout, run.stderr);
    for rank in [0, 2] {
        assert!(
            run.stdout.contains(&format!("[{rank}] the fence failed: rank 1 ")),
            "{}",
            run.stdout
        );
    }
}

#[test]
fn a_process_that_a_rank_starts_is_told_that_it_is_no_rank() {
    let test = std::env::current_exe().unwrap();
    // A number that is not open, as for a child to which nothing was passed on.
    let child = format!(
        "CARRACK_BOOTSTRAP_FD=987 exec '{}' --exact launcher::a_rank_in_its_role --nocapture",
        test.display()
    );
    let mut job = script(1, &[], &child);
    job.env(ROLE, "join");
    let run = ran(job);
    assert!(run.stdout.contains("[0] not joined: CARRACK_BOOTSTRAP_FD is 987"), "{}", run.stdout);
}

/// Plays the role of a rank of the jobs above. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let launcher = match FromLauncher::from_env() {
        Ok(launcher) => launcher.expect("started by the launcher"),
        Err(error) => {
            println!("\nnot joined: {error}");
            return;
        }
    };
    match role.as_str() {
        "exchange" => exchange(&launcher),
        "die" | "leave" => {
            // The others are asked to end when a rank dies; here they first tell what they know.
            // SAFETY: ignoring a signal runs no code of ours.
            unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
            launcher.fence().unwrap();
            if launcher.rank() == 1 {
                if role == "die" {
                    kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
                }
                return;
            }
            let error = launcher.fence().unwrap_err();
            assert!(matches!(error, BootstrapError::RankGone { rank: 1, .. }), "{error}");
            println!("\nthe fence failed: {error}");
        }
        role => panic!("no role {role}"),
    }
}

fn exchange(launcher: &FromLauncher) {
    let again = FromLauncher::from_env().unwrap_err();
    assert!(again.to_string().contains("a runtime of this process"), "{again}");
    let value =
        |rank: u32, round: u32| vec![rank as u8 ^ round as u8; 1 + (rank * 8191 + round) as usize];
    for round in 0..5 {
        let key = |rank| format!("test/{round}/{rank}");
        launcher.put(&key(launcher.rank()), &value(launcher.rank(), round)).unwrap();
        for rank in 0..launcher.size() {
            let got = loop {
                if let Some(got) = launcher.get(&key(rank)).unwrap() {
                    break got;
                }
                let fd = launcher.wait_fd().unwrap();
                let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
            };
            assert!(got == value(rank, round), "rank {rank} in round {round}");
        }
        launcher.fence().unwrap();
    }
    println!("\nexchanged with {}", launcher.size());
    launcher.finish().unwrap();
}

/// Descriptors in flight between processes count for all of a user's together, against the number
/// that one may have open. Ranks that come to that limit connect when others have taken theirs.
/// Here others are this test.
#[test]
fn ranks_that_come_to_the_limit_of_descriptors_on_their_way_connect_a_little_later() {
    const LIMIT: usize = 400;
    // Who may do anything knows no such limit.
    let privileges = "-sys_admin,-sys_resource";
    let less = ["setpriv", "--bounding-set", privileges, "--inh-caps", privileges];
    let less = if rustix::process::geteuid().is_root() { &less[..] } else { &["env"] };
    let less = |program: &str| {
        let mut command = Command::new(less[0]);
        command.args(&less[1..]).arg(program);
        command
    };
    match less("true").output() {
        Ok(output) if output.status.success() => {}
        other => return println!("skipped: privileges cannot be given up: {other:?}"),
    }
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (ours, theirs) = rustix::net::socketpair(kind.0, kind.1, kind.2, None).unwrap();
    for _ in 0..=LIMIT / 100 {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let same = [ours.as_fd(); 100];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&same)));
        sendmsg(&ours, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::empty()).unwrap();
    }
    let mut job = less("sh");
    let script = format!(
        "ulimit -n {LIMIT} && exec timeout 100 \"$0\" perf latency --op send --size 8 --seconds \
        0.01"
    );
    job.args(["-c", &script]).arg(carrack());
    let mut job = started(job);
    let warned = std::iter::from_fn(|| job.next_line(Stream::Err, WATCHDOG))
        .any(|line| line.contains("ulimit -n"));
    // What is on its way goes with the sockets.
    drop((ours, theirs));
    succeeded(&job.ends());
    assert!(warned, "it was not at the limit");
}
