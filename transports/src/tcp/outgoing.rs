//! The sending end of a link.
//!
//! Bytes stay until the peer has acknowledged them. A connection that breaks is made anew, and goes
//! on behind the bytes that the peer has.
//!
//! A link that *joins* a connection of its peer's link goes the other way on it.

mod dialling;
mod joining;

use super::address::Address;
use super::frame::{Frame, HEAD};
use super::incoming::CLOSED;
use super::names::{OUTGOING, name_of};
use super::outflow::{Body, Outflow};
use super::shared::Shared;
use super::socket::{self, Gathered};
use super::wire::{Hello, JOIN};
use crate::clock::ticks;
use crate::contract::{DownCause, Event, OpFailure, PeerId};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SendFlags;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dialling::{Dialling, Greeted};
use joining::Joined;

/// Time limit of a connect; then the next address is dialled.
const CONNECT: Duration = Duration::from_secs(3);

/// Pause after all addresses were dialled in vain.
const PAUSE: Duration = Duration::from_millis(100);

/// Time without an acknowledgement of the peer's kernel after which another connection is tried.
/// The kernel itself waits longer and longer before it sends again, and so outlasts a cut.
const STALLED: Duration = Duration::from_millis(500);

/// In place of the number of a link that leads here: none.
const NONE: u32 = u32::MAX;

/// The sending end.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    /// Its place in the device's list.
    pub(super) index: u32,
    /// Number that tells the peer which link a connection belongs to.
    number: u64,
    pub(super) address: Address,
    candidates: Vec<SocketAddr>,
    pub(super) is_up: AtomicBool,
    is_over: AtomicBool,
    /// Ticks of the last call that has sent something.
    sent_at: AtomicU64,
    /// Place of the link that leads here on the same connection, and takes what comes on it.
    reader: AtomicU32,
    /// Set when a connection that served both ways has broken, until a poll takes that up.
    has_parted: AtomicBool,
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
    /// Connections that were begun.
    attempts: u64,
    /// Set once the peer's link goes the other way on this link's connection: frames come on it.
    is_shared: bool,
    /// The introduction of that link, until a poll takes it up.
    joins: Option<Hello>,
}

/// The connection.
#[derive(Debug)]
pub(super) enum Line {
    Dialling(Box<Dialling>),
    /// All addresses were dialled in vain.
    Pause(Instant),
    Up(Arc<TcpStream>),
    /// The other direction of a connection of the peer's link.
    Joined(Joined),
    Over(DownCause),
}

impl Line {
    /// Returns the connection, up or not.
    fn socket(&self) -> Option<&Arc<TcpStream>> {
        match self {
            Self::Up(socket) | Self::Joined(Joined { socket, .. }) => Some(socket),
            Self::Dialling(_) | Self::Pause(_) | Self::Over(_) => None,
        }
    }

    fn is(&self, connection: &Arc<TcpStream>) -> bool {
        self.socket().is_some_and(|socket| Arc::ptr_eq(socket, connection))
    }

