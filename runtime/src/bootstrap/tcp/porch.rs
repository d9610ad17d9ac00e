//! Those who have connected, and have not said yet who they are.
//!
//! Nobody here holds anybody else up: each has a buffer of its own and a few seconds, and when
//! there are too many the oldest has to go. An honest rank to which that happens calls again.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::super::error::Departure;
use super::greeting::{self, CALL, Call, Errand, Stranger, Welcome};
use super::join::{SETTLED, WRONG_SECRET, nonce, wrong_version};
use super::key::{JobKey, Nonce};
use super::register::Register;
use super::state::State;

/// How many may stand here at a time.
const MOST: usize = 256;

/// How long each may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long nobody is let in when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Who decides on those who come.
#[derive(Debug)]
pub(super) enum Host {
    /// Rank 0, which gives places out until this moment.
    Zero(Register, Instant),
    /// Another, which lets in who has a place below it.
    Other {
        /// The job's salt.
        salt: Nonce,
        /// The number of ranks.
        size: u32,
    },
}

pub(super) struct Porch {
    key: JobKey,
    host: Host,
    listener: Option<TcpListener>,
    callers: VecDeque<Caller>,
    shut_until: Option<Instant>,
}

pub(super) struct Caller {
    stream: TcpStream,
    from: SocketAddr,
    nonce: Nonce,
    bytes: Vec<u8>,
    deadline: Instant,
    /// A rank that has its place, and goes to whom is above it.
    settles: Option<u32>,
}

impl Porch {
    pub(super) fn new(key: JobKey, host: Host, listener: TcpListener) -> Self {
        Self { key, host, listener: Some(listener), callers: VecDeque::new(), shut_until: None }
    }

    /// What to sleep on: the listener, unless it is shut, and each caller, in order.
    pub(super) fn listener(&self) -> Option<&TcpListener> {
        self.listener.as_ref().filter(|_| self.shut_until.is_none())
    }

    pub(super) fn callers(&self) -> impl Iterator<Item = &TcpStream> {
        self.callers.iter().map(|caller| &caller.stream)
    }

