//! Published addresses of devices, and reachability between them.

use crate::contract::{AddressBlob, Cost, Reach};
use crate::net::interfaces::{self, octets};
use crate::net::key::DeviceKey;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"CRV1";

/// Maximum number of IP addresses that a device publishes.
const MOST: usize = 8;

/// Network of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fabric {
    /// InfiniBand: peers are found by LID within a subnet.
    InfiniBand,
    /// Ethernet (RoCE): peers are found by GID, which is an IP address in version 2.
    Ethernet,
    /// The simulated NIC of this machine.
    Simulated,
}

/// Address of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RdmaAddress {
    /// Unique name of the device.
    pub key: DeviceKey,
    /// Network of its port.
    pub fabric: Fabric,
    /// Id of the kernel's boot, which tells machines apart.
    pub boot: [u8; 16],
    /// GID of the port.
    pub gid: [u8; 16],
    /// TCP port on which it listens.
    pub tcp_port: u16,
    /// IP addresses of the device, the likeliest first.
    pub hosts: Vec<Host>,
}

/// An IP address, with a flag for addresses that are valid on one link only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host {
    /// The address.
    pub ip: IpAddr,
    /// Set for a link-local address. Its owner's interface is of no use to others: callers use
    /// their own, to which the GID belongs.
    pub is_link_local: bool,
}

impl Host {
    /// Wraps an address.
    pub fn of(ip: IpAddr) -> Self {
        let is_link_local = matches!(ip, IpAddr::V6(ip) if ip.segments()[0] & 0xffc0 == 0xfe80);
        Self { ip, is_link_local }
    }

    /// Returns the addresses of this machine, those that are valid beyond their link first.
    pub fn of_this_machine() -> Vec<Self> {
        let all = interfaces::all().unwrap_or_default();
        let others = all.into_iter().filter(|interface| !interface.address.is_loopback());
        let mut hosts: Vec<_> = others.map(|interface| Self::of(interface.address)).collect();
        hosts.sort_by_key(|host| (host.is_link_local, host.ip.is_ipv6()));
        hosts
    }

    /// Returns the socket address to dial. `interface` is the number of the caller's own.
    pub fn at(self, port: u16, interface: u32) -> SocketAddr {
        match self.ip {
            IpAddr::V6(ip) if self.is_link_local => {
                SocketAddrV6::new(ip, port, 0, interface).into()
            }
            ip => SocketAddr::new(ip, port),
        }
    }
}

/// Returns the IP address that a GID of RoCE version 2 stands for.
pub fn ip_of(gid: [u8; 16]) -> IpAddr {
    let ip = Ipv6Addr::from(gid);
    ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
}

/// First bytes of an encoded address; those of its IP addresses follow.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RdmaAddressHead {
    magic: [u8; 4],
    key: [u8; 16],
    fabric: u8,
    boot: [u8; 16],
    gid: [u8; 16],
    port: U16,
}

impl RdmaAddress {
    /// Encodes the address for peers.
    pub fn encode(&self) -> AddressBlob {
        let fabric = match self.fabric {
            Fabric::InfiniBand => 1,
            Fabric::Ethernet => 2,
            Fabric::Simulated => 3,
        };
        let (key, boot, gid, port) = (self.key.0, self.boot, self.gid, self.tcp_port.into());
        let head = RdmaAddressHead { magic: MAGIC, key, fabric, boot, gid, port };
        let hosts: Vec<_> = self.hosts.iter().take(MOST).map(|host| octets(host.ip)).collect();
        AddressBlob([head.as_bytes(), hosts.as_flattened()].concat())
    }

    /// Decodes an address. Returns `None` if it is malformed.
    pub fn decode(blob: &AddressBlob) -> Option<Self> {
        let (head, rest) = RdmaAddressHead::ref_from_prefix(&blob.0).ok()?;
        let hosts = <[[u8; 16]]>::ref_from_bytes(rest).ok()?;
        if head.magic != MAGIC || hosts.is_empty() || hosts.len() > MOST {
            return None;
        }
        let fabric = match head.fabric {
            1 => Fabric::InfiniBand,
            2 => Fabric::Ethernet,
            3 => Fabric::Simulated,
            _ => return None,
        };
        let hosts = hosts.iter().map(|&ip| Host::of(ip_of(ip))).collect();
        let (key, tcp_port) = (DeviceKey(head.key), head.port.get());
        Some(Self { key, fabric, boot: head.boot, gid: head.gid, tcp_port, hosts })
    }

