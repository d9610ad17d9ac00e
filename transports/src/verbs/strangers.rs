//! Who has called and is not known so far: it says who it is and that it belongs to the job, or is
//! sent away.

use super::address::DeviceKey;
use super::channel::{Channel, Received};
use super::device::{Polling, STRANGER};
use super::entries::Phase;
use super::meeting::{fresh_nonce, is_lack};
use super::wire::{End, Message, Nonce, proof};
use crate::contract::PeerId;
use std::io;
use std::os::fd::AsFd;

/// Callers that have not introduced themselves, and twice as many as there are ranks where that is
/// more. One more, and the first has to go.
const MOST_STRANGERS: usize = 1024;

/// Those who have called, and are not let in so far.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    all: Vec<Option<(Channel, Nonce)>>,
    /// Those who have an older connection here, which has to end first.
    held: Vec<Guest>,
    /// How many there may be, and which one has gone last when there were more.
    most: usize,
    oldest: usize,
}

/// A caller that has shown that it belongs to the job.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) channel: Channel,
    pub(super) from: PeerId,
    pub(super) device: DeviceKey,
    pub(super) nonce: Nonce,
    pub(super) end: End,
}

impl Strangers {
    /// For a job of so many ranks, all of which may call at the same time.
    pub(super) fn of(ranks: u32) -> Self {
        Self { most: MOST_STRANGERS.max(2 * ranks as usize), ..Self::default() }
    }

    /// A place for one more, if there is one.
    fn place(&mut self) -> Option<usize> {
        let free = self.all.iter().position(Option::is_none);
        if free.is_none() && self.all.len() < self.most {
            self.all.push(None);
            return Some(self.all.len() - 1);
        }
        free
    }

    /// Whose turn it is to go: they came in about this order.
    fn next_to_go(&mut self) -> usize {
        let count = self.all.len().max(1);
        let after = (1..=count).map(|step| (self.oldest + step) % count);
        self.oldest =
            after.clone().find(|&at| self.all.get(at).is_some_and(Option::is_some)).unwrap_or(0);
        self.oldest
    }

    fn is_empty(&self) -> bool {
        self.all.iter().all(Option::is_none)
    }

    /// Keeps a guest until the older connection of its device has ended. An earlier one of that
    /// device has given up.
    fn hold(&mut self, guest: Guest) {
        self.held.retain(|other| (other.from, other.device) != (guest.from, guest.device));
        self.held.push(guest);
    }

    /// The guest whose older connection has ended.
    pub(super) fn take_held(&mut self, from: PeerId, device: DeviceKey) -> Option<Guest> {
        let at = self.held.iter().position(|guest| (guest.from, guest.device) == (from, device))?;
        Some(self.held.swap_remove(at))
    }
}

impl Polling {
    /// Lets in whoever calls, to say who it is.
    pub(super) fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let mut calls = Vec::new();
        let mut wanting = false;
        loop {
            match listener.accept() {
                Ok((stream, _)) => calls.push(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Descriptors that others hold without saying anything are better spent on
                    // whoever comes now.
                    wanting = is_lack(&error) && !self.strangers.is_empty();
                    if !wanting {
                        tracing::warn!(%error, "a rank that calls cannot be let in, and waits");
                    }
                    break;
                }
            }
        }
        for stream in calls {
            let Ok(mut channel) = Channel::over(stream) else { continue };
            let Ok(nonce) = fresh_nonce() else { continue };
            let at = match self.strangers.place() {
                Some(at) => at,
                None => self.dismiss(),
            };
            // First the word by which it knows that a rank is here, and calls again if it is not
            // kept.
            let told = channel.send(&Message::Challenge(nonce)).is_ok();
            if told && self.watch(channel.as_fd(), STRANGER | at as u64).is_ok() {
                self.strangers.all[at] = Some((channel, nonce));
            }
        }
        if wanting {
            self.dismiss();
        }
    }

    /// Has the stranger go that has been here longest, unless it has something to say by now. Its
    /// place.
    fn dismiss(&mut self) -> usize {
        let at = self.strangers.next_to_go();
        self.hear_stranger(u32::try_from(at).unwrap_or(u32::MAX));
        if let Some(stranger) = self.strangers.all.get_mut(at) {
            *stranger = None;
        }
        at
    }

    /// Takes in what a stranger says.
    pub(super) fn hear_stranger(&mut self, number: u32) {
        let Some(place) = self.strangers.all.get_mut(number as usize) else { return };
        let Some((mut channel, asked)) = place.take() else { return };
        match channel.receive() {
            Received::Nothing => *place = Some((channel, asked)),
            Received::Message(Message::Hello { device, from, nonce, proof: shown, end }) => {
                let identity = &self.shared.identity;
                let why = if shown != proof(&identity.secret, &asked, (from, device), &end) {
                    "it does not know this job's secret: it belongs to another job".to_owned()
                } else if from.0 >= identity.ranks {
                    format!("it calls itself {from}, in a job of {} ranks", identity.ranks)
                } else if let Err(why) = end.check(self.shared.options.packet_size) {
                    why
                } else {
                    return self.meet(Guest { channel, from, device, nonce, end });
                };
                refuse(channel, why);
            }
            Received::Message(Message::Bye) | Received::Closed(_) => {}
            Received::Message(other) => refuse(channel, format!("it began with {other:?}")),
            Received::Wrong(why) => refuse(channel, why),
        }
    }

    /// A device of this job calls.
    pub(super) fn meet(&mut self, guest: Guest) {
        let key = self.key;
        if let Some(why) = &self.broken {
            return refuse(guest.channel, why.clone());
        }
        let Some(entry) = self.entries.of_device((guest.from, guest.device)) else {
            return match self.prepare(guest.from, guest.device) {
                Ok(index) => self.answer(index, guest),
                Err(why) => refuse(guest.channel, why),
            };
        };
        let index = entry.connection.index;
        if entry.peers_queue_pair == Some(guest.end.queue_pair) {
            // Its call and this side's have crossed, and this side's came through.
            return;
        }
        match entry.phase {
            Phase::Answered | Phase::Up | Phase::Leaving | Phase::Failing => {
                self.strangers.hold(guest)
            }
            _ if key < guest.device => {
                let Guest { mut channel, .. } = guest;
                if channel.send(&Message::Crossed).is_ok() {
                    entry.spare = Some(channel);
                }
            }
            Phase::Calling | Phase::Introduced | Phase::Crossed => self.answer(index, guest),
        }
    }
}

/// Sends a caller away with the reason.
pub(super) fn refuse(mut channel: Channel, why: String) {
    tracing::warn!(whom = channel.whom(), why, "a connection was refused");
    let _ = channel.send(&Message::Refusal(why));
}
