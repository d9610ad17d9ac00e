//! Connections that have not proved themselves, or not said to which link they belong.

use super::shared::{STRANGER, Shared};
use super::wire::{self, PROTOCOL};
use crate::contract::PeerId;
use crate::net::greeting::{Carrier, Failure, Fault, Greeting, Progress};
use crate::net::key::DeviceKey;
use crate::net::pending::Pending;
use crate::net::proof::{Claim, Role};
use crate::net::streams::TcpChannel;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Bound of pending connections, or twice the number of ranks where that is more. Beyond it the
/// oldest goes.
const MOST: usize = 1024;

/// Time in which a connection has to prove itself. A rank that computes for longer dials again.
const PATIENCE: Duration = Duration::from_secs(600);

/// The same where this process lacks a descriptor.
const HASTE: Duration = Duration::from_secs(2);

/// The pending connections of a device.
#[derive(Debug)]
pub(super) struct Strangers {
    pub(super) pending: Pending<Stranger>,
}

#[derive(Debug)]
pub(super) struct Stranger {
    channel: TcpChannel,
    from: SocketAddr,
    /// Until both sides are proved.
    greeting: Option<Box<Greeting>>,
    claim: Claim,
}

/// A connection of a rank of the job, with the link that it introduces.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) channel: TcpChannel,
    pub(super) peer: PeerId,
    pub(super) device: DeviceKey,
    pub(super) hello: wire::Hello,
    /// Address at which the dialer's device listens.
    pub(super) home: SocketAddr,
}

impl Strangers {
    pub(super) fn of(ranks: u32) -> Self {
        let most = MOST.max(2 * ranks as usize);
        Self { pending: Pending::new(most, PATIENCE) }
    }

    /// Takes in a connection, and returns its place.
    pub(super) fn admit(
        &mut self,
        shared: &Shared,
        socket: TcpStream,
        from: SocketAddr,
    ) -> Result<u32, Errno> {
        let channel = TcpChannel::over(socket, wire::limits(shared.options.timeout))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let greeting = Some(Box::new(shared.greeting(Role::Listener)?));
        let stranger = Stranger { channel, from, greeting, claim: Claim::default() };
        let place = self.pending.admit(stranger, Instant::now());
        if let Some(stranger) = self.pending.get(place) {
            let changes = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            let watched =
                shared.watch(stranger.channel.as_fd(), STRANGER | u64::from(place), changes);
            if let Err(error) = watched {
                self.pending.take(place);
                return Err(error);
            }
        }
        Ok(place)
    }

    /// Takes out those that have not proved themselves for a while: a descriptor is lacking.
    pub(super) fn hasten(&mut self) {
        self.pending.expire(Instant::now() + (PATIENCE - HASTE));
    }

    /// Goes on with a connection. Returns it when it has proved itself and named its link.
    pub(super) fn hear(&mut self, shared: &Shared, place: u32) -> Option<Guest> {
        let stranger = self.pending.get_mut(place)?;
        match stranger.hear(shared) {
            Ok(None) => None,
            Ok(Some(hello)) => {
                let Stranger { channel, mut from, claim, .. } = self.pending.take(place)?;
                from.set_port(u16::try_from(claim.number.get()).unwrap_or(0));
                let (peer, device) = (PeerId(claim.rank.get()), DeviceKey(claim.device));
                Some(Guest { channel, peer, device, hello, home: from })
            }
            Err(why) => {
                let mut stranger = self.pending.take(place)?;
                if let Some(why) = why {
                    // It hears the reason if it still listens.
                    let _ = stranger.channel.say(&PROTOCOL.refusal(&why));
                    self.pending.refused(&stranger.from.to_string(), &why, Instant::now());
                }
                None
            }
        }
    }
}

impl Stranger {
    /// Returns its introduction when that has come. `Err(None)`: it has gone.
    fn hear(&mut self, shared: &Shared) -> Result<Option<wire::Hello>, Option<String>> {
        if let Some(greeting) = &mut self.greeting {
            match greeting.advance(&mut self.channel) {
                Ok(Progress::Waiting | Progress::Short(_)) => return Ok(None),
                Ok(Progress::Proven(session)) => {
                    let claim = session.peer;
                    let (rank, ranks) = (claim.rank.get(), claim.ranks.get());
                    if ranks != shared.identity.ranks || rank >= ranks {
                        return Err(Some(format!(
                            "it claims to be rank {rank} of {ranks}; this job has {}",
                            shared.identity.ranks
                        )));
                    }
                    (self.claim, self.greeting) = (claim, None);
                }
                Err(Failure::Gone(_)) => return Err(None),
                Err(Failure::Unproven(why)) => return Err(Some(why.to_string())),
            }
        }
        match self.channel.hear(PROTOCOL.longest) {
            Ok(None) | Err(Fault::Short(_)) => Ok(None),
            Ok(Some(message)) => wire::Hello::read(wire::HELLO, &message).map(Some).map_err(Some),
            Err(Fault::Gone(_)) => Err(None),
            Err(Fault::Wrong(why)) => Err(Some(why)),
        }
    }
}
