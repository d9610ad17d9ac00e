//! Tags, contexts and completion objects that other ranks name.

use crate::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::{ProgressError, Rank, RemoteComp, ResourceError, Tag};

over_each_transport!(
    tags_and_remote_completions_travel_at_full_width,
    a_reserved_slot_can_be_filled_in_another_order_on_each_rank,
    a_message_for_nobody_is_told_of_and_dropped_and_others_arrive,
    a_name_that_was_taken_back_is_nobodys_until_it_is_given_again,
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
            sent(&ranks, || ranks[0].post_am(Rank(1), b"", *name).tag(Tag(tag)).call());
        }
        until(&ranks, || sink.count() == tags.len());
        let found: Vec<u64> = sink.take().iter().map(|status| status.tag.0).collect();
        assert_eq!(found, tags);
    }
    assert!(sinks.iter().all(|sink| sink.count() == 0));
    for &tag in tags.iter().filter(|&&tag| tag != u64::MAX) {
        sent(&ranks, || ranks[0].post_send(Rank(1), &tag.to_le_bytes(), Tag(tag)).call());
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == tags.len() - 1);
    for &tag in tags.iter().rev().filter(|&&tag| tag != u64::MAX) {
        let status = done(ranks[1].post_recv(Rank(0), vec![0; 8], Tag(tag)).call().unwrap());
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
            ranks[rank].register_comp_at(RemoteComp(first.0 + at), &sinks[rank][at as usize]).unwrap();
        }
    }
    for (from, to) in [(0, 1), (1, 0)] {
        for at in 0..3_u32 {
            let other = RemoteComp(first.0 + (at + 1) % 3);
            let bytes = at.to_le_bytes();
            let mut am =
                ranks[from].post_am(Rank(to as u32), &bytes, other).remote_comp(RemoteComp(first.0 + at));
            sent(&ranks, || am.call());
        }
        for (at, sink) in sinks[to].iter().enumerate() {
            assert_eq!(sink.one(&ranks).bytes().unwrap(), (at as u32).to_le_bytes());
        }
    }
    let taken = ranks[0].register_comp_at(first, &Sink::keeping());
    assert!(matches!(taken, Err(ResourceError::Slot { slot, .. }) if slot == first));
}

fn a_message_for_nobody_is_told_of_and_dropped_and_others_arrive<J: Job>() {
    let ranks = J::pair();
    let sink = Sink::keeping();
    let name = ranks[1].register_comp(&sink).unwrap();
    for wrong in [RemoteComp(0), RemoteComp(name.0 + 1), RemoteComp(u32::MAX)] {
        for size in [0, 8, 100, 5000] {
            let message = pattern(1, size);
            sent(&ranks[..1], || ranks[0].post_am(Rank(1), &message[..], wrong).call());
            sent(&ranks[..1], || ranks[0].post_am(Rank(1), &message[..], name).call());
            let errors = until_with_errors(&ranks, || sink.count() > 0);
            let told = matches!(&errors[..],
                [ProgressError::NoSuchCompletion { from: Rank(0), comp, size: told }] if (*comp, *told) == (wrong, size));
            // The complaint may come with the same call as the message behind it.
            assert!(told, "{errors:?}");
            assert_eq!(sink.one(&ranks).bytes().unwrap(), message);
        }
    }
}

fn a_name_that_was_taken_back_is_nobodys_until_it_is_given_again<J: Job>() {
    let ranks = J::pair();
    let (old, new) = (Sink::keeping(), Sink::keeping());
    let name = ranks[1].register_comp(&old).unwrap();
    sent(&ranks, || ranks[0].post_am(Rank(1), b"1", name).call());
    assert_eq!(old.one(&ranks).bytes().unwrap(), b"1");
    ranks[1].deregister_comp(name).unwrap();
    assert!(ranks[1].deregister_comp(name).is_err());
    sent(&ranks[..1], || ranks[0].post_am(Rank(1), b"2", name).call());
    let mut told = Vec::new();
    while told.is_empty() {
        told.extend(ranks[1].progress().err());
    }
    assert!(matches!(&told[0], ProgressError::NoSuchCompletion { comp, .. } if *comp == name));
    assert_eq!(ranks[1].register_comp(&new).unwrap(), name);
    sent(&ranks, || ranks[0].post_am(Rank(1), b"3", name).call());
    assert_eq!(new.one(&ranks).bytes().unwrap(), b"3");
    assert_eq!(old.count(), 0);
}
