//! The simulated network between processes: sockets in the abstract namespace, which leave no
//! trace.
//!
//! A process connects to each process whose ports it sends to, and sends there. Answers come back
//! over the other's own connection. Sockets of sequenced packets neither lose nor reorder. The
//! socket of a dead process hangs up.

use super::address::{PortBlock, socket_name};
use super::wire::{self, LONGEST, Packet};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, connect, recv, send, socket_with,
};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Bytes that may wait for a process that does not read.
const MOST_WAITING: usize = 256 << 20;

/// Packets that are read from a connection at a time.
const AT_ONCE: usize = 64;

const BELL: u64 = 0;

/// Binds the socket of a block, which makes the block this process's.
///
/// # Errors
/// EADDRINUSE: another process has the block.
pub(super) fn listen(fabric: &str, block: PortBlock) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(&socket_name(fabric, block))?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A connection to another process.
#[derive(Debug)]
struct Outgoing {
    fd: OwnedFd,
    token: u64,
    waiting: VecDeque<Vec<u8>>,
    bytes: usize,
}

/// All connections of an engine.
#[derive(Debug)]
pub(super) struct Network {
    fabric: Option<String>,
    epoll: OwnedFd,
    listeners: HashMap<u64, OwnedFd>,
    incoming: HashMap<u64, OwnedFd>,
    outgoing: HashMap<PortBlock, Outgoing>,
    blocks: HashMap<u64, PortBlock>,
    next_token: u64,
    gone: Vec<PortBlock>,
}

impl Network {
    pub(super) fn new(fabric: Option<&str>, bell: BorrowedFd<'_>) -> Result<Self, Errno> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, bell, EventData::new_u64(BELL), EventFlags::IN)?;
        Ok(Self {
            fabric: fabric.map(str::to_owned),
            epoll,
            listeners: HashMap::new(),
            incoming: HashMap::new(),
            outgoing: HashMap::new(),
            blocks: HashMap::new(),
            next_token: BELL,
            gone: Vec::new(),
        })
    }

    /// Returns `true` if there is no other process.
    pub(super) fn is_alone(&self) -> bool {
        self.listeners.is_empty()
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, events: EventFlags) -> Result<u64, Errno> {
        self.next_token += 1;
        epoll::add(&self.epoll, fd, EventData::new_u64(self.next_token), events)?;
        Ok(self.next_token)
    }

    /// Accepts connections from now on.
    pub(super) fn listen(&mut self, listener: OwnedFd) {
        match self.watch(listener.as_fd(), EventFlags::IN) {
            Ok(token) => {
                self.listeners.insert(token, listener);
            }
            Err(why) => {
                tracing::warn!(%why, "a simulated NIC cannot be reached by other processes")
            }
        }
    }

    /// Sends a packet to another process. Returns it if its target does not exist.
    pub(super) fn send(&mut self, packet: Packet) -> Result<(), Packet> {
        let block = packet.target.0.block();
        if !self.outgoing.contains_key(&block) && self.connect(block).is_err() {
            return Err(packet);
        }
        let Some(peer) = self.outgoing.get_mut(&block) else { return Err(packet) };
        let bytes = wire::encode(&packet);
        if peer.waiting.is_empty() {
            match send(&peer.fd, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => {}
                Err(_) => {
                    self.hang_up(block);
                    return Err(packet);
                }
            }
            let events = EventFlags::OUT;
            let _ = epoll::modify(&self.epoll, &peer.fd, EventData::new_u64(peer.token), events);
        }
        peer.bytes += bytes.len();
        peer.waiting.push_back(bytes);
        if peer.bytes > MOST_WAITING {
            tracing::warn!(?block, "a process takes nothing in from simulated NICs: hung up");
            self.hang_up(block);
        }
        Ok(())
    }

