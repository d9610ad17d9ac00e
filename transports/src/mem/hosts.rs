//! Many copies between two regions of host memory.

use super::copy::copy_now;
use super::{CopyError, MemMut, MemRef, Place, Region};
use std::marker::PhantomData;

/// Two regions of host memory, for copies between parts of them by the CPU. Their kinds are
/// checked once.
pub struct Hosts<'r> {
    to: (*mut u8, usize),
    from: (*const u8, usize),
    _regions: PhantomData<&'r Region>,
}

impl<'r> Hosts<'r> {
    /// Prepares copies from parts of `src` to parts of `dst`.
    ///
    /// # Errors
    /// [`CopyError::Unknown`] where a region is not host memory.
    pub fn between(dst: &'r Region, src: &'r Region) -> Result<Self, CopyError> {
        if !(dst.kind().is_host() && src.kind().is_host()) {
            return Err(CopyError::Unknown { dst: dst.kind(), src: src.kind() });
        }
        let (to, from) = ((dst.base(), dst.len()), (src.base().cast_const(), src.len()));
        Ok(Self { to, from, _regions: PhantomData })
    }

    /// Copies `len` bytes from offset `from` of the source to offset `to` of the target.
    ///
    /// # Errors
    /// [`CopyError::TooLong`] where a part does not lie within its region. Nothing is copied then.
    #[inline(always)]
    pub fn copy(&self, to: usize, from: usize, len: usize) -> Result<(), CopyError> {
        let is_within = |at: usize, room: usize| at <= room && len <= room - at;
        if !is_within(to, self.to.1) || !is_within(from, self.from.1) {
            return Err(too_long((to, self.to.1), (from, self.from.1), len));
        }
        // SAFETY: both lie within host memory that the borrowed regions keep, and of which they
        // give out no references.
        let (dst, src) = unsafe {
            let (dst, src) = (self.to.0.add(to), self.from.0.add(from));
            (MemMut::from_raw(dst, len, Place::Host), MemRef::from_raw(src, len, Place::Host))
        };
        copy_now(dst, src)
    }
}

#[cold]
fn too_long(to: (usize, usize), from: (usize, usize), len: usize) -> CopyError {
    let room = |(at, room): (usize, usize)| room.saturating_sub(at);
    CopyError::TooLong { len, room: room(to).min(room(from)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_copied_where_both_ends_lie_within_and_not_a_byte_elsewhere() {
        let (dst, src) = (Region::host(100), Region::host(80));
        let content: Vec<u8> = (1..=80).collect();
        src.whole().write(&content).unwrap();
        let hosts = Hosts::between(&dst, &src).unwrap();
        for (to, from, len) in [(10, 3, 70), (100, 80, 0), (99, 79, 1)] {
            hosts.copy(to, from, len).unwrap();
        }
        for (to, from, len) in [
            (31, 0, 70),
            (0, 11, 70),
            (101, 0, 0),
            (0, 81, 0),
            (usize::MAX, 0, 2),
            (0, usize::MAX, 2),
        ] {
            let refused = hosts.copy(to, from, len);
            assert!(
                matches!(refused, Err(CopyError::TooLong { .. })),
                "{len} bytes from {from} to {to}"
            );
        }
        let mut wanted = vec![0; 100];
        wanted[10..80].copy_from_slice(&content[3..73]);
        wanted[99] = 80;
        let mut found = vec![0xee; 100];
        dst.whole().read(&mut found).unwrap();
        assert_eq!(found, wanted);
    }
}
