//! Ranks of one process, over real connections.

use std::collections::HashSet;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};

use super::join::{FRAMES, LIMITS, PROTOCOL};
use super::*;
use crate::bootstrap::error::Departure;
use crate::bootstrap::protocol::MAX_VALUE;
use crate::bootstrap::{BootstrapError, InProcess};
use carrack_transports::net::greeting::{Carrier as _, Greeting, Progress};
use carrack_transports::net::proof::Role;
use carrack_transports::net::streams::TcpChannel;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

/// A watchdog that turns a hang into a failure.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a port that no other test of this process gets.
fn free_port(host: &str) -> u16 {
    static GIVEN: Mutex<Vec<u16>> = Mutex::new(Vec::new());
    let mut given = GIVEN.lock();
    loop {
        let port = TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
        if !given.contains(&port) {
            given.push(port);
            return port;
        }
    }
}

fn invitation(rank: u32, size: u32, port: u16) -> Invitation {
    let key = JobKey::of_secret(b"a secret for tests");
    Invitation {
        rank,
        size,
        place_on_node: rank,
        hosts: vec!["127.0.0.1".into()],
        port,
        key,
        restart: 0,
        patience: PATIENCE,
    }
}

/// Raises this process's limit of descriptors. Some hundred ranks in a process need more
/// descriptors than many a shell allows at first.
fn allow_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Joins the ranks of a job, which come all at once, and returns them.
fn job_at(host: &str, size: u32) -> Vec<FromEnvironment> {
    allow_descriptors();
    let port = free_port(host);
    let join = |rank| {
        let invitation = Invitation { hosts: vec![host.into()], ..invitation(rank, size, port) };
        thread::spawn(move || FromEnvironment::join(&invitation).unwrap())
    };
    let joining: Vec<_> = (0..size).map(join).collect();
    joining.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn job(size: u32) -> Vec<FromEnvironment> {
    job_at("127.0.0.1", size)
}

/// Polls and sleeps, as a program does.
fn wait_for(rank: &dyn Bootstrap, key: &str) -> Result<Vec<u8>, BootstrapError> {
    loop {
        if let Some(value) = rank.get(key)? {
            return Ok(value);
        }
        match rank.wait_fd() {
            Some(fd) => drop(poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap()),
            None => thread::yield_now(),
        }
    }
}

/// Returns the value that was put before a rank was lost.
fn still_there(rank: &dyn Bootstrap, key: &str) -> Vec<u8> {
    wait_for(rank, key).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs `body` for each rank on a thread of its own, and finishes the rank.
fn each<B: Bootstrap>(ranks: Vec<B>, body: impl Fn(&B) + Sync) {
    thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(|| {
                let rank = rank;
                body(&rank);
                rank.finish().unwrap();
            });
        }
    });
}

/// Checks the contract of every bootstrap.
fn conforms<B: Bootstrap>(ranks: Vec<B>) {
    let size = ranks.len() as u32;
    let numbers: Vec<u32> = ranks.iter().map(Bootstrap::rank).collect();
    assert_eq!(numbers, (0..size).collect::<Vec<_>>());
    assert!(ranks.iter().all(|rank| rank.size() == size && rank.job() == ranks[0].job()));
    each(ranks, |rank| {
        let me = rank.rank();
        assert!(matches!(rank.put(&"k".repeat(257), b""), Err(BootstrapError::TooLarge { .. })));
        assert!(matches!(rank.put("k", &[0; MAX_VALUE + 1]), Err(BootstrapError::TooLarge { .. })));
        rank.put(&format!("early/{me}"), &me.to_le_bytes()).unwrap();
        rank.put(&format!("early/{me}"), &me.to_le_bytes()).unwrap();
        rank.put("common", b"the same").unwrap();
        for round in 0..3_u32 {
            rank.put(&format!("{round}/{me}"), &vec![round as u8; 1000 + me as usize]).unwrap();
            rank.fence().unwrap();
            for other in 0..size {
                let value = wait_for(rank, &format!("{round}/{other}")).unwrap();
                assert_eq!(value, vec![round as u8; 1000 + other as usize]);
            }
        }
        // Asked for before it is there.
        let next = (me + 1) % size;
        assert!(
            next == me
                || rank.get(&format!("late/{next}")).unwrap().is_none_or(|late| late == b"late")
        );
        rank.put(&format!("late/{me}"), b"late").unwrap();
        assert_eq!(wait_for(rank, &format!("late/{next}")).unwrap(), b"late");
        assert_eq!(wait_for(rank, &format!("early/{next}")).unwrap(), next.to_le_bytes());
        assert_eq!(wait_for(rank, "common").unwrap(), b"the same");
    });
}

