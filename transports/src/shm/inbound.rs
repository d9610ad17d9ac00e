//! The rings that lead here, and which of them polls look at.
//!
//! A ring that was busy lately is *warm*: each poll looks at it. A *cold* one costs nothing until
//! its sender rings its bell. Silent rings cool when many are warm, and all rings cool before the
//! device sleeps.

#![forbid(unsafe_code)]

use super::device::{ShmShared, is_dead};
use super::handshake::HandshakeMessage;
use super::pending::{Heard, NotIn, PendingSender};
use super::source::{Look, Source};
use crate::contract::{Batch, DownCause, Event, Matcher, PeerId};
use crate::net::packets::Channel;
use crate::net::pending::Pending;
use crate::sync::attention::settle;
use crate::sync::barrier::Barrier;
use crate::sync::bells::Bells;
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Warm rings that are too few to be worth cooling one.
const FEW: usize = 8;
/// Empty looks after which one of many warm rings cools.
const PATIENCE: u32 = 4096;

/// All incoming links of a device.
#[derive(Debug)]
pub(super) struct InboundLinks {
    /// Links by bell.
    links: Vec<Option<InboundLink>>,
    /// Senders that have connected and were not welcomed so far.
    pending: Pending<PendingSender>,
    /// Senders whose rings are polled. Here and not in `links`, so that a poll follows no pointer.
    warm: Vec<Source>,
    /// Index at which the next poll begins, so that no ring is always last.
    turn: usize,
    /// Pending connections wait for a resource that is short.
    owes_welcomes: bool,
}

#[derive(Debug)]
enum InboundLink {
    /// The source is not looked at.
    Cold(Box<Source>),
    /// The sender is in `warm`.
    Warm,
}

impl InboundLinks {
    /// Creates the state for a job of this number of ranks, all of which may call at the same time.
    pub(super) fn of(ranks: u32) -> Self {
        let pending = Pending::of_ranks(ranks);
        Self { links: Vec::new(), pending, warm: Vec::new(), turn: 0, owes_welcomes: false }
    }

    /// Returns `true` if any polled ring has something, or any bell has rung.
    pub(super) fn has_something(&self, bells: &Bells) -> bool {
        bells.any() || self.warm.iter().any(|sender| sender.consumer.is_ready())
    }

