//! The result of matching a message, as a mark of its arrival.

use carrack_transports::contract::Mark;

/// The result of matching a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// The message waits for its receive; or it has met one, and all is done.
    Kept,
    /// The message has met its receive: the n-th meeting of the batch.
    Met(usize),
    /// The message makes no sense.
    Nonsense,
}

const KEPT: u16 = 1;
const NONSENSE: u16 = 2;
const MET: u16 = 3;

impl Found {
    /// Returns the mark. A batch has fewer messages than a mark has values.
    #[inline(always)]
    pub(super) fn mark(self) -> Mark {
        Mark(match self {
            Self::Kept => KEPT,
            Self::Nonsense => NONSENSE,
            Self::Met(at) => u16::try_from(at).map_or(u16::MAX, |at| at.saturating_add(MET)),
        })
    }

    /// Returns `None` for a message that is not matched.
    #[inline(always)]
    pub(super) fn of(mark: Mark) -> Option<Self> {
        match mark.0 {
            0 => None,
            KEPT => Some(Self::Kept),
            NONSENSE => Some(Self::Nonsense),
            met => Some(Self::Met(usize::from(met - MET))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_read_as_it_was_marked() {
        assert_eq!(Found::of(Mark::default()), None);
        for found in [Found::Kept, Found::Nonsense, Found::Met(0), Found::Met(1023)] {
            assert_eq!(Found::of(found.mark()), Some(found));
        }
    }
}
