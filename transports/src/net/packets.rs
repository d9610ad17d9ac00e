//! Unix sockets that carry file descriptors.
//!
//! They carry sequenced packets, so a message is whole or not there. They are non-blocking, so a
//! device can drive them from its poll. Their names are abstract, so nothing stays in a file
//! system when the process is killed.
//!
//! Abstract names have no permissions: any user can connect to one, and take one that its owner
//! has left. So each end checks the other's user, as the kernel reports it, before it sends or
//! reads a byte. A secret shows that the other end belongs to the job.

#![expect(unsafe_code, reason = "the credentials of rustix have no process id 0")]

use super::greeting::{Carrier, Fault};
use super::is_shortage;
use crate::fork::Owner;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::{Pid, PidfdFlags};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Descriptors that one message carries at most.
pub const MAX_FDS: usize = 4;

/// Connections that may wait for `accept`.
const BACKLOG: i32 = 1024;

/// Socket that accepts channels.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    owner: Owner,
    /// `true` once a connection from a process of another user was logged.
    has_told: AtomicBool,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Channel(OwnedFd, Owner);

/// Process at the other end, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id, in this process's namespace; 0 when it lies in another.
    pub pid: i32,
    /// User id.
    pub uid: u32,
}

impl Peer {
    /// Returns `true` if it runs as the user that this process runs as.
    pub fn is_this_user(self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }
}

/// Reason why there is no channel to a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConnectError {
    /// The name belongs to a process of another user.
    #[error(
        "process {} of user {} has the name, and this process is of another user: run all ranks \
         as one user",
        .0.pid, .0.uid
    )]
    OtherUser(Peer),
    /// The system's error. `Errno::AGAIN`: the listener's queue is full, try later.
    #[error(transparent)]
    System(#[from] Errno),
}

/// Result of a receive.
#[derive(Debug)]
pub enum Received {
    /// A message of this many bytes, with these descriptors.
    Message(usize, Vec<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// The other end is closed.
    Closed,
}

impl Listener {
    /// Listens under a name of the abstract namespace.
    pub fn bind(name: &[u8]) -> Result<Self, Errno> {
        let socket = new_socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(Self { socket, owner: Owner::this_process(), has_told: AtomicBool::new(false) })
    }

    /// Accepts the next connection from a process of this user, if one waits. Connections of other
    /// users are closed.
    pub fn accept(&self) -> Result<Option<Channel>, Errno> {
        // Bounded: a process that connects again and again does not keep this one here.
        for _ in 0..BACKLOG {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let channel = match rustix::net::accept_with(&self.socket, flags) {
                Ok(socket) => Channel(socket, Owner::this_process()),
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return Ok(None),
                Err(error) => return Err(error),
            };
            let peer = channel.peer()?;
            if peer.is_this_user() {
                return Ok(Some(channel));
            }
            if !self.has_told.swap(true, Ordering::Relaxed) {
                let Peer { pid, uid } = peer;
                tracing::warn!(
                    pid,
                    uid,
                    "a process of another user calls this one, and is hung up on"
                );
            }
        }
        Ok(None)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.owner.is_here() {
            // Closing refuses no caller where a forked child has the socket too.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
            while let Ok(Some(_waits)) = self.accept() {}
        }
    }
}

impl Channel {
    /// Connects to a listener of this process's user.
    pub fn connect(name: &[u8]) -> Result<Self, ConnectError> {
        let socket = new_socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        let channel = Self(socket, Owner::this_process());
        let peer = channel.peer()?;
        if peer.is_this_user() { Ok(channel) } else { Err(ConnectError::OtherUser(peer)) }
    }

    /// Makes a connection within this process, and returns its two ends.
    pub fn pair() -> Result<(Self, Self), Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        let owner = Owner::this_process();
        Ok((Self(one, owner), Self(other, owner)))
    }

