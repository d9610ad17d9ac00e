//! Where a process hands out the descriptors of its memory: a Unix socket, because many containers
//! let nobody fetch a descriptor from another process (gpu.md, VMM rule 4).
//!
//! Whoever comes is of the same user, and must know a secret that the memory's key tells; it names
//! an allocation by the inode of its ledger, and is given the descriptor or told that it is gone. A
//! thread answers, asleep but for that: whoever imports waits for its answer, and two who import
//! from each other would else wait for ever.

use super::exports::Allocation;
use crate::net::is_shortage;
use crate::net::packets::{Channel, ConnectError, Listener, Received};
use crate::fork::Owner;
use crate::mem::MapError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// How a desk is found, and what opens its mouth: a number in its name, and the secret.
pub(super) type Address = [u8; 24];

/// Seconds that either side waits for the other's few bytes. It is there, unless somebody has
/// stopped it.
const PATIENCE: i64 = 2;
/// Attempts to send a descriptor, a millisecond apart.
const ATTEMPTS: u32 = 1000;
const HERE: &[u8] = b"here";
const GONE: &[u8] = b"gone";

/// Allocations by the inodes of their ledgers.
type Wares = Mutex<HashMap<u64, Weak<Allocation>>>;

pub(super) struct Desk {
    address: Address,
    wares: Arc<Wares>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    owner: Owner,
}

impl Desk {
    pub(super) fn open() -> Result<Self, MapError> {
        let failed = |error| MapError::of("no socket to hand descriptors out", error);
        let mut address: Address = [0; 24];
        getrandom(&mut address, GetRandomFlags::empty()).map_err(failed)?;
        let listener = Listener::bind(&name(&address)).map_err(failed)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let (wares, stop) = (Arc::<Wares>::default(), Arc::new(stop));
        let (seen, stopped) = (wares.clone(), stop.clone());
        let answers = move || {
            while is_readable(&[listener.as_fd(), stopped.as_fd()], None) == Some(0) {
                let served = match listener.accept() {
                    Ok(Some(caller)) => serve(&caller, &address, &seen),
                    Ok(None) => Ok(()),
                    Err(error) => {
                        // Out of descriptors, as a rule: whoever knocks goes on knocking.
                        let _ = is_readable(&[stopped.as_fd()], Some(1));
                        Err(error)
                    }
                };
                if let Err(error) = served {
                    tracing::debug!(%error, "somebody who asked for a descriptor got none");
                }
            }
        };
        let thread = std::thread::Builder::new().name("carrack-desk".into()).spawn(answers);
        let thread =
            thread.map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)));
        let thread = Some(thread?);
        Ok(Self { address, wares, stop, thread, owner: Owner::this_process() })
    }

    pub(super) fn address(&self) -> Address {
        self.address
    }

    /// From now on an allocation's descriptor is given to who asks for it, as long as it is
    /// exported.
    pub(super) fn offer(&self, inode: u64, allocation: &Arc<Allocation>) {
        let mut wares = self.wares.lock().unwrap_or_else(PoisonError::into_inner);
        wares.retain(|_, known| known.strong_count() > 0);
        wares.insert(inode, Arc::downgrade(allocation));
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The thread is the parent's, and goes on: here is none to wait for, or to detach.
            return std::mem::forget(self.thread.take());
        }
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Of the abstract namespace: there it is seen by all, and so is no secret.
fn name(address: &Address) -> Vec<u8> {
    let (number, _) = address.split_at(8);
    let digits = number.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("carrack-desk-{digits}").into_bytes()
}

fn secret(address: &Address) -> &[u8] {
    address.split_at(8).1
}

