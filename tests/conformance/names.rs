//! Tags, contexts and completion objects that other ranks name.

use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::{Counter, Handler, ProgressError, Rank, RemoteComp, ResourceError, Runtime, Tag};
use std::sync::mpsc::{Receiver, channel};

over_each_transport!(
    tags_and_remote_completions_travel_at_full_width,
    a_reserved_slot_can_be_filled_in_another_order_on_each_rank,
    a_message_to_an_unknown_name_is_reported_and_dropped_and_others_arrive,
    a_message_for_a_name_that_was_taken_back_reaches_no_object_that_is_registered_later,
    a_handler_that_is_dropped_may_deregister_other_objects,
    a_handler_whose_last_handle_is_a_thread_s_snapshot_may_deregister_other_objects,
);

fn tags_and_remote_completions_travel_at_full_width<J: Job>() {
    let ranks = J::pair();
    let first = ranks[1].reserve_comps(70_000).unwrap();
    let names: Vec<RemoteComp> = [0, 255, 256, 32_767, 32_768, 65_535, 65_536, 69_999]
        .map(|offset| RemoteComp(first.0 + offset))
        .into();
    let sinks: Vec<Sink> = names.iter().map(|_| Sink::keeping()).collect();
    for (name, sink) in names.iter().zip(&sinks) {
        ranks[1].register_comp_at(*name, sink).unwrap();
    }
    let mut tags: Vec<u64> = (0..64).map(|bit| 1 << bit).collect();
    tags.extend([0, u64::MAX, 0x0123_4567_89ab_cdef]);
    for (name, sink) in names.iter().zip(&sinks) {
        for &tag in &tags {
            sent(&ranks, || ranks[0].post_am(Rank(1), b"", *name).tag(Tag(tag)).try_submit());
        }
        until(&ranks, || sink.count() == tags.len());
        let found: Vec<u64> = sink.take().iter().map(|status| status.tag.0).collect();
        assert_eq!(found, tags);
    }
    assert!(sinks.iter().all(|sink| sink.count() == 0));
    for &tag in tags.iter().filter(|&&tag| tag != u64::MAX) {
        sent(&ranks, || ranks[0].post_send(Rank(1), &tag.to_le_bytes(), Tag(tag)).try_submit());
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == tags.len() - 1);
    for &tag in tags.iter().rev().filter(|&&tag| tag != u64::MAX) {
        let status = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(tag)).wait().unwrap();
        assert_eq!((status.tag, status.bytes().unwrap()), (Tag(tag), &tag.to_le_bytes()[..]));
    }
}

fn a_reserved_slot_can_be_filled_in_another_order_on_each_rank<J: Job>() {
    let ranks = J::pair();
    let first = ranks[0].reserve_comps(3).unwrap();
    assert_eq!(ranks[1].reserve_comps(3).unwrap(), first);
    let sinks: [[Sink; 3]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| Sink::keeping()));
    for (rank, order) in [(0, [0, 1, 2]), (1, [2, 0, 1])] {
        for at in order {
            ranks[rank]
                .register_comp_at(RemoteComp(first.0 + at), &sinks[rank][at as usize])
                .unwrap();
        }
    }
    for (from, to) in [(0, 1), (1, 0)] {
        for at in 0..3_u32 {
            let other = RemoteComp(first.0 + (at + 1) % 3);
            let bytes = at.to_le_bytes();
            let mut am = ranks[from]
                .post_am(Rank(to as u32), &bytes, other)
                .remote_comp(RemoteComp(first.0 + at));
            sent(&ranks, || am.try_submit());
        }
        for (at, sink) in sinks[to].iter().enumerate() {
            assert_eq!(sink.one(&ranks).bytes().unwrap(), (at as u32).to_le_bytes());
        }
    }
    let taken = ranks[0].register_comp_at(first, &Sink::keeping());
    assert!(matches!(taken, Err(ResourceError::Slot { slot, .. }) if slot == first));
}

fn a_message_to_an_unknown_name_is_reported_and_dropped_and_others_arrive<J: Job>() {
    let ranks = J::pair();
    let sink = Sink::keeping();
    let name = ranks[1].register_comp(&sink).unwrap();
    for wrong in [RemoteComp(0), RemoteComp(name.0 + 1), RemoteComp(u32::MAX)] {
        for size in [0, 8, 100, 5000] {
            let message = pattern(1, size);
            sent(&ranks[..1], || ranks[0].post_am(Rank(1), &message[..], wrong).try_submit());
            sent(&ranks[..1], || ranks[0].post_am(Rank(1), &message[..], name).try_submit());
            let errors = until_with_errors(&ranks, || sink.count() > 0);
            let told = matches!(
                &errors[..],
                [ProgressError::NoSuchCompletion { from: Rank(0), comp, size: told }]
                    if (*comp, *told) == (wrong, size)
            );
            // The complaint may come with the same call as the message behind it.
            assert!(told, "{errors:?}");
            assert_eq!(sink.one(&ranks).bytes().unwrap(), message);
        }
    }
}

