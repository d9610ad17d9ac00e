//! The TCP connection that carries the messages of [`wire`](super::wire), and stays open: its
//! hang-up is the peer's end.

use super::wire::{MAX_MESSAGE, SetupMessage};
use crate::net::greeting::{Carrier, Fault};
use crate::net::streams::{Limits, TcpChannel};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// A few messages may wait to be written. A machine that has crashed counts as gone after 40
/// seconds of silence.
const LIMITS: Limits =
    Limits { longest: MAX_MESSAGE, unwritten: 8 * MAX_MESSAGE, silence: Duration::from_secs(40) };

/// One end of it. None of its calls waits.
#[derive(Debug)]
pub struct SetupChannel(TcpChannel);

/// Result of a receive.
#[derive(Debug, PartialEq, Eq)]
pub enum SetupReceived {
    /// Nothing so far.
    Nothing,
    /// A message.
    Message(SetupMessage),
    /// The other side has hung up; or could not be reached, for this reason.
    Closed(String),
    /// Bytes that no honest peer sends.
    Wrong(String),
}

impl SetupChannel {
    /// Begins to dial. [`receive`](Self::receive) tells of a listener that is not there.
    ///
    /// # Errors
    /// This process has no descriptor left, or the address cannot be dialled at all.
    pub fn dial(to: SocketAddr) -> io::Result<Self> {
        TcpChannel::dial(to, LIMITS).map(Self)
    }

    /// Wraps the end of a connection that was accepted.
    ///
    /// # Errors
    /// The kernel's.
    pub fn over(stream: TcpStream) -> io::Result<Self> {
        TcpChannel::over(stream, LIMITS).map(Self)
    }

    /// Sends a message, now or as soon as there is room.
    ///
    /// # Errors
    /// The other side does not read, or is gone.
    pub fn send(&mut self, message: &SetupMessage) -> io::Result<()> {
        self.0.say(&message.encode()).map_err(|fault| match fault {
            Fault::Short(error) => error.into(),
            Fault::Gone(why) | Fault::Wrong(why) => io::Error::new(ErrorKind::BrokenPipe, why),
        })
    }

    /// Takes in the next message, if it is there.
    pub fn receive(&mut self) -> SetupReceived {
        match self.0.hear(MAX_MESSAGE) {
            Ok(None) | Err(Fault::Short(_)) => SetupReceived::Nothing,
            Ok(Some(bytes)) => SetupMessage::decode(&bytes)
                .map_or_else(SetupReceived::Wrong, SetupReceived::Message),
            Err(Fault::Gone(why)) => SetupReceived::Closed(why),
            Err(Fault::Wrong(why)) => SetupReceived::Wrong(why),
        }
    }

    /// Returns the address of the other end as text.
    pub fn peer_name(&self) -> String {
        self.0.peer_name()
    }
}

impl Carrier for SetupChannel {
    fn say(&mut self, message: &[u8]) -> Result<(), Fault> {
        self.0.say(message)
    }

    fn hear(&mut self, longest: usize) -> Result<Option<Vec<u8>>, Fault> {
        self.0.hear(longest)
    }
}

impl AsFd for SetupChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
