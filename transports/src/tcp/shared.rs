//! State that links and the device share.

use super::address::TcpAddress;
use super::flusher::Flusher;
use super::outgoing::Outgoing;
use super::windows::Windows;
use super::{TcpOptions, wire};
use crate::contract::{Batch, DownCause, Event, Identity, PeerId};
use crate::fork::Owner;
use crate::mem::PacketSource;
use crate::net::greeting::Greeting;
use crate::net::interfaces::Interface;
use crate::net::key::DeviceKey;
use crate::net::proof::Role;
use crate::net::shortage::Shortage;
use crate::net::sockets;
use crate::net::watched::Watched;
use crate::sync::Sleepers;
use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

// Names of sockets in the epoll set. The low half of a name is a place.
pub(super) const LISTENER: u64 = 0;
pub(super) const BELL: u64 = 1;
pub(super) const TIMER: u64 = 2;
pub(super) const LINK: u64 = 1 << 32;
pub(super) const PENDING: u64 = 2 << 32;

/// Events of a connection that has something to read.
pub(super) const READS: EventFlags = EventFlags::IN.union(EventFlags::RDHUP);

/// The socket of a connection that is up.
pub(super) type WatchedStream = Watched<TcpStream>;

/// State that links and the device share.
#[derive(Debug)]
pub(super) struct TcpShared {
    pub(super) identity: Identity,
    pub(super) address: TcpAddress,
    pub(super) own: Vec<Interface>,
    pub(super) options: TcpOptions,
    pub(super) packets: Arc<dyn PacketSource>,
    pub(super) windows: Arc<Windows>,
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) owner: Owner,
    pub(super) sleepers: Sleepers,
    pub(super) outgoing: Mutex<Vec<Option<Arc<Outgoing>>>>,
    /// Something is there for the next poll: one of the lists below, or connections to look at.
    pub(super) news: AtomicBool,
    /// Links with unsent bytes.
    pub(super) left: Mutex<Vec<u32>>,
    pub(super) flusher: Flusher,
    /// Links on which an acknowledgement is waited for.
    pub(super) expected: Mutex<Vec<u32>>,
    pub(super) events: Mutex<VecDeque<Event>>,
    pub(super) deaths: Mutex<Vec<(PeerId, DownCause)>>,
    pub(super) looks_soon: AtomicBool,
    pub(super) shortage: Shortage,
    pub(super) closed: AtomicBool,
}

impl TcpShared {
    pub(super) fn watch(&self, fd: BorrowedFd<'_>, name: u64, on: EventFlags) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(name), on)
    }

    pub(super) fn rewatch(
        &self,
        fd: BorrowedFd<'_>,
        name: u64,
        on: EventFlags,
    ) -> Result<(), Errno> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(name), on)
    }

    pub(super) fn unwatch(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        epoll::delete(&self.epoll, fd)
    }

    /// Watches a connection that has come up, under the place of its ends.
    pub(super) fn serve(&self, socket: TcpStream, index: u32) -> Result<Arc<WatchedStream>, Errno> {
        let connection = self.connection(socket);
        sockets::keep_alive(&connection, self.options.timeout / 2)?;
        self.rewatch(connection.as_fd(), LINK | u64::from(index), READS)?;
        Ok(connection)
    }

    pub(super) fn connection(&self, socket: TcpStream) -> Arc<WatchedStream> {
        Arc::new(Watched::new(socket, &self.epoll))
    }

    /// Begins an end at a free place, whose number is a part of `key`.
    pub(super) fn begin(
        links: &mut Vec<Option<Arc<Outgoing>>>,
        of: (PeerId, DeviceKey),
        key: DeviceKey,
    ) -> Arc<Outgoing> {
        let place = links.iter().position(Option::is_none).unwrap_or_else(|| {
            links.push(None);
            links.len() - 1
        });
        let number = u64::from_le_bytes(key.0.first_chunk().copied().unwrap_or_default()).max(1);
        let index = u32::try_from(place).unwrap_or(u32::MAX);
        let begun = Arc::new(Outgoing::new(of, index, number));
        links[place] = Some(begun.clone());
        begun
    }

    /// Returns the greeting with which this device proves itself.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub(super) fn greeting(&self, role: Role) -> Result<Greeting, Errno> {
        wire::greeting(role, &self.identity, self.address.key, self.address.port)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Has the next poll yield an event.
    pub(super) fn tell(&self, event: Event) {
        self.events.lock().push_back(event);
        self.has_news();
    }

    /// Yields events. Returns `true` if some find no room.
    pub(super) fn yields(&self, batch: &mut Batch) -> bool {
        let mut events = self.events.lock();
        while !batch.is_full()
            && let Some(event) = events.pop_front()
        {
            batch.push(event);
        }
        !events.is_empty()
    }

    /// Has the next poll report a peer's end, behind what the peer sent before.
    pub(super) fn has_died(&self, peer: PeerId, cause: DownCause) {
        self.deaths.lock().push((peer, cause));
        self.has_news();
    }

    /// Leaves a link's unsent bytes to the next poll, or to a thread if none comes.
    pub(super) fn leaves(self: &Arc<Self>, link: u32) {
        self.left.lock().push(link);
        self.has_news();
        self.flusher.wake(self);
    }

    /// Sends the unsent bytes of links that have sent nothing for `ticks`. Returns `true` if any
    /// were left.
    pub(super) fn send_left(&self, ticks: u64) -> bool {
        let mut left = std::mem::take(&mut *self.left.lock());
        let was_left = !left.is_empty();
        left.retain(|index| {
            let Some(link) = self.link(*index) else { return false };
            let is_recent = link.since_sent() < ticks;
            if !is_recent {
                link.send_left(self);
            }
            is_recent
        });
        let is_kept = !left.is_empty();
        let mut list = self.left.lock();
        if list.is_empty() {
            // With its room, so that messages which are left allocate nothing.
            std::mem::swap(&mut *list, &mut left);
        } else {
            list.append(&mut left);
        }
        drop(list);
        if is_kept {
            // A poll meanwhile has found an empty list, and a thread may sleep on that.
            self.has_news();
        }
        was_left
    }

    /// Has the next polls read a link's acknowledgements directly.
    pub(super) fn expects(&self, link: u32) {
        self.expected.lock().push(link);
        self.has_news();
    }

    /// Has the next poll look at connections that are not up.
    pub(super) fn look_soon(&self) {
        self.looks_soon.store(true, Ordering::Release);
        self.has_news();
    }

    pub(super) fn has_news(&self) {
        self.news.store(true, Ordering::Release);
        self.sleepers.wake();
    }

    pub(super) fn link(&self, index: u32) -> Option<Arc<Outgoing>> {
        self.outgoing.lock().get(index as usize)?.clone()
    }
}
