//! Sockets of links: options, and transfers from and to memory that is no slice of this process's
//! alone.
//!
//! Each transfer is a system call (`docs/adr/0015-tcp-by-system-calls.md`).

#![expect(unsafe_code, reason = "memory that peers or other threads may write is read by address")]

use crate::mem::{MemMut, MemRef};
use crate::net::sockets;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// Pieces of memory that one call sends.
const MOST: usize = 64;

/// Bytes that one call sends, at most.
const BYTES: usize = 4 << 20;

/// Calls that take unread bytes off a connection before it is closed: some megabytes.
const DRAIN: usize = 4096;

/// Pieces of host memory, collected for one call.
pub(super) struct GatherList<'a> {
    pieces: [MaybeUninit<libc::iovec>; MOST],
    count: usize,
    bytes: usize,
    memory: std::marker::PhantomData<MemRef<'a>>,
}

impl<'a> GatherList<'a> {
    pub(super) fn new() -> Self {
        let (pieces, memory) = ([MaybeUninit::uninit(); MOST], std::marker::PhantomData);
        Self { pieces, count: 0, bytes: 0, memory }
    }

    /// Adds a piece. Returns `true` while there is room for more.
    pub(super) fn add(&mut self, piece: MemRef<'a>) -> bool {
        debug_assert!(piece.place().is_host(), "only host memory is put into a link's bytes");
        let len = piece.len().min(BYTES - self.bytes);
        let base = piece.as_ptr().cast_mut().cast();
        self.pieces[self.count].write(libc::iovec { iov_base: base, iov_len: len });
        self.count += 1;
        self.bytes += len;
        self.count < MOST && self.bytes < BYTES
    }

