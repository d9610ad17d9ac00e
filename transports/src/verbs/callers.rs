//! Pending connections: each caller proves that it belongs to the job and introduces its end, or is
//! refused.

use super::channel::{SetupChannel, SetupReceived};
use super::device::{PENDING, RdmaPolling};
use super::entries::Phase;
use super::wire::{QueuePairEnd, SetupMessage, greeting};
use crate::contract::PeerId;
use crate::net::greeting::Caller;
use crate::net::key::DeviceKey;
use crate::net::pending::Pending;
use crate::net::proof::Role;
use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

/// Callers without a queue pair so far.
#[derive(Debug)]
pub(super) struct Callers {
    pending: Pending<Caller<SetupChannel>>,
    /// Proved callers whose older connection here has to end first.
    held: Vec<ProvedCaller>,
}

/// A caller that has proved that it belongs to the job.
#[derive(Debug)]
pub(super) struct ProvedCaller {
    pub(super) channel: SetupChannel,
    pub(super) from: PeerId,
    pub(super) device: DeviceKey,
    pub(super) end: QueuePairEnd,
}

impl Callers {
    pub(super) fn of(ranks: u32) -> Self {
        Self { pending: Pending::of_ranks(ranks), held: Vec::new() }
    }

    /// Keeps a caller until the older connection of its device has ended. An earlier one of that
    /// device has given up.
    fn hold(&mut self, caller: ProvedCaller) {
        self.held.retain(|other| (other.from, other.device) != (caller.from, caller.device));
        self.held.push(caller);
    }

    /// Takes the caller whose older connection has ended.
    pub(super) fn take_held(&mut self, from: PeerId, device: DeviceKey) -> Option<ProvedCaller> {
        let at =
            self.held.iter().position(|caller| (caller.from, caller.device) == (from, device))?;
        Some(self.held.swap_remove(at))
    }
}

/// Goes as far as the introduction of a caller's end, if that has come. `Err(None)`: it has gone.
fn hear(
    caller: &mut Caller<SetupChannel>,
    packet_size: usize,
    ranks: u32,
) -> Result<Option<QueuePairEnd>, Option<String>> {
    let Some((channel, claim)) = caller.prove()? else { return Ok(None) };
    let rank = claim.rank.get();
    match channel.receive() {
        SetupReceived::Nothing => Ok(None),
        SetupReceived::Message(SetupMessage::Hello(end)) => {
            let why = if rank >= ranks {
                format!("it calls itself {}, in a job of {ranks} ranks", PeerId(rank))
            } else if let Err(why) = end.check(packet_size) {
                why
            } else {
                return Ok(Some(end));
            };
            Err(Some(why))
        }
        SetupReceived::Message(SetupMessage::Bye) | SetupReceived::Closed(_) => Err(None),
        SetupReceived::Message(other) => Err(Some(format!("it began with {other:?}"))),
        SetupReceived::Wrong(why) => Err(Some(why)),
    }
}

impl RdmaPolling {
    /// Accepts the callers, which then prove themselves.
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
                    // A silent caller's descriptor is better spent on the one that comes now.
                    wanting = self.lacks(&error) && !self.callers.pending.is_empty();
                    if !wanting {
                        tracing::warn!(%error, "a rank that calls cannot be let in, and waits");
                    }
                    break;
                }
            }
        }
        let now = Instant::now();
        self.callers.pending.expire(now);
        for stream in calls {
            let Ok(channel) = SetupChannel::over(stream) else { continue };
            let identity = &self.shared.identity;
            let Ok(greeting) = greeting(Role::Listener, identity, self.key) else { continue };
            while let Some(oldest) = self.callers.pending.crowded() {
                self.dismiss(oldest);
            }
            let place = self.callers.pending.admit(Caller::new(channel, greeting), now);
            let Some(caller) = self.callers.pending.get(place) else { continue };
            if self.watch(caller.channel.as_fd(), PENDING | u64::from(place)).is_err() {
                self.callers.pending.take(place);
            }
            // First the word by which it knows that a rank is here, and calls again if it is not
            // kept.
            self.hear_caller(place);
        }
        if wanting && let Some(oldest) = self.callers.pending.oldest() {
            self.dismiss(oldest);
        }
    }

    /// Closes a pending connection, unless its caller has something to say by now.
    fn dismiss(&mut self, place: u32) {
        self.hear_caller(place);
        if self.callers.pending.oldest() == Some(place) {
            self.callers.pending.take(place);
        }
    }

    /// Receives the messages of a pending connection.
    pub(super) fn hear_caller(&mut self, place: u32) {
        let (packet_size, ranks) = (self.shared.options.packet_size, self.shared.identity.ranks);
        let Some(caller) = self.callers.pending.get_mut(place) else { return };
        let heard = hear(caller, packet_size, ranks);
        if caller.is_proved() {
            self.callers.pending.proved(place);
        }
        if let Ok(None) = heard {
            return;
        }
        let Some(caller) = self.callers.pending.take(place) else { return };
        match (heard, caller.into_proved()) {
            (Ok(Some(end)), (channel, Some(claim))) => {
                let (from, device) = (PeerId(claim.rank.get()), DeviceKey(claim.device));
                self.meet(ProvedCaller { channel, from, device, end });
            }
            (Err(Some(why)), (channel, _)) => self.refuse(channel, why),
            _ => {}
        }
    }

    /// Answers a device of this job that calls, keeps it for later, or refuses it.
    pub(super) fn meet(&mut self, caller: ProvedCaller) {
        let key = self.key;
        if let Some(why) = self.broken.clone() {
            return self.refuse(caller.channel, why);
        }
        let Some(entry) = self.entries.of_device((caller.from, caller.device)) else {
            return match self.prepare(caller.from, caller.device) {
                Ok(index) => self.answer(index, caller),
                Err(why) => self.refuse(caller.channel, why),
            };
        };
        let index = entry.connection.index;
        if entry.peers_queue_pair == Some(caller.end.queue_pair) {
            // Its call and this side's have crossed, and this side's came through.
            return;
        }
        match entry.phase {
            Phase::Answered | Phase::Up | Phase::Leaving | Phase::Failing => {
                self.callers.hold(caller)
            }
            _ if key < caller.device => {
                let ProvedCaller { mut channel, .. } = caller;
                if channel.send(&SetupMessage::Crossed).is_ok() {
                    entry.spare = Some(channel);
                }
            }
            Phase::Calling | Phase::Introduced | Phase::Crossed => self.answer(index, caller),
        }
    }

    /// Refuses a caller, and sends it the reason.
    pub(super) fn refuse(&mut self, mut channel: SetupChannel, why: String) {
        self.callers.pending.refused(&channel.peer_name(), &why, Instant::now());
        let _ = channel.send(&SetupMessage::Refusal(why));
    }
}
