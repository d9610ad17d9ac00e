//! Operation × completion × matching × size × buffer: each pair of values at least once.

use crate::support::guard::Guarded;
use crate::support::over_each_transport;
use crate::support::pairwise::{OPERATIONS, Operation, rows};
use crate::support::sink::{SORTS, Sink, Sort};
use crate::support::*;
use carrack::buffer::{Buffer, SendBuffer};
use carrack::packet::{HostAllocator, PacketPool};
use carrack::transports::mem::Packet;
use carrack::{
    AwaitError, Matching, Outcome, PostError, Rank, RemoteComp, Runtime, Tag, UserContext,
};
use rand::{Rng, rngs::SmallRng};
use std::sync::Arc;

over_each_transport!(
    every_pair_of_operation_completion_policy_size_and_buffer_arrives_to_the_last_byte,
);

/// 40 is the edge of one ring slot, 96 and 152 those of two and three, 208 that of four; 8192 is a
/// packet.
const SIZES: [usize; 19] =
    [0, 1, 3, 8, 17, 39, 40, 41, 96, 97, 152, 153, 207, 208, 209, 4000, 8191, 8192, 8193];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Slice,
    Vec,
    Bytes,
    BytesMut,
    Region,
    Packet,
}

const KINDS: [Kind; 6] =
    [Kind::Slice, Kind::Vec, Kind::Bytes, Kind::BytesMut, Kind::Region, Kind::Packet];

/// Returns a packet with those bytes, which are at most its capacity.
fn packet(pool: &PacketPool, bytes: &[u8]) -> Packet {
    let mut packet = pool.take_with_len(bytes.len()).unwrap();
    packet.as_mut_slice().unwrap().copy_from_slice(bytes);
    packet
}

#[derive(Debug)]
struct Case {
    operation: Operation,
    sender_comp: Option<Sort>,
    receiver_comp: Option<Sort>,
    size: usize,
    from: Kind,
    into: Kind,
    to_self: bool,
    expected: bool,
    /// By `submit`; else by `try_submit`.
    submits: bool,
    /// Room in the receive beyond the message.
    spare: usize,
}

impl Case {
    /// Returns the case as it can run. A message longer than a packet ends for its sender when it
    /// is received: that must not wait for its end.
    fn possible(self) -> Self {
        if self.size <= 8192 {
            return self;
        }
        let receiver_comp = self.receiver_comp.or(Some(Sort::Handler));
        // Borrowed bytes of that length would have to be waited for.
        let from = if self.from == Kind::Slice { Kind::Vec } else { self.from };
        Self { expected: true, receiver_comp, from, ..self }
    }
}

struct MatrixFixture {
    ranks: [Runtime; 2],
    pool: PacketPool,
    /// One name, the same on both ranks, for each sort of completion object.
    names: Vec<(Sort, RemoteComp, [Arc<Sink>; 2])>,
}

fn every_pair_of_operation_completion_policy_size_and_buffer_arrives_to_the_last_byte<J: Job>() {
    let mut rng = rng();
    let ranks = J::pair();
    let pool = PacketPool::new(Arc::new(HostAllocator), 8192 + 64, 64);
    let names = SORTS
        .iter()
        .map(|&sort| {
            let sinks = [Arc::new(Sink::new(sort)), Arc::new(Sink::new(sort))];
            let name = ranks[0].register_comp(&*sinks[0]).unwrap();
            assert_eq!(ranks[1].register_comp(&*sinks[1]).unwrap(), name);
            (sort, name, sinks)
        })
        .collect();
    let fixture = MatrixFixture { ranks, pool, names };
    let sizes = [OPERATIONS.len(), 6, 6, SIZES.len(), KINDS.len(), KINDS.len() - 2, 2, 2, 2, 2];
    let rows = rows(&sizes, &mut rng);
    for row in &rows {
        let sort = |at: usize| SORTS.get(at).copied();
        let case = Case {
            operation: OPERATIONS[row[0]],
            sender_comp: sort(row[1]),
            receiver_comp: sort(row[2]),
            size: SIZES[row[3]],
            from: KINDS[row[4]],
            into: [Kind::Vec, Kind::BytesMut, Kind::Region, Kind::Packet][row[5]],
            to_self: row[6] == 1,
            expected: row[7] == 1,
            submits: row[8] == 1,
            spare: [0, 13][row[9]],
        };
        let case = case.possible();
        println!("{case:?}");
        fixture.run(&case, &mut rng);
    }
    println!("{} cases over {}", rows.len(), J::NAME);
}

