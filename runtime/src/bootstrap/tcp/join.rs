//! How a rank gets its place: it calls rank 0, and then the rank that it is told is above it.
//!
//! This happens before the runtime is there, on the thread that starts it, and waits: for rank 0 to
//! come, at most `CARRACK_BOOTSTRAP_TIMEOUT`.

#![forbid(unsafe_code)]

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::super::error::BootstrapError;
use super::super::job::JobId;
use super::greeting::{self, Answer, CHALLENGE, Call, Errand, Stranger, WELCOME, Welcome};
use super::key::{JobKey, Nonce};
use super::variables::Invitation;

/// What a rank says to rank 0 when it is linked to the rank above it.
pub(super) const SETTLED: u8 = b'.';

/// How long the other side may take for its few bytes; then it is tried again.
const GREETING: Duration = Duration::from_secs(10);

/// How long a connect may take; then the next address is tried.
const CONNECT: Duration = Duration::from_secs(5);

/// Pauses between two tries: from this to that, each twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Connections that the kernel keeps until they are accepted; it lowers that to
/// `net.core.somaxconn`.
const QUEUE: i32 = 4096;

/// A rank that has its place.
pub(super) struct Joined {
    pub(super) welcome: Welcome,
    pub(super) listener: TcpListener,
    pub(super) above: (TcpStream, u32, SocketAddr),
}

