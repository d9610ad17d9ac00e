//! A TCP connection that carries frames, and notices when the other machine has died.

use super::frames::{Inbox, Outbox};
use super::greeting::{Carrier, Fault};
use super::{is_shortage, sockets};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Bytes that are read at a time.
const READ: usize = 16 << 10;

/// The bounds of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest frame in bytes.
    pub longest: usize,
    /// Bytes that may wait to be written. More means that the other side does not read.
    pub unwritten: usize,
    /// Time after which the kernel takes a machine for dead that answers nothing.
    pub silence: Duration,
}

/// One end of a connection. None of its calls waits.
#[derive(Debug)]
pub struct TcpChannel {
    stream: TcpStream,
    limits: Limits,
    inbox: Inbox,
    outbox: Outbox,
}

impl TcpChannel {
    /// Begins to dial. [`Carrier::hear`] tells of a listener that is not there.
    ///
    /// # Errors
    /// This process has no descriptor left, or the address cannot be dialled at all.
    pub fn dial(to: SocketAddr, limits: Limits) -> io::Result<Self> {
        Self::over(sockets::dial(to, |_| Ok(()))?, limits)
    }

    /// Wraps the end of a connection that was accepted or made elsewhere.
    ///
    /// # Errors
    /// The kernel's.
    pub fn over(stream: TcpStream, limits: Limits) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        sockets::keep_alive(&stream, limits.silence)?;
        // The same where something is on its way: then the kernel does not ask, and tries for a
        // quarter of an hour.
        let silence = u32::try_from(limits.silence.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(&stream, silence)?;
        let (inbox, outbox) = (Inbox::new(limits.longest), Outbox::default());
        Ok(Self { stream, limits, inbox, outbox })
    }

    /// Changes the bounds, for what follows a greeting.
    pub fn set_limits(&mut self, limits: Limits) {
        self.inbox.allow(limits.longest);
        self.limits = limits;
    }

    /// Writes what has waited for room.
    ///
    /// # Errors
    /// The other side is gone.
    pub fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(&mut self.stream)
    }

    /// Returns the number of bytes that wait to be written.
    pub fn unwritten(&self) -> usize {
        self.outbox.len()
    }

    /// Returns `true` once the other side has taken the call.
    ///
    /// # Errors
    /// No process listens there, or the address is out of reach.
    pub fn is_connected(&self) -> io::Result<bool> {
        sockopt::socket_error(&self.stream)??;
        Ok(self.peer().is_some())
    }

    /// Returns `true` if the socket is connected to itself: the kernel chose the dialled port for
    /// this end, too.
    pub fn is_to_itself(&self) -> bool {
        self.peer().is_some() && self.peer() == self.stream.local_addr().ok()
    }

    /// Returns the address of the other end.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

    /// Returns the socket, when the frames have ended and other bytes follow. With it come the
    /// bytes that have arrived.
    pub fn into_stream(self) -> (TcpStream, Vec<u8>) {
        (self.stream, self.inbox.into_rest())
    }

    /// Returns the address of the other end as text.
    pub fn peer_name(&self) -> String {
        self.peer().map_or_else(|| "an unknown address".into(), |address| address.to_string())
    }

    fn read(&mut self) -> Result<Option<Vec<u8>>, Fault> {
        let mut piece = [0; READ];
        loop {
            match self.inbox.take() {
                Ok(Some(message)) => return Ok(Some(message)),
                Ok(None) => {}
                Err(why) => return Err(Fault::Wrong(why.to_string())),
            }
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(Fault::Gone("it hung up".into())),
                Ok(read) => self.inbox.extend(&piece[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) =>
                {
                    return Ok(None);
                }
                Err(error) => return Err(gone(&error)),
            }
        }
    }
}

impl Carrier for TcpChannel {
    fn say(&mut self, message: &[u8]) -> Result<(), Fault> {
        if self.outbox.len() + message.len() > self.limits.unwritten {
            return Err(Fault::Gone("it does not read what it is told".into()));
        }
        self.outbox.push(message);
        self.flush().map_err(|error| gone(&error))
    }

    fn hear(&mut self, longest: usize) -> Result<Option<Vec<u8>>, Fault> {
        // What has come is taken in first: it may say why the other side reads no more.
        let flushed = self.flush();
        match self.read()? {
            Some(message) if message.len() > longest => {
                Err(Fault::Wrong(format!("a message of {} bytes", message.len())))
            }
            Some(message) => Ok(Some(message)),
            None => flushed.map(|()| None).map_err(|error| gone(&error)),
        }
    }
}

fn gone(error: &io::Error) -> Fault {
    match Errno::from_io_error(error) {
        Some(errno) if is_shortage(errno) => Fault::Short(errno),
        _ => Fault::Gone(error.to_string()),
    }
}

