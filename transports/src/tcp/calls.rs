//! Connections that come in: each proves itself, and belongs to a link that is new or known.

use super::device::{LISTENER, Polling, TcpDevice, name_of};
use super::inbound::Inbound;
use super::incoming::Incoming;
use super::strangers::Guest;
use super::{socket, wire};
use crate::net::greeting::Carrier as _;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::os::fd::AsFd;
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
        let Guest { mut channel, peer, device, hello, home } = guest;
        let (link, window) = (hello.link.get(), hello.window.get());
        let known = polling.inbound.iter().position(|entry| {
            entry.as_ref().is_some_and(|entry| {
                let incoming = &entry.incoming;
                (incoming.peer, incoming.device, incoming.link) == (peer, device, link)
            })
        });
        let of_peer = |entry: &&Inbound| entry.incoming.peer == peer;
        let refusal = if known.is_some() {
            None
        } else if hello.sent.get() > 0 {
            // It has been read to its end, or its sender counts as gone.
            Some("the link has ended")
        } else {
            let links = polling.inbound.iter().flatten().filter(of_peer).count();
            (links >= MOST).then_some("its rank has too many links here")
        };
        if let Some(why) = refusal {
            let _ = channel.say(&wire::PROTOCOL.refusal(why));
            return;
        }
        let index = known
            .or_else(|| polling.inbound.iter().position(Option::is_none))
            .unwrap_or(polling.inbound.len());
        let longest = self.shared.packets.packet_size();
        let mut incoming = Incoming::new((peer, device, link), window, longest);
        if let Some(Some(entry)) = polling.inbound.get_mut(index) {
            // What the older connection still brings comes again on this one.
            std::mem::swap(&mut incoming, &mut entry.incoming);
        }
        let welcome = wire::welcome(incoming.received());
        let entry = Inbound { incoming, socket: None, home, lost: None };
        if index == polling.inbound.len() {
            polling.inbound.push(None);
        }
        let welcomed = channel.say(&welcome);
        let socket = channel.into_stream();
        let index_of = u32::try_from(index).unwrap_or(u32::MAX);
        let (name, flags) = (name_of(index_of), EventFlags::IN | EventFlags::RDHUP);
        let kept = socket::keep_alive(&socket, self.shared.options.timeout / 2);
        let watched = kept.and(self.shared.watch_again(socket.as_fd(), name, flags));
        polling.inbound[index] = Some(Inbound { socket: Some(socket), ..entry });
        if welcomed.is_err() || watched.is_err() {
            self.lose(polling, index_of);
        }
    }
}
