//! A buffer that a peer may write to and read from, one chunk after the other.
//!
//! Each chunk has a registration of its own, since registering takes time. So a long buffer is not
//! registered whole before its first byte moves, and only the chunks that are shown are pinned.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::memory::addresses;
use super::rails::Rail;
use super::sys::{AccessFlags, MemoryRegion};
use super::transfers::{PlaceKey, kind_of};
use crate::contract::{ExposedChunks, RemotePlace};
use crate::mem::Buffer;

/// See the [module](self). Host memory only: a GPU's allocation has one registration, which is
/// kept.
#[derive(Debug)]
pub(super) struct ShownChunks {
    // Before the memory that they are about.
    shown: Vec<RegisteredChunk>,
    /// NICs that chunks are spread over, the first in front, and the index of the next.
    rails: Vec<Rail>,
    turn: usize,
    /// Address of the buffer, and its length.
    base: usize,
    len: usize,
    buffer: Buffer,
}

#[derive(Debug)]
struct RegisteredChunk {
    /// Offset of the chunk in the buffer.
    at: usize,
    rail: u8,
    _memory: MemoryRegion,
}

impl ShownChunks {
    /// Takes a buffer, of which `rails` show chunks to the peer.
    ///
    /// # Errors
    /// It is no writable host memory that stays in place. Returned with the buffer.
    pub(super) fn of(
        rails: Vec<Rail>,
        mut buffer: Buffer,
    ) -> Result<Box<dyn ExposedChunks>, (String, Buffer)> {
        let is_writable = buffer.view_mut().is_some() && buffer.kind().is_host();
        let Some((base, len)) = addresses(&buffer).filter(|_| is_writable) else {
            let why = format!(
                "it is {}, and not host memory that can be written and stays where it is",
                kind_of(&buffer)
            );
            return Err((why, buffer));
        };
        let (shown, base) = (Vec::new(), base.expose_provenance());
        Ok(Box::new(Self { shown, rails, turn: 0, base, len, buffer }))
    }

    /// Returns the NIC for the next chunk: the connected one with the fewest chunks, and of
    /// several each in turn. `None`: no NIC is connected.
    fn next(&mut self) -> Option<&Rail> {
        let count = self.rails.len();
        let load = |&at: &usize| {
            let number = self.rails[at].number;
            let shown = self.shown.iter().filter(|chunk| chunk.rail == number).count();
            (shown, (at + count - self.turn) % count)
        };
        let at = (0..count).filter(|&at| self.rails[at].is_usable()).min_by_key(load)?;
        self.turn = (at + 1) % count;
        self.rails.get(at)
    }
}

impl ExposedChunks for ShownChunks {
    fn show(&mut self, at: usize, len: usize) -> Result<RemotePlace, String> {
        if len == 0 || at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(format!("a chunk of {len} bytes at {at} is no part of {} bytes", self.len));
        }
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let (base, kind) = (self.base, self.buffer.kind());
        let rail = self.next().ok_or("there is no NIC for it")?;
        let start = std::ptr::with_exposed_provenance_mut(base + at);
        // SAFETY: it lies in the buffer, which is kept, and not accessed, until the registration
        // has ended.
        let memory = unsafe { rail.shared.registrations.register((start, len), kind, access) }?;
        let key = PlaceKey::of_chunk(memory.rkey(), rail.number);
        let place = RemotePlace { addr: memory.addr() as u64, key: key.encode() };
        let shown = RegisteredChunk { at, rail: rail.number, _memory: memory };
        self.shown.push(shown);
        Ok(place)
    }

    fn nics(&self) -> usize {
        self.rails.iter().filter(|rail| rail.is_usable()).count()
    }

    fn hide(&mut self, at: usize) {
        self.shown.retain(|chunk| chunk.at != at);
    }

    fn take_back(self: Box<Self>) -> Buffer {
        let Self { shown, buffer, .. } = *self;
        drop(shown);
        buffer
    }
}
