//! Flushes of ranks that go. A flush fails if and only if an operation on that rank's memory was
//! lost.

use crate::support::keys::without_keys;
use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::buffer::Region;
use carrack::settings::SettingsBuilder;
use carrack::transports::gpu::{EventState, GpuError, GpuEvent};
use carrack::{OpError, Piece, PostError, Rank, Runtime};
use std::sync::Arc;
use std::time::Duration;

over_each_transport!(
    a_flush_fails_if_a_put_was_lost_with_its_rank_and_only_then,
    a_flush_fails_if_a_put_was_lost_behind_its_deadline,
    a_flush_fails_if_a_part_of_a_batch_was_lost_and_only_then,
    a_flush_fails_if_the_answer_to_a_batch_was_lost_and_only_then,
    a_flush_of_a_gone_rank_waits_for_no_event_and_tells_of_losses_only,
    what_waits_for_an_event_hears_of_the_end_of_a_rank_without_a_link,
);

/// Over some transports the put needs its owner's progress, which never comes.
fn a_flush_fails_if_a_put_was_lost_with_its_rank_and_only_then<J: Job>() {
    for may_be_lost in [false, true] {
        let ranks = J::pair();
        let region = Region::host(100);
        let mr = ranks[1].register_memory(&region).unwrap();
        let (rmr, sink) = (mr.remote_key(), Sink::keeping());
        ranks[0].post_put(Rank(1), vec![1; 100], &rmr, 0).comp(&sink).submit().unwrap();
        if !may_be_lost {
            until(&ranks, || sink.count() == 1);
        }
        let [zero, one] = ranks;
        drop((mr, one));
        let ranks = [zero];
        until(&ranks, || ranks[0].peer_down(Rank(1)).is_some());
        let is_lost = matches!(sink.one(&ranks).ok(), Err(OpError::PeerDown { .. }));
        assert!(may_be_lost || !is_lost);
        let flush = ranks[0].post_flush(Rank(1)).comp(&sink).try_submit();
        match is_lost {
            true => assert!(matches!(flush, Err(PostError::PeerDown { rank: Rank(1), .. }))),
            false => assert!(flush.unwrap().is_done()),
        }
    }
}

/// The put tells of its deadline; where it was lost then, only the flush could tell.
fn a_flush_fails_if_a_put_was_lost_behind_its_deadline<J: Job>() {
    let ranks = J::pair();
    connect(&ranks);
    let region = Region::host(100);
    let mr = ranks[1].register_memory(&region).unwrap();
    let (rmr, sink) = (without_keys(&mr.remote_key()), Sink::keeping());
    let put = ranks[0].post_put(Rank(1), vec![1; 100], &rmr, 0).comp(&sink);
    put.deadline(Duration::from_millis(20)).submit().unwrap();
    until(&ranks[..1], || sink.count() == 1);
    assert!(matches!(sink.one(&ranks[..1]).ok(), Err(OpError::TimedOut(_))));
    let flushed = Sink::keeping();
    ranks[0].post_flush(Rank(1)).comp(&flushed).submit().unwrap();
    assert_eq!(flushed.count(), 0, "it waits for the put, which is in flight");
    let [zero, one] = ranks;
    drop((mr, one));
    let ranks = [zero];
    until(&ranks, || flushed.count() == 1);
    assert_eq!(region.whole().to_vec().unwrap(), vec![0; 100], "the put was lost");
    let outcome = flushed.one(&ranks).ok();
    assert!(outcome.is_err(), "the flush says that all is visible: {outcome:?}");
}

/// The batch has more parts than may wait at a time.
fn a_flush_fails_if_a_part_of_a_batch_was_lost_and_only_then<J: Job>() {
    batch_of_a_rank_that_goes::<J>(J::settings().offers(16), (100, 5000), true);
}

/// Small pieces of memory that is not mapped: its owner answers with their bytes.
fn a_flush_fails_if_the_answer_to_a_batch_was_lost_and_only_then<J: Job>() {
    batch_of_a_rank_that_goes::<J>(J::settings(), (32, 2000), false);
}

