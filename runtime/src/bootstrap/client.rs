//! A rank's side of the bootstrap: frames to and from a store, over one connection.

#![forbid(unsafe_code)]

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use carrack_transports::fork::Owner;
use carrack_transports::net::greeting::{Carrier, Fault};
use carrack_transports::net::packets::Channel;
use carrack_transports::net::streams::TcpChannel;
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::io::Errno;

use super::arrivals::Arrivals;
use super::error::{BootstrapError, Departure};
use super::protocol::{Frame, MAX_FRAME, check_key, check_value};

/// A connection that carries frames.
#[derive(Debug)]
pub(super) enum Wire {
    /// A Unix socket, with the frames that wait for room in it.
    Packets(Channel, VecDeque<Vec<u8>>),
    /// A TCP connection.
    Tcp(TcpChannel),
}

impl Wire {
    pub(super) fn push(&mut self, frame: &Frame) -> Result<(), Fault> {
        match self {
            Self::Packets(_, outbox) => {
                outbox.push_back(frame.encode());
                self.flush()
            }
            Self::Tcp(channel) => channel.say(&frame.encode()),
        }
    }

    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        match self {
            Self::Packets(channel, outbox) => {
                while let Some(bytes) = outbox.front() {
                    match channel.say(bytes) {
                        Ok(()) => drop(outbox.pop_front()),
                        Err(Fault::Short(_)) => break,
                        Err(fault) => return Err(fault),
                    }
                }
                Ok(())
            }
            Self::Tcp(channel) => channel.flush().map_err(|error| Fault::Gone(error.to_string())),
        }
    }

    /// Returns the number of bytes that wait for room.
    pub(super) fn unsent(&self) -> usize {
        match self {
            Self::Packets(_, outbox) => outbox.iter().map(Vec::len).sum(),
            Self::Tcp(channel) => channel.unwritten(),
        }
    }
}

impl Carrier for Wire {
    fn say(&mut self, message: &[u8]) -> Result<(), Fault> {
        match self {
            Self::Packets(channel, _) => channel.say(message),
            Self::Tcp(channel) => channel.say(message),
        }
    }

    fn hear(&mut self, longest: usize) -> Result<Option<Vec<u8>>, Fault> {
        match self {
            Self::Packets(channel, _) => channel.hear(longest),
            Self::Tcp(channel) => channel.hear(longest),
        }
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Packets(channel, _) => channel.as_fd(),
            Self::Tcp(channel) => channel.as_fd(),
        }
    }
}

/// The other end of the connection.
#[derive(Clone, Debug)]
pub(super) enum Host {
    /// `carrack run`.
    Launcher,
    /// Rank 0, at this address. It hangs up when this rank has finished.
    Zero(String),
}

/// One connection to a store. Its calls are those of [`Bootstrap`](super::Bootstrap).
#[derive(Debug)]
pub(super) struct Client {
    host: Host,
    owner: Owner,
    /// The descriptor of `wait_fd`: watches the socket, and answers that another thread has read.
    watch: OwnedFd,
    /// Descriptor that wakes a fence whose end another thread has read.
    fence_news: OwnedFd,
    /// Lock held through a fence, so that fences of several threads take turns.
    fence_turn: Mutex<()>,
    connection: Mutex<Connection>,
    /// The wire's, to sleep on.
    socket: OwnedFd,
}

/// Implements the methods of [`Bootstrap`](super::Bootstrap) that a type has by its `rank`, its
/// `size`, its `job` and its `client`.
macro_rules! by_client {
    () => {
        fn rank(&self) -> u32 {
            self.rank
        }

        fn size(&self) -> u32 {
            self.size
        }

        fn job(&self) -> &JobId {
            &self.job
        }

        fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
            self.client.put(key, value)
        }

        fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
            self.client.get(key)
        }

        fn check(&self, rank: u32) -> Result<(), BootstrapError> {
            self.client.check(rank)
        }

        fn never_comes(&self, key: &str, rank: u32) -> bool {
            self.client.never_comes(key, rank)
        }

        fn fence(&self) -> Result<(), BootstrapError> {
            self.client.fence()
        }

        fn finish(&self) -> Result<(), BootstrapError> {
            self.client.finish()
        }

        fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.client.wait_fd())
        }
    };
}
pub(super) use by_client;

#[derive(Debug)]
struct Connection {
    arrivals: Arrivals,
    wire: Wire,
    /// The socket is watched for room.
    wants_room: bool,
    fences: u64,
    has_finished: bool,
    has_ended: bool,
}

