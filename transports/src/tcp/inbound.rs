//! Links that lead here, with their connections.

use super::incoming::{CLOSED, Incoming};
use super::socket;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use std::net::{SocketAddr, TcpStream};
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
    pub(super) socket: Option<TcpStream>,
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
    pub(super) fn acknowledge(&mut self, all: bool) {
        if let Some(socket) = &self.socket
            && let Some(acked) = self.incoming.ack(all)
        {
            // Lost only with the connection; the next one begins with a number of bytes. A socket
            // of a peer that reads has room for eight bytes.
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let _ = send(socket, &acked.to_le_bytes(), flags);
        }
    }

    /// Tells the sender that this device is closed.
    pub(super) fn close(&self) {
        let Some(socket) = &self.socket else { return };
        // Bytes that are not read would break the connection before its end is read.
        self.drain();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = send(socket, &CLOSED.to_le_bytes(), flags);
    }

    /// Drops what has come: this device is closed. A sender that goes on for ever is not waited
    /// for.
    pub(super) fn drain(&self) {
        let Some(socket) = &self.socket else { return };
        for _ in 0..DRAIN {
            let read = recv(socket, &mut [0; 4096], RecvFlags::DONTWAIT);
            if !read.is_ok_and(|(_, read)| read > 0) {
                break;
            }
        }
    }
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
