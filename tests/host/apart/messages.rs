//! Operation × completion × matching × size × buffer: each pair of values at least once.

use super::{PairedRank, SIZE};
use crate::support::guard::Guarded;
use crate::support::pairwise::{OPERATIONS, Operation, rows};
use crate::support::sink::{SORTS, Sink, Sort};
use crate::support::{pattern, posted, until};
use carrack::buffer::{Buffer, SendBuffer};
use carrack::{Matching, Outcome, Rank, RemoteComp, Tag, UserContext};
use rand::{SeedableRng, rngs::SmallRng};

/// The edges of what goes inline or in a ring's slots, of a packet, and of what is shared out.
const SIZES: [usize; 16] =
    [0, 1, 8, 39, 40, 41, 152, 208, 209, 4000, 8191, 8192, 8193, 65_537, 200_003, (1 << 20) + 1];

/// Longest message in one piece, in bytes.
const PACKET: usize = 8192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Slice,
    Vec,
    Bytes,
    Region,
}

const KINDS: [Kind; 4] = [Kind::Slice, Kind::Vec, Kind::Bytes, Kind::Region];

#[derive(Debug)]
struct Case {
    number: u64,
    operation: Operation,
    sender_comp: Option<Sort>,
    receiver_comp: Option<Sort>,
    size: usize,
    from: Kind,
    into: Kind,
    sender: Rank,
    /// `true` if the receive is posted before the message is sent, `false` if after its arrival.
    expected: bool,
    /// By `submit`; else by `try_submit`.
    submits: bool,
    /// Room in the receive beyond the message.
    spare: usize,
}

impl Case {
    /// Returns the case as it can run. Without a completion object a post of a long message does
    /// not return before it is received: that must not wait for its end.
    fn possible(self) -> Self {
        let is_long = self.size > PACKET;
        // Borrowed bytes of that length would have to be waited for.
        let from = if is_long && self.from == Kind::Slice { Kind::Vec } else { self.from };
        Self { expected: self.expected || is_long && self.sender_comp.is_none(), from, ..self }
    }

    fn tag(&self) -> Tag {
        Tag(self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1)
    }

    fn payload(&self, seed: u64) -> Vec<u8> {
        pattern(seed ^ self.number, self.size)
    }

    /// Returns the kind of completion object that an active message goes to.
    fn target(&self) -> Sort {
        self.receiver_comp.unwrap_or(Sort::Handler)
    }
}

/// One name, the same on both ranks, for each sort of completion object.
type NamedSinks = Vec<(Sort, RemoteComp, Sink)>;

pub(crate) fn in_all_pairs(me: &PairedRank) {
    let named = |sort| {
        let sink = Sink::new(sort);
        (sort, me.runtime.register_comp(&sink).unwrap(), sink)
    };
    let names: NamedSinks = SORTS.into_iter().map(named).collect();
    let sizes = [OPERATIONS.len(), 6, 6, SIZES.len(), KINDS.len(), 2, 2, 2, 2, 2];
    let mut rng = SmallRng::seed_from_u64(me.seed);
    let drawn = if me.is_first() { rows(&sizes, &mut rng) } else { Vec::new() };
    let drawn: Vec<u8> = drawn.into_iter().flatten().map(|value| value as u8).collect();
    let rows = me.runtime.world().broadcast(Rank(0), &drawn).unwrap();
    assert!(rows.len() > 80 * sizes.len(), "{} bytes are no table of all pairs", rows.len());
    for (number, row) in (1..).zip(rows.chunks_exact(sizes.len())) {
        let row: Vec<usize> = row.iter().map(|&value| value.into()).collect();
        let sort = |at: usize| SORTS.get(at).copied();
        let case = Case {
            number,
            operation: OPERATIONS[row[0]],
            sender_comp: sort(row[1]),
            receiver_comp: sort(row[2]),
            size: SIZES[row[3]],
            from: KINDS[row[4]],
            into: [Kind::Vec, Kind::Region][row[5]],
            sender: Rank(row[6] as u32 % SIZE),
            expected: row[7] == 1,
            submits: row[8] == 1,
            spare: [0, 13][row[9]],
        };
        run(me, &case.possible(), &names);
        me.meet();
    }
}

/// Runs this rank's side of a case.
fn run(me: &PairedRank, case: &Case, names: &NamedSinks) {
    let is_sender = me.runtime.rank() == case.sender;
    match (case.operation, is_sender, case.expected) {
        (Operation::Am, true, _) => send(me, case, names, || {}),
        (Operation::Am, false, _) => take_am(me, case, names),
        (Operation::Send(_), true, true) => {
            me.hears_go();
            send(me, case, names, || {});
        }
        (Operation::Send(policy), false, true) => receive(me, case, policy, || me.says_go()),
        (Operation::Send(_), true, false) => send(me, case, names, || me.says_go()),
        (Operation::Send(policy), false, false) => {
            me.hears_go();
            receive(me, case, policy, || {});
        }
    }
}

