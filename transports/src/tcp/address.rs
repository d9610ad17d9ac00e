//! Published addresses of devices.

use crate::contract::AddressBlob;
use crate::net::interfaces::{self, Interface};
use crate::net::key::DeviceKey;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

const MAGIC: [u8; 4] = *b"CRT1";

/// Largest number of IP addresses that a device publishes.
const MOST: usize = 8;

/// Address of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address {
    /// Unique name of the device.
    pub key: DeviceKey,
    /// Id of the kernel's boot, which tells machines apart.
    pub boot: [u8; 16],
    /// Port at which it listens.
    pub port: u16,
    /// Its IP addresses.
    pub hosts: Vec<IpAddr>,
}

impl Address {
    /// Encodes the address for peers.
    pub fn encode(&self) -> AddressBlob {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.key.0);
        bytes.extend(self.boot);
        bytes.extend(self.port.to_le_bytes());
        for host in self.hosts.iter().take(MOST) {
            bytes.extend(match host {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            });
        }
        AddressBlob(bytes)
    }

    /// Decodes an address. Returns `None` if it is malformed.
    pub fn decode(blob: &AddressBlob) -> Option<Self> {
        let (magic, rest) = blob.0.split_first_chunk::<4>()?;
        let (key, rest) = rest.split_first_chunk::<16>()?;
        let (boot, rest) = rest.split_first_chunk::<16>()?;
        let (port, rest) = rest.split_first_chunk::<2>()?;
        let (hosts, rest) = rest.as_chunks::<16>();
        if *magic != MAGIC || !rest.is_empty() || hosts.is_empty() || hosts.len() > MOST {
            return None;
        }
        let ip = |octets: &[u8; 16]| Ipv6Addr::from(*octets).to_canonical();
        let (port, hosts) = (u16::from_le_bytes(*port), hosts.iter().map(ip).collect());
        Some(Self { key: DeviceKey(*key), boot: *boot, port, hosts })
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

    fn address(hosts: &[&str]) -> Address {
        let hosts = hosts.iter().map(|ip| ip.parse().unwrap()).collect();
        Address { key: DeviceKey([1; 16]), boot: [2; 16], port: 4711, hosts }
    }

    #[test]
    fn an_address_comes_back_and_a_damaged_one_does_not() {
        let address = address(&["10.0.0.1", "fd00::7"]);
        let blob = address.encode();
        assert_eq!(Address::decode(&blob), Some(address));
        for len in 0..blob.0.len() {
            let cut = Address::decode(&AddressBlob(blob.0[..len].to_vec()));
            assert!(len == 54 || cut.is_none(), "{len} bytes");
        }
        assert_eq!(Address::decode(&AddressBlob(vec![0; 54])), None);
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
