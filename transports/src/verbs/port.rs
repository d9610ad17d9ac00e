//! Choice of a port and of its GID, from the device's attributes, without a query.

use super::address::{Host, ip_of};
use super::sys::{GidEntry, GidKind};
use std::net::IpAddr;

/// A device and its port, as the user names them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The device.
    pub device: String,
    /// Port number; `None`: any active port.
    pub port: Option<u8>,
}

impl Wish {
    /// Parses `mlx5_0` or `mlx5_0:2`.
    ///
    /// # Errors
    /// A description of the mistake.
    pub fn read(text: &str) -> Result<Self, String> {
        let (device, port) = match text.split_once(':') {
            None => (text, None),
            Some((device, port)) => {
                let number = port.parse().ok().filter(|&port| port > 0);
                let port =
                    number.ok_or_else(|| format!("{port:?} is no port number; write DEVICE:1"))?;
                (device, Some(port))
            }
        };
        if device.is_empty() {
            return Err(format!("{text:?} names no device; write mlx5_0 or mlx5_0:1"));
        }
        Ok(Self { device: device.to_owned(), port })
    }
}

/// Returns the rank of a GID, the best first. RoCE version 2 is routed, version 1 is not. An IPv4
/// address, or a global one of IPv6, is good beyond the link.
fn rank(entry: &GidEntry) -> u32 {
    let scope = match Host::of(ip_of(entry.gid)) {
        Host { ip: IpAddr::V4(_), .. } => 0,
        Host { is_link_local: false, .. } => 1,
        Host { is_link_local: true, .. } => 2,
    };
    let version = match entry.kind {
        GidKind::RoceV2 | GidKind::Infiniband => 0,
        GidKind::RoceV1 => 3,
    };
    version + scope
}

/// Returns the GID to use: the one that is asked for, else the best.
///
/// # Errors
/// There is no GID, or not the one asked for.
pub fn choose_gid(entries: &[GidEntry], wished: Option<u8>) -> Result<GidEntry, String> {
    let numbers =
        || entries.iter().map(|entry| entry.index.0.to_string()).collect::<Vec<_>>().join(", ");
    match wished {
        Some(index) => {
            entries.iter().find(|entry| entry.index.0 == index).copied().ok_or_else(|| {
                format!(
                    "it has no GID of index {index}, but of {}: see CARRACK_VERBS_GID",
                    numbers()
                )
            })
        }
        None => entries.iter().min_by_key(|entry| (rank(entry), entry.index)).copied().ok_or_else(
            || {
                "its port has no GID: has its network interface an address (`ip address`)?"
                    .to_owned()
            },
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sys::GidIndex;
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn entry(index: u8, kind: GidKind, ip: &str) -> GidEntry {
        let gid = match ip.parse().unwrap() {
            IpAddr::V4(ip) => Ipv4Addr::to_ipv6_mapped(&ip).octets(),
            IpAddr::V6(ip) => Ipv6Addr::octets(&ip),
        };
        GidEntry { index: GidIndex(index), gid, kind, ifindex: 2 }
    }

    #[test]
    fn the_gid_that_reaches_farthest_is_chosen() {
        let all = [
            entry(0, GidKind::RoceV1, "fe80::1"),
            entry(1, GidKind::RoceV2, "fe80::1"),
            entry(2, GidKind::RoceV1, "10.0.0.1"),
            entry(3, GidKind::RoceV2, "10.0.0.1"),
            entry(4, GidKind::RoceV2, "2001:db8::1"),
        ];
        let chosen = |entries: &[GidEntry]| choose_gid(entries, None).unwrap().index.0;
        assert_eq!(chosen(&all), 3);
        assert_eq!(chosen(&all[..2]), 1);
        assert_eq!(chosen(&[all[1], all[4]]), 4);
        assert_eq!(choose_gid(&all, Some(2)).unwrap().index.0, 2);
        assert_eq!(
            choose_gid(&all, Some(9)).unwrap_err(),
            "it has no GID of index 9, but of 0, 1, 2, 3, 4: see CARRACK_VERBS_GID"
        );
        assert!(choose_gid(&[], None).unwrap_err().contains("ip address"));
    }

    #[test]
    fn a_wish_names_a_device_and_perhaps_its_port() {
        assert_eq!(Wish::read("mlx5_0"), Ok(Wish { device: "mlx5_0".into(), port: None }));
        assert_eq!(Wish::read("rxe0:2"), Ok(Wish { device: "rxe0".into(), port: Some(2) }));
        for wrong in ["", ":1", "rxe0:", "rxe0:0", "rxe0:x", "rxe0:300"] {
            assert!(Wish::read(wrong).is_err(), "{wrong}");
        }
    }
}
