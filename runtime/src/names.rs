//! Ranks, tags and the other names that both ends of an operation agree on.

use carrack_transports::fnv;
use std::fmt;

/// A process of the job, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Rank(pub u32);

impl Rank {
    /// Any sender, in a receive. The sender must have posted with a matching policy that leaves the
    /// rank out, too ([`Matching`](crate::Matching)): this is LCI's wildcard, not MPI's.
    pub const ANY: Self = Self(u32::MAX);
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ANY {
            return f.write_str("any rank");
        }
        write!(f, "rank {}", self.0)
    }
}

/// The tag that a message is matched by, in addition to its rank: all 64 bits of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Tag(pub u64);

impl Tag {
    /// Any tag, in a receive. The sender must have posted with a policy that leaves the tag out.
    pub const ANY: Self = Self(u64::MAX);
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ANY {
            return f.write_str("any tag");
        }
        write!(f, "tag {}", self.0)
    }
}

/// A completion object of another rank, as it registered it. The value is a number of 20 bits, and
/// above it a generation of 11. Of a text it is 31 bits of the hash, with the highest bit set.
///
/// A number that is used again has the next generation, so a late message finds no object. A name
/// by text stays the same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RemoteComp(pub u32);

impl RemoteComp {
    /// Numbers of one generation.
    pub(crate) const NUMBERS: usize = 1 << Self::NUMBER_BITS;
    /// Generations of one number.
    pub(crate) const GENERATIONS: u32 = Self::TEXT >> Self::NUMBER_BITS;
    const NUMBER_BITS: u32 = 20;
    /// The mark of names that are made of a text.
    const TEXT: u32 = 1 << 31;

    /// Returns the name that [`register_comp_named`](crate::Runtime::register_comp_named) gives to
    /// an object under this text, on every rank. It is made of 31 bits of the text's hash (FNV-1a).
    pub const fn named(text: &str) -> Self {
        let hash = fnv::of(text.as_bytes());
        Self((hash ^ hash >> 32) as u32 | Self::TEXT)
    }

    /// Returns `true` if it is made of a text.
    pub(crate) fn is_of_text(self) -> bool {
        self.0 & Self::TEXT != 0
    }

    /// Returns the name of a number in a generation, or `None` if it is out of range.
    pub(crate) fn of(number: usize, generation: u32) -> Option<Self> {
        let number = u32::try_from(number).ok().filter(|_| number < Self::NUMBERS)?;
        (generation < Self::GENERATIONS).then_some(Self(generation << Self::NUMBER_BITS | number))
    }

    /// Returns the number without its generation.
    #[inline(always)]
    pub(crate) fn number(self) -> usize {
        self.0 as usize % Self::NUMBERS
    }
}

/// A number of the user's own that comes back in the status of the operation it was given to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct UserContext(pub u64);

/// The properties on which a message and a receive must agree to meet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Matching {
    /// No property: any message meets any receive of this policy.
    None,
    /// The sender's rank.
    RankOnly,
    /// The tag.
    TagOnly,
    /// The sender's rank and the tag.
    #[default]
    RankTag,
}

impl Matching {
    /// Returns its number on the wire: one bit for the rank, one for the tag.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::None => 0,
            Self::RankOnly => 1,
            Self::TagOnly => 2,
            Self::RankTag => 3,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::None, Self::RankOnly, Self::TagOnly, Self::RankTag].get(usize::from(code)).copied()
    }

    pub(crate) fn looks_at_rank(self) -> bool {
        self.code() & 1 != 0
    }

    pub(crate) fn looks_at_tag(self) -> bool {
        self.code() & 2 != 0
    }
}

/// The number of the matching engine that is used where the program names none.
pub(crate) const DEFAULT_ENGINE: u16 = 0;

/// The number of the matching engine of collectives.
pub(crate) const COLLECTIVE_ENGINE: u16 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_is_printed_as_what_it_means() {
        assert_eq!(format!("{}, {}", Rank(4), Rank::ANY), "rank 4, any rank");
        assert_eq!(format!("{}, {}", Tag(4), Tag::ANY), "tag 4, any tag");
    }

    #[test]
    fn each_policy_is_read_from_its_number_and_no_other_number_is_one() {
        let policies = [Matching::None, Matching::RankOnly, Matching::TagOnly, Matching::RankTag];
        for policy in policies {
            assert_eq!(Matching::from_code(policy.code()), Some(policy));
        }
        assert_eq!((4..=u8::MAX).find_map(Matching::from_code), None);
    }
}
