//! Roles in which [`VICTIM`] is killed.

use super::{RoleRank, TCP, VICTIM, is_down, settings_of};
use crate::support::ranks::{Role, die, listing, state_of};
use crate::support::sink::Sink;
use crate::support::*;
use carrack::bootstrap::Bootstrap;
use carrack::buffer::Region;
use carrack::{
    CollectiveError, CompQueue, Handler, OpError, Outcome, PeerState, PostError, Rank, RemoteKey,
    Status, Synchronizer, Tag, UserContext,
};
use std::time::Duration;

/// Runs the role: the victim fills a queue of rank 0, offers a large message to it, and dies before
/// any is taken.
pub(super) fn gather_killed(me: &RoleRank) {
    const SENT: u64 = 50;
    let inbox = CompQueue::new(4);
    let name = me.runtime.register_comp(&inbox).unwrap();
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        for at in 0..SENT {
            let mut am = me.runtime.post_am(Rank(0), pattern(at, 100), name).tag(Tag(at));
            while am.try_submit().unwrap().is_retry() {
                let _ = me.runtime.progress();
            }
        }
        let offered =
            me.runtime.post_am(Rank(0), pattern(SENT, 1 << 20), name).tag(Tag(SENT)).try_submit();
        assert!(offered.unwrap().is_posted());
        me.hears("all are here", 0);
        die();
    }
    if me.rank() == Rank(0) {
        let waits = SENT as usize + 1 - inbox.capacity();
        until_with_errors(&me.ranks, || me.runtime.pending().deferred == waits);
        me.says("all are here");
        until_with_errors(&me.ranks, || {
            matches!(me.runtime.peer_state(VICTIM), PeerState::Down(_))
        });
        let mut next = 0;
        until_with_errors(&me.ranks, || {
            let is_gone = me.runtime.peer_down(VICTIM).is_some();
            for status in std::iter::from_fn(|| inbox.pop()) {
                assert_eq!(
                    (status.tag, status.bytes().unwrap()),
                    (Tag(next), &pattern(next, 100)[..])
                );
                next += 1;
            }
            is_gone
        });
        assert_eq!(
            (next, me.runtime.pending().deferred),
            (SENT, 0),
            "its end is told behind its messages"
        );
    }
    me.others_go_on();
}

pub(super) fn silent(me: &RoleRank) {
    let sink = Sink::keeping();
    if me.is_victim() {
        me.says("here");
        // Both know that it is there, and one has spoken to it.
        me.folder.fence().unwrap();
        die();
    }
    me.hears("here", VICTIM.0);
    me.folder.fence().unwrap();
    let mut send = me.runtime.post_send(VICTIM, b"anybody?", Tag(1)).comp(&sink);
    match send.submit() {
        Ok(()) => is_down(sink.one(&me.ranks)),
        Err(error) => assert!(matches!(error, PostError::PeerDown { rank: VICTIM, .. }), "{error}"),
    }
    me.receive_from_victim(&sink);
    is_down(sink.one(&me.ranks));
    me.others_go_on();
}

pub(super) fn absent(me: &RoleRank) {
    if me.is_victim() {
        me.says("here");
        me.hears("waiting", 0);
        me.hears("waiting", 1);
        die();
    }
    me.hears("here", VICTIM.0);
    let sink = Sink::keeping();
    me.receive_from_victim(&sink);
    me.says("waiting");
    is_down(sink.one(&me.ranks));
    me.others_go_on();
}

