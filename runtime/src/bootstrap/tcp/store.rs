//! The store at rank 0: one thread, one event loop, one connection for each rank.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::mem::{MaybeUninit, replace};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use carrack_transports::net::greeting::{Carrier as _, Failure, Fault, Greeting, Progress};
use carrack_transports::net::pending::Pending;
use carrack_transports::net::proof::{Claim, Key, Role, Unproven};
use carrack_transports::net::sockets;
use carrack_transports::net::streams::TcpChannel;
use carrack_transports::net::watched::Watched;
use carrack_transports::stderr;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::join::{FRAMES, LIMITS, PROTOCOL, TELL_AFTER, WELCOME, WRONG_SECRET};
use crate::bootstrap::client::Wire;
use crate::bootstrap::error::{BootstrapError, Departure};
use crate::bootstrap::protocol::{Frame, MAX_FRAME};
use crate::bootstrap::server::{Outgoing, Server};

/// Pending connections at a time.
const MOST_PENDING: usize = 1024;

/// Time that a pending connection has for its proof.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time without accepting connections after the process has run out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Time for which ranks that have not come yet are told that the job cannot start: they try each
/// second.
const LINGER: Duration = Duration::from_secs(3);

/// Bytes that may wait for a rank; beyond that its requests are not read until it reads its
/// answers.
const FULL: usize = 1 << 20;

/// Bytes that may wait for a rank that reads nothing; beyond that it is lost.
const MOST: usize = 256 << 20;

const STOP: u64 = 0;
const LISTENER: u64 = 1;
const MEMBER: u64 = 1 << 32;
const CALLER: u64 = 2 << 32;

/// State of the store's thread.
pub(super) struct Store {
    listener: Option<TcpListener>,
    key: Key,
    claim: Claim,
    server: Server,
    /// Members by rank. Rank 0 is this process.
    members: Vec<Option<Member>>,
    /// Source address of each.
    came_from: Vec<Option<SocketAddr>>,
    missing: usize,
    /// Set once a rank has left in a way that forbids the job's start.
    cannot_start: bool,
    callers: Pending<Caller>,
    /// The time at which stderr is told of ranks that rank 0 waits for, until it has been.
    tells_at: Option<Instant>,
    has_zero_ended: bool,
    /// The time at which missing ranks are lost.
    deadline: Option<Instant>,
    shut_until: Option<Instant>,
    /// Time of the store's end, where rank 0 has ended and others are still told why.
    lingers_until: Option<Instant>,
    events: Arc<OwnedFd>,
    stop: OwnedFd,
}

struct Member {
    wire: Watched<Wire>,
    watched_for: epoll::EventFlags,
}

struct Caller {
    wire: Watched<Wire>,
    greeting: Greeting,
    from: SocketAddr,
}

impl Drop for Store {
    fn drop(&mut self) {
        // The port is the next job's.
        sockets::close(self.listener.take());
    }
}

