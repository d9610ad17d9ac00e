//! Groups of copies for one call of an engine, and rows at regular distances.

use super::GpuError;
use crate::mem::MemKind;
use std::fmt;
use std::iter::repeat_n;
use std::ops::Range;
use std::ptr::{null, null_mut};

/// Copies between memory of two kinds, given to an engine in one call
/// ([`Gpu::copy_pieces`](super::Gpu::copy_pieces)). Their order is undefined, so no two may write
/// the same byte, and none may read what another writes.
///
/// One list, in the form that the resident copier takes ([`copier`](super::copier)).
pub struct Pieces {
    dst: MemKind,
    src: MemKind,
    list: Vec<(*mut u8, *const u8, usize)>,
    all: All,
}

/// Properties of all the copies together.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct All {
    /// The or of all targets, sources and lengths: a power of two that divides it divides each of
    /// them.
    pub(super) bits: usize,
    /// Bytes of the longest copy.
    pub(super) longest: usize,
    /// Addresses of all targets, from the first byte to behind the last; likewise all sources.
    /// There may be gaps without memory.
    pub(super) to: Range<usize>,
    pub(super) from: Range<usize>,
}

impl All {
    fn note(&mut self, bits: usize, longest: usize, to: Range<usize>, from: Range<usize>) {
        self.bits |= bits;
        self.longest = self.longest.max(longest);
        self.to = around(&self.to, to);
        self.from = around(&self.from, from);
    }
}

/// Returns the shortest range that contains both.
fn around(one: &Range<usize>, other: Range<usize>) -> Range<usize> {
    if one.is_empty() { other } else { one.start.min(other.start)..one.end.max(other.end) }
}

impl Pieces {
    /// Creates an empty list, with room for `count`.
    pub fn new(dst: MemKind, src: MemKind, count: usize) -> Self {
        Self { dst, src, list: Vec::with_capacity(count), all: All::default() }
    }

    /// Adds a copy of `len` bytes. One of no bytes is dropped, since some drivers refuse it.
    #[inline]
    pub fn push(&mut self, to: *mut u8, from: *const u8, len: usize) {
        if len > 0 {
            self.list.push((to, from, len));
            let (target, source) = (to as usize, from as usize);
            let ends = (target.wrapping_add(len), source.wrapping_add(len));
            self.all.note(target | source | len, len, target..ends.0, source..ends.1);
        }
    }

    /// Adds many copies between two ranges of known lengths. For each of `what`, `place` returns
    /// the offset in the target, the offset in the source, and the length. Returns `true` if all
    /// lie within the ranges; else none is added.
    ///
    /// The loop has no branches: an error in any piece leaves its mark, which is checked at the
    /// end.
    #[inline(always)]
    pub(crate) fn extend<T>(
        &mut self,
        (to, to_room): (*mut u8, usize),
        (from, from_room): (*const u8, usize),
        what: &[T],
        mut place: impl FnMut(&T) -> (usize, usize, usize),
    ) -> bool {
        // Taken out: if the closure panics, no unchecked copy is left in `self`.
        let mut list = std::mem::take(&mut self.list);
        let before = list.len();
        list.extend(repeat_n((null_mut(), null(), 0), what.len()));
        let (mut bits, mut most) = (0, 0);
        let (mut to_end, mut from_end) = (0, 0);
        for (slot, one) in list.iter_mut().skip(before).zip(what) {
            let (there, here, len) = place(one);
            *slot = (to.wrapping_add(there), from.wrapping_add(here), len);
            bits |= there | here | len;
            // A length of 0 wraps to the maximum.
            most = most.max(len.wrapping_sub(1));
            // While no highest bit is set, these are the true sums.
            to_end = to_end.max(there.wrapping_add(len));
            from_end = from_end.max(here.wrapping_add(len));
        }
        // No range has half of all addresses.
        let are_within = bits.cast_signed() >= 0 && to_end <= to_room && from_end <= from_room;
        if !are_within {
            list.truncate(before);
        } else if most == usize::MAX {
            most = keep_those_with_bytes(&mut list, before);
        }
        if list.len() > before {
            let (to, from) = (to as usize, from as usize);
            let (all_to, all_from) =
                (to..to.wrapping_add(to_end), from..from.wrapping_add(from_end));
            self.all.note(bits | to | from, most + 1, all_to, all_from);
        }
        self.list = list;
        are_within
    }