    /// Takes messages from the warm rings, and warms rings whose bells have rung.
    /// Returns `true` if the matcher took a message.
    #[inline(always)]
    pub(super) fn poll(
        &mut self,
        shared: &ShmShared,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> bool {
        let took = self.look(shared, batch, matcher);
        if shared.page.bells().any() {
            return self.answer(shared, batch, matcher) || took;
        }
        took
    }

    #[cold]
    fn answer(&mut self, shared: &ShmShared, batch: &mut Batch, matcher: &mut dyn Matcher) -> bool {
        self.answer_bells(shared);
        self.look_in_turn(shared, batch, matcher)
    }

    #[inline(always)]
    fn look(&mut self, shared: &ShmShared, batch: &mut Batch, matcher: &mut dyn Matcher) -> bool {
        let [sender] = &mut self.warm[..] else {
            return self.look_in_turn(shared, batch, matcher);
        };
        // One ring takes no turns, and is too few to be cooled.
        match sender.look(&shared.packets, batch, matcher) {
            Look::Goes => false,
            Look::Took => true,
            Look::Ended(cause) => {
                self.remove(shared, 0, cause, batch);
                false
            }
        }
    }

    #[inline(always)]
    fn look_in_turn(
        &mut self,
        shared: &ShmShared,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> bool {
        let count = self.warm.len();
        let (mut tired, mut took) = (0, false);
        let mut at = self.turn;
        for _ in 0..count {
            if at >= count {
                at = 0;
            }
            let Some(sender) = self.warm.get_mut(at) else { break };
            match sender.look(&shared.packets, batch, matcher) {
                Look::Took => took = true,
                Look::Goes => tired += usize::from(sender.silent > PATIENCE),
                Look::Ended(cause) => {
                    self.remove(shared, at, cause, batch);
                    break;
                }
            }
            at += 1;
        }
        self.turn = if self.turn + 1 < count { self.turn + 1 } else { 0 };
        if tired > 0 && count > FEW || tired >= FEW {
            self.cool(shared.barrier, |sender| sender.silent > PATIENCE);
        }
        took
    }

    /// Removes a sender that has ended.
    #[cold]
    fn remove(&mut self, shared: &ShmShared, at: usize, cause: DownCause, batch: &mut Batch) {
        let sender = self.warm.remove(at);
        let mut incoming = shared.incoming();
        let copies_no_more =
            sender.process.as_ref().is_some_and(|process| is_dead(process.as_fd()))
                || sender.segment.access().revoke();
        if copies_no_more
            && incoming
                .get(&sender.from)
                .is_some_and(|segment| Arc::ptr_eq(segment, &sender.segment))
        {
            incoming.remove(&sender.from);
        }
        drop(incoming);
        self.links[sender.bell as usize] = None;
        batch.push(Event::PeerDown { peer: sender.from, cause });
    }

    /// Stops looking at the rings that `which` selects, without losing a message published
    /// meanwhile.
    #[cold]
    fn cool(&mut self, barrier: Barrier, which: impl Fn(&Source) -> bool) {
        let mut cooled = Vec::new();
        for sender in self.warm.extract_if(.., |sender| which(sender) && sender.ended.is_none()) {
            sender.segment.attention().cool();
            let bell = sender.bell;
            cooled.push(bell);
            self.links[bell as usize] = Some(InboundLink::Cold(Box::new(sender)));
        }
        if cooled.is_empty() {
            return;
        }
        settle(barrier);
        for bell in cooled {
            let Some(Some(InboundLink::Cold(sender))) = self.links.get(bell as usize) else {
                continue;
            };
            if sender.consumer.is_ready() {
                self.warm_up(bell);
            }
        }
    }

    /// Stops looking at all rings, before sleep.
    pub(super) fn cool_all(&mut self, barrier: Barrier) {
        self.cool(barrier, |_| true);
    }

    /// Begins to look at a ring.
    fn warm_up(&mut self, bell: u32) {
        let Some(place) = self.links.get_mut(bell as usize) else { return };
        match place.take() {
            Some(InboundLink::Cold(mut sender)) => {
                sender.silent = 0;
                sender.segment.attention().warm();
                self.warm.push(*sender);
                *place = Some(InboundLink::Warm);
            }
            other => *place = other,
        }
    }

    #[cold]
    fn answer_bells(&mut self, shared: &ShmShared) {
        let mut rang = Vec::new();
        shared.page.bells().collect(|bell| rang.push(bell));
        for bell in rang {
            self.warm_up(bell);
        }
    }

    /// Lets a sender prove itself. Its first message is there already, most likely; if not, the
    /// epoll set tells.
    pub(super) fn admit(&mut self, shared: &ShmShared, channel: Channel) -> Result<(), Errno> {
        let sender = PendingSender::new(shared, channel)?;
        let now = Instant::now();
        self.pending.expire(now);
        if let Some(oldest) = self.pending.crowded() {
            // It may have something to say by now.
            self.hear_pending(shared, oldest);
        }
        let place = self.pending.admit(sender, now);
        self.hear_pending(shared, place);
        Ok(())
    }

    /// Receives the messages of a pending connection, and admits its sender when they suffice.
    pub(super) fn hear_pending(&mut self, shared: &ShmShared, place: u32) {
        let Some(sender) = self.pending.get_mut(place) else { return };
        let heard = sender.hear(shared, place);
        if sender.is_proven() {
            self.pending.proved(place);
        }
        let why = match heard {
            Ok(Heard::Silent) => return,
            Ok(Heard::Short(error)) => return self.lacks(shared, error),
            Ok(Heard::Gone) => return drop(self.pending.take(place)),
            Ok(Heard::Hello) => match self.free_bell() {
                Some(bell) => return self.welcome(shared, place, bell),
                None => format!("{} links lead here already", Bells::COUNT),
            },
            Err(why) => why,
        };
        self.refuse(place, why);
    }

    fn lacks(&mut self, shared: &ShmShared, error: Errno) {
        shared.shortage.note(error);
        self.owes_welcomes = true;
    }

    fn refuse(&mut self, place: u32, why: String) {
        let Some(sender) = self.pending.take(place) else { return };
        let name = sender.channel.peer();
        let name = name.map_or_else(|_| "a process".into(), |it| format!("process {}", it.pid));
        self.pending.refused(&name, &why, Instant::now());
        let _ = sender.channel.send(&HandshakeMessage::Refusal(why).encode(), &[]);
    }

    /// Returns a bell that no link has.
    fn free_bell(&mut self) -> Option<u32> {
        let free = self.links.iter().position(Option::is_none);
        let bell = u32::try_from(free.unwrap_or(self.links.len())).ok()?;
        ((bell as usize) < Bells::COUNT).then_some(bell)
    }

    fn welcome(&mut self, shared: &ShmShared, place: u32, bell: u32) {
        let Some(sender) = self.pending.take(place) else { return };
        let admitted = match sender.enter(shared, bell) {
            Ok(admitted) => admitted,
            Err((sender, not_in)) => {
                // The place that it has left is the next to be given out, and it is watched by it.
                let place = self.pending.admit(sender, Instant::now());
                self.pending.proved(place);
                return match not_in {
                    NotIn::Short(error) => self.lacks(shared, error),
                    NotIn::Refused(why) => self.refuse(place, why),
                };
            }
        };
        let sender = Source::new(admitted, bell);
        shared.shortage.end();
        shared.incoming().insert(sender.from, sender.segment.clone());
        let link = Some(InboundLink::Cold(Box::new(sender)));
        match self.links.get_mut(bell as usize) {
            Some(free) => *free = link,
            None => self.links.push(link),
        }
        // A sleeper is woken by its bell. This poll, which finds no message, may be the thread's
        // last.
        if shared.sleepers.load(Ordering::SeqCst) == 0 {
            self.warm_up(bell);
        }
    }

    /// Takes in what the other end of an incoming link says.
    pub(super) fn listen(&mut self, bell: u32) {
        let Some(place) = self.links.get_mut(bell as usize) else { return };
        match place {
            None => {}
            Some(InboundLink::Cold(sender)) => {
                let ended = sender.hear();
                if ended {
                    // Its ring is looked at once more before it is removed.
                    self.warm_up(bell);
                }
            }
            Some(InboundLink::Warm) => {
                if let Some(sender) = self.warm.iter_mut().find(|sender| sender.bell == bell) {
                    sender.hear();
                }
            }
        }
    }

    /// Returns `true` if pending connections wait for a resource that is short.
    pub(super) fn owes_welcomes(&self) -> bool {
        self.owes_welcomes
    }

    /// Tries again to welcome pending connections that wait for a resource.
    pub(super) fn welcome_again(&mut self, shared: &ShmShared) {
        if !std::mem::take(&mut self.owes_welcomes) {
            return;
        }
        for place in self.pending.places() {
            if self.pending.get_mut(place).is_some_and(|sender| sender.waits()) {
                self.hear_pending(shared, place);
            }
        }
    }

    /// Ends a peer that is known to have gone. Returns `true` if rings of the peer lead here: its
    /// end is then reported when they are empty.
    pub(super) fn end(&mut self, shared: &ShmShared, peer: PeerId, cause: &DownCause) -> bool {
        for place in self.pending.places() {
            self.hear_pending(shared, place);
        }
        for bell in 0..u32::try_from(self.links.len()).unwrap_or(u32::MAX) {
            match self.links.get_mut(bell as usize) {
                Some(Some(InboundLink::Cold(sender))) if sender.from == peer => self.warm_up(bell),
                _ => {}
            }
        }
        let mut any = false;
        for sender in self.warm.iter_mut().filter(|sender| sender.from == peer) {
            sender.rest = 0;
            sender.ended.get_or_insert_with(|| cause.clone());
            any = true;
        }
        any
    }

    /// Tells all senders that this device closes, and closes the channels.
    pub(super) fn close(&mut self) {
        let others = self.links.drain(..).flatten().filter_map(|link| match link {
            InboundLink::Cold(sender) => Some(sender.channel),
            InboundLink::Warm => None,
        });
        let pending = self.pending.drain().into_iter().map(|sender| sender.channel);
        let others = others.chain(pending);
        for channel in self.warm.drain(..).map(|sender| sender.channel).chain(others) {
            let _ = channel.send(&HandshakeMessage::Bye.encode(), &[]);
        }
    }
}
