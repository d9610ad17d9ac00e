//! Registered staging buffers for longer messages, so that the user's buffer is free when the call
//! returns.

use super::memory::Area;
use super::sys::{ProtectionDomain, VerbsError};
use crate::contract::Header;
use crate::mem::{Buffer, MemMut, MemRef, copy::copy_now};
use crate::sync::FreeList;
use std::sync::{Arc, OnceLock};
use zerocopy::IntoBytes;

/// Bytes of a message's header on the wire.
pub(super) const HEADER: usize = 16;

/// The staging buffers of a device, allocated when the first is needed.
#[derive(Debug)]
pub(super) struct Bounces {
    domain: Arc<ProtectionDomain>,
    payload: usize,
    /// Bytes of each, its header included.
    size: usize,
    count: usize,
    free: FreeList,
    area: OnceLock<Area>,
}

/// One staging buffer, until it is given back.
#[derive(Debug)]
pub(super) struct Bounce(u32);

/// Place of a filled buffer, for a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Filled {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) key: u32,
}

impl Bounces {
    /// Creates `count` buffers, each for a message of `payload` bytes.
    pub(super) fn new(domain: Arc<ProtectionDomain>, payload: usize, count: usize) -> Self {
        let free = FreeList::new(count);
        for slot in (0..count).rev() {
            free.push(u32::try_from(slot).unwrap_or(u32::MAX));
        }
        let size = (HEADER + payload).next_multiple_of(64);
        Self { domain, payload, size, count, free, area: OnceLock::new() }
    }

    /// Returns the bytes of the largest message.
    pub(super) fn payload(&self) -> usize {
        self.payload
    }

    /// Returns the bytes of a buffer, with the header's.
    pub(super) fn room(&self) -> usize {
        HEADER + self.payload
    }

    /// Takes a free buffer.
    pub(super) fn take(&self) -> Option<Bounce> {
        self.free.pop().map(Bounce)
    }

    pub(super) fn give_back(&self, Bounce(slot): Bounce) {
        self.free.push(slot);
    }

    /// Fills a buffer with a message.
    pub(super) fn fill(
        &self,
        bounce: &Bounce,
        header: Header,
        bytes: MemRef<'_>,
    ) -> Result<Filled, VerbsError> {
        let area = self.area()?;
        let at = bounce.0 as usize * self.size;
        let len = HEADER + bytes.len();
        let parts = area.part_mut(at, HEADER).zip(area.part_mut(at + HEADER, bytes.len()));
        let copied = parts.map(|(head, rest): (MemMut<'_>, MemMut<'_>)| {
            copy_now(head, MemRef::host(header.0.as_bytes())).and_then(|()| copy_now(rest, bytes))
        });
        debug_assert!(matches!(copied, Some(Ok(()))), "the caller has looked at kind and length");
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Ok(Filled { addr: area.addr(at), len, key: area.key() })
    }

    /// Appends bytes to a buffer, at an offset where they fit.
    pub(super) fn append(
        &self,
        bounce: &Bounce,
        at: usize,
        bytes: &[u8],
    ) -> Result<(), VerbsError> {
        let to = self.area()?.part_mut(bounce.0 as usize * self.size + at, bytes.len());
        let copied = to.map(|to| copy_now(to, MemRef::host(bytes)));
        debug_assert!(
            at + bytes.len() <= self.size && matches!(copied, Some(Ok(()))),
            "the caller has looked"
        );
        Ok(())
    }

    /// Returns the place of the first `len` bytes of a buffer.
    pub(super) fn filled(&self, bounce: &Bounce, len: usize) -> Result<Filled, VerbsError> {
        let area = self.area()?;
        let len = u32::try_from(len.min(self.size)).unwrap_or(u32::MAX);
        Ok(Filled { addr: area.addr(bounce.0 as usize * self.size), len, key: area.key() })
    }

    /// Returns the place of `len` bytes without a header. For a put they are filled from `with`.
    pub(super) fn plain(
        &self,
        bounce: &Bounce,
        with: Option<&Buffer>,
        len: usize,
    ) -> Result<Filled, VerbsError> {
        let area = self.area()?;
        let at = bounce.0 as usize * self.size;
        if let Some((to, buffer)) = area.part_mut(at, len).zip(with) {
            let copied = copy_now(to, buffer.view());
            debug_assert!(copied.is_ok(), "the caller has looked at kind and length");
        }
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Ok(Filled { addr: area.addr(at), len, key: area.key() })
    }

    /// Copies received bytes into a buffer.
    pub(super) fn copy_out(&self, bounce: &Bounce, buffer: &mut Buffer) {
        let (at, len) = (bounce.0 as usize * self.size, buffer.len());
        if let Some(from) = self.area.get().and_then(|area| area.part(at, len))
            && let Some(to) = buffer.view_mut()
        {
            let copied = copy_now(to, from);
            debug_assert!(copied.is_ok(), "it was looked at when it was taken");
        }
    }

    fn area(&self) -> Result<&Area, VerbsError> {
        if let Some(area) = self.area.get() {
            return Ok(area);
        }
        let fresh = Area::new(&self.domain, self.size * self.count)?;
        Ok(self.area.get_or_init(|| fresh))
    }
}
