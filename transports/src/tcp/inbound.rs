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
    alive_at: Instant,
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
        while recv(socket, &mut [0; 4096], RecvFlags::DONTWAIT).is_ok_and(|(_, read)| read > 0) {}
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = send(socket, &CLOSED.to_le_bytes(), flags);
    }
}

impl Lost {
    /// Notes that a connection was lost. `alive_at`: when the sender's kernel was last heard of.
    pub(super) fn since(alive_at: Instant) -> Self {
        Self { alive_at, probe: None }
    }

    /// Asks whether the sender's process is there. Returns the reason why it counts as gone.
    pub(super) fn ask(&mut self, home: SocketAddr, timeout: Duration) -> Option<String> {
        if let Some((probe, since)) = &self.probe {
            let error = sockopt::socket_error(probe);
            match error {
                Ok(Err(Errno::CONNREFUSED)) => {
                    return Some(format!("no process listens at {home} any more"));
                }
                Ok(Ok(())) if probe.peer_addr().is_ok() => {
                    // It is there, and will dial when it makes progress.
                    self.alive_at = Instant::now();
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
        (self.alive_at.elapsed() >= timeout)
            .then(|| format!("its machine has not answered for {limit} s (CARRACK_PEER_TIMEOUT)"))
    }
}