/// Where rank 0 listens: at all addresses of its machine, or where `MASTER_ADDR` is a loopback
/// address only there, so that no other machine is listened to.
pub(super) fn listen_as_zero(invitation: &Invitation) -> Result<TcpListener, BootstrapError> {
    let failed = |source| BootstrapError::Listen { address: invitation.to_string(), source };
    if !is_loopback(&invitation.host) {
        return listen_everywhere(invitation.port).map_err(failed);
    }
    let addresses =
        (invitation.host.as_str(), invitation.port).to_socket_addrs().map_err(failed)?;
    let mut last = ErrorKind::AddrNotAvailable.into();
    for address in addresses {
        match listen(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

/// Finds this rank its place in the tree, and links it to the rank above.
pub(super) fn join(invitation: &Invitation) -> Result<Joined, BootstrapError> {
    let deadline = Instant::now() + invitation.patience;
    let host = (invitation.host.as_str(), invitation.port);
    let call = Call {
        errand: Errand::Join,
        rank: invitation.rank,
        size: invitation.size,
        place: 0,
        port: 0,
        salt: [0; 16],
        nonce: [0; 16],
    };
    let mut listener = None;
    let zero = Search {
        may_come: true,
        who: "rank 0".into(),
        address: invitation.to_string(),
        invitation,
        deadline,
    };
    let (zero, welcome) = zero.reach(
        || host.to_socket_addrs().map(Iterator::collect),
        |address| {
            // Before the call, which tells the port.
            let own = if is_loopback(&invitation.host) {
                listen(SocketAddr::new(address.ip(), 0))
            } else {
                listen_everywhere(0)
            };
            let own = own
                .map_err(|source| BootstrapError::Listen { address: "any port".into(), source })?;
            let port = own.local_addr().map(|own| own.port());
            let port =
                port.map_err(|source| BootstrapError::Os { doing: "asking for a port", source })?;
            listener = Some(own);
            Ok(Call { port, ..call.clone() })
        },
    )?;
    let Some(listener) = listener else { unreachable!("nobody is welcomed who has not called") };
    let address = peer(&zero)?;
    let Some(seat) = welcome.above else {
        return Ok(Joined { welcome, listener, above: (zero, 0, address) });
    };
    // The machine of rank 0 sees its own ranks under a loopback address; others know it by the
    // address that they have reached it at.
    let ip = if seat.ip.is_loopback() { address.ip() } else { seat.ip };
    let seat_address = SocketAddr::new(ip, seat.port);
    let who = format!("rank {}, through which this rank reaches the others,", seat.rank);
    let search =
        Search { may_come: false, who, address: seat_address.to_string(), invitation, deadline };
    let attach = Call { errand: Errand::Attach, place: welcome.place, salt: welcome.salt, ..call };
    let (above, confirmed) = search.reach(|| Ok(vec![seat_address]), |_| Ok(attach.clone()))?;
    if confirmed.place != welcome.place || confirmed.salt != welcome.salt {
        return Err(search.not_admitted(
            "it belongs to another run of the job: end what is left of that".into(),
        ));
    }
    // Rank 0 needs to know: until now, this connection's end is this rank's.
    let told = (&zero).write_all(&[SETTLED]);
    told.map_err(|source| BootstrapError::Os { doing: "writing to rank 0", source })?;
    Ok(Joined { welcome, listener, above: (above, seat.rank, seat_address) })
}

/// Something that nobody has drawn before.
pub(super) fn nonce() -> Result<Nonce, BootstrapError> {
    JobId::random().map(|random| *random.as_bytes())
}

fn peer(stream: &TcpStream) -> Result<SocketAddr, BootstrapError> {
    stream
        .peer_addr()
        .map_err(|source| BootstrapError::Os { doing: "asking for rank 0's address", source })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    // Both families by one socket; without IPv6 in the kernel, the other.
    listen(SocketAddr::from(([0_u16; 8], port))).or_else(|error| match error.raw_os_error() {
        Some(errno) if errno == rustix::io::Errno::ADDRINUSE.raw_os_error() => Err(error),
        _ => listen(SocketAddr::from(([0_u8; 4], port))),
    })
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // What an earlier job has left behind in the kernel is no reason to fail.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, QUEUE)?;
    Ok(socket.into())
}

/// A rank that is looked for.
struct Search<'a> {
    /// Whether it may come yet. The rank above has come: where it listens no more, it is gone.
    may_come: bool,
    who: String,
    address: String,
    invitation: &'a Invitation,
    deadline: Instant,
}

/// Why one try came to nothing.
enum Failure {
    /// The next one may not.
    Again(String),
    /// Nobody listens there.
    Nobody(String),
    Never(BootstrapError),
}

impl Search<'_> {
    /// Tries all addresses in turn, again and again, until somebody answers the call.
    fn reach(
        &self,
        addresses: impl Fn() -> io::Result<Vec<SocketAddr>>,
        mut call: impl FnMut(SocketAddr) -> Result<Call, BootstrapError>,
    ) -> Result<(TcpStream, Welcome), BootstrapError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let mut why = String::from("its name has no address");
            match addresses() {
                Err(error) => why = format!("its name cannot be resolved: {error}"),
                Ok(addresses) => {
                    for address in addresses {
                        match self.attempt(address, &mut call) {
                            Ok(reached) => return Ok(reached),
                            Err(Failure::Never(error)) => return Err(error),
                            Err(Failure::Again(reason)) => why = format!("{address}: {reason}"),
                            Err(Failure::Nobody(reason)) if self.may_come => {
                                why = format!("{address}: {reason}")
                            }
                            Err(Failure::Nobody(reason)) => return Err(self.not_reached(reason)),
                        }
                    }
                }
            }
            tracing::debug!(rank = self.invitation.rank, address = %self.address, %why, "not there yet");
            if self.left() <= pause {
                return Err(self.not_reached(why));
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LAST_PAUSE);
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn not_reached(&self, why: String) -> BootstrapError {
        let (who, address) = (self.who.clone(), self.address.clone());
        let tried = self.invitation.patience.saturating_sub(self.left());
        let seconds = u64::try_from(tried.as_millis().div_ceil(1000)).unwrap_or(u64::MAX);
        BootstrapError::NotReached { who, address, seconds, why }
    }

    fn not_admitted(&self, why: String) -> BootstrapError {
        BootstrapError::NotAdmitted { address: self.address.clone(), why }
    }

    fn attempt(
        &self,
        address: SocketAddr,
        call: &mut impl FnMut(SocketAddr) -> Result<Call, BootstrapError>,
    ) -> Result<(TcpStream, Welcome), Failure> {
        let limit = CONNECT.min(self.left()).max(FIRST_PAUSE);
        let stream = TcpStream::connect_timeout(&address, limit).map_err(|error| {
            let why = format!("it cannot be connected to: {error}");
            if error.kind() == ErrorKind::ConnectionRefused {
                Failure::Nobody(why)
            } else {
                Failure::Again(why)
            }
        })?;
        if stream.local_addr().is_ok_and(|own| own == address) {
            // The kernel has chosen that very port for this end, and so has connected it to itself.
            // Held on to, it would keep rank 0 out.
            return Err(Failure::Again("nobody listens there".into()));
        }
        let call = call(address).map_err(Failure::Never)?;
        let welcome = self.greet(&stream, call)?;
        Ok((stream, welcome))
    }

    fn greet(&self, stream: &TcpStream, mut call: Call) -> Result<Welcome, Failure> {
        let mut reader = Timed { stream, deadline: Instant::now() + GREETING.min(self.left()) };
        let key: &JobKey = &self.invitation.key;
        let mut challenge = [0; CHALLENGE];
        reader.read(&mut challenge, |so_far| {
            greeting::check_beginning(so_far).map_err(|stranger| self.is_stranger(stranger))
        })?;
        let challenge =
            greeting::read_challenge(&challenge).map_err(|stranger| self.is_stranger(stranger))?;
        call.nonce = nonce().map_err(Failure::Never)?;
        let _ = stream.set_nodelay(true);
        let sent = (&*stream).write_all(&call.encode(key, &challenge));
        sent.map_err(|error| Failure::Again(format!("it hung up: {error}")))?;
        let mut first = [0];
        reader.read(&mut first, |_| Ok(()))?;
        match greeting::read_answer(first[0]).map_err(|stranger| self.is_stranger(stranger))? {
            Answer::Welcome => {
                let mut welcome = [0; WELCOME];
                reader.read(&mut welcome, |_| Ok(()))?;
                Welcome::decode(&welcome, key, &call.nonce)
                    .map_err(|stranger| self.is_stranger(stranger))
            }
            Answer::Refusal => {
                let mut len = [0; 2];
                reader.read(&mut len, |_| Ok(()))?;
                let mut words = vec![0; usize::from(u16::from_le_bytes(len))];
                reader.read(&mut words, |_| Ok(()))?;
                Err(Failure::Never(self.not_admitted(greeting::words(&words))))
            }
        }
    }

    fn is_stranger(&self, stranger: Stranger) -> Failure {
        Failure::Never(self.not_admitted(match stranger {
            Stranger::Secret => WRONG_SECRET.into(),
            Stranger::Version(theirs) => wrong_version(theirs),
            Stranger::Other | Stranger::Nonsense => {
                "what listens there is no rank of Carrack's; set CARRACK_PORT to a port that is free on the machine of \
                 rank 0, the same for all ranks"
                    .into()
            }
        }))
    }
}

/// Said by both sides.
pub(super) const WRONG_SECRET: &str = "its job secret is another one; set CARRACK_JOB_SECRET to the same text on all ranks, or on \
     none, and then MASTER_PORT and TORCHELASTIC_RUN_ID must be the same; or it is of another job: \
     give each its own MASTER_PORT or CARRACK_PORT";

/// Said by both sides.
pub(super) fn wrong_version(theirs: u32) -> String {
    let ours = greeting::VERSION;
    format!(
        "it speaks version {theirs} of the TCP bootstrap and this process version {ours}; build \
        all ranks from the same version of Carrack"
    )
}

/// Reads from a connection, up to a moment that more bytes do not put off.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Timed<'_> {
    /// Fills the buffer; looks at what there is so far each time that something comes.
    fn read(
        &mut self,
        buffer: &mut [u8],
        check: impl Fn(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < buffer.len() {
            let left = self
                .deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1));
            let waits = self.stream.set_read_timeout(Some(left));
            match waits.and_then(|()| (&*self.stream).read(&mut buffer[filled..])) {
                Ok(0) => return Err(Failure::Again("it hung up before it had answered".into())),
                Ok(len) => {
                    filled += len;
                    check(&buffer[..filled])?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    let why =
                        "something listens there, and does not answer: is it another program?";
                    return Err(Failure::Again(why.into()));
                }
                Err(error) => return Err(Failure::Again(format!("it hung up: {error}"))),
            }
        }
        Ok(())
    }
}