    fn connect(&mut self, block: PortBlock) -> Result<(), Errno> {
        let fabric = self.fabric.as_deref().ok_or(Errno::NETUNREACH)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&fd, &SocketAddrUnix::new_abstract_name(&socket_name(fabric, block))?)?;
        check_user(&fd)?;
        // Only its end is received here.
        let token = self.watch(fd.as_fd(), EventFlags::empty())?;
        self.blocks.insert(token, block);
        self.outgoing.insert(block, Outgoing { fd, token, waiting: VecDeque::new(), bytes: 0 });
        Ok(())
    }

    fn hang_up(&mut self, block: PortBlock) {
        if let Some(peer) = self.outgoing.remove(&block) {
            self.blocks.remove(&peer.token);
            self.gone.push(block);
        }
    }

    /// Waits for events, sends pending packets, and takes in received ones. Returns the blocks
    /// whose processes are gone.
    pub(super) fn poll(
        &mut self,
        timeout: Option<Duration>,
        packets: &mut VecDeque<Packet>,
        is_ours: impl Fn(PortBlock) -> bool,
    ) -> Vec<PortBlock> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = Vec::with_capacity(64);
        if !self.gone.is_empty() {
            return std::mem::take(&mut self.gone);
        }
        let _ =
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        for Event { flags, data } in events {
            let token = data.u64();
            if let Some(block) = self.blocks.get(&token).copied() {
                if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                    self.hang_up(block);
                } else {
                    self.flush(block);
                }
            } else if self.listeners.contains_key(&token) {
                self.accept(token);
            } else if self.incoming.contains_key(&token) && !self.read(token, packets, &is_ours) {
                self.incoming.remove(&token);
            }
        }
        std::mem::take(&mut self.gone)
    }

    fn flush(&mut self, block: PortBlock) {
        let Some(peer) = self.outgoing.get_mut(&block) else { return };
        while let Some(bytes) = peer.waiting.front() {
            match send(&peer.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => {}
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => return,
                Err(_) => return self.hang_up(block),
            }
            peer.bytes -= bytes.len();
            peer.waiting.pop_front();
        }
        let data = EventData::new_u64(peer.token);
        let _ = epoll::modify(&self.epoll, &peer.fd, data, EventFlags::empty());
    }

    fn accept(&mut self, token: u64) {
        while let Some(listener) = self.listeners.get(&token) {
            let Ok(fd) = accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) else {
                return;
            };
            if check_user(&fd).is_err() {
                continue;
            }
            if let Ok(token) = self.watch(fd.as_fd(), EventFlags::IN) {
                self.incoming.insert(token, fd);
            }
        }
    }

    /// Reads packets from a connection. Returns `true` if it is still open.
    fn read(
        &self,
        token: u64,
        packets: &mut VecDeque<Packet>,
        is_ours: &impl Fn(PortBlock) -> bool,
    ) -> bool {
        let Some(fd) = self.incoming.get(&token) else { return false };
        let mut buffer = vec![0; LONGEST + 1];
        for _ in 0..AT_ONCE {
            let len = match recv(fd, buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((0, _)) => return false,
                Ok((len, _)) => len,
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Err(_) => return false,
            };
            // Only that process can send on the connection, and only to this one.
            let packet = buffer.get(..len).and_then(wire::decode);
            let packet =
                packet.filter(|it| is_ours(it.target.0.block()) && !is_ours(it.source.0.block()));
            match packet {
                Some(packet) => packets.push_back(packet),
                None => {
                    tracing::warn!("what came to a simulated NIC is no packet for it: hung up");
                    return false;
                }
            }
        }
        true
    }
}

/// Checks that the other end is a process of this user.
///
/// # Errors
/// EPERM: the other end is a process of another user.
fn check_user(fd: &OwnedFd) -> Result<(), Errno> {
    let theirs = socket_peercred(fd)?.uid;
    if theirs == rustix::process::geteuid() { Ok(()) } else { Err(Errno::PERM) }
}
