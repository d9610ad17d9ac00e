//! The answer to ranks that call a rank 0 that has ended: without it they would wait for one that
//! starts late.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};

use carrack_transports::net::greeting::Carrier as _;
use carrack_transports::net::streams::TcpChannel;

use super::join::{LIMITS, PROTOCOL, listen_at};

/// Callers whose connections stay open, so that they can read their answer.
const KEPT: usize = 16;

/// A listener at the port of a rank 0 that has ended, which refuses all ranks.
#[derive(Debug)]
pub struct StandIn {
    listener: TcpListener,
    was_reached: bool,
    why: String,
    told: VecDeque<TcpChannel>,
}

impl StandIn {
    /// Opens the listener, as rank 0 does where `MASTER_ADDR` is `host`. Ranks are told `why`.
    ///
    /// # Errors
    /// The system's: another process has the port.
    pub fn open(host: &str, port: u16, why: String) -> io::Result<Self> {
        // Connections that the kernel still holds are an error only without reuse.
        let fresh = listen_at(Some(host), port, false);
        let was_reached = fresh.is_err();
        let listener = fresh.or_else(|_| listen_at(Some(host), port, true))?;
        Ok(Self { listener, was_reached, why, told: VecDeque::new() })
    }

    /// Returns `true` if rank 0 had connections a short time ago.
    pub fn was_reached(&self) -> bool {
        self.was_reached
    }

    /// Tells all ranks that call, as long as there are descriptors. Never blocks.
    pub fn answer(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                // It has gone while it waited; others may be behind it.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(_) => return,
            };
            let Ok(mut channel) = TcpChannel::over(stream, LIMITS) else { continue };
            // It fails for a caller that has gone.
            let _ = channel.say(&PROTOCOL.refusal(&self.why));
            self.told.truncate(KEPT - 1);
            self.told.push_front(channel);
        }
    }
}

impl AsFd for StandIn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}
