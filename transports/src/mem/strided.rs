//! Strided memory: rows of bytes at regular distances in a region. Examples are a side of a
//! grid, a column of a matrix, or a block of one.

use crate::gpu::Grid;

/// Block of up to three dimensions of bytes in a region: rows of `count[0]` bytes, `count[1]` rows
/// in a plane, `count[2]` planes. Rows begin `pitch[0]` bytes apart, planes `pitch[1]` bytes. A row
/// begins behind the end of the one before, and so does a plane.
///
/// ```
/// use carrack_transports::mem::Strided;
///
/// // The third column of a matrix of 10 rows of 8 numbers of 8 bytes each.
/// let column = Strided { offset: 2 * 8, count: [8, 10, 1], pitch: [8 * 8, 0] };
/// assert_eq!(column.check(640), Ok(column.offset + 9 * 64 + 8));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Strided {
    /// Offset of the first row in the region, in bytes.
    pub offset: usize,
    /// Bytes of a row, rows of a plane, planes. If one of them is 0, there are no bytes.
    pub count: [usize; 3],
    /// Distances in bytes from one row to the next, and from one plane to the next. The pitch of a
    /// single row or plane is ignored.
    pub pitch: [usize; 2],
}

/// Reason why a strided block is invalid, or does not lie within a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StridedError {
    /// The block's rows or planes would overlap, or interleave.
    #[error(
        "{what} of a strided block begin {pitch} bytes apart and reach over {len} bytes: they may \
        neither overlap nor interleave; make the pitch, from the beginning of one to that of the \
        next, {len} bytes or more, or put each plane as a block of its own"
    )]
    Pitch {
        /// `rows` or `planes`.
        what: &'static str,
        /// Distance from one to the next, in bytes.
        pitch: usize,
        /// Bytes from the beginning of one to its end.
        len: usize,
    },
    /// The block ends beyond the region.
    #[error(
        "a strided block of {count:?} (bytes, rows, planes) at {offset} ends at byte {end}, beyond \
        the {room} of its region: lower an offset, a count or a pitch"
    )]
    Outside {
        /// Offset of the block.
        offset: usize,
        /// Bytes of a row, rows, planes.
        count: [usize; 3],
        /// Offset behind its last byte; `usize::MAX` where the offset overflows.
        end: usize,
        /// Bytes of the region.
        room: u64,
    },
    /// Two blocks are not of the same shape.
    #[error(
        "a strided block of {ours:?} (bytes, rows, planes) cannot be copied to or from one of \
        {theirs:?}: all three have to be the same, only offsets and pitches may differ"
    )]
    Shape {
        /// Shape of the local block.
        ours: [usize; 3],
        /// Shape of the remote block.
        theirs: [usize; 3],
    },
}

