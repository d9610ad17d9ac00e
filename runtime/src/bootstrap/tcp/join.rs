//! A rank's connection to the store: it calls rank 0, and both prove themselves.
//!
//! The thread that starts the runtime does this first, and waits for rank 0 at most
//! `CARRACK_BOOTSTRAP_TIMEOUT`.

#![forbid(unsafe_code)]

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

use carrack_transports::net::greeting::{Carrier as _, Failure, Fault, Greeting, Progress};
use carrack_transports::net::header::{FIRST_OWN, Protocol, REFUSAL, words};
use carrack_transports::net::proof::{Claim, Role, Unproven};
use carrack_transports::net::sockets;
use carrack_transports::net::streams::{Limits, TcpChannel};
use carrack_transports::stderr;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::key::Salt;
use super::variables::Invitation;
use crate::bootstrap::error::{ANOTHER_PORT, BootstrapError};
use crate::bootstrap::job::JobId;
use crate::bootstrap::protocol::MAX_FRAME;

/// The greeting, and the store's answer to it.
pub(super) const PROTOCOL: Protocol = Protocol { tag: *b"boot", version: 2, longest: 1200 };

/// Kind of the store's answer to an admitted rank. Frames follow.
pub(super) const WELCOME: u32 = FIRST_OWN;

/// A machine that answers nothing counts as dead after two minutes.
const SILENCE: Duration = Duration::from_secs(120);

/// Bounds of a connection that is not admitted yet.
pub(super) const LIMITS: Limits =
    Limits { longest: PROTOCOL.longest, unwritten: 8 * PROTOCOL.longest, silence: SILENCE };

/// Bounds of an admitted connection. The rank's own puts and requests are its unwritten bytes.
pub(super) const FRAMES: Limits =
    Limits { longest: MAX_FRAME, unwritten: usize::MAX, silence: SILENCE };

/// Time limit of the other side's few bytes; then the rank tries again.
const GREETING: Duration = Duration::from_secs(10);

/// Time limit of a connect; then the rank tries the next address.
const CONNECT: Duration = Duration::from_secs(5);

/// Time limit of rank 0's search for another rank 0, which is there or not.
const TWIN: Duration = Duration::from_secs(1);

/// Time after which a rank that waits for rank 0, and rank 0 that waits for others, say so on
/// stderr.
pub(super) const TELL_AFTER: Duration = Duration::from_secs(5);

/// The first and the longest pause between two tries; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// A rank that the store has admitted.
pub(super) struct Joined {
    pub(super) channel: TcpChannel,
    pub(super) address: SocketAddr,
    pub(super) salt: Salt,
}

/// Opens rank 0's listener.
pub(super) fn listen_as_zero(invitation: &Invitation) -> Result<TcpListener, BootstrapError> {
    let host = invitation.hosts.first().map(String::as_str);
    listen_at(host, invitation.port, true)
        .map_err(|source| BootstrapError::Listen { address: invitation.to_string(), source })
}

