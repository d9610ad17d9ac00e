//! The sending end of a link.
//!
//! Bytes stay until the peer has acknowledged them. A connection that breaks is made anew, and goes
//! on behind the bytes that the peer has.

use super::address::Address;
use super::device::OUTGOING;
use super::frame::{Frame, HEAD};
use super::incoming::CLOSED;
use super::outflow::{Body, Outflow};
use super::shared::Shared;
use super::socket::{self, Gathered};
use super::wire;
use crate::clock::ticks;
use crate::contract::{DownCause, Event, OpFailure, PeerId};
use crate::net::greeting::{Carrier, Failure, Fault, Greeting, Progress};
use crate::net::proof::{Role, Unproven};
use crate::net::streams::TcpChannel;
use parking_lot::{Mutex, MutexGuard};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a connect; then the next address is dialled.
const CONNECT: Duration = Duration::from_secs(3);

/// Pause after all addresses were dialled in vain.
const PAUSE: Duration = Duration::from_millis(100);

/// Time without an acknowledgement of the peer's kernel after which another connection is tried.
/// The kernel itself waits longer and longer before it sends again, and so outlasts a cut.
const STALLED: Duration = Duration::from_millis(500);

/// The sending end.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    /// Its place in the device's list.
    pub(super) index: u32,
    /// Number that tells the peer which link a connection belongs to.
    number: u64,
    address: Address,
    candidates: Vec<SocketAddr>,
    pub(super) is_up: AtomicBool,
    is_over: AtomicBool,
    /// Ticks of the last call that has sent something.
    sent_at: AtomicU64,
    pub(super) sending: Mutex<Sending>,
}

#[derive(Debug)]
pub(super) struct Sending {
    pub(super) flow: Outflow,
    pub(super) line: Line,
    /// Set while it is in the device's list of links with unsent bytes.
    pub(super) is_listed: bool,
    /// Set while the descriptor is watched for room.
    waits_for_room: bool,
    /// When the peer's kernel was last known to be there.
    alive_at: Instant,
    /// Bytes of an acknowledgement that is not whole.
    ack: Vec<u8>,
    /// Set when the user has dropped the link: it ends when all is acknowledged.
    is_dropped: bool,
}

/// The connection.
#[derive(Debug)]
pub(super) enum Line {
    Dialling(Box<Dialling>),
    /// All addresses were dialled in vain.
    Pause(Instant),
    Up(TcpStream),
    Over(DownCause),
}

#[derive(Debug)]
pub(super) struct Dialling {
    channel: TcpChannel,
    /// Which of the addresses it is.
    candidate: usize,
    /// All those before have refused.
    refused: bool,
    is_connected: bool,
    until: Instant,
    /// Until both sides are proved.
    greeting: Option<Box<Greeting>>,
}

impl Outgoing {
    /// Begins a link.
    pub(super) fn new(
        (peer, index, number): (PeerId, u32, u64),
        address: Address,
        candidates: Vec<SocketAddr>,
    ) -> Self {
        let sending = Sending {
            flow: Outflow::default(),
            line: Line::Pause(Instant::now()),
            is_listed: false,
            waits_for_room: false,
            alive_at: Instant::now(),
            ack: Vec::new(),
            is_dropped: false,
        };
        Self {
            peer,
            index,
            number,
            address,
            candidates,
            is_up: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            sent_at: AtomicU64::new(0),
            sending: Mutex::new(sending),
        }
    }

    /// Returns `true` once nothing more is to be done for it.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns `true` if an operation's end is waited for.
    pub(super) fn has_bodies(&self) -> bool {
        self.sending.try_lock().is_none_or(|sending| sending.flow.has_bodies())
    }

    /// Returns `true` if time alone may change it: it is not up, or bytes are in flight.
    pub(super) fn is_moving(&self) -> bool {
        self.sending.try_lock().is_none_or(|sending| match &sending.line {
            Line::Over(_) => false,
            Line::Up(socket) => socket::in_flight(socket) > 0,
            Line::Dialling(_) | Line::Pause(_) => true,
        })
    }

