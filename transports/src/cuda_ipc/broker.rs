//! File-descriptor broker: a Unix socket over which a process hands out the descriptors of its
//! memory. Many containers forbid to fetch a descriptor from another process (gpu.md, VMM rule 4).
//!
//! An importer is of the same user, and must know a secret from the memory's key. It names an
//! allocation by the inode of its ledger, and gets the descriptor or the answer that it is gone. A
//! thread of its own answers, and sleeps otherwise. Importers wait for the answer, so without that
//! thread two processes that import from each other would wait forever.

use super::exports::ExportedAllocation;
use crate::fork::Owner;
use crate::mem::MapError;
use crate::net::greeting::{Failure, Greeting, Progress};
use crate::net::header::{FIRST_OWN, Protocol};
use crate::net::is_shortage;
use crate::net::packets::{Channel, ConnectError, Listener, Received};
use crate::net::pending::Pending;
use crate::net::proof::{Claim, Key, Role, Unproven};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// Address of a broker: a number in its name, and its key.
pub(super) type BrokerAddress = [u8; 24];

/// Time that either side has for each of its few messages. It is there, unless it is stopped.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time until a step is taken again for which something was short.
const PAUSE: Duration = Duration::from_millis(1);
/// Bound of pending connections.
const MOST_PENDING: usize = 256;
const LONGEST: usize = 256;
const PROTOCOL: Protocol = Protocol { tag: *b"fdbr", version: 2, longest: LONGEST };
/// An importer wants the allocation with this inode, eight bytes, little-endian.
const ASK: u32 = FIRST_OWN;
/// The descriptor comes with it.
const HERE: u32 = FIRST_OWN + 1;
/// Refusal: the allocation does not exist any more.
const GONE: u32 = FIRST_OWN + 2;

/// Allocations by the inodes of their ledgers.
type Allocations = Mutex<HashMap<u64, Weak<ExportedAllocation>>>;

pub(super) struct Broker {
    address: BrokerAddress,
    allocations: Arc<Allocations>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

impl Broker {
    pub(super) fn open() -> Result<Self, MapError> {
        let failed = |error| MapError::of("no socket to hand descriptors out", error);
        let address: BrokerAddress = crate::net::random().map_err(failed)?;
        let listener = Listener::bind(&name(&address)).map_err(failed)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let (allocations, stop) = (Arc::<Allocations>::default(), Arc::new(stop));
        let (seen, stopped) = (allocations.clone(), stop.clone());
        let importers = Pending::new(MOST_PENDING, PATIENCE);
        let mut server = Server { listener, key: key(&address), allocations: seen, importers };
        let answers = move || while server.turn(&stopped) {};
        let thread = std::thread::Builder::new().name("carrack-broker".into()).spawn(answers);
        let thread =
            thread.map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)));
        let thread = Some(thread?);
        Ok(Self { address, allocations, stop, thread, owner: Owner::this_process() })
    }

    pub(super) fn address(&self) -> BrokerAddress {
        self.address
    }

    /// Offers an allocation's descriptor to importers, as long as the allocation is exported.
    pub(super) fn offer(&self, inode: u64, allocation: &Arc<ExportedAllocation>) {
        let mut allocations = self.allocations.lock();
        allocations.retain(|_, known| known.strong_count() > 0);
        allocations.insert(inode, Arc::downgrade(allocation));
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The thread is the parent's: a fork has no thread to wait for or to detach.
            return std::mem::forget(self.thread.take());
        }
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the broker's name in the abstract namespace, which all processes see: it is no secret.
fn name(address: &BrokerAddress) -> Vec<u8> {
    let (number, _) = address.split_at(8);
    let digits = number.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("carrack-broker-{digits}").into_bytes()
}

fn key(address: &BrokerAddress) -> Key {
    Key::of(address.split_at(8).1)
}

fn greeting(role: Role, key: &Key) -> Result<Greeting, Errno> {
    Greeting::new(role, PROTOCOL, key, Claim::default())
}

/// The thread's side of the broker.
struct Server {
    listener: Listener,
    key: Key,
    allocations: Arc<Allocations>,
    importers: Pending<Importer>,
}

