//! The sending end of a connection.
//!
//! Bytes stay until the peer has acknowledged them. A connection that breaks is made anew, and goes
//! on behind the bytes that the peer has.
//!
//! A connection ends by its reader alone, behind the bytes that came on it. An error of a call that
//! sends, or a silent machine, shuts it down, and the reader finds its end.

mod dialling;

use super::closing::BytesLeft;
use super::frame::{Frame, HEAD};
use super::outflow::{Body, Outflow};
use super::shared::{LINK, READS, TcpShared, WatchedStream};
use super::socket::{self, GatherList};
use super::wire::Hello;
use crate::clock::ticks;
use crate::contract::{DownCause, Event, OpFailure, PeerId};
use crate::net::key::DeviceKey;
use crate::net::sockets;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dialling::{Dialling, Greeted};

/// Time limit of a connect; then the next address is dialled.
const CONNECT: Duration = Duration::from_secs(3);

/// Pause after all addresses were dialled in vain.
const PAUSE: Duration = Duration::from_millis(100);

/// Rounds of dialling, a [`PAUSE`] apart, in which a peer that has had a connection may refuse: at
/// least a second. One that closes listens no more, and dials by itself for its last messages. On a
/// busy machine that takes a while.
const CLOSING: u32 = 10;

/// Time without an acknowledgement of the peer's kernel after which another connection is tried.
/// The kernel itself waits longer and longer before it sends again, and so outlasts a cut.
const STALLED: Duration = Duration::from_millis(500);

/// The sending end.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) peer: PeerId,
    pub(super) device: DeviceKey,
    /// Place in the device's list.
    pub(super) index: u32,
    /// Number that tells the peer which of this device's ends a connection belongs to.
    pub(super) number: u64,
    pub(super) is_up: AtomicBool,
    has_ended: AtomicBool,
    /// Ticks of the last call that has sent something; 0 if something has come since.
    sent_at: AtomicU64,
    pub(super) sending: Mutex<Sending>,
}

#[derive(Debug)]
pub(super) struct Sending {
    pub(super) flow: Outflow,
    pub(super) line: Line,
    /// Targets of its dialling: the addresses that the peer has published, or the one from which
    /// it came.
    candidates: Vec<SocketAddr>,
    /// Set once a link of the user has this end.
    pub(super) is_served: bool,
    /// Set while it is in the device's list of links with unsent bytes.
    pub(super) is_listed: bool,
    /// Events of the connection that the epoll set tells of; `None`: it is not in the set.
    pub(super) watched: Option<EventFlags>,
    /// The connection is in the epoll set only while it waits for room.
    pub(super) is_apart: bool,
    /// Bytes were sent since the peer's kernel was last seen to have all.
    has_sent: bool,
    /// Time when the peer's kernel was last known to be there.
    alive_at: Instant,
    /// Set when the user has dropped the link: it ends when all is acknowledged.
    is_dropped: bool,
    /// Number of the peer's end; 0: not known, since no connection has come up.
    pub(super) other: u64,
    /// Number of the last connection that was begun here, or came up.
    pub(super) attempts: u64,
    /// Number of the last connection that came up.
    established: u64,
    /// Rounds in a row in which all of the peer's addresses have refused.
    refusals: u32,
    /// Bytes of the peer that the connections before have brought.
    received: u64,
}

/// The connection.
#[derive(Debug)]
pub(super) enum Line {
    Dialling(Box<Dialling>),
    /// No connection before then. At that time the peer is dialled.
    Pause(Instant),
    Up(Arc<WatchedStream>),
    Ended(DownCause),
}

/// A connection that has come up, for the receiving end.
pub(super) struct Risen {
    pub(super) socket: Arc<WatchedStream>,
    /// Bytes that the peer sends without an acknowledgement.
    pub(super) window: u64,
    /// The first bytes.
    pub(super) behind: Vec<u8>,
}

