//! Messages that are too long for one piece: offered, and then copied by the kernel or sent part by
//! part.

use crate::support::guard::Guarded;
use crate::support::sink::{Sink, Sort};
use crate::support::{
    Job, connect, pattern, posted, random, rng, sent, settle, start, step, unstarted, until,
    until_with_errors,
};
use carrack::settings::{AutoChoice, TransportChoice};
use carrack::{
    AsCompletion, Buffer, Completion, OpError, Outcome, ProgressError, Rank, RemoteComp, Runtime,
    Status, Tag, UserContext,
};
use parking_lot::Mutex;
use std::sync::Arc;

crate::support::over_each_transport!(
    large_messages_arrive_to_the_last_byte_whichever_side_was_first,
    large_and_small_messages_of_one_key_keep_their_order,
    a_large_message_that_is_too_long_for_its_receive_fails_on_both_sides,
    a_large_active_message_lands_where_its_completion_object_says,
    a_large_active_message_does_not_land_in_memory_that_cannot_be_written,
    a_large_active_message_to_an_unknown_name_is_reported_and_ends_at_its_sender,
    many_large_messages_both_ways_all_end,
    a_large_message_waits_for_a_peer_that_has_not_started,
    a_runtime_that_is_dropped_ends_the_large_messages_that_it_offered_and_awaited,
);

/// A packet holds 8192; the kernel copies a mebibyte at a time.
const SIZES: [usize; 5] = [8193, 20_000, 65_536, (1 << 20) + 1, 3_000_017];

/// Returns a pair for both ways of moving the bytes. Over loopback there is one way, under two
/// names.
fn pairs<J: Job>() -> impl Iterator<Item = [Runtime; 2]> {
    let choices = [AutoChoice::Auto, AutoChoice::Off];
    let own = if J::TRANSPORT == TransportChoice::Shm { 2 } else { 1 };
    choices
        .into_iter()
        .take(own)
        .map(|choice| J::pair_with(J::settings().setting("kernel_copy", choice)))
}

fn large_messages_arrive_to_the_last_byte_whichever_side_was_first<J: Job>() {
    let mut rng = rng();
    for ranks in pairs::<J>() {
        let names = Named::on(&ranks);
        for size in SIZES {
            for (to, expected, submitted) in [
                (1, true, true),
                (1, false, false),
                (1, true, false),
                (1, false, true),
                (0, true, true),
            ] {
                let payload = random(&mut rng, size);
                let (done, arrived) = (Sink::keeping(), Sink::keeping());
                let spare = size % 7;
                let guarded = Guarded::new(size + spare, 3);
                let receive = || {
                    let mut receive =
                        ranks[to].post_recv(Rank(0), guarded.slice(), Tag(5)).comp(&arrived);
                    assert!(receive.try_submit().unwrap().is_posted());
                };
                if expected {
                    receive();
                }
                let send = ranks[0].post_send(Rank(to as u32), payload.clone(), Tag(5)).comp(&done);
                let mut send = send.user_context(UserContext(7));
                match submitted {
                    true => send.submit().unwrap(),
                    false => assert!(posted(&ranks, || send.try_submit()).is_posted()),
                }
                if !expected {
                    settle(&ranks);
                    receive();
                }
                let status = arrived.one(&ranks);
                assert!(status.error.is_none(), "{status:?}");
                assert_eq!((status.rank, status.tag, status.size), (Rank(0), Tag(5), size));
                let status = done.one(&ranks);
                assert!(status.error.is_none(), "{status:?}");
                assert_eq!(
                    (status.rank, status.user_context, status.size),
                    (Rank(to as u32), UserContext(7), size)
                );
                assert_eq!(status.buffer.to_vec().unwrap(), payload, "the buffer comes back");
                guarded.assert_holds(&payload);

                let done = Sink::keeping();
                let mut am = ranks[0]
                    .post_am(Rank(to as u32), payload.clone(), names.keeping)
                    .tag(Tag(9))
                    .comp(&done);
                assert!(posted(&ranks, || am.try_submit()).is_posted());
                let status = names.arrived[to].one(&ranks);
                assert_eq!((status.rank, status.tag, status.size), (Rank(0), Tag(9), size));
                assert_eq!(status.bytes().unwrap(), payload);
                assert!(done.one(&ranks).error.is_none());
            }
        }
    }
}

struct Named {
    keeping: RemoteComp,
    arrived: [Sink; 2],
}

impl Named {
    fn on(ranks: &[Runtime; 2]) -> Self {
        let arrived = [Sink::keeping(), Sink::keeping()];
        let names = [0, 1].map(|at| ranks[at].register_comp(&arrived[at]).unwrap());
        assert_eq!(names[0], names[1]);
        Self { keeping: names[0], arrived }
    }
}

