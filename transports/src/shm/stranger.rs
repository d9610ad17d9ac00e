//! A sender from its call to its welcome.
//!
//! Each step can find that something is short: a descriptor, memory, room in a socket. That is no
//! fault of the sender's, so the step is taken again at a later poll.

use super::Geometry;
use super::device::Shared;
use super::handshake::Message;
use super::segment::Segment;
use crate::contract::PeerId;
use crate::net::is_shortage;
use crate::net::packets::{Channel, Received};
use crate::mem::MapError;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A process that has called, and is not let in so far.
#[derive(Debug)]
pub(super) struct Stranger {
    pub(super) channel: Channel,
    is_watched: bool,
    /// What it has said.
    hello: Option<Box<Hello>>,
}

/// Who a stranger is, and the memory that it has sent along.
#[derive(Debug)]
struct Hello {
    from: PeerId,
    segment_fd: OwnedFd,
    geometry: Geometry,
}

/// A stranger that is welcome.
pub(super) struct Guest {
    pub(super) from: PeerId,
    pub(super) segment: Arc<Segment>,
    /// Readable when its process is dead.
    pub(super) process: Option<OwnedFd>,
}

/// How far a stranger has come.
pub(super) enum Greeting {
    /// It has not said who it is.
    Silent,
    /// Something is short that letting it in takes. It is tried again.
    Short(Errno),
    /// It is in.
    Welcome(Box<Guest>),
}

impl Stranger {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, is_watched: false, hello: None }
    }

    /// Returns `true` if it waits for something that was short, and not for a word from its other
    /// end.
    pub(super) fn waits(&self) -> bool {
        !self.is_watched || self.hello.is_some()
    }

    /// The way to it, if it has shown that it belongs to the job.
    pub(super) fn known(self) -> Option<Channel> {
        self.hello.is_some().then_some(self.channel)
    }

    /// Hears who it is, unless that has been heard, and lets it in.
    pub(super) fn greet(&mut self, shared: &Shared, bell: u32) -> Result<Greeting, String> {
        if !self.is_watched {
            match shared.watch_incoming(bell, self.channel.as_fd()) {
                Ok(()) => self.is_watched = true,
                Err(error) if is_shortage(error) => return Ok(Greeting::Short(error)),
                Err(error) => return Err(format!("epoll refused its socket: {error}")),
            }
        }
        if self.hello.is_none() {
            self.hello = match hear_hello(shared, &self.channel)? {
                Heard::Nothing => return Ok(Greeting::Silent),
                Heard::Short(error) => return Ok(Greeting::Short(error)),
                Heard::Hello(hello) => Some(hello),
            };
        }
        let Some(hello) = &self.hello else { return Ok(Greeting::Silent) };
        let segment = match Segment::open(&hello.segment_fd, hello.geometry) {
            Ok(segment) => segment,
            Err(MapError::Lacking(error)) => return Ok(Greeting::Short(error)),
            Err(MapError::Refused(why)) => return Err(why),
        };
        let watched = self.channel.peer_process().and_then(|process| {
            shared.watch_incoming(bell, process.as_fd())?;
            Ok(process)
        });
        let process = match watched {
            Ok(process) => Some(process),
            Err(error) if is_shortage(error) => return Ok(Greeting::Short(error)),
            // Another pid namespace, or an old kernel: the socket's hang-up must do.
            Err(_) => None,
        };
        let welcome = Message::Welcome { bell, fenced: !shared.barrier.heavy };
        match self.channel.send(&welcome.encode(), &[shared.page_fd.as_fd(), shared.wake.as_fd()]) {
            Ok(()) => Ok(Greeting::Welcome(Box::new(Guest { from: hello.from, segment, process }))),
            Err(error) if is_shortage(error) => Ok(Greeting::Short(error)),
            Err(error) => Err(format!("the welcome could not be sent: {error}")),
        }
    }
}

/// What a stranger has said.
enum Heard {
    /// Nothing so far.
    Nothing,
    /// Something that this process lacks the descriptors for. It is heard later.
    Short(Errno),
    /// Who it is.
    Hello(Box<Hello>),
}

fn hear_hello(shared: &Shared, channel: &Channel) -> Result<Heard, String> {
    let mut bytes = [0; super::handshake::MAX_MESSAGE];
    let (len, fds) = match channel.receive(&mut bytes) {
        Ok(Received::Nothing) => return Ok(Heard::Nothing),
        Ok(Received::Closed) => return Err("it hung up before it said who it is".into()),
        Ok(Received::Message(len, fds)) => (len, fds),
        Err(error) if is_shortage(error) => return Ok(Heard::Short(error)),
        Err(error) => return Err(format!("its socket failed: {error}")),
    };
    let message = Message::decode(&bytes[..len])?;
    let Message::Hello { from, secret, geometry } = message else {
        return Err(format!("it began with {message:?}"));
    };
    if secret != shared.identity.secret {
        return Err("it does not know this job's secret: it belongs to another job".into());
    }
    if from.0 >= shared.identity.ranks {
        return Err(format!("it calls itself {from}, in a job of {} ranks", shared.identity.ranks));
    }
    let [segment_fd]: [OwnedFd; 1] = fds
        .try_into()
        .map_err(|fds: Vec<_>| format!("its hello came with {} descriptors, not one", fds.len()))?;
    Ok(Heard::Hello(Box::new(Hello { from, segment_fd, geometry })))
}
