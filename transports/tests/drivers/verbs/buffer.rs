//! Memory that devices work on.

use super::all_access;
use carrack_transports::verbs::sys::bindings::ibv_sge;
use carrack_transports::verbs::sys::{AccessFlags, MemoryRegion, ProtectionDomain, VerbsError};
use std::alloc::{Layout, alloc, dealloc};
use std::ops::Range;
use std::sync::Arc;

/// Bytes in front of a buffer and behind it, which must not be written.
const GUARD: usize = 64;
const GUARDED: u8 = 0xa7;

/// Registered memory. References never lead to bytes that a device may write.
pub struct Buffer {
    region: MemoryRegion,
    /// Declared behind the region, so that it is dropped after it.
    memory: Memory,
    len: usize,
}

/// Bytes with guards around them.
struct Memory(*mut u8, Layout);

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.0, self.1) };
    }
}

impl Buffer {
    pub fn new(domain: &Arc<ProtectionDomain>, len: usize, access: AccessFlags) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the length is not zero.
        let memory = unsafe { alloc(layout) };
        assert!(!memory.is_null());
        // SAFETY: just allocated, with room for guards on both sides, which are not registered.
        let region = unsafe {
            memory.write_bytes(GUARDED, layout.size());
            memory.add(GUARD).write_bytes(0, len);
            domain.register(memory.add(GUARD), len, access).expect("a region")
        };
        Self { region, memory: Memory(memory, layout), len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len + 2 * GUARD, 4096).expect("a layout")
    }

    pub fn addr(&self) -> u64 {
        self.region.addr() as u64
    }

    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// Returns a part of the buffer as a peer names it.
    pub fn remote(&self, at: usize) -> (u64, u32) {
        (self.addr() + at as u64, self.region.rkey())
    }

    /// Returns a part of the buffer as a piece of a work request.
    pub fn piece(&self, range: Range<usize>) -> ibv_sge {
        let length = u32::try_from(range.len()).expect("a length");
        ibv_sge { addr: self.addr() + range.start as u64, length, lkey: self.lkey() }
    }

    pub fn whole(&self) -> ibv_sge {
        self.piece(0..self.len)
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        for (offset, byte) in bytes.iter().enumerate() {
            // SAFETY: within the buffer, which is this value's.
            unsafe { self.memory.0.add(GUARD + at + offset).write_volatile(*byte) };
        }
    }

    pub fn read(&self, range: Range<usize>) -> Vec<u8> {
        assert!(range.end <= self.len);
        // SAFETY: within the buffer, which is this value's.
        range.map(|at| unsafe { self.memory.0.add(GUARD + at).read_volatile() }).collect()
    }

    pub fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.read(at..at + 8).try_into().expect("eight bytes"))
    }

    /// Fills it with bytes that depend on the seed and on the offset.
    pub fn fill(&self, seed: u8) -> Vec<u8> {
        let bytes = pattern(self.len, seed);
        self.write(0, &bytes);
        bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let guards = (0..GUARD).chain(GUARD + self.len..self.memory.1.size());
        // SAFETY: within the allocation.
        let intact = guards
            .map(|at| unsafe { self.memory.0.add(at).read_volatile() })
            .all(|byte| byte == GUARDED);
        if !std::thread::panicking() {
            assert!(intact, "bytes next to a buffer were written");
        }
    }
}

/// Returns bytes that depend on the seed and on the offset.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((at >> 9) as u8))
        .collect()
}

/// Tries to register an address without memory.
pub fn nowhere(domain: &Arc<ProtectionDomain>) -> Result<MemoryRegion, VerbsError> {
    // SAFETY: nothing is posted that would use it.
    unsafe { domain.register(std::ptr::without_provenance_mut(4096), 4096, all_access()) }
}
