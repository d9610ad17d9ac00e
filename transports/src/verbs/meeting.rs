//! Begin and end of connections: calls, answers, calls that cross, and orderly and other ends.

use super::address::RdmaAddress;
use super::callers::ProvedCaller;
use super::channel::{SetupChannel, SetupReceived};
use super::connection::Connection;
use super::device::{CALL, RdmaPolling};
use super::entries::{ConnectionEntry, Phase};
use super::memory::CreditWords;
use super::partings::{Lingering, Parting};
use super::queue_pairs;
use super::sys::VerbsError;
use super::transfers;
use super::wire::{QueuePairEnd, SetupMessage, greeting};
use super::wr_id::MOST_CONNECTIONS;
use crate::contract::{DownCause, Event, OpFailure, PeerId, SubmitError};
use crate::net::greeting::{Failure, Progress};
use crate::net::key::DeviceKey;
use crate::net::proof::{Claim, Role, Unproven};
use crate::net::{is_shortage, shortage};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Repeated calls of a peer that hangs up before it has answered: it may have made room for others.
const CALLS_AGAIN: u8 = 20;

impl RdmaPolling {
    /// Returns a connection to a device. Calls the device if there is none.
    pub(super) fn call(
        &mut self,
        to: &RdmaAddress,
        peer: PeerId,
    ) -> Result<Arc<Connection>, SubmitError> {
        if let Some(why) = &self.broken {
            return Err(SubmitError::Down { peer, cause: DownCause::Lacking(why.clone()) });
        }
        if let Some(entry) = self.entries.of_device((peer, to.key))
            && !entry.phase.is_ending()
        {
            let connection = entry.connection.clone();
            entry.links += 1;
            if entry.phase == Phase::Up {
                self.pending.push_back(Event::Connected { peer });
            }
            return Ok(connection);
        }
        let lacking = |why: String| SubmitError::Lacking(why);
        let index = self.prepare(peer, to.key).map_err(lacking)?;
        let interface = self.shared.port.interface;
        let hosts = to.hosts.iter().rev().map(|host| host.at(to.tcp_port, interface)).collect();
        let is_own = to.key == self.key;
        let Some(entry) = self.entries.get(index) else {
            return Err(lacking("no connection".into()));
        };
        let connection = entry.connection.clone();
        (entry.links, entry.hosts) = (1, hosts);
        if is_own {
            // The queue pair is its own peer.
            let mine = entry.mine;
            match self.join(index, &mine) {
                Ok(()) => self.up(index),
                Err(why) => {
                    self.end_quietly(index);
                    return Err(lacking(why));
                }
            }
        } else if let Err(error) = self.dial(index) {
            if let Some(lack) = lack(&error) {
                self.end_quietly(index);
                return Err(lacking(shortage::describe(lack)));
            }
            // Its end is told by a poll, behind whatever it sent before it went: that may be
            // waiting here.
            self.end(index, DownCause::Gone(format!("it cannot be called: {error}")));
        }
        Ok(connection)
    }

    /// Makes a connection, whose queue pair is not joined to a peer's, and returns its number.
    pub(super) fn prepare(&mut self, peer: PeerId, device: DeviceKey) -> Result<u32, String> {
        let index = self.entries.vacant();
        if index >= MOST_CONNECTIONS {
            return Err("a device has no more connections than this".into());
        }
        self.reserve()?;
        let mut made = self.make(index, peer, device);
        if made.is_err() && self.partings.make_room() {
            made = self.make(index, peer, device);
        }
        let made = made.map_err(|error| {
            let (count, most) = (self.entries.len(), self.shared.port.most_queue_pairs);
            format!(
                "{error}; this rank's device has {count} connections, the NIC {most} queue \
                pairs for all who use it"
            )
        });
        if made.is_err() {
            self.release();
        }
        self.entries.insert(made?);
        Ok(index)
    }

