//! Messages that are too long for their receives, and a rank that goes.

use super::{PairedRank, by_context};
use crate::support::guard::Guarded;
use crate::support::sink::Sink;
use crate::support::{pattern, posted, until};
use carrack::{OpError, PostError, Rank, Tag, UserContext};

pub(crate) fn too_long(me: &PairedRank) {
    let cases = [
        (1, 0),
        (9, 8),
        (41, 40),
        (209, 208),
        (8192, 8191),
        (8192, 0),
        (8193, 8192),
        (300_000, 100),
    ];
    for (number, (size, room)) in (1..).zip(cases) {
        let tag = Tag(number);
        if me.is_first() {
            me.hears_go();
            let sink = Sink::keeping();
            let mut send = me.runtime.post_send(me.peer, vec![3; size], tag).comp(&sink);
            let status = me.ended(&sink, || send.try_submit());
            // A short message is complete once it is sent.
            let is_told = status.error.is_some();
            assert_eq!(is_told, size > 8192, "{size} into {room}: {status:?}");
        } else {
            let (guarded, sink) = (Guarded::new(room, 3), Sink::keeping());
            let mut receive = me.runtime.post_recv(me.peer, guarded.slice(), tag).comp(&sink);
            receive.submit().unwrap();
            me.says_go();
            let status = sink.one(me.all());
            let error = status.ok().unwrap_err();
            let is_it = matches!(
                error,
                OpError::Truncated { message, buffer } if (message, buffer) == (size, room)
            );
            assert!(is_it, "{size} into {room}: {error}");
            guarded.assert_untouched();
        }
        me.meet();
    }
}

const SENT: u64 = 20;

fn size(number: u64) -> usize {
    [0, 8, 41, 209, 5000][number as usize % 5]
}

/// Runs the role: the second rank sends something, and goes. The first one has asked for more than
/// that.
pub(crate) fn goes(me: PairedRank) {
    const TAG: Tag = Tag(1);
    if !me.is_first() {
        me.hears_go();
        for number in 0..SENT {
            let bytes = pattern(me.seed ^ number, size(number));
            assert!(
                posted(me.all(), || me.runtime.post_send(Rank(0), &bytes[..], TAG).try_submit())
                    .is_done()
            );
        }
        return;
    }
    let sink = Sink::keeping();
    for number in 0..SENT + 5 {
        let mut receive = me.runtime.post_recv(me.peer, vec![0; 5000], TAG).comp(&sink);
        receive = receive.user_context(UserContext(number));
        receive.submit().unwrap();
    }
    me.says_go();
    until(me.all(), || sink.count() as u64 == SENT + 5);
    for status in by_context(&sink) {
        let number = status.user_context.0;
        if number < SENT {
            assert!(status.error.is_none(), "{number}: {status:?}");
            assert!(
                status.bytes().unwrap() == pattern(me.seed ^ number, size(number)),
                "{number}: other bytes"
            );
        } else {
            let error = status.ok().expect_err("it was not sent");
            assert!(matches!(&error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
        }
    }
    let error =
        me.runtime.post_send(me.peer, b"late", TAG).try_submit().expect_err("the peer is gone");
    assert!(matches!(error, PostError::PeerDown { rank: Rank(1), .. }), "{error}");
}