/// A process that wants a descriptor.
struct Importer {
    channel: Channel,
    /// Greeting, until both sides are proved.
    greeting: Option<Box<Greeting>>,
    /// The inode that it has asked for.
    asked: Option<u64>,
    /// Set while the importer waits for something that is short, and not for a word from its other
    /// end.
    waits: bool,
}

/// The reason why an importer gets nothing more.
enum Ending {
    /// The importer was answered, or has gone.
    Answered,
    /// The importer is not to be answered, for this reason.
    Refused(String),
}

impl Server {
    /// Waits for something to happen, and does what follows. Returns `false` when it is to stop.
    fn turn(&mut self, stopped: &OwnedFd) -> bool {
        let watched = self.importers.places();
        let importers: Vec<_> =
            watched.iter().filter_map(|place| self.importers.get(*place)).collect();
        let waits = importers.iter().any(|importer| importer.waits);
        let deadline = self.importers.deadline();
        let limit = match (waits, deadline) {
            (true, _) => Some(PAUSE),
            (false, at) => at.map(|at| at.saturating_duration_since(Instant::now())),
        };
        let fds: Vec<_> = [stopped.as_fd(), self.listener.as_fd()]
            .into_iter()
            .chain(importers.iter().map(|importer| importer.channel.as_fd()))
            .collect();
        let ready = readable(&fds, limit);
        drop((fds, importers));
        if ready.first() == Some(&true) {
            return false;
        }
        for (place, is_ready) in watched.into_iter().zip(ready.iter().skip(2)) {
            if *is_ready || self.importers.get(place).is_some_and(|importer| importer.waits) {
                self.serve(place);
            }
        }
        self.importers.expire(Instant::now());
        if ready.get(1) == Some(&true) {
            self.accept();
        }
        true
    }

    fn accept(&mut self) {
        let admitted = self.listener.accept().and_then(|channel| {
            let Some(channel) = channel else { return Ok(()) };
            let greeting = Some(Box::new(greeting(Role::Listener, &self.key)?));
            let importer = Importer { channel, greeting, asked: None, waits: false };
            let place = self.importers.admit(importer, Instant::now());
            self.serve(place);
            Ok(())
        });
        if let Err(error) = admitted {
            // Out of descriptors, as a rule: the importer's connection waits in the queue.
            tracing::debug!(%error, "a process that asks for a descriptor has to wait");
            std::thread::sleep(PAUSE);
        }
    }

    fn serve(&mut self, place: u32) {
        let Some(importer) = self.importers.get_mut(place) else { return };
        let outcome = importer.hear(&self.allocations);
        if importer.greeting.is_none() {
            self.importers.proved(place);
        }
        let Err(ending) = outcome else { return };
        let importer = self.importers.take(place);
        if let Ending::Refused(why) = ending {
            self.importers.refused("a process that asks for a descriptor", &why, Instant::now());
            let _ = importer.map(|importer| importer.channel.send(&PROTOCOL.refusal(&why), &[]));
        }
    }
}

impl Importer {
    /// Goes as far as it can.
    fn hear(&mut self, allocations: &Allocations) -> Result<(), Ending> {
        self.waits = false;
        if let Some(greeting) = &mut self.greeting {
            match greeting.advance(&mut self.channel) {
                Ok(Progress::Proven(_)) => self.greeting = None,
                Ok(Progress::Waiting) => return Ok(()),
                Ok(Progress::Short(_)) => return self.wait(),
                Err(Failure::Gone(_) | Failure::Unproven(Unproven::Bye)) => {
                    return Err(Ending::Answered);
                }
                Err(failure) => return Err(Ending::Refused(failure.to_string())),
            }
        }
        let inode = match self.asked {
            Some(inode) => inode,
            None => {
                let mut bytes = [0; LONGEST];
                match self.channel.receive(&mut bytes) {
                    Ok(Received::Nothing) => return Ok(()),
                    Ok(Received::Closed) => return Err(Ending::Answered),
                    Ok(Received::Message(len, _)) => match asked(&bytes[..len]) {
                        Some(inode) => *self.asked.insert(inode),
                        None => return Err(Ending::Refused("it asks for nothing".into())),
                    },
                    Err(error) if is_shortage(error) => return self.wait(),
                    Err(error) => {
                        return Err(Ending::Refused(format!("its socket failed: {error}")));
                    }
                }
            }
        };
        let allocation = allocations.lock();
        let allocation = allocation.get(&inode).and_then(Weak::upgrade);
        let sent = match allocation.as_ref().and_then(|allocation| allocation.fd()) {
            Some(fd) => self.channel.send(&PROTOCOL.message(HERE, &[]), &[fd]),
            None => self.channel.send(&PROTOCOL.message(GONE, &[]), &[]),
        };
        match sent {
            // As where too many descriptors are in flight.
            Err(error) if is_shortage(error) => self.wait(),
            _ => Err(Ending::Answered),
        }
    }

