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

/// Declares a [`Choice`](crate::settings::Choice): an enum of which each value has a word, by which
/// it is displayed as well.
#[macro_export]
macro_rules! declare_choice {
    (
        $(#[$about:meta])+
        pub enum $choice:ident {
            $($(#[$doc:meta])+ $value:ident = $word:expr,)+
        }
    ) => {
        $(#[$about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $choice {
            $($(#[$doc])+ $value,)+
        }

        impl $crate::settings::Choice for $choice {
            const ALL: &'static [(&'static str, Self)] = &[$(($word, Self::$value)),+];
        }

        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad($crate::settings::Choice::word(self))
            }
        }
    };
}

declare_choice! {
    /// A feature that is used where the system permits it, or never: `CARRACK_KERNEL_COPY`.
    pub enum AutoChoice {
        /// `auto`: where the kernel or the driver allows it.
        Auto = "auto",
        /// `off`: never.
        Off = "off",
    }
}
