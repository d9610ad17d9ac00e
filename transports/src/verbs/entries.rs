//! The connections of a device, found by number, by the peer's device, and by queue pair.

use super::address::DeviceKey;
use super::channel::Channel;
use super::connection::Connection;
use super::wire::End;
use crate::contract::PeerId;
use crate::net::greeting::Greeting;
use crate::net::proof::Session;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// This side calls, and both sides are not proved so far.
    Calling,
    /// It has introduced itself.
    Introduced,
    /// The other side calls, too, and that call counts: it has not come so far.
    Crossed,
    /// The other side was answered; it is not known to be ready.
    Answered,
    /// Both sides are ready.
    Up,
    /// This side has said bye, and waits until that has arrived.
    Leaving,
    /// The queue pair is in error, and what was outstanding comes back.
    Failing,
}

impl Phase {
    /// Whether the queue pair can send.
    pub(super) fn is_joined(self) -> bool {
        matches!(self, Self::Answered | Self::Up | Self::Leaving)
    }

    /// Whether it comes to an end.
    pub(super) fn is_ending(self) -> bool {
        matches!(self, Self::Leaving | Self::Failing)
    }
}

/// A connection, and what the poller alone needs of it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) connection: Arc<Connection>,
    pub(super) phase: Phase,
    /// Its hang-up is the peer's end.
    pub(super) channel: Option<Channel>,
    /// The peer's own call, which does not count: kept open, since the peer watches it.
    pub(super) spare: Option<Channel>,
    /// Where else to call.
    pub(super) hosts: Vec<SocketAddr>,
    /// Where it was called, and how often again after it had hung up without a word.
    pub(super) called: Option<SocketAddr>,
    pub(super) calls_again: u8,
    /// Of a call of this side, until both sides are proved.
    pub(super) greeting: Option<Box<Greeting>>,
    /// What came of it.
    pub(super) session: Option<Box<Session>>,
    pub(super) mine: End,
    pub(super) queue_pair: u32,
    /// The peer's, once that is known.
    pub(super) peers_queue_pair: Option<u32>,
    /// Its queue pair is in error, and has given back the last of the shared receives that it had
    /// taken.
    pub(super) gave_last_receive: bool,
    /// Links that go through it.
    pub(super) links: u32,
    /// Nobody is told of its end, as this side wanted it.
    pub(super) is_quiet: bool,
    /// Messages that were taken in, and how many of them the peer was told of.
    pub(super) taken: u64,
    pub(super) credited: u64,
    /// Of how many at a time it is told.
    pub(super) credits_due: u64,
    /// Whether it waits in the list of those that owe credits.
    pub(super) owes: bool,
}

impl Entry {
    /// Notes a message taken in. When a quarter of the peer's window has gone it is put in the list
    /// of those that owe credits.
    #[inline(always)]
    pub(super) fn take_in(&mut self, owing: &mut Vec<u32>) {
        self.taken += 1;
        if self.taken - self.credited >= self.credits_due && !self.owes {
            self.owes = true;
            owing.push(self.connection.index);
        }
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Entries {
    all: Vec<Option<Entry>>,
    /// By rank, too: a device that somebody else passes off as its own is another one.
    by_device: HashMap<(PeerId, DeviceKey), u32>,
    by_queue_pair: HashMap<u32, u32>,
    /// The last that was looked for by its queue pair: messages come in runs.
    last: (u32, u32),
}

impl Entries {
    /// A free number.
    pub(super) fn vacant(&self) -> u32 {
        let free = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        u32::try_from(free).unwrap_or(u32::MAX)
    }

    /// Puts one in, at its number.
    pub(super) fn insert(&mut self, entry: Entry) {
        let index = entry.connection.index;
        let at = index as usize;
        if at >= self.all.len() {
            self.all.resize_with(at + 1, || None);
        }
        self.by_device.insert(entry.connection.whom(), index);
        self.by_queue_pair.insert(entry.queue_pair, index);
        self.last = (entry.queue_pair, index);
        self.all[at] = Some(entry);
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Entry> {
        let entry = self.all.get_mut(index as usize)?.take()?;
        let whom = entry.connection.whom();
        if self.by_device.get(&whom) == Some(&index) {
            self.by_device.remove(&whom);
        }
        self.by_queue_pair.remove(&entry.queue_pair);
        self.last = (u32::MAX, u32::MAX);
        Some(entry)
    }

    #[inline(always)]
    pub(super) fn get(&mut self, index: u32) -> Option<&mut Entry> {
        self.all.get_mut(index as usize)?.as_mut()
    }

    /// The newest connection to a rank's device.
    pub(super) fn of_device(&mut self, whom: (PeerId, DeviceKey)) -> Option<&mut Entry> {
        let index = *self.by_device.get(&whom)?;
        self.get(index)
    }

    /// The connection of a queue pair.
    #[inline(always)]
    pub(super) fn of_queue_pair(&mut self, number: u32) -> Option<&mut Entry> {
        if self.last.0 != number {
            self.last = (number, *self.by_queue_pair.get(&number)?);
        }
        self.get(self.last.1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.iter().all(Option::is_none)
    }

    /// The numbers of all.
    pub(super) fn numbers(&self) -> Vec<u32> {
        (0..).zip(&self.all).filter(|(_, entry)| entry.is_some()).map(|(index, _)| index).collect()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.all.iter().flatten().count()
    }
}
