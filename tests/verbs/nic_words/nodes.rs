//! Processes of one node, whose messages go through shared memory.

use crate::support::ranks::{Ranks, Role, die};
use crate::support::{Job, OverShm, Watchdog, until};
use carrack::buffer::Region;
use carrack::settings::TransportChoice;
use carrack::{AtomicAgent, OpError, Outcome, PostError, Rank, RemoteKey, Runtime, Synchronizer};
use carrack_simulators::nic::FABRIC_VARIABLE;
use std::time::Duration;

const SIZE: u32 = 3;
const EACH: u64 = 500;

/// Plays the role of a rank of these tests.
pub(crate) fn rank(role: &Role) {
    match role.name.as_str() {
        "adds" => adds(role),
        "dies" => dies(role),
        other => panic!("no role {other}"),
    }
}

fn start(role: &'static str) -> Ranks {
    let network = format!("nodes {} {role}", std::process::id());
    Ranks::start_each(|_| (FABRIC_VARIABLE, &network), &format!("nic_words::{role}"), SIZE, &[])
}

fn runtime(role: &Role) -> Runtime {
    let transports =
        vec![TransportChoice::Loopback, TransportChoice::Shm, TransportChoice::VerbsSimulated];
    role.runtime(OverShm::settings().transports(transports))
}

/// Adds to a word of rank 0's, so often.
fn add(runtime: &Runtime, rmr: &RemoteKey, times: u64) -> Result<(), PostError> {
    let (mut left, ended) = (times, Synchronizer::new(times as usize));
    while left > 0 {
        match runtime.post_fetch_add(Rank(0), rmr, 8, 1).comp(&ended).try_submit()? {
            Outcome::Posted => left -= 1,
            _ => {
                runtime.progress().unwrap();
            }
        }
    }
    until(std::slice::from_ref(runtime), || ended.test());
    Ok(())
}

#[test]
fn ranks_of_a_node_that_map_the_memory_lose_no_operation() {
    let _watchdog = Watchdog::patient("processes add", Duration::from_secs(120));
    start("adds").succeed();
}

fn adds(role: &Role) {
    let runtime = runtime(role);
    // Memory that the others map, and could change by themselves.
    let region = runtime.allocate(64).unwrap();
    let mr = runtime.registration(&region).atomics(AtomicAgent::Nic).register().unwrap();
    role.tells("words", &mr.remote_key().to_bytes());
    let rmr = RemoteKey::from_bytes(&role.told("words", 0)).unwrap();
    role.meet("ready", &runtime, 0..SIZE);
    add(&runtime, &rmr, EACH).unwrap();
    role.meet("added", &runtime, 0..SIZE);
    if role.rank == 0 {
        assert_eq!(
            region.fetch_add(8, 0),
            Ok(EACH * u64::from(SIZE)),
            "operations were lost: there were two agents"
        );
    }
    role.meet("over", &runtime, 0..SIZE);
}

#[test]
fn words_of_a_rank_that_dies_end_operations_and_harm_no_other_rank() {
    let _watchdog = Watchdog::patient("an owner dies", Duration::from_secs(120));
    start("dies").succeed_except(Rank(0));
}

fn dies(role: &Role) {
    let runtime = runtime(role);
    let region = Region::host(64);
    let mr = runtime.registration(&region).atomics(AtomicAgent::Nic).register().unwrap();
    role.tells("words", &mr.remote_key().to_bytes());
    let rmr = RemoteKey::from_bytes(&role.told("words", 0)).unwrap();
    role.meet("ready", &runtime, 0..SIZE);
    if role.rank == 0 {
        until(std::slice::from_ref(&runtime), || {
            (1..SIZE).all(|rank| role.has_said("adding", rank))
        });
        die();
    }
    add(&runtime, &rmr, 10).unwrap();
    role.says("adding");
    // Until the killed rank's end is known: each begun operation ends, and none waits for ever.
    let (mut begun, ended) = (0, carrack::CompQueue::new(1 << 14));
    let mut done = 0;
    let heard = |status: carrack::Status| match status.error.as_deref() {
        None | Some(OpError::PeerDown { rank: Rank(0), .. }) => 1,
        Some(OpError::Begin(error))
            if matches!(**error, PostError::Unreachable { .. } | PostError::PeerDown { .. }) =>
        {
            1
        }
        Some(other) => panic!("{other}"),
    };
    loop {
        match runtime.post_fetch_add(Rank(0), &rmr, 8, 1).comp(&ended).try_submit() {
            Ok(Outcome::Posted) => begun += 1,
            Ok(_) => {}
            // The NIC may know before the path of messages does.
            Err(PostError::Unreachable { rank: Rank(0), .. }) => {}
            Err(PostError::PeerDown { rank: Rank(0), .. }) => break,
            Err(other) => panic!("{other}"),
        }
        let _ = runtime.progress();
        while let Some(status) = ended.pop() {
            done += heard(status);
        }
    }
    until(std::slice::from_ref(&runtime), || {
        while let Some(status) = ended.pop() {
            done += heard(status);
        }
        done == begun
    });
    // Those that are left go on, by the NIC and by themselves.
    let other = RemoteKey::from_bytes(&role.told("words", 3 - role.rank)).unwrap();
    let counted = Synchronizer::new(1);
    runtime.post_fetch_add(other.owner(), &other, 0, 1).comp(&counted).submit().unwrap();
    until(std::slice::from_ref(&runtime), || counted.test());
    role.meet("over", &runtime, 1..SIZE);
    assert_eq!(region.fetch_add(0, 0), Ok(1));
}
