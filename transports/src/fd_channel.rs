//! Unix sockets that carry file descriptors.
//!
//! They carry sequenced packets, so a message is whole or not there. They are non-blocking, so a
//! device can drive them from its poll. Their names are abstract, so nothing stays in a file
//! system when the process is killed.
//!
//! Abstract names have no permissions: any user can connect to one, and take one that its owner
//! has left. So each end checks the other's user, as the kernel reports it, before it sends or
//! reads a byte. A secret shows that the other end belongs to the job.

use crate::fork::Owner;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Pid, PidfdFlags};
use std::collections::BTreeSet;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Returns `true` if a call failed for a temporary shortage: of descriptors, memory, or room in a
/// queue. The same call can succeed later, and its failure says nothing about a peer.
pub fn is_shortage(error: Errno) -> bool {
    matches!(
        error,
        Errno::AGAIN
            | Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
            | Errno::NOBUFS
            | Errno::NOSPC
            | Errno::TOOMANYREFS
    )
}

/// Reason why an inherited descriptor was not taken over. The descriptor is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdoptError {
    /// Nothing is open under the number.
    NotOpen,
    /// It is no socket.
    NotASocket,
    /// It is a socket of another kind.
    OtherSocket,
    /// It was taken over before.
    Taken,
    /// The system's error.
    System(Errno),
}

/// The variable by which a launcher tells a process the number of the socket that it inherits.
pub const INHERITED: &str = "CARRACK_BOOTSTRAP_FD";

/// Takes over the socket that this process inherited, under the number in [`INHERITED`].
///
/// # Errors
/// See [`AdoptError`].
pub fn inherited() -> Result<OwnedFd, AdoptError> {
    let number = std::env::var(INHERITED).ok().and_then(|number| number.parse().ok());
    // SAFETY: the variable is the launcher's word that the descriptor was passed on for this, and
    // it alone can pass one on. Safe code of this edition sets no variable.
    unsafe { adopt(number.ok_or(AdoptError::NotOpen)?) }
}

/// Takes over a Unix socket of sequenced packets, and sets it to close on exec. Each number can be
/// taken over once.
///
/// # Errors
/// See [`AdoptError`].
///
/// # Safety
/// The descriptor of that number, if it is open, is owned by nothing else in this process.
///
/// ```compile_fail,E0133
/// let standard_error = carrack_transports::fd_channel::adopt(2);
/// ```
pub unsafe fn adopt(number: i32) -> Result<OwnedFd, AdoptError> {
    static TAKEN: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
    // SAFETY: the call reads a flag and touches no memory; a number that is not open is an error.
    if number < 0 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(AdoptError::NotOpen);
    }
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    if taken.contains(&number) {
        return Err(AdoptError::Taken);
    }
    // SAFETY: it is open, and only looked at.
    let seen = unsafe { BorrowedFd::borrow_raw(number) };
    match (rustix::net::sockopt::socket_domain(seen), rustix::net::sockopt::socket_type(seen)) {
        (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => {}
        (Ok(_), Ok(_)) => return Err(AdoptError::OtherSocket),
        (Err(Errno::NOTSOCK), _) => return Err(AdoptError::NotASocket),
        (Err(error), _) | (_, Err(error)) => return Err(AdoptError::System(error)),
    }
    rustix::io::fcntl_setfd(seen, rustix::io::FdFlags::CLOEXEC).map_err(AdoptError::System)?;
    taken.insert(number);
    // SAFETY: it is open. Nothing else owns it, says the caller, and the set remembers that this
    // does.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Descriptors that one message carries at most.
pub const MAX_FDS: usize = 4;

/// Connections that may wait for `accept`.
const BACKLOG: i32 = 1024;

/// Socket that accepts channels.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
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
        Ok(Self { socket, has_told: AtomicBool::new(false) })
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

impl Channel {
    /// Connects to a listener of this process's user.
    pub fn connect(name: &[u8]) -> Result<Self, ConnectError> {
        let socket = new_socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        let channel = Self(socket, Owner::this_process());
        let peer = channel.peer()?;
        if peer.is_this_user() { Ok(channel) } else { Err(ConnectError::OtherUser(peer)) }
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
    /// if a child of it still holds the socket open.
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
            Err(Errno::CONNRESET | Errno::PIPE) => return Ok(Received::Closed),
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

    /// Removes the message that was peeked. The peek has installed its descriptors already.
    fn take(&self) -> Result<(), Errno> {
        loop {
            match rustix::net::recv(&self.0, &mut [0; 0], RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                outcome => return outcome.map(drop),
            }
        }
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
    use std::os::fd::IntoRawFd;

    #[test]
    fn a_descriptor_is_taken_over_once_and_only_if_it_is_a_socket_of_packets() {
        // SAFETY: nothing owns these numbers: they are not open, or were given up.
        let adopt = |number| unsafe { adopt(number) };
        for number in [-1, 987_654] {
            assert_eq!(adopt(number).unwrap_err(), AdoptError::NotOpen);
        }
        let file = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
        assert_eq!(adopt(file).unwrap_err(), AdoptError::NotASocket);
        let stream = std::os::unix::net::UnixStream::pair().unwrap().0.into_raw_fd();
        assert_eq!(adopt(stream).unwrap_err(), AdoptError::OtherSocket);
        let number = new_socket().unwrap().into_raw_fd();
        let socket = adopt(number).unwrap();
        assert_eq!(adopt(number).unwrap_err(), AdoptError::Taken);
        let flags = rustix::io::fcntl_getfd(&socket).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

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
            Channel::connect(b"carrack-nobody-listens-here").unwrap_err(),
            ConnectError::System(Errno::CONNREFUSED)
        );
    }
}