    /// Wraps one end of a connection that a process of this user has made and passed on.
    pub fn inherited(socket: OwnedFd) -> Result<Self, ConnectError> {
        rustix::fs::fcntl_setfl(&socket, rustix::fs::OFlags::NONBLOCK)?;
        let channel = Self(socket, Owner::this_process());
        let peer = channel.peer()?;
        if peer.is_this_user() { Ok(channel) } else { Err(ConnectError::OtherUser(peer)) }
    }

    /// Returns the socket itself, for a process that inherits it.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Returns the process at the other end.
    pub fn peer(&self) -> Result<Peer, Errno> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let len = libc::socklen_t::try_from(size_of::<libc::ucred>());
        let mut len = len.map_err(|_| Errno::INVAL)?;
        // Not by rustix, whose type has no process id 0.
        // SAFETY: the socket is open. The kernel writes at most `len` bytes, the length of the
        // target, which is a structure of integers.
        let outcome = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        match outcome {
            0 => Ok(Peer { pid: found.pid, uid: found.uid }),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        }
    }

    /// Returns a descriptor that becomes readable when the process at the other end is dead, even
    /// if its child still holds the socket open.
    pub fn peer_process(&self) -> Result<OwnedFd, Errno> {
        let pid = Pid::from_raw(self.peer()?.pid).ok_or(Errno::SRCH)?;
        rustix::process::pidfd_open(pid, PidfdFlags::empty())
    }

    /// Sends one message, as a whole or not at all; `Errno::AGAIN` when the socket is full. In a
    /// fork `Errno::PERM`: the peer would take the message for the parent's.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        if !self.1.is_here() {
            return Err(Errno::PERM);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::MSGSIZE);
        }
        // NOSIGNAL: a peer that has gone is an error here, not a signal to the application.
        let sent = rustix::net::sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
    }

    /// Receives one message into `bytes`. A message that is longer, or brings too many
    /// descriptors, is an error. `Errno::MFILE`: this process can have no more descriptors. The
    /// message then stays for a later call.
    pub fn receive(&self, bytes: &mut [u8]) -> Result<Received, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        // The kernel drops descriptors that it cannot install, so the message is peeked before it
        // is taken.
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let message = match rustix::net::recvmsg(
            &self.0,
            &mut [IoSliceMut::new(bytes)],
            &mut ancillary,
            flags,
        ) {
            Ok(message) => message,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
            // A peer that left with unread messages: it is told once, before the peer's messages.
            Err(Errno::CONNRESET) => return self.receive(bytes),
            Err(Errno::PIPE) => return Ok(Received::Closed),
            Err(error) => return Err(error),
        };
        let mut fds = Vec::new();
        for part in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                fds.extend(rights);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) && fds.len() < MAX_FDS {
            // The message may carry more, and the buffer has room: this process has no descriptor
            // left.
            return Err(Errno::MFILE);
        }
        self.take()?;
        if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(Errno::MSGSIZE);
        }
        if message.bytes == 0 {
            return Ok(Received::Closed);
        }
        Ok(Received::Message(message.bytes, fds))
    }

    /// Receives one message of up to `longest` bytes. Descriptors that come with it are closed by
    /// the kernel.
    fn receive_bytes(&self, longest: usize) -> Result<Option<Vec<u8>>, Fault> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        // Its length first: most looks find nothing, and most messages are far from the longest.
        let received = match rustix::net::recv(&self.0, &mut [0; 0], flags | RecvFlags::PEEK) {
            Ok((_, 0)) => return Err(Fault::Gone("its socket hung up".into())),
            Ok((_, len)) if len > longest => {
                let why = format!("a message of {len} bytes: it is no rank of Carrack's");
                return Err(Fault::Wrong(why));
            }
            Ok((_, len)) => {
                let mut bytes = vec![0; len];
                rustix::net::recv(&self.0, &mut bytes[..], flags).map(|_| bytes)
            }
            Err(error) => Err(error),
        };
        match received {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            // As in `receive`.
            Err(Errno::CONNRESET) => self.receive_bytes(longest),
            Err(Errno::PIPE) => Err(Fault::Gone("its socket hung up".into())),
            Err(error) if is_shortage(error) => Err(Fault::Short(error)),
            Err(error) => Err(Fault::Wrong(format!("its socket failed: {error}"))),
        }
    }

    /// Takes the message off that was looked at. The descriptors that it brought are those that
    /// were given.
    fn take(&self) -> Result<(), Errno> {
        loop {
            match rustix::net::recv(&self.0, &mut [0; 0], RecvFlags::DONTWAIT) {
                Err(Errno::INTR | Errno::CONNRESET) => {}
                outcome => return outcome.map(drop),
            }
        }
    }
}

