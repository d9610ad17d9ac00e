//! Addresses at which other machines reach this one.

use std::io::{self, ErrorKind};
use std::net::IpAddr;

/// Address of a network interface that is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Name, as `ip link` prints it.
    pub name: String,
    /// Address.
    pub address: IpAddr,
    /// Bits of the address that its subnet shares.
    pub prefix: u8,
    /// `true` if the address is valid on its own link only.
    pub is_link_local: bool,
}

impl Interface {
    /// Returns `true` if that address is in the interface's subnet.
    pub fn is_near(&self, other: IpAddr) -> bool {
        let shared = |bits: u32, xor: u128| xor >> (bits - u32::from(self.prefix).min(bits)) == 0;
        match (self.address, other) {
            (IpAddr::V4(one), IpAddr::V4(other)) => {
                shared(32, u128::from(one.to_bits() ^ other.to_bits()))
            }
            (IpAddr::V6(one), IpAddr::V6(other)) if self.prefix > 0 => {
                shared(128, one.to_bits() ^ other.to_bits())
            }
            _ => false,
        }
    }
}

/// Returns the addresses of all interfaces that are up.
///
/// # Errors
/// The kernel's.
pub fn all() -> io::Result<Vec<Interface>> {
    let up = if_addrs::get_if_addrs()?.into_iter().filter(if_addrs::Interface::is_oper_up);
    let interface = |at: if_addrs::Interface| Interface {
        prefix: match &at.addr {
            if_addrs::IfAddr::V4(address) => address.prefixlen,
            if_addrs::IfAddr::V6(address) => address.prefixlen,
        },
        address: at.ip(),
        is_link_local: at.is_link_local(),
        name: at.name,
    };
    Ok(up.map(interface).collect())
}

/// Returns the addresses that other machines can use, of the interfaces that `only` names,
/// comma-separated, or of all if it is `auto`. The loopback's count if `only` names it, or if there
/// are no others.
///
/// # Errors
/// The kernel's, or a name of `only` that no interface which is up has.
pub fn reachable(only: &str) -> io::Result<Vec<Interface>> {
    let names = if only == "auto" { "" } else { only };
    let wanted: Vec<_> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    choose(all()?.into_iter().filter(|at| !at.is_link_local).collect(), &wanted)
}

/// Sorts the addresses of another process in the order in which this machine tries them: those in a
/// subnet of its own first. An address that this machine has itself comes last: the process is on
/// this machine, or the address is a bridge's that several machines have.
pub fn sort_nearest_first(addresses: &mut [IpAddr], own: &[Interface]) {
    addresses.sort_by_key(|address| {
        if own.iter().any(|at| at.address == *address) {
            2
        } else if own.iter().any(|at| at.is_near(*address)) {
            0
        } else {
            1
        }
    });
}

fn choose(found: Vec<Interface>, wanted: &[&str]) -> io::Result<Vec<Interface>> {
    if let Some(missing) = wanted.iter().find(|name| !found.iter().any(|at| at.name == **name)) {
        let mut names: Vec<_> = found.iter().map(|at| at.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let why = format!("no interface {missing} that is up; there are {}", names.join(", "));
        return Err(io::Error::new(ErrorKind::NotFound, why));
    }
    if !wanted.is_empty() {
        return Ok(found.into_iter().filter(|at| wanted.contains(&at.name.as_str())).collect());
    }
    let (loopback, others): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|at| at.address.is_loopback());
    Ok(if others.is_empty() { loopback } else { others })
}

/// Returns an address as the 16 bytes of IPv6, mapped if it is one of IPv4.
pub fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, address: &str, prefix: u8) -> Interface {
        let address = address.parse().unwrap();
        Interface { name: name.into(), address, prefix, is_link_local: false }
    }

    #[test]
    fn loopback_is_chosen_by_name_or_where_there_is_nothing_else() {
        let (lo, eth) = (interface("lo", "127.0.0.1", 8), interface("eth0", "10.1.2.3", 24));
        let both = || vec![lo.clone(), eth.clone()];
        assert_eq!(choose(both(), &[]).unwrap(), std::slice::from_ref(&eth));
        assert_eq!(choose(vec![lo.clone()], &[]).unwrap(), std::slice::from_ref(&lo));
        assert_eq!(choose(both(), &["lo"]).unwrap(), std::slice::from_ref(&lo));
        let why = choose(both(), &["eth1"]).unwrap_err().to_string();
        assert!(why.contains("eth1") && why.contains("eth0, lo"), "{why}");
    }

    #[test]
    fn addresses_of_the_subnet_are_near() {
        for (address, prefix, other, near) in [
            ("10.1.2.3", 24, "10.1.2.9", true),
            ("10.1.2.3", 24, "10.1.3.3", false),
            ("10.1.2.3", 0, "192.168.0.1", true),
            ("10.1.2.3", 32, "10.1.2.3", true),
            ("fd00::1", 64, "fd00::99", true),
            ("fd00::1", 64, "fd00:1::1", false),
            ("fd00::1", 64, "10.1.2.3", false),
        ] {
            let at = interface("eth0", address, prefix);
            assert_eq!(at.is_near(other.parse().unwrap()), near, "{address}/{prefix} {other}");
        }
    }

    #[test]
    fn near_addresses_come_first_and_those_of_this_machine_last() {
        let own = [interface("eth0", "10.0.1.2", 24), interface("docker0", "172.17.0.1", 24)];
        let mut addresses =
            ["172.17.0.1", "192.168.0.1", "10.0.1.1"].map(|address| address.parse().unwrap());
        sort_nearest_first(&mut addresses, &own);
        let order = addresses.map(|address: IpAddr| address.to_string());
        assert_eq!(order, ["10.0.1.1", "192.168.0.1", "172.17.0.1"]);
    }

    #[test]
    fn this_machine_has_an_address() {
        assert!(!reachable("auto").unwrap().is_empty());
        assert_eq!(reachable("no-such").unwrap_err().kind(), ErrorKind::NotFound);
    }
}