impl Outgoing {
    /// Begins an end that does not dial.
    pub(super) fn new((peer, device): (PeerId, DeviceKey), index: u32, number: u64) -> Self {
        let sending = Sending {
            flow: Outflow::default(),
            line: Line::Pause(Instant::now()),
            candidates: Vec::new(),
            is_served: false,
            is_listed: false,
            watched: None,
            is_apart: false,
            has_sent: false,
            alive_at: Instant::now(),
            is_dropped: false,
            other: 0,
            attempts: 0,
            established: 0,
            refusals: 0,
            received: 0,
        };
        Self {
            peer,
            device,
            index,
            number,
            is_up: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            sent_at: AtomicU64::new(0),
            sending: Mutex::new(sending),
        }
    }

    /// Gives this end to a link of the user. Returns `false` if it has one, or its connection has
    /// failed.
    pub(super) fn serve(&self, shared: &TcpShared, candidates: &[SocketAddr]) -> bool {
        let mut sending = self.sending.lock();
        if sending.is_served || matches!(sending.line, Line::Ended(_)) {
            return false;
        }
        (sending.is_served, sending.candidates) = (true, candidates.into());
        sending.alive_at = Instant::now();
        // It may have lost its connection since.
        if self.is_up.load(Ordering::Acquire) {
            shared.tell(Event::Connected { peer: self.peer });
        }
        true
    }

    /// Returns `true` once it has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Returns `true` if an operation's end is waited for.
    pub(super) fn has_bodies(&self) -> bool {
        self.sending.try_lock().is_none_or(|sending| sending.flow.has_bodies())
    }

    /// Returns `true` if time alone may change it: it is not up, or bytes are in flight.
    pub(super) fn is_moving(&self) -> bool {
        self.sending.try_lock().is_none_or(|mut sending| sending.is_moving())
    }

    /// Does what is possible now: dials, greets, sends. Returns a connection that has come up.
    pub(super) fn advance(&self, shared: &TcpShared) -> Option<Risen> {
        let mut sending = self.sending.lock();
        loop {
            let dials = sending.dials();
            match &mut sending.line {
                Line::Ended(_) => return None,
                Line::Pause(until) if *until > Instant::now() || !dials => return None,
                Line::Pause(_) => self.dial(&mut sending, shared, (0, true)),
                Line::Up(_) => {
                    self.flush(&mut sending, shared);
                    return None;
                }
                Line::Dialling(dialling) => match self.greet(dialling, shared) {
                    Greeted::Wait => return None,
                    Greeted::Alive => sending.alive_at = Instant::now(),
                    Greeted::Up(hello) => return self.up(&mut sending, shared, &hello),
                    Greeted::Next(why, refused) => {
                        let next = (dialling.candidate + 1, dialling.refused && refused);
                        let timeout = shared.options.timeout;
                        let heard = dialling.is_connected.then_some(&dialling.channel);
                        let heard = heard.map(|channel| heard_at(channel, timeout));
                        sending.alive_at = heard.unwrap_or(sending.alive_at);
                        if next.0 < sending.candidates.len() {
                            self.dial(&mut sending, shared, next);
                        } else {
                            self.pause(&mut sending, shared, &why, next.1);
                        }
                    }
                    Greeted::Refused(why) => {
                        self.end(&mut sending, shared, DownCause::Refused(why));
                        return None;
                    }
                },
            }
        }
    }

    /// Ticks since the last call that has sent something.
    #[inline]
    pub(super) fn since_sent(&self) -> u64 {
        ticks().wrapping_sub(self.sent_at.load(Ordering::Relaxed))
    }

    /// Notes that something has come: what is sent now may answer it, and does not wait for more.
    #[inline]
    pub(super) fn has_heard(&self) {
        self.sent_at.store(0, Ordering::Relaxed);
    }

    /// Sends what was left for the next poll.
    pub(super) fn send_left(&self, shared: &TcpShared) {
        let mut sending = self.sending.lock();
        sending.is_listed = false;
        self.flush(&mut sending, shared);
    }

