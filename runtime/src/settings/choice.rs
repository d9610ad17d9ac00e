//! Settings that are one word out of a few.

use carrack_transports::declare_choice;

declare_choice! {
    /// The values of `CARRACK_GPU`.
    pub enum GpuChoice {
        /// `auto`: the GPUs that are there.
        Auto = "auto",
        /// `none`: no GPU, even if there is one.
        None = "none",
        /// `cuda`: NVIDIA's, initialised at the start; an error where there are none.
        Cuda = "cuda",
        /// `fake`: simulated devices, for tests on a machine without a GPU.
        Fake = "fake",
    }
}

declare_choice! {
    /// The values of `CARRACK_PROGRESS`.
    pub enum ProgressChoice {
        /// `caller`: progress is made by the program's calls only.
        Caller = "caller",
        /// `thread`: a thread of the runtime's makes progress, too.
        Thread = "thread",
    }
}

declare_choice! {
    /// The values of `CARRACK_DUMP`.
    pub enum DumpChoice {
        /// `usr1`: on SIGUSR1, progress prints the pending operations.
        Usr1 = "usr1",
        /// `off`: the signal is left alone.
        Off = "off",
    }
}

declare_choice! {
    /// The values of `CARRACK_BOOTSTRAP`.
    pub enum BootstrapChoice {
        /// `auto`: the job of the launcher; an error where that launcher's jobs cannot be joined.
        Auto = "auto",
        /// `carrack`: that of `carrack run`, and no other.
        Carrack = "carrack",
        /// `torchrun`: that of torchrun's variables.
        Torchrun = "torchrun",
        /// `pmix`: that of a PMIx server.
        Pmix = "pmix",
        /// `pmi`: that of a PMI-1 server.
        Pmi = "pmi",
        /// `slurm`: that of Slurm's variables.
        Slurm = "slurm",
        /// `alone`: a job of one, where neither `carrack run` nor torchrun's variables say
        /// otherwise.
        Alone = "alone",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::TransportChoice;
    use carrack_transports::settings::Choice;

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
