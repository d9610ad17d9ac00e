//! A pending connection: a sender from its call to its welcome.
//!
//! Each step can find a resource short: a descriptor, memory, room in a socket. That is not the
//! sender's fault, so a later poll repeats the step.

use super::Geometry;
use super::device::ShmShared;
use super::handshake::{HandshakeMessage, MAX_MESSAGE, greeting};
use super::segment::Segment;
use crate::contract::PeerId;
use crate::mem::MapError;
use crate::net::greeting::{Failure, Greeting, Progress};
use crate::net::is_shortage;
use crate::net::packets::{Channel, Received};
use crate::net::proof::{Role, Unproven};
use crate::net::watched::Watched;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A sender that has connected, and is not admitted so far.
#[derive(Debug)]
pub(super) struct PendingSender {
    pub(super) channel: Watched<Channel>,
    is_watched: bool,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The sender has to prove itself.
    Greeting(Box<Greeting>),
    /// The sender is proved, and has to say hello.
    Proven(PeerId),
    /// The sender has said hello.
    Known(Box<SenderHello>),
}

/// Content of a hello: the sender's name, and its segment.
#[derive(Debug)]
pub(super) struct SenderHello {
    pub(super) from: PeerId,
    segment_fd: OwnedFd,
    geometry: Geometry,
    segment: Option<Arc<Segment>>,
}

/// A sender that is admitted.
pub(super) struct AdmittedSender {
    pub(super) from: PeerId,
    pub(super) channel: Watched<Channel>,
    pub(super) segment: Arc<Segment>,
    /// Descriptor that is readable when the sender's process is dead.
    pub(super) process: Option<Watched<OwnedFd>>,
}

/// Progress of a pending connection.
pub(super) enum Heard {
    /// The hello has not come.
    Silent,
    /// A resource that its admission takes is short. A later poll tries again.
    Short(Errno),
    /// The sender can be let in.
    Hello,
    /// The sender has gone before it had proved itself, or hangs up in order.
    Gone,
}

impl PendingSender {
    pub(super) fn new(shared: &ShmShared, channel: Channel) -> Result<Self, Errno> {
        let greeting = greeting(Role::Listener, &shared.identity)?;
        let channel = shared.watched(channel);
        Ok(Self { channel, is_watched: false, stage: Stage::Greeting(Box::new(greeting)) })
    }

    /// Returns `true` if it waits for a resource that was short, and not for a message of its
    /// sender.
    pub(super) fn waits(&self) -> bool {
        !self.is_watched || matches!(self.stage, Stage::Known(_))
    }

    /// Returns `true` if its sender has proved that it belongs to the job.
    pub(super) fn is_proven(&self) -> bool {
        !matches!(self.stage, Stage::Greeting(_))
    }

    /// Receives the hello, unless that is done, and admits the sender.
    pub(super) fn hear(&mut self, shared: &ShmShared, place: u32) -> Result<Heard, String> {
        if !self.is_watched {
            match shared.watch_pending(place, self.channel.as_fd()) {
                Ok(()) => self.is_watched = true,
                Err(error) if is_shortage(error) => return Ok(Heard::Short(error)),
                Err(error) => return Err(format!("epoll refused its socket: {error}")),
            }
        }
        if let Stage::Greeting(greeting) = &mut self.stage {
            let claim = match greeting.advance(&mut *self.channel) {
                Ok(Progress::Waiting) => return Ok(Heard::Silent),
                Ok(Progress::Short(error)) => return Ok(Heard::Short(error)),
                Ok(Progress::Proven(claim)) => claim,
                Err(Failure::Gone(_) | Failure::Unproven(Unproven::Bye)) => {
                    return Ok(Heard::Gone);
                }
                Err(failure) => return Err(failure.to_string()),
            };
            let (from, ranks) = (PeerId(claim.rank.get()), shared.identity.ranks);
            if from.0 >= ranks {
                return Err(format!("it calls itself {from}, in a job of {ranks} ranks"));
            }
            self.stage = Stage::Proven(from);
        }
        if let Stage::Proven(from) = self.stage {
            match hear_hello(&self.channel, from)? {
                Ok(Some(hello)) => self.stage = Stage::Known(Box::new(hello)),
                Ok(None) => return Ok(Heard::Silent),
                Err(error) => return Ok(Heard::Short(error)),
            }
        }
        let Stage::Known(hello) = &mut self.stage else { return Ok(Heard::Silent) };
        if hello.segment.is_none() {
            match Segment::open(&hello.segment_fd, hello.geometry) {
                Ok(segment) => hello.segment = Some(segment),
                Err(MapError::Lacking(error)) => return Ok(Heard::Short(error)),
                Err(MapError::Refused(why)) => return Err(why),
            }
        }
        Ok(Heard::Hello)
    }

    /// Lets in one that has said hello, under this bell. One for which something is short comes
    /// back.
    pub(super) fn enter(
        self,
        shared: &ShmShared,
        bell: u32,
    ) -> Result<AdmittedSender, (Self, NotIn)> {
        let Stage::Known(hello) = &self.stage else {
            return Err((self, NotIn::Short(Errno::AGAIN)));
        };
        let (from, Some(segment)) = (hello.from, hello.segment.clone()) else {
            return Err((self, NotIn::Short(Errno::AGAIN)));
        };
        // A pidfd is watched first: what it takes may be short.
        let watched = self.channel.peer_process().and_then(|process| {
            shared.watch_incoming(bell, process.as_fd())?;
            Ok(shared.watched(process))
        });
        let process = match watched {
            Ok(process) => Some(process),
            Err(error) if is_shortage(error) => return Err((self, NotIn::Short(error))),
            // Another pid namespace, or an old kernel: only the socket's hang-up tells of the end.
            Err(_) => None,
        };
        let welcome = HandshakeMessage::Welcome { bell, fenced: !shared.barrier.heavy };
        let fds = [shared.page_fd.as_fd(), shared.wake.as_fd()];
        let let_in = shared
            .watch_again(bell, self.channel.as_fd())
            .and_then(|()| self.channel.send(&welcome.encode(), &fds));
        match let_in {
            Ok(()) => Ok(AdmittedSender { from, channel: self.channel, segment, process }),
            Err(error) if is_shortage(error) => Err((self, NotIn::Short(error))),
            Err(error) => {
                let why = format!("the welcome could not be sent: {error}");
                Err((self, NotIn::Refused(why)))
            }
        }
    }
}

/// The reason of a refusal.
pub(super) enum NotIn {
    /// Something is short.
    Short(Errno),
    /// The sender cannot be let in.
    Refused(String),
}

fn hear_hello(
    channel: &Channel,
    from: PeerId,
) -> Result<Result<Option<SenderHello>, Errno>, String> {
    let mut bytes = [0; MAX_MESSAGE];
    let (len, fds) = match channel.receive(&mut bytes) {
        Ok(Received::Nothing) => return Ok(Ok(None)),
        Ok(Received::Closed) => return Err("it hung up before it had said hello".into()),
        Ok(Received::Message(len, fds)) => (len, fds),
        Err(error) if is_shortage(error) => return Ok(Err(error)),
        Err(error) => return Err(format!("its socket failed: {error}")),
    };
    let message = HandshakeMessage::decode(&bytes[..len])?;
    let HandshakeMessage::Hello { geometry } = message else {
        return Err(format!("it began with {message:?}"));
    };
    let [segment_fd]: [OwnedFd; 1] = fds
        .try_into()
        .map_err(|fds: Vec<_>| format!("its hello came with {} descriptors, not one", fds.len()))?;
    Ok(Ok(Some(SenderHello { from, segment_fd, geometry, segment: None })))
}