impl Store {
    /// Returns a store for the job's size in the claim, with rank 0 at the other end of a socket
    /// pair.
    pub(super) fn new(
        listener: Option<TcpListener>,
        (key, claim): (Key, Claim),
        server: Server,
        zero: Wire,
        (patience, stop): (Duration, OwnedFd),
    ) -> Result<Self, BootstrapError> {
        let failed = |errno| BootstrapError::os("making an epoll for the bootstrap", errno);
        let events = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?);
        let size = server.size() as usize;
        let mut store = Self {
            listener,
            key,
            claim,
            server,
            members: (0..size).map(|_| None).collect(),
            came_from: vec![None; size],
            missing: size - 1,
            cannot_start: false,
            callers: Pending::new(MOST_PENDING, PATIENCE),
            tells_at: Instant::now().checked_add(TELL_AFTER),
            has_zero_ended: false,
            deadline: Instant::now().checked_add(patience),
            shut_until: None,
            lingers_until: None,
            events,
            stop,
        };
        store.watch(store.stop.as_fd(), STOP).map_err(failed)?;
        if let Some(listener) = &store.listener {
            store.watch(listener.as_fd(), LISTENER).map_err(failed)?;
        }
        store.watch(zero.as_fd(), MEMBER).map_err(failed)?;
        let wire = Watched::new(zero, &store.events);
        store.members[0] = Some(Member { wire, watched_for: epoll::EventFlags::IN });
        Ok(store)
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> rustix::io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.events, fd, data, epoll::EventFlags::IN)
    }

    /// Serves the ranks until all have finished or are lost, or the bootstrap is dropped.
    pub(super) fn serve(mut self) {
        while !self.is_done() {
            let now = Instant::now();
            let late = self.deadline.filter(|_| self.missing > 0);
            let callers = self.callers.deadline();
            let due = [self.tells_at, late, callers, self.shut_until, self.lingers_until];
            let due = due.into_iter().flatten().min();
            let limit = due.map(|at| at.saturating_duration_since(now));
            // A time beyond the clock's range counts as no limit.
            let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
            let mut space = [MaybeUninit::uninit(); 256];
            let waited = epoll::wait(&self.events, &mut space, limit.as_ref());
            // Else interrupted, or out of memory for a moment.
            let Ok((events, _)) = waited else { continue };
            let tokens: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
            for token in tokens {
                // Both were made from numbers of 32 bits.
                let number = u32::try_from(token & 0xffff_ffff).unwrap_or(u32::MAX);
                match token & !0xffff_ffff {
                    MEMBER => self.hear(number),
                    CALLER => self.greet(number),
                    _ if token == STOP => {
                        let _ = epoll::delete(&self.events, &self.stop);
                        self.lingers_until = Some(Instant::now() + LINGER);
                    }
                    _ => self.accept(),
                }
            }
            self.expire(Instant::now());
        }
    }

    /// Returns `true` if no rank needs the store any more. Where the job cannot start, ranks that
    /// have not come are waited for a short time only.
    fn is_done(&mut self) -> bool {
        let departures = (0..self.server.size()).map(|rank| self.server.departure(rank));
        let is_missing = |rank: usize| rank > 0 && self.came_from[rank].is_none();
        let is_awaited = self.cannot_start && (0..self.came_from.len()).any(is_missing);
        let has_left =
            |(rank, how): (usize, Option<_>)| how.is_some() || is_awaited && is_missing(rank);
        let have_left = (0..).zip(departures).all(has_left) && self.unsent() == 0;
        if have_left && self.lingers_until.is_none() {
            self.lingers_until = Instant::now().checked_add(LINGER);
        }
        self.lingers_until.is_some_and(|end| !is_awaited || end <= Instant::now())
    }

    /// Returns the number of bytes for ranks that wait for the store to hang up.
    fn unsent(&self) -> usize {
        let members = (0..).zip(&self.members);
        let waiting =
            members.filter(|(rank, _)| self.server.departure(*rank) == Some(Departure::Finished));
        waiting.filter_map(|(_, member)| member.as_ref()).map(|member| member.wire.unsent()).sum()
    }

    /// Ends what has taken too long.
    fn expire(&mut self, now: Instant) {
        let silent = self.callers.expire(now);
        if silent > 0 {
            let why = "it has not proved that it belongs to the job";
            self.callers.refused(&format!("{silent} of them"), why, now);
        }
        if self.missing > 0 && self.deadline.is_some_and(|at| at <= now) {
            self.lost(1..self.server.size(), Departure::NeverCame);
        }
        if self.server.departure(0).is_some() && !replace(&mut self.has_zero_ended, true) {
            self.tells_at = now.checked_add(TELL_AFTER);
        }
        if self.tells_at.take_if(|at| *at <= now).is_some() {
            self.tell_awaited(now);
        }
        if self.shut_until.is_some_and(|at| at <= now) {
            self.shut_until = None;
            if let Some(listener) = &self.listener {
                // The call can only fail for lack of memory; the next event tries again.
                let _ = self.watch(listener.as_fd(), LISTENER);
            }
        }
    }

    /// Tells stderr which ranks have not come yet, or have not ended where rank 0 has, if any.
    fn tell_awaited(&self, now: Instant) {
        /// More ranks are counted only.
        const NAMED: usize = 8;
        let is_awaited = |rank: &u32| {
            self.server.departure(*rank).is_none()
                && (self.has_zero_ended || self.came_from[*rank as usize].is_none())
        };
        let size = self.server.size();
        let awaited: Vec<_> = (1..size).filter(is_awaited).map(|rank| rank.to_string()).collect();
        let count = awaited.len();
        if count == 0 || self.cannot_start {
            return;
        }
        let more = if count > NAMED { ", ..." } else { "" };
        let names = format!("rank {}{more}", awaited[..count.min(NAMED)].join(", "));
        if self.has_zero_ended {
            stderr::say(format_args!(
                "rank 0 has ended, but its process stays until {count} of {size} ranks have too, \
                since they meet by its store: {names}"
            ));
        } else if let Some(deadline) = self.deadline {
            let seconds = deadline.saturating_duration_since(now).as_secs();
            stderr::say(format_args!(
                "rank 0 waits for {count} of {size} ranks, {seconds} s more: {names}"
            ));
        }
    }

    fn accept(&mut self) {
        loop {
            let Some(listener) = &self.listener else { return };
            let (stream, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => continue,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "a rank that connects has to wait; raise the limit on open files \
                        (`ulimit -n`)"
                    );
                    let _ = epoll::delete(&self.events, listener);
                    self.shut_until = Some(Instant::now() + PAUSE);
                    return;
                }
            };
            let Ok(channel) = TcpChannel::over(stream, LIMITS) else { continue };
            let wire = Watched::new(Wire::Tcp(channel), &self.events);
            let greeting = Greeting::new(Role::Listener, PROTOCOL, &self.key, self.claim);
            let Ok(greeting) = greeting else { continue };
            if let Some(oldest) = self.callers.crowded() {
                // It may have sent bytes already.
                self.greet(oldest);
            }
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
            let now = Instant::now();
            let place = self.callers.admit(Caller { wire, greeting, from }, now);
            let Some(caller) = self.callers.get(place) else { continue };
            if self.watch(caller.wire.as_fd(), CALLER | u64::from(place)).is_err() {
                self.callers.take(place);
            }
            self.greet(place);
        }
    }

    /// Handles the bytes of a pending connection.
    fn greet(&mut self, place: u32) {
        let Some(caller) = self.callers.get_mut(place) else { return };
        let outcome = match caller.greeting.advance(&mut *caller.wire) {
            Ok(Progress::Waiting | Progress::Short(_)) => return,
            Ok(Progress::Proven(claim)) => Ok(claim),
            Err(failure) => Err(failure),
        };
        let Some(caller) = self.callers.take(place) else { return };
        match outcome {
            Ok(claim) => self.admit(caller, claim),
            Err(failure) => self.turn_away(caller, failure),
        }
    }

    fn turn_away(&mut self, mut caller: Caller, failure: Failure) {
        let (name, now) = (caller.from.to_string(), Instant::now());
        match failure {
            Failure::Unproven(Unproven::Secret) => {
                self.callers.refused(&name, WRONG_SECRET, now);
                let _ = caller.wire.say(&PROTOCOL.refusal(WRONG_SECRET));
                let claim = caller.greeting.claim().unwrap_or_default();
                self.lost([claim.rank.get()], Departure::OtherSecret);
            }
            // A process that is not of the job gets no answer.
            failure => self.callers.refused(&name, &failure.to_string(), now),
        }
    }

    /// Ends the wait for those of these ranks that are missing. All ranks are told at once.
    fn lost(&mut self, ranks: impl IntoIterator<Item = u32>, how: Departure) {
        let is_missing = |rank: &u32| {
            *rank > 0
                && self.came_from.get(*rank as usize).is_some_and(Option::is_none)
                && self.server.departure(*rank).is_none()
        };
        let missing: Vec<u32> = ranks.into_iter().filter(is_missing).collect();
        self.missing = self.missing.saturating_sub(missing.len());
        self.cannot_start |= how.forbids_start() && !missing.is_empty();
        let outgoing = self.server.lost(&missing, how);
        self.deliver(outgoing);
    }

    /// Admits a process that holds the secret, unless it cannot be the rank that it claims to be.
    fn admit(&mut self, mut caller: Caller, claim: Claim) {
        let rank = claim.rank.get();
        let refused = match self.objection(&claim) {
            None => None,
            Some((why, how)) => {
                let from = caller.from;
                tracing::warn!(%from, rank, why, "a rank was not let in");
                let _ = caller.wire.say(&PROTOCOL.refusal(&why));
                Some(how)
            }
        };
        match refused {
            None => {}
            // All are there: the job goes on without the process that came too late.
            Some(Some(Departure::CameTwice)) if self.missing == 0 => return,
            Some(Some(Departure::CameTwice)) => {
                let mut outgoing = self.server.departed(rank, Departure::CameTwice);
                self.cannot_start |= self.server.departure(rank) == Some(Departure::CameTwice);
                if !outgoing.is_empty() {
                    outgoing.push((rank, Frame::Gone { rank, how: Departure::CameTwice }));
                }
                return self.deliver(outgoing);
            }
            // It may be any of the missing ranks: the node that it is on counts them otherwise. The
            // one that it says it is is named first.
            Some(Some(Departure::OtherSize)) => {
                let others = (1..self.server.size()).filter(|other| *other != rank);
                return self.lost([rank].into_iter().chain(others), Departure::OtherSize);
            }
            Some(how) => return how.into_iter().for_each(|how| self.lost([rank], how)),
        }
        if let Wire::Tcp(channel) = &mut *caller.wire {
            channel.set_limits(FRAMES);
        }
        let token = epoll::EventData::new_u64(MEMBER | u64::from(rank));
        let watched_for = epoll::EventFlags::IN;
        let welcome = PROTOCOL.message(WELCOME, &[]);
        let welcomed = caller.wire.say(&welcome).is_ok()
            && epoll::modify(&self.events, &caller.wire, token, watched_for).is_ok();
        self.came_from[rank as usize] = Some(caller.from);
        self.missing = self.missing.saturating_sub(1);
        if !welcomed {
            let outgoing = self.server.departed(rank, Departure::Disconnected);
            return self.deliver(outgoing);
        }
        self.members[rank as usize] = Some(Member { wire: caller.wire, watched_for });
        let earlier = self.server.departures().map(|gone| (rank, gone)).collect();
        self.deliver(earlier);
        self.hear(rank);
    }

    /// Returns the reason why a process cannot be the rank that it claims to be, and the effect for
    /// all ranks.
    fn objection(&self, claim: &Claim) -> Option<(String, Option<Departure>)> {
        let (rank, size, ours) = (claim.rank.get(), claim.ranks.get(), self.server.size());
        if claim.run != self.claim.run || claim.restart != self.claim.restart {
            let why = "it belongs to another run of the job: end what is left of that";
            return Some((why.into(), None));
        }
        if size != ours {
            let why = format!(
                "rank {rank} has WORLD_SIZE={size} and rank 0 has WORLD_SIZE={ours}; give all \
                ranks the same, or all nodes the same --nodes and -n"
            );
            return Some((why, Some(Departure::OtherSize)));
        }
        if rank >= ours {
            let why =
                format!("rank {rank} is not below {ours}; give each process a RANK of its own");
            return Some((why, None));
        }
        if rank == 0 {
            let why = "rank 0 is there already; give each process a RANK, or each node a --node, \
                of its own, and end what is left of earlier jobs";
            let is_this_process = claim.device == self.claim.device;
            return Some((why.into(), (!is_this_process).then_some(Departure::CameTwice)));
        }
        if let Some(other) = self.came_from.get(rank as usize).copied().flatten() {
            let why = format!(
                "rank {rank} has come before, from {}; give each process a RANK of its own, and \
                end what is left of earlier jobs",
                other.ip()
            );
            return Some((why, Some(Departure::CameTwice)));
        }
        self.server.departure(rank).map(|how| {
            let why = format!(
                "it is too late: rank 0 has given the job up, since rank {rank} {how}; start the \
                job again, or raise CARRACK_BOOTSTRAP_TIMEOUT"
            );
            (why, None)
        })
    }

    /// Handles the frames of a rank, and sends the frames that wait for it.
    fn hear(&mut self, rank: u32) {
        loop {
            let Some(Some(member)) = self.members.get_mut(rank as usize) else { return };
            let _ = member.wire.flush();
            if member.wire.unsent() > FULL {
                break;
            }
            match member.wire.hear(MAX_FRAME) {
                Ok(Some(bytes)) => {
                    let outgoing = self.server.receive(rank, &bytes);
                    self.deliver(outgoing);
                }
                Ok(None) | Err(Fault::Short(_)) => break,
                Err(fault) => {
                    self.members[rank as usize] = None;
                    let how = match fault {
                        Fault::Wrong(_) => Departure::Misbehaved,
                        _ => Departure::Disconnected,
                    };
                    let outgoing = self.server.departed(rank, how);
                    return self.deliver(outgoing);
                }
            }
        }
        self.settle(rank);
    }

    /// Sets the events to watch of a rank; hangs up on one that has finished.
    fn settle(&mut self, rank: u32) {
        let Some(Some(member)) = self.members.get_mut(rank as usize) else { return };
        let unsent = member.wire.unsent();
        let has_finished = self.server.departure(rank) == Some(Departure::Finished);
        if rank > 0 && has_finished && unsent == 0 {
            // The rank waits for the hang-up, and sends nothing behind its announcement.
            self.members[rank as usize] = None;
            return;
        }
        let mut wanted = epoll::EventFlags::empty();
        wanted.set(epoll::EventFlags::IN, unsent <= FULL);
        wanted.set(epoll::EventFlags::OUT, unsent > 0);
        if wanted != member.watched_for {
            let token = epoll::EventData::new_u64(MEMBER | u64::from(rank));
            if epoll::modify(&self.events, &member.wire, token, wanted).is_ok() {
                member.watched_for = wanted;
            }
        }
    }

    fn deliver(&mut self, outgoing: Outgoing) {
        let mut outgoing = VecDeque::from(outgoing);
        while let Some((rank, frame)) = outgoing.pop_front() {
            if let Frame::Refused { why } = &frame {
                tracing::warn!(rank, why, "a rank sent what no rank sends, and is cut off");
            }
            if let Some(Some(member)) = self.members.get_mut(rank as usize) {
                // The next read notices a rank that is gone.
                let _ = member.wire.push(&frame);
                if member.wire.unsent() > MOST {
                    self.members[rank as usize] = None;
                    outgoing.extend(self.server.departed(rank, Departure::Disconnected));
                }
                self.settle(rank);
            }
        }
    }
}

/// Returns a socket pair: rank 0's own end, and the store's.
pub(super) fn pair() -> Result<(Wire, Wire), BootstrapError> {
    use carrack_transports::net::packets::Channel;
    let failed = |errno: Errno| BootstrapError::os("making the bootstrap's own socket", errno);
    let (one, other) = Channel::pair().map_err(failed)?;
    for end in [&one, &other] {
        let room = crate::bootstrap::protocol::SOCKET_BUFFER;
        rustix::net::sockopt::set_socket_send_buffer_size(end, room).map_err(failed)?;
    }
    Ok((Wire::Packets(one, Default::default()), Wire::Packets(other, Default::default())))
}