/// Opens a listener at all addresses of rank 0's machine. If `MASTER_ADDR` is a loopback address it
/// listens only there, so that no other machine can connect. `reuses`: connections of an earlier
/// job that the kernel still holds do not make this fail.
pub(super) fn listen_at(host: Option<&str>, port: u16, reuses: bool) -> io::Result<TcpListener> {
    let Some(host) = host.filter(|host| is_loopback(host)) else {
        return sockets::listen_everywhere(port, reuses);
    };
    let mut last = ErrorKind::AddrNotAvailable.into();
    for address in (host, port).to_socket_addrs()? {
        match sockets::listen(address, reuses) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Calls rank 0 until it admits this rank.
pub(super) fn join(invitation: &Invitation) -> Result<Joined, BootstrapError> {
    let deadline = Instant::now() + invitation.patience;
    Search { address: invitation.to_string(), invitation, deadline }.reach()
}

/// Opens rank 0's listener. Where the port is taken by another rank 0 of the job, that one is told.
pub(super) fn listen_alone(invitation: &Invitation) -> Result<TcpListener, BootstrapError> {
    listen_as_zero(invitation).map_err(|error| match &error {
        BootstrapError::Listen { source, .. } if source.kind() == ErrorKind::AddrInUse => {
            twin(invitation, &[0; 16], |_| true).unwrap_or(error)
        }
        _ => error,
    })
}

/// Returns the error of a second rank 0 on another machine than the first. It has a port of its
/// own, and the address of rank 0 leads to the first, which is told.
pub(super) fn twin_elsewhere(invitation: &Invitation, salt: &Salt) -> Option<BootstrapError> {
    let is_elsewhere = |address: &SocketAddr| TcpListener::bind((address.ip(), 0)).is_err();
    twin(invitation, salt, is_elsewhere)
}

/// Calls another rank 0 of the job at those of its addresses. Returns its refusal, or `None` if
/// there is none: the one with this salt is this process.
pub(super) fn twin(
    invitation: &Invitation,
    salt: &Salt,
    is_asked: impl Fn(&SocketAddr) -> bool,
) -> Option<BootstrapError> {
    let deadline = Instant::now() + TWIN.min(invitation.patience);
    let search = Search { address: invitation.to_string(), invitation, deadline };
    let host = invitation.hosts.first()?.as_str();
    let addresses = (host, invitation.port).to_socket_addrs().ok()?;
    addresses.filter(is_asked).find_map(|address| {
        let mut channel = search.dial(address).ok()?;
        let theirs = search.prove(&mut channel, claim(invitation, salt)).ok()?;
        if theirs.device == *salt {
            return None;
        }
        match search.hear(&mut channel) {
            Err(JoinFailure::Never(error)) => Some(error),
            _ => None,
        }
    })
}

/// Returns a rank's claim. Rank 0's claim carries the job's salt.
pub(super) fn claim(invitation: &Invitation, salt: &Salt) -> Claim {
    Claim {
        rank: invitation.rank.into(),
        ranks: invitation.size.into(),
        restart: invitation.restart.into(),
        device: *salt,
        ..Claim::default()
    }
}

/// Draws a salt that no job has drawn before.
pub(super) fn salt() -> Result<Salt, BootstrapError> {
    JobId::random().map(|random| *random.as_bytes())
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Rank 0, which is looked for.
struct Search<'a> {
    address: String,
    invitation: &'a Invitation,
    deadline: Instant,
}

/// The reason why one try failed.
enum JoinFailure {
    /// The next one may not.
    Again(String),
    Never(BootstrapError),
}

impl Search<'_> {
    /// Tries all addresses in turn, again and again, until rank 0 admits this rank.
    fn reach(&self) -> Result<Joined, BootstrapError> {
        let (mut pause, begun, mut is_said) = (FIRST_PAUSE, Instant::now(), false);
        loop {
            let mut why = String::from("its name has no address");
            for host in &self.invitation.hosts {
                match (host.as_str(), self.invitation.port).to_socket_addrs() {
                    Err(error) => why = format!("{host} cannot be resolved: {error}"),
                    Ok(addresses) => {
                        for address in addresses {
                            match self.attempt(address) {
                                Ok(joined) => return Ok(joined),
                                Err(JoinFailure::Never(error)) => return Err(error),
                                Err(JoinFailure::Again(reason)) => {
                                    why = format!("{address}: {reason}")
                                }
                            }
                        }
                    }
                }
            }
            tracing::debug!(rank = self.invitation.rank, address = %self.address, %why, "not \
                there yet");
            let left = self.left();
            if left.is_zero() {
                return Err(self.not_reached(why));
            }
            if begun.elapsed() > TELL_AFTER && !std::mem::replace(&mut is_said, true) {
                let (rank, at, seconds) = (self.invitation.rank, &self.address, left.as_secs());
                stderr::say(format_args!(
                    "rank {rank} waits for rank 0 at {at}, {seconds} s more: {why}"
                ));
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(LAST_PAUSE);
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Returns the end of a step that takes at most this time. The last try begins at the deadline,
    /// and has a moment for each step.
    fn within(&self, limit: Duration) -> Instant {
        Instant::now() + limit.min(self.left()).max(FIRST_PAUSE)
    }

    fn not_reached(&self, why: String) -> BootstrapError {
        let (who, address) = ("rank 0".to_owned(), self.address.clone());
        let patience = self.invitation.patience.as_millis().div_ceil(1000);
        let seconds = u64::try_from(patience).unwrap_or(u64::MAX);
        BootstrapError::NotReached { who, address, seconds, why }
    }

    fn not_admitted(&self, why: String) -> BootstrapError {
        BootstrapError::NotAdmitted { address: self.address.clone(), why }
    }

    fn attempt(&self, address: SocketAddr) -> Result<Joined, JoinFailure> {
        let mut channel = self.dial(address)?;
        let theirs = self.prove(&mut channel, claim(self.invitation, &[0; 16]))?;
        self.hear(&mut channel)?;
        channel.set_limits(FRAMES);
        Ok(Joined { channel, address, salt: theirs.device })
    }

    fn dial(&self, address: SocketAddr) -> Result<TcpChannel, JoinFailure> {
        let again = |error| JoinFailure::Again(format!("it cannot be connected to: {error}"));
        let deadline = self.within(CONNECT);
        let channel = TcpChannel::dial(address, LIMITS).map_err(again)?;
        while !channel.is_connected().map_err(again)? {
            if !wait(&channel, PollFlags::OUT, deadline) || Instant::now() >= deadline {
                return Err(JoinFailure::Again("it does not answer".into()));
            }
        }
        if channel.is_to_itself() {
            // Kept open, it would block rank 0's port.
            return Err(JoinFailure::Again("no process listens there".into()));
        }
        Ok(channel)
    }

    /// Proves this rank, and checks the proof of rank 0.
    fn prove(&self, channel: &mut TcpChannel, claim: Claim) -> Result<Claim, JoinFailure> {
        let key = self.invitation.key.key();
        let os = |errno| JoinFailure::Never(BootstrapError::os("getting random bytes", errno));
        let mut greeting = Greeting::new(Role::Dialer, PROTOCOL, &key, claim).map_err(os)?;
        let deadline = self.within(GREETING);
        loop {
            match greeting.advance(channel) {
                Ok(Progress::Proven(theirs)) => return Ok(theirs),
                Ok(Progress::Waiting | Progress::Short(_)) => await_answer(channel, deadline)?,
                Err(Failure::Gone(why)) => return Err(JoinFailure::Again(why)),
                // Bridges of containers have one address on many machines.
                Err(Failure::Unproven(why)) if self.invitation.hosts.len() > 1 => {
                    let why = format!("a process that is not of the job listens there ({why})");
                    return Err(JoinFailure::Again(why));
                }
                Err(Failure::Unproven(why)) => return Err(self.not_proven(why)),
            }
        }
    }

    /// Waits for admission.
    fn hear(&self, channel: &mut TcpChannel) -> Result<(), JoinFailure> {
        let deadline = self.within(GREETING);
        let answer = loop {
            match channel.hear(PROTOCOL.longest) {
                Ok(Some(answer)) => break answer,
                Ok(None) | Err(Fault::Short(_)) => await_answer(channel, deadline)?,
                Err(Fault::Gone(why)) => return Err(JoinFailure::Again(why)),
                Err(Fault::Wrong(why)) => return Err(self.not_proven(Unproven::Wrong(why))),
            }
        };
        match PROTOCOL.read(&answer) {
            Ok((WELCOME, _)) => Ok(()),
            Ok((REFUSAL, why)) => Err(self.not_proven(Unproven::Refused(words(why)))),
            Ok((kind, _)) => {
                Err(self.not_proven(Unproven::Wrong(format!("a message of kind {kind}"))))
            }
            Err(why) => Err(self.not_proven(Unproven::Wrong(why))),
        }
    }

    fn not_proven(&self, why: Unproven) -> JoinFailure {
        JoinFailure::Never(self.not_admitted(match why {
            Unproven::Refused(why) => why,
            Unproven::Secret => WRONG_SECRET.into(),
            Unproven::Bye => "it has ended the connection".into(),
            Unproven::Wrong(why) => format!(
                "what listens there is no rank of Carrack's, or one of another version ({why}); \
                {ANOTHER_PORT}"
            ),
        }))
    }
}

/// Sleeps until something has come.
fn await_answer(channel: &TcpChannel, deadline: Instant) -> Result<(), JoinFailure> {
    let silent = "something listens there, and does not answer: is it another program?";
    let mut events = PollFlags::IN;
    events.set(PollFlags::OUT, channel.unwritten() > 0);
    let has_come = wait(channel, events, deadline);
    if has_come { Ok(()) } else { Err(JoinFailure::Again(silent.into())) }
}

/// Sleeps until one of the events. Returns `false` if the deadline comes first.
fn wait(channel: &TcpChannel, events: PollFlags, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let limit = Timespec::try_from(left).ok();
    let mut fds = [PollFd::from_borrowed_fd(channel.as_fd(), events)];
    // It is also interrupted, or out of memory for a moment.
    !matches!(poll(&mut fds, limit.as_ref()), Ok(0))
}

/// The reason that both sides give.
pub(super) const WRONG_SECRET: &str = "its job secret is another one; set CARRACK_JOB_SECRET to \
    the same text on all ranks, or on none, and then MASTER_PORT and TORCHELASTIC_RUN_ID must be \
    the same; or it is of another job: give each its own port (`--at` of `carrack run`, \
    MASTER_PORT, or CARRACK_PORT)";