    /// Looks for a connection that stands still. Returns `true` if it has to be looked at again
    /// soon.
    pub(super) fn look_after(&self) -> bool {
        let mut sending = self.sending.lock();
        let is_moving = sending.is_moving();
        if is_moving
            && let Line::Up(socket) = &sending.line
            && socket::stalled(&***socket).is_some_and(|silent| silent > STALLED)
        {
            self.breaks(socket, "its machine acknowledges nothing");
        }
        if !is_moving {
            sending.flow.shrink();
        }
        is_moving
    }

    /// Does not count a time against the peer in which this process did not ask.
    pub(super) fn excuse(&self, span: Duration) {
        let mut sending = self.sending.lock();
        sending.alive_at = (sending.alive_at + span).min(Instant::now());
        if let Line::Dialling(dialling) = &mut sending.line {
            dialling.until += span;
        }
    }

    /// Ends the link for this reason.
    pub(super) fn fail(&self, shared: &TcpShared, cause: DownCause) {
        self.end(&mut self.sending.lock(), shared, cause);
    }

    /// Says that no message follows. `received`: bytes of the peer that have come.
    pub(super) fn bye(&self, shared: &TcpShared, received: u64) {
        let mut sending = self.sending.lock();
        sending.received = received.max(sending.received);
        sending.bye();
        self.flush(&mut sending, shared);
    }

    /// Ends the link once the peer's machine has all that was posted; returns `true` if it has
    /// ended.
    pub(super) fn has_closed(&self, shared: &TcpShared) -> bool {
        let mut sending = self.sending.lock();
        let left = match &sending.line {
            Line::Ended(_) => return true,
            Line::Up(socket) => sending.flow.unsent() > 0 || socket::in_flight(socket) > 0,
            Line::Dialling(_) | Line::Pause(_) => {
                sending.flow.copied() > HEAD || sending.flow.has_bodies()
            }
        };
        if !left {
            self.end(&mut sending, shared, DownCause::Closed);
        }
        !left
    }

    /// Returns the bytes that the peer has not taken yet.
    pub(super) fn left(&self) -> BytesLeft {
        let sending = self.sending.lock();
        let flow = &sending.flow;
        let (connection, in_flight) = match &sending.line {
            Line::Up(socket) => {
                (sending.established, u64::try_from(socket::in_flight(socket)).unwrap_or(0))
            }
            _ => (0, flow.unacked()),
        };
        BytesLeft { connection, bytes: flow.unsent() + in_flight, acked: flow.acked() }
    }

    /// Returns `true` if a connection of the peer has to wait for the end of dialling. Of two ends
    /// that dial each other, the one with the higher name gives way.
    pub(super) fn holds(&self, shared: &TcpShared, (device, number): (DeviceKey, u64)) -> bool {
        matches!(self.sending.lock().line, Line::Dialling(_))
            && (shared.address.key, self.number) < (device, number)
    }

    /// Takes a connection that the peer has made, which calls it `hello`, unless that is older than
    /// one that came up. Returns the answer for a peer that has sent as many bytes.
    pub(super) fn answer(&self, shared: &TcpShared, hello: &Hello, received: u64) -> Option<Hello> {
        let mut sending = self.sending.lock();
        if hello.attempt.get() <= sending.established {
            return None;
        }
        sending.attempts = sending.attempts.max(hello.attempt.get());
        sending.received = received;
        Some(self.hello(&sending, shared))
    }

    /// Introduces this end on a connection.
    fn hello(&self, sending: &Sending, shared: &TcpShared) -> Hello {
        Hello {
            from: self.number.into(),
            to: sending.other.into(),
            window: (shared.options.window as u64).into(),
            attempt: sending.attempts.into(),
            received: sending.received.into(),
        }
    }

    /// Goes on with a connection that the peer has made. `home`: where its device listens.
    pub(super) fn rise(
        &self,
        shared: &TcpShared,
        socket: Arc<WatchedStream>,
        home: SocketAddr,
        hello: &Hello,
    ) {
        let mut sending = self.sending.lock();
        if !sending.is_served {
            sending.candidates = vec![home];
        }
        self.rises(&mut sending, shared, socket, hello);
    }

