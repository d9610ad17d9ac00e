//! A connection to a neighbour in the tree.

#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rustix::net::sockopt;
use std::time::Duration;

use super::wire::{Envelope, Inbox};

/// How much may wait for a neighbour before what it asks for, or what would go to it, is put off:
/// that bounds memory.
const FULL: usize = 1 << 20;

/// What is read at a time, in bytes.
const READ: usize = 64 << 10;

/// How long a connection is silent before the kernel asks whether the other machine is there, and
/// how often and how many times it then asks: what is dead is noticed after two minutes.
const SILENT: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_secs(10);
const ASK_TIMES: u32 = 6;

/// A neighbour.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) rank: u32,
    pub(super) address: SocketAddr,
    /// Shared with the thread that sleeps on it.
    stream: Arc<TcpStream>,
    inbox: Inbox,
    outbox: Vec<u8>,
    /// What of the outbox has gone.
    sent: usize,
    is_down: bool,
}

impl Link {
    /// A connection on which the greetings are over.
    pub(super) fn new(stream: TcpStream, rank: u32, address: SocketAddr) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, SILENT)?;
        sockopt::set_tcp_keepintvl(&stream, ASK_EVERY)?;
        sockopt::set_tcp_keepcnt(&stream, ASK_TIMES)?;
        // The same where something is on its way: then the kernel does not ask, and tries for a
        // quarter of an hour.
        let patience = SILENT + ASK_EVERY * ASK_TIMES;
        sockopt::set_tcp_user_timeout(
            &stream,
            u32::try_from(patience.as_millis()).unwrap_or(u32::MAX),
        )?;
        let stream = Arc::new(stream);
        let (inbox, outbox) = (Inbox::default(), Vec::new());
        Ok(Self { rank, address, stream, inbox, outbox, sent: 0, is_down: false })
    }

    pub(super) fn stream(&self) -> Arc<TcpStream> {
        Arc::clone(&self.stream)
    }

    pub(super) fn push(&mut self, envelope: &Envelope) {
        if !self.is_down {
            envelope.write(&mut self.outbox);
        }
    }

    /// Sends what there is room for.
    pub(super) fn flush(&mut self) {
        while self.has_to_send() {
            match (&*self.stream).write(&self.outbox[self.sent..]) {
                Ok(len) if len > 0 => self.sent += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // What it has still sent is read before its end is noticed.
                Ok(_) | Err(_) => {
                    self.is_down = true;
                    self.outbox.clear();
                    self.sent = 0;
                }
            }
        }
        if !self.has_to_send() {
            self.outbox.clear();
            self.sent = 0;
        } else if self.sent > FULL {
            self.outbox.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Reads what is there. False once nothing will come any more.
    pub(super) fn fill(&mut self) -> bool {
        let mut piece = vec![0; READ];
        // A frame is not much longer than a piece: two of them always make room.
        while self.inbox.len() < 2 * READ {
            match (&*self.stream).read(&mut piece) {
                Ok(0) => return false,
                Ok(len) => self.inbox.push(&piece[..len]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// The next frame that has come, if it is whole.
    pub(super) fn next(&mut self) -> Result<Option<Envelope>, super::super::protocol::BadFrame> {
        self.inbox.take()
    }

    pub(super) fn has_to_send(&self) -> bool {
        self.sent < self.outbox.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.outbox.len() - self.sent > FULL
    }
}
