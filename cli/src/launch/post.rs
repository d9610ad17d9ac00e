//! The transfer of bootstrap frames between the ranks' sockets and the server.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use carrack::bootstrap::protocol::{Frame, MAX_FRAME, SOCKET_BUFFER};
use carrack::bootstrap::server::Server;
use carrack::bootstrap::{Departure, JobId};
use carrack_transports::net::greeting::{Carrier as _, Fault};
use carrack_transports::net::packets::Channel;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;

/// Bytes that may wait for a rank that does not read. Beyond them its requests are not read, which
/// bounds memory: every answer was requested.
const OUTBOX_FULL: usize = 1024 * 1024;

/// Frames of one rank that are handled before the others have their turn.
const FRAMES_A_TURN: usize = 64;

/// Time in which a rank's death may follow the hang-up of its socket. So the others learn the cause
/// of death and not only the hang-up. The kernel closes files before it tells the parent.
const DEATH_FOLLOWS: Duration = Duration::from_millis(200);

/// The sockets of all ranks, and the server behind them.
pub(super) struct Post {
    /// The keeper's epoll, which watches the sockets, too.
    pub(super) main: OwnedFd,
    server: Server,
    boxes: Vec<Option<Mailbox>>,
    hung_up: VecDeque<(Instant, u32)>,
    /// Refusals of ranks' requests, for the launcher to print.
    complaints: Vec<String>,
}

struct Mailbox {
    socket: Channel,
    outbox: VecDeque<Vec<u8>>,
    outbox_bytes: usize,
    watched_for: epoll::EventFlags,
    token: u64,
}

impl Post {
    /// Creates the state for a new job of this many ranks.
    pub(super) fn new(job: JobId, ranks: u32, main: OwnedFd) -> Self {
        let boxes = (0..ranks).map(|_| None).collect();
        let (hung_up, complaints) = (VecDeque::new(), Vec::new());
        Self { main, server: Server::new(job, ranks), boxes, hung_up, complaints }
    }

    /// Opens a socket for this rank, sends the greeting into it, and returns the rank's end. The
    /// keeper's end is watched under `token`.
    pub(super) fn open(&mut self, rank: u32, token: u64) -> rustix::io::Result<OwnedFd> {
        let (ours, theirs) = Channel::pair()?;
        for end in [&ours, &theirs] {
            set_socket_send_buffer_size(end, SOCKET_BUFFER)?;
        }
        let watched_for = epoll::EventFlags::IN;
        epoll::add(&self.main, &ours, epoll::EventData::new_u64(token), watched_for)?;
        let hello = self.server.hello(rank).encode();
        ours.send(&hello, &[])?;
        let (outbox, outbox_bytes) = (VecDeque::new(), 0);
        self.boxes[rank as usize] =
            Some(Mailbox { socket: ours, outbox, outbox_bytes, watched_for, token });
        Ok(theirs.into_fd())
    }

    /// Handles what a rank has sent, and sends what waits for it.
    pub(super) fn serve(&mut self, rank: u32) -> rustix::io::Result<()> {
        if self.receive(rank, FRAMES_A_TURN)? {
            self.close(rank)?;
            self.hung_up.push_back((Instant::now() + DEATH_FOLLOWS, rank));
            return Ok(());
        }
        self.flush(rank)
    }

    /// Takes in that a rank's process has ended. What it had sent before still counts.
    pub(super) fn died(&mut self, rank: u32, how: Departure) -> rustix::io::Result<()> {
        self.receive(rank, usize::MAX)?;
        self.close(rank)?;
        self.hung_up.retain(|(_, hung_up)| *hung_up != rank);
        let outgoing = self.server.departed(rank, how);
        self.deliver(outgoing)
    }

    /// Reports those that have hung up and not died.
    pub(super) fn expire(&mut self, now: Instant) -> rustix::io::Result<()> {
        while let Some(&(at, rank)) = self.hung_up.front()
            && at <= now
        {
            self.hung_up.pop_front();
            let outgoing = self.server.departed(rank, Departure::Disconnected);
            self.deliver(outgoing)?;
        }
        Ok(())
    }

    /// Returns the time at which [`expire`](Self::expire) is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.hung_up.front().map(|(at, _)| *at)
    }

    /// Returns the refusals since the last call.
    pub(super) fn complaints(&mut self) -> Vec<String> {
        std::mem::take(&mut self.complaints)
    }

    /// Handles frames of a rank. Returns `true` if it has hung up.
    fn receive(&mut self, rank: u32, at_most: usize) -> rustix::io::Result<bool> {
        for _ in 0..at_most {
            let Some(mailbox) = &mut self.boxes[rank as usize] else {
                return Ok(false);
            };
            if mailbox.outbox_bytes > OUTBOX_FULL && at_most != usize::MAX {
                return Ok(false);
            }
            let bytes = match mailbox.socket.hear(MAX_FRAME) {
                Ok(Some(bytes)) => bytes,
                Ok(None) => return Ok(false),
                Err(Fault::Short(errno)) => return Err(errno),
                Err(Fault::Gone(_) | Fault::Wrong(_)) => return Ok(true),
            };
            let outgoing = self.server.receive(rank, &bytes);
            self.deliver(outgoing)?;
        }
        Ok(false)
    }

    fn deliver(&mut self, outgoing: Vec<(u32, Frame)>) -> rustix::io::Result<()> {
        for (rank, frame) in outgoing {
            if let Frame::Refused { why } = &frame {
                self.complaints.push(why.clone());
            }
            if let Some(mailbox) = &mut self.boxes[rank as usize] {
                let bytes = frame.encode();
                mailbox.outbox_bytes += bytes.len();
                mailbox.outbox.push_back(bytes);
                self.flush(rank)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self, rank: u32) -> rustix::io::Result<()> {
        let Some(mailbox) = &mut self.boxes[rank as usize] else {
            return Ok(());
        };
        while let Some(bytes) = mailbox.outbox.front() {
            match mailbox.socket.send(bytes, &[]) {
                Ok(()) => {
                    mailbox.outbox_bytes -= bytes.len();
                    mailbox.outbox.pop_front();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // It has hung up; that is noticed where it is read.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    mailbox.outbox.clear();
                    mailbox.outbox_bytes = 0;
                }
                Err(errno) => return Err(errno),
            }
        }
        let mut wanted = epoll::EventFlags::empty();
        wanted.set(epoll::EventFlags::IN, mailbox.outbox_bytes <= OUTBOX_FULL);
        wanted.set(epoll::EventFlags::OUT, !mailbox.outbox.is_empty());
        if wanted != mailbox.watched_for {
            epoll::modify(
                &self.main,
                &mailbox.socket,
                epoll::EventData::new_u64(mailbox.token),
                wanted,
            )?;
            mailbox.watched_for = wanted;
        }
        Ok(())
    }

    fn close(&mut self, rank: u32) -> rustix::io::Result<()> {
        match self.boxes[rank as usize].take() {
            Some(mailbox) => epoll::delete(&self.main, &mailbox.socket),
            None => Ok(()),
        }
    }
}
