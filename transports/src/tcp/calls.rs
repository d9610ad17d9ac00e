//! Connections that come in: each proves itself, and belongs to a link that is new or known. A link
//! of this device may go the other way on it.

use super::device::{Polling, TcpDevice};
use super::frame::Frame;
use super::inbound::Inbound;
use super::incoming::Incoming;
use super::names::{LISTENER, name_of};
use super::outgoing::Outgoing;
use super::strangers::Guest;
use super::wire::Hello;
use super::{socket, wire};
use crate::contract::{Batch, PeerId};
use crate::net::greeting::Carrier as _;
use crate::net::key::DeviceKey;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Links of one rank that lead to a device, at most: one for each of its devices, and those that
/// it has made anew.
const MOST: usize = 1024;

impl TcpDevice {
    pub(super) fn accept(&self, polling: &mut Polling) {
        loop {
            let Some(listener) = &polling.listener else { return };
            let admitted = match listener.accept() {
                Ok((socket, from)) => polling.strangers.admit(&self.shared, socket, from),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) | None => return,
                    // The caller itself has gone.
                    Some(Errno::CONNABORTED | Errno::INTR) => continue,
                    Some(error) => return self.listen_later(polling, error),
                },
            };
            match admitted {
                Ok(place) => self.hear_stranger(polling, place),
                Err(error) => return self.listen_later(polling, error),
            }
        }
    }

    /// Leaves callers in the kernel's queue until the next tick, since this process lacks what they
    /// take. Until then they wake no thread.
    fn listen_later(&self, polling: &mut Polling, error: Errno) {
        self.shared.tell_of_shortage(error);
        if let Some(listener) = &polling.listener {
            let none = EventFlags::empty();
            polling.is_deaf = self.shared.watch_again(listener.as_fd(), LISTENER, none).is_ok();
            polling.is_troubled = true;
        }
    }

    pub(super) fn hear_stranger(&self, polling: &mut Polling, place: u32) {
        let Some(guest) = polling.strangers.hear(&self.shared, place) else { return };
        self.shared.is_short.store(false, Ordering::Relaxed);
        self.admit(polling, guest);
    }

    /// Takes in a connection of a rank of the job, unless it has to wait.
    pub(super) fn admit(&self, polling: &mut Polling, guest: Guest) {
        if self.is_crossed(&guest) {
            let is_another =
                |it: &Guest| (it.device, it.hello.link) != (guest.device, guest.hello.link);
            polling.crossed.retain(is_another);
            return polling.crossed.push(guest);
        }
        let Guest { mut channel, peer, device, hello, home } = guest;
        let index = match polling.place_of((peer, device), &hello) {
            Ok(index) => index,
            Err(Some(why)) => {
                let _ = channel.say(&wire::PROTOCOL.refusal(why));
                return;
            }
            Err(None) => return,
        };
        let incoming = self.take_incoming(polling, index, (peer, device), &hello);
        let welcomed = channel.say(&wire::welcome(incoming.received()));
        // A dialer sends nothing before it is welcomed.
        let (socket, _) = channel.into_stream();
        let socket = Arc::new(socket);
        let index_of = u32::try_from(index).unwrap_or(u32::MAX);
        let (name, flags) = (name_of(index_of), EventFlags::IN | EventFlags::RDHUP);
        let kept = socket::keep_alive(&socket, self.shared.options.timeout / 2);
        let watched = kept.and(self.shared.watch_again(socket.as_fd(), name, flags));
        let entry = Inbound { incoming, socket: Some(socket), other: None, home, lost: None };
        polling.inbound[index] = Some(entry);
        if welcomed.is_err() || watched.is_err() {
            return self.lose(polling, index_of);
        }
        let links = self.shared.outgoing.lock().clone();
        for link in links.iter().flatten().filter(|link| link.address.key == device) {
            self.join(polling, link);
        }
    }

    /// Returns `true` while this device dials the one that has dialled it, which gives way.
    fn is_crossed(&self, guest: &Guest) -> bool {
        let is_dialling = |link: &Arc<Outgoing>| {
            link.address.key == guest.device && !link.is_over() && link.is_dialling()
        };
        self.shared.address.key.0 < guest.device.0
            && self.shared.outgoing.lock().iter().flatten().any(is_dialling)
    }

    /// Has a link go the other way on a connection that leads here from its peer, if there is one
    /// and the link has none.
    pub(super) fn join(&self, polling: &mut Polling, link: &Arc<Outgoing>) {
        let free = polling.inbound.iter_mut().enumerate().find_map(|(index, entry)| {
            let entry = entry.as_mut()?;
            let is_of_peer = entry.incoming.device == link.address.key && entry.other.is_none();
            if is_of_peer { Some((u32::try_from(index).ok()?, entry)) } else { None }
        });
        if let Some((index, entry)) = free
            && let Some(socket) = &entry.socket
            && link.join(&self.shared, index, socket)
        {
            entry.other = Some(link.clone());
        }
    }

    /// Lets the peer's link go the other way on a link's connection, as it has asked.
    pub(super) fn let_join(&self, polling: &mut Polling, index: u32) {
        let Some(link) = self.shared.link(index) else { return };
        let Some((hello, socket, behind)) = link.joins() else { return };
        let (peer, device, attempt) = (link.peer, link.address.key, hello.attempt.get());
        let place = polling.place_of((peer, device), &hello).ok();
        let home = socket.peer_addr().ok();
        let mut received = wire::ENDED;
        if let (Some(place), Some(home)) = (place, home) {
            let mut incoming = self.take_incoming(polling, place, (peer, device), &hello);
            received = incoming.received();
            incoming.append(&behind);
            polling.has_backlog |= incoming.has_whole(self.shared.packets.packet_size());
            let (socket, other) = (Some(socket.clone()), Some(link.clone()));
            let entry = Inbound { incoming, socket, other, home, lost: None };
            polling.inbound[place] = Some(entry);
            link.set_reader(u32::try_from(place).ok());
        }
        let link_of = hello.link.get();
        link.note(&self.shared, &socket, Frame::Welcome { link: link_of, attempt, received });
    }

    /// Takes the state of a link out of its place, or makes it. What an older connection still
    /// brings comes again on the next one.
    fn take_incoming(
        &self,
        polling: &mut Polling,
        index: usize,
        (peer, device): (PeerId, DeviceKey),
        hello: &Hello,
    ) -> Incoming {
        let known = polling.inbound.get_mut(index).and_then(Option::take).map(|mut entry| {
            entry.hang_up(&self.shared);
            entry.incoming
        });
        let new = || {
            let longest = self.shared.packets.packet_size();
            Incoming::new((peer, device, hello.link.get()), hello.window.get(), longest)
        };
        let mut incoming = known.unwrap_or_else(new);
        incoming.attempt = hello.attempt.get();
        incoming
    }

    /// Takes up that connections which served both ways have broken: what has come on them is read
    /// before they are lost.
    pub(super) fn part(&self, polling: &mut Polling, batch: &mut Batch) {
        for at in 0..polling.inbound.len() {
            let has_parted = |entry: &Inbound| {
                entry.socket.is_some() && entry.other.as_ref().is_some_and(|it| it.has_parted())
            };
            let parted = |polling: &Polling| polling.inbound[at].as_ref().is_some_and(has_parted);
            let index = u32::try_from(at).unwrap_or(u32::MAX);
            while parted(polling) {
                let came = self.receive(polling, index, batch);
                if batch.is_full() {
                    return self.shared.look_soon();
                }
                if !came {
                    self.lose(polling, index);
                }
            }
        }
    }
}

