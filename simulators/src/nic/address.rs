//! Addresses on the simulated network.
//!
//! A process takes *blocks* of 255 port addresses, each by binding a socket's name, so that the
//! kernel keeps them unique. GIDs and LIDs are made from a port's address, and lead back to it: a
//! port is found from its GID without a query.

use super::LinkLayer;
use carrack_transports::fnv;
use std::fmt;

/// 255 port addresses that belong to one process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct PortBlock(pub(super) u16);

/// Number of blocks. A LID has room for this many, without those that name multicast groups.
pub(super) const BLOCKS: u16 = 0xbf;

/// Ports of a block: numbers 1 to this.
pub(super) const PORTS_OF_A_BLOCK: u8 = 255;

/// A port on the simulated network.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PortAddress {
    block: PortBlock,
    number: u8,
}

/// The version of RoCE that an entry of the table of GIDs is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GidKind {
    InfiniBand,
    RoceV1,
    RoceV2,
}

/// Prefix of our InfiniBand GIDs, and of link-local ones of RoCE: the locally administered vendor
/// 02:00:ca.
const LINK_LOCAL: [u8; 13] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0x00, 0xca, 0xff, 0xfe];
/// Prefix of our IPv4 addresses, mapped to IPv6: 10.
const MAPPED: [u8; 13] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10];

impl PortAddress {
    pub(super) fn new(block: PortBlock, number: u8) -> Self {
        Self { block, number }
    }

    /// Returns the address as a packet carries it.
    pub(super) fn raw(self) -> u32 {
        u32::from(self.block.0) << 8 | u32::from(self.number)
    }

    /// Parses the address of a packet.
    pub(super) fn from_raw(raw: u32) -> Option<Self> {
        let number = u8::try_from(raw & 0xff).ok()?;
        let block = u16::try_from(raw >> 8).ok()?;
        (number != 0 && block < BLOCKS).then(|| Self::new(PortBlock(block), number))
    }

    pub(super) fn block(self) -> PortBlock {
        self.block
    }

    /// Returns its number in its block.
    pub(super) fn number(self) -> u8 {
        self.number
    }

    fn tail(self) -> [u8; 3] {
        let [high, low] = self.block.0.to_be_bytes();
        [high, low, self.number]
    }

    fn with(start: [u8; 13], [high, low, number]: [u8; 3]) -> [u8; 16] {
        std::array::from_fn(|at| {
            start.get(at).copied().unwrap_or([high, low, number][at.saturating_sub(13)])
        })
    }

    /// Returns the port's table of GIDs.
    pub(super) fn gids(self, layer: LinkLayer) -> Vec<([u8; 16], GidKind)> {
        let local = Self::with(LINK_LOCAL, self.tail());
        let mapped = Self::with(MAPPED, self.tail());
        match layer {
            LinkLayer::InfiniBand => vec![(local, GidKind::InfiniBand)],
            LinkLayer::Ethernet => vec![
                (local, GidKind::RoceV1),
                (local, GidKind::RoceV2),
                (mapped, GidKind::RoceV1),
                (mapped, GidKind::RoceV2),
            ],
        }
    }

    /// Returns the LID of a port on InfiniBand.
    pub(super) fn lid(self) -> u16 {
        self.block.0 << 8 | u16::from(self.number)
    }

    /// Returns the port with this GID; `None` if it cannot be on the network.
    pub(super) fn from_gid(gid: &[u8; 16]) -> Option<Self> {
        let ours = gid.starts_with(&LINK_LOCAL) || gid.starts_with(&MAPPED);
        let [high, low, number] = [gid[13], gid[14], gid[15]];
        ours.then(|| Self::from_raw(u32::from_be_bytes([0, high, low, number]))).flatten()
    }

    /// Returns the port with this LID.
    pub(super) fn from_lid(lid: u16) -> Option<Self> {
        Self::from_raw(u32::from(lid))
    }
}

impl fmt::Debug for PortAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [high, low, number] = self.tail();
        write!(f, "10.{high}.{low}.{number}")
    }
}

/// Returns the name of the socket of a block of a network. Names of the abstract namespace end
/// with their sockets, without a trace.
pub(super) fn socket_name(fabric: &str, block: PortBlock) -> Vec<u8> {
    // FNV-1a: the name is not secret. It has to be short, and the same in all processes.
    let hash = fnv::of(fabric.as_bytes());
    format!("carrack-simulated-nic-{hash:016x}-{}", block.0).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_and_lids_lead_back_to_their_port() {
        for port in
            [PortAddress::new(PortBlock(0), 1), PortAddress::new(PortBlock(BLOCKS - 1), 255)]
        {
            for layer in [LinkLayer::Ethernet, LinkLayer::InfiniBand] {
                for (gid, _) in port.gids(layer) {
                    assert_eq!(PortAddress::from_gid(&gid), Some(port));
                }
            }
            assert_eq!(PortAddress::from_lid(port.lid()), Some(port));
            assert_eq!(PortAddress::from_raw(port.raw()), Some(port));
        }
    }

    #[test]
    fn what_is_no_port_of_the_network_is_none() {
        assert_eq!(PortAddress::from_gid(&[0; 16]), None);
        assert_eq!(PortAddress::from_lid(0), None);
        assert_eq!(PortAddress::from_lid(0xc001), None, "a LID of a group");
        assert_eq!(PortAddress::from_raw(u32::MAX), None);
        let elsewhere = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 0, 1];
        assert_eq!(PortAddress::from_gid(&elsewhere), None);
    }
}
