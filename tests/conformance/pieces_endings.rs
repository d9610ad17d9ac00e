//! Batches during which something ends: the registration of the memory, the deadline, or the last
//! handle to memory that an engine copies.

use super::pieces::{Memory, PieceFixture, more_than_16, on_both, side_by_side};
use crate::support::gpus::is_for_simulated_only;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::AutoChoice;
use carrack::{OpError, PeerState, Piece, Rank, Strided};
use std::time::Duration;

crate::support::over_each_transport_and!(
    copiers,
    WithCopiers;
    a_batch_whose_registration_ends_in_the_midst_ends_once,
    a_batch_without_an_answer_ends_once_at_its_deadline,
    who_gives_up_waiting_for_small_pieces_again_and_again_is_not_taken_for_one_who_never_listens,
    what_engines_are_at_for_a_batch_stays_until_they_have_done_with_it,
);

/// Returns a fixture where fewer pieces may wait for an answer than a test posts, of memory that
/// only its owner reaches, or its NIC.
fn fixture<J: Job>() -> PieceFixture {
    let fixture = PieceFixture::over(J::pair_with(
        J::settings().offers(16).setting("kernel_copy", AutoChoice::Off),
    ));
    connect(&fixture.ranks);
    fixture
}

fn a_batch_whose_registration_ends_in_the_midst_ends_once<J: Job>() {
    let kinds =
        [(Memory::Host, true), (Memory::Gpu, true), (Memory::Host, false), (Memory::Gpu, false)];
    for ((memory, is_put), (count, len)) in
        kinds.into_iter().flat_map(|kind| more_than_16::<J>().map(|sort| (kind, sort)))
    {
        let fixture = fixture::<J>();
        let zero = &fixture.ranks[0];
        let (local, remote) =
            (fixture.local(memory, count * len), fixture.remote(memory, false, count * len));
        local.whole().write(&vec![7; count * len]).unwrap();
        remote.region.whole().write(&vec![0; count * len]).unwrap();
        let pieces = side_by_side(&local, &remote.rmr, (count, len), |at| at * len);
        let done = Sink::keeping();
        let batch = match is_put {
            true => zero.post_put_batch(Rank(1), &pieces),
            false => zero.post_get_batch(Rank(1), &pieces),
        };
        let mut batch = batch.comp(&done).remote_comp(fixture.name);
        batch.submit().unwrap();
        for _ in 0..10 {
            zero.progress_all().unwrap();
        }
        fixture.ranks[1].deregister_memory(remote.registered);
        let status = done.one(&fixture.ranks);
        match status.error.as_deref() {
            // Its NIC may have gone on, until this rank heard of it.
            None => assert!(J::IS_RDMA),
            Some(OpError::Stale(Rank(1))) => {}
            Some(error) => panic!("{memory:?}, put: {is_put}: {error}"),
        }
        settle(&fixture.ranks);
        let told = fixture.told.take();
        assert_eq!((done.count(), told.len()), (0, usize::from(status.error.is_none())));
        // What was refused has moved nothing, and what comes after is refused as well.
        let (here, there) =
            (local.whole().to_vec().unwrap(), remote.region.whole().to_vec().unwrap());
        assert!(here.iter().chain(&there).all(|byte| [0, 7].contains(byte)));
        let again = zero.post_put_batch(Rank(1), &pieces).comp(&done).submit();
        assert!(again.is_err() || done.one(&fixture.ranks).error.is_some());
    }
}

fn a_batch_without_an_answer_ends_once_at_its_deadline<J: Job>() {
    for (is_put, (count, len)) in
        [true, false].into_iter().flat_map(|is_put| more_than_16::<J>().map(|sort| (is_put, sort)))
    {
        let fixture = fixture::<J>();
        let zero = &fixture.ranks[0];
        let (local, remote) = (
            fixture.local(Memory::Host, count * len),
            fixture.remote(Memory::Host, false, count * len),
        );
        local.whole().write(&vec![7; count * len]).unwrap();
        let pieces = side_by_side(&local, &remote.rmr, (count, len), |at| at * len);
        let done = Sink::keeping();
        let batch = match is_put {
            true => zero.post_put_batch(Rank(1), &pieces),
            false => zero.post_get_batch(Rank(1), &pieces),
        };
        let mut batch =
            batch.comp(&done).remote_comp(fixture.name).deadline(Duration::from_millis(20));
        batch.submit().unwrap();
        if J::IS_RDMA {
            // A NIC answers without its rank's progress.
            settle(&fixture.ranks);
            assert_eq!(done.take().len(), 1);
            continue;
        }
        // The other rank does nothing meanwhile.
        let status = done.one(std::slice::from_ref(zero));
        assert!(matches!(status.error.as_deref(), Some(OpError::TimedOut(Rank(1)))), "{status:?}");
        settle(&fixture.ranks);
        assert_eq!((done.count(), fixture.told.count()), (0, 0), "put: {is_put}");
        let waiting = zero.pending();
        assert!(
            !waiting.operations.iter().any(|op| op.what.ends_with("of a batch")),
            "{waiting:?}"
        );
    }
}