#[test]
fn ranks_in_one_process_conform() {
    for size in [1, 2, 17] {
        conforms(InProcess::job(size).unwrap());
    }
}

#[test]
fn ranks_of_a_store_conform() {
    for size in [1, 2, 3, 17, 18, 64] {
        conforms(job(size));
    }
}

#[test]
fn ranks_of_a_store_conform_over_ipv6_and_by_name() {
    if TcpListener::bind(("::1", 0)).is_ok() {
        conforms(job_at("::1", 3));
    }
    conforms(job_at("localhost", 19));
}

#[test]
fn two_jobs_with_one_secret_are_two_jobs() {
    let jobs = [job(1), job(2), job(2)];
    let ids: HashSet<_> = jobs.iter().map(|ranks| ranks[0].job().clone()).collect();
    assert_eq!(ids.len(), 3);
}

#[test]
fn three_hundred_ranks_start_and_end() {
    const SIZE: u32 = 300;
    let ranks = job(SIZE);
    each(ranks, |rank| {
        rank.put(&format!("address/{}", rank.rank()), b"here").unwrap();
        rank.fence().unwrap();
        wait_for(rank, &format!("address/{}", (rank.rank() + 1) % SIZE)).unwrap();
        wait_for(rank, "address/0").unwrap();
        rank.fence().unwrap();
    });
}

/// Checks that a fence of all these ranks reports the loss.
fn told(ranks: &[FromEnvironment], lost: u32, expected: Departure) {
    for rank in ranks {
        let calls = [rank.fence(), rank.check(lost)];
        // Nothing of the lost rank itself is read any more.
        let own = (rank.rank() == lost).then(|| [rank.put("a", b""), rank.check(0), rank.check(2)]);
        for call in calls.into_iter().chain(own.into_iter().flatten()) {
            let error = call.unwrap_err();
            let BootstrapError::RankGone { rank, how } = error else { panic!("{error}") };
            assert_eq!((rank, how), (lost, expected));
        }
    }
    thread::scope(|scope| ranks.iter().for_each(|rank| drop(scope.spawn(|| rank.finish()))));
}

#[test]
fn a_rank_with_another_secret_is_refused_by_name_and_all_are_told_at_once() {
    let port = free_port("127.0.0.1");
    let ranks = [0, 2].map(|rank| FromEnvironment::join(&invitation(rank, 4, port)).unwrap());
    let wrong =
        Invitation { key: JobKey::of_secret(b"another secret, too"), ..invitation(1, 4, port) };
    let error = FromEnvironment::join(&wrong).unwrap_err().to_string();
    assert!(
        error.contains(&format!("127.0.0.1:{port}")) && error.contains("CARRACK_JOB_SECRET"),
        "{error}"
    );
    // One that comes only now is told, too.
    let late = FromEnvironment::join(&invitation(3, 4, port)).unwrap();
    let [zero, two] = ranks;
    told(&[zero, two, late], 1, Departure::OtherSecret);
}