    fn make(
        &self,
        index: u32,
        peer: PeerId,
        device: DeviceKey,
    ) -> Result<ConnectionEntry, VerbsError> {
        let shared = &self.shared;
        let Some(receives) = self.receives.queue() else {
            return Err(VerbsError::because(
                "ibv_create_qp",
                libc::ESHUTDOWN,
                "the device is closed",
            ));
        };
        let words = CreditWords::new(&shared.protection)?;
        let alone = shared.thread_domains.take(&shared.protection);
        let domain = alone.as_ref().unwrap_or(&shared.protection);
        let queue =
            queue_pairs::create(domain, (&shared.port, &shared.options), &self.queue, receives)?;
        let (port, number) = (&shared.port, queue.number());
        let window = u32::try_from(self.receives.depth() / 2).unwrap_or(u32::MAX).clamp(1, 128);
        let first_psn =
            u32::from_le_bytes([device.0[0], device.0[1], device.0[2], 0]) ^ (number & 0xff_ffff);
        let mine = QueuePairEnd {
            gid: port.gid,
            word_addr: words.addr(),
            word_key: words.remote_key(),
            queue_pair: number,
            first_psn,
            packet_size: u32::try_from(shared.options.packet_size).unwrap_or(u32::MAX),
            window,
            lid: port.lid,
            mtu: port.mtu,
            reads: port.reads.0,
        };
        let connection = Connection::new(
            index,
            (peer, device),
            (queue, shared.options.send_depth),
            words,
            (self.bounces.clone(), self.signs.clone()),
        );
        Ok(ConnectionEntry {
            connection: Arc::new(connection),
            phase: Phase::Calling,
            channel: None,
            spare: None,
            hosts: Vec::new(),
            called: None,
            calls_again: 0,
            greeting: None,
            mine,
            queue_pair: number,
            peers_queue_pair: None,
            gave_last_receive: false,
            links: 0,
            is_quiet: false,
            taken: 0,
            credited: 0,
            credits_due: u64::from(window / 4).max(1),
            owes: false,
        })
    }

    /// Reserves room in the completion queue for all that a connection can have outstanding.
    fn reserve(&mut self) -> Result<(), String> {
        let wanted = self.reserved + self.shared.options.send_depth + 2;
        if wanted > self.queue.depth() {
            let most = self.shared.port.most_completions;
            let more = (self.queue.depth() * 2).max(wanted).min(most);
            let too_many = || {
                format!(
                    "{} connections and their {wanted} completions are more than the {most} that \
                    the NIC's queue holds; a smaller CARRACK_VERBS_DEPTH takes less",
                    self.entries.len() + 1
                )
            };
            if more < wanted {
                return Err(too_many());
            }
            self.queue.resize(more).map_err(|error| format!("{}: {error}", too_many()))?;
        }
        self.reserved = wanted;
        Ok(())
    }

    fn release(&mut self) {
        self.reserved = self.reserved.saturating_sub(self.shared.options.send_depth + 2);
    }

    /// Calls the next host of a peer.
    fn dial(&mut self, index: u32) -> io::Result<()> {
        let mut last =
            io::Error::new(io::ErrorKind::AddrNotAvailable, "it has published no address");
        while let Some(host) = self.next_host(index) {
            let dialled = SetupChannel::dial(host).and_then(|channel| {
                // It advances in `hear` alone, which heeds what comes of it: the epoll set reports
                // a descriptor that is ready when it is added.
                let greeting = greeting(Role::Dialer, &self.shared.identity, self.key)?;
                self.watch(channel.as_fd(), CALL | u64::from(index))?;
                Ok((channel, greeting))
            });
            match (dialled, self.entries.get(index)) {
                (Ok((channel, greeting)), Some(entry)) => {
                    (entry.channel, entry.phase) = (Some(channel), Phase::Calling);
                    entry.greeting = Some(Box::new(greeting));
                    entry.called = Some(host);
                    return Ok(());
                }
                // No other host would do.
                (Err(error), entry) if lack(&error).is_some() => {
                    entry.into_iter().for_each(|entry| entry.hosts.push(host));
                    return Err(error);
                }
                (Err(error), _) => last = io::Error::new(error.kind(), format!("{host}: {error}")),
                (Ok(_), None) => break,
            }
        }
        Err(last)
    }

    fn next_host(&mut self, index: u32) -> Option<SocketAddr> {
        self.entries.get(index)?.hosts.pop()
    }

    /// Brings the queue pair into the state in which it receives and sends.
    fn join(&mut self, index: u32, theirs: &QueuePairEnd) -> Result<(), String> {
        let Some(entry) = self.entries.get(index) else { return Err("it is gone".into()) };
        let Some(queue) = entry.connection.queue() else { return Err("it is closed".into()) };
        let shared = &self.shared;
        queue_pairs::join(&queue, (&shared.port, &shared.options), &entry.mine, theirs)
            .map_err(|error| error.to_string())?;
        entry.connection.open(theirs);
        entry.peers_queue_pair = Some(theirs.queue_pair);
        entry.phase = Phase::Answered;
        Ok(())
    }