impl AsFd for TcpChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::super::greeting::{Failure, Greeting, Progress};
    use super::super::header::Protocol;
    use super::super::proof::{Claim, Key, Role, Unproven};
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    const LIMITS: Limits =
        Limits { longest: 300, unwritten: 2400, silence: Duration::from_secs(40) };
    const PROTOCOL: Protocol = Protocol { tag: *b"test", version: 1, longest: 256 };

    fn pair() -> (TcpChannel, TcpChannel) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpChannel::dial(listener.local_addr().unwrap(), LIMITS).unwrap();
        let (stream, _) = listener.accept().unwrap();
        (caller, TcpChannel::over(stream, LIMITS).unwrap())
    }

    fn wait(channel: &mut TcpChannel) -> Result<Vec<u8>, Fault> {
        loop {
            match channel.hear(300) {
                Ok(None) => std::thread::yield_now(),
                other => return other.map(Option::unwrap_or_default),
            }
        }
    }

    #[test]
    fn messages_arrive_whole_and_in_order_and_then_the_end() {
        let (mut caller, mut called) = pair();
        caller.say(b"one").unwrap();
        caller.say(b"").unwrap();
        caller.say(b"two").unwrap();
        for expected in [&b"one"[..], b"", b"two"] {
            assert_eq!(wait(&mut called).unwrap(), expected);
        }
        assert_eq!(called.hear(300), Ok(None));
        drop(caller);
        assert!(matches!(wait(&mut called), Err(Fault::Gone(_))));
    }

    #[test]
    fn a_message_may_come_byte_by_byte_and_a_long_one_is_refused() {
        let (mut caller, mut called) = pair();
        for byte in [&3_u32.to_le_bytes()[..], b"bye"].concat() {
            assert_eq!(called.hear(300), Ok(None));
            caller.stream.write_all(&[byte]).unwrap();
        }
        assert_eq!(wait(&mut called).unwrap(), b"bye");
        caller.stream.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(matches!(wait(&mut called), Err(Fault::Wrong(why)) if why.contains("no rank")));
    }

    #[test]
    fn a_peer_that_does_not_read_is_not_written_to_for_ever() {
        let (mut caller, _called) = pair();
        let error = (0..100_000).find_map(|_| caller.say(&[7; 200]).err());
        assert!(matches!(error, Some(Fault::Gone(why)) if why.contains("does not read")));
    }

    #[test]
    fn a_port_without_a_listener_is_a_reason() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        match TcpChannel::dial(address, LIMITS) {
            Ok(mut caller) => assert!(matches!(wait(&mut caller), Err(Fault::Gone(_)))),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionRefused),
        }
    }

    fn greeting(role: Role, secret: &[u8]) -> Greeting {
        Greeting::new(role, PROTOCOL, &Key::of(secret), Claim::default()).unwrap()
    }

    /// Goes on with a greeting to its end, and calls `meanwhile` between its steps.
    fn end(
        greeting: &mut Greeting,
        channel: &mut TcpChannel,
        mut meanwhile: impl FnMut(),
    ) -> Result<Claim, Failure> {
        loop {
            match greeting.advance(channel)? {
                Progress::Proven(claim) => return Ok(claim),
                _ => meanwhile(),
            }
        }
    }

    #[test]
    fn what_goes_over_the_socket_proves_the_secret_and_does_not_hold_it() {
        const SECRET: &[u8] = b"sixteen bytes...";
        let (mut caller, left) = pair();
        let (right, mut called) = pair();
        let (mut dialer, mut listener) =
            (greeting(Role::Dialer, SECRET), greeting(Role::Listener, SECRET));
        let mut overheard = Vec::<u8>::new();
        // Between the two sits one that hears all.
        let mut relay = || {
            for (mut from, mut to) in [(&left.stream, &right.stream), (&right.stream, &left.stream)]
            {
                let mut piece = [0; 7];
                while let Ok(some) = from.read(&mut piece)
                    && some > 0
                {
                    overheard.extend(&piece[..some]);
                    to.write_all(&piece[..some]).unwrap();
                }
            }
        };
        let is_proven = |progress| matches!(progress, Progress::Proven(_));
        while !is_proven(listener.advance(&mut called).unwrap()) {
            relay();
            assert!(!is_proven(dialer.advance(&mut caller).unwrap()), "before the listener");
        }
        while !is_proven(dialer.advance(&mut caller).unwrap()) {
            relay();
        }
        assert!(overheard.len() > 200, "{}", overheard.len());
        for part in SECRET.windows(4) {
            assert!(!overheard.windows(4).any(|heard| heard == part), "part of the secret");
        }
    }

    #[test]
    fn a_caller_with_another_secret_is_found_out_and_told() {
        let (mut caller, mut called) = pair();
        let (mut dialer, mut listener) =
            (greeting(Role::Dialer, b"one secret"), greeting(Role::Listener, b"another secret"));
        let why = end(&mut listener, &mut called, || {
            assert!(!matches!(dialer.advance(&mut caller), Ok(Progress::Proven(_))));
        });
        assert_eq!(why.unwrap_err(), Failure::Unproven(Unproven::Secret));
        called.say(&PROTOCOL.refusal("another job")).unwrap();
        drop(called);
        let why = end(&mut dialer, &mut caller, || {}).unwrap_err();
        assert_eq!(why, Failure::Unproven(Unproven::Refused("another job".into())));
    }

    #[test]
    fn a_listener_that_never_answers_does_not_hold_up_its_caller() {
        let (mut caller, called) = pair();
        let mut dialer = greeting(Role::Dialer, b"a secret");
        for _ in 0..1000 {
            assert!(matches!(dialer.advance(&mut caller), Ok(Progress::Waiting)));
        }
        drop(called);
        let end = end(&mut dialer, &mut caller, || {}).unwrap_err();
        assert!(matches!(end, Failure::Gone(_)), "{end}");
    }
}
