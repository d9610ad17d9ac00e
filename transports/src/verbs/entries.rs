//! The connections of a device, found by number, by the peer's device, and by queue pair.

use super::channel::SetupChannel;
use super::connection::Connection;
use super::wire::QueuePairEnd;
use crate::contract::PeerId;
use crate::net::greeting::Greeting;
use crate::net::key::DeviceKey;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Progress of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// This side calls, and was not challenged yet.
    Calling,
    /// This side has introduced itself.
    Introduced,
    /// The other side calls, too, and its call counts, but has not come yet.
    Crossed,
    /// The other side was answered, and is not known to be ready.
    Answered,
    /// Both sides are ready.
    Up,
    /// This side has sent the last message, and waits until that has arrived.
    Leaving,
    /// The queue pair is in error, and its requests are being flushed.
    Failing,
}

impl Phase {
    /// Returns `true` if the queue pair can send.
    pub(super) fn is_joined(self) -> bool {
        matches!(self, Self::Answered | Self::Up | Self::Leaving)
    }

    /// Returns `true` if the connection is ending.
    pub(super) fn is_ending(self) -> bool {
        matches!(self, Self::Leaving | Self::Failing)
    }
}

/// A connection, with the poller's own state of it.
#[derive(Debug)]
pub(super) struct ConnectionEntry {
    pub(super) connection: Arc<Connection>,
    pub(super) phase: Phase,
    /// Channel to the peer. Its hang-up is the peer's end.
    pub(super) channel: Option<SetupChannel>,
    /// The peer's own call, which does not count. Kept open, since the peer watches it.
    pub(super) spare: Option<SetupChannel>,
    /// Other addresses to call.
    pub(super) hosts: Vec<SocketAddr>,
    /// Address that was called, and the calls repeated after a hang-up without a word.
    pub(super) called: Option<SocketAddr>,
    pub(super) calls_again: u8,
    /// Greeting of a call of this side, until both sides are proved.
    pub(super) greeting: Option<Box<Greeting>>,
    pub(super) mine: QueuePairEnd,
    pub(super) queue_pair: u32,
    /// Queue pair of the peer, once that is known.
    pub(super) peers_queue_pair: Option<u32>,
    /// Set if its queue pair is in error, and has given back the last of the shared receives that
    /// it had taken.
    pub(super) gave_last_receive: bool,
    /// Number of links that go through it.
    pub(super) links: u32,
    /// Set if its end is not reported, because this side wanted it.
    pub(super) is_quiet: bool,
    /// Messages that were taken in, and the number that the peer was told of.
    pub(super) taken: u64,
    pub(super) credited: u64,
    /// Number of messages that are credited at a time.
    pub(super) credits_due: u64,
    /// Set while it is in the list of connections that owe credits.
    pub(super) owes: bool,
}

impl ConnectionEntry {
    /// Counts a message taken in. When a quarter of the peer's window is used up, the connection
    /// joins the list of those that owe credits.
    #[inline(always)]
    pub(super) fn take_in(&mut self, owing: &mut Vec<u32>) {
        self.taken += 1;
        if self.taken - self.credited >= self.credits_due && !self.owes {
            self.owes = true;
            owing.push(self.connection.index);
        }
    }
}

/// All connections of a device.
#[derive(Debug, Default)]
pub(super) struct Entries {
    all: Vec<Option<ConnectionEntry>>,
    /// The rank is part of the key, so that a rank cannot pass another's device off as its own.
    by_device: HashMap<(PeerId, DeviceKey), u32>,
    by_queue_pair: HashMap<u32, u32>,
    /// Last lookup by queue pair: messages come in runs.
    last: (u32, u32),
}

impl Entries {
    /// Returns a free number.
    pub(super) fn vacant(&self) -> u32 {
        let free = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        u32::try_from(free).unwrap_or(u32::MAX)
    }

    /// Inserts an entry at its number.
    pub(super) fn insert(&mut self, entry: ConnectionEntry) {
        let index = entry.connection.index;
        let at = index as usize;
        if at >= self.all.len() {
            self.all.resize_with(at + 1, || None);
        }
        self.by_device.insert(entry.connection.identity(), index);
        self.by_queue_pair.insert(entry.queue_pair, index);
        self.last = (entry.queue_pair, index);
        self.all[at] = Some(entry);
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<ConnectionEntry> {
        let entry = self.all.get_mut(index as usize)?.take()?;
        let identity = entry.connection.identity();
        if self.by_device.get(&identity) == Some(&index) {
            self.by_device.remove(&identity);
        }
        self.by_queue_pair.remove(&entry.queue_pair);
        self.last = (u32::MAX, u32::MAX);
        Some(entry)
    }

    #[inline(always)]
    pub(super) fn get(&mut self, index: u32) -> Option<&mut ConnectionEntry> {
        self.all.get_mut(index as usize)?.as_mut()
    }

    /// Returns the newest connection to a rank's device.
    pub(super) fn of_device(
        &mut self,
        identity: (PeerId, DeviceKey),
    ) -> Option<&mut ConnectionEntry> {
        let index = *self.by_device.get(&identity)?;
        self.get(index)
    }

    /// Returns the connection of a queue pair.
    #[inline(always)]
    pub(super) fn of_queue_pair(&mut self, number: u32) -> Option<&mut ConnectionEntry> {
        if self.last.0 != number {
            self.last = (number, *self.by_queue_pair.get(&number)?);
        }
        self.get(self.last.1)
    }

    /// Returns the numbers of all connections.
    pub(super) fn numbers(&self) -> Vec<u32> {
        (0..).zip(&self.all).filter(|(_, entry)| entry.is_some()).map(|(index, _)| index).collect()
    }

    /// Returns the number of connections.
    pub(super) fn len(&self) -> usize {
        self.all.iter().flatten().count()
    }
}
