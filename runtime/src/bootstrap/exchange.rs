//! The exchange of a launcher, used once: it tells all ranks where rank 0's store is.
//!
//! Rank 0 opens its listener, draws the job's secret, and shares both as a [`StoreCard`], by PMI,
//! PMIx or MPI. From then on the store of [`tcp`](super::tcp) does everything, so fences,
//! departures and errors are the same under every launcher.

#![forbid(unsafe_code)]

use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};

use carrack_transports::net::interfaces;
use carrack_transports::net::sockets;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::MAX_JOB;
use super::error::BootstrapError;
use super::job::JobId;
use super::tcp::{FromEnvironment, Invitation, JobKey, variables};
use crate::settings::Settings;

/// The place of a process in its job, as the launcher tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Seat {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) place_on_node: u32,
}

impl Seat {
    /// Returns the reason why there is no such rank.
    pub(super) fn fault(&self) -> Option<String> {
        let Self { rank, size, .. } = *self;
        if !(1..=MAX_JOB).contains(&size) {
            return Some(format!("the job has {size} ranks, and not 1 to {MAX_JOB}"));
        }
        (rank >= size).then(|| format!("the rank is {rank}, not below the size {size}"))
    }
}

/// A launcher's way to give a value to all ranks.
pub(super) trait Exchange: Send + Sync + fmt::Debug {
    /// Returns the place of this process.
    fn seat(&self) -> Seat;

    /// Gives rank 0's card to all ranks. Blocks until all have called it.
    fn share(&mut self, card: Option<&[u8]>) -> Result<Vec<u8>, BootstrapError>;

    /// Tells the launcher that this rank ends in order. Without it the end is a failure for some
    /// launchers, which then end all ranks.
    fn end(&mut self);
}

/// Joins the job of a launcher. A process takes part in its launcher's exchange once.
pub(super) fn enter(
    failed: fn(String) -> BootstrapError,
    connect: fn(&Settings) -> Result<Box<dyn Exchange>, BootstrapError>,
    settings: &Settings,
) -> Result<FromEnvironment, BootstrapError> {
    static USED: AtomicBool = AtomicBool::new(false);
    if USED.swap(true, Ordering::Relaxed) {
        let why = "this process has joined it before; runtimes of one process share a bootstrap";
        return Err(failed(why.into()));
    }
    meet(failed, connect(settings)?, settings)
}

/// Joins the job of an exchange's ranks.
pub(super) fn meet(
    failed: fn(String) -> BootstrapError,
    mut exchange: Box<dyn Exchange>,
    settings: &Settings,
) -> Result<FromEnvironment, BootstrapError> {
    let Seat { rank, size, place_on_node } = exchange.seat();
    let opened = (rank == 0).then(|| open(size, settings));
    let shared = opened.as_ref().map(|opened| match opened {
        Ok((_, card)) => card.encode(),
        // The others are told, because they wait for the card.
        Err(error) => StoreCard::refusal(&error.to_string()),
    });
    let bytes = exchange.share(shared.as_deref())?;
    let listener = opened.transpose()?.map(|(listener, _)| listener);
    let card = StoreCard::decode(&bytes).map_err(failed)?;
    if card.size != size {
        let theirs = card.size;
        return Err(failed(format!("this rank is told of {size} ranks, and rank 0 of {theirs}")));
    }
    let mut addresses = card.addresses;
    interfaces::sort_nearest_first(&mut addresses, &interfaces::all().unwrap_or_default());
    let invitation = Invitation {
        rank,
        size,
        place_on_node,
        hosts: addresses.iter().map(IpAddr::to_string).collect(),
        port: card.port,
        key: JobKey::of_secret(card.secret.as_flattened()),
        restart: 0,
        patience: variables::patience(settings),
    };
    Ok(FromEnvironment::enter(&invitation, listener)?.keep(exchange))
}

