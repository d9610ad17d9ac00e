//! Children of a rank. A forked child gets an error from the parent's runtime, and does it no
//! harm. An executed program gets none of the runtime's descriptors.

#![expect(unsafe_code, reason = "a process forks")]

use crate::support::ranks::{Ranks, Role, listing};
use crate::support::sink::Sink;
use crate::support::{Job, OverShm, OverSimulatedNic, OverTcp, Watchdog, pattern, rng, until};
use carrack::buffer::Region;
use carrack::settings::SettingsBuilder;
use carrack::{
    AwaitError, CollectiveError, OpError, PostError, ProgressError, Rank, RemoteComp, RemoteKey,
    Runtime, Tag, WaitError,
};
use rand::Rng;
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid,
};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::Duration;

#[test]
fn a_forked_child_is_told_so_and_its_parent_goes_on() {
    let _watchdog = Watchdog::over("fork");
    for leaves in [0, 1] {
        Ranks::start("ordeals::fork", 2, &[rng().random(), leaves]).succeed();
    }
}

#[test]
fn a_forked_child_connects_to_no_peer_in_its_parents_name() {
    let _watchdog = Watchdog::over("unlinked");
    Ranks::start("ordeals::unlinked", 2, &[rng().random()]).succeed();
}

#[test]
fn a_rank_that_has_ended_is_gone_for_who_calls_it_though_a_child_of_it_lives() {
    let _watchdog = Watchdog::over("leaves");
    for transport in 0..SETTINGS.len() as u64 {
        Ranks::start("ordeals::leaves", 2, &[transport]).succeed();
    }
}

#[test]
fn a_program_that_is_executed_gets_no_descriptor_of_the_runtime() {
    let _watchdog = Watchdog::over("exec");
    Ranks::start("ordeals::exec", 2, &[]).succeed();
}

