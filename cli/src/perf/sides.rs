//! The memory of each rank, by `--mem`.

use carrack::Rank;
use std::fmt;

/// Kinds of memory, for error texts.
const KINDS: &str = "memory is host, pinned, device or device:N";

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Ordinary memory.
    Host,
    /// Host memory that is locked for the engines of GPUs.
    Pinned,
    /// Memory of the GPU of this number.
    Device(usize),
}

impl Kind {
    /// Returns the name that the results give this kind. The name says when a GPU is simulated: its
    /// figures are those of a copy by the CPU.
    pub(super) fn name(self, simulated: bool) -> String {
        if simulated { format!("{self} (simulated)") } else { self.to_string() }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Pinned => f.write_str("pinned"),
            Self::Device(number) => write!(f, "device:{number}"),
        }
    }
}

/// The memory of rank 0, which measures, and of the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sides {
    pub(super) first: Kind,
    pub(super) others: Kind,
}

impl Sides {
    /// Parses an argument of the command line: one kind for both sides, or two.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text.split(',').map(kind).collect::<Result<Vec<_>, _>>()?[..] {
            [both] => Ok(Self { first: both, others: both }),
            [first, others] => Ok(Self { first, others }),
            _ => Err("give one kind of memory, or two: rank 0's and rank 1's".into()),
        }
    }

    /// Returns the kind of a rank's memory.
    pub(super) fn of(self, rank: Rank) -> Kind {
        if rank == Rank(0) { self.first } else { self.others }
    }

    /// Returns `true` if all ranks use ordinary memory.
    pub(super) fn are_host(self) -> bool {
        [self.first, self.others] == [Kind::Host; 2]
    }
}

fn kind(text: &str) -> Result<Kind, String> {
    match (text, text.strip_prefix("device:")) {
        ("host", _) => Ok(Kind::Host),
        ("pinned", _) => Ok(Kind::Pinned),
        ("device", _) => Ok(Kind::Device(0)),
        (_, Some(number)) => number
            .parse()
            .map(Kind::Device)
            .map_err(|_| format!("{number:?} is no number of a device: {KINDS}, counted from 0")),
        _ => Err(format!("{text:?} is no kind of memory: {KINDS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kind_is_for_both_sides_and_a_device_without_number_is_the_first() {
        let both = |kind| Ok(Sides { first: kind, others: kind });
        assert_eq!(Sides::parse("host"), both(Kind::Host));
        assert_eq!(Sides::parse("device"), both(Kind::Device(0)));
        let two = Sides { first: Kind::Pinned, others: Kind::Device(11) };
        assert_eq!(Sides::parse("pinned,device:11"), Ok(two));
        assert_eq!(
            (two.of(Rank(0)), two.of(Rank(1)), two.of(Rank(5))),
            (two.first, two.others, two.others)
        );
    }

    #[test]
    fn what_is_no_kind_of_memory_is_refused() {
        for text in
            ["", "gpu", "device:", "device:-1", "device:x", "host,", "host,host,host", "Host"]
        {
            assert!(Sides::parse(text).is_err(), "{text}");
        }
    }
}