impl Strided {
    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.count.contains(&0)
    }

    /// Returns the number of bytes of all rows. `None` on overflow.
    pub fn checked_len(&self) -> Option<usize> {
        let [bytes, rows, planes] = self.count;
        if self.is_empty() { Some(0) } else { bytes.checked_mul(rows)?.checked_mul(planes) }
    }

    /// Checks that rows and planes do not overlap, and that the last byte lies within `room`
    /// bytes. Returns the end of the block, in bytes from the beginning of the region.
    ///
    /// # Errors
    /// See [`StridedError`].
    pub fn check(&self, room: usize) -> Result<usize, StridedError> {
        self.check_within(room as u64)
    }

    /// Does the same for a region that may be longer than this machine's address space.
    ///
    /// # Errors
    /// See [`StridedError`].
    pub fn check_within(&self, room: u64) -> Result<usize, StridedError> {
        let Self { offset, count: [bytes, rows, planes], pitch: [row, plane] } = *self;
        let outside = |end: usize| StridedError::Outside { offset, count: self.count, end, room };
        if self.is_empty() {
            return if offset as u64 <= room { Ok(offset) } else { Err(outside(offset)) };
        }
        if rows > 1 && row < bytes {
            return Err(StridedError::Pitch { what: "rows", pitch: row, len: bytes });
        }
        let far = |pitch: usize, count: usize| {
            if count > 1 { pitch.checked_mul(count - 1) } else { Some(0) }
        };
        let of_plane = far(row, rows).and_then(|far| far.checked_add(bytes));
        let of_plane = of_plane.ok_or_else(|| outside(usize::MAX))?;
        if planes > 1 && plane < of_plane {
            return Err(StridedError::Pitch { what: "planes", pitch: plane, len: of_plane });
        }
        let end = far(plane, planes).and_then(|far| far.checked_add(of_plane)?.checked_add(offset));
        let end = end.ok_or_else(|| outside(usize::MAX))?;
        if end as u64 <= room { Ok(end) } else { Err(outside(end)) }
    }

    /// Makes the shape of an engine's copy between two blocks of the same shape.
    ///
    /// # Errors
    /// [`StridedError::Shape`].
    pub fn grid(dst: &Self, src: &Self) -> Result<Grid, StridedError> {
        if dst.count != src.count {
            return Err(StridedError::Shape { ours: dst.count, theirs: src.count });
        }
        Ok(Grid { count: dst.count, dst_pitch: dst.pitch, src_pitch: src.pitch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(offset: usize, count: [usize; 3], pitch: [usize; 2]) -> Strided {
        Strided { offset, count, pitch }
    }

    #[test]
    fn strided_memory_ends_behind_its_last_byte() {
        assert_eq!(block(5, [10, 1, 1], [0, 0]).check(15), Ok(15));
        assert_eq!(block(5, [10, 3, 1], [16, 0]).check(47), Ok(47));
        assert_eq!(block(5, [10, 3, 4], [16, 100]).check(347), Ok(347));
        assert!(matches!(
            block(5, [10, 3, 4], [16, 100]).check(346),
            Err(StridedError::Outside { end: 347, room: 346, .. })
        ));
    }

    #[test]
    fn rows_and_planes_that_overlap_are_refused() {
        let rows = StridedError::Pitch { what: "rows", pitch: 9, len: 10 };
        assert_eq!(block(0, [10, 2, 1], [9, 0]).check(1000), Err(rows));
        let planes = StridedError::Pitch { what: "planes", pitch: 25, len: 26 };
        assert_eq!(block(0, [10, 2, 2], [16, 25]).check(1000), Err(planes));
        // The pitch of a single row or plane is ignored.
        assert_eq!(block(0, [10, 1, 1], [1, 1]).check(10), Ok(10));
    }

    #[test]
    fn a_strided_block_of_no_bytes_lies_anywhere_in_its_region() {
        for count in [[0, 5, 5], [5, 0, 5], [5, 5, 0]] {
            assert_eq!(block(100, count, [0, 0]).check(100), Ok(100));
            assert_eq!(block(0, count, [0, 0]).checked_len(), Some(0));
            assert!(block(101, count, [0, 0]).check(100).is_err());
        }
    }

    proptest! {
        #[test]
        fn what_is_said_to_lie_within_a_region_does_and_nothing_overflows(
            offset: usize, count: [usize; 3], pitch: [usize; 2], room: u64,
            small in (0_usize..50, [0_usize..9, 0..9, 0..9], [0_usize..40, 0..200]),
        ) {
            let _ = block(offset, count, pitch).check_within(room);
            let (offset, count, pitch) = small;
            let block = block(offset, count, pitch);
            if let Ok(end) = block.check(usize::MAX) {
                let grid = Strided::grid(&block, &block).unwrap();
                let mut taken = vec![false; end];
                for (at, _) in grid.rows().filter(|_| !block.is_empty()) {
                    for byte in &mut taken[offset + at..offset + at + count[0]] {
                        prop_assert!(!std::mem::replace(byte, true), "no byte is copied twice");
                    }
                }
                let count = taken.iter().filter(|&&taken| taken).count();
                prop_assert_eq!(count, block.checked_len().unwrap());
                prop_assert!(block.is_empty() || taken[end - 1], "the last byte is one of its own");
                prop_assert!(end == 0 || block.check(end - 1).is_err());
            }
        }
    }
}
