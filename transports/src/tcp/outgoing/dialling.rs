//! A connection that is being made: dialled, then proved, then welcomed.

use super::{CLOSING, CONNECT, Line, Outgoing, PAUSE, Risen, Sending};
use crate::contract::DownCause;
use crate::net::greeting::{Carrier, Failure, Fault, Greeting, Progress};
use crate::net::proof::{Role, Unproven};
use crate::net::streams::TcpChannel;
use crate::tcp::shared::{LINK, TcpShared};
use crate::tcp::socket;
use crate::tcp::wire::{self, Hello};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(in crate::tcp) struct Dialling {
    pub(super) channel: TcpChannel,
    to: SocketAddr,
    /// Number of the address.
    pub(super) candidate: usize,
    /// All those before have refused.
    pub(super) refused: bool,
    pub(super) is_connected: bool,
    pub(super) until: Instant,
    /// Message after both sides are proved.
    hello: Hello,
    /// Greeting, until both sides are proved.
    greeting: Option<Box<Greeting>>,
}

impl Outgoing {
    pub(super) fn dial(
        &self,
        sending: &mut Sending,
        shared: &TcpShared,
        (candidate, refused): (usize, bool),
    ) {
        let Some(to) = sending.candidates.get(candidate).copied() else {
            let why = "it has no address that this machine can dial".into();
            return self.end(sending, shared, DownCause::Gone(why));
        };
        sending.attempts = sending.attempts.saturating_add(1);
        let hello = self.hello(sending, shared);
        let begin = || -> Result<Dialling, Errno> {
            let socket = socket::dial(to, &shared.options.congestion)?;
            let channel = TcpChannel::over(socket, wire::limits(shared.options.timeout))
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            // Told of each change once, since a connected socket has room all the time.
            let changes = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            shared.watch(channel.as_fd(), LINK | u64::from(self.index), changes)?;
            let greeting = shared.greeting(Role::Dialer)?;
            let until = Instant::now() + self.patience(sending, shared.options.timeout);
            let greeting = Some(Box::new(greeting));
            let is_connected = false;
            Ok(Dialling { channel, to, candidate, refused, is_connected, until, hello, greeting })
        };
        match begin() {
            Ok(dialling) => sending.line = Line::Dialling(Box::new(dialling)),
            Err(error) if crate::net::is_shortage(error) => {
                // It says nothing about the peer.
                shared.shortage.note(error);
                sending.alive_at = Instant::now();
                sending.line = Line::Pause(Instant::now() + PAUSE);
            }
            Err(error) if candidate + 1 < sending.candidates.len() => {
                tracing::debug!(%to, %error, "an address cannot be dialled");
                self.dial(sending, shared, (candidate + 1, false));
            }
            Err(error) => self.pause(sending, shared, &format!("{to}: {error}"), false),
        }
    }

    /// Returns the time limit of a connect: all addresses have their turn before the peer counts as
    /// gone.
    fn patience(&self, sending: &Sending, timeout: Duration) -> Duration {
        let addresses = u32::try_from(sending.candidates.len()).unwrap_or(u32::MAX).max(1);
        let left = timeout.saturating_sub(sending.alive_at.elapsed());
        (timeout / 2 / addresses).min(CONNECT).min(left).max(PAUSE)
    }

    /// Waits before all addresses are dialled again, or gives up.
    pub(super) fn pause(
        &self,
        sending: &mut Sending,
        shared: &TcpShared,
        why: &str,
        refused: bool,
    ) {
        sending.refusals = if refused { sending.refusals + 1 } else { 0 };
        if refused {
            // The peer's kernel has answered.
            sending.alive_at = Instant::now();
        }
        let may_close = sending.other > 0 && sending.refusals <= CLOSING;
        let cause = if refused && !may_close {
            format!("no process listens at its address any more: {why}")
        } else if sending.alive_at.elapsed() >= shared.options.timeout {
            let limit = shared.options.timeout.as_secs();
            format!("its machine has not answered for {limit} s (CARRACK_PEER_TIMEOUT): {why}")
        } else {
            sending.line = Line::Pause(Instant::now() + PAUSE);
            return;
        };
        self.end(sending, shared, DownCause::Gone(cause));
    }

    /// Goes on with the first messages of a connection.
    pub(super) fn greet(&self, dialling: &mut Dialling, shared: &TcpShared) -> Greeted {
        let Dialling { channel, to, is_connected, until, hello, greeting, .. } = dialling;
        let next = |why: String| Greeted::Next(format!("{to}: {why}"), false);
        if !*is_connected {
            match channel.is_connected() {
                Ok(true) => {}
                Ok(false) if Instant::now() > *until => return next("it does not answer".into()),
                Ok(false) => return Greeted::Wait,
                Err(error) => {
                    let refused = error.kind() == ErrorKind::ConnectionRefused;
                    return Greeted::Next(format!("{to}: {error}"), refused);
                }
            }
            *is_connected = true;
            return Greeted::Alive;
        }
        if let Some(proof) = greeting {
            match proof.advance(channel) {
                Ok(Progress::Waiting) => return Greeted::Wait,
                Ok(Progress::Short(error)) => {
                    shared.shortage.note(error);
                    return Greeted::Wait;
                }
                Ok(Progress::Proven(claim)) if claim.device != self.device.0 => {
                    // A device listens as long as it lives.
                    let why = format!("{to}: another rank's device listens there");
                    return Greeted::Next(why, true);
                }
                Ok(Progress::Proven(_)) => *greeting = None,
                Err(Failure::Unproven(Unproven::Refused(why))) => return Greeted::Refused(why),
                Err(why) => return next(why.to_string()),
            }
            if let Err(fault) = channel.say(&hello.message(wire::HELLO)) {
                return next(words_of(fault));
            }
        }
        match channel
            .hear(wire::PROTOCOL.longest)
            .map(|message| message.as_deref().map(|it| Hello::read(wire::WELCOME, it)))
        {
            Ok(None) => Greeted::Wait,
            Ok(Some(Ok(hello))) => Greeted::Up(hello),
            Ok(Some(Err(why))) => Greeted::Refused(why),
            Err(fault) => next(words_of(fault)),
        }
    }

    /// Takes up the connection that was dialled. It carries bytes both ways from now on.
    pub(super) fn up(
        &self,
        sending: &mut Sending,
        shared: &TcpShared,
        hello: &Hello,
    ) -> Option<Risen> {
        let Line::Dialling(dialling) =
            std::mem::replace(&mut sending.line, Line::Pause(Instant::now() + PAUSE))
        else {
            return None;
        };
        let (socket, behind) = dialling.channel.into_stream();
        let socket = match shared.serve(socket, self.index) {
            Ok(socket) => socket,
            Err(error) => {
                shared.shortage.note(error);
                return None;
            }
        };
        let window = hello.window.get();
        let is_up = self.rises(sending, shared, socket.clone(), hello);
        shared.shortage.end();
        is_up.then_some(Risen { socket, window, behind })
    }
}

/// The result of a step of a greeting.
pub(super) enum Greeted {
    Wait,
    /// The peer's kernel has answered.
    Alive,
    /// The peer has answered by this.
    Up(Hello),
    /// The next address, for this reason; `true` if no process listens at this one.
    Next(String, bool),
    Refused(String),
}

fn words_of(fault: Fault) -> String {
    match fault {
        Fault::Short(error) => error.to_string(),
        Fault::Gone(why) | Fault::Wrong(why) => why,
    }
}
