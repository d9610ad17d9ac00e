//! Many messages, both ways at once.

use super::{PairedRank, by_context};
use crate::support::sink::{Sink, Sort};
use crate::support::{amount, pattern, posted, until};
use carrack::{Handler, PostError, Rank, RemoteComp, Tag, UserContext};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const COUNT: u64 = 1000;

/// Number of messages that are sent before any wait.
const AT_ONCE: u64 = 100;

const KEY: Tag = Tag(7);

/// Returns a message's size: mostly short; a few go in parts, or are written by a NIC.
fn size(number: u64) -> usize {
    match number % 50 {
        0 => 20_000,
        25 => 8193,
        7 | 31 => 5000,
        short => short as usize * 7,
    }
}

/// Returns the bytes of a message, which say who has sent it.
fn bytes(me: &PairedRank, from: Rank, number: u64) -> Vec<u8> {
    pattern(me.seed ^ u64::from(from.0) << 32 ^ number, size(number))
}

pub(crate) fn both_ways(me: &PairedRank) {
    let (received, sent, taken) =
        (Sink::new(Sort::Queue), Sink::new(Sort::Queue), Sink::new(Sort::Queue));
    let name = me.runtime.register_comp(&taken).unwrap();
    me.meet();
    for first in (0..COUNT).step_by(AT_ONCE as usize) {
        for number in first..first + AT_ONCE {
            let context = UserContext(number);
            let mut receive =
                me.runtime.post_recv(me.peer, vec![0; size(number)], KEY).comp(&received);
            receive = receive.user_context(context);
            receive.submit().unwrap();
        }
        let mut begun = 0;
        for number in first..first + AT_ONCE {
            let own = bytes(me, me.runtime.rank(), number);
            let mut send = me.runtime.post_send(me.peer, own, KEY).comp(&sent);
            begun += usize::from(posted(me.all(), || send.try_submit()).is_posted());
            let own = number.to_le_bytes();
            let mut am = me.runtime.post_am(me.peer, &own[..], name).tag(Tag(number)).comp(&sent);
            begun += usize::from(posted(me.all(), || am.try_submit()).is_posted());
        }
        let each = AT_ONCE as usize;
        until(me.all(), || {
            received.count() == each && taken.count() == each && sent.count() == begun
        });
        assert_eq!((received.failed(), sent.failed(), taken.failed()), (0, 0, 0));
        for (number, status) in (first..).zip(by_context(&received)) {
            assert_eq!((status.user_context, status.rank), (UserContext(number), me.peer));
            assert!(
                status.bytes().unwrap() == bytes(me, me.peer, number),
                "{number} is another message"
            );
        }
        for (number, status) in (first..).zip(taken.take()) {
            assert_eq!((status.tag, status.rank), (Tag(number), me.peer));
            assert_eq!(status.bytes().unwrap(), number.to_le_bytes());
        }
        sent.take();
        me.meet();
    }
}

/// Runs the role: both ranks submit requests as fast as their backlogs take them. A handler replies
/// to each, also while the backlog is full.
pub(crate) fn flood(me: &PairedRank) {
    const REQUESTS: RemoteComp = RemoteComp::named("requests");
    const REPLIES: RemoteComp = RemoteComp::named("replies");
    let floods = amount("TEST_FLOODS", 8 * COUNT, 20 * COUNT);
    let (refused, replied) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (refusals, replies) = (refused.clone(), replied.clone());
    let reply = me.runtime.handler(move |runtime, status| {
        let bytes = status.bytes().unwrap().to_vec();
        let sent = runtime.post_am(status.rank, bytes, REPLIES).tag(status.tag).submit();
        refusals.fetch_add(u64::from(sent.is_err()), Ordering::Relaxed);
    });
    let own = (me.seed, me.runtime.rank());
    let request = move |number| pattern(own.0 ^ u64::from(own.1.0) << 32 ^ number, size(number));
    let check = Handler::new(move |status| {
        assert!(status.bytes().unwrap() == request(status.tag.0), "reply {:?}", status.tag);
        replies.fetch_add(1, Ordering::Relaxed);
    });
    me.runtime.register_comp_named("requests", &reply).unwrap();
    me.runtime.register_comp_named("replies", &check).unwrap();
    me.meet();
    let mut most = 0;
    for number in 0..floods {
        let mut post = me.runtime.post_am(me.peer, request(number), REQUESTS).tag(Tag(number));
        while let Err(error) = post.submit() {
            assert!(matches!(error, PostError::BacklogFull { .. }), "{error}");
            me.runtime.progress().unwrap();
            most = most.max(me.runtime.pending().operations.len());
        }
    }
    until(me.all(), || replied.load(Ordering::Relaxed) == floods);
    assert_eq!(refused.load(Ordering::Relaxed), 0, "replies that were refused");
    assert!(most < floods as usize / 2, "{most} waited at a time");
}