/// Runs the role: the survivors have a second device, the victim has none. Operations are posted
/// before it is killed, or behind that, with or without links to its default device.
pub(super) fn second_device(me: &RoleRank) {
    let (is_linked, is_late) = match &*me.role.name {
        "second-device-unlinked" => (false, true),
        name => (true, name == "second-device-late"),
    };
    let survivors = [0, 1];
    let hello = |to| {
        let mut send = me.runtime.post_send(Rank(to), b"hello", Tag(1));
        sent(&me.ranks, || send.try_submit());
    };
    if me.is_victim() {
        if is_linked {
            survivors.into_iter().for_each(hello);
        }
        me.folder.put("victim", &std::process::id().to_le_bytes()).unwrap();
        survivors.into_iter().for_each(|from| me.hears("ready", from));
        die();
    }
    let second = me.runtime.device().build().unwrap();
    if is_linked {
        let mut recv = me.runtime.post_recv(VICTIM, vec![0; 5], Tag(1));
        assert_eq!(recv.wait().unwrap().bytes().unwrap(), b"hello");
        hello(VICTIM.0);
    }
    if is_late {
        me.says("ready");
        // Without progress, so nothing is known of the end.
        let pid = std::iter::repeat_with(|| me.folder.get("victim").unwrap()).flatten().next();
        let pid = u32::from_le_bytes(pid.unwrap().try_into().unwrap());
        while state_of(pid).is_some_and(|state| state != 'Z') {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let sink = Sink::keeping();
    let waits_on = |device| {
        let recv = me.runtime.post_recv(VICTIM, vec![0; 5], Tag(2));
        recv.device(device).comp(&sink).submit().unwrap();
        let send = me.runtime.post_send(VICTIM, vec![0; 5], Tag(2));
        send.device(device).comp(&sink).submit().unwrap();
    };
    me.receive_from_victim(&sink);
    waits_on(&second);
    if !is_late {
        me.says("ready");
    }
    until(&me.ranks, || sink.count() == 3);
    sink.take().into_iter().for_each(is_down);
    // A device that is made when the end is known.
    waits_on(&me.runtime.device().build().unwrap());
    until(&me.ranks, || sink.count() == 2);
    sink.take().into_iter().for_each(is_down);
    me.others_go_on();
}

pub(super) fn unstarted(role: Role) {
    if role.rank == VICTIM.0 {
        (0..2).for_each(|other| drop(role.told("waiting", other)));
        let _runtime = role.runtime(settings_of(&role));
        // The others find it here, or find that it was here.
        std::thread::sleep(Duration::from_millis(20));
        die();
    }
    let settings = settings_of(&role);
    let me = RoleRank::start(role, settings);
    let sink = Sink::keeping();
    me.receive_from_victim(&sink);
    me.says("waiting");
    me.runtime.wait(|| sink.count() > 0).unwrap();
    is_down(sink.one(&me.ranks));
    me.others_go_on();
}

pub(super) fn connected(me: &RoleRank) {
    let sink = Sink::keeping();
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        me.hears("waiting", 0);
        me.hears("waiting", 1);
        die();
    }
    let before = listing("/proc/self/fd").len();
    me.receive_from_victim(&sink);
    me.says("waiting");
    me.ends_badly(&sink);
    let after = listing("/proc/self/fd").len();
    assert!(
        after < before,
        "the descriptors of its link are still open: {before} and then {after}"
    );
    me.others_go_on();
}

pub(super) fn stream(me: &RoleRank) {
    const COUNT: u64 = 500;
    let size = |number: u64| [8, 100, 5000][number as usize % 3];
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        for number in 0..COUNT {
            let message = pattern(number, size(number));
            for to in 0..2 {
                sent(&me.ranks, || {
                    me.runtime.post_send(Rank(to), &message[..], Tag(9)).try_submit()
                });
            }
        }
        die();
    }
    let sink = Sink::keeping();
    for number in 0..=COUNT {
        let mut recv = me.runtime.post_recv(VICTIM, vec![0; 5000], Tag(9)).comp(&sink);
        recv = recv.user_context(UserContext(number));
        match recv.try_submit().unwrap() {
            Outcome::Done(status) => {
                assert_eq!(status.bytes().unwrap(), pattern(number, size(number)))
            }
            Outcome::Posted => {
                let status = sink.one(&me.ranks);
                if me.role.words == [TCP] && status.error.is_some() {
                    // What the victim had gathered has died with it; what came before is here.
                    is_down(status);
                    break;
                }
                if number < COUNT {
                    assert!(status.error.is_none(), "message {number}: {status:?}");
                    assert_eq!(status.bytes().unwrap(), pattern(number, size(number)));
                } else {
                    is_down(status);
                }
            }
            Outcome::Retry(reason) => panic!("{reason:?}"),
        }
    }
    me.others_go_on();
}

pub(super) fn full(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        // Not a message is taken in from here on.
        me.says("deaf");
        while !(me.role.has_said("full", 0) && me.role.has_said("full", 1)) {
            std::thread::yield_now();
        }
        die();
    }
    me.hears("deaf", VICTIM.0);
    let sink = Sink::keeping();
    while !me.runtime.post_send(VICTIM, &[3; 1000][..], Tag(1)).try_submit().unwrap().is_retry() {}
    while !me.runtime.post_send(VICTIM, &[3; 8][..], Tag(1)).try_submit().unwrap().is_retry() {}
    for number in 0..50 {
        let mut send = me.runtime.post_send(VICTIM, vec![4; 10 * number], Tag(1)).comp(&sink);
        send = send.user_context(UserContext(number as u64));
        send.submit().unwrap();
    }
    me.says("full");
    until(&me.ranks, || sink.count() == 50);
    for (number, status) in sink.take().into_iter().enumerate() {
        assert_eq!((status.user_context.0, status.buffer.len()), (number as u64, 10 * number));
        is_down(status);
    }
    me.receive_from_victim(&sink);
    me.ends_badly(&sink);
    me.others_go_on();
}