/// Runs `child` in a fork of this process, which leaves without a word, or as a program that
/// returns does.
pub(crate) fn forked(child: impl FnOnce()) -> ExitStatus {
    // SAFETY: the child has this thread alone. Its calls are the subject of the test, and the C
    // library's allocator is made to work in a fork.
    match unsafe { libc::fork() } {
        0 => {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            // SAFETY: ends the child without the parent's clean-up.
            unsafe { libc::_exit(if ended.is_ok() { 42 } else { 1 }) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: waits for the child just made, and writes an integer.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            ExitStatus::from_raw(status)
        }
    }
}

fn exchange(role: &Role, runtime: &Runtime, round: u64) {
    let (ranks, other) = ([runtime.clone()], Rank(1 - role.rank));
    for number in 0..50 {
        let seed = role.words[0] ^ round << 32 ^ number;
        let message = |from: u32| pattern(seed << 1 | u64::from(from), (seed % 30_000) as usize);
        let arrived = Sink::keeping();
        let mut receive = runtime.post_recv(other, vec![0; 30_000], Tag(number)).comp(&arrived);
        receive.submit().unwrap();
        runtime.post_send(other, message(role.rank), Tag(number)).submit().unwrap();
        let status = arrived.one(&ranks);
        assert!(status.bytes() == Some(&message(other.0)[..]), "message {number} of round {round}");
    }
}

pub(crate) fn rank(role: &Role) {
    let runtime = role.runtime(OverShm::settings());
    let [mapped, owned] = [runtime.allocate(64).unwrap(), Region::host(64)];
    let registered = [&mapped, &owned].map(|region| runtime.register_memory(region).unwrap());
    let theirs = [0, 1].map(|at| {
        let all = runtime.allgather(&registered[at].remote_key().to_bytes()).unwrap();
        RemoteKey::from_bytes(&all[1 - role.rank as usize]).unwrap()
    });
    exchange(role, &runtime, 0);
    if role.rank == 0 {
        // Of the last handle that there is the child's copy is dropped, when it leaves as programs
        // do.
        let leaves = role.words[1] == 1;
        let cancelled = Sink::keeping();
        let mut receive = runtime.post_recv(Rank(1), vec![0], Tag(7)).comp(&cancelled);
        receive.submit().unwrap();
        let ticket = receive.ticket().unwrap();
        drop(receive);
        let mut kept = Some((runtime, registered, theirs));
        let status = forked(|| {
            let (runtime, registered, theirs) = kept.take().unwrap();
            refuses_everything(&runtime, &theirs);
            assert!(matches!(runtime.cancel(&ticket), Err(ProgressError::Forked)));
            let probed = runtime.probe(Rank(1), Tag(7)).look();
            assert!(matches!(probed, Err(PostError::Forked)), "{probed:?}");
            if leaves {
                drop((registered, runtime));
            } else {
                std::mem::forget((registered, runtime));
            }
        });
        assert_eq!(status.code(), Some(42), "the child: {status}");
        let (runtime, registered, theirs) = kept.unwrap();
        assert!(runtime.cancel(&ticket).unwrap());
        goes_on(role, &runtime, &theirs);
        drop(registered);
    } else {
        goes_on(role, &runtime, &theirs);
    }
    for region in [&mapped, &owned] {
        assert_eq!(
            region.fetch_add(8, 0),
            Ok(7),
            "the other's addition, and nothing of its child's"
        );
    }
}

fn goes_on(role: &Role, runtime: &Runtime, theirs: &[RemoteKey; 2]) {
    exchange(role, runtime, 1);
    for rmr in theirs {
        assert!(
            runtime.post_fetch_add(Rank(1 - role.rank), rmr, 8, 7).wait().unwrap().error.is_none()
        );
    }
    assert!(runtime.peer_down(Rank(1 - role.rank)).is_none());
    runtime.barrier().unwrap();
}

fn refuses_everything(runtime: &Runtime, theirs: &[RemoteKey; 2]) {
    let other = Rank(1);
    let sink = Sink::keeping();
    let is_forked = |what: &str, outcome: Result<carrack::Outcome, PostError>| match outcome {
        Err(PostError::Forked) => {}
        other => panic!("{what}: {other:?}"),
    };
    let waits = |what: &str, outcome: Result<carrack::Status, AwaitError>| match outcome {
        Err(AwaitError::Post(PostError::Forked)) => {}
        other => panic!("{what}: {other:?}"),
    };
    is_forked("a send", runtime.post_send(other, b"x", Tag(1)).try_submit());
    is_forked("an owned send", runtime.post_send(other, vec![1; 100], Tag(1)).try_submit());
    is_forked(
        "a large send",
        runtime.post_send(other, vec![1; 100_000], Tag(1)).comp(&sink).try_submit(),
    );
    waits("a waiting send", runtime.post_send(other, vec![1; 100], Tag(1)).wait());
    is_forked("a send to itself", runtime.post_send(Rank(0), b"x", Tag(1)).try_submit());
    is_forked(
        "a send that may wait",
        runtime.post_send(other, b"x", Tag(1)).submit().map(|()| carrack::Outcome::Posted),
    );
    is_forked("an active message", runtime.post_am(other, b"x", RemoteComp(1)).try_submit());
    is_forked("a receive", runtime.post_recv(other, vec![0; 8], Tag(1)).comp(&sink).try_submit());
    waits("a waiting receive", runtime.post_recv(other, vec![0; 8], Tag(1)).wait());
    for rmr in theirs {
        is_forked("a put", runtime.post_put(other, &[1; 8], rmr, 8).comp(&sink).try_submit());
        is_forked("a get", runtime.post_get(other, vec![0; 8], rmr, 8).comp(&sink).try_submit());
        is_forked("an addition", runtime.post_fetch_add(other, rmr, 8, 1).comp(&sink).try_submit());
        waits("a waiting addition", runtime.post_fetch_add(other, rmr, 8, 1).wait());
    }
    is_forked("a flush", runtime.post_flush(other).comp(&sink).try_submit());
    assert!(matches!(runtime.progress(), Err(ProgressError::Forked)), "{:?}", runtime.progress());
    assert!(matches!(runtime.progress_all(), Err(ProgressError::Forked)));
    let waited = runtime.wait_for(Duration::from_secs(1), || false);
    assert!(matches!(waited, Err(WaitError::Progress(ProgressError::Forked))), "{waited:?}");
    let world = runtime.world();
    let collectives = [
        ("a barrier", world.barrier()),
        ("an allgather", world.allgather(b"x").map(drop)),
        ("a broadcast", world.broadcast(Rank(0), b"x").map(drop)),
    ];
    for (what, ended) in collectives {
        let is_forked = matches!(
            ended,
            Err(CollectiveError::Wait { cause: WaitError::Progress(ProgressError::Forked), .. })
        );
        assert!(is_forked, "{what}: {ended:?}");
    }
    let awaited = runtime.block_on(world.barrier_async());
    assert!(matches!(awaited, Err(WaitError::Progress(ProgressError::Forked))), "{awaited:?}");
    assert_eq!(sink.count(), 0);
}

/// Runs the role: rank 0 forks before the ranks are linked. The peer would take the child for the
/// rank, and its end for the rank's.
pub(crate) fn unlinked(role: &Role) {
    let runtime = role.runtime(OverShm::settings());
    if role.rank == 0 {
        role.told("here", 1);
        let status = forked(|| {
            assert!(runtime.barrier().is_err());
            // Long enough for the peer to let it in.
            std::thread::sleep(Duration::from_millis(200));
        });
        assert_eq!(status.code(), Some(42), "the child: {status}");
        role.says("forked");
    } else {
        role.says("here");
        // What has knocked is let in.
        until(std::slice::from_ref(&runtime), || role.has_said("forked", 0));
    }
    exchange(role, &runtime, 0);
    runtime.barrier().unwrap();
}

const SETTINGS: [fn() -> SettingsBuilder; 3] =
    [OverShm::settings, OverTcp::settings, OverSimulatedNic::settings];

/// Runs the role: a rank leaves a child, which has the sockets on which others reach the rank.
pub(crate) fn leaves_a_child(role: &Role) {
    let runtime = role.runtime(SETTINGS[role.words[0] as usize]());
    if role.rank == 1 {
        role.told("ended", 0);
        let mut send = runtime.post_send(Rank(0), b"x", Tag(1)).deadline(Duration::from_secs(5));
        let outcome = send.wait();
        let is_down = matches!(
            &outcome,
            Err(AwaitError::Post(PostError::PeerDown { .. })
                | AwaitError::Op(OpError::PeerDown { .. }))
        );
        role.says("seen");
        return assert!(is_down, "{outcome:?}");
    }
    // SAFETY: the child has this thread alone, and only sleeps until the parent ends it.
    let child = unsafe { libc::fork() };
    if child == 0 {
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        loop {
            std::thread::sleep(Duration::from_secs(600));
        }
    }
    drop(runtime);
    role.says("ended");
    role.told("seen", 1);
    let child = Pid::from_raw(child);
    kill_process(child.unwrap(), Signal::KILL).unwrap();
    waitpid(child, WaitOptions::empty()).unwrap();
}

pub(crate) fn executes(role: &Role) {
    let seen = || {
        let listed = Command::new("ls").args(["-l", "/proc/self/fd"]).output().unwrap();
        String::from_utf8(listed.stdout).unwrap()
    };
    let (before, inherited) = (listing("/proc/self/fd").len(), seen());
    let runtime = role.runtime(OverShm::settings());
    let region = runtime.allocate(100).unwrap();
    let registered = runtime.register_memory(&region).unwrap();
    runtime.barrier().unwrap();
    assert!(
        listing("/proc/self/fd").len() > before + 5,
        "there are descriptors that could be given away"
    );
    let listed = seen();
    assert_eq!(listed.matches(" -> ").count(), inherited.matches(" -> ").count(), "{listed}");
    for ours in ["carrack-", "eventfd", "eventpoll", "socket", "pidfd"] {
        let count = |text: &str| text.matches(ours).count();
        assert_eq!(count(&listed), count(&inherited), "{listed}");
    }
    runtime.barrier().unwrap();
    drop(registered);
}
