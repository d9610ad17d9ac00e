//! Buffers of every shape: lists, packets that are filled in place, bytes on loan.

#![expect(unsafe_code, reason = "loans are read while a peer could write")]

use crate::support::guard::Guarded;
use crate::support::keys::without_keys;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::TransportChoice;
use carrack::{
    AwaitError, Buffer, Handler, OpError, Outcome, PostError, Rank, Status, Tag, UserContext,
};
use parking_lot::Mutex;
use std::sync::Arc;

crate::support::over_each_transport!(
    a_list_of_buffers_is_sent_as_one_message_and_comes_back,
    a_message_is_spread_over_a_list_of_buffers_and_writes_nothing_else,
    lists_are_put_and_got_as_one_piece,
    a_list_that_cannot_be_gathered_is_refused_and_given_back,
    a_packet_is_filled_in_place_and_posted_again_and_again,
    a_handler_of_loans_sees_messages_where_they_lie_and_gives_them_back,
);

fn cut(bytes: &[u8], at: &[usize]) -> Vec<Buffer> {
    let mut pieces = Vec::new();
    let mut rest = bytes;
    for (number, &len) in at.iter().enumerate() {
        let (piece, behind) = rest.split_at(len.min(rest.len()));
        pieces.push(match number % 3 {
            0 => Buffer::Vec(piece.to_vec()),
            1 => Buffer::Bytes(piece.to_vec().into()),
            _ => Buffer::Region(Guarded::new(piece.len(), 5).filled(piece).slice()),
        });
        rest = behind;
    }
    pieces.push(Buffer::Vec(rest.to_vec()));
    pieces
}

fn a_list_of_buffers_is_sent_as_one_message_and_comes_back<J: Job>() {
    let ranks = J::pair();
    let heard = Sink::keeping();
    let name = ranks[1].register_comp(&heard).unwrap();
    for size in [0, 5, 40, 300, 8192, 100_000] {
        let payload = pattern(size as u64, size);
        let ended = Sink::keeping();
        let list = cut(&payload, &[3, 0, size / 3]);
        let count = list.len();
        let mut am =
            ranks[0].post_am(Rank(1), list, name).comp(&ended).user_context(UserContext(3));
        am.submit().unwrap();
        assert!(matches!(am.try_submit(), Err(PostError::Spent)));
        let status = ended.one(&ranks);
        assert_eq!((status.size, status.user_context), (size, UserContext(3)));
        assert_eq!(status.buffer.to_vec().unwrap(), payload);
        assert!(
            matches!(&status.buffer, Buffer::List(list) if list.len() == count),
            "the list comes back"
        );
        assert_eq!(heard.one(&ranks).buffer.to_vec().unwrap(), payload);
        // Without a completion object, and waiting for its end.
        let list = cut(&payload, &[1, 1, 1]);
        let arrived = Sink::keeping();
        let recv =
            ranks[1].post_recv(Rank(0), vec![0; size], Tag(1)).comp(&arrived).try_submit().unwrap();
        assert!(recv.is_posted());
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(arrived.one(&ranks[1..]).bytes().unwrap(), payload));
            let mut send = ranks[0].post_send(Rank(1), list, Tag(1));
            let status = send.wait().unwrap();
            assert_eq!(status.buffer.to_vec().unwrap(), payload);
        });
    }
}

fn a_message_is_spread_over_a_list_of_buffers_and_writes_nothing_else<J: Job>() {
    let ranks = J::pair();
    for size in [0, 7, 100, 8192, 50_000] {
        for (expected, extra) in [(true, 0), (false, 9), (true, 9)] {
            let payload = pattern(size as u64, size);
            let guarded = [Guarded::new(size / 2, 1), Guarded::new(size - size / 2 + extra, 2)];
            let list: Vec<Buffer> =
                vec![guarded[0].slice().into(), Buffer::Vec(Vec::new()), guarded[1].slice().into()];
            let arrived = Sink::keeping();
            let recv = |list: Vec<Buffer>| {
                let mut recv = ranks[1].post_recv(Rank(0), list, Tag(1)).comp(&arrived);
                recv.submit().unwrap();
            };
            let mut list = Some(list);
            if expected {
                recv(list.take().unwrap());
            }
            sent(&ranks, || ranks[0].post_send(Rank(1), payload.clone(), Tag(1)).try_submit());
            settle(&ranks);
            if let Some(list) = list {
                recv(list);
            }
            let status = arrived.one(&ranks);
            assert!(status.error.is_none(), "{status:?}");
            assert_eq!(status.size, size);
            assert_eq!(status.buffer.len(), size + extra);
            guarded[0].assert_holds(&payload[..size / 2]);
            guarded[1].assert_holds(&payload[size / 2..]);
        }
    }
    // One that waits can be cancelled.
    let ended = Sink::keeping();
    let mut recv = ranks[1].post_recv(Rank(0), vec![Buffer::Vec(vec![1; 4])], Tag(77)).comp(&ended);
    assert!(recv.try_submit().unwrap().is_posted());
    assert!(ranks[1].cancel(&recv.ticket().unwrap()).unwrap());
    let status = ended.one(&ranks);
    assert!(matches!(&status.buffer, Buffer::List(list) if list[0].as_slice() == Some(&[1; 4])));
    assert!(matches!(status.ok(), Err(OpError::Cancelled)));
    // One that is too short in all.
    let guarded = Guarded::new(3, 1);
    let list = vec![guarded.slice().into(), Buffer::Vec(vec![7])];
    sent(&ranks, || ranks[0].post_send(Rank(1), b"five!", Tag(1)).try_submit());
    let mut receive = ranks[1].post_recv(Rank(0), list, Tag(1));
    let error = receive.wait().unwrap_err();
    let is_short = matches!(error, AwaitError::Op(OpError::Truncated { message: 5, buffer: 4 }));
    assert!(is_short, "{error}");
    guarded.assert_untouched();
    // The receive has its list again.
    sent(&ranks, || ranks[0].post_send(Rank(1), b"four", Tag(1)).try_submit());
    let status = receive.wait().unwrap();
    assert!(matches!(&status.buffer, Buffer::List(list) if list[1].as_slice() == Some(b"r")));
    guarded.assert_holds(b"fou");
}

