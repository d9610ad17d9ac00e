//! TCP sockets: none of these calls waits.

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, ipproto, sockopt};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Connections that the kernel keeps until they are accepted: all ranks of a job may connect at
/// the same time. The kernel lowers that to `net.core.somaxconn`.
const QUEUE: i32 = 4096;

/// Shortest time after which [`keep_alive`] ends a connection. The kernel counts whole seconds.
pub const SHORTEST: Duration = Duration::from_secs(2);

fn of_family(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
}

/// Begins to connect a socket, which `prepare` gets before.
///
/// # Errors
/// The kernel's.
pub fn dial(
    to: SocketAddr,
    prepare: impl FnOnce(&OwnedFd) -> rustix::io::Result<()>,
) -> rustix::io::Result<TcpStream> {
    let socket = of_family(to)?;
    prepare(&socket)?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error),
    }
}

/// Listens at an address. `reuses`: connections of an earlier listener that the kernel still holds
/// do not make this fail.
///
/// # Errors
/// The kernel's.
pub fn listen(at: SocketAddr, reuses: bool) -> io::Result<TcpListener> {
    let socket = of_family(at)?;
    sockopt::set_socket_reuseaddr(&socket, reuses)?;
    if at.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &at)?;
    rustix::net::listen(&socket, QUEUE)?;
    Ok(socket.into())
}

/// Listens at a port of all of this machine's addresses; 0: at one that the kernel chooses.
///
/// # Errors
/// The kernel's.
pub fn listen_everywhere(port: u16, reuses: bool) -> io::Result<TcpListener> {
    // A socket for both families; where there is no IPv6, one for the other.
    let both = listen((Ipv6Addr::UNSPECIFIED, port).into(), reuses);
    both.or_else(|error| match Errno::from_io_error(&error) {
        Some(Errno::ADDRINUSE) => Err(error),
        _ => listen((Ipv4Addr::UNSPECIFIED, port).into(), reuses),
    })
}

/// Closes a listener. Callers are refused from now on, also where a forked child has it too.
pub fn close(listener: Option<TcpListener>) {
    if let Some(listener) = listener {
        // It fails only for a socket that does not listen.
        let _ = rustix::net::shutdown(&listener, Shutdown::Both);
    }
}

/// Has the kernel ask a silent peer's kernel whether it is there. Without an answer the connection
/// ends after `limit`, or after [`SHORTEST`] where that is more. A peer that merely does not read
/// answers, and is not cut off.
///
/// # Errors
/// The kernel's.
pub fn keep_alive(socket: impl AsFd, limit: Duration) -> rustix::io::Result<()> {
    let limit = limit.as_secs();
    let (silence, pause) = ((limit / 2).max(1), (limit / 8).max(1));
    // With a limit of three seconds or more, one lost question does not end a connection.
    let questions = (limit.saturating_sub(silence) / pause).clamp(1, 4);
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, Duration::from_secs(silence))?;
    sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(pause))?;
    sockopt::set_tcp_keepcnt(&socket, u32::try_from(questions).unwrap_or(1))?;
    sockopt::set_tcp_user_timeout(&socket, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_peers_connection_ends_within_the_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for (millis, most) in [(500, 2), (2500, 2), (4000, 4), (15_000, 15), (60_000, 60)] {
            keep_alive(&socket, Duration::from_millis(millis)).unwrap();
            let questions = sockopt::tcp_keepcnt(&socket).unwrap();
            let pause = sockopt::tcp_keepintvl(&socket).unwrap();
            let ends = sockopt::tcp_keepidle(&socket).unwrap() + questions * pause;
            assert!(ends <= Duration::from_secs(most), "{millis} ms: {ends:?}");
            assert!(questions > u32::from(millis >= 3000), "{millis} ms: {questions} questions");
        }
    }
}