    /// Sends what the socket has room for. Returns the number of bytes.
    pub(super) fn send(&mut self, socket: &TcpStream) -> Result<usize, Errno> {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        if self.count == 1 {
            // SAFETY: the first piece is initialised.
            let libc::iovec { iov_base, iov_len } = unsafe { self.pieces[0].assume_init() };
            // SAFETY: it is borrowed as long as this is; the kernel reads it.
            return count(unsafe { libc::send(socket.as_raw_fd(), iov_base, iov_len, flags) });
        }
        // SAFETY: all zero is a message without name, control data and flags.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.pieces.as_mut_ptr().cast();
        message.msg_iovlen = self.count;
        // SAFETY: the first `count` pieces are initialised, and borrowed as long as this is; the
        // kernel reads them.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        count(sent)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Receives into host memory. Returns the number of bytes; 0: the other side sends no more.
pub(super) fn receive(socket: &TcpStream, to: &mut MemMut<'_>) -> Result<usize, Errno> {
    debug_assert!(to.place().is_host(), "windows are host memory");
    // SAFETY: the kernel writes at most `len` bytes of memory that is borrowed for writing.
    let received = unsafe {
        libc::recv(socket.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), libc::MSG_DONTWAIT)
    };
    count(received)
}

fn count(result: isize) -> Result<usize, Errno> {
    usize::try_from(result)
        .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// Begins to connect a socket.
///
/// # Errors
/// The kernel's.
pub(super) fn dial(to: SocketAddr, congestion: &str) -> Result<TcpStream, Errno> {
    sockets::dial(to, |socket| match congestion {
        "" => Ok(()),
        // Set before the connection is made: the pacing of some stays on if it is set later.
        name => sockopt::set_tcp_congestion(socket, name),
    })
}

/// Listens at a port of the range `A-B`, or at one that the kernel chooses.
///
/// # Errors
/// The kernel's, or what is wrong with the range.
pub(super) fn listen(ports: &str, congestion: &str) -> io::Result<TcpListener> {
    let mut last = io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("CARRACK_PORTS is {ports:?}, no range such as 40000-40999 (lower first)"),
    );
    for port in range(ports).ok_or_else(|| io::Error::new(last.kind(), last.to_string()))? {
        match sockets::listen_everywhere(port, true) {
            Ok(listener) => {
                if !congestion.is_empty() {
                    sockopt::set_tcp_congestion(&listener, congestion).map_err(|error| {
                        io::Error::other(format!(
                            "CARRACK_TCP_CONGESTION is {congestion:?}: {error}; \
                             net.ipv4.tcp_allowed_congestion_control lists what this machine allows"
                        ))
                    })?;
                }
                return Ok(listener);
            }
            Err(error) => last = error,
        }
    }
    Err(io::Error::new(last.kind(), format!("no port of {ports} is free: {last}")))
}

pub(super) fn range(ports: &str) -> Option<std::ops::RangeInclusive<u16>> {
    if ports.is_empty() {
        return Some(0..=0);
    }
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (0 < first && first <= last).then_some(first..=last)
}

/// Drops what has come. A sender that goes on for ever is not waited for.
///
/// # Errors
/// The connection has ended.
pub(super) fn drain(socket: &TcpStream) -> Result<(), Errno> {
    let mut bytes = [0; 4096];
    let mut has_read = false;
    for _ in 0..DRAIN {
        match receive(socket, &mut MemMut::host(&mut bytes)) {
            Ok(1..) => has_read = true,
            Ok(_) => return Err(Errno::PIPE),
            Err(Errno::AGAIN | Errno::INTR) => break,
            Err(error) => return Err(error),
        }
    }
    if has_read {
        acknowledge_now(socket);
    }
    Ok(())
}

/// Has the kernel acknowledge what was read. It may delay that, and a peer that closes waits.
pub(super) fn acknowledge_now(socket: &TcpStream) {
    let _ = sockopt::set_tcp_quickack(socket, true);
}

/// Returns the bytes that were sent and that the peer's kernel does not have yet.
pub(super) fn in_flight(socket: &TcpStream) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request stores an integer there.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Returns the time since the peer's kernel last sent something, an acknowledgement or bytes.
/// A connection that has broken knows it too.
pub(super) fn since_answer(socket: &impl AsFd) -> Option<Duration> {
    let info = info(socket)?;
    let silent = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
    Some(Duration::from_millis(silent.into()))
}

/// Returns the time since the peer's kernel last answered, if this one has sent bytes again since
/// and has got no answer to them. `None`: it owes none.
pub(super) fn stalled(socket: &impl AsFd) -> Option<Duration> {
    let info = info(socket)?;
    // Bytes that could not leave this machine are probed for instead. An answer ends the count.
    let repeated = info.tcpi_retransmits > 0 || info.tcpi_probes > 1;
    if repeated { since_answer(socket) } else { None }
}

fn info(socket: &impl AsFd) -> Option<libc::tcp_info> {
    // SAFETY: all zero is a value of the structure, which has only integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = libc::socklen_t::try_from(size_of_val(&info)).ok()?;
    // SAFETY: the kernel writes at most `len` bytes of the structure.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(info)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_ports_is_two_numbers_or_one() {
        for (text, expected) in [
            ("", Some(0..=0)),
            ("40000-40999", Some(40000..=40999)),
            ("7", Some(7..=7)),
            ("9-7", None),
            ("0-7", None),
            ("7-65536", None),
            ("all", None),
        ] {
            assert_eq!(range(text), expected, "{text}");
        }
    }

    #[test]
    fn a_connection_at_rest_has_been_answered_and_stalls_on_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(since_answer(&socket).unwrap() < Duration::from_secs(60));
        assert_eq!(stalled(&socket), None);
    }

    #[test]
    fn the_next_port_of_the_range_is_taken_where_one_is_in_use() {
        let first = listen("", "").unwrap().local_addr().unwrap().port();
        let (first, last) = (first.min(65_000), first.min(65_000) + 20);
        let ports = format!("{first}-{last}");
        let one = listen(&ports, "").unwrap();
        let other = listen(&ports, "").unwrap();
        assert_ne!(one.local_addr().unwrap(), other.local_addr().unwrap());
        let taken = one.local_addr().unwrap().port();
        let why = listen(&taken.to_string(), "").unwrap_err().to_string();
        assert!(why.contains(&format!("no port of {taken} is free")), "{why}");
        assert!(listen("5-3", "").unwrap_err().to_string().contains("(lower first)"));
        assert!(listen("many", "").unwrap_err().to_string().contains("CARRACK_PORTS"));
        let why = listen("", "none such").unwrap_err().to_string();
        assert!(why.contains("CARRACK_TCP_CONGESTION"), "{why}");
    }
}
