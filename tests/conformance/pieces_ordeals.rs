//! Batches that are refused, wait, are ordered after something, or come to a bad end.

use super::pieces::{
    Memory, PieceFixture, Remote, more_than_16, on_both, posted_or_refused, side_by_side,
};
use crate::support::gpus::is_for_simulated_only;
use crate::support::keys::with_len;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::AutoChoice;
use carrack::transports::gpu::Stream;
use carrack::{
    AwaitError, CompQueue, OpError, Outcome, PendingOp, Piece, PostError, Rank, Strided,
    StridedError, Tag,
};
use carrack_simulators::gpu::{FailAt, Kernel, Which};
use std::sync::Arc;

crate::support::over_each_transport_and!(
    copiers,
    WithCopiers;
    a_batch_of_no_pieces_ends_at_once_and_sends_its_notification,
    what_makes_no_sense_is_refused_by_name_and_moves_nothing,
    pieces_that_overlap_are_refused_and_both_are_named,
    a_batch_longer_than_what_may_wait_goes_on_by_itself_and_a_flush_waits_for_all_of_it,
    a_batch_ends_once_when_the_peer_goes_and_when_this_rank_does,
    a_batch_after_an_event_is_written_when_it_has_fired,
    a_batch_whose_copy_fails_ends_once_with_the_drivers_error_and_sends_no_notification,
    a_batch_waits_in_a_call_that_may_not_be_posted_and_can_be_awaited,
    of_small_pieces_that_go_together_one_that_is_refused_is_told_of_and_leaves_the_others_be,
);

fn a_batch_of_no_pieces_ends_at_once_and_sends_its_notification<J: Job>() {
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    for is_put in [true, false] {
        let batch = if is_put {
            zero.post_put_batch(Rank(1), &[])
        } else {
            zero.post_get_batch(Rank(1), &[])
        };
        let status = batch.remote_comp(fixture.name).tag(Tag(3)).wait().unwrap();
        assert!(status.error.is_none() && status.size == 0, "{status:?}");
        until(&fixture.ranks, || fixture.told.count() == 1);
        let told = fixture.told.take().remove(0);
        assert_eq!((told.rank, told.size, told.tag), (Rank(0), 0, Tag(3)));
        // Not done, if that is not allowed.
        let sink = Sink::keeping();
        let batch = if is_put {
            zero.post_put_batch(Rank(1), &[])
        } else {
            zero.post_get_batch(Rank(1), &[])
        };
        batch.comp(&sink).submit().unwrap();
        assert_eq!(sink.one(&fixture.ranks).size, 0);
    }
    let put = zero.post_put_batch(Rank(9), &[]).try_submit();
    assert!(matches!(put, Err(PostError::NoSuchRank { .. })), "{put:?}");
}