    fn wait(&mut self) -> Result<(), Ending> {
        self.waits = true;
        Ok(())
    }
}

fn asked(bytes: &[u8]) -> Option<u64> {
    let (kind, body) = PROTOCOL.read(bytes).ok()?;
    (kind == ASK).then(|| U64::read_from_bytes(body).ok().map(U64::get))?
}

/// Waits up to a limit for one of the descriptors. Returns which of them are readable.
fn readable(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> Vec<bool> {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    while poll(&mut polled, limit.as_ref()) == Err(Errno::INTR) {}
    polled.iter().map(|fd| !fd.revents().is_empty()).collect()
}

/// Waits for the broker's next word.
fn wait_for(broker: &Channel) -> Result<(), Errno> {
    let ready = readable(&[broker.as_fd()], Some(PATIENCE));
    if ready == [true] { Ok(()) } else { Err(Errno::TIMEDOUT) }
}

/// Asks another process's broker for the descriptor of an allocation.
pub(super) fn ask(address: &BrokerAddress, inode: u64) -> Result<OwnedFd, MapError> {
    let failed = |error| MapError::of("its process does not hand it out", error);
    let mut broker = Channel::connect(&name(address)).map_err(|error| match error {
        ConnectError::System(error) => failed(error),
        other => format!("its process does not hand it out: {other}").into(),
    })?;
    let mut greeting = greeting(Role::Dialer, &key(address)).map_err(failed)?;
    loop {
        match greeting.advance(&mut broker) {
            Ok(Progress::Proven(_)) => break,
            Ok(Progress::Waiting) => wait_for(&broker).map_err(failed)?,
            Ok(Progress::Short(error)) => return Err(failed(error)),
            Err(why) => return Err(format!("its process does not hand it out: {why}").into()),
        }
    }
    broker.send(&PROTOCOL.message(ASK, &[U64::new(inode).as_bytes()]), &[]).map_err(failed)?;
    wait_for(&broker).map_err(failed)?;
    let mut bytes = [0; LONGEST];
    let Received::Message(len, fds) = broker.receive(&mut bytes).map_err(failed)? else {
        return Err(failed(Errno::CONNRESET));
    };
    let kind = PROTOCOL.read(&bytes[..len]).map(|(kind, _)| kind);
    match (kind, fds.into_iter().next()) {
        (Ok(HERE), Some(fd)) => Ok(fd),
        _ => Err("its process has it no more".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::exports::tests::shareable;
    use super::*;

    #[test]
    fn a_descriptor_is_handed_out_to_who_knows_the_secret_as_long_as_it_is_there() {
        let broker = Broker::open().unwrap();
        let allocation = Arc::new(shareable());
        broker.offer(7, &allocation);
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        let fd = ask(&broker.address(), 7).unwrap();
        assert_eq!(inode(fd.as_fd()), inode(allocation.fd().unwrap()));
        assert!(ask(&broker.address(), 8).unwrap_err().to_string().contains("no more"));
        let mut wrong = broker.address();
        wrong[23] ^= 1;
        assert!(ask(&wrong, 7).unwrap_err().to_string().contains("does not hand it out"));
        // A silent importer, one that sends garbage, and importers behind them.
        let silent = Channel::connect(&name(&broker.address())).unwrap();
        let talker = Channel::connect(&name(&broker.address())).unwrap();
        talker.send(&[1; 1000], &[]).unwrap();
        let start = Instant::now();
        assert!(ask(&broker.address(), 7).is_ok());
        assert!(start.elapsed() < PATIENCE / 2, "a silent one holds up no other");
        drop(silent);
        drop(allocation);
        assert!(ask(&broker.address(), 7).unwrap_err().to_string().contains("no more"));
        let address = broker.address();
        drop(broker);
        assert!(ask(&address, 7).is_err(), "closed");
    }
}