#[test]
fn a_rank_that_starts_twice_is_refused_by_name_and_all_are_told_at_once() {
    let port = free_port("127.0.0.1");
    let ranks = [0, 1].map(|rank| FromEnvironment::join(&invitation(rank, 3, port)).unwrap());
    let error = FromEnvironment::join(&invitation(1, 3, port)).unwrap_err().to_string();
    assert!(error.contains("rank 1 has come before, from 127.0.0.1"), "{error}");
    let two = FromEnvironment::join(&invitation(2, 3, port)).unwrap();
    let [zero, one] = ranks;
    told(&[zero, one, two], 1, Departure::CameTwice);
}

#[test]
fn a_rank_of_another_size_is_refused_by_name_and_all_are_told_at_once() {
    let port = free_port("127.0.0.1");
    let ranks = [0, 1].map(|rank| FromEnvironment::join(&invitation(rank, 3, port)).unwrap());
    let error = FromEnvironment::join(&invitation(2, 4, port)).unwrap_err().to_string();
    assert!(error.contains("WORLD_SIZE=4"), "{error}");
    told(&ranks, 2, Departure::OtherSize);
    // Of several that are missing the one that came is named.
    let port = free_port("127.0.0.1");
    let zero = FromEnvironment::join(&invitation(0, 4, port)).unwrap();
    FromEnvironment::join(&invitation(3, 8, port)).unwrap_err();
    told(&[zero], 3, Departure::OtherSize);
    // The other node counts a rank for its own that is there: ranks 2 and 3 will never come.
    let port = free_port("127.0.0.1");
    let ranks = [0, 1].map(|rank| FromEnvironment::join(&invitation(rank, 4, port)).unwrap());
    let error = FromEnvironment::join(&invitation(1, 2, port)).unwrap_err().to_string();
    assert!(error.contains("WORLD_SIZE=2"), "{error}");
    for rank in &ranks {
        rank.fence().unwrap_err();
        for missing in [2, 3] {
            let error = rank.check(missing).unwrap_err();
            let BootstrapError::RankGone { rank, how } = error else { panic!("{error}") };
            assert_eq!((rank, how), (missing, Departure::OtherSize));
        }
        rank.check(1).unwrap();
    }
    told(&ranks, 2, Departure::OtherSize);
}

#[test]
fn a_process_of_an_earlier_start_of_the_job_is_refused_and_the_job_goes_on() {
    let port = free_port("127.0.0.1");
    let of = |rank, restart| Invitation { restart, ..invitation(rank, 2, port) };
    let zero = FromEnvironment::join(&of(0, 1)).unwrap();
    let error = FromEnvironment::join(&of(1, 0)).unwrap_err().to_string();
    assert!(error.contains("another run of the job"), "{error}");
    let one = FromEnvironment::join(&of(1, 1)).unwrap();
    each(vec![zero, one], |rank| rank.fence().unwrap());
}

#[test]
fn a_second_rank_0_is_refused_and_all_are_told_at_once() {
    let port = free_port("127.0.0.1");
    let ranks = [0, 1].map(|rank| FromEnvironment::join(&invitation(rank, 3, port)).unwrap());
    let error = FromEnvironment::join(&invitation(0, 3, port)).unwrap_err();
    assert!(matches!(error, BootstrapError::NotAdmitted { .. }), "{error}");
    assert!(error.to_string().contains("rank 0 is there already"), "{error}");
    let two = FromEnvironment::join(&invitation(2, 3, port)).unwrap();
    let [zero, one] = ranks;
    told(&[zero, one, two], 0, Departure::CameTwice);
}

#[test]
fn a_complete_job_goes_on_when_one_of_its_ranks_is_started_again() {
    let port = free_port("127.0.0.1");
    let ranks = [0, 1].map(|rank| FromEnvironment::join(&invitation(rank, 2, port)).unwrap());
    for again in [0, 1] {
        let error = FromEnvironment::join(&invitation(again, 2, port)).unwrap_err();
        assert!(matches!(error, BootstrapError::NotAdmitted { .. }), "{error}");
    }
    each(ranks.into(), |rank| rank.fence().unwrap());
}

