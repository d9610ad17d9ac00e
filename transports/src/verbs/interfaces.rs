//! IP addresses of this machine, for ports whose GID is none.

#![expect(unsafe_code, reason = "rustix has no getifaddrs")]

use super::address::Host;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns the addresses of all interfaces that are up, except the loopback. Addresses that are
/// valid beyond their link come first.
pub(super) fn addresses() -> Vec<Host> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the list that it allocates is freed below, and not used afterwards.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Vec::new();
    }
    let mut hosts = Vec::new();
    let mut next = first;
    // SAFETY: the list's entries are valid until it is freed, its last one's `ifa_next` is null.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let flags = libc::c_int::try_from(entry.ifa_flags).unwrap_or(0);
        if flags & libc::IFF_UP != 0 && flags & libc::IFF_LOOPBACK == 0 {
            hosts.extend(address(entry.ifa_addr));
        }
    }
    // SAFETY: allocated above, freed once.
    unsafe { libc::freeifaddrs(first) };
    hosts.sort_by_key(|host| (host.is_link_local, host.ip.is_ipv6()));
    hosts
}

fn address(of: *const libc::sockaddr) -> Option<Host> {
    // SAFETY: null, or an address whose family says how long it is.
    let family = i32::from(unsafe { of.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: of that family, so of that type; it may lie at any address.
            let ip = unsafe { of.cast::<libc::sockaddr_in>().read_unaligned() }.sin_addr.s_addr;
            Some(Host::of(IpAddr::V4(Ipv4Addr::from(ip.to_ne_bytes()))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let ip = unsafe { of.cast::<libc::sockaddr_in6>().read_unaligned() }.sin6_addr.s6_addr;
            Some(Host::of(IpAddr::V6(Ipv6Addr::from(ip))))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_addresses_of_this_machine_are_none_of_the_loopbacks() {
        let hosts = super::addresses();
        assert!(hosts.iter().all(|host| !host.ip.is_loopback()), "{hosts:?}");
        assert!(hosts.is_sorted_by_key(|host| host.is_link_local));
    }
}