fn large_and_small_messages_of_one_key_keep_their_order<J: Job>() {
    for ranks in pairs::<J>() {
        for expected in [true, false] {
            let sizes = [9000, 8, 200_000, 0, 5000, 8193];
            let arrived = Sink::keeping();
            let receive = || {
                for number in 0..sizes.len() {
                    let mut receive =
                        ranks[1].post_recv(Rank(0), vec![0; 200_000], Tag(1)).comp(&arrived);
                    receive = receive.user_context(UserContext(number as u64));
                    receive.submit().unwrap();
                }
            };
            if expected {
                receive();
            }
            for (number, size) in sizes.into_iter().enumerate() {
                sent(&ranks, || {
                    ranks[0].post_send(Rank(1), pattern(number as u64, size), Tag(1)).try_submit()
                });
            }
            if !expected {
                settle(&ranks);
                receive();
            }
            until(&ranks, || arrived.count() == sizes.len());
            for status in arrived.take() {
                let number = status.user_context.0;
                assert_eq!(
                    status.bytes().unwrap(),
                    pattern(number, sizes[number as usize]),
                    "message {number}"
                );
            }
        }
    }
}

fn a_large_message_that_is_too_long_for_its_receive_fails_on_both_sides<J: Job>() {
    for ranks in pairs::<J>() {
        for expected in [true, false] {
            let (done, arrived) = (Sink::keeping(), Sink::keeping());
            let guarded = Guarded::new(9999, 1);
            let receive = || {
                let mut receive =
                    ranks[1].post_recv(Rank(0), guarded.slice(), Tag(1)).comp(&arrived);
                receive.submit().unwrap();
            };
            if expected {
                receive();
            }
            let mut send = ranks[0].post_send(Rank(1), vec![1; 10_000], Tag(1)).comp(&done);
            sent(&ranks, || send.try_submit());
            if !expected {
                settle(&ranks);
                receive();
            }
            for status in [arrived.one(&ranks), done.one(&ranks)] {
                let error = status.ok().unwrap_err();
                assert!(
                    matches!(error, OpError::Truncated { message: 10_000, buffer: 9999 }),
                    "{error}"
                );
            }
            guarded.assert_holds(&[]);
        }
    }
}

/// Wants large messages at the end of a buffer of its own.
struct PlacingAtEnd {
    asked: Mutex<Vec<(Rank, Tag, usize)>>,
    room: usize,
    arrived: Mutex<Vec<Status>>,
}

impl Completion for PlacingAtEnd {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.arrived.lock().push(status);
        Ok(())
    }

    fn place(&self, from: Rank, tag: Tag, size: usize) -> Option<Buffer> {
        self.asked.lock().push((from, tag, size));
        Some(Buffer::Vec(vec![0x55; self.room]))
    }
}

/// It offers bytes that are shared, which no thread may write.
#[derive(Default)]
struct ReadOnly(Mutex<Vec<Status>>);

impl Completion for ReadOnly {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.0.lock().push(status);
        Ok(())
    }

    fn place(&self, _: Rank, _: Tag, size: usize) -> Option<Buffer> {
        Some(Buffer::Bytes(vec![0; size].into()))
    }
}

fn a_large_active_message_does_not_land_in_memory_that_cannot_be_written<J: Job>() {
    for ranks in pairs::<J>() {
        let object = Arc::new(ReadOnly::default());
        let comp: Arc<dyn Completion> = object.clone();
        let name = ranks[1].register_comp(comp.as_completion()).unwrap();
        for size in [40_000, 3_000_000] {
            let payload = pattern(3, size);
            sent(&ranks, || ranks[0].post_am(Rank(1), payload.clone(), name).try_submit());
            until(&ranks, || !object.0.lock().is_empty());
            let status = object.0.lock().pop().unwrap();
            assert_eq!(status.bytes().unwrap(), payload);
        }
        ranks[1].deregister_comp(name).unwrap();
    }
}

fn a_large_active_message_lands_where_its_completion_object_says<J: Job>() {
    for ranks in pairs::<J>() {
        // Room enough, and too little: then it lands in memory of the runtime's.
        for room in [50_000, 39_999] {
            let placing =
                Arc::new(PlacingAtEnd { asked: Mutex::default(), room, arrived: Mutex::default() });
            let object: Arc<dyn Completion> = placing.clone();
            let name = ranks[1].register_comp(object.as_completion()).unwrap();
            let payload = pattern(3, 40_000);
            sent(&ranks, || {
                ranks[0].post_am(Rank(1), payload.clone(), name).tag(Tag(4)).try_submit()
            });
            until(&ranks, || !placing.arrived.lock().is_empty());
            assert_eq!(*placing.asked.lock(), [(Rank(0), Tag(4), 40_000)]);
            let status = placing.arrived.lock().pop().unwrap();
            assert_eq!(status.bytes().unwrap(), payload);
            let whole = status.buffer.to_vec().unwrap();
            assert_eq!(whole.len(), if room >= 40_000 { room } else { 40_000 });
            assert!(whole[40_000..].iter().all(|&byte| byte == 0x55));
            ranks[1].deregister_comp(name).unwrap();
        }
    }
}

