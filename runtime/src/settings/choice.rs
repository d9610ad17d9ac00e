//! Settings that are one word out of a few.

use carrack_transports::display_as_word;
use carrack_transports::settings::Choice;

/// The values of `CARRACK_GPU`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuChoice {
    /// `auto`: the GPUs that are there.
    Auto,
    /// `none`: no GPU, even if there is one.
    None,
    /// `cuda`: NVIDIA's, initialised at the start; an error where there are none.
    Cuda,
    /// `fake`: simulated devices, for tests on a machine without a GPU.
    Fake,
}

impl Choice for GpuChoice {
    const ALL: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("none", Self::None), ("cuda", Self::Cuda), ("fake", Self::Fake)];
}

/// The values of `CARRACK_PROGRESS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProgressChoice {
    /// `caller`: progress is made by the program's calls only.
    Caller,
    /// `thread`: a thread of the runtime's makes progress, too.
    Thread,
}

impl ProgressChoice {
    pub(crate) fn is_thread(self) -> bool {
        self == Self::Thread
    }
}

impl Choice for ProgressChoice {
    const ALL: &'static [(&'static str, Self)] =
        &[("caller", Self::Caller), ("thread", Self::Thread)];
}

/// The values of `CARRACK_DUMP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DumpChoice {
    /// `usr1`: on SIGUSR1, progress prints the pending operations.
    Usr1,
    /// `off`: the signal is left alone.
    Off,
}

impl DumpChoice {
    pub(crate) fn is_on(self) -> bool {
        self == Self::Usr1
    }
}

impl Choice for DumpChoice {
    const ALL: &'static [(&'static str, Self)] = &[("usr1", Self::Usr1), ("off", Self::Off)];
}

/// The values of `CARRACK_BOOTSTRAP`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BootstrapChoice {
    /// `auto`: the job of the launcher; an error where that launcher's jobs cannot be joined.
    Auto,
    /// `alone`: a job of one, where neither `carrack run` nor torchrun's variables say otherwise.
    Alone,
}

impl BootstrapChoice {
    pub(crate) fn is_alone(self) -> bool {
        self == Self::Alone
    }
}

impl Choice for BootstrapChoice {
    const ALL: &'static [(&'static str, Self)] = &[("auto", Self::Auto), ("alone", Self::Alone)];
}

display_as_word!(GpuChoice, ProgressChoice, DumpChoice, BootstrapChoice);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::TransportChoice;

    #[test]
    fn every_choice_is_displayed_as_the_word_that_stands_for_it() {
        assert_eq!(
            [TransportChoice::Loopback, TransportChoice::Shm, TransportChoice::VerbsSimulated]
                .map(|c| c.to_string()),
            ["loopback", "shm", "verbs-simulated"]
        );
        assert_eq!(
            [GpuChoice::Auto, GpuChoice::None, GpuChoice::Cuda, GpuChoice::Fake]
                .map(|c| c.to_string()),
            ["auto", "none", "cuda", "fake"]
        );
    }

    #[test]
    fn a_word_may_be_written_in_capitals_and_another_stands_for_nothing() {
        assert_eq!(GpuChoice::from_word("FAKE"), Some(GpuChoice::Fake));
        assert_eq!(GpuChoice::from_word("rocm"), None);
    }
}