impl Client {
    pub(super) fn new(rank: u32, wire: Wire, host: Host) -> Result<Self, BootstrapError> {
        let arrivals = Arrivals::new(rank)?;
        let fence_news = arrivals.for_fences()?;
        let socket = wire.as_fd().try_clone_to_owned().map_err(|source| BootstrapError::Os {
            doing: "duplicating the bootstrap's socket",
            source,
        })?;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC)
            .and_then(|watch| {
                let data = epoll::EventData::new_u64(0);
                epoll::add(&watch, &socket, data, epoll::EventFlags::IN)?;
                epoll::add(&watch, arrivals.for_gets(), data, epoll::EventFlags::IN)?;
                Ok(watch)
            })
            .map_err(|errno| BootstrapError::os("making an epoll for the bootstrap", errno))?;
        let connection = Connection {
            arrivals,
            wire,
            wants_room: false,
            fences: 0,
            has_finished: false,
            has_ended: false,
        };
        Ok(Self {
            host,
            owner: Owner::this_process(),
            watch,
            fence_news,
            fence_turn: Mutex::new(()),
            connection: Mutex::new(connection),
            socket,
        })
    }

    /// Returns the connection, after received frames were handled, and waiting frames were sent as
    /// far as there is room.
    fn connection(&self) -> Result<MutexGuard<'_, Connection>, BootstrapError> {
        // Calls in a forked child are an error: parent and child would read each other's answers
        // from the shared socket.
        if !self.owner.is_here() {
            return Err(BootstrapError::Forked);
        }
        let mut connection = self.connection.lock();
        connection.receive(&self.host)?;
        let flushed = connection.wire.flush();
        self.sent(&mut connection, flushed)?;
        Ok(connection)
    }

    /// Sends a frame, or keeps it while the socket has no room.
    fn send(&self, connection: &mut Connection, frame: &Frame) -> Result<(), BootstrapError> {
        connection.arrivals.check_end()?;
        let sent = connection.wire.push(frame);
        self.sent(connection, sent)
    }

    fn sent(
        &self,
        connection: &mut Connection,
        sent: Result<(), Fault>,
    ) -> Result<(), BootstrapError> {
        if let Err(Fault::Gone(_) | Fault::Wrong(_)) = sent {
            // Frames that came before give the reason.
            connection.receive(&self.host)?;
            connection.ended(&self.host);
        }
        let wants_room = connection.wire.unsent() > 0 && !connection.has_ended;
        if wants_room != connection.wants_room {
            // A sleeper has to wake when there is room again, because no other thread sends.
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, wants_room);
            epoll::modify(&self.watch, &self.socket, epoll::EventData::new_u64(0), flags)
                .map_err(|errno| BootstrapError::os("watching the bootstrap's socket", errno))?;
            connection.wants_room = wants_room;
        }
        Ok(())
    }

    /// Sleeps until a frame can be read or sent, or another thread has read one.
    fn sleep(&self, connection: MutexGuard<'_, Connection>) -> Result<(), BootstrapError> {
        let mut interest = PollFlags::IN;
        interest.set(PollFlags::OUT, connection.wants_room);
        drop(connection);
        let mut fds =
            [PollFd::new(&self.socket, interest), PollFd::new(&self.fence_news, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(BootstrapError::os("waiting for the bootstrap's socket", errno)),
        }
    }

    pub(super) fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        check_key(key)?;
        check_value(value)?;
        let mut connection = self.connection()?;
        self.send(&mut connection, &Frame::Put { key: key.into(), value: value.into() })
    }

    pub(super) fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        check_key(key)?;
        let mut connection = self.connection()?;
        if let Some(value) = connection.arrivals.answer(key) {
            return Ok(Some(value));
        }
        if connection.arrivals.ask(key) {
            // The key is requested even when a rank is gone: the store still has that rank's
            // values.
            self.send(&mut connection, &Frame::Get { key: key.into() })?;
            return Ok(None);
        }
        connection.arrivals.check_get(key)?;
        Ok(None)
    }

    pub(super) fn check(&self, rank: u32) -> Result<(), BootstrapError> {
        self.connection.lock().arrivals.check(|lost| lost == rank)
    }

    pub(super) fn never_comes(&self, key: &str, rank: u32) -> bool {
        self.connection.lock().arrivals.never_comes(key, rank)
    }

    pub(super) fn fence(&self) -> Result<(), BootstrapError> {
        let _turn = self.fence_turn.lock();
        let mut connection = self.connection()?;
        // The check comes before the fence counts: the server must not wait for a fence that cannot
        // end.
        connection.arrivals.check_fence()?;
        let number = connection.fences + 1;
        connection.fences = number;
        self.send(&mut connection, &Frame::Fence { number })?;
        while !connection.arrivals.fence_is_done(number)? {
            self.sleep(connection)?;
            connection = self.connection()?;
        }
        Ok(())
    }

    pub(super) fn finish(&self) -> Result<(), BootstrapError> {
        let mut connection = self.connection()?;
        connection.has_finished = true;
        self.send(&mut connection, &Frame::Finished)?;
        // The process may be about to exit, and frames that wait here would be lost. Over TCP
        // unread frames would be lost too: the store hangs up when it has read all.
        let waits_for_end = matches!(self.host, Host::Zero(_));
        while connection.wire.unsent() > 0 || waits_for_end && !connection.has_ended {
            if connection.has_ended {
                break;
            }
            self.sleep(connection)?;
            connection = self.connection()?;
            // An event for fences is of no use here, and would wake this thread again and again.
            connection.arrivals.take_fence_news();
        }
        connection.arrivals.check_end()
    }

    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

impl Connection {
    fn receive(&mut self, host: &Host) -> Result<(), BootstrapError> {
        while !self.has_ended {
            match self.wire.hear(MAX_FRAME) {
                Ok(Some(bytes)) => self.arrivals.take_in(Frame::decode(&bytes)?),
                Ok(None) | Err(Fault::Short(_)) => return Ok(()),
                Err(Fault::Gone(_) | Fault::Wrong(_)) => self.ended(host),
            }
        }
        Ok(())
    }

    /// Notes that the other end has hung up.
    fn ended(&mut self, host: &Host) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        match host {
            Host::Launcher => self.arrivals.launcher_gone(),
            Host::Zero(_) if self.has_finished => {}
            Host::Zero(address) => {
                self.arrivals.take_in(Frame::Gone { rank: 0, how: Departure::Disconnected });
                self.arrivals.store_gone(0, address.clone());
            }
        }
    }
}