    /// Takes a connection into use, since both sides are ready.
    fn up(&mut self, index: u32) {
        let Some(entry) = self.entries.get(index) else { return };
        entry.phase = Phase::Up;
        entry.spare = None;
        entry.connection.set_up();
        self.shared.shortage.end();
        let peer = entry.connection.peer;
        // Once for each link: each has been waited with.
        for _ in 0..entry.links {
            self.pending.push_back(Event::Connected { peer });
        }
    }

    /// Answers a call with a queue pair of this side.
    pub(super) fn answer(&mut self, index: u32, caller: ProvedCaller) {
        let ProvedCaller { mut channel, end, .. } = caller;
        if let Err(why) = self.join(index, &end) {
            self.refuse(channel, why.clone());
            return self.end(index, DownCause::Lacking(why));
        }
        let Some(entry) = self.entries.get(index) else { return };
        let said = channel.send(&SetupMessage::Welcome(entry.mine));
        entry.greeting = None;
        let changes = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let name = EventData::new_u64(CALL | u64::from(index));
        let watched = epoll::modify(self.epoll.as_fd(), channel.as_fd(), name, changes);
        entry.channel = Some(channel);
        if let Err(error) = said.and(watched.map_err(Into::into)) {
            self.end(index, DownCause::Gone(format!("it cannot be answered: {error}")));
        }
    }

    /// Handles the messages of a peer's channel.
    pub(super) fn hear(&mut self, index: u32) {
        loop {
            let Some(entry) = self.entries.get(index) else { return };
            let Some(channel) = &mut entry.channel else { return };
            if let Some(greeting) = &mut entry.greeting {
                match greeting.advance(channel) {
                    Ok(Progress::Waiting | Progress::Short(_)) => return,
                    Ok(Progress::Proven(claim)) => match self.introduce(index, claim) {
                        Ok(()) => continue,
                        Err(cause) => return self.end(index, cause),
                    },
                    Err(Failure::Gone(why)) => return self.hung_up(index, why),
                    Err(Failure::Unproven(why)) => return self.end(index, not_proven(why)),
                }
            }
            match channel.receive() {
                SetupReceived::Nothing => return,
                SetupReceived::Message(message) => {
                    if let Err(cause) = self.heed(index, message) {
                        return self.end(index, cause);
                    }
                }
                SetupReceived::Closed(why) => return self.hung_up(index, why),
                SetupReceived::Wrong(why) => return self.end(index, DownCause::Protocol(why)),
            }
        }
    }

    /// Introduces this end to a device that this side has called, when the greeting has ended.
    fn introduce(&mut self, index: u32, claim: Claim) -> Result<(), DownCause> {
        let Some(entry) = self.entries.get(index) else { return Ok(()) };
        let (peer, device) = entry.connection.identity();
        if claim.rank.get() != peer.0 || claim.device != device.0 {
            let why = "it is another rank, or another device, than its address says";
            return Err(DownCause::Protocol(why.into()));
        }
        let hello = SetupMessage::Hello(entry.mine);
        entry.greeting = None;
        entry.phase = Phase::Introduced;
        // Where it has hung up meanwhile, that is heard next.
        let _ = self.say(index, &hello);
        Ok(())
    }

    fn heed(&mut self, index: u32, message: SetupMessage) -> Result<(), DownCause> {
        let Some(entry) = self.entries.get(index) else { return Ok(()) };
        match (entry.phase, message) {
            (Phase::Leaving | Phase::Failing, _) => Ok(()),
            (Phase::Introduced, SetupMessage::Welcome(end)) => {
                end.check(self.shared.options.packet_size).map_err(DownCause::Refused)?;
                self.join(index, &end).map_err(DownCause::Lacking)?;
                self.say(index, &SetupMessage::Ready)?;
                self.up(index);
                Ok(())
            }
            (Phase::Introduced, SetupMessage::Crossed) => {
                entry.phase = Phase::Crossed;
                Ok(())
            }
            (Phase::Answered, SetupMessage::Ready) => {
                self.up(index);
                Ok(())
            }
            (Phase::Answered | Phase::Up, SetupMessage::Refusal(why)) => {
                Err(self.broken_off(format!("it has given the connection up, and says: {why}")))
            }
            (_, SetupMessage::Refusal(why)) => Err(DownCause::Refused(why)),
            (_, SetupMessage::Bye) => Err(DownCause::Closed),
            (_, other) => Err(DownCause::Protocol(format!("it sent {other:?} out of turn"))),
        }
    }