fn lists_are_put_and_got_as_one_piece<J: Job>() {
    let ranks = J::pair();
    let region = ranks[1].allocate(10_000).unwrap();
    let mr = ranks[1].register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    for rmr in [rmr.clone(), without_keys(&rmr)] {
        let payload = pattern(6, 9000);
        let ended = Sink::keeping();
        let list = cut(&payload, &[10, 4000, 20]);
        ranks[0].post_put(Rank(1), list, &rmr, 100).comp(&ended).submit().unwrap();
        let status = ended.one(&ranks);
        assert!(status.error.is_none());
        assert_eq!(status.buffer.to_vec().unwrap(), payload);
        assert_eq!(region.slice(100, 9000).unwrap().to_vec().unwrap(), payload);
        let list = vec![Buffer::Vec(vec![0; 1]), Buffer::Vec(vec![0; 8999])];
        ranks[0].post_get(Rank(1), list, &rmr, 100).comp(&ended).submit().unwrap();
        assert_eq!(ended.one(&ranks).buffer.to_vec().unwrap(), payload);
        region.whole().write(&vec![0; 10_000]).unwrap();
    }
}

fn a_list_that_cannot_be_gathered_is_refused_and_given_back<J: Job>() {
    let ranks = J::pair();
    let within = vec![Buffer::from(vec![Buffer::Vec(vec![1])])];
    let mut send = ranks[0].post_send(Rank(1), within, Tag(1));
    for _ in 0..2 {
        assert!(matches!(send.try_submit(), Err(PostError::Pieces(_))), "and it still holds them");
    }
    let fixed = vec![Buffer::Vec(vec![1]), Buffer::Bytes(vec![1].into())];
    let mut recv = ranks[0].post_recv(Rank(1), fixed, Tag(1));
    for _ in 0..2 {
        assert!(
            matches!(recv.wait(), Err(AwaitError::Post(PostError::ReadOnly(_)))),
            "and it still holds them"
        );
    }
    let mut send = ranks[0].post_send(Rank(5), vec![Buffer::Vec(vec![1])], Tag(1));
    for _ in 0..2 {
        assert!(
            matches!(send.try_submit(), Err(PostError::NoSuchRank { .. })),
            "and it still holds them"
        );
    }
}

fn a_packet_is_filled_in_place_and_posted_again_and_again<J: Job>() {
    let ranks = J::pair();
    let heard = Sink::keeping();
    let name = ranks[1].register_comp(&heard).unwrap();
    let device = ranks[0].default_device();
    assert!(device.take_packet(1 << 20).is_none(), "longer than any");
    let mut packet = device.take_packet(3000).unwrap();
    for round in 0..50 {
        let payload = pattern(round, 3000);
        packet.as_mut_slice().unwrap().copy_from_slice(&payload);
        let mut am = ranks[0].post_am(Rank(1), packet, name);
        let status = done(posted(&ranks, || am.try_submit()));
        let Buffer::Packet(back) = status.buffer else { panic!("the packet comes back") };
        packet = back;
        assert_eq!(heard.one(&ranks).bytes().unwrap(), payload);
    }
}

fn a_handler_of_loans_sees_messages_where_they_lie_and_gives_them_back<J: Job>() {
    let ranks = J::pair_with(J::settings().setting("shm_chunks", 2).packets_max(16));
    let kept = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let kept = kept.clone();
        Handler::of_loans(move |status: Status| kept.lock().push(status))
    };
    let name = ranks[1].register_comp(&handler).unwrap();
    let mut lent = 0;
    for round in 0..20 {
        for size in [8, 100, 3000, 8192] {
            let payload = pattern(round, size);
            sent(&ranks, || ranks[0].post_am(Rank(1), &payload[..], name).try_submit());
            until(&ranks, || kept.lock().len() == 1);
            let status = kept.lock().pop().unwrap();
            assert_eq!(status.buffer.to_vec().unwrap(), payload);
            let mut part = [0; 4];
            assert_eq!(status.buffer.copy_to(&mut part).unwrap(), 4);
            assert_eq!(part, payload[..4]);
            if let Buffer::Loan(loan) = &status.buffer {
                lent += 1;
                assert!(status.bytes().is_none(), "no slice of what the sender could write");
                // SAFETY: the sender is this very test, and writes nothing meanwhile.
                assert_eq!(unsafe { loan.as_slice() }, payload);
            }
        }
    }
    assert_eq!(lent > 0, J::TRANSPORT == TransportChoice::Shm);
    // The two kept messages use up all loans. The sender has to wait for them, and loses nothing.
    if J::TRANSPORT == TransportChoice::Shm {
        let payload = pattern(1, 8192);
        let mut posted = 0;
        while let Outcome::Done(_) =
            ranks[0].post_am(Rank(1), &payload[..], name).try_submit().unwrap()
        {
            posted += 1;
        }
        settle(&ranks);
        assert_eq!((posted, kept.lock().len()), (2, 2));
        kept.lock().clear();
        sent(&ranks, || ranks[0].post_am(Rank(1), &payload[..], name).try_submit());
        until(&ranks, || kept.lock().len() == 1);
    }
}
