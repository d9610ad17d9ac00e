//! A pending connection: a sender from its call to its welcome.
//!
//! Each step can find a resource short: a descriptor, memory, room in a socket. That is not the
//! sender's fault, so a later poll repeats the step.

use super::Geometry;
use super::device::Shared;
use super::handshake::Message;
use super::segment::Segment;
use crate::contract::PeerId;
use crate::fd_channel::{Channel, Received, is_shortage};
use crate::mem::MapError;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A process that has connected, and is not admitted so far.
#[derive(Debug)]
pub(super) struct Stranger {
    pub(super) channel: Channel,
    is_watched: bool,
    /// Its hello, once received.
    hello: Option<Box<Hello>>,
}

/// Content of a hello: the sender's name, and its segment.
#[derive(Debug)]
struct Hello {
    from: PeerId,
    segment_fd: OwnedFd,
    geometry: Geometry,
}

/// A sender that is admitted.
pub(super) struct Guest {
    pub(super) from: PeerId,
    pub(super) segment: Arc<Segment>,
    /// Readable when its process is dead.
    pub(super) process: Option<OwnedFd>,
}

/// Progress of a pending connection.
pub(super) enum Greeting {
    /// Its hello has not come.
    Silent,
    /// A resource that its admission takes is short. A later poll tries again.
    Short(Errno),
    /// It is admitted.
    Welcome(Box<Guest>),
}

impl Stranger {
    pub(super) fn new(channel: Channel) -> Self {
        Self { channel, is_watched: false, hello: None }
    }

    /// Returns `true` if it waits for a resource that was short, and not for a message of its
    /// sender.
    pub(super) fn waits(&self) -> bool {
        !self.is_watched || self.hello.is_some()
    }

    /// Returns its channel, if its sender has shown that it belongs to the job.
    pub(super) fn known(self) -> Option<Channel> {
        self.hello.is_some().then_some(self.channel)
    }

    /// Receives the hello, unless that is done, and admits the sender.
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
            // Another pid namespace, or an old kernel: only the socket's hang-up tells of the end.
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

/// Result of waiting for a hello.
enum Heard {
    /// No message so far.
    Nothing,
    /// A message for which this process lacks the descriptors. It is received later.
    Short(Errno),
    /// The hello.
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