#[test]
fn a_rank_that_comes_after_the_end_of_a_rank_0_that_gave_up_is_told_why() {
    let port = free_port("127.0.0.1");
    let ranks = [0, 1].map(|rank| FromEnvironment::join(&invitation(rank, 3, port)).unwrap());
    FromEnvironment::join(&invitation(1, 3, port)).unwrap_err();
    let [zero, _one] = ranks;
    let ending = thread::spawn(move || drop(zero));
    let two = FromEnvironment::join(&invitation(2, 3, port)).unwrap();
    told(&[two], 1, Departure::CameTwice);
    ending.join().unwrap();
}

#[test]
fn a_rank_0_that_reaches_itself_by_its_address_is_no_second_one() {
    let port = free_port("127.0.0.1");
    let zero = FromEnvironment::join(&invitation(0, 2, port)).unwrap();
    let one = join::join(&invitation(1, 2, port)).unwrap();
    assert!(join::twin(&invitation(0, 2, port), &one.salt, |_| true).is_none());
    drop(one);
    told(&[zero], 1, Departure::Disconnected);
}

#[test]
fn a_port_that_is_taken_by_another_job_or_program_is_an_error_that_names_the_setting() {
    let port = free_port("127.0.0.1");
    let zero = FromEnvironment::join(&invitation(0, 2, port)).unwrap();
    let key = JobKey::of_secret(b"the secret of another job");
    let other = Invitation { key, ..invitation(0, 2, port) };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = Invitation {
        patience: Duration::from_millis(50),
        ..invitation(0, 2, listener.local_addr().unwrap().port())
    };
    for taken in [other, silent] {
        let error = FromEnvironment::join(&taken).unwrap_err();
        assert!(matches!(error, BootstrapError::Listen { .. }), "{error}");
        assert!(error.to_string().contains("CARRACK_PORT"), "{error}");
    }
    // The job that has the port goes on.
    let one = FromEnvironment::join(&invitation(1, 2, port)).unwrap();
    each(vec![zero, one], |rank| rank.fence().unwrap());
}

#[test]
fn ranks_that_come_before_rank_0_wait_for_it() {
    let port = free_port("127.0.0.1");
    thread::scope(|scope| {
        let early: Vec<_> = (1..4)
            .map(|rank| {
                scope.spawn(move || FromEnvironment::join(&invitation(rank, 4, port)).unwrap())
            })
            .collect();
        // No claim depends on this: it only makes it likely that they come first.
        thread::sleep(Duration::from_millis(50));
        let zero = FromEnvironment::join(&invitation(0, 4, port)).unwrap();
        let others = early.into_iter().map(|rank| rank.join().unwrap());
        each(std::iter::once(zero).chain(others).collect(), |rank| rank.fence().unwrap());
    });
}