fn a_large_active_message_to_an_unknown_name_is_reported_and_ends_at_its_sender<J: Job>() {
    for ranks in pairs::<J>() {
        let done = Sink::keeping();
        let mut am = ranks[0].post_am(Rank(1), vec![1; 9000], RemoteComp(777)).comp(&done);
        sent(&ranks, || am.try_submit());
        let errors = until_with_errors(&ranks, || done.count() == 1);
        let named = |error: &ProgressError| {
            matches!(
                error,
                ProgressError::NoSuchCompletion {
                    from: Rank(0),
                    comp: RemoteComp(777),
                    size: 9000
                }
            )
        };
        assert!(errors.len() == 1 && errors.iter().all(named), "{errors:?}");
        assert!(done.take().remove(0).error.is_none());
    }
}

fn many_large_messages_both_ways_all_end<J: Job>() {
    const COUNT: u64 = 60;
    for ranks in pairs::<J>() {
        let size = |number: u64| 8193 + (number * 7919 % 90_000) as usize;
        let done = [0, 1].map(|_| Sink::new(Sort::Queue));
        let arrived = [0, 1].map(|_| Sink::keeping());
        for number in 0..COUNT {
            for (at, sink) in arrived.iter().enumerate() {
                let from = Rank(1 - at as u32);
                let mut receive =
                    ranks[at].post_recv(from, vec![0; 100_000], Tag(number)).comp(sink);
                assert!(receive.try_submit().unwrap().is_posted());
            }
        }
        for number in 0..COUNT {
            for (at, sink) in done.iter().enumerate() {
                let to = Rank(1 - at as u32);
                let bytes = pattern(number << 1 | at as u64, size(number));
                let mut send = ranks[at].post_send(to, bytes, Tag(number)).comp(sink);
                match number % 2 {
                    0 => assert!(posted(&ranks, || send.try_submit()).is_posted()),
                    _ => send.submit().unwrap(),
                }
            }
        }
        until(&ranks, || done.iter().chain(&arrived).all(|sink| sink.count() == COUNT as usize));
        for (at, sink) in arrived.iter().enumerate() {
            for status in sink.take() {
                let number = status.tag.0;
                assert_eq!(
                    status.bytes().unwrap(),
                    pattern(number << 1 | (1 - at as u64), size(number))
                );
            }
        }
        assert_eq!(done.iter().map(Sink::failed).sum::<usize>(), 0);
    }
}

fn a_large_message_waits_for_a_peer_that_has_not_started<J: Job>() {
    let mut job = unstarted(2).into_iter();
    let zero = start(job.next().unwrap(), J::settings());
    let (done, payload) = (Sink::keeping(), pattern(1, 30_000));
    let mut send = zero.post_send(Rank(1), payload.clone(), Tag(1)).comp(&done);
    send.submit().unwrap();
    step(std::slice::from_ref(&zero));
    let ranks = [zero.clone(), start(job.next().unwrap(), J::settings())];
    let arrived = Sink::keeping();
    let mut receive = ranks[1].post_recv(Rank(0), vec![0; 30_000], Tag(1)).comp(&arrived);
    assert!(matches!(receive.try_submit().unwrap(), Outcome::Posted));
    assert_eq!(arrived.one(&ranks).bytes().unwrap(), payload);
    assert_eq!(done.one(&ranks).buffer.to_vec().unwrap(), payload);
}

fn a_runtime_that_is_dropped_ends_the_large_messages_that_it_offered_and_awaited<J: Job>() {
    for matched in [false, true] {
        let ranks = J::pair_with(J::settings().setting("kernel_copy", AutoChoice::Off));
        connect(&ranks);
        let (done, arrived) = (Sink::keeping(), Sink::keeping());
        if matched {
            let mut receive = ranks[1].post_recv(Rank(0), vec![0; 1 << 20], Tag(1)).comp(&arrived);
            assert!(receive.try_submit().unwrap().is_posted());
        }
        sent(&ranks, || {
            ranks[0].post_send(Rank(1), vec![1; 1 << 20], Tag(1)).comp(&done).try_submit()
        });
        for _ in 0..if matched { 3 } else { 100 } {
            let _ = ranks[1].progress_all();
        }
        let [zero, one] = ranks;
        drop(zero);
        let status = done.take().pop().expect("it has ended");
        assert!(matches!(status.error.as_deref(), Some(OpError::Closed)), "{status:?}");
        assert_eq!(status.buffer.to_vec().unwrap(), vec![1; 1 << 20]);
        if matched {
            let ranks = [one];
            let error = arrived.one(&ranks).ok().unwrap_err();
            assert!(matches!(error, OpError::PeerDown { rank: Rank(0), .. }), "{error}");
        }
    }
}
