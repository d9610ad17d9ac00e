//! The pieces of a block, by powers of two. Each lies at a multiple of its length, and the lowest
//! free place is taken first. The same sequence of calls gives the same places at every rank.

use std::collections::BTreeSet;

/// Bytes of the shortest piece: the alignment of `cudaMalloc`, which suits every vector type.
pub(super) const SHORTEST: usize = 256;

/// The free pieces of a block.
pub(super) struct Buddy {
    /// The beginnings of free pieces, by length: `SHORTEST` first, each twice as long as the one
    /// before.
    free: Vec<BTreeSet<usize>>,
}

/// Returns the index of the list that holds pieces for `len` bytes. `len` is at most half of the
/// address space.
fn order(len: usize) -> usize {
    (len.next_power_of_two().max(SHORTEST) / SHORTEST).trailing_zeros() as usize
}

impl Buddy {
    /// Returns a block whose `len` bytes, a power of two, are all free.
    pub(super) fn of(len: usize) -> Self {
        let mut free = vec![BTreeSet::new(); order(len) + 1];
        if let Some(whole) = free.last_mut() {
            whole.insert(0);
        }
        Self { free }
    }

    /// Takes a piece for `len` bytes and returns its beginning, or `None` if there is no room.
    pub(super) fn take(&mut self, len: usize) -> Option<usize> {
        let wanted = order(len);
        let found = (wanted..self.free.len())
            .find(|&at| self.free.get(at).is_some_and(|free| !free.is_empty()))?;
        let begin = self.free.get_mut(found)?.pop_first()?;
        // The upper halves of the pieces that are split stay free.
        for at in wanted..found {
            self.free.get_mut(at)?.insert(begin + (SHORTEST << at));
        }
        Some(begin)
    }

    /// Gives back the piece at `begin`, which was taken for `len` bytes.
    pub(super) fn give(&mut self, mut begin: usize, len: usize) {
        let mut at = order(len);
        while at + 1 < self.free.len() {
            let other = begin ^ (SHORTEST << at);
            if !self.free.get_mut(at).is_some_and(|free| free.remove(&other)) {
                break;
            }
            begin = begin.min(other);
            at += 1;
        }
        if let Some(free) = self.free.get_mut(at) {
            free.insert(begin);
        }
    }

    /// Returns `true` if the whole block is free.
    pub(super) fn is_whole(&self) -> bool {
        self.free.last().is_some_and(|whole| whole.contains(&0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn pieces_are_powers_of_two_the_lowest_first() {
        let mut block = Buddy::of(4096);
        assert_eq!(
            [block.take(1), block.take(257), block.take(256), block.take(2048)],
            [Some(0), Some(512), Some(256), Some(2048)]
        );
        assert_eq!([block.take(2048), block.take(1025)], [None, None]);
        assert_eq!(block.take(1024), Some(1024));
        assert_eq!(block.take(1), None);
        block.give(0, 1);
        assert_eq!(block.take(200), Some(0));
        for (begin, len) in [(0, 200), (512, 257), (2048, 2048), (1024, 1024)] {
            block.give(begin, len);
            assert!(!block.is_whole());
        }
        block.give(256, 256);
        assert!(block.is_whole());
        assert_eq!(block.take(4096), Some(0));
        assert_eq!(Buddy::of(4096).take(4097), None);
    }

    proptest! {
        #[test]
        fn no_two_pieces_meet_and_what_is_given_back_becomes_whole(
            steps in vec((1_usize..9000, any::<bool>(), any::<usize>()), 1..200),
        ) {
            let len = 1 << 15;
            let mut block = Buddy::of(len);
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (want, take, which) in steps {
                if take || taken.is_empty() {
                    if let Some(begin) = block.take(want) {
                        let span = want.next_power_of_two().max(SHORTEST);
                        prop_assert!(begin % span == 0 && begin + span <= len);
                        let is_apart = |&(other, theirs): &(usize, usize)| {
                            begin + want <= other || other + theirs <= begin
                        };
                        prop_assert!(taken.iter().all(is_apart));
                        taken.push((begin, want));
                    }
                } else {
                    let (begin, len) = taken.swap_remove(which % taken.len());
                    block.give(begin, len);
                }
                prop_assert_eq!(block.is_whole(), taken.is_empty());
            }
        }
    }
}
