//! Settings that are one word out of a few.

/// A closed set of words.
pub(super) trait Choice: Copy + PartialEq + 'static {
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

/// A transport that `CARRACK_TRANSPORT` can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportChoice {
    /// `loopback`: to the process itself.
    Loopback,
    /// `shm`: shared memory, to the processes of the same node.
    Shm,
    /// `verbs`: RDMA, to other nodes.
    Verbs,
    /// `verbs-simulated`: the same over a NIC that is simulated on this machine, for tests.
    VerbsSimulated,
}

impl TransportChoice {
    /// Returns the transport's name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, choice)| *choice == self).map_or("", |(name, _)| name)
    }
}

impl Choice for TransportChoice {
    const ALL: &'static [(&'static str, Self)] = &[
        ("loopback", Self::Loopback),
        ("shm", Self::Shm),
        ("verbs", Self::Verbs),
        ("verbs-simulated", Self::VerbsSimulated),
    ];
}

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

/// The values of `CARRACK_KERNEL_COPY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KernelCopyChoice {
    /// `auto`: where the kernel allows it.
    Auto,
    /// `off`: never.
    Off,
}

impl KernelCopyChoice {
    /// Returns `true` if it may be tried.
    pub fn is_allowed(self) -> bool {
        self == Self::Auto
    }
}

impl Choice for KernelCopyChoice {
    const ALL: &'static [(&'static str, Self)] = &[("auto", Self::Auto), ("off", Self::Off)];
}

/// The values of `CARRACK_GPU_IPC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuIpcChoice {
    /// `auto`: where the driver allows it.
    Auto,
    /// `off`: never.
    Off,
}

impl GpuIpcChoice {
    /// Returns `true` if it may be tried.
    pub fn is_allowed(self) -> bool {
        self == Self::Auto
    }
}

impl Choice for GpuIpcChoice {
    const ALL: &'static [(&'static str, Self)] = &[("auto", Self::Auto), ("off", Self::Off)];
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

macro_rules! display_as_word {
    ($($choice:ty),+) => {$(
        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    )+};
}

display_as_word!(
    TransportChoice,
    GpuChoice,
    GpuIpcChoice,
    KernelCopyChoice,
    ProgressChoice,
    DumpChoice,
    BootstrapChoice,
    SwitchChoice
);

#[cfg(test)]
mod tests {
    use super::*;

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