    /// Does what is possible now: dials, greets, sends, takes acknowledgements.
    pub(super) fn advance(&self, shared: &Shared) {
        let mut sending = self.sending.lock();
        loop {
            let sent = sending.flow.sent();
            match &mut sending.line {
                Line::Over(_) => return,
                Line::Pause(until) if *until > Instant::now() => return,
                Line::Pause(_) => self.dial(&mut sending, shared, (0, true)),
                Line::Dialling(dialling) => match self.greet(dialling, shared, sent) {
                    Greeted::Wait => return,
                    Greeted::Alive => sending.alive_at = Instant::now(),
                    Greeted::Up(received) => self.up(&mut sending, shared, received),
                    Greeted::Next(why, refused) => {
                        let next = (dialling.candidate + 1, dialling.refused && refused);
                        let timeout = shared.options.timeout;
                        let heard = dialling.is_connected.then_some(&dialling.channel);
                        let heard = heard.map(|channel| heard_at(channel, timeout));
                        sending.alive_at = heard.unwrap_or(sending.alive_at);
                        if next.0 < self.candidates.len() {
                            self.dial(&mut sending, shared, next);
                        } else {
                            self.pause(&mut sending, shared, &why, next.1);
                        }
                    }
                    Greeted::Refused(why) => {
                        return self.end(&mut sending, shared, DownCause::Refused(why));
                    }
                },
                Line::Up(_) => {
                    self.hear(&mut sending, shared);
                    if let Line::Up(_) = sending.line {
                        self.flush(&mut sending, shared);
                        return;
                    }
                }
            }
        }
    }

    /// Takes the acknowledgements that have come. Returns `true` if there were any.
    pub(super) fn listen(&self, shared: &Shared) -> bool {
        let Some(mut sending) = self.sending.try_lock() else { return false };
        let acked = sending.flow.unacked();
        self.hear(&mut sending, shared);
        sending.flow.unacked() != acked
    }

    /// Ticks since the last call that has sent something.
    #[inline]
    pub(super) fn since_sent(&self) -> u64 {
        ticks().wrapping_sub(self.sent_at.load(Ordering::Relaxed))
    }

    /// Sends what was left for the next poll.
    pub(super) fn send_left(&self, shared: &Shared) {
        let mut sending = self.sending.lock();
        sending.is_listed = false;
        self.flush(&mut sending, shared);
    }

    /// Looks for a connection that stands still. Returns `true` if it has to be looked at again
    /// soon.
    pub(super) fn look_after(&self, shared: &Shared) -> bool {
        let mut sending = self.sending.lock();
        match &sending.line {
            Line::Over(_) => false,
            Line::Up(socket) if socket::in_flight(socket) == 0 => false,
            Line::Up(socket) => {
                if socket::stalled(socket).is_some_and(|silent| silent > STALLED) {
                    self.broke(&mut sending, shared, "its machine acknowledges nothing");
                }
                true
            }
            Line::Dialling(_) | Line::Pause(_) => {
                drop(sending);
                self.advance(shared);
                true
            }
        }
    }

    /// Ends the link for this reason.
    pub(super) fn fail(&self, shared: &Shared, cause: DownCause) {
        self.end(&mut self.sending.lock(), shared, cause);
    }

    /// Sends all that was posted, and the end of the link, before `until`; calls `meanwhile` while
    /// it waits. Returns `false` if some bytes did not reach the peer's machine.
    pub(super) fn close(
        &self,
        shared: &Shared,
        until: Instant,
        mut meanwhile: impl FnMut(),
    ) -> bool {
        let mut sending = self.sending.lock();
        sending.bye();
        loop {
            self.hear(&mut sending, shared);
            self.flush(&mut sending, shared);
            let left = match &sending.line {
                Line::Over(_) => break,
                Line::Up(socket) => sending.flow.unsent() > 0 || socket::in_flight(socket) > 0,
                Line::Dialling(_) | Line::Pause(_) => {
                    sending.flow.copied() > HEAD || sending.flow.has_bodies()
                }
            };
            if !left || Instant::now() > until {
                let is_sent = !left;
                self.end(&mut sending, shared, DownCause::Closed);
                return is_sent;
            }
            MutexGuard::unlocked(&mut sending, || {
                std::thread::sleep(Duration::from_micros(200));
                meanwhile();
                self.advance(shared);
            });
        }
        true
    }

    fn dial(&self, sending: &mut Sending, shared: &Shared, (candidate, refused): (usize, bool)) {
        let Some(to) = self.candidates.get(candidate).copied() else {
            let why = "it has no address that this machine can dial".into();
            return self.end(sending, shared, DownCause::Gone(why));
        };
        let begin = || -> Result<Dialling, Errno> {
            let socket = socket::dial(to, &shared.options.congestion)?;
            let channel = TcpChannel::over(socket, wire::limits(shared.options.timeout))
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            // Told of each change once, since a connected socket has room all the time.
            let changes = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            shared.watch(channel.as_fd(), OUTGOING | u64::from(self.index), changes)?;
            let greeting = shared.greeting(Role::Dialer)?;
            let until = Instant::now() + self.patience(sending, shared.options.timeout);
            let greeting = Some(Box::new(greeting));
            Ok(Dialling { channel, candidate, refused, is_connected: false, until, greeting })
        };
        match begin() {
            Ok(dialling) => sending.line = Line::Dialling(Box::new(dialling)),
            Err(error) if crate::net::is_shortage(error) => {
                // It says nothing about the peer.
                shared.tell_of_shortage(error);
                sending.alive_at = Instant::now();
                sending.line = Line::Pause(Instant::now() + PAUSE);
            }
            Err(error) if candidate + 1 < self.candidates.len() => {
                tracing::debug!(%to, %error, "an address cannot be dialled");
                self.dial(sending, shared, (candidate + 1, false));
            }
            Err(error) => self.pause(sending, shared, &format!("{to}: {error}"), false),
        }
    }

