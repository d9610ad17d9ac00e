//! Many copies that an engine is given together, and rows at regular distances.

use super::GpuError;
use crate::mem::MemKind;
use std::fmt;

/// Copies between memory of two kinds, given to an engine in one call ([`Gpu::copy_pieces`](super::Gpu::copy_pieces)). In what order
/// they are done nobody says, so no two may write the same byte, and none may read what another writes.
///
/// One list, as the resident copier takes it ([`copier`](super::copier)).
pub struct Pieces {
    dst: MemKind,
    src: MemKind,
    list: Vec<(*mut u8, *const u8, usize)>,
}

impl Pieces {
    /// None so far, with room for `count`.
    pub fn new(dst: MemKind, src: MemKind, count: usize) -> Self {
        Self { dst, src, list: Vec::with_capacity(count) }
    }

    /// One more copy, of `len` bytes. None of no bytes is kept: some drivers refuse them.
    #[inline]
    pub fn push(&mut self, to: *mut u8, from: *const u8, len: usize) {
        if len > 0 {
            self.list.push((to, from, len));
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The kinds of memory of targets and sources.
    pub fn kinds(&self) -> (MemKind, MemKind) {
        (self.dst, self.src)
    }

    /// Each copy: to where, from where, how many bytes.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (*mut u8, *const u8, usize)> + '_ {
        self.list.iter().copied()
    }

    /// The copies as rows at equal distances, as few as there are: what is left of the lists is taken from the front.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let run = self.run_at(at)?;
            at += run.rows;
            Some(run)
        })
    }

    /// The longest run of rows that begins at a copy: of one length, and at equal distances on both sides, none of which
    /// goes backwards or is shorter than a row.
    fn run_at(&self, at: usize) -> Option<Run> {
        let (to, from, len) = *self.list.get(at)?;
        let steps = |next: usize| {
            let [(before, source, _), (dst, src, its)] = *self.list.get(next - 1..)?.first_chunk()?;
            let pitches =
                ((dst as usize).checked_sub(before as usize)?, (src as usize).checked_sub(source as usize)?);
            (its == len && pitches.0 >= len && pitches.1 >= len).then_some(pitches)
        };
        let Some((dst_pitch, src_pitch)) = steps(at + 1) else {
            return Some(Run { to, from, len, rows: 1, dst_pitch: len, src_pitch: len });
        };
        let more = (at + 2..self.count()).take_while(|&next| steps(next) == Some((dst_pitch, src_pitch)));
        Some(Run { to, from, len, rows: 2 + more.count(), dst_pitch, src_pitch })
    }
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pieces from {} to {} memory", self.count(), self.src, self.dst)
    }
}

/// Rows of one length at equal distances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub(super) to: *mut u8,
    pub(super) from: *const u8,
    pub(super) len: usize,
    pub(super) rows: usize,
    pub(super) dst_pitch: usize,
    pub(super) src_pitch: usize,
}

/// Up to three dimensions of bytes: rows of `count[0]` bytes, `count[1]` of them to a plane, `count[2]` planes. How far apart rows
/// begin, and planes, may differ from one side to the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Bytes of a row, rows of a plane, planes.
    pub count: [usize; 3],
    /// From one row of the target to the next, and from one plane to the next, in bytes.
    pub dst_pitch: [usize; 2],
    /// The same of the source.
    pub src_pitch: [usize; 2],
}

impl Grid {
    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.count.contains(&0)
    }

    /// Each row: where it begins on both sides, in bytes from the first.
    pub fn rows(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self { count: [_, rows, planes], dst_pitch, src_pitch } = *self;
        (0..planes).flat_map(move |z| {
            (0..rows).map(move |y| (y * dst_pitch[0] + z * dst_pitch[1], y * src_pitch[0] + z * src_pitch[1]))
        })
    }
}

/// Several copies were begun where one call was meant to, and the one that was refused.
pub(super) fn none_of(call: &'static str, what: impl fmt::Display) -> GpuError {
    GpuError::unsupported(call, format!("this driver is given no copies together: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(list: &[(usize, usize, usize)]) -> Pieces {
        let mut pieces = Pieces::new(MemKind::Pinned, MemKind::Pinned, list.len());
        for &(to, from, len) in list {
            pieces.push(std::ptr::without_provenance_mut(to), std::ptr::without_provenance(from), len);
        }
        pieces
    }

    fn lengths(list: &[(usize, usize, usize)]) -> Vec<(usize, usize, usize)> {
        pieces(list).runs().map(|run| (run.rows, run.dst_pitch, run.src_pitch)).collect()
    }

    #[test]
    fn rows_at_equal_distances_are_found_and_all_others_stand_alone() {
        assert_eq!(lengths(&[]), []);
        assert_eq!(lengths(&[(100, 900, 8)]), [(1, 8, 8)]);
        let rows: Vec<_> = (0..5).map(|row| (100 + 64 * row, 900 + 16 * row, 8)).collect();
        assert_eq!(lengths(&rows), [(5, 64, 16)]);
        // Another length, a step backwards, a distance shorter than a row.
        assert_eq!(lengths(&[(100, 900, 8), (164, 916, 9), (228, 932, 9)]), [(1, 8, 8), (2, 64, 16)]);
        assert_eq!(lengths(&[(100, 900, 8), (50, 950, 8)]), [(1, 8, 8), (1, 8, 8)]);
        assert_eq!(lengths(&[(100, 900, 8), (164, 904, 8)]), [(1, 8, 8), (1, 8, 8)]);
        let first = pieces(&rows).runs().next().unwrap();
        assert_eq!((first.to as usize, first.from as usize, first.len), (100, 900, 8));
    }

    #[test]
    fn pieces_of_no_bytes_are_not_kept() {
        let pieces = pieces(&[(100, 900, 0), (200, 300, 4)]);
        assert_eq!((pieces.count(), pieces.is_empty()), (1, false));
        assert_eq!(pieces.iter().map(|(_, _, len)| len).collect::<Vec<_>>(), [4]);
    }

    #[test]
    fn the_rows_of_a_grid_are_counted_plane_by_plane() {
        let grid = Grid { count: [4, 2, 2], dst_pitch: [10, 100], src_pitch: [4, 8] };
        assert_eq!(grid.rows().collect::<Vec<_>>(), [(0, 0), (10, 4), (100, 8), (110, 12)]);
        assert!(Grid { count: [4, 0, 2], ..grid }.is_empty());
    }
}