    /// The next moment at which something is over.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let callers = self.callers.iter().filter(|caller| caller.settles.is_none());
        let register = match &self.host {
            Host::Zero(register, deadline) if !register.is_complete() => Some(*deadline),
            _ => None,
        };
        callers.map(|caller| caller.deadline).chain(register).chain(self.shut_until).min()
    }

    /// Ends what is over.
    pub(super) fn expire(&mut self, now: Instant, state: &mut State) {
        self.callers.retain(|caller| caller.settles.is_some() || caller.deadline > now);
        self.shut_until = self.shut_until.filter(|until| *until > now);
        match &mut self.host {
            Host::Zero(register, deadline) if !register.is_complete() && *deadline <= now => {
                if let Some(rank) = register.close() {
                    tracing::warn!(
                        rank,
                        "a rank has not come in time; CARRACK_BOOTSTRAP_TIMEOUT says how long it \
                        has"
                    );
                    state.missing(rank, Departure::NeverCame);
                }
            }
            _ => {}
        }
        // Nobody else is to come here; rank 0 goes on telling those who come too late.
        if matches!(self.host, Host::Other { .. }) && state.is_full() {
            self.listener = None;
            self.callers.clear();
        }
    }

    /// Lets in who waits outside.
    pub(super) fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        loop {
            let (stream, from) = match listener.accept() {
                Ok(caller) => caller,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) =>
                {
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, "no connection can be accepted; see `ulimit -n`");
                    self.shut_until = Some(Instant::now() + PAUSE);
                    return;
                }
            };
            let greeted = nonce().ok().filter(|nonce| {
                stream.set_nonblocking(true).is_ok()
                    && (&stream).write_all(&greeting::challenge(nonce)).is_ok()
            });
            let Some(nonce) = greeted else { continue };
            let strangers = self.callers.iter().filter(|caller| caller.settles.is_none()).count();
            if strangers >= MOST
                && let Some(oldest) =
                    self.callers.iter().position(|caller| caller.settles.is_none())
            {
                self.callers.remove(oldest);
            }
            let deadline = Instant::now() + PATIENCE;
            let (bytes, settles) = (Vec::with_capacity(CALL), None);
            self.callers.push_back(Caller { stream, from, nonce, bytes, deadline, settles });
        }
    }

    /// Listens to those of the callers who have something to say: these numbers, in ascending
    /// order.
    pub(super) fn hear(&mut self, speaking: &[usize], state: &mut State) {
        for &at in speaking.iter().rev() {
            let Some(caller) = self.callers.remove(at) else { continue };
            if let Some(caller) = self.serve(caller, state) {
                self.callers.insert(at, caller);
            }
        }
    }

    /// What a caller has said so far. The caller, if it stays here.
    fn serve(&mut self, mut caller: Caller, state: &mut State) -> Option<Caller> {
        if let Some(rank) = caller.settles {
            let mut said = [0];
            return match (&caller.stream).read(&mut said) {
                Err(error) if is_for_later(&error) => Some(caller),
                Ok(1) if said[0] == SETTLED => None,
                _ => {
                    state.missing(rank, Departure::Disconnected);
                    None
                }
            };
        }
        let mut piece = [0; CALL];
        match (&caller.stream).read(&mut piece[..CALL - caller.bytes.len()]) {
            Ok(0) => return None,
            Ok(len) => caller.bytes.extend(&piece[..len]),
            Err(error) if is_for_later(&error) => return Some(caller),
            Err(_) => return None,
        }
        let call = match greeting::check_beginning(&caller.bytes) {
            Err(stranger) => Err(stranger),
            Ok(()) => match caller.bytes.first_chunk() {
                None => return Some(caller),
                Some(bytes) => Call::decode(bytes, &self.key, &caller.nonce),
            },
        };
        match call {
            Ok(call) => self.admit(caller, &call, state),
            Err(stranger) => {
                turn_away(&caller, stranger);
                None
            }
        }
    }

    fn admit(&mut self, mut caller: Caller, call: &Call, state: &mut State) -> Option<Caller> {
        let admitted = match &mut self.host {
            Host::Zero(register, _) => register.admit(call, caller.from),
            Host::Other { salt, size } => {
                if call.errand != Errand::Attach {
                    Err("this is not rank 0; MASTER_ADDR and CARRACK_PORT must lead to that".into())
                } else if call.salt != *salt
                    || call.size != *size
                    || state.vacancy(call.place).is_none()
                {
                    Err("this rank has no such place below it: end what is left of earlier jobs, \
                        and start again"
                        .into())
                } else {
                    Ok(Welcome { place: call.place, salt: *salt, above: None })
                }
            }
        };
        let welcome = match admitted {
            Ok(welcome) => welcome,
            Err(why) => {
                tracing::warn!(from = %caller.from, rank = call.rank, why, "a rank was not let in");
                let _ = (&caller.stream).write_all(&greeting::refusal(&why));
                return None;
            }
        };
        if (&caller.stream).write_all(&welcome.encode(&self.key, &call.nonce)).is_err() {
            state.missing(call.rank, Departure::Disconnected);
            return None;
        }
        if welcome.above.is_some() {
            caller.settles = Some(call.rank);
            return Some(caller);
        }
        state.attach(welcome.place, call.rank, caller.stream, caller.from);
        None
    }
}

fn is_for_later(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn turn_away(caller: &Caller, stranger: Stranger) {
    let from = caller.from;
    let why = match stranger {
        Stranger::Secret => WRONG_SECRET.to_owned(),
        Stranger::Version(theirs) => wrong_version(theirs),
        Stranger::Other | Stranger::Nonsense => {
            tracing::info!(%from, "somebody who is no rank of Carrack's has connected to the \
                bootstrap's port");
            return;
        }
    };
    tracing::warn!(%from, "a process was not let in: {why}");
    let _ = (&caller.stream).write_all(&greeting::refusal(&why));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_there_are_too_many_the_oldest_have_to_go() {
        const EXTRA: usize = 3;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let host = Host::Other { salt: [0; 16], size: 20 };
        let mut porch = Porch::new(JobKey::without_secret(1, None), host, listener);
        let mut strangers = Vec::new();
        while strangers.len() < MOST + EXTRA {
            strangers.push(TcpStream::connect(address).unwrap());
            porch.accept();
        }
        let here: Vec<_> = porch.callers.iter().map(|caller| caller.from).collect();
        let newest: Vec<_> =
            strangers[EXTRA..].iter().map(|stranger| stranger.local_addr().unwrap()).collect();
        assert_eq!(here, newest);
    }
}