    /// Returns the time limit of a connect: all addresses have their turn before the peer counts as
    /// gone.
    fn patience(&self, sending: &Sending, timeout: Duration) -> Duration {
        let addresses = u32::try_from(self.candidates.len()).unwrap_or(u32::MAX).max(1);
        let left = timeout.saturating_sub(sending.alive_at.elapsed());
        (timeout / 2 / addresses).min(CONNECT).min(left).max(PAUSE)
    }

    /// Waits before all addresses are dialled again, or gives up.
    fn pause(&self, sending: &mut Sending, shared: &Shared, why: &str, refused: bool) {
        let cause = if refused {
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

    /// Goes on with the first messages of a connection. `sent`: bytes that went over earlier
    /// connections.
    fn greet(&self, dialling: &mut Dialling, shared: &Shared, sent: u64) -> Greeted {
        let Dialling { channel, candidate, is_connected, until, greeting, .. } = dialling;
        let to = self.candidates.get(*candidate).map(ToString::to_string).unwrap_or_default();
        let next = |why: String| Greeted::Next(format!("{to}: {why}"), false);
        if !*is_connected {
            match sockopt::socket_error(&*channel) {
                Ok(Ok(())) => {}
                Ok(Err(error)) | Err(error) => {
                    let refused = error == Errno::CONNREFUSED;
                    return Greeted::Next(format!("{to}: {error}"), refused);
                }
            }
            if channel.peer().is_none() {
                let is_late = Instant::now() > *until;
                return if is_late { next("it does not answer".into()) } else { Greeted::Wait };
            }
            *is_connected = true;
            return Greeted::Alive;
        }
        if let Some(proof) = greeting {
            match proof.advance(channel) {
                Ok(Progress::Waiting) => return Greeted::Wait,
                Ok(Progress::Short(error)) => {
                    shared.tell_of_shortage(error);
                    return Greeted::Wait;
                }
                Ok(Progress::Proven(session)) if session.peer.device != self.address.key.0 => {
                    // A device listens as long as it lives.
                    let why = format!("{to}: another rank's device listens there");
                    return Greeted::Next(why, true);
                }
                Ok(Progress::Proven(_)) => *greeting = None,
                Err(Failure::Unproven(Unproven::Refused(why))) => return Greeted::Refused(why),
                Err(why) => return next(why.to_string()),
            }
            let window = (shared.options.window as u64).into();
            let (link, sent) = (self.number.into(), sent.into());
            let hello = wire::Hello { link, window, sent };
            if let Err(fault) = channel.say(&hello.message()) {
                return next(words_of(fault));
            }
        }
        match channel
            .hear(wire::PROTOCOL.longest)
            .map(|message| message.as_deref().map(wire::read_welcome))
        {
            Ok(None) => Greeted::Wait,
            Ok(Some(Ok(received))) => Greeted::Up(received),
            Ok(Some(Err(why))) => Greeted::Refused(why),
            Err(fault) => next(words_of(fault)),
        }
    }

    /// The connection carries the link's bytes from now on, behind those that the peer has.
    fn up(&self, sending: &mut Sending, shared: &Shared, received: u64) {
        let Line::Dialling(dialling) =
            std::mem::replace(&mut sending.line, Line::Pause(Instant::now()))
        else {
            return;
        };
        let socket = dialling.channel.into_stream();
        if let Err(why) =
            sending.flow.resume(received, |body| shared.tell(completion(body, Ok(()))))
        {
            return self.end(sending, shared, DownCause::Protocol(why.to_string()));
        }
        sending.ack.clear();
        sending.waits_for_room = false;
        sending.alive_at = Instant::now();
        let kept = socket::keep_alive(&socket, shared.options.timeout / 2);
        let changes = EventFlags::IN | EventFlags::RDHUP;
        let watched = shared.watch_again(socket.as_fd(), OUTGOING | u64::from(self.index), changes);
        sending.line = Line::Up(socket);
        if let Err(error) = kept.and(watched) {
            return self.broke(sending, shared, &error.to_string());
        }
        if !self.is_up.swap(true, Ordering::Release) {
            shared.tell(Event::Connected { peer: self.peer });
        }
    }

    /// Replaces a connection that has broken.
    fn broke(&self, sending: &mut Sending, shared: &Shared, why: &str) {
        tracing::info!(peer = %self.peer, why, "a connection is made anew");
        if let Line::Up(socket) = &sending.line {
            sending.alive_at = heard_at(socket, shared.options.timeout);
        }
        // Behind its last byte the peer finds the end of the old one.
        self.dial(sending, shared, (0, true));
        shared.look_soon();
    }

    /// Reads acknowledgements.
    pub(super) fn hear(&self, sending: &mut Sending, shared: &Shared) {
        loop {
            let Line::Up(socket) = &mut sending.line else { return };
            let mut bytes = [0; 512];
            let received = match socket.read(&mut bytes) {
                Ok(0) => return self.broke(sending, shared, "it has hung up"),
                Ok(received) => received,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return self.broke(sending, shared, &error.to_string()),
            };
            sending.ack.extend(&bytes[..received]);
            let (whole, rest) = sending.ack.as_chunks::<8>();
            let last = whole.last().map(|bytes| u64::from_le_bytes(*bytes));
            let taken = sending.ack.len() - rest.len();
            sending.ack.drain(..taken);
            match last {
                None => {}
                Some(CLOSED) => return self.end(sending, shared, DownCause::Closed),
                Some(acked) => {
                    let over = |body| shared.tell(completion(body, Ok(())));
                    if let Err(why) = sending.flow.acknowledge(acked, over) {
                        return self.end(sending, shared, DownCause::Protocol(why.to_string()));
                    }
                    if sending.is_dropped && sending.flow.unsent() + sending.flow.unacked() == 0 {
                        return self.end(sending, shared, DownCause::Closed);
                    }
                }
            }
            if received < bytes.len() {
                return;
            }
        }
    }

    /// Sends what the socket has room for.
    pub(super) fn flush(&self, sending: &mut Sending, shared: &Shared) {
        let Line::Up(socket) = &sending.line else { return };
        if sending.flow.unsent() == 0 {
            return;
        }
        let mut outcome = Ok(());
        while sending.flow.unsent() > 0 {
            let mut gathered = Gathered::new();
            sending.flow.unsent_pieces(|piece| gathered.add(piece));
            let (sent, wanted) = (gathered.send(socket), gathered.bytes());
            match sent {
                Ok(sent) => {
                    sending.flow.was_sent(sent);
                    if sent < wanted {
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        self.sent_at.store(ticks(), Ordering::Relaxed);
        let is_full = sending.flow.unsent() > 0;
        match outcome {
            Err(error) if !crate::net::is_shortage(error) => {
                return self.broke(sending, shared, &error.to_string());
            }
            _ if is_full == sending.waits_for_room => return,
            _ => {}
        }
        let room = if is_full { EventFlags::OUT } else { EventFlags::empty() };
        let changes = EventFlags::IN | EventFlags::RDHUP | room;
        let watched = shared.watch_again(socket.as_fd(), OUTGOING | u64::from(self.index), changes);
        sending.waits_for_room = is_full && watched.is_ok();
    }

    pub(super) fn end(&self, sending: &mut Sending, shared: &Shared, cause: DownCause) {
        if matches!(sending.line, Line::Over(_)) {
            return;
        }
        self.is_over.store(true, Ordering::Release);
        self.is_up.store(false, Ordering::Release);
        let failure = match &cause {
            DownCause::Closed if shared.is_closed() => OpFailure::Closed,
            cause => OpFailure::Down(cause.clone()),
        };
        for body in sending.flow.give_up() {
            shared.tell(completion(body, Err(Box::new(failure.clone()))));
        }
        sending.line = Line::Over(cause.clone());
        if !sending.is_dropped && !shared.is_closed() {
            shared.has_died(self.peer, cause);
        }
    }
}

/// The result of a step of a greeting.
enum Greeted {
    Wait,
    /// The peer's kernel has answered.
    Alive,
    /// The peer has as many bytes of the link.
    Up(u64),
    /// The next address, for this reason; `true` if no process listens at this one.
    Next(String, bool),
    Refused(String),
}

/// Returns when the peer's kernel was last heard of, but at most half the time ago after which the
/// peer counts as gone: another connection is tried for the other half.
pub(super) fn heard_at(socket: &impl AsFd, timeout: Duration) -> Instant {
    let silent = socket::since_answer(socket).unwrap_or_default().min(timeout / 2);
    let now = Instant::now();
    now.checked_sub(silent).unwrap_or(now)
}

fn words_of(fault: Fault) -> String {
    match fault {
        Fault::Short(error) => error.to_string(),
        Fault::Gone(why) | Fault::Wrong(why) => why,
    }
}

fn completion(body: Body, outcome: Result<(), Box<OpFailure>>) -> Event {
    Event::Completion { token: body.token, buffer: body.bytes.into_buffer(), outcome }
}

impl Sending {
    pub(super) fn bye(&mut self) {
        if !self.is_dropped && !matches!(self.line, Line::Over(_)) {
            self.is_dropped = true;
            self.flow.push(&Frame::Bye.encode());
        }
    }
}
