//! The client against a launcher that is played by the test.

use crate::bootstrap::protocol::MAX_FRAME;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::thread;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::bootstrap::error::Departure;
use crate::bootstrap::protocol::MAX_VALUE;
use crate::bootstrap::server::Server;
use crate::settings::{GpuChoice, Settings, TransportChoice};
use crate::{CompQueue, Outcome, PostError, Rank, Runtime, Tag};

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn tell(launcher: &OwnedFd, frame: &Frame) {
    send(launcher, &frame.encode(), SendFlags::NOSIGNAL).unwrap();
}

fn hear(launcher: &OwnedFd) -> Frame {
    let mut buffer = vec![0; MAX_FRAME];
    let (len, _) = recv(launcher, &mut buffer[..], RecvFlags::empty()).unwrap();
    Frame::decode(&buffer[..len]).unwrap()
}

fn hello(rank: u32, size: u32) -> Frame {
    Server::new(JobId::from_bytes([3; 16]), size).hello(rank)
}

fn joined() -> (FromLauncher, OwnedFd) {
    let (ours, theirs) = pair();
    tell(&theirs, &hello(1, 3));
    let client = FromLauncher::from_socket(ours, 1, 3).unwrap();
    assert_eq!((client.rank(), client.size()), (1, 3));
    assert_eq!(client.job(), &JobId::from_bytes([3; 16]));
    (client, theirs)
}

fn readable(client: &FromLauncher, within: Duration) -> bool {
    let timeout = Timespec::try_from(within).unwrap();
    let fd = client.wait_fd().unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

const AT_ONCE: Duration = Duration::ZERO;
const WATCHDOG: Duration = Duration::from_secs(60);

#[test]
fn without_any_variable_there_is_no_launcher() {
    assert!(described(None, None, None).unwrap().is_none());
}

#[test]
fn a_partial_or_ill_formed_set_of_variables_is_an_error_that_names_the_variable() {
    let cases = [
        (None, Some("0"), Some("1"), FD_VARIABLE),
        (Some("9"), None, Some("1"), RANK_VARIABLE),
        (Some("9"), Some("0"), None, SIZE_VARIABLE),
        (Some("nine"), Some("0"), Some("1"), FD_VARIABLE),
        (Some("-1"), Some("0"), Some("1"), FD_VARIABLE),
        (Some("4294967295"), Some("0"), Some("1"), FD_VARIABLE),
        (Some("9"), Some("+1"), Some("2"), RANK_VARIABLE),
        (Some("9"), Some("2"), Some("2"), RANK_VARIABLE),
        (Some("9"), Some("0"), Some("0"), SIZE_VARIABLE),
        (Some("9"), Some("0"), Some("4097"), SIZE_VARIABLE),
    ];
    for (fd, rank, size, expected) in cases {
        let error = described(fd, rank, size).unwrap_err();
        assert!(
            matches!(&error, BootstrapError::Variable { name, .. } if *name == expected),
            "{fd:?} {rank:?} {size:?}: {error}"
        );
        assert!(error.to_string().contains("carrack run"), "{error}");
    }
}

#[test]
fn a_greeting_for_another_rank_or_of_another_version_is_refused() {
    let greet = |frame: Frame| {
        let (ours, theirs) = pair();
        tell(&theirs, &frame);
        FromLauncher::from_socket(ours, 1, 3).unwrap_err()
    };
    assert!(matches!(greet(hello(2, 3)), BootstrapError::Variable { name: RANK_VARIABLE, .. }));
    assert!(matches!(greet(hello(1, 4)), BootstrapError::Variable { name: SIZE_VARIABLE, .. }));
    assert!(matches!(greet(Frame::Finished), BootstrapError::Variable { name: FD_VARIABLE, .. }));
    let job = JobId::from_bytes([0; 16]);
    let newer = Frame::Hello { version: VERSION + 1, rank: 1, size: 3, job };
    assert!(matches!(greet(newer), BootstrapError::Version { .. }));
}

#[test]
fn get_asks_once_and_answers_when_the_answer_has_come() {
    let (client, launcher) = joined();
    client.put("mine", b"here").unwrap();
    assert_eq!(hear(&launcher), Frame::Put { key: "mine".into(), value: b"here".into() });
    assert_eq!(client.get("a").unwrap(), None);
    assert_eq!(client.get("a").unwrap(), None);
    assert_eq!(hear(&launcher), Frame::Get { key: "a".into() });
    assert!(!readable(&client, AT_ONCE));
    tell(&launcher, &Frame::Value { key: "a".into(), value: b"1".into() });
    assert!(readable(&client, WATCHDOG));
    assert_eq!(client.get("a").unwrap().unwrap(), b"1");
    assert!(!readable(&client, AT_ONCE));
    assert_eq!(client.get("a").unwrap().unwrap(), b"1", "and again, from memory");
}

#[test]
fn the_descriptor_stays_readable_for_an_answer_that_another_call_took_in() {
    let (client, launcher) = joined();
    assert_eq!(client.get("a").unwrap(), None);
    tell(&launcher, &Frame::Value { key: "a".into(), value: b"1".into() });
    assert_eq!(client.get("b").unwrap(), None, "which empties the socket");
    assert!(readable(&client, AT_ONCE));
    assert_eq!(client.get("a").unwrap().unwrap(), b"1");
    assert!(!readable(&client, AT_ONCE));
}

#[test]
fn put_never_waits_for_a_launcher_that_does_not_read() {
    let (client, launcher) = joined();
    let value = vec![7; MAX_VALUE];
    for number in 0..100 {
        client.put(&format!("{number}"), &value).unwrap();
    }
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            for number in 0..100 {
                let expected = Frame::Put { key: format!("{number}"), value: value.clone() };
                assert_eq!(hear(&launcher), expected);
            }
            assert_eq!(hear(&launcher), Frame::Finished);
        });
        client.finish().unwrap();
        reading.join().unwrap();
    });
}