    /// Returns the properties of all copies.
    pub(super) fn all(&self) -> &All {
        &self.all
    }

    /// Returns the number of copies.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the kinds of memory of targets and sources.
    pub fn kinds(&self) -> (MemKind, MemKind) {
        (self.dst, self.src)
    }

    /// Returns each copy: target, source, length.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (*mut u8, *const u8, usize)> + '_ {
        self.list.iter().copied()
    }

    /// Returns each copy as numbers: target and source address, length.
    pub(super) fn numbers(&self) -> impl ExactSizeIterator<Item = (usize, usize, usize)> + '_ {
        self.list.iter().map(|&(to, from, len)| (to as usize, from as usize, len))
    }

    /// Returns the copies as rows at equal distances. Each run takes the most rows from the front
    /// of the remaining list.
    pub(super) fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let run = self.run_at(at)?;
            at += run.rows;
            Some(run)
        })
    }

    /// Returns the longest run of rows that begins at a copy. Its rows have one length and equal
    /// distances on both sides. No distance is negative or shorter than a row.
    fn run_at(&self, at: usize) -> Option<Run> {
        let (to, from, len) = *self.list.get(at)?;
        let steps = |next: usize| {
            let [(before, source, _), (dst, src, its)] =
                *self.list.get(next - 1..)?.first_chunk()?;
            let pitches = (
                (dst as usize).checked_sub(before as usize)?,
                (src as usize).checked_sub(source as usize)?,
            );
            (its == len && pitches.0 >= len && pitches.1 >= len).then_some(pitches)
        };
        let Some((dst_pitch, src_pitch)) = steps(at + 1) else {
            return Some(Run { to, from, len, rows: 1, dst_pitch: len, src_pitch: len });
        };
        let more =
            (at + 2..self.count()).take_while(|&next| steps(next) == Some((dst_pitch, src_pitch)));
        Some(Run { to, from, len, rows: 2 + more.count(), dst_pitch, src_pitch })
    }
}

/// Drops copies of no bytes from index `first` on. Returns the greatest remaining length, less
/// one.
#[cold]
fn keep_those_with_bytes(list: &mut Vec<(*mut u8, *const u8, usize)>, first: usize) -> usize {
    let mut at = 0;
    list.retain(|&(.., len)| {
        at += 1;
        at <= first || len > 0
    });
    list.iter().skip(first).map(|(.., len)| len - 1).max().unwrap_or_default()
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

/// Shape of up to three dimensions of bytes: rows of `count[0]` bytes, `count[1]` rows a plane,
/// `count[2]` planes. Rows and planes may have other distances in the target than in the source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Bytes of a row, rows of a plane, planes.
    pub count: [usize; 3],
    /// Distance from one row of the target to the next, and from one plane to the next, in bytes.
    pub dst_pitch: [usize; 2],
    /// The same for the source.
    pub src_pitch: [usize; 2],
}

impl Grid {
    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.count.contains(&0)
    }

    /// Returns the offsets of each row on both sides, in bytes from the first row.
    pub fn rows(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self { count: [_, rows, planes], dst_pitch, src_pitch } = *self;
        (0..planes).flat_map(move |z| {
            (0..rows).map(move |y| {
                (y * dst_pitch[0] + z * dst_pitch[1], y * src_pitch[0] + z * src_pitch[1])
            })
        })
    }
}