/// Sends, and does something as soon as that is posted.
fn send(me: &PairedRank, case: &Case, names: &NamedSinks, then: impl FnOnce()) {
    let payload = case.payload(me.seed);
    let context = UserContext(case.number);
    let guarded = Guarded::new(case.size, 1).filled(&payload);
    // Bytes beyond the length, which must not be sent.
    let mut vec = Vec::with_capacity(case.size + 64);
    vec.extend(&payload);
    vec.extend([0xee; 64]);
    vec.truncate(case.size);
    let buffer: SendBuffer<'_> = match case.from {
        Kind::Slice => payload[..].into(),
        Kind::Vec => vec.into(),
        Kind::Bytes => Buffer::Bytes(vec.into()).into(),
        Kind::Region => guarded.slice().into(),
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
                false => posted(me.all(), || post.try_submit()),
            }
        }};
    }
    let outcome = match case.operation {
        Operation::Am => {
            let name = names.iter().find(|entry| entry.0 == case.target()).unwrap().1;
            with_options!(me.runtime.post_am(me.peer, buffer, name).tag(case.tag()))
        }
        Operation::Send(policy) => {
            with_options!(me.runtime.post_send(me.peer, buffer, case.tag()).matching(policy))
        }
    };
    then();
    let status = match (outcome, &sink) {
        (Outcome::Done(status), sink) => {
            assert!(!case.submits, "{case:?}: done where that was not allowed");
            me.lingers();
            assert_eq!(sink.as_ref().map_or(0, Sink::count), 0, "{case:?}: done, and signalled");
            Some(status)
        }
        (Outcome::Posted, Some(sink)) => {
            until(me.all(), || sink.count() > 0);
            me.lingers();
            assert_eq!(
                (sink.count(), sink.failed()),
                (1, 0),
                "{case:?}: posted, and not signalled once"
            );
            sink.take().pop()
        }
        (Outcome::Posted, None) => None,
        (Outcome::Retry(reason), _) => panic!("{reason:?}"),
    };
    if let Some(status) = status {
        assert!(status.error.is_none(), "{case:?}: {status:?}");
        assert_eq!(
            (status.rank, status.tag, status.size),
            (me.peer, case.tag(), case.size),
            "{case:?}"
        );
        assert_eq!(status.user_context, context);
        if case.from != Kind::Slice {
            assert_eq!(
                status.buffer.to_vec().unwrap(),
                payload,
                "{case:?}: the buffer comes back as it was"
            );
        }
    }
    guarded.assert_holds(&payload);
}

fn take_am(me: &PairedRank, case: &Case, names: &NamedSinks) {
    let sink = &names.iter().find(|entry| entry.0 == case.target()).unwrap().2;
    until(me.all(), || sink.count() > 0);
    me.lingers();
    assert_eq!(sink.count(), 1, "{case:?}: arrived more than once");
    if sink.sort == Sort::Counter {
        return sink.reset();
    }
    let status = sink.take().pop().unwrap();
    assert_eq!(
        (status.rank, status.tag, status.size),
        (me.peer, case.tag(), case.size),
        "{case:?}"
    );
    assert!(status.bytes().unwrap() == case.payload(me.seed), "{case:?}: other bytes");
}

/// Receives, and does something as soon as that is posted; without a completion object, before it
/// waits for the message.
fn receive(me: &PairedRank, case: &Case, policy: Matching, then: impl FnOnce()) {
    let payload = case.payload(me.seed);
    let room = case.size + case.spare;
    let guarded = Guarded::new(room, 2);
    let buffer: Buffer = match case.into {
        Kind::Region => guarded.slice().into(),
        _ => vec![0xa5; room].into(),
    };
    let sink = case.receiver_comp.map(Sink::new);
    let context = UserContext(99);
    let mut post =
        me.runtime.post_recv(me.peer, buffer, case.tag()).matching(policy).user_context(context);
    let status = match &sink {
        Some(sink) => {
            post = post.comp(sink);
            let outcome = match case.submits {
                true => post.submit().map(|()| Outcome::Posted).unwrap(),
                false => post.try_submit().unwrap(),
            };
            then();
            match outcome {
                Outcome::Done(status) => Some(status),
                Outcome::Posted => {
                    until(me.all(), || sink.count() > 0);
                    me.lingers();
                    assert_eq!((sink.count(), sink.failed()), (1, 0), "{case:?}");
                    sink.take().pop()
                }
                Outcome::Retry(reason) => panic!("a receive is tried again: {reason:?}"),
            }
        }
        None => {
            then();
            Some(post.wait().unwrap())
        }
    };
    if case.into == Kind::Region {
        guarded.assert_holds(&payload);
    }
    // A counter keeps none.
    let Some(status) = status else { return };
    assert!(status.error.is_none(), "{case:?}: {status:?}");
    assert_eq!(
        (status.rank, status.tag, status.size),
        (me.peer, case.tag(), case.size),
        "{case:?}"
    );
    assert_eq!(status.user_context, context);
    if case.into != Kind::Region {
        let found = status.buffer.as_slice().unwrap();
        assert_eq!(found.len(), room);
        assert!(found[..case.size] == payload, "{case:?}: other bytes");
        assert!(
            found[case.size..].iter().all(|&byte| byte == 0xa5),
            "{case:?}: written past the message"
        );
    }
}
