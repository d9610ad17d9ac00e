//! Processes of other users, which can connect to any name of the abstract namespace, and take a
//! free one; and descriptors of the wrong type.

use super::receivers::{FalseReceiver, am, eventfd};
use super::{ATTACKER, Fixture, GEOMETRY, hello};
use crate::support::Watchdog;
use carrack::transports::contract::{DownCause, Event, SubmitError};
use carrack_transports::internals::shm::{HandshakeMessage, ShmAddress, SocketNamespace};
use carrack_transports::net::packets::{Channel, ConnectError, Peer, Received};
use carrack_transports::shm::segment::{BellPage, Segment};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recv, socket_with,
};
use rustix::process::Uid;
use std::os::fd::{AsFd, OwnedFd};

/// Does something as another user does it, if this one may become any.
fn as_another_user<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
    let nobody = Uid::from_raw(65534);
    // Of this thread alone.
    let become_nobody = || rustix::thread::set_thread_res_uid(None, nobody, None).is_ok();
    std::thread::scope(|scope| scope.spawn(|| become_nobody().then(act)).join().unwrap())
}

fn socket() -> OwnedFd {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

fn named(name: &[u8]) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(name).unwrap()
}

#[test]
fn a_process_of_another_user_that_has_taken_a_name_is_told_nothing() {
    let _watchdog = Watchdog::over("a name that was taken");
    let mut fixture = Fixture::new();
    let name = format!("carrack-taken-{}", std::process::id()).into_bytes();
    let taken = as_another_user(|| {
        let socket = socket();
        bind(&socket, &named(&name)).unwrap();
        listen(&socket, 8).unwrap();
        socket
    });
    let Some(taken) = taken else { return println!("not tested: this user cannot become another") };
    let refused = Channel::connect(&name).unwrap_err();
    assert!(matches!(refused, ConnectError::OtherUser(Peer { uid: 65534, .. })), "{refused}");
    let address = ShmAddress { namespace: SocketNamespace::here().unwrap(), name }.encode();
    let link = fixture.victim.connect(&address, ATTACKER).unwrap();
    fixture.until("the other user", |event| match event {
        Event::PeerDown { peer: ATTACKER, cause: DownCause::Gone(why) } => {
            why.contains("of user 65534")
        }
        other => panic!("{other:?}"),
    });
    assert!(matches!(am(&link, b"x"), Err(SubmitError::Down { peer: ATTACKER, .. })));
    // Both calls are there, and each of them is the end at once.
    for _ in 0..2 {
        let call = accept_with(&taken, SocketFlags::CLOEXEC).unwrap();
        let (told, _) = recv(&call, &mut [0; 256], RecvFlags::DONTWAIT).unwrap();
        assert_eq!(told, 0, "bytes that another user was told");
    }
    fixture.others_go_on();
}

#[test]
fn a_process_of_another_user_that_calls_is_hung_up_on_whatever_it_knows() {
    let _watchdog = Watchdog::over("another user calls");
    let mut fixture = Fixture::new();
    let name = ShmAddress::decode(&fixture.victim.address()).unwrap().name;
    for _ in 0..3 {
        let call = as_another_user(|| {
            let socket = socket();
            connect(&socket, &named(&name)).unwrap();
            socket
        });
        let Some(call) = call else {
            return println!("not tested: this user cannot become another");
        };
        // Its secret, its rank and its segment are right.
        let (_segment, segment) = Segment::create(GEOMETRY).unwrap();
        send(&call, &hello().encode(), &segment);
        let mut answer = Err(Errno::AGAIN);
        while answer == Err(Errno::AGAIN) {
            assert!(fixture.poll().is_empty(), "a pending connection causes no event");
            answer = recv(&call, &mut [0; 256], RecvFlags::DONTWAIT).map(|(_, told)| told);
        }
        // What lay there unread is a reset, and nothing an end.
        assert!(matches!(answer, Ok(0) | Err(Errno::CONNRESET)), "{answer:?}");
        fixture.others_go_on();
    }
}

fn send(socket: &OwnedFd, bytes: &[u8], fd: &OwnedFd) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(socket, &[std::io::IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

/// A write to one of these would block the sender's thread, for a time that the receiver chooses.
#[test]
fn a_receiver_whose_eventfd_is_none_or_blocks_is_reported_and_others_go_on() {
    let _watchdog = Watchdog::over("false eventfds");
    let mut fixture = Fixture::new();
    let (_page, page) = BellPage::create().unwrap();
    let (_read, pipe) = rustix::pipe::pipe().unwrap();
    rustix::fs::fcntl_setfl(&pipe, rustix::fs::OFlags::NONBLOCK).unwrap();
    let blocking = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let (socket, file) = (socket(), OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
    let wrong = [&pipe, &blocking, &socket, &file, &page];
    for (number, wake) in wrong.into_iter().enumerate() {
        let receiver = FalseReceiver::lure(&fixture, 4000 + number);
        let (channel, _segment) = receiver.accept(&mut fixture);
        let welcome = HandshakeMessage::Welcome { bell: 1, fenced: false }.encode();
        channel.send(&welcome, &[page.as_fd(), wake.as_fd()]).unwrap();
        fixture.reports_the_attacker(&format!("eventfd {number}"));
        let sent = am(&receiver.link, b"x");
        assert!(matches!(sent, Err(SubmitError::Down { peer: ATTACKER, .. })), "{sent:?}");
    }
    // One that is right is taken.
    let receiver = FalseReceiver::lure(&fixture, 4100);
    let (channel, _segment) = receiver.accept(&mut fixture);
    let welcome = HandshakeMessage::Welcome { bell: 1, fenced: false }.encode();
    channel.send(&welcome, &[page.as_fd(), eventfd().as_fd()]).unwrap();
    fixture.until("a welcome", |event| matches!(event, Event::Connected { peer: ATTACKER }));
    assert!(matches!(channel.receive(&mut [0; 256]), Ok(Received::Nothing)));
}