#[test]
fn a_fence_waits_although_another_thread_empties_the_socket() {
    let (client, launcher) = joined();
    client.get("a").unwrap();
    assert_eq!(hear(&launcher), Frame::Get { key: "a".into() });
    for number in 1..=200 {
        thread::scope(|scope| {
            let fence = scope.spawn(|| client.fence().unwrap());
            assert_eq!(hear(&launcher), Frame::Fence { number });
            tell(&launcher, &Frame::FenceDone { number });
            while !fence.is_finished() {
                client.get("a").unwrap();
            }
        });
    }
}

#[test]
fn a_fence_fails_with_the_name_of_the_rank_that_is_gone() {
    for how in [Departure::Killed(9), Departure::Exited(0), Departure::Finished] {
        let (client, launcher) = joined();
        thread::scope(|scope| {
            let fence = scope.spawn(|| client.fence());
            hear(&launcher);
            tell(&launcher, &Frame::Gone { rank: 2, how });
            let error = fence.join().unwrap().unwrap_err();
            assert!(error.to_string().starts_with("rank 2 "), "{error}");
        });
        assert_eq!(client.get("a").unwrap(), None);
        tell(&launcher, &Frame::Missing { key: "a".into() });
        assert_eq!(client.get("a").is_err(), !how.is_orderly());
    }
}

#[test]
fn a_value_whose_answer_is_on_its_way_is_not_lost_with_its_rank() {
    let (client, launcher) = joined();
    tell(&launcher, &Frame::Gone { rank: 2, how: Departure::Killed(9) });
    for key in ["a", "b"] {
        assert_eq!((client.get(key).unwrap(), client.get(key).unwrap()), (None, None));
    }
    tell(&launcher, &Frame::Value { key: "a".into(), value: b"1".into() });
    tell(&launcher, &Frame::Missing { key: "b".into() });
    assert_eq!(client.get("a").unwrap().unwrap(), b"1");
    assert!(matches!(client.get("b"), Err(BootstrapError::RankGone { rank: 2, .. })));
}