impl Carrier for Channel {
    fn say(&mut self, message: &[u8]) -> Result<(), Fault> {
        self.send(message, &[]).map_err(|error| match error {
            error if is_shortage(error) => Fault::Short(error),
            error => Fault::Gone(format!("its socket failed: {error}")),
        })
    }

    fn hear(&mut self, longest: usize) -> Result<Option<Vec<u8>>, Fault> {
        self.receive_bytes(longest)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_and_its_descriptors_arrive_whole_and_an_end_is_noticed() {
        let name = format!("carrack-test-{}", std::process::id());
        let listener = Listener::bind(name.as_bytes()).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let here = Channel::connect(name.as_bytes()).unwrap();
        let there = listener.accept().unwrap().unwrap();
        let mut bytes = [0; 64];
        assert!(matches!(there.receive(&mut bytes), Ok(Received::Nothing)));
        here.send(b"hello", &[here.as_fd(), listener.as_fd()]).unwrap();
        match there.receive(&mut bytes).unwrap() {
            Received::Message(5, fds) => assert_eq!((&bytes[..5], fds.len()), (&b"hello"[..], 2)),
            other => panic!("{other:?}"),
        }
        assert_eq!(there.peer().unwrap().pid, std::process::id() as i32);
        assert!(there.peer_process().is_ok());
        here.send(&[0; 65], &[]).unwrap();
        assert_eq!(there.receive(&mut bytes).unwrap_err(), Errno::MSGSIZE);
        drop(here);
        assert!(matches!(there.receive(&mut bytes), Ok(Received::Closed)));
        assert_eq!(
            Channel::connect(b"carrack-no-listener-here").unwrap_err(),
            ConnectError::System(Errno::CONNREFUSED)
        );
    }

    #[test]
    fn a_listener_that_has_gone_has_no_callers_where_a_forked_child_has_it_too() {
        let name = format!("carrack-test-forked-{}", std::process::id());
        let listener = Listener::bind(name.as_bytes()).unwrap();
        let _childs = rustix::io::dup(&listener).unwrap();
        let mut waits = Channel::connect(name.as_bytes()).unwrap();
        drop(listener);
        assert!(matches!(waits.hear(64), Err(Fault::Gone(_))), "no process will answer it");
        assert_eq!(
            Channel::connect(name.as_bytes()).unwrap_err(),
            ConnectError::System(Errno::CONNREFUSED)
        );
    }

    #[test]
    fn messages_of_a_peer_that_left_with_unread_ones_still_arrive() {
        let left = || {
            let (here, there) = Channel::pair().unwrap();
            here.send(b"unread", &[]).unwrap();
            there.send(b"last", &[]).unwrap();
            here
        };
        let (mut here, mut bytes) = (left(), [0; 64]);
        assert_eq!(here.hear(64).unwrap().unwrap(), b"last");
        assert!(matches!(here.hear(64), Err(Fault::Gone(_))));
        let here = left();
        assert!(matches!(here.receive(&mut bytes), Ok(Received::Message(4, _))));
        assert!(matches!(here.receive(&mut bytes), Ok(Received::Closed)));
    }
}