fn a_message_for_a_name_that_was_taken_back_reaches_no_object_that_is_registered_later<J: Job>() {
    let ranks = J::pair();
    let (old, new) = (Sink::keeping(), Sink::keeping());
    let name = ranks[1].register_comp(&old).unwrap();
    sent(&ranks, || ranks[0].post_am(Rank(1), b"1", name).try_submit());
    assert_eq!(old.one(&ranks).bytes().unwrap(), b"1");
    ranks[1].deregister_comp(name).unwrap();
    assert!(ranks[1].deregister_comp(name).is_err());
    for is_registered_again in [false, true] {
        // Short, in a packet, and only offered.
        for size in [1, 1000, 100_000] {
            let mut late = ranks[0].post_am(Rank(1), vec![2; size], name);
            late.submit().unwrap();
            drop(late);
            let again = is_registered_again.then(|| ranks[1].register_comp(&new).unwrap());
            let errors = until_with_errors(&ranks, || {
                ranks[0].test_drained(ranks[0].default_device()).unwrap()
            });
            let told = |errors: &[ProgressError]| {
                matches!(errors,
                [ProgressError::NoSuchCompletion { comp, .. }] if *comp == name)
            };
            let mut all = errors;
            while all.is_empty() {
                all.extend(ranks[1].progress().err());
            }
            assert!(told(&all), "{all:?}");
            assert_eq!((old.count(), new.count()), (0, 0));
            if let Some(again) = again {
                assert_ne!(again, name);
                sent(&ranks, || ranks[0].post_am(Rank(1), b"3", again).try_submit());
                assert_eq!(new.one(&ranks).bytes().unwrap(), b"3");
                ranks[1].deregister_comp(again).unwrap();
            }
        }
    }
    // The same calls on the other rank lead to the same names.
    let other = ranks[0].register_comp(&old).unwrap();
    assert_eq!(other, name);
    ranks[0].deregister_comp(other).unwrap();
    for _ in 0..3 {
        let other = ranks[0].register_comp(&old).unwrap();
        ranks[0].deregister_comp(other).unwrap();
    }
    assert_eq!(ranks[0].register_comp(&old).unwrap(), ranks[1].register_comp(&old).unwrap());
}

/// Something of the program's that deregisters an object when it is dropped.
struct Session(Runtime, RemoteComp);

impl Drop for Session {
    fn drop(&mut self) {
        self.0.deregister_comp(self.1).unwrap();
    }
}

/// Registers a handler that has captured a session, and another object.
fn with_session(runtime: &Runtime) -> (RemoteComp, RemoteComp) {
    let other = runtime.register_comp(&Counter::new()).unwrap();
    let session = Session(runtime.clone(), other);
    let handler = Handler::new(move |_| _ = &session);
    (runtime.register_comp(&handler).unwrap(), other)
}

/// Waits for a thread that a lock taken twice would hold up for ever.
fn returns(done: &Receiver<()>) {
    assert!(done.recv_timeout(LIMIT / 10).is_ok(), "it does not return");
}

fn a_handler_that_is_dropped_may_deregister_other_objects<J: Job>() {
    let runtime = J::ranks(1).remove(0);
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let (name, other) = with_session(&runtime);
        runtime.deregister_comp(name).unwrap();
        assert!(
            runtime.deregister_comp(other).is_err(),
            "it is dropped, and has deregistered the other one"
        );
        told.send(()).unwrap();
    });
    returns(&heard);
}

fn a_handler_whose_last_handle_is_a_thread_s_snapshot_may_deregister_other_objects<J: Job>() {
    let ranks = J::pair();
    let (told, heard) = channel();
    std::thread::spawn(move || {
        let sink = Sink::keeping();
        let (name, other) = with_session(&ranks[1]);
        let last = ranks[1].register_comp(&sink).unwrap();
        // This thread's progress gets to know them.
        sent(&ranks, || ranks[0].post_am(Rank(1), b"1", last).try_submit());
        sink.one(&ranks);
        ranks[1].deregister_comp(name).unwrap();
        assert!(ranks[1].peer_down(Rank(0)).is_none());
        // And looks again.
        sent(&ranks, || ranks[0].post_am(Rank(1), b"2", last).try_submit());
        sink.one(&ranks);
        settle(&ranks);
        assert!(ranks[1].deregister_comp(other).is_err(), "progress has dropped it");
        told.send(()).unwrap();
    });
    returns(&heard);
}