#[test]
fn a_fence_that_was_passed_succeeds_although_a_rank_left_right_after() {
    let (client, launcher) = joined();
    thread::scope(|scope| {
        let fence = scope.spawn(|| client.fence());
        assert_eq!(hear(&launcher), Frame::Fence { number: 1 });
        tell(&launcher, &Frame::FenceDone { number: 1 });
        tell(&launcher, &Frame::Gone { rank: 2, how: Departure::Finished });
        fence.join().unwrap().unwrap();
    });
    for _ in 0..2 {
        let error = client.fence().unwrap_err();
        assert!(matches!(error, BootstrapError::RankGone { rank: 2, .. }), "{error}");
    }
    client.put("last", b"").unwrap();
    assert_eq!(hear(&launcher), Frame::Put { key: "last".into(), value: vec![] }, "and no fence");
}

#[test]
fn a_launcher_that_is_gone_fails_what_needs_it_and_nothing_else() {
    let (client, launcher) = joined();
    client.get("a").unwrap();
    hear(&launcher);
    tell(&launcher, &Frame::Value { key: "a".into(), value: b"1".into() });
    drop(launcher);
    assert_eq!(client.get("a").unwrap().unwrap(), b"1");
    assert!(matches!(client.get("b"), Err(BootstrapError::LauncherGone)));
    assert!(matches!(client.put("b", b""), Err(BootstrapError::LauncherGone)));
    assert!(matches!(client.fence(), Err(BootstrapError::LauncherGone)));
    assert!(readable(&client, AT_ONCE), "so that no client sleeps for ever");
}

#[test]
fn a_refusal_is_reported_with_its_reason_even_after_the_hang_up() {
    let (client, launcher) = joined();
    tell(&launcher, &Frame::Refused { why: "because".into() });
    drop(launcher);
    let error = client.fence().unwrap_err();
    assert!(matches!(&error, BootstrapError::Refused { why } if why == "because"), "{error}");
}

#[test]
fn a_bad_frame_is_an_error() {
    let (client, launcher) = joined();
    send(&launcher, &[200, 1, 2], SendFlags::NOSIGNAL).unwrap();
    assert!(matches!(client.get("a"), Err(BootstrapError::BadFrame(_))));
}

/// Starts a rank that no other one has reached so far.
fn started(client: FromLauncher) -> Runtime {
    let settings =
        Settings::builder().transports(vec![TransportChoice::Loopback]).gpu(GpuChoice::None);
    let settings = settings.build_from_vars::<String, String>([]).unwrap();
    Runtime::builder().settings(settings).bootstrap(Box::new(client)).start().unwrap()
}

#[test]
fn a_message_to_a_rank_that_has_not_started_fails_at_the_launchers_end_also_after_a_loss() {
    let (client, launcher) = joined();
    let runtime = started(client);
    let mut send = runtime.post_send(Rank(0), b"x", Tag(1));
    assert!(matches!(send.try_submit(), Ok(Outcome::Retry(_))));
    tell(&launcher, &Frame::Gone { rank: 2, how: Departure::Disconnected });
    assert!(matches!(send.try_submit(), Ok(Outcome::Retry(_))), "rank 0 may still come");
    drop(launcher);
    let error = send.try_submit().unwrap_err();
    assert!(matches!(error, PostError::Bootstrap { rank: Rank(0), .. }), "{error}");
}

#[test]
fn a_receive_from_a_rank_that_is_lost_before_it_has_started_fails() {
    let (client, launcher) = joined();
    let runtime = started(client);
    let ended = CompQueue::new(2);
    for rank in [0, 2] {
        let receive = runtime.post_recv(Rank(rank), vec![0; 8], Tag(1));
        receive.comp(&ended).submit().unwrap();
    }
    let status = thread::scope(|scope| {
        scope.spawn(|| {
            tell(&launcher, &Frame::Gone { rank: 2, how: Departure::Killed(9) });
            let mut asked = 0;
            while asked < 2 {
                if let Frame::Get { key } = hear(&launcher) {
                    tell(&launcher, &Frame::Missing { key });
                    asked += 1;
                }
            }
        });
        runtime.wait_for(WATCHDOG, || !ended.is_empty()).unwrap();
        ended.pop().unwrap()
    });
    assert_eq!(status.rank, Rank(2));
    let error = status.ok().unwrap_err().to_string();
    assert!(error.contains("was killed by signal 9"), "{error}");
    assert!(ended.is_empty() && runtime.peer_down(Rank(0)).is_none(), "rank 0 may still come");
}
