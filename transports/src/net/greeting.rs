//! A proof over a connection, without a blocking wait.

use super::header::Protocol;
use super::proof::{Claim, Handshake, Key, Role, Step, Unproven};
use rustix::io::Errno;
use std::collections::VecDeque;

/// A connection that carries whole messages.
pub trait Carrier {
    /// Sends a message, or keeps it until there is room.
    ///
    /// # Errors
    /// See [`Fault`].
    fn say(&mut self, message: &[u8]) -> Result<(), Fault>;

    /// Takes the next message, if it is there. Descriptors that come with it are dropped.
    ///
    /// # Errors
    /// See [`Fault`].
    fn hear(&mut self, longest: usize) -> Result<Option<Vec<u8>>, Fault>;
}

/// The reason why a message was neither sent nor received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This process lacks something for now. The call can be repeated.
    Short(Errno),
    /// The other side is gone, or was never there.
    Gone(String),
    /// The received bytes are no message of this connection.
    Wrong(String),
}

/// The reason why a greeting has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The connection has ended before both sides were proved.
    #[error("{0}")]
    Gone(String),
    /// The other side has not proved that it holds the secret.
    #[error(transparent)]
    Unproven(#[from] Unproven),
}

/// State of a greeting.
#[derive(Debug)]
pub enum Progress {
    /// The other side's next message has not come.
    Waiting,
    /// This process lacks something for now. The greeting goes on at the next call.
    Short(Errno),
    /// Both sides are proved: the other side is what it claims to be.
    Proven(Claim),
}

/// A proof in progress on one connection.
#[derive(Debug)]
pub struct Greeting {
    handshake: Handshake,
    longest: usize,
    unsaid: VecDeque<Vec<u8>>,
    proven: Option<Claim>,
}

impl Greeting {
    /// Makes a greeting that has not begun. [`advance`](Self::advance) begins it.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn new(role: Role, protocol: Protocol, key: &Key, claim: Claim) -> Result<Self, Errno> {
        let handshake = Handshake::new(role, protocol, key.clone(), claim)?;
        let unsaid = VecDeque::from([handshake.opening()]);
        Ok(Self { handshake, longest: protocol.longest, unsaid, proven: None })
    }

    /// Returns what the other side claims to be, proved or not.
    pub fn claim(&self) -> Option<Claim> {
        self.handshake.claim()
    }

    /// Returns `true` if the other side has said something: it speaks this protocol.
    pub fn has_heard(&self) -> bool {
        self.handshake.has_heard()
    }

    /// Sends and receives what is possible now.
    ///
    /// # Errors
    /// See [`Failure`].
    pub fn advance(&mut self, carrier: &mut impl Carrier) -> Result<Progress, Failure> {
        match self.go(carrier) {
            Ok(progress) => Ok(progress?),
            Err(Fault::Short(error)) => Ok(Progress::Short(error)),
            Err(Fault::Gone(why)) => Err(Failure::Gone(why)),
            Err(Fault::Wrong(why)) => Err(Failure::Unproven(Unproven::Wrong(why))),
        }
    }

    fn go(&mut self, carrier: &mut impl Carrier) -> Result<Result<Progress, Unproven>, Fault> {
        loop {
            // A dialer that has been refused cannot send any more, and still hears why.
            let said = self.say(carrier);
            if said.is_ok()
                && let Some(claim) = self.proven.take()
            {
                return Ok(Ok(Progress::Proven(claim)));
            }
            let message = match carrier.hear(self.longest) {
                Ok(Some(message)) => message,
                Ok(None) => return said.map(|()| Ok(Progress::Waiting)),
                Err(fault) => return Err(fault),
            };
            match self.handshake.hear(&message) {
                Ok(Step::Wait) => {}
                Ok(Step::Say(reply)) => self.unsaid.push_back(reply),
                Ok(Step::Proven(reply, claim)) => {
                    self.unsaid.extend(reply);
                    self.proven = Some(claim);
                    self.say(carrier)?;
                }
                Err(why) => return Ok(Err(why)),
            }
        }
    }

    fn say(&mut self, carrier: &mut impl Carrier) -> Result<(), Fault> {
        while let Some(message) = self.unsaid.front() {
            carrier.say(message)?;
            self.unsaid.pop_front();
        }
        Ok(())
    }
}

/// A connection that was accepted: its other side proves itself, and then says something.
#[derive(Debug)]
pub struct Caller<C> {
    /// The connection.
    pub channel: C,
    /// Greeting, until both sides are proved.
    greeting: Option<Box<Greeting>>,
    /// Claim of the other side, once it is proved.
    proved: Option<Claim>,
}

impl<C: Carrier> Caller<C> {
    /// Wraps a connection on which the greeting is still to be done.
    pub fn new(channel: C, greeting: Greeting) -> Self {
        Self { channel, greeting: Some(Box::new(greeting)), proved: None }
    }

    /// Goes on with the proof. Returns the connection and the other side's claim, once both sides
    /// are proved.
    ///
    /// # Errors
    /// The reason why it is not proved; `None` if it has gone.
    pub fn prove(&mut self) -> Result<Option<(&mut C, Claim)>, Option<String>> {
        if let Some(greeting) = &mut self.greeting {
            match greeting.advance(&mut self.channel) {
                Ok(Progress::Waiting | Progress::Short(_)) => return Ok(None),
                Ok(Progress::Proven(claim)) => {
                    (self.greeting, self.proved) = (None, Some(claim));
                }
                Err(Failure::Gone(_) | Failure::Unproven(Unproven::Bye)) => return Err(None),
                Err(why) => return Err(Some(why.to_string())),
            }
        }
        Ok(self.proved.map(|claim| (&mut self.channel, claim)))
    }

    /// Returns the connection, and the other side's claim if both sides are proved.
    pub fn into_proved(self) -> (C, Option<Claim>) {
        (self.channel, self.proved)
    }

    /// Returns `true` if both sides are proved.
    pub fn is_proved(&self) -> bool {
        self.proved.is_some()
    }
}