fn who_gives_up_waiting_for_small_pieces_again_and_again_is_not_taken_for_one_who_never_listens<
    J: Job,
>() {
    if J::IS_RDMA {
        return;
    }
    for is_put in [true, false] {
        let fixture =
            PieceFixture::over(J::pair_with(J::settings().setting("kernel_copy", AutoChoice::Off)));
        connect(&fixture.ranks);
        let zero = &fixture.ranks[0];
        let (count, len) = (20_000, 100);
        let (local, remote) = (
            fixture.local(Memory::Host, count * len),
            fixture.remote(Memory::Host, false, count * len),
        );
        local.whole().write(&vec![7; count * len]).unwrap();
        remote.region.whole().write(&vec![7; count * len]).unwrap();
        let pieces = side_by_side(&local, &remote.rmr, (count, len), |at| at * len);
        let batch = || match is_put {
            true => zero.post_put_batch(Rank(1), &pieces),
            false => zero.post_get_batch(Rank(1), &pieces),
        };
        // Of all of them together the other rank would have more lists than a rank may send.
        let done = Sink::keeping();
        for _ in 0..8 {
            batch().comp(&done).deadline(Duration::from_millis(100)).submit().unwrap();
            let status = done.one(std::slice::from_ref(zero));
            assert!(
                matches!(status.error.as_deref(), Some(OpError::TimedOut(Rank(1)))),
                "{status:?}"
            );
        }
        // It finds them all, before anything comes that it asks for.
        for _ in 0..100 {
            let _ = fixture.ranks[1].progress_all();
        }
        assert_eq!(fixture.ranks[1].peer_state(Rank(0)), PeerState::Up);
        settle(&fixture.ranks);
        let call = || batch().wait();
        on_both(&fixture.ranks, call).unwrap();
        assert_eq!(fixture.ranks[1].peer_state(Rank(0)), PeerState::Up);
        settle(&fixture.ranks);
        assert!(fixture.ranks.iter().all(|rank| rank.pending().operations.is_empty()));
    }
}

fn what_engines_are_at_for_a_batch_stays_until_they_have_done_with_it<J: Job>() {
    if !J::MAPS || is_for_simulated_only("a copy cannot be held up") {
        return;
    }
    for (memory, is_strided) in
        [(Memory::Gpu, false), (Memory::Gpu, true), (Memory::Host, false), (Memory::Host, true)]
    {
        let fixture = PieceFixture::new::<J>();
        let (zero, fake) = (&fixture.ranks[0], fixture.gpus.fake.as_ref().unwrap());
        let (local, remote) =
            (fixture.local(memory, 1000), fixture.remote(Memory::Gpu, true, 1000));
        let done = Sink::keeping();
        let held = fake.faults().hold_copies();
        {
            let piece = |at: usize| Piece {
                local: &local,
                range: at * 10..at * 10 + 5,
                rmr: &remote.rmr,
                offset: at as u64 * 10,
            };
            let pieces: Vec<_> = (0..100).rev().map(piece).collect();
            let block = Strided { offset: 0, count: [5, 100, 1], pitch: [10, 0] };
            let put = match is_strided {
                true => zero.post_put_strided(Rank(1), &local, &block, &remote.rmr, &block),
                false => zero.post_put_batch(Rank(1), &pieces),
            };
            assert!(put.comp(&done).remote_comp(fixture.name).try_submit().unwrap().is_posted());
        }
        let before = fake.counters().frees;
        drop((local, remote));
        for _ in 0..1000 {
            step(&fixture.ranks);
        }
        assert_eq!((done.count(), fake.counters().frees), (0, before), "an engine is at both");
        drop(held);
        assert!(done.one(&fixture.ranks).error.is_none());
        let freed = if memory == Memory::Gpu { 2 } else { 1 };
        until(&fixture.ranks, || {
            fixture.told.count() == 1 && fake.counters().frees == before + freed
        });
    }
}