/// Returns the error of a driver that takes no grouped copies.
pub(super) fn none_of(call: &'static str, what: impl fmt::Display) -> GpuError {
    GpuError::unsupported(call, format!("this driver is given no copies together: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{without_provenance, without_provenance_mut};

    fn pieces(list: &[(usize, usize, usize)]) -> Pieces {
        let mut pieces = Pieces::new(MemKind::Pinned, MemKind::Pinned, list.len());
        for &(to, from, len) in list {
            pieces.push(without_provenance_mut(to), without_provenance(from), len);
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
        assert_eq!(
            lengths(&[(100, 900, 8), (164, 916, 9), (228, 932, 9)]),
            [(1, 8, 8), (2, 64, 16)]
        );
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

    /// Adds pieces in memory of which nothing is touched. Returns `true` if they were kept.
    fn extend(pieces: &mut Pieces, rooms: (usize, usize), what: &[(usize, usize, usize)]) -> bool {
        let (to, from) = (without_provenance_mut(0x1000), without_provenance(0x9008));
        pieces.extend((to, rooms.0), (from, rooms.1), what, |&place| place)
    }

    #[test]
    fn many_are_kept_if_all_lie_within_and_else_none() {
        let before = [(1_usize, 2, 3)];
        let good = [(0, 90, 10), (92, 0, 8), (100, 100, 0), (50, 50, 1)];
        let kept = [(0x1000, 0x9062, 10), (0x105c, 0x9008, 8), (0x1032, 0x903a, 1)];
        let list = |pieces: &Pieces| pieces.numbers().collect::<Vec<_>>();
        let mut pieces = pieces(&before);
        assert!(extend(&mut pieces, (100, 100), &good));
        assert_eq!(list(&pieces), [&before[..], &kept].concat());
        let wrong = [
            (91, 0, 10),
            (0, 91, 10),
            (101, 0, 0),
            (0, 101, 0),
            (usize::MAX, 0, 2),
            (0, usize::MAX, 2),
            (5, 5, usize::MAX - 3),
            (1 << 63, 1 << 63, 1 << 63),
        ];
        for wrong in wrong {
            for at in 0..=good.len() {
                let mut what = good.to_vec();
                what.insert(at, wrong);
                let all = pieces.all().clone();
                assert!(!extend(&mut pieces, (100, 100), &what), "{wrong:?} at {at}");
                assert_eq!((list(&pieces), pieces.all()), ([&before[..], &kept].concat(), &all));
            }
        }
        assert!(extend(&mut pieces, (0, 0), &[]) && extend(&mut pieces, (0, 0), &[(0, 0, 0); 3]));
        assert_eq!(pieces.count(), 4);
    }

    #[test]
    fn what_is_said_of_all_is_true_of_each() {
        let none = pieces(&[]);
        assert_eq!((none.all().bits, none.all().longest), (0, 0));
        let mut aligned = pieces(&[(0x2000, 0xa008, 16)]);
        assert!(extend(
            &mut aligned,
            (0x800, 0x800),
            &[(0x10, 0x18, 24), (0x40, 0x20, 0), (0x7d8, 0, 8)]
        ));
        let all = aligned.all();
        assert_eq!((all.bits % 8, all.longest), (0, 24), "multiples of 8");
        assert_eq!((all.to.clone(), all.from.clone()), (0x1000..0x2010, 0x9008..0xa018));
        assert!(extend(&mut aligned, (0x800, 0x800), &[(4, 0, 4)]));
        assert_eq!(aligned.all().bits % 8, 4);
        let odd = pieces(&[(0x10, 0x20, 3)]);
        assert_eq!((odd.all().bits % 4, odd.all().longest), (3, 3));
    }

    #[test]
    fn a_closure_that_panics_leaves_nothing_that_was_not_looked_at() {
        let mut pieces = pieces(&[(1, 2, 3)]);
        let what = [(usize::MAX, 0, 8), (0, 0, 0)];
        let panics = std::panic::AssertUnwindSafe(|| {
            let to = (without_provenance_mut(0x1000), 100);
            pieces.extend(to, (without_provenance(0x9000), 100), &what, |&place| {
                assert!(place.2 > 0, "on purpose");
                place
            })
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(pieces.is_empty());
    }

    #[test]
    fn the_rows_of_a_grid_are_counted_plane_by_plane() {
        let grid = Grid { count: [4, 2, 2], dst_pitch: [10, 100], src_pitch: [4, 8] };
        assert_eq!(grid.rows().collect::<Vec<_>>(), [(0, 0), (10, 4), (100, 8), (110, 12)]);
        assert!(Grid { count: [4, 0, 2], ..grid }.is_empty());
    }
}
