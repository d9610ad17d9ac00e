//! Links that lead here, with their connections.

use super::frame::Frame;
use super::incoming::{CLOSED, Incoming};
use super::outgoing::Outgoing;
use super::shared::Shared;
use super::socket;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of a question whether a process is there.
const ASK: Duration = Duration::from_secs(3);

/// Time between two such questions.
const PAUSE: Duration = Duration::from_secs(1);

/// Calls that take unread bytes off a connection before it is closed: some megabytes.
const DRAIN: usize = 4096;

/// A link that leads here, with its connection.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) incoming: Incoming,
    pub(super) socket: Option<Arc<TcpStream>>,
    /// The link that goes the other way on the same connection.
    pub(super) other: Option<Arc<Outgoing>>,
    /// Where the sender's device listens.
    pub(super) home: SocketAddr,
    /// Set while there is no connection: since when, and a connection that only asks whether the
    /// sender's process is there.
    pub(super) lost: Option<Lost>,
}

#[derive(Debug)]
pub(super) struct Lost {
    /// Time without an answer, while this process asked.
    silent: Duration,
    asked_at: Instant,
    probe: Option<(TcpStream, Instant)>,
}

impl Inbound {
    /// Acknowledges the bytes: all of them, or if that is due.
    pub(super) fn acknowledge(&mut self, shared: &Shared, all: bool) {
        let Some(socket) = &self.socket else { return };
        if !self.incoming.owes_ack(all) {
            return;
        }
        let (link, received) = (self.incoming.link, self.incoming.received());
        if let Some(other) = &self.other {
            if other.note(shared, socket, Frame::Ack { link, received }) {
                self.incoming.was_acked();
            }
            return;
        }
        self.incoming.was_acked();
        // Lost only with the connection; the next one begins with a number of bytes. A socket of a
        // peer that reads has room for eight bytes.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = send(socket, &received.to_le_bytes(), flags);
    }

    /// Takes up what the peer says of the link that goes the other way.
    #[inline]
    pub(super) fn take_told(&mut self, shared: &Shared) {
        if let Some(told) = self.incoming.take_told()
            && let (Some(other), Some(socket)) = (&self.other, &self.socket)
        {
            other.is_told(shared, socket, told);
        }
    }

    /// Takes the connection away, from the link that goes the other way on it, too.
    pub(super) fn hang_up(&mut self, shared: &Shared) -> Option<Arc<TcpStream>> {
        let socket = self.socket.take()?;
        if let Some(other) = self.other.take() {
            other.set_reader(None);
            other.hung_up(shared, &socket);
        }
        Some(socket)
    }

    /// Tells the sender that this device is closed.
    pub(super) fn close(&self) {
        // One of two links says so by its own end.
        let (Some(socket), None) = (&self.socket, &self.other) else { return };
        // Bytes that are not read would break the connection before its end is read.
        self.drain();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = send(socket, &CLOSED.to_le_bytes(), flags);
    }

    /// Drops what has come: this device is closed.
    pub(super) fn drain(&self) {
        if let Some(socket) = &self.socket {
            // One that has ended brings nothing more.
            let _ = drain(socket);
        }
    }
}

/// Drops what has come. A sender that goes on for ever is not waited for.
///
/// # Errors
/// The connection has ended.
pub(super) fn drain(socket: &TcpStream) -> Result<(), String> {
    for _ in 0..DRAIN {
        match recv(socket, &mut [0; 4096], RecvFlags::DONTWAIT) {
            Ok((_, 1..)) => {}
            Ok(_) => return Err("it has hung up".into()),
            Err(Errno::AGAIN | Errno::INTR) => break,
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

impl Lost {
    /// Notes that a connection was lost whose other side had been silent for as long.
    pub(super) fn after(silent: Duration) -> Self {
        Self { silent, asked_at: Instant::now(), probe: None }
    }

    /// Asks whether the sender's process is there. Returns the reason why it counts as gone.
    pub(super) fn ask(&mut self, home: SocketAddr, timeout: Duration) -> Option<String> {
        // A process that computes does not ask, and can miss no answer.
        self.silent += self.asked_at.elapsed().min(timeout / 8);
        self.asked_at = Instant::now();
        if let Some((probe, since)) = &self.probe {
            let error = sockopt::socket_error(probe);
            match error {
                Ok(Err(Errno::CONNREFUSED)) => {
                    return Some(format!("no process listens at {home} any more"));
                }
                Ok(Ok(())) if probe.peer_addr().is_ok() => {
                    // It is there, and will dial when it makes progress.
                    self.silent = Duration::ZERO;
                    if since.elapsed() >= PAUSE {
                        self.probe = None;
                    }
                }
                Ok(Ok(())) if since.elapsed() < ASK => {}
                _ => self.probe = None,
            }
        } else {
            self.probe = socket::dial(home, "").ok().map(|probe| (probe, Instant::now()));
        }
        let limit = timeout.as_secs();
        (self.silent >= timeout)
            .then(|| format!("its machine has not answered for {limit} s (CARRACK_PEER_TIMEOUT)"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_process_that_could_not_ask_does_not_take_a_peer_for_dead() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (home, timeout) = (listener.local_addr().unwrap(), Duration::from_millis(200));
        let mut lost = Lost::after(Duration::ZERO);
        std::thread::sleep(2 * timeout);
        for _ in 0..5 {
            assert_eq!(lost.ask(home, timeout), None);
            std::thread::sleep(timeout / 50);
        }
    }
}