    /// Returns the cost of reaching a device of that address from this one, or the reason why it
    /// is out of reach.
    pub fn reach(&self, to: &Self) -> Reach {
        let no = |why: String| Reach::No(why);
        if self.fabric != to.fabric {
            return no(format!("it is on {:?}, this rank on {:?}", to.fabric, self.fabric));
        }
        match self.fabric {
            Fabric::Simulated if self.boot != to.boot => {
                return no("the NIC is simulated, and the peer is on another machine".into());
            }
            Fabric::InfiniBand if self.gid[..8] != to.gid[..8] => {
                return no(format!(
                    "its InfiniBand subnet is {}, this rank's {}",
                    Ipv6Addr::from(to.gid),
                    Ipv6Addr::from(self.gid)
                ));
            }
            Fabric::Ethernet => {
                let (mine, theirs) = (ip_of(self.gid), ip_of(to.gid));
                if mine.is_ipv4() != theirs.is_ipv4()
                    || Host::of(mine).is_link_local != Host::of(theirs).is_link_local
                {
                    return no(format!(
                        "GID mismatch: its GID is {theirs}, this rank's {mine}; choose GIDs of one \
                        kind with CARRACK_VERBS_GID"
                    ));
                }
            }
            Fabric::Simulated | Fabric::InfiniBand => {}
        }
        Reach::Yes(Cost { latency_ns: 1500 })
    }
}

/// IPv4 address of this very machine.
pub const THIS_MACHINE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address() -> RdmaAddress {
        RdmaAddress {
            key: DeviceKey([7; 16]),
            fabric: Fabric::Ethernet,
            boot: [1; 16],
            gid: Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets(),
            tcp_port: 4711,
            hosts: vec![
                Host::of("10.0.0.1".parse().unwrap()),
                Host::of("fe80::1".parse().unwrap()),
            ],
        }
    }

    #[test]
    fn an_address_comes_back_as_it_was() {
        assert_eq!(RdmaAddress::decode(&address().encode()), Some(address()));
        assert_ne!(DeviceKey::fresh().unwrap(), DeviceKey::fresh().unwrap());
    }

    #[test]
    fn what_cannot_reach_each_other_says_why() {
        let here = address();
        assert!(matches!(here.reach(&address()), Reach::Yes(_)));
        let told = |other: RdmaAddress| match here.reach(&other) {
            Reach::No(why) => why,
            Reach::Yes(_) => panic!("reached"),
        };
        let by_ipv6 =
            RdmaAddress { gid: "2001:db8::1".parse::<Ipv6Addr>().unwrap().octets(), ..address() };
        assert!(told(by_ipv6).starts_with("GID mismatch"));
        assert!(
            told(RdmaAddress { fabric: Fabric::InfiniBand, ..address() }).contains("InfiniBand")
        );
        let subnet =
            |number| RdmaAddress { fabric: Fabric::InfiniBand, gid: [number; 16], ..address() };
        assert!(matches!(subnet(1).reach(&subnet(2)), Reach::No(_)));
        let simulated =
            |boot| RdmaAddress { fabric: Fabric::Simulated, boot: [boot; 16], ..address() };
        assert!(matches!(simulated(1).reach(&simulated(2)), Reach::No(_)));
        assert!(matches!(simulated(1).reach(&simulated(1)), Reach::Yes(_)));
    }

    #[test]
    fn addresses_of_one_link_are_dialled_through_the_callers_interface() {
        let host = Host::of("fe80::1".parse().unwrap());
        assert_eq!(host.at(9, 3).to_string(), "[fe80::1%3]:9");
        assert_eq!(Host::of("10.0.0.1".parse().unwrap()).at(9, 3).to_string(), "10.0.0.1:9");
    }

    proptest! {
        #[test]
        fn whatever_was_published_is_an_address_or_nothing(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let _ = RdmaAddress::decode(&AddressBlob(bytes.clone()));
            let mut like = address().encode().0;
            like.truncate(60);
            like.extend(bytes);
            let _ = RdmaAddress::decode(&AddressBlob(like));
        }
    }
}
