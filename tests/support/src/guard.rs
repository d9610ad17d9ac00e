//! Buffers with poison around them.

use carrack::transports::mem::{Region, RegionSlice};
use rand::{RngCore, SeedableRng, rngs::SmallRng};

const BORDER: usize = 64;

/// A slice inside a larger region whose other bytes, and whose own to begin with, are random
/// poison.
pub struct Guarded {
    region: Region,
    poison: Vec<u8>,
    len: usize,
}

impl Guarded {
    pub fn new(len: usize, seed: u64) -> Self {
        Self::within(Region::host(len + 2 * BORDER), len, seed)
    }

    /// Guards `len` bytes in a region of the caller's, of any kind of memory, of at least
    /// `room(len)` bytes.
    pub fn within(region: Region, len: usize, seed: u64) -> Self {
        let mut poison = vec![0; region.len()];
        SmallRng::seed_from_u64(seed ^ 0x5eed).fill_bytes(&mut poison);
        region.whole().write(&poison).unwrap();
        Self { region, poison, len }
    }

    pub fn room(len: usize) -> usize {
        len + 2 * BORDER
    }

    pub fn slice(&self) -> RegionSlice {
        self.region.slice(BORDER, self.len).unwrap()
    }

    /// Fills the slice, for sending.
    pub fn filled(self, bytes: &[u8]) -> Self {
        self.slice().write(bytes).unwrap();
        self
    }

    /// Checks that the region holds `bytes` at the start of the slice and poison everywhere else.
    #[track_caller]
    pub fn assert_holds(&self, bytes: &[u8]) {
        let found = self.region.whole().to_vec().unwrap();
        let mut want = self.poison.clone();
        want[BORDER..BORDER + bytes.len()].copy_from_slice(bytes);
        if let Some(at) = found.iter().zip(&want).position(|(found, want)| found != want) {
            panic!(
                "byte {} of a message of {} is {:#x} and not {:#x}",
                at as isize - BORDER as isize,
                bytes.len(),
                found[at],
                want[at]
            );
        }
    }

    /// Checks that nothing was written.
    #[track_caller]
    pub fn assert_untouched(&self) {
        self.assert_holds(&[]);
    }
}
