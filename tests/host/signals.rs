//! SIGUSR1: a waiting rank prints its pending operations, and loses none of them.

use crate::support::children::{Watched as _, limit, started};
use crate::support::sink::Sink;
use crate::support::*;
use ::children::{Running, Stream};
use carrack::buffer::Region;
use carrack::settings::DumpChoice;
use carrack::{Counter, Handler, Mr, Rank, RemoteKey, Runtime, Status, Tag};
use carrack_simulators::nic::go_round;
use parking_lot::Mutex;
use rustix::process::Signal;
use signal_hook::consts::SIGUSR1;
use std::process::{Command, Stdio};
use std::sync::Arc;

const ROLE: &str = "SIGNALS_ROLE";

/// The child: waits for a message that never comes, or asks itself what it waits for.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = std::env::var_os(ROLE) else { return };
    let runtime = Runtime::start().unwrap();
    let never = Counter::new();
    let recv =
        runtime.post_recv(Rank(0), vec![0; 21], Tag(4711)).comp(&never).try_submit().unwrap();
    assert!(recv.is_posted());
    if role == "asks itself" {
        signal_hook::low_level::raise(SIGUSR1).unwrap();
        runtime.progress().unwrap();
        return println!("\nwent on");
    }
    println!("\nready");
    runtime.wait(|| never.get() > 0).unwrap();
}

#[test]
fn a_rank_that_waits_prints_what_is_pending_when_it_is_asked_by_a_signal() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "signals::a_rank_in_its_role", "--nocapture"]).env(ROLE, "waits");
    let mut rank = started(command);
    rank.hears("ready");
    // Twice: it goes on after the first.
    for _ in 0..2 {
        rank.signal(Signal::USR1);
        let mut text = String::new();
        while !text.contains("tag 4711") {
            let line = rank.next_line(Stream::Err, limit());
            text.push_str(&line.unwrap_or_else(|| panic!("no more than: {text}")));
            text.push('\n');
        }
        assert!(text.contains("rank 0 of 1: 1 operations pending"), "{text}");
        assert!(text.contains("receive, rank 0, tag 4711, 21 B: waits for its message"), "{text}");
    }
}

#[test]
fn a_rank_whose_stderr_is_closed_goes_on_when_it_is_asked_what_is_pending() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "signals::a_rank_in_its_role", "--nocapture"])
        .env(ROLE, "asks itself");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command.stdout(Stdio::piped()).stderr(writer);
    let rank = Running::start(&mut command).unwrap().ends_with_all();
    assert!(rank.status.success() && rank.stdout.contains("went on"), "{}", rank.stdout);
}

/// Has a handler of rank 0 end a registration that rank 1's NIC has used. Returns `true` if the
/// memory is given back.
fn is_given_back(signalled: bool) -> bool {
    let settings = OverSimulatedNic::settings().dump(DumpChoice::Usr1);
    let ranks: [Runtime; 2] = OverSimulatedNic::ranks_with(2, settings).try_into().unwrap();
    connect(&ranks);
    let [zero, one] = &ranks;
    let region = Region::host(1 << 16);
    let weak = region.downgrade();
    let registered: Arc<Mutex<Option<Mr>>> = Arc::default();
    let mr = zero.register_memory(&region).unwrap();
    let rmr = RemoteKey::from_bytes(&mr.remote_key().to_bytes()).unwrap();
    *registered.lock() = Some(mr);
    drop(region);
    let ends = {
        let registered = registered.clone();
        Handler::new(move |_: Status| drop(registered.lock().take()))
    };
    let name = zero.register_comp(&ends).unwrap();
    let sink = Sink::keeping();
    one.post_put(Rank(0), &[7; 4096], &rmr, 0).comp(&sink).submit().unwrap();
    sink.one(&ranks);
    // Rank 0 makes no progress meanwhile, so the signal is pending when its handler is called.
    while one.post_am(Rank(0), b"end it", name).try_submit().unwrap().is_retry() {
        one.progress().unwrap();
    }
    for _ in 0..10 {
        one.progress().unwrap();
        go_round();
    }
    if signalled {
        signal_hook::low_level::raise(SIGUSR1).unwrap();
    }
    zero.progress().unwrap();
    assert!(registered.lock().is_none(), "the handler was not called by the first progress");
    happens(&ranks, LIMIT / 10, || {
        go_round();
        weak.is_gone()
    })
}

#[test]
fn a_signal_loses_nothing_that_progress_has_to_do() {
    let _watchdog = Watchdog::over("a_signal_loses_nothing_that_progress_has_to_do");
    assert!(is_given_back(false));
    assert!(is_given_back(true), "rank 1 is never told that the registration has ended");
}