    /// Goes on with a connection on which the peer has said `hello`, behind the bytes that it has.
    /// Returns `false` if the link has ended.
    fn rises(
        &self,
        sending: &mut Sending,
        shared: &TcpShared,
        socket: Arc<WatchedStream>,
        hello: &Hello,
    ) -> bool {
        let ended = |body| shared.tell(completion(body, Ok(())));
        if let Err(why) = sending.flow.resume(hello.received.get(), ended) {
            self.end(sending, shared, DownCause::Protocol(why.to_string()));
            return false;
        }
        // Those that this side has dialled since are no reason to refuse the peer's next.
        sending.established = hello.attempt.get();
        sending.attempts = sending.attempts.max(sending.established);
        sending.other = hello.from.get();
        (sending.watched, sending.is_apart, sending.refusals) = (Some(READS), false, 0);
        sending.alive_at = Instant::now();
        sending.has_sent = true;
        sending.line = Line::Up(socket);
        if !self.is_up.swap(true, Ordering::Release) && sending.is_served {
            shared.tell(Event::Connected { peer: self.peer });
        }
        self.flush(sending, shared);
        true
    }

    /// Takes up that a connection has ended, after it has brought all bytes up to `received`.
    pub(super) fn lost(&self, shared: &TcpShared, on: &Arc<WatchedStream>, received: u64) {
        let mut sending = self.sending.lock();
        if sending.carries(on) {
            tracing::info!(peer = %self.peer, "a connection has ended, and is made anew");
            sending.alive_at = heard_at(&***on, shared.options.timeout);
            sending.received = received;
            sending.line = Line::Pause(Instant::now());
        }
    }

    /// Has the reader find the end of a connection.
    fn breaks(&self, socket: &TcpStream, why: &str) {
        tracing::info!(peer = %self.peer, why, "a connection breaks");
        // It fails if the connection has ended.
        let _ = socket.shutdown(Shutdown::Both);
    }

    /// Acknowledges the peer's bytes on their connection. Returns `false` if that is not this end's
    /// connection now.
    pub(super) fn note(&self, shared: &TcpShared, on: &Arc<WatchedStream>, word: Frame) -> bool {
        let mut sending = self.sending.lock();
        let carries = sending.carries(on);
        if carries {
            let (is_first, sent_at) =
                (sending.flow.unsent() == 0, self.sent_at.load(Ordering::Relaxed));
            sending.flow.push_note(word);
            self.flush(&mut sending, shared);
            if is_first {
                // No message has left with it, and the next one may be an answer.
                self.sent_at.store(sent_at, Ordering::Relaxed);
            }
        }
        carries
    }

    /// Takes up that the peer has as many bytes.
    pub(super) fn acknowledge(&self, shared: &TcpShared, acked: u64) {
        let mut sending = self.sending.lock();
        let ended = |body| shared.tell(completion(body, Ok(())));
        if let Err(why) = sending.flow.acknowledge(acked, ended) {
            return self.end(&mut sending, shared, DownCause::Protocol(why.to_string()));
        }
        if sending.is_dropped && sending.flow.unsent() + sending.flow.unacked() == 0 {
            self.end(&mut sending, shared, DownCause::Closed);
        }
    }

