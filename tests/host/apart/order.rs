//! Many messages, both ways at once.

use super::{Me, by_context};
use crate::support::sink::{Sink, Sort};
use crate::support::{pattern, posted, until};
use carrack::{Rank, Tag, UserContext};

const COUNT: u64 = 1000;

/// Number of messages that are sent before any wait.
const AT_ONCE: u64 = 100;

const KEY: Tag = Tag(7);

/// Mostly short ones; a few in parts, or written by a NIC.
fn size(number: u64) -> usize {
    match number % 50 {
        0 => 20_000,
        25 => 8193,
        7 | 31 => 5000,
        short => short as usize * 7,
    }
}

/// Bytes of a message, which say who has sent it.
fn bytes(me: &Me, from: Rank, number: u64) -> Vec<u8> {
    pattern(me.seed ^ u64::from(from.0) << 32 ^ number, size(number))
}

pub(crate) fn both_ways(me: &Me) {
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