    fn say(&mut self, index: u32, message: &SetupMessage) -> Result<(), DownCause> {
        let channel = self.entries.get(index).and_then(|entry| entry.channel.as_mut());
        let said = channel.map_or(Ok(()), |channel| channel.send(message));
        said.map_err(|error| DownCause::Gone(format!("its connection failed: {error}")))
    }

    /// Takes up that the peer's TCP connection has ended, or never came about. Calls the peer
    /// again, or ends the connection.
    fn hung_up(&mut self, index: u32, why: String) {
        let Some(entry) = self.entries.get(index) else { return };
        entry.channel = None;
        let is_there = entry.greeting.take().is_some_and(|greeting| greeting.has_heard());
        let is_there = is_there || entry.phase == Phase::Introduced;
        if is_there && entry.calls_again < CALLS_AGAIN {
            // It is there, and has not said no. One that has gone refuses to be called.
            entry.calls_again += 1;
            entry.hosts.extend(entry.called);
            entry.phase = Phase::Calling;
        }
        if entry.phase == Phase::Calling {
            // The address has not answered: the peer may answer at another of its addresses.
            if self.dial_or_wait(index, &why) {
                tracing::warn!(
                    why,
                    "a rank is called again when this process has a descriptor for it: see `ulimit \
                    -n`"
                );
            }
            return;
        }
        let cause = self.broken_off(format!("its connection ended: {why}"));
        self.end(index, cause);
    }

    /// Calls the next host of a peer. Returns `true` if that is done later, since this process
    /// lacks what it takes now.
    fn dial_or_wait(&mut self, index: u32, why: &str) -> bool {
        let Err(error) = self.dial(index) else { return false };
        let waits = self.lacks(&error);
        if waits {
            self.undialled.push((index, why.to_owned()));
        } else {
            self.end(
                index,
                DownCause::Gone(format!("no process answers at its addresses: {why}; {error}")),
            );
        }
        waits
    }

    /// Returns `true` if a call failed because this process lacks a resource, which is noted.
    pub(super) fn lacks(&self, error: &io::Error) -> bool {
        lack(error).inspect(|lack| self.shared.shortage.note(*lack)).is_some()
    }

    /// Repeats the calls for which this process lacked something.
    #[cold]
    pub(super) fn dial_again(&mut self) {
        for (index, why) in std::mem::take(&mut self.undialled) {
            // Another connection may have its number by now, which is not to be called twice.
            let waits =
                |entry: &ConnectionEntry| entry.phase == Phase::Calling && entry.channel.is_none();
            if self.entries.get(index).is_some_and(|entry| waits(entry)) {
                self.dial_or_wait(index, &why);
            }
        }
    }

    /// Returns the cause of an end that has come over TCP, and names trouble of this rank's NIC.
    /// The peer may have been quicker than that NIC to find out that nothing gets through.
    fn broken_off(&self, why: String) -> DownCause {
        match self.shared.own_trouble() {
            None => DownCause::Gone(why),
            Some(trouble) => DownCause::Gone(format!("{why}; {trouble}")),
        }
    }

    /// Ends a connection, by whatever cause. What is on its way comes first.
    pub(super) fn end(&mut self, index: u32, cause: DownCause) {
        let Some(entry) = self.entries.get(index) else { return };
        if entry.phase == Phase::Failing {
            return;
        }
        entry.connection.set_down(cause);
        let was_joined = entry.phase.is_joined();
        entry.phase = Phase::Failing;
        match (entry.connection.fail(was_joined), was_joined) {
            // A last request tells when everything has ended.
            (true, _) => {}
            // Nothing will. What has arrived is still taken in.
            (false, true) => self.partings.forsake(index),
            (false, false) => self.finish(index),
        }
    }

    /// Ends all connections to a rank.
    pub(super) fn end_all_of(&mut self, peer: PeerId, cause: &DownCause) {
        for index in self.entries.numbers() {
            if self.entries.get(index).is_some_and(|entry| entry.connection.peer == peer) {
                self.end(index, cause.clone());
            }
        }
    }

