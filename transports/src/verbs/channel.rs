//! The TCP connection that carries the messages of [`wire`](super::wire), and stays open: its
//! hang-up is the peer's end.

use super::wire::{MAX_MESSAGE, Message};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Bytes that may wait to be written: a few messages. More means that the other side does not read.
const MOST_UNWRITTEN: usize = 8 * MAX_MESSAGE;

/// A machine that has crashed answers nothing: after about 40 seconds of silence the kernel takes
/// it for gone.
const IDLE: Duration = Duration::from_secs(10);
const BETWEEN: Duration = Duration::from_secs(5);
const PROBES: u32 = 6;

/// One end of it. Nothing here waits.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
    unread: Frames,
    unwritten: Vec<u8>,
}

/// What has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// Nothing so far.
    Nothing,
    /// A message.
    Message(Message),
    /// The other side has hung up; or could not be reached, for this reason.
    Closed(String),
    /// Something that no honest peer says.
    Wrong(String),
}

/// The messages of a stream, in whatever pieces it comes.
#[derive(Debug, Default)]
pub struct Frames {
    bytes: Vec<u8>,
}

impl Frames {
    /// Takes in what has come.
    pub fn extend(&mut self, piece: &[u8]) {
        self.bytes.extend(piece);
    }

    /// The next message, if all of it has come; or what is wrong with it, after which the stream
    /// makes no sense any more.
    #[allow(
        clippy::should_implement_trait,
        reason = "there may be a next one after there was none"
    )]
    pub fn next(&mut self) -> Option<Result<Message, String>> {
        let (length, rest) = self.bytes.split_first_chunk::<2>()?;
        let length = usize::from(u16::from_le_bytes(*length));
        if length > MAX_MESSAGE {
            return Some(Err(format!("a message of {length} bytes: it is no rank of Carrack's")));
        }
        let message = Message::decode(rest.get(..length)?);
        self.bytes.drain(..2 + length);
        Some(message)
    }
}

impl Channel {
    /// Begins to dial. Whether somebody is there will be told by [`receive`](Self::receive).
    ///
    /// # Errors
    /// This process has no descriptor left, or the address cannot be dialled at all.
    pub fn dial(to: SocketAddr) -> io::Result<Self> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        match rustix::net::connect(&socket, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        Self::over(socket.into())
    }