/// The owner goes after some progress of both ranks, in turn; and also after it has done all that
/// it was asked for.
fn batch_of_a_rank_that_goes<J: Job>(
    settings: SettingsBuilder,
    (count, len): (usize, usize),
    is_put: bool,
) {
    let mut lost = 0;
    for (steps, ends) in (0..12).flat_map(|steps| [(steps, false), (steps, true)]) {
        let ranks = J::pair_with(settings.clone());
        connect(&ranks);
        let [region, local] = [(); 2].map(|()| Region::host(count * 8192));
        let mr = ranks[1].register_memory(&region).unwrap();
        let (rmr, sink) = (without_keys(&mr.remote_key()), Sink::keeping());
        let piece = |at: usize| Piece {
            local: &local,
            range: at * 8192..at * 8192 + len,
            rmr: &rmr,
            offset: at as u64 * 8192,
        };
        let pieces: Vec<_> = (0..count).map(piece).collect();
        if is_put {
            ranks[0].post_put_batch(Rank(1), &pieces).comp(&sink).submit().unwrap();
        } else {
            ranks[0].post_get_batch(Rank(1), &pieces).comp(&sink).submit().unwrap();
        }
        for step in 0..steps {
            ranks[1 - step % 2].progress_all().unwrap();
        }
        let [zero, one] = ranks;
        if ends {
            settle(std::slice::from_ref(&one));
        }
        // The rank first: no part is refused because its registration has ended.
        drop((one, mr));
        let ranks = [zero];
        until(&ranks, || ranks[0].peer_down(Rank(1)).is_some());
        let outcome = sink.one(&ranks).ok();
        let is_lost = matches!(outcome, Err(OpError::PeerDown { .. }));
        let flush = ranks[0].post_flush(Rank(1)).comp(&sink).try_submit();
        assert_eq!(is_lost, flush.is_err(), "{steps} steps, {ends}: {outcome:?}, and {flush:?}");
        lost += u32::from(is_lost);
    }
    assert!(lost > 0, "each was done");
}

/// An event that does not fire.
#[derive(Debug)]
struct Never;

impl EventState for Never {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(false)
    }

    fn wait(&self) -> Result<(), GpuError> {
        Ok(())
    }
}

fn a_flush_of_a_gone_rank_waits_for_no_event_and_tells_of_losses_only<J: Job>() {
    for loses in [false, true] {
        let ranks = J::pair();
        connect(&ranks);
        let region = Region::host(8);
        let mr = ranks[1].register_memory(&region).unwrap();
        let (event, put, flushed) =
            (GpuEvent::new(Arc::new(Never)), Sink::keeping(), Sink::keeping());
        if loses {
            let rmr = mr.remote_key();
            let post = ranks[0].post_put(Rank(1), vec![1; 8], &rmr, 0).comp(&put);
            post.after(&event).submit().unwrap();
        }
        ranks[0].post_flush(Rank(1)).after(&event).comp(&flushed).submit().unwrap();
        let [zero, one] = ranks;
        drop((mr, one));
        let ranks = [zero];
        until(&ranks, || flushed.count() == 1 && put.count() == usize::from(loses));
        match flushed.one(&ranks).ok() {
            Ok(_) => assert!(!loses, "the put was lost"),
            Err(OpError::PeerDown { rank: Rank(1), .. }) if loses => {}
            Err(error) => panic!("loses: {loses}, and {error}"),
        }
    }
}

fn what_waits_for_an_event_hears_of_the_end_of_a_rank_without_a_link<J: Job>() {
    let event = GpuEvent::new(Arc::new(Never));
    // On the default device, by which nothing was sent, and on one that the rank did not make.
    for is_default in [true, false] {
        let [zero, one]: [Runtime; 2] = J::ranks(2).try_into().unwrap();
        let (put, flushed) = (Sink::keeping(), Sink::keeping());
        let device =
            if is_default { zero.default_device().clone() } else { zero.device().build().unwrap() };
        let region = Region::host(8);
        let mr = one.register_memory(&region).unwrap();
        let rmr = mr.remote_key();
        if !is_default {
            let post = zero.post_put(Rank(1), vec![1; 8], &rmr, 0).device(&device).comp(&put);
            post.after(&event).submit().unwrap();
        }
        let mut flush = zero.post_flush(Rank(1)).device(&device).after(&event).comp(&flushed);
        flush.submit().unwrap();
        drop((mr, one));
        let ranks = [zero];
        until(&ranks, || flushed.count() == 1 && put.count() == usize::from(!is_default));
        assert_eq!(flushed.one(&ranks).ok().is_ok(), is_default, "a put was lost");
    }
}