pub(super) fn handler(me: &RoleRank) {
    let handler = Handler::new(|_| die());
    let name = me.runtime.register_comp(&handler).unwrap();
    me.runtime.barrier().unwrap();
    let sink = Sink::keeping();
    if me.is_victim() {
        until(&me.ranks, || false);
    }
    me.receive_from_victim(&sink);
    if me.rank() == Rank(0) {
        me.hears("waiting", 1);
        sent(&me.ranks, || me.runtime.post_am(VICTIM, b"die", name).try_submit());
    } else {
        me.says("waiting");
    }
    me.ends_badly(&sink);
    me.others_go_on();
}

pub(super) fn barrier(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        let survivors = (0..me.runtime.size()).filter(|rank| *rank != VICTIM.0);
        survivors.for_each(|rank| me.hears("waiting", rank));
        die();
    }
    me.says("waiting");
    let error = me.runtime.barrier().unwrap_err();
    let named = matches!(
        &error,
        CollectiveError::Op { cause: OpError::PeerDown { rank: VICTIM, .. }, .. }
            | CollectiveError::Post { cause: PostError::PeerDown { rank: VICTIM, .. }, .. }
    );
    assert!(named, "{error}");
    me.others_go_on();
}

pub(super) fn asleep(me: &RoleRank) {
    me.runtime.barrier().unwrap();
    if me.is_victim() {
        me.hears("waiting", 0);
        me.hears("waiting", 1);
        die();
    }
    let arrived = Synchronizer::new(1);
    let recv = me.runtime.post_recv(VICTIM, vec![0; 8], Tag(9)).comp(&arrived).try_submit();
    assert!(recv.unwrap().is_posted());
    me.says("waiting");
    is_down(arrived.wait(&me.runtime).unwrap().remove(0));
    me.others_go_on();
}

/// Runs the role: large messages both ways, puts and gets. The victim dies at some moment of its
/// own among them.
pub(super) fn large(me: &RoleRank) {
    const LEN: usize = 3 << 20;
    // Not mapped: its owner has to carry out what others want of it.
    let region = Region::host(LEN);
    let registered = me.runtime.register_memory(&region).unwrap();
    let names = me.runtime.allgather(&registered.remote_key().to_bytes()).unwrap();
    let other = if me.is_victim() { Rank(0) } else { VICTIM };
    let rmr = RemoteKey::from_bytes(&names[other.0 as usize]).unwrap();
    let sink = Sink::keeping();
    let peers: &[Rank] = if me.is_victim() { &[Rank(0), Rank(1)] } else { &[VICTIM] };
    let mut count = 0;
    for &peer in peers {
        for number in 0..4 {
            let mut receive = me.runtime.post_recv(peer, vec![0; LEN], Tag(number)).comp(&sink);
            count += begun::<LEN>(me, || receive.try_submit());
            let mut send =
                me.runtime.post_send(peer, vec![number as u8; LEN], Tag(number)).comp(&sink);
            count += begun::<LEN>(me, || send.try_submit());
        }
    }
    let mut put = me.runtime.post_put(other, vec![7; LEN], &rmr, 0).comp(&sink);
    count += begun::<LEN>(me, || put.try_submit());
    let mut get = me.runtime.post_get(other, vec![0; LEN], &rmr, 0).comp(&sink);
    count += begun::<LEN>(me, || get.try_submit());
    if me.is_victim() {
        for _ in 0..std::process::id() % 60 {
            let _ = me.runtime.progress();
        }
        die();
    }
    until(&me.ranks, || sink.count() == count && me.runtime.peer_down(VICTIM).is_some());
    sink.take().into_iter().for_each(is_right::<LEN>);
    me.others_go_on();
}

/// Checks that a successful operation has whole bytes, and that a failed one names the victim.
/// Both give their buffers back.
fn is_right<const LEN: usize>(status: Status) {
    match status.error.as_deref() {
        None => {}
        Some(OpError::PeerDown { rank: VICTIM, .. }) => {}
        Some(error) => panic!("{error}"),
    }
    assert_eq!(status.buffer.len(), LEN);
}

/// Returns the number of operations (0 or 1) that the call has put in flight. It is 0 if the
/// operation is complete at once, or the victim is known to have ended.
fn begun<const LEN: usize>(
    me: &RoleRank,
    mut call: impl FnMut() -> Result<Outcome, PostError>,
) -> usize {
    let mut gone = false;
    let outcome = posted(&me.ranks, || match call() {
        Err(PostError::PeerDown { rank: VICTIM, .. }) => {
            gone = true;
            Ok(Outcome::Posted)
        }
        other => other,
    });
    match outcome {
        _ if gone => 0,
        Outcome::Done(status) => {
            is_right::<LEN>(status);
            0
        }
        _ => 1,
    }
}