fn what_makes_no_sense_is_refused_by_name_and_moves_nothing<J: Job>() {
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    let ours = fixture.ranks[0].allocate(1000).unwrap();
    let own = fixture.ranks[0].register_memory(&ours).unwrap();
    let own = own.remote_key();
    for (memory, mapped) in [(Memory::Host, true), (Memory::Host, false), (Memory::Gpu, true)] {
        let (local, remote) = (fixture.local(memory, 1000), fixture.remote(memory, mapped, 1000));
        local.whole().write(&[1; 1000]).unwrap();
        remote.region.whole().write(&[0; 1000]).unwrap();
        let rmr = &remote.rmr;
        let piece = |range, offset| Piece { local: &local, range, rmr, offset };
        let put = |wrong: Piece<'_>| {
            // Behind pieces that make sense.
            let pieces = [piece(0..100, 0), piece(0..100, 300), wrong, piece(0..10, 900)];
            let put = zero.post_put_batch(Rank(1), &pieces).try_submit();
            match put {
                Err(PostError::Piece { at: 2, cause }) => *cause,
                other => panic!("{other:?}"),
            }
        };
        for (range, offset) in
            [(0..10, 991), (0..10, u64::MAX), (0..10, u64::MAX - 4), (5..5, 1001)]
        {
            let refused = put(piece(range, offset));
            assert!(matches!(refused, PostError::Outside { room: 1000, .. }), "{refused}");
        }
        #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
        for range in [991..1001, 1001..1001, 10..5, 5..usize::MAX, usize::MAX..usize::MAX] {
            let refused = put(piece(range.clone(), 0));
            assert!(
                matches!(&refused, PostError::OutsideLocal { room: 1000, .. }),
                "{range:?}: {refused}"
            );
        }
        // Of this rank's own memory, and of rank 1's as if it were rank 0's.
        let refused = put(Piece { rmr: &own, ..piece(0..10, 200) });
        assert!(matches!(refused, PostError::Owner { rank: Rank(1), owner: Rank(0) }), "{refused}");
        let mixed = zero.post_put_batch(Rank(0), &[piece(0..1, 0)]).try_submit();
        assert!(matches!(mixed, Err(PostError::Piece { at: 0, .. })), "{mixed:?}");

        let whole = Strided { offset: 0, count: [10, 10, 1], pitch: [100, 0] };
        let put = |ours: &Strided, theirs: &Strided| {
            zero.post_put_strided(Rank(1), &local, ours, rmr, theirs).try_submit().unwrap_err()
        };
        for wrong in [
            Strided { offset: 91, ..whole },
            Strided { offset: usize::MAX, ..whole },
            Strided { pitch: [usize::MAX / 2, 0], ..whole },
            Strided { count: [1, 2, usize::MAX], pitch: [1, usize::MAX / 2], ..whole },
        ] {
            let same = Strided { count: wrong.count, ..whole };
            for (ours, theirs, side) in [(&wrong, &same, "local"), (&same, &wrong, "remote")] {
                let refused = put(ours, theirs);
                let PostError::Strided { which, cause } = &refused else { panic!("{refused}") };
                // Where the shape itself is impossible, both are wrong.
                let is_shape = wrong.count != whole.count;
                assert!(
                    is_shape || (*which == side && matches!(cause, StridedError::Outside { .. })),
                    "{refused}"
                );
            }
        }
        let narrow = Strided { pitch: [9, 0], ..whole };
        assert!(matches!(
            put(&narrow, &whole),
            PostError::Strided { which: "local", cause: StridedError::Pitch { .. } }
        ));
        assert!(matches!(
            put(&whole, &narrow),
            PostError::Strided { which: "remote", cause: StridedError::Pitch { .. } }
        ));
        let other = Strided { count: [10, 9, 1], ..whole };
        assert!(matches!(
            put(&whole, &other),
            PostError::Strided { cause: StridedError::Shape { .. }, .. }
        ));
        settle(&fixture.ranks);
        assert_eq!(
            remote.region.whole().to_vec().unwrap(),
            [0; 1000],
            "{memory:?}: nothing was moved"
        );

        // A name that says more than there is: what is mapped is checked here, else by its owner.
        let (forged, sink) = (with_len(rmr, 5000), Sink::keeping());
        let pieces = [Piece { rmr: &forged, ..piece(0..10, 4000) }];
        match posted_or_refused(&fixture.ranks, || {
            zero.post_put_batch(Rank(1), &pieces).comp(&sink).try_submit()
        }) {
            Err(PostError::Piece { at: 0, cause }) => {
                assert!(matches!(*cause, PostError::Outside { .. }))
            }
            Ok(Outcome::Posted) => {
                let error = sink.one(&fixture.ranks).ok().unwrap_err();
                assert!(matches!(error, OpError::Outside(Rank(1)) | OpError::Begin(_)), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // A registration that has ended.
        let Remote { region, rmr, registered } = remote;
        fixture.ranks[1].deregister_memory(registered);
        settle(&fixture.ranks);
        let pieces = [Piece { local: &local, range: 0..10, rmr: &rmr, offset: 0 }];
        match posted_or_refused(&fixture.ranks, || {
            zero.post_put_batch(Rank(1), &pieces).comp(&sink).try_submit()
        }) {
            Err(PostError::Piece { at: 0, cause }) => {
                assert!(matches!(*cause, PostError::Stale(Rank(1))))
            }
            Ok(Outcome::Posted) => {
                let error = sink.one(&fixture.ranks).ok().unwrap_err();
                assert!(matches!(error, OpError::Stale(Rank(1))), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(region.whole().to_vec().unwrap(), [0; 1000]);
    }
}

fn pieces_that_overlap_are_refused_and_both_are_named<J: Job>() {
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    let (local, remote) =
        (fixture.local(Memory::Host, 1000), fixture.remote(Memory::Host, true, 1000));
    let other = fixture.remote(Memory::Host, true, 1000);
    local.whole().write(&[1; 1000]).unwrap();
    let piece = |range, offset| Piece { local: &local, range, rmr: &remote.rmr, offset };
    let shifted = remote.rmr.slice(100, 900).unwrap();
    for (pieces, is_put, wanted) in [
        (vec![piece(0..10, 50), piece(20..30, 70), piece(40..50, 59)], true, Some((0, 2))),
        (vec![piece(0..100, 0), piece(10..11, 50)], true, Some((0, 1))),
        // By another name of a part of the same memory.
        (vec![piece(0..10, 150), Piece { rmr: &shifted, ..piece(0..10, 55) }], true, Some((0, 1))),
        // What is read may be read twice; what is empty overlaps with nothing.
        (vec![piece(0..10, 50), piece(0..10, 60), piece(5..5, 55)], true, None),
        (vec![piece(0..10, 50), Piece { rmr: &other.rmr, ..piece(0..10, 50) }], true, None),
        (vec![piece(0..10, 50), piece(10..20, 50)], false, None),
        (vec![piece(0..10, 50), piece(30..40, 70), piece(9..19, 90)], false, Some((0, 2))),
    ] {
        let call = || match is_put {
            true => zero.post_put_batch(Rank(1), &pieces).wait(),
            false => zero.post_get_batch(Rank(1), &pieces).wait(),
        };
        match (on_both(&fixture.ranks, call), wanted) {
            (Ok(_), None) => {}
            (Err(AwaitError::Post(PostError::Overlap { first, second })), Some(wanted)) => {
                assert_eq!((first, second), wanted);
            }
            other => panic!("{other:?}"),
        }
    }
}

fn a_batch_longer_than_what_may_wait_goes_on_by_itself_and_a_flush_waits_for_all_of_it<J: Job>() {
    let settings = J::settings().offers(16).setting("kernel_copy", AutoChoice::Off);
    let (fixture, mut rng) = (PieceFixture::over(J::pair_with(settings)), rng());
    let zero = &fixture.ranks[0];
    let sorts = more_than_16::<J>();
    for (memory, (count, len)) in
        [Memory::Host, Memory::Gpu].into_iter().flat_map(|one| sorts.map(|sort| (one, sort)))
    {
        let (local, remote) =
            (fixture.local(memory, count * len), fixture.remote(memory, false, count * len));
        let bytes = random(&mut rng, count * len);
        local.whole().write(&bytes).unwrap();
        let pieces = side_by_side(&local, &remote.rmr, (count, len), |at| (count - 1 - at) * len);
        let (done, flushed) = (Sink::keeping(), Sink::keeping());
        let mut put = zero.post_put_batch(Rank(1), &pieces).comp(&done).remote_comp(fixture.name);
        put.submit().unwrap();
        if !J::IS_RDMA {
            let waiting = zero.pending();
            let is_rest =
                |op: &PendingOp| op.what == "put of a batch" && op.waits_for.contains("room");
            assert!(waiting.operations.iter().any(is_rest), "{waiting:?}");
        }
        zero.post_flush(Rank(1)).comp(&flushed).submit().unwrap();
        until(&fixture.ranks, || flushed.count() == 1);
        let found = remote.region.whole().to_vec().unwrap();
        assert!(
            found.chunks(len).eq(bytes.chunks(len).rev()),
            "{memory:?}, {len} B: the flush was early"
        );
        assert!(done.one(&fixture.ranks).error.is_none());
        until(&fixture.ranks, || fixture.told.count() == 1);
        assert_eq!(fixture.told.take().remove(0).size, count * len);
    }
}

fn a_batch_ends_once_when_the_peer_goes_and_when_this_rank_does<J: Job>() {
    let sorts = [(Memory::Host, 1000, 5000), (Memory::Host, 20_000, 100), (Memory::Gpu, 1000, 100)];
    let each = |(peer_goes, sort)| [true, false].map(|is_put| (peer_goes, is_put, sort));
    for (peer_goes, is_put, (memory, count, len)) in [true, false]
        .into_iter()
        .flat_map(|peer_goes| sorts.map(|sort| (peer_goes, sort)))
        .flat_map(each)
    {
        let settings = J::settings().offers(16).setting("kernel_copy", AutoChoice::Off);
        let fixture = PieceFixture::over(J::pair_with(settings));
        let (local, remote) =
            (fixture.local(memory, count * len), fixture.remote(Memory::Host, false, count * len));
        let pieces = side_by_side(&local, &remote.rmr, (count, len), |at| at * len);
        let done = Sink::keeping();
        connect(&fixture.ranks);
        let zero = &fixture.ranks[0];
        let put = match is_put {
            true => zero.post_put_batch(Rank(1), &pieces),
            false => zero.post_get_batch(Rank(1), &pieces),
        };
        put.comp(&done).submit().unwrap();
        let PieceFixture { ranks: [zero, one], .. } = fixture;
        if peer_goes {
            drop((remote, one));
            let ranks = [zero];
            let error = done.one(&ranks).ok().unwrap_err();
            assert!(matches!(error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
            settle(&ranks);
            let put = ranks[0].post_put_batch(Rank(1), &[]).try_submit();
            assert!(matches!(put, Err(PostError::PeerDown { rank: Rank(1), .. })), "{put:?}");
        } else {
            drop(zero);
            let statuses = done.take();
            assert_eq!(statuses.len(), 1, "{statuses:?}");
            assert!(matches!(statuses[0].error.as_deref(), Some(OpError::Closed)), "{statuses:?}");
        }
        assert_eq!(done.count(), 0);
    }
}

/// Waits for an event of the program, and for a stream: the batch reads the bytes from after the
/// event.
fn a_batch_after_an_event_is_written_when_it_has_fired<J: Job>() {
    if is_for_simulated_only("there is no kernel that a test could hold up") {
        return;
    }
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    let fake = fixture.gpus.fake.as_ref().unwrap();
    let each = |memory| [true, false].map(|mapped| (memory, mapped));
    let each = [Memory::Gpu, Memory::Host].into_iter().flat_map(each);
    for (memory, mapped, on_stream, is_strided) in each.flat_map(|(memory, mapped)| {
        [(true, true), (true, false), (false, true), (false, false)]
            .map(|(on_stream, is_strided)| (memory, mapped, on_stream, is_strided))
    }) {
        let what =
            format!("{memory:?} mapped: {mapped}, on a stream: {on_stream}, strided: {is_strided}");
        let (local, remote) =
            (fixture.local(memory, 1000), fixture.remote(Memory::Gpu, mapped, 2000));
        local.whole().write(&[0; 1000]).unwrap();
        remote.region.whole().write(&[9; 2000]).unwrap();
        let stream = fake.gpu(0).unwrap().fake_stream().unwrap();
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let slice = local.whole();
        let kernel = move |kernel: &mut Kernel| {
            gate.recv().unwrap();
            match memory {
                Memory::Gpu => kernel.write(&slice, &[1; 1000]),
                _ => Ok(()),
            }
        };
        stream.launch(kernel).unwrap();
        let as_stream: Arc<dyn Stream> = stream.clone();
        let piece = |at: usize| Piece {
            local: &local,
            range: at * 10..at * 10 + 10,
            rmr: &remote.rmr,
            offset: (at * 20) as u64,
        };
        let pieces: Vec<_> = (0..100).map(piece).collect();
        let ours = Strided { offset: 0, count: [10, 100, 1], pitch: [10, 0] };
        let theirs = Strided { pitch: [20, 0], ..ours };
        let done = Sink::keeping();
        let put = if is_strided {
            zero.post_put_strided(Rank(1), &local, &ours, &remote.rmr, &theirs)
        } else {
            zero.post_put_batch(Rank(1), &pieces)
        };
        let put = put.comp(&done).remote_comp(fixture.name);
        let mut put = if on_stream {
            put.on_stream(&as_stream)
        } else {
            put.after(&stream.record().unwrap())
        };
        assert!(posted(&fixture.ranks, || put.try_submit()).is_posted(), "{what}");
        if on_stream && memory == Memory::Gpu {
            // What the stream does later comes after the batch.
            let slice = local.whole();
            stream.launch(move |kernel| kernel.write(&slice, &[2; 1000])).unwrap();
        }
        for _ in 0..100 {
            step(&fixture.ranks);
        }
        assert_eq!((done.count(), fixture.told.count()), (0, 0), "{what}: it was not waited for");
        if memory == Memory::Host {
            // Until then it may be written.
            local.whole().write(&[1; 1000]).unwrap();
        }
        go.send(()).unwrap();
        until(&fixture.ranks, || fixture.told.count() == 1);
        let found = remote.region.whole().to_vec().unwrap();
        let wanted: Vec<u8> = (0..2000).map(|at| if at % 20 < 10 { 1 } else { 9 }).collect();
        assert!(found == wanted, "{what}");
        assert_eq!(fixture.told.take().remove(0).size, 1000);
        assert!(done.one(&fixture.ranks).error.is_none());
        stream.synchronize().unwrap();
    }
}

fn a_batch_whose_copy_fails_ends_once_with_the_drivers_error_and_sends_no_notification<J: Job>() {
    if is_for_simulated_only("no copy can be made to fail") {
        return;
    }
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    let faults = fixture.gpus.fake.as_ref().unwrap().faults();
    for (memory, mapped) in
        [(Memory::Gpu, true), (Memory::Gpu, false), (Memory::Host, true), (Memory::Host, false)]
    {
        let local = fixture.local(memory, 1000);
        for at in [FailAt::Submit, FailAt::Event] {
            let remote = fixture.remote(Memory::Gpu, mapped, 1000);
            let piece = |at: usize| Piece {
                local: &local,
                range: at..at + 1,
                rmr: &remote.rmr,
                offset: at as u64,
            };
            let pieces: Vec<_> = (0..100).map(piece).collect();
            let done = Sink::keeping();
            faults.fail_copies(at, Which::All, 700);
            match posted_or_refused(&fixture.ranks, || {
                zero.post_put_batch(Rank(1), &pieces)
                    .comp(&done)
                    .remote_comp(fixture.name)
                    .try_submit()
            }) {
                Err(PostError::Memory(error)) => {
                    assert!(at == FailAt::Submit && error.to_string().contains("700"), "{error}");
                }
                Ok(Outcome::Posted) if J::IS_RDMA => {
                    // The NIC may need no engine.
                    until(&fixture.ranks, || done.count() == 1);
                    let has_ended = done.take().remove(0).error.is_none();
                    faults.heal_copies();
                    settle(&fixture.ranks);
                    assert_eq!(fixture.told.take().len(), usize::from(has_ended));
                    continue;
                }
                Ok(Outcome::Posted) => {
                    let error = done.one(&fixture.ranks).ok().unwrap_err();
                    let ours = mapped && J::MAPS;
                    assert!(!ours || error.to_string().contains("700"), "{error}");
                }
                other => panic!("{other:?}"),
            }
            faults.heal_copies();
            settle(&fixture.ranks);
            assert_eq!((done.count(), fixture.told.count()), (0, 0));
        }
    }
}

fn a_batch_waits_in_a_call_that_may_not_be_posted_and_can_be_awaited<J: Job>() {
    let fixture = PieceFixture::new::<J>();
    for (memory, mapped) in [(Memory::Host, true), (Memory::Host, false), (Memory::Gpu, true)] {
        let (local, remote) = (fixture.local(memory, 1000), fixture.remote(memory, mapped, 1000));
        local.whole().write(&[5; 1000]).unwrap();
        remote.region.whole().write(&[0; 1000]).unwrap();
        let piece = |at: usize| Piece {
            local: &local,
            range: at..at + 9,
            rmr: &remote.rmr,
            offset: at as u64,
        };
        let pieces: Vec<_> = (0..50).map(|at| piece(at * 10)).collect();
        let zero = &fixture.ranks[0];
        let put = || zero.post_put_batch(Rank(1), &pieces).wait();
        let status = on_both(&fixture.ranks, put).unwrap();
        assert!(status.error.is_none() && status.size == 450, "{status:?}");
        let wanted: Vec<u8> =
            (0..1000).map(|at| if at < 500 && at % 10 < 9 { 5 } else { 0 }).collect();
        assert!(remote.region.whole().to_vec().unwrap() == wanted);
        let back = fixture.local(memory, 1000);
        back.whole().write(&[0; 1000]).unwrap();
        let pieces: Vec<_> =
            pieces.iter().map(|piece| Piece { local: &back, ..piece.clone() }).collect();
        let get = || zero.block_on(async { zero.post_get_batch(Rank(1), &pieces).await });
        let status = on_both(&fixture.ranks, get).unwrap().unwrap();
        assert_eq!(status.size, 450);
        assert!(back.whole().to_vec().unwrap() == wanted);
        // A completion object that is full is told when it has room.
        let queue = CompQueue::new(1);
        let mut posted = 0;
        for _ in 0..20 {
            let mut put = zero.post_put_batch(Rank(1), &pieces).comp(&queue);
            put.submit().unwrap();
            posted += 1;
        }
        let mut come = 0;
        until_with_errors(&fixture.ranks, || {
            come += std::iter::from_fn(|| queue.pop()).count();
            come == posted
        });
    }
}

fn of_small_pieces_that_go_together_one_that_is_refused_is_told_of_and_leaves_the_others_be<
    J: Job,
>() {
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    for (memory, theirs, is_put) in [
        (Memory::Host, Memory::Host, true),
        (Memory::Host, Memory::Host, false),
        (Memory::Gpu, Memory::Gpu, true),
        (Memory::Gpu, Memory::Gpu, false),
    ] {
        let (local, remote) = (fixture.local(memory, 1000), fixture.remote(theirs, false, 1000));
        local.whole().write(&[1; 1000]).unwrap();
        remote.region.whole().write(&[2; 1000]).unwrap();
        // A name that says more than there is.
        let forged = with_len(&remote.rmr, u64::MAX);
        for wrong in [995, 1000, 5000, u64::MAX - 10] {
            let piece = |at: usize, offset| Piece {
                local: &local,
                range: at * 10..at * 10 + 10,
                rmr: &forged,
                offset,
            };
            let pieces = [piece(0, 0), piece(1, wrong), piece(2, 500)];
            let sink = Sink::keeping();
            let call = || match is_put {
                true => zero
                    .post_put_batch(Rank(1), &pieces)
                    .comp(&sink)
                    .remote_comp(fixture.name)
                    .try_submit(),
                false => zero
                    .post_get_batch(Rank(1), &pieces)
                    .comp(&sink)
                    .remote_comp(fixture.name)
                    .try_submit(),
            };
            let outcome = posted_or_refused(&fixture.ranks, call);
            assert!(matches!(outcome, Ok(Outcome::Posted)), "{outcome:?}");
            let error = sink.one(&fixture.ranks).ok().unwrap_err();
            assert!(
                matches!(error, OpError::Outside(Rank(1)) | OpError::Begin(_)),
                "{wrong}: {error}"
            );
            settle(&fixture.ranks);
            assert_eq!(fixture.told.count(), 0, "no notification");
        }
        if !J::IS_RDMA {
            // What is wrong is found before anything is copied.
            assert_eq!(remote.region.whole().to_vec().unwrap(), [2; 1000]);
            assert_eq!(local.whole().to_vec().unwrap(), [1; 1000]);
        }
        // And afterwards what makes sense goes on.
        let pieces: Vec<_> = (0..50)
            .map(|at: usize| Piece {
                local: &local,
                range: at * 20..at * 20 + 10,
                rmr: &remote.rmr,
                offset: at as u64 * 10,
            })
            .collect();
        let call = || match is_put {
            true => zero.post_put_batch(Rank(1), &pieces).wait(),
            false => zero.post_get_batch(Rank(1), &pieces).wait(),
        };
        on_both(&fixture.ranks, call).unwrap();
    }
}
