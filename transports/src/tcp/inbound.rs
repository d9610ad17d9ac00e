//! The receiving ends of connections.

use super::frame::Frame;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::shared::Shared;
use super::socket;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of a question whether a process is there.
const ASK: Duration = Duration::from_secs(3);

/// Time between two such questions.
const PAUSE: Duration = Duration::from_secs(1);

/// A receiving end, with its connection.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) incoming: Incoming,
    /// The sending end, which has the same place.
    pub(super) link: Arc<Outgoing>,
    pub(super) socket: Option<Arc<TcpStream>>,
    /// Where the peer's device listens.
    pub(super) home: SocketAddr,
    /// Set while the peer has to make another connection.
    pub(super) lost: Option<Lost>,
}

/// Time without a connection, and a connection that only asks whether the peer's process is there.
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
        let received = self.incoming.received();
        if self.incoming.owes_ack(all)
            && let Some(socket) = &self.socket
            && self.link.note(shared, socket, Frame::Ack { received })
        {
            self.incoming.was_acked();
        }
    }

    /// Drops what has come: this device is closed.
    pub(super) fn drain(&self) {
        if let Some(socket) = &self.socket {
            // One that has ended brings nothing more.
            let _ = socket::drain(socket);
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