/// Which of the descriptors becomes readable first, within so many seconds.
fn is_readable(fds: &[BorrowedFd<'_>], seconds: Option<i64>) -> Option<usize> {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let limit = seconds.map(|tv_sec| Timespec { tv_sec, tv_nsec: 0 });
    loop {
        match poll(&mut polled, limit.as_ref()) {
            Err(Errno::INTR) => {}
            // The last first: it is the one that ends a desk.
            _ => return polled.iter().rposition(|fd| !fd.revents().is_empty()),
        }
    }
}

/// One message, which is waited for.
fn hear(channel: &Channel) -> Result<(Vec<u8>, Option<OwnedFd>), Errno> {
    let mut bytes = [0; 64];
    is_readable(&[channel.as_fd()], Some(PATIENCE)).ok_or(Errno::TIMEDOUT)?;
    match channel.receive(&mut bytes)? {
        Received::Message(len, fds) => {
            Ok((bytes.get(..len).unwrap_or_default().to_vec(), fds.into_iter().next()))
        }
        Received::Nothing | Received::Closed => Err(Errno::CONNRESET),
    }
}

/// Answers one caller.
fn serve(caller: &Channel, address: &Address, wares: &Wares) -> Result<(), Errno> {
    let (asked, _) = hear(caller)?;
    let inode = asked.strip_prefix(secret(address)).and_then(|rest| rest.try_into().ok());
    let inode = u64::from_le_bytes(inode.ok_or(Errno::PERM)?);
    let ware =
        wares.lock().unwrap_or_else(PoisonError::into_inner).get(&inode).and_then(Weak::upgrade);
    match ware.as_ref().and_then(|allocation| allocation.fd()) {
        Some(fd) => hand_out(caller, fd),
        None => caller.send(GONE, &[]),
    }
}

/// Sends a descriptor. Where too many are in flight the caller waits, who has more patience than
/// this.
fn hand_out(caller: &Channel, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    for _ in 0..ATTEMPTS {
        match caller.send(HERE, &[fd]) {
            Err(error) if is_shortage(error) => std::thread::sleep(Duration::from_millis(1)),
            sent => return sent,
        }
    }
    caller.send(HERE, &[fd])
}

/// Asks another process's desk for the descriptor of an allocation.
pub(super) fn ask(address: &Address, inode: u64) -> Result<OwnedFd, MapError> {
    let failed = |error| MapError::of("its process does not hand it out", error);
    let desk = Channel::connect(&name(address)).map_err(|error| match error {
        ConnectError::System(error) => failed(error),
        stranger => format!("its process does not hand it out: {stranger}").into(),
    })?;
    desk.send(&[secret(address), &inode.to_le_bytes()].concat(), &[]).map_err(failed)?;
    match hear(&desk).map_err(failed)? {
        (answer, Some(fd)) if answer == HERE => Ok(fd),
        _ => Err("its process has it no more".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::exports::tests::shareable;
    use super::*;

    #[test]
    fn a_descriptor_is_handed_out_to_who_knows_the_secret_as_long_as_it_is_there() {
        let desk = Desk::open().unwrap();
        let allocation = Arc::new(shareable());
        desk.offer(7, &allocation);
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        let fd = ask(&desk.address(), 7).unwrap();
        assert_eq!(inode(fd.as_fd()), inode(allocation.fd().unwrap()));
        assert!(ask(&desk.address(), 8).unwrap_err().to_string().contains("no more"));
        let mut wrong = desk.address();
        wrong[23] ^= 1;
        assert!(ask(&wrong, 7).unwrap_err().to_string().contains("does not hand it out"));
        // Somebody who says nothing, nonsense, or too much, and others who come behind it.
        let silent = Channel::connect(&name(&desk.address())).unwrap();
        let talker = Channel::connect(&name(&desk.address())).unwrap();
        talker.send(&[1; 1000], &[]).unwrap();
        drop(silent);
        assert!(ask(&desk.address(), 7).is_ok());
        drop(allocation);
        assert!(ask(&desk.address(), 7).unwrap_err().to_string().contains("no more"));
        let address = desk.address();
        drop(desk);
        assert!(ask(&address, 7).is_err(), "closed");
    }
}