    /// Finishes the connections that were forsaken. The completion queue was found empty, so
    /// nothing more comes of them.
    #[cold]
    pub(super) fn part(&mut self) {
        while let Some(index) = self.partings.next() {
            self.finish(index);
        }
    }

    /// Finishes a connection whose requests have come back, and all that had arrived before.
    pub(super) fn drained(&mut self, index: u32) {
        if let Some(entry) = self.entries.get(index)
            && let Some(queue) = entry.connection.queue()
        {
            self.partings.add(Parting::Lingering(Lingering::new(queue, entry.gave_last_receive)));
        }
        self.finish(index);
    }

    /// Ends a connection without an event.
    fn end_quietly(&mut self, index: u32) {
        if let Some(entry) = self.entries.get(index) {
            entry.is_quiet = true;
        }
        self.end(index, DownCause::Closed);
    }

    /// Ends a connection that this side does not want any more. What was sent still arrives.
    pub(super) fn leave(&mut self, index: u32) {
        let Some(entry) = self.entries.get(index) else { return };
        entry.is_quiet = true;
        match entry.phase {
            Phase::Leaving | Phase::Failing => {}
            Phase::Up | Phase::Answered if entry.connection.say_bye() => {
                entry.phase = Phase::Leaving
            }
            _ => self.end(index, DownCause::Closed),
        }
    }

    /// Removes a connection of which nothing is on its way any more, and reports its end.
    pub(super) fn finish(&mut self, index: u32) {
        let Some(mut entry) = self.entries.remove(index) else { return };
        self.release();
        self.owing.retain(|&other| other != index);
        let connection = entry.connection;
        let cause = connection.set_down(DownCause::Closed);
        if let Some(channel) = &mut entry.channel {
            let last = match &cause {
                DownCause::Closed => SetupMessage::Bye,
                // Not in order: the peer has to learn that, also if it has noticed nothing.
                cause => SetupMessage::Refusal(cause.to_string()),
            };
            // Where it is full or gone the hang-up says it, too.
            let _ = channel.send(&last);
        }
        self.ending.retain(|&other| other != index);
        let (ended, failed) = connection.close();
        self.pending.extend(transfers::told(ended));
        for (token, buffer) in failed {
            let failure =
                if entry.is_quiet { OpFailure::Closed } else { OpFailure::Down(cause.clone()) };
            self.pending.push_back(Event::Completion {
                token,
                buffer,
                outcome: Err(Box::new(failure)),
            });
        }
        let (peer, device) = connection.identity();
        if !entry.is_quiet {
            self.pending.push_back(Event::PeerDown { peer, cause });
        }
        if let Some(caller) = self.callers.take_held(peer, device) {
            self.meet(caller);
        }
    }

    /// Looks for connections whose links have gone, and those that a link has broken off.
    pub(super) fn end_unwanted(&mut self) {
        if !self.signs.take_news() {
            return;
        }
        for index in self.entries.numbers() {
            let Some(entry) = self.entries.get(index) else { continue };
            let gone = entry.connection.lost_links();
            entry.links = entry.links.saturating_sub(gone);
            if gone > 0 && entry.links == 0 {
                self.leave(index);
            } else if entry.connection.is_down()
                && !entry.phase.is_ending()
                && let Some(cause) = entry.connection.down().cloned()
            {
                self.end(index, cause);
            }
        }
    }

    /// Ends all connections, since nothing goes through the NIC now or later.
    #[cold]
    pub(super) fn lose_everybody(&mut self, why: &str) {
        if self.broken.is_none() {
            let why = format!(
                "{} of this rank cannot be used any more: {why}",
                self.shared.context.name()
            );
            tracing::error!("{why}");
            self.broken = Some(why);
        }
        let why = self.broken.clone().unwrap_or_default();
        for index in self.entries.numbers() {
            self.end(index, DownCause::Lacking(why.clone()));
        }
        // Also those that were at their end: what they wait for may never come.
        for index in self.entries.numbers() {
            self.partings.forsake(index);
        }
    }
}

/// Returns the cause of the end of a connection whose other side has not proved itself.
fn not_proven(why: Unproven) -> DownCause {
    match why {
        Unproven::Refused(why) => DownCause::Refused(why),
        Unproven::Bye => DownCause::Closed,
        why => DownCause::Protocol(why.to_string()),
    }
}

/// Returns the failure of a call for which this process lacks a resource.
fn lack(error: &io::Error) -> Option<Errno> {
    Errno::from_io_error(error).filter(|error| is_shortage(*error))
}