    /// Returns the connection if the link's bytes may be sent on it.
    #[inline]
    fn carries(&self) -> Option<&Arc<TcpStream>> {
        match self {
            Self::Up(socket) | Self::Joined(Joined { socket, is_welcome: true, .. }) => {
                Some(socket)
            }
            _ => None,
        }
    }
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
            attempts: 0,
            is_shared: false,
            joins: None,
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
            reader: AtomicU32::new(NONE),
            has_parted: AtomicBool::new(false),
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
            Line::Up(socket) | Line::Joined(Joined { socket, is_welcome: true, .. }) => {
                socket::in_flight(socket) > 0
            }
            Line::Joined(_) | Line::Dialling(_) | Line::Pause(_) => true,
        })
    }

    /// Does what is possible now: dials, greets, sends, takes acknowledgements.
    pub(super) fn advance(&self, shared: &Shared) {
        let mut sending = self.sending.lock();
        loop {
            match &mut sending.line {
                Line::Over(_) => return,
                Line::Pause(until) if *until > Instant::now() => return,
                Line::Pause(_) => self.dial(&mut sending, shared, (0, true)),
                Line::Dialling(dialling) => match self.greet(dialling, shared) {
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
                Line::Joined(_) => return self.flush(&mut sending, shared),
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
            Line::Joined(Joined { socket, is_welcome: true, .. })
                if socket::in_flight(socket) == 0 =>
            {
                false
            }
            Line::Up(socket) | Line::Joined(Joined { socket, .. }) => {
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
        if let Line::Joined(Joined { socket, is_welcome: false, .. }) = &sending.line {
            // Nobody reads the answer any more. The end alone can be said without it.
            if sending.flow.copied() == HEAD && !sending.flow.has_bodies() {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                let _ = rustix::net::send(socket, &Frame::Bye.encode(), flags);
            } else {
                self.broke(&mut sending, shared, "this device closes");
            }
        }
        loop {
            self.flush(&mut sending, shared);
            let left = match &sending.line {
                Line::Over(_) => break,
                Line::Joined(Joined { socket, is_welcome: false, .. }) => {
                    socket::in_flight(socket) > 0
                }
                Line::Up(socket) | Line::Joined(Joined { socket, .. }) => {
                    sending.flow.unsent() > 0 || socket::in_flight(socket) > 0
                }
                Line::Dialling(_) | Line::Pause(_) => {
                    sending.flow.copied() > HEAD || sending.flow.has_bodies()
                }
            };
            if !left || Instant::now() > until {
                let is_sent = !left;
                self.end(&mut sending, shared, DownCause::Closed);
                return is_sent;
            }
            self.hear(&mut sending, shared);
            self.drop_frames(&mut sending, shared);
            MutexGuard::unlocked(&mut sending, || {
                std::thread::sleep(Duration::from_micros(200));
                meanwhile();
                self.advance(shared);
            });
        }
        true
    }

    /// Introduces the link on a further connection.
    fn hello(&self, sending: &mut Sending, shared: &Shared) -> Hello {
        sending.attempts += 1;
        let (window, sent) = (shared.options.window as u64, sending.flow.sent());
        Hello {
            link: self.number.into(),
            window: window.into(),
            sent: sent.into(),
            attempt: sending.attempts.into(),
        }
    }

    /// The link goes on behind the bytes that the peer has. Returns `false` if it has ended.
    fn goes_on(&self, sending: &mut Sending, shared: &Shared, received: u64) -> bool {
        let over = |body| shared.tell(completion(body, Ok(())));
        if let Err(why) = sending.flow.resume(received, over) {
            self.end(sending, shared, DownCause::Protocol(why.to_string()));
            return false;
        }
        sending.alive_at = Instant::now();
        if !self.is_up.swap(true, Ordering::Release) {
            shared.tell(Event::Connected { peer: self.peer });
        }
        true
    }

    /// Replaces a connection that has broken.
    fn broke(&self, sending: &mut Sending, shared: &Shared, why: &str) {
        tracing::info!(peer = %self.peer, why, "a connection is made anew");
        if let Some(socket) = sending.line.socket() {
            let is_shared = sending.is_shared || matches!(sending.line, Line::Joined(_));
            self.has_parted.fetch_or(is_shared, Ordering::AcqRel);
            sending.alive_at = heard_at(socket, shared.options.timeout);
        }
        (sending.is_shared, sending.joins) = (false, None);
        // Behind its last byte the peer finds the end of the old one.
        sending.line = Line::Pause(Instant::now());
        shared.look_soon();
    }

    /// Reads acknowledgements, where nothing else comes on the connection.
    pub(super) fn hear(&self, sending: &mut Sending, shared: &Shared) {
        while !sending.is_shared {
            let Line::Up(socket) = &sending.line else { return };
            let mut bytes = [0; 512];
            let received = match (&**socket).read(&mut bytes) {
                Ok(0) => return self.broke(sending, shared, "it has hung up"),
                Ok(received) => received,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return self.broke(sending, shared, &error.to_string()),
            };
            sending.ack.extend(&bytes[..received]);
            self.take_acks(sending, shared);
            if received < bytes.len() {
                return;
            }
        }
    }

    /// Drops what comes on a connection that serves both ways: this device closes.
    fn drop_frames(&self, sending: &mut Sending, shared: &Shared) {
        let Some(socket) = sending.line.socket() else { return };
        if !sending.is_shared && !matches!(sending.line, Line::Joined(_)) {
            return;
        }
        if let Err(why) = super::inbound::drain(socket) {
            self.broke(sending, shared, &why);
        }
    }

    /// Takes the acknowledgements that were read, up to the introduction of a link that joins.
    fn take_acks(&self, sending: &mut Sending, shared: &Shared) {
        let (words, _) = sending.ack.as_chunks::<8>();
        let join = words.iter().position(|word| u64::from_le_bytes(*word) == JOIN);
        sending.joins = join.and_then(|at| Hello::joined(&words[at + 1..]));
        let acks = &words[..join.unwrap_or(words.len())];
        let (last, taken) = (acks.last().copied().map(u64::from_le_bytes), 8 * acks.len());
        sending.ack.drain(..taken);
        if sending.joins.is_some() {
            sending.is_shared = true;
            shared.is_joined(self.index);
        }
        match last {
            None => {}
            Some(CLOSED) => self.end(sending, shared, DownCause::Closed),
            Some(acked) => self.acknowledge(sending, shared, acked),
        }
    }

    fn acknowledge(&self, sending: &mut Sending, shared: &Shared, acked: u64) {
        let over = |body| shared.tell(completion(body, Ok(())));
        if let Err(why) = sending.flow.acknowledge(acked, over) {
            return self.end(sending, shared, DownCause::Protocol(why.to_string()));
        }
        if sending.is_dropped && sending.flow.unsent() + sending.flow.unacked() == 0 {
            self.end(sending, shared, DownCause::Closed);
        }
    }

    /// Sends what the socket has room for.
    pub(super) fn flush(&self, sending: &mut Sending, shared: &Shared) {
        if sending.flow.unsent() == 0 {
            return;
        }
        let Sending { flow, line, waits_for_room, .. } = &mut *sending;
        let Some(socket) = line.carries() else { return };
        let mut outcome = Ok(());
        while flow.unsent() > 0 {
            let mut gathered = Gathered::new();
            flow.unsent_pieces(|piece| gathered.add(piece));
            let (sent, wanted) = (gathered.send(socket), gathered.bytes());
            match sent {
                Ok(sent) => {
                    flow.was_sent(sent);
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
        let is_full = flow.unsent() > 0;
        match outcome {
            Err(error) if !crate::net::is_shortage(error) => {
                return self.broke(sending, shared, &error.to_string());
            }
            _ if is_full == *waits_for_room => return,
            _ => {}
        }
        let room = if is_full { EventFlags::OUT } else { EventFlags::empty() };
        let changes = EventFlags::IN | EventFlags::RDHUP | room;
        let name = match &*line {
            Line::Joined(joined) => name_of(joined.reader),
            _ => OUTGOING | u64::from(self.index),
        };
        let watched = shared.watch_again(socket.as_fd(), name, changes);
        *waits_for_room = is_full && watched.is_ok();
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

/// Returns when the peer's kernel was last heard of, but at most half the time ago after which the
/// peer counts as gone: another connection is tried for the other half, or for what the shortest
/// keepalive leaves.
pub(super) fn heard_at(socket: &impl AsFd, timeout: Duration) -> Instant {
    let longest = socket::SHORTEST.max(timeout / 2);
    let silent = socket::since_answer(socket).unwrap_or_default().min(longest);
    let now = Instant::now();
    now.checked_sub(silent).unwrap_or(now)
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