#[test]
fn a_rank_0_that_does_not_come_is_an_error_that_names_the_address() {
    let port = free_port("127.0.0.1");
    // The pauses between tries double, and the fifth would pass the deadline.
    let hasty = Invitation { patience: Duration::from_millis(250), ..invitation(1, 2, port) };
    let begun = Instant::now();
    let error = FromEnvironment::join(&hasty).unwrap_err();
    assert!(begun.elapsed() >= hasty.patience, "it gave up after {:?}", begun.elapsed());
    assert!(matches!(error, BootstrapError::NotReached { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("refused"), "{error}");
    let lost = Invitation { hosts: vec!["no.such.name.invalid".into()], ..hasty };
    let error = FromEnvironment::join(&lost).unwrap_err().to_string();
    assert!(error.contains("cannot be resolved"), "{error}");
}

#[test]
fn another_program_on_the_port_is_told_from_a_rank() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    thread::scope(|scope| {
        let joining = scope.spawn(|| FromEnvironment::join(&invitation(1, 2, port)).unwrap_err());
        let (mut caller, _) = other.accept().unwrap();
        caller.write_all(b"SSH-2.0-Other").unwrap();
        let error = joining.join().unwrap();
        assert!(matches!(error, BootstrapError::NotAdmitted { .. }), "{error}");
        assert!(error.to_string().contains("no rank of Carrack's"), "{error}");
    });
}

#[test]
fn pending_connections_delay_no_rank() {
    allow_descriptors();
    let port = free_port("127.0.0.1");
    let zero = FromEnvironment::join(&invitation(0, 3, port)).unwrap();
    let caller = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    // More than may be pending, which say nothing, or one byte of the right beginning.
    let silent: Vec<_> = (0..1100).map(|_| caller()).collect();
    silent.iter().step_by(2).for_each(|mut caller| drop(caller.write_all(b"c")));
    let mut browser = caller();
    browser.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let one = FromEnvironment::join(&invitation(1, 3, port)).unwrap();
    let mut answer = Vec::new();
    let _ = browser.read_to_end(&mut answer);
    assert!(answer.len() <= 100, "a pending connection is told only what every caller is");
    let two = FromEnvironment::join(&invitation(2, 3, port)).unwrap();
    each(vec![zero, one, two], |rank| rank.fence().unwrap());
    drop(silent);
}

/// Comes as rank 1, and then says what it likes.
fn impostor(size: u32, port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut channel = TcpChannel::over(stream.try_clone().unwrap(), LIMITS).unwrap();
    let me = invitation(1, size, port);
    let claim = join::claim(&me, &[0; 16]);
    let mut greeting = Greeting::new(Role::Dialer, PROTOCOL, &me.key.key(), claim).unwrap();
    while !matches!(greeting.advance(&mut channel).unwrap(), Progress::Proven(_)) {
        thread::yield_now();
    }
    channel.set_limits(FRAMES);
    while channel.hear(1000).unwrap().is_none() {
        thread::yield_now();
    }
    stream.set_nonblocking(false).unwrap();
    stream
}

#[test]
fn bad_frames_and_half_ones_cost_their_sender_its_place_and_other_ranks_nothing() {
    let cases: [(&[u8], Departure); 5] = [
        (b"", Departure::Disconnected),
        (&[200, 0, 0, 0, 1], Departure::Disconnected),
        (&[0xff; 8], Departure::Misbehaved),
        (&[1, 0, 0, 0, 99], Departure::Misbehaved),
        // Only the other way: a fence that has ended.
        (&[9, 0, 0, 0, 6, 1, 0, 0, 0, 0, 0, 0, 0], Departure::Misbehaved),
    ];
    for (bytes, expected) in cases {
        let port = free_port("127.0.0.1");
        let zero = FromEnvironment::join(&invitation(0, 2, port)).unwrap();
        let mut impostor = impostor(2, port);
        impostor.write_all(bytes).unwrap();
        impostor.shutdown(std::net::Shutdown::Write).unwrap();
        let error = zero.fence().unwrap_err();
        assert!(
            matches!(error, BootstrapError::RankGone { rank: 1, how } if how == expected),
            "{bytes:?}: {error}"
        );
        zero.put("a", b"1").unwrap();
        assert_eq!(still_there(&zero, "a"), b"1");
        zero.finish().unwrap();
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let hasty = Invitation {
        patience: Duration::from_millis(50),
        ..invitation(0, 2, free_port("127.0.0.1"))
    };
    let zero = FromEnvironment::join(&hasty).unwrap();
    let error = zero.fence().unwrap_err();
    assert!(
        matches!(error, BootstrapError::RankGone { rank: 1, how: Departure::NeverCame }),
        "{error}"
    );
    let late = FromEnvironment::join(&invitation(1, 2, hasty.port)).unwrap_err().to_string();
    assert!(late.contains("CARRACK_BOOTSTRAP_TIMEOUT"), "{late}");
    zero.finish().unwrap();
}

#[test]
fn a_rank_that_is_dropped_is_named_to_all() {
    for victim in [0, 1, 18, 19] {
        let mut ranks = job(20);
        let lost = ranks.remove(victim);
        let told: Vec<_> = ranks.iter().map(|rank| (rank.rank(), rank)).collect();
        thread::scope(|scope| {
            let fences: Vec<_> =
                told.iter().map(|(me, rank)| (me, scope.spawn(|| rank.fence()))).collect();
            drop(lost);
            for (me, fence) in fences {
                let error = fence.join().unwrap().unwrap_err();
                let expected = victim as u32;
                assert!(
                    matches!(error, BootstrapError::RankGone { rank, .. } if rank == expected),
                    "rank {me} without rank {victim}: {error}"
                );
            }
        });
        thread::scope(|scope| {
            for rank in ranks {
                // Where rank 0 is lost this is an error, and no hang.
                scope.spawn(move || rank.finish());
            }
        });
    }
}

#[test]
fn rank_0_is_named_when_it_is_gone() {
    let mut ranks = job(2);
    let one = ranks.pop().unwrap();
    one.put("a", b"1").unwrap();
    assert_eq!(wait_for(&one, "a").unwrap(), b"1");
    drop(ranks);
    assert!(one.fence().is_err());
    assert_eq!(one.get("a").unwrap().unwrap(), b"1", "what is known stays");
    let error = one.put("b", b"").unwrap_err();
    let BootstrapError::StoreGone { rank: 0, address } = error else { panic!("{error}") };
    assert!(address.contains("127.0.0.1"), "{address}");
    assert!(one.finish().is_err());
}

#[test]
fn rank_0_is_the_last_and_answers_until_then() {
    let mut ranks = job(40);
    let rest = ranks.split_off(1);
    let zero = ranks.pop().unwrap();
    zero.put("a", b"of rank 0").unwrap();
    thread::scope(|scope| {
        let ending = scope.spawn(|| zero.finish().unwrap());
        for rank in &rest {
            assert_eq!(wait_for(rank, "a").unwrap(), b"of rank 0");
            assert!(matches!(rank.fence(), Ok(()) | Err(BootstrapError::RankGone { rank: 0, .. })));
        }
        assert!(!ending.is_finished());
        each(rest, |_| {});
    });
}

#[test]
fn a_second_value_is_refused_by_name_and_others_go_on() {
    let ranks = job(3);
    ranks[1].put("a", b"1").unwrap();
    assert_eq!(wait_for(&ranks[2], "a").unwrap(), b"1");
    ranks[2].put("a", b"2").unwrap();
    let error = loop {
        match wait_for(&ranks[2], "never") {
            Err(error @ BootstrapError::Refused { .. }) => break error,
            other => drop(other),
        }
    };
    assert!(error.to_string().contains("rank 2 put a second value under the key \"a\""), "{error}");
    let error = ranks[0].fence().unwrap_err();
    assert!(
        matches!(error, BootstrapError::RankGone { rank: 2, how: Departure::Misbehaved }),
        "{error}"
    );
    assert_eq!(still_there(&ranks[0], "a"), b"1");
    thread::scope(|scope| {
        for rank in &ranks {
            scope.spawn(|| assert_eq!(rank.finish().is_err(), rank.rank() == 2));
        }
    });
}

#[test]
fn many_values_of_the_largest_size_are_carried_both_ways() {
    let mut ranks = job(2);
    let one = ranks.pop().unwrap();
    let value = |at: usize| vec![at as u8; MAX_VALUE];
    for at in 0..250 {
        one.put(&format!("{at:04}"), &value(at)).unwrap();
    }
    for at in 0..250 {
        assert_eq!(wait_for(&ranks[0], &format!("{at:04}")).unwrap(), value(at));
        // And down again.
        assert_eq!(wait_for(&one, &format!("{at:04}")).unwrap(), value(at));
    }
    ranks.push(one);
    each(ranks, |_| {});
}

#[test]
fn addresses_are_shown_as_people_write_them() {
    let address: SocketAddr = "[::1]:30500".parse().unwrap();
    let invitation = Invitation { hosts: vec!["::1".into()], ..invitation(0, 1, 30500) };
    assert_eq!(invitation.to_string(), address.to_string());
}