    /// Sends what the socket has room for.
    pub(super) fn flush(&self, sending: &mut Sending, shared: &TcpShared) {
        let Sending { flow, line, watched, has_sent, .. } = &mut *sending;
        let Line::Up(socket) = line else { return };
        if flow.unsent() == 0 {
            return;
        }
        *has_sent = true;
        let mut outcome = Ok(());
        while flow.unsent() > 0 {
            let mut gathered = GatherList::new();
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
                self.breaks(socket, &error.to_string());
            }
            _ if is_full == watched.is_some_and(|on| on.contains(EventFlags::OUT)) => {}
            _ => _ = self.watch(sending, shared, is_full),
        }
    }

    /// Has the epoll set tell of what comes on the connection, unless that is read directly, and
    /// of room if that is waited for.
    fn watch(
        &self,
        sending: &mut Sending,
        shared: &TcpShared,
        for_room: bool,
    ) -> Result<(), Errno> {
        let Line::Up(socket) = &sending.line else { return Ok(()) };
        let (socket, name) = (socket.as_fd(), LINK | u64::from(self.index));
        let wanted = match (for_room, sending.is_apart) {
            (true, _) => Some(READS | EventFlags::OUT),
            (false, false) => Some(READS),
            (false, true) => None,
        };
        match (sending.watched, wanted) {
            (None, None) => {}
            (None, Some(on)) => shared.watch(socket, name, on)?,
            (Some(_), Some(on)) => shared.rewatch(socket, name, on)?,
            (Some(_), None) => shared.unwatch(socket)?,
        }
        sending.watched = wanted;
        Ok(())
    }

    /// Takes the connection, which is read directly, out of the epoll set or puts it back.
    ///
    /// The kernel calls the set for each segment of a connection in it, in the sender's time. That
    /// is a tenth of the latency of 8 bytes (two namespaces, 16 cores of an Intel Xeon, Linux 6.18,
    /// 2026-11-27).
    ///
    /// # Errors
    /// The kernel's; the connection stays where it is.
    pub(super) fn keep_apart(&self, shared: &TcpShared, is_apart: bool) -> Result<(), Errno> {
        let mut sending = self.sending.lock();
        let before = std::mem::replace(&mut sending.is_apart, is_apart);
        let for_room = sending.watched.is_some_and(|on| on.contains(EventFlags::OUT));
        let watched = self.watch(&mut sending, shared, for_room);
        if watched.is_err() {
            sending.is_apart = before;
        }
        watched
    }

    pub(super) fn end(&self, sending: &mut Sending, shared: &TcpShared, cause: DownCause) {
        if matches!(sending.line, Line::Ended(_)) {
            return;
        }
        self.has_ended.store(true, Ordering::Release);
        self.is_up.store(false, Ordering::Release);
        let failure = match &cause {
            DownCause::Closed if shared.is_closed() => OpFailure::Closed,
            cause => OpFailure::Down(cause.clone()),
        };
        for body in sending.flow.give_up() {
            shared.tell(completion(body, Err(Box::new(failure.clone()))));
        }
        sending.line = Line::Ended(cause.clone());
        if !sending.is_dropped && !shared.is_closed() {
            shared.has_died(self.peer, cause);
        }
    }
}

/// Returns when the peer's kernel was last heard of. It is at most half of `timeout` ago: another
/// connection is tried for the other half, or for what the shortest keepalive leaves.
pub(super) fn heard_at(socket: &impl AsFd, timeout: Duration) -> Instant {
    let longest = sockets::SHORTEST.max(timeout / 2);
    let silent = socket::since_answer(socket).unwrap_or_default().min(longest);
    let now = Instant::now();
    now.checked_sub(silent).unwrap_or(now)
}

fn completion(body: Body, outcome: Result<(), Box<OpFailure>>) -> Event {
    Event::Completion { token: body.token, buffer: body.bytes.into_buffer(), outcome }
}

impl Sending {
    /// Returns `true` if it knows where to dial, or has to.
    fn dials(&self) -> bool {
        self.is_served || !self.candidates.is_empty()
    }

    fn is_moving(&mut self) -> bool {
        match &self.line {
            Line::Ended(_) => false,
            Line::Up(socket) => {
                self.has_sent = self.has_sent && socket::in_flight(socket) > 0;
                self.has_sent
            }
            Line::Dialling(_) => true,
            Line::Pause(_) => self.dials(),
        }
    }

    pub(super) fn bye(&mut self) {
        if !self.is_dropped && !matches!(self.line, Line::Ended(_)) {
            self.is_dropped = true;
            self.flow.push(&Frame::Bye.encode());
        }
    }

    fn carries(&self, connection: &Arc<WatchedStream>) -> bool {
        matches!(&self.line, Line::Up(socket) if Arc::ptr_eq(socket, connection))
    }
}