    /// One that has called.
    ///
    /// # Errors
    /// The kernel's.
    pub fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, IDLE)?;
        sockopt::set_tcp_keepintvl(&stream, BETWEEN)?;
        sockopt::set_tcp_keepcnt(&stream, PROBES)?;
        // The same where something is on its way: then the kernel does not ask, and tries for a
        // quarter of an hour.
        let patience = IDLE + BETWEEN * PROBES;
        sockopt::set_tcp_user_timeout(
            &stream,
            u32::try_from(patience.as_millis()).unwrap_or(u32::MAX),
        )?;
        Ok(Self { stream, unread: Frames::default(), unwritten: Vec::new() })
    }

    /// Sends a message, now or as soon as there is room.
    ///
    /// # Errors
    /// The other side does not read, or is gone.
    pub fn send(&mut self, message: &Message) -> io::Result<()> {
        let bytes = message.encode();
        if self.unwritten.len() + bytes.len() > MOST_UNWRITTEN {
            return Err(io::Error::new(ErrorKind::WouldBlock, "it does not read what it is told"));
        }
        let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        self.unwritten.extend(len.to_le_bytes());
        self.unwritten.extend(bytes);
        self.flush()
    }

    /// Writes what has waited for room.
    ///
    /// # Errors
    /// The other side is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        while !self.unwritten.is_empty() {
            match self.stream.write(&self.unwritten) {
                Ok(written) => drop(self.unwritten.drain(..written)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Not connected yet: the epoll set tells when it is.
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) =>
                {
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes in the next message, if it is there.
    pub fn receive(&mut self) -> Received {
        if let Err(error) = self.flush() {
            return Received::Closed(error.to_string());
        }
        loop {
            match self.unread.next() {
                Some(Ok(message)) => return Received::Message(message),
                Some(Err(why)) => return Received::Wrong(why),
                None => {}
            }
            let mut bytes = [0; MAX_MESSAGE];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Received::Closed("it hung up".into()),
                Ok(read) => self.unread.extend(&bytes[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) =>
                {
                    return Received::Nothing;
                }
                Err(error) => return Received::Closed(error.to_string()),
            }
        }
    }

    /// Who is at the other end, for people.
    pub fn whom(&self) -> String {
        self.stream
            .peer_addr()
            .map_or_else(|_| "an unknown address".into(), |address| address.to_string())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Waits for calls, at that address or at all of this machine's.
///
/// # Errors
/// The kernel's.
pub fn listen(at: Option<SocketAddr>) -> io::Result<TcpListener> {
    let listener = match at {
        Some(address) => TcpListener::bind(address)?,
        // A socket for both families; where there is no IPv6, one for the other.
        None => TcpListener::bind((IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0))
            .or_else(|_| TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)))?,
    };
    // All ranks of a job may call at the same time; the standard library has 128 wait, the system
    // says what it grants.
    rustix::net::listen(&listener, 4096)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair() -> (Channel, Channel) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = Channel::dial(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        (caller, Channel::over(stream).unwrap())
    }

    fn wait(channel: &mut Channel) -> Received {
        loop {
            match channel.receive() {
                Received::Nothing => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    proptest! {
        #[test]
        fn a_stream_means_the_same_however_it_is_cut(
            kinds in proptest::collection::vec((0_u8..8, 0_usize..300), 0..8),
            cuts in proptest::collection::vec(1_usize..200, 0..20),
        ) {
            let mut stream = Vec::new();
            for (kind, len) in kinds {
                let bytes = match kind {
                    0 => Message::Ready.encode(),
                    1 => Message::Refusal("x".repeat(len)).encode(),
                    2 => Message::Challenge([7; 16]).encode(),
                    3 => vec![9; len],
                    _ => Message::Bye.encode(),
                };
                stream.extend(u16::try_from(bytes.len()).unwrap().to_le_bytes());
                stream.extend(bytes);
            }
            let upto = |frames: &mut Frames| {
                let mut all = Vec::new();
                while let Some(message) = frames.next() {
                    let wrong = message.is_err();
                    all.push(message);
                    if wrong {
                        break;
                    }
                }
                all
            };
            let (mut whole, mut cut, mut found) = (Frames::default(), Frames::default(), Vec::new());
            whole.extend(&stream);
            let mut rest = &stream[..];
            for at in cuts.into_iter().chain([usize::MAX]) {
                let (now, later) = rest.split_at(at.min(rest.len()));
                cut.extend(now);
                if found.last().is_none_or(Result::is_ok) {
                    found.extend(upto(&mut cut));
                }
                rest = later;
            }
            prop_assert_eq!(found, upto(&mut whole));
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order_and_then_the_end() {
        let (mut caller, mut called) = pair();
        caller.send(&Message::Ready).unwrap();
        caller.send(&Message::Refusal("no".into())).unwrap();
        assert_eq!(wait(&mut called), Received::Message(Message::Ready));
        assert_eq!(wait(&mut called), Received::Message(Message::Refusal("no".into())));
        assert_eq!(called.receive(), Received::Nothing);
        drop(caller);
        assert!(matches!(wait(&mut called), Received::Closed(_)));
    }

    #[test]
    fn a_message_may_come_byte_by_byte_and_a_long_one_is_refused() {
        let (mut caller, mut called) = pair();
        let bytes = Message::Bye.encode();
        let length = u16::try_from(bytes.len()).unwrap().to_le_bytes();
        for byte in length.iter().chain(&bytes) {
            assert_eq!(called.receive(), Received::Nothing);
            caller.stream.write_all(&[*byte]).unwrap();
        }
        assert_eq!(wait(&mut called), Received::Message(Message::Bye));
        caller.stream.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(matches!(wait(&mut called), Received::Wrong(why) if why.contains("no rank")));
    }

    #[test]
    fn whoever_does_not_read_is_not_written_to_for_ever() {
        let (mut caller, _called) = pair();
        let message = Message::Refusal("x".repeat(200));
        let error = (0..100_000).find_map(|_| caller.send(&message).err());
        assert!(error.is_some_and(|error| error.to_string().contains("does not read")));
    }

    #[test]
    fn a_port_where_nobody_listens_is_a_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        match Channel::dial(address) {
            Ok(mut caller) => {
                caller.send(&Message::Ready).ok();
                assert!(matches!(wait(&mut caller), Received::Closed(_)));
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionRefused),
        }
    }
}
