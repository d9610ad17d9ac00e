//! Bytes that the NIC moves between this rank's memory and a peer's, by itself.

use super::bounces::{Bounce, Bounces};
use super::memory::addresses;
use super::sys::{Access, MemoryRegion, ProtectionDomain, VerbsError};
use crate::contract::{Exposed, OpToken, RemotePlace};
use crate::mem::{Buffer, WeakRegion};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of one request, at most: what every device takes.
pub(super) const PIECE: usize = 1 << 30;

/// Regions whose registrations are kept.
const KEPT: usize = 256;

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    /// To the peer.
    Put,
    /// From the peer.
    Get,
}

/// An operation under way, and what it needs until it is over.
#[derive(Debug)]
pub(super) struct Transfer {
    token: OpToken,
    // Before the memory that it may be about.
    via: Via,
    buffer: Buffer,
}

/// How the NIC reaches the bytes.
#[derive(Debug)]
pub(super) enum Via {
    /// They went with the request.
    Inline,
    /// They lie in a copy; a get's are copied back when it is over.
    Bounce(Bounce, Direction),
    /// Where they are.
    Registration(#[allow(dead_code, reason = "held")] Arc<MemoryRegion>),
}

impl Transfer {
    pub(super) fn new(token: OpToken, via: Via, buffer: Buffer) -> Self {
        Self { token, via, buffer }
    }

    /// It is over.
    pub(super) fn end(self, bounces: &Bounces) -> (OpToken, Buffer) {
        let Self { token, via, mut buffer } = self;
        if let Via::Bounce(bounce, direction) = via {
            if direction == Direction::Get {
                bounces.copy_out(&bounce, &mut buffer);
            }
            bounces.give_back(bounce);
        }
        (token, buffer)
    }

    /// It has come to nothing.
    pub(super) fn fail(self, bounces: &Bounces) -> (OpToken, Buffer) {
        let Self { token, via, buffer } = self;
        if let Via::Bounce(bounce, _) = via {
            bounces.give_back(bounce);
        }
        (token, buffer)
    }
}

/// Registrations of this rank's memory for its own requests. Those of regions are kept, as long as the region is there; those of
/// other buffers last for one operation, since nobody tells when such memory is freed.
#[derive(Debug)]
pub(super) struct Registrations {
    domain: Arc<ProtectionDomain>,
    kept: Mutex<HashMap<usize, (WeakRegion, Arc<MemoryRegion>)>>,
}

impl Registrations {
    pub(super) fn new(domain: Arc<ProtectionDomain>) -> Self {
        Self { domain, kept: Mutex::default() }
    }

    /// The registration in which a buffer lies.
    ///
    /// # Errors
    /// It is no host memory that stays where it is; or the NIC refuses it.
    pub(super) fn of(&self, buffer: &Buffer, direction: Direction) -> Result<Arc<MemoryRegion>, String> {
        let told = |error: VerbsError| error.to_string();
        let Some((at, len)) = addresses(buffer) else {
            return Err(format!("it is {}, and not host memory that stays where it is", kind_of(buffer)));
        };
        let Buffer::Region(slice) = buffer else {
            // What is only read may be memory that cannot be written.
            let access = match direction {
                Direction::Put => Access::LOCAL_READ,
                Direction::Get => Access::LOCAL_WRITE,
            };
            // SAFETY: whoever asks keeps the buffer at least as long as the registration.
            return unsafe { self.domain.register(at, len, access) }.map(Arc::new).map_err(told);
        };
        let root = slice.region().root();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((region, registration)) = kept.get(&root.addr())
            && region.is_of(root)
        {
            return Ok(registration.clone());
        }
        // Also the one that was at this address before.
        if kept.len() >= KEPT || kept.contains_key(&root.addr()) {
            kept.retain(|_, (region, _)| !region.is_gone());
        }
        // SAFETY: the operation keeps a part of the region, and with it the whole; a registration that outlives the region is used
        // by nobody: it is looked up by the region itself, and peers have no rights in it.
        let fresh = unsafe { self.domain.register(root.addr() as *mut u8, root.len(), Access::LOCAL_WRITE) };
        let fresh = Arc::new(fresh.map_err(told)?);
        if kept.len() < KEPT {
            kept.insert(root.addr(), (root.downgrade(), fresh.clone()));
        }
        Ok(fresh)
    }

    /// Lets go of those whose regions are gone.
    pub(super) fn look_after(&self) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, (region, _)| !region.is_gone());
    }
}

/// A buffer that a peer may write to and read from.
#[derive(Debug)]
struct Shown {
    // Before the memory that it is about.
    registration: MemoryRegion,
    buffer: Buffer,
}

impl Exposed for Shown {
    fn place(&self) -> RemotePlace {
        let addr = addresses(&self.buffer).map_or(0, |(at, _)| at.addr() as u64);
        RemotePlace { addr, key: self.registration.rkey().into() }
    }

    fn take_back(self: Box<Self>) -> Buffer {
        let Self { registration, buffer } = *self;
        drop(registration);
        buffer
    }
}

/// Lets peers reach a buffer.
///
/// # Errors
/// As of [`Registrations::of`], with the buffer.
pub(super) fn expose(
    domain: &Arc<ProtectionDomain>,
    mut buffer: Buffer,
) -> Result<Box<dyn Exposed>, (String, Buffer)> {
    let Some((at, len)) = addresses(&buffer).filter(|_| buffer.view_mut().is_some()) else {
        let why = format!(
            "it is {}, and not host memory that can be written and stays where it is",
            kind_of(&buffer)
        );
        return Err((why, buffer));
    };
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    // SAFETY: the buffer is kept, and not looked at, until the registration has ended.
    match unsafe { domain.register(at, len, access) } {
        Ok(registration) => Ok(Box::new(Shown { registration, buffer })),
        Err(error) => Err((error.to_string(), buffer)),
    }
}

fn kind_of(buffer: &Buffer) -> String {
    match buffer {
        Buffer::Small(_) | Buffer::Empty => "a few bytes in place".into(),
        buffer => format!("{} memory", buffer.kind()),
    }
}
