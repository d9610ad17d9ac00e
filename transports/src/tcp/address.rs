//! Published addresses of devices.

use crate::contract::AddressBlob;
use crate::net::interfaces::{self, Interface, octets};
use crate::net::key::DeviceKey;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"CRT1";

/// Largest number of IP addresses that a device publishes.
const MOST: usize = 8;

/// Address of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TcpAddress {
    /// Unique name of the device.
    pub key: DeviceKey,
    /// Id of the kernel's boot, which tells machines apart.
    pub boot: [u8; 16],
    /// Port at which it listens.
    pub port: u16,
    /// IP addresses of the device.
    pub hosts: Vec<IpAddr>,
}

/// First bytes of an encoded address; those of its IP addresses follow.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct TcpAddressHead {
    magic: [u8; 4],
    key: [u8; 16],
    boot: [u8; 16],
    port: U16,
}

impl TcpAddress {
    /// Encodes the address for peers.
    pub fn encode(&self) -> AddressBlob {
        let head = TcpAddressHead {
            magic: MAGIC,
            key: self.key.0,
            boot: self.boot,
            port: self.port.into(),
        };
        let hosts: Vec<_> = self.hosts.iter().take(MOST).map(|host| octets(*host)).collect();
        AddressBlob([head.as_bytes(), hosts.as_flattened()].concat())
    }

    /// Decodes an address. Returns `None` if it is malformed.
    pub fn decode(blob: &AddressBlob) -> Option<Self> {
        let (head, rest) = TcpAddressHead::ref_from_prefix(&blob.0).ok()?;
        let hosts = <[[u8; 16]]>::ref_from_bytes(rest).ok()?;
        if head.magic != MAGIC || hosts.is_empty() || hosts.len() > MOST {
            return None;
        }
        let hosts = hosts.iter().map(|octets| Ipv6Addr::from(*octets).to_canonical()).collect();
        Some(Self { key: DeviceKey(head.key), boot: head.boot, port: head.port.get(), hosts })
    }

    /// Returns the addresses to dial, those in a subnet of this machine first. A loopback address
    /// is one only on the same machine.
    pub fn candidates(&self, boot: [u8; 16], own: &[Interface]) -> Vec<SocketAddr> {
        let usable = |ip: &&IpAddr| !ip.is_loopback() || self.boot == boot;
        let mut hosts: Vec<_> = self.hosts.iter().filter(usable).copied().collect();
        interfaces::sort_nearest_first(&mut hosts, own);
        hosts.into_iter().map(|ip| SocketAddr::new(ip, self.port)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(hosts: &[&str]) -> TcpAddress {
        let hosts = hosts.iter().map(|ip| ip.parse().unwrap()).collect();
        TcpAddress { key: DeviceKey([1; 16]), boot: [2; 16], port: 4711, hosts }
    }

    #[test]
    fn an_address_comes_back_and_a_damaged_one_does_not() {
        let address = address(&["10.0.0.1", "fd00::7"]);
        let blob = address.encode();
        assert_eq!(TcpAddress::decode(&blob), Some(address));
        for len in 0..blob.0.len() {
            let cut = TcpAddress::decode(&AddressBlob(blob.0[..len].to_vec()));
            assert!(len == 54 || cut.is_none(), "{len} bytes");
        }
        assert_eq!(TcpAddress::decode(&AddressBlob(vec![0; 54])), None);
    }

    #[test]
    fn the_nearest_address_is_dialled_first_and_loopback_only_on_the_same_machine() {
        let address = address(&["127.0.0.1", "192.168.0.1", "10.0.0.1"]);
        let own = "10.0.0.9".parse().unwrap();
        let own = Interface { name: "eth0".into(), address: own, prefix: 24, is_link_local: false };
        let dialled = |boot| {
            let all = address.candidates(boot, std::slice::from_ref(&own));
            all.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(dialled([3; 16]), ["10.0.0.1:4711", "192.168.0.1:4711"]);
        assert_eq!(dialled([2; 16]), ["10.0.0.1:4711", "127.0.0.1:4711", "192.168.0.1:4711"]);
    }
}
