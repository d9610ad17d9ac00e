//! Settings that are one word out of a few.

/// A closed set of words.
pub trait Choice: Copy + PartialEq + 'static {
    /// Each value with its word, in the order in which they are named to the user.
    const ALL: &'static [(&'static str, Self)];

    /// Returns the words.
    fn words() -> impl Iterator<Item = &'static str> {
        Self::ALL.iter().map(|(word, _)| *word)
    }

    /// Returns the value of a word, in upper or lower case.
    fn from_word(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(word, _)| word.eq_ignore_ascii_case(text)).map(|(_, value)| *value)
    }

    /// Returns the word of this value.
    fn word(&self) -> &'static str {
        // Every value is in `ALL` (a test walks over them); the empty word is for the compiler.
        Self::ALL.iter().find(|(_, value)| value == self).map_or("", |(word, _)| *word)
    }
}

/// Displays choices as their words.
#[macro_export]
macro_rules! display_as_word {
    ($($choice:ty),+) => {$(
        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad($crate::settings::Choice::word(self))
            }
        }
    )+};
}

/// A feature that is used where the system permits it, or never: `CARRACK_KERNEL_COPY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AutoChoice {
    /// `auto`: where the kernel or the driver allows it.
    Auto,
    /// `off`: never.
    Off,
}

impl AutoChoice {
    /// Returns `true` if it may be tried.
    pub fn is_allowed(self) -> bool {
        self == Self::Auto
    }
}

impl Choice for AutoChoice {
    const ALL: &'static [(&'static str, Self)] = &[("auto", Self::Auto), ("off", Self::Off)];
}

/// A feature that is on or off, such as that of `CARRACK_VERBS_ODP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SwitchChoice {
    /// `on`: it is done, where it can be.
    On,
    /// `off`: it is not.
    Off,
}

impl SwitchChoice {
    pub(crate) fn is_on(self) -> bool {
        self == Self::On
    }
}

impl Choice for SwitchChoice {
    const ALL: &'static [(&'static str, Self)] = &[("on", Self::On), ("off", Self::Off)];
}

display_as_word!(AutoChoice, SwitchChoice);