impl Polling {
    /// Returns the place of a link that leads here, or the reason why it is refused; `None` for a
    /// connection of it that is older than the one that it has.
    fn place_of(
        &mut self,
        (peer, device): (PeerId, DeviceKey),
        hello: &Hello,
    ) -> Result<usize, Option<&'static str>> {
        let known = self.inbound.iter().position(|entry| {
            entry.as_ref().is_some_and(|entry| {
                let incoming = &entry.incoming;
                (incoming.peer, incoming.device, incoming.link) == (peer, device, hello.link.get())
            })
        });
        if let Some(known) = known {
            let entry = self.inbound[known].as_ref();
            let is_older = entry.is_some_and(|it| hello.attempt.get() < it.incoming.attempt);
            return if is_older { Err(None) } else { Ok(known) };
        }
        if hello.sent.get() > 0 {
            // It has been read to its end, or its sender counts as gone.
            return Err(Some("the link has ended"));
        }
        let of_peer = |entry: &&Inbound| entry.incoming.peer == peer;
        if self.inbound.iter().flatten().filter(of_peer).count() >= MOST {
            return Err(Some("its rank has too many links here"));
        }
        let free = self.inbound.iter().position(Option::is_none);
        Ok(free.unwrap_or_else(|| {
            self.inbound.push(None);
            self.inbound.len() - 1
        }))
    }
}
