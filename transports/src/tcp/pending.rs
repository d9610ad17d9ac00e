//! Pending connections: they have not proved themselves, or not said to which link they belong.

use super::shared::{PENDING, TcpShared};
use super::wire::{self, PROTOCOL};
use crate::contract::PeerId;
use crate::net::greeting::{Caller, Carrier, Fault};
use crate::net::key::DeviceKey;
use crate::net::pending::{PROOF, Pending};
use crate::net::proof::{Claim, Role};
use crate::net::streams::TcpChannel;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Time in which a connection proves itself where this process lacks a descriptor.
const HASTE: Duration = Duration::from_secs(2);

/// A connection with its address, while it proves itself.
#[derive(Debug)]
pub(super) struct PendingConnection {
    caller: Caller<TcpChannel>,
    from: SocketAddr,
}

/// A connection that a rank of the job has proved its own, with the link that it introduces.
#[derive(Debug)]
pub(super) struct ProvedConnection {
    pub(super) channel: TcpChannel,
    pub(super) peer: PeerId,
    pub(super) device: DeviceKey,
    pub(super) hello: wire::Hello,
    /// Address at which the dialer's device listens.
    pub(super) home: SocketAddr,
}

impl Pending<PendingConnection> {
    /// Begins the proof of a connection, and returns its place.
    pub(super) fn begin(
        &mut self,
        shared: &TcpShared,
        socket: TcpStream,
        from: SocketAddr,
    ) -> Result<u32, Errno> {
        let channel = TcpChannel::over(socket, wire::limits(shared.options.timeout))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let caller = Caller::new(channel, shared.greeting(Role::Listener)?);
        let place = self.admit(PendingConnection { caller, from }, Instant::now());
        if let Some(admitted) = self.get(place) {
            let changes = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            let watched =
                shared.watch(admitted.caller.channel.as_fd(), PENDING | u64::from(place), changes);
            if let Err(error) = watched {
                self.take(place);
                return Err(error);
            }
        }
        Ok(place)
    }

    /// Takes out those that have not proved themselves for a while: a descriptor is lacking.
    pub(super) fn hasten(&mut self) {
        self.expire(Instant::now() + (PROOF - HASTE));
    }

    /// Goes on with a connection. Returns it when it has proved itself and named its link.
    pub(super) fn hear(&mut self, shared: &TcpShared, place: u32) -> Option<ProvedConnection> {
        let connection = self.get_mut(place)?;
        match hear(&mut connection.caller, shared.identity.ranks) {
            Ok(None) => None,
            Ok(Some((claim, hello))) => {
                let PendingConnection { caller, mut from } = self.take(place)?;
                let (channel, _) = caller.into_proved();
                from.set_port(u16::try_from(claim.number.get()).unwrap_or(0));
                let (peer, device) = (PeerId(claim.rank.get()), DeviceKey(claim.device));
                Some(ProvedConnection { channel, peer, device, hello, home: from })
            }
            Err(why) => {
                let mut connection = self.take(place)?;
                if let Some(why) = why {
                    // It hears the reason if it still listens.
                    let _ = connection.caller.channel.say(&PROTOCOL.refusal(&why));
                    self.refused(&connection.from.to_string(), &why, Instant::now());
                }
                None
            }
        }
    }
}

/// Returns a caller's claim and introduction when these have come. `Err(None)`: it has gone.
fn hear(
    caller: &mut Caller<TcpChannel>,
    ranks: u32,
) -> Result<Option<(Claim, wire::Hello)>, Option<String>> {
    let Some((channel, claim)) = caller.prove()? else { return Ok(None) };
    let (rank, of) = (claim.rank.get(), claim.ranks.get());
    if of != ranks || rank >= ranks {
        let why = format!("it claims to be rank {rank} of {of}; this job has {ranks}");
        return Err(Some(why));
    }
    match channel.hear(PROTOCOL.longest) {
        Ok(None) | Err(Fault::Short(_)) => Ok(None),
        Ok(Some(message)) => match wire::Hello::read(wire::HELLO, &message) {
            Ok(hello) => Ok(Some((claim, hello))),
            Err(why) => Err(Some(why)),
        },
        Err(Fault::Gone(_)) => Err(None),
        Err(Fault::Wrong(why)) => Err(Some(why)),
    }
}
