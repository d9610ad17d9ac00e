//! Connections that come in: each proves itself, and belongs to ends that are new or known.

use super::device::{TcpDevice, TcpPolling};
use super::incoming::{Inbound, Incoming};
use super::outgoing::{Outgoing, Risen};
use super::pending::ProvedConnection;
use super::shared::{LISTENER, TcpShared};
use super::wire;
use crate::net::greeting::Carrier as _;
use crate::net::key::DeviceKey;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Ends of one rank that lead to a device, at most: one for each of its devices, and those that it
/// has made anew.
const MOST: usize = 1024;

/// Connections that one poll accepts: a process that connects again and again does not keep it.
const AT_ONCE: u32 = 64;

impl TcpDevice {
    pub(super) fn accept(&self, polling: &mut TcpPolling) {
        for _ in 0..AT_ONCE {
            if let Some(oldest) = polling.pending.crowded() {
                // It may have something to say by now.
                self.hear_pending(polling, oldest);
            }
            let Some(listener) = &polling.listener else { return };
            let admitted = match listener.accept() {
                Ok((socket, from)) => polling.pending.begin(&self.shared, socket, from),
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) | None => return,
                    // The caller itself has gone.
                    Some(Errno::CONNABORTED | Errno::INTR) => continue,
                    Some(error) => return self.listen_later(polling, error),
                },
            };
            match admitted {
                Ok(place) => self.hear_pending(polling, place),
                Err(error) => return self.listen_later(polling, error),
            }
        }
    }

    /// Leaves callers in the kernel's queue until the next tick, since this process lacks what they
    /// take. Until then they wake no thread.
    pub(super) fn listen_later(&self, polling: &mut TcpPolling, error: Errno) {
        self.shared.shortage.note(error);
        if let Some(listener) = &polling.listener {
            let none = EventFlags::empty();
            polling.is_deaf = self.shared.rewatch(listener.as_fd(), LISTENER, none).is_ok();
            polling.is_troubled = true;
        }
        // Those that say nothing have taken some of it.
        polling.pending.hasten();
    }

    pub(super) fn hear_pending(&self, polling: &mut TcpPolling, place: u32) {
        let Some(connection) = polling.pending.hear(&self.shared, place) else { return };
        self.shared.shortage.end();
        self.admit(polling, connection);
    }

    /// Takes in a connection of a rank of the job, unless it has to wait.
    pub(super) fn admit(&self, polling: &mut TcpPolling, mut connection: ProvedConnection) {
        let link = match self.end_of(&connection) {
            Ok(link) => link,
            Err(why) => {
                let _ = connection.channel.say(&wire::PROTOCOL.refusal(why));
                return;
            }
        };
        let name = |it: &ProvedConnection| (it.device, it.hello.from.get());
        if link.holds(&self.shared, name(&connection)) {
            polling.crossed.retain(|it| name(it) != name(&connection));
            return polling.crossed.push(connection);
        }
        let known = polling.inbound.get(link.index as usize).and_then(Option::as_ref);
        let received = known.map_or(0, |entry| entry.incoming.received);
        let Some(answer) = link.answer(&self.shared, &connection.hello, received) else { return };
        let said = connection.channel.say(&answer.message(wire::WELCOME));
        if said.is_err() || connection.channel.unwritten() > 0 {
            return;
        }
        let (socket, behind) = connection.channel.into_stream();
        let socket = match self.shared.serve(socket, link.index) {
            Ok(socket) => socket,
            Err(error) => return self.shared.shortage.note(error),
        };
        let window = connection.hello.window.get();
        // What the connection before still brings comes again on this one.
        self.attach(polling, &link, Risen { socket: socket.clone(), window, behind });
        link.rise(&self.shared, socket, connection.home, &connection.hello);
    }

    /// Has the receiving end go on with a connection that has come up.
    pub(super) fn attach(&self, polling: &mut TcpPolling, link: &Arc<Outgoing>, risen: Risen) {
        let Risen { socket, window, behind } = risen;
        let (place, longest) = (link.index as usize, self.shared.packets.packet_size());
        if place >= polling.inbound.len() {
            polling.inbound.resize_with(place + 1, || None);
        }
        let known = polling.inbound[place].take().map(|entry| entry.incoming);
        let mut incoming = known.unwrap_or_else(|| Incoming::new(link.peer, window, longest));
        incoming.append(&behind);
        polling.has_backlog |= incoming.has_whole(longest);
        let (link, socket) = (link.clone(), Some(socket));
        polling.inbound[place] = Some(Inbound { incoming, link, socket });
        if !polling.crossed.is_empty() {
            // They have waited for the end of dialling.
            self.shared.look_soon();
        }
    }

    /// Returns the end to which a connection belongs. It is the one that it had before, that of a
    /// link to the device which never had a connection, or a new one.
    ///
    /// A caller names the end with which it has had a connection. No other end is it: several of a
    /// device may have answered one caller, if some of its calls were given up. Where the named end
    /// is another's by now, the caller has the end that was begun for its last call, or a new one.
    ///
    /// # Errors
    /// The reason why the connection is refused.
    fn end_of(&self, connection: &ProvedConnection) -> Result<Arc<Outgoing>, &'static str> {
        let (from, to) = (connection.hello.from.get(), connection.hello.to.get());
        let mut links = self.shared.outgoing.lock();
        let of_peer = || links.iter().flatten().filter(|it| it.peer == connection.peer);
        let other = |it: &Outgoing| it.sending.lock().other;
        let ends = || of_peer().filter(|it| it.device == connection.device);
        let called = || ends().filter(|it| to == 0 || it.number == to);
        let is_free = |it: &&Arc<Outgoing>| it.number != from && !it.has_ended() && other(it) == 0;
        let known = called().find(|it| other(it) == from).or_else(|| called().find(is_free));
        if known.is_none() && to != 0 && called().next().is_none() {
            // It has been read to its end, or its sender counts as gone.
            return Err("the link has ended");
        }
        // One with a link has messages, which may still come to the caller by an earlier answer.
        let is_begun = |it: &&Arc<Outgoing>| other(it) == from && !it.sending.lock().is_served;
        if let Some(known) = known.or_else(|| ends().find(is_begun)) {
            return if known.has_ended() { Err("the link has ended") } else { Ok(known.clone()) };
        }
        if of_peer().count() >= MOST {
            return Err("its rank has too many links here");
        }
        let number = DeviceKey::fresh().map_err(|_| "no random bytes")?;
        Ok(TcpShared::begin(&mut links, (connection.peer, connection.device), number))
    }
}