/// Opens rank 0's listener.
fn open(size: u32, settings: &Settings) -> Result<(TcpListener, StoreCard), BootstrapError> {
    let port = variables::chosen_port(settings).unwrap_or(0);
    let failed =
        |source| BootstrapError::Listen { address: format!("port {port} of this machine"), source };
    let listener = sockets::listen_everywhere(port, true).map_err(failed)?;
    let port = listener.local_addr().map_err(failed)?.port();
    let looking = |source| BootstrapError::Os { doing: "listing this machine's addresses", source };
    let only = settings.of_transports().tcp().tcp_interface();
    let found = interfaces::reachable(only).map_err(looking)?;
    let addresses =
        found.into_iter().map(|at| at.address).take(StoreCard::MOST_ADDRESSES).collect();
    let secret = [*JobId::random()?.as_bytes(), *JobId::random()?.as_bytes()];
    Ok((listener, StoreCard { size, port, secret, addresses }))
}

/// The place of rank 0's store, and the job's secret. Never shown.
#[derive(PartialEq, Eq)]
struct StoreCard {
    size: u32,
    port: u16,
    secret: [[u8; 16]; 2],
    addresses: Vec<IpAddr>,
}

/// The first bytes of a card. Addresses follow, each as an IPv6 address.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct CardHead {
    head: [u8; 15],
    size: U32,
    port: U16,
    secret: [[u8; 16]; 2],
}

impl StoreCard {
    /// First bytes of a card, with the version of its layout.
    const HEAD: &[u8; 15] = b"carrack card 1\n";
    /// First bytes of the words of a rank 0 that has no card.
    const REFUSAL: &[u8] = b"carrack none 1\n";
    const MOST_ADDRESSES: usize = 64;

    fn encode(&self) -> Vec<u8> {
        let Self { size, port, secret, addresses } = self;
        let (head, size, port) = (*Self::HEAD, (*size).into(), (*port).into());
        let mut bytes = CardHead { head, size, port, secret: *secret }.as_bytes().to_vec();
        for address in addresses {
            bytes.extend(match address {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            });
        }
        bytes
    }

    fn refusal(why: &str) -> Vec<u8> {
        [Self::REFUSAL, why.as_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        if let Some(why) = bytes.strip_prefix(Self::REFUSAL) {
            return Err(format!("rank 0 has failed: {}", String::from_utf8_lossy(why)));
        }
        let parts = CardHead::ref_from_prefix(bytes).ok().and_then(|(head, rest)| {
            let (addresses, more) = rest.as_chunks::<16>();
            let is_whole = head.head == *Self::HEAD && more.is_empty() && !addresses.is_empty();
            is_whole.then_some((head, addresses))
        });
        let Some((head, addresses)) = parts else {
            let why = "what rank 0 has shared is no card of this version of Carrack: build the \
                programs of all ranks from the same version";
            return Err(why.into());
        };
        let address = |bytes: &[u8; 16]| IpAddr::from(*bytes).to_canonical();
        Ok(Self {
            size: head.size.get(),
            port: head.port.get(),
            secret: head.secret,
            addresses: addresses.iter().take(Self::MOST_ADDRESSES).map(address).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn card(addresses: &[&str]) -> StoreCard {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        StoreCard { size: 3, port: 4000, secret: [[7; 16]; 2], addresses }
    }

    #[test]
    fn a_card_is_read_as_it_was_written_and_a_refusal_is_the_others_error() {
        let card = card(&["10.0.0.1", "fd00::7"]);
        assert!(StoreCard::decode(&card.encode()).unwrap() == card);
        let why = StoreCard::decode(&StoreCard::refusal("port 7 is taken")).err().unwrap();
        assert_eq!(why, "rank 0 has failed: port 7 is taken");
        let why = StoreCard::decode(b"carrack card 2\n").err().unwrap();
        assert!(why.contains("from the same version"), "{why}");
    }

    proptest! {
        #[test]
        fn other_bytes_are_no_card(mut bytes: Vec<u8>, with_head: bool) {
            if with_head {
                bytes = [&StoreCard::HEAD[..], &bytes].concat();
            }
            if let Ok(card) = StoreCard::decode(&bytes) {
                prop_assert!(!card.addresses.is_empty());
                prop_assert!(card.addresses.len() <= StoreCard::MOST_ADDRESSES);
            }
        }
    }

    #[test]
    fn a_seat_is_in_its_job() {
        let seat = |rank, size| Seat { rank, size, place_on_node: 0 };
        assert_eq!(seat(1, 2).fault(), None);
        for (rank, size) in [(0, 0), (2, 2), (0, MAX_JOB + 1)] {
            assert!(seat(rank, size).fault().is_some(), "{rank} of {size}");
        }
    }
}