impl MatrixFixture {
    fn run(&self, case: &Case, rng: &mut SmallRng) {
        let payload = random(rng, case.size);
        let tag = Tag(rng.random_range(0..u64::MAX));
        let context = UserContext(rng.random());
        let (from, to) = (&self.ranks[0], &self.ranks[usize::from(!case.to_self)]);
        match case.operation {
            Operation::Am => {
                self.send(case, (from, to.rank()), &payload, tag, context);
                self.check_am(case, to.rank(), &payload, tag);
            }
            Operation::Send(policy) => {
                // Without a completion object a receive returns only when it is complete, so its
                // message must have arrived or be in flight.
                if case.expected && case.receiver_comp.is_some() {
                    let receive = self.receive(case, policy, to, tag);
                    self.send(case, (from, to.rank()), &payload, tag, context);
                    receive(&payload);
                } else {
                    self.send(case, (from, to.rank()), &payload, tag, context);
                    self.receive(case, policy, to, tag)(&payload);
                }
            }
        }
        settle(&self.ranks);
    }

    fn send(
        &self,
        case: &Case,
        (from, to): (&Runtime, Rank),
        payload: &[u8],
        tag: Tag,
        context: UserContext,
    ) {
        let guarded = Guarded::new(case.size, 1).filled(payload);
        // Bytes beyond the length, which must not be sent.
        let mut vec = Vec::with_capacity(case.size + 64);
        vec.extend(payload);
        vec.extend([0xee; 64]);
        vec.truncate(case.size);
        let buffer: SendBuffer<'_> = match case.from {
            Kind::Slice => payload.into(),
            Kind::Vec => vec.into(),
            Kind::Bytes => Buffer::Bytes(vec.into()).into(),
            Kind::BytesMut => Buffer::BytesMut(payload.into()).into(),
            Kind::Region => guarded.slice().into(),
            Kind::Packet => packet(&self.pool, payload).into(),
        };
        let sink = case.sender_comp.map(Sink::new);
        macro_rules! with_options {
            ($post:expr) => {{
                let mut post = $post.user_context(context);
                if let Some(sink) = &sink {
                    post = post.comp(sink);
                }
                match case.submits {
                    true => post.submit().map(|()| Outcome::Posted).unwrap(),
                    false => posted(&self.ranks, || post.try_submit()),
                }
            }};
        }
        let outcome = match case.operation {
            Operation::Am => {
                let sort = case.receiver_comp.unwrap_or(Sort::Handler);
                let name = self.names.iter().find(|entry| entry.0 == sort).unwrap().1;
                with_options!(from.post_am(to, buffer, name).tag(tag))
            }
            Operation::Send(policy) => {
                with_options!(from.post_send(to, buffer, tag).matching(policy))
            }
        };
        let status = match (outcome, &sink) {
            (Outcome::Done(status), sink) => {
                assert!(!case.submits, "done where that was not allowed");
                settle(&self.ranks);
                assert_eq!(sink.as_ref().map_or(0, Sink::count), 0, "done, and signalled");
                Some(status)
            }
            (Outcome::Posted, Some(sink)) => {
                until(&self.ranks, || sink.count() > 0);
                settle(&self.ranks);
                assert_eq!((sink.count(), sink.failed()), (1, 0), "posted, and not signalled once");
                sink.take().pop()
            }
            (Outcome::Posted, None) => None,
            (Outcome::Retry(reason), _) => panic!("{reason:?}"),
        };
        if let Some(status) = status {
            assert!(status.error.is_none(), "{status:?}");
            assert_eq!((status.rank, status.tag, status.size), (to, tag, case.size));
            assert_eq!(status.user_context, context);
            if case.from != Kind::Slice {
                assert_eq!(
                    status.buffer.to_vec().unwrap(),
                    payload,
                    "the buffer comes back as it was"
                );
            }
        }
        guarded.assert_holds(payload);
    }

    fn check_am(&self, case: &Case, to: Rank, payload: &[u8], tag: Tag) {
        let sort = case.receiver_comp.unwrap_or(Sort::Handler);
        let sinks = &self.names.iter().find(|entry| entry.0 == sort).unwrap().2;
        let sink = &sinks[to.0 as usize];
        until(&self.ranks, || sink.count() > 0);
        settle(&self.ranks);
        assert_eq!(sink.count(), 1, "arrived more than once");
        if sort == Sort::Counter {
            sink.reset();
            return;
        }
        let status = sink.take().pop().unwrap();
        assert_eq!((status.rank, status.tag, status.size), (Rank(0), tag, payload.len()));
        assert_eq!(status.user_context, UserContext(0));
        assert_eq!(status.bytes().unwrap(), payload);
    }

    /// Posts a receive; what is returned waits for it and checks it.
    fn receive<'a>(
        &'a self,
        case: &'a Case,
        policy: Matching,
        to: &'a Runtime,
        tag: Tag,
    ) -> impl FnOnce(&[u8]) + 'a {
        let room = case.size + case.spare;
        let guarded = Guarded::new(room, 2);
        let poison = vec![0xa5; room];
        let buffer: Buffer = match case.into {
            Kind::Vec => poison.clone().into(),
            Kind::BytesMut => Buffer::BytesMut(poison[..].into()),
            Kind::Region => guarded.slice().into(),
            _ => packet(&self.pool, &poison).into(),
        };
        let sink = case.receiver_comp.map(Sink::new);
        let context = UserContext(99);
        let mut post = to.post_recv(Rank(0), buffer, tag).matching(policy).user_context(context);
        if let Some(sink) = &sink {
            post = post.comp(sink);
        }
        let outcome = match (&sink, case.submits) {
            (Some(_), true) => post.submit().map(|()| Outcome::Posted).unwrap(),
            (Some(_), false) => post.try_submit().unwrap(),
            (None, _) => Outcome::Done(post.wait().unwrap()),
        };
        assert!(!outcome.is_retry(), "a receive never has to be retried");
        assert!(
            matches!(post.wait(), Err(AwaitError::Post(PostError::Spent))),
            "the buffer is with the runtime or back with the user"
        );
        move |payload: &[u8]| {
            let status = match (outcome, &sink) {
                (Outcome::Done(status), _) => Some(status),
                (_, Some(sink)) => {
                    until(&self.ranks, || sink.count() > 0);
                    settle(&self.ranks);
                    assert_eq!((sink.count(), sink.failed()), (1, 0));
                    sink.take().pop()
                }
                (outcome, None) => panic!("{outcome:?} of a receive without a completion object"),
            };
            if case.into == Kind::Region {
                guarded.assert_holds(payload);
            }
            let Some(status) = status else { return };
            assert!(status.error.is_none(), "{status:?}");
            assert_eq!((status.rank, status.tag, status.size), (Rank(0), tag, payload.len()));
            assert_eq!(status.user_context, context);
            if case.into != Kind::Region {
                let found = status.buffer.as_slice().unwrap();
                assert_eq!(found.len(), room);
                assert_eq!(&found[..payload.len()], payload);
                assert!(
                    found[payload.len()..].iter().all(|&byte| byte == 0xa5),
                    "written past the message"
                );
                assert_eq!(status.bytes().unwrap(), payload);
            }
        }
    }
}
