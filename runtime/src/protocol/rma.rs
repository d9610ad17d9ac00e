//! The choice of who carries out a one-sided operation.
//!
//! A word has one agent, since operations of two agents are not atomic with each other.

use carrack_transports::mem::MemKind;

/// Mover of the bytes of a put or a get.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mover {
    /// The CPU, within the call.
    Cpu,
    /// A copy engine of a GPU.
    Engine,
    /// A NIC that knows the place, else the owner of the memory.
    Other,
}

/// Chooses who moves bytes between local memory and remote memory, whose kind is `None` if it is
/// not mapped here.
#[inline(always)]
pub(crate) fn mover(remote: Option<MemKind>, local: MemKind) -> Mover {
    match remote {
        None => Mover::Other,
        Some(remote) if remote.is_host() && local.is_host() => Mover::Cpu,
        Some(_) => Mover::Engine,
    }
}

/// Agent that changes a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Agent {
    /// The owner's NIC, for all ranks.
    Nic,
    /// The CPU of a rank that has the word mapped, its owner included.
    Cpu,
    /// The owner's progress: by its GPU's engine, or by its CPU where the word is not mapped here.
    Owner,
}

/// Chooses who changes a word, whose memory is of a kind, or `None` if it is not mapped here.
#[inline(always)]
pub(crate) fn agent(is_nics: bool, mapped: Option<MemKind>) -> Agent {
    match mapped {
        _ if is_nics => Agent::Nic,
        None | Some(MemKind::Device(_)) => Agent::Owner,
        // An operation on memory that is not the host's is refused there.
        Some(_) => Agent::Cpu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_transports::mem::GpuUuid;

    const GPU: MemKind = MemKind::Device(GpuUuid([1; 16]));
    const OTHER_GPU: MemKind = MemKind::Device(GpuUuid([2; 16]));

    #[test]
    fn each_pair_of_kinds_has_one_mover() {
        use MemKind::{Host, Pinned, Unknown};
        use Mover::{Cpu, Engine, Other};
        for (remote, local, expected) in [
            (None, Host, Other),
            (None, GPU, Other),
            (Some(Host), Host, Cpu),
            (Some(Host), Pinned, Cpu),
            (Some(Pinned), Pinned, Cpu),
            (Some(Host), GPU, Engine),
            (Some(GPU), Host, Engine),
            (Some(GPU), OTHER_GPU, Engine),
            // No CPU touches memory that is not known to be the host's.
            (Some(Host), Unknown, Engine),
            (Some(Unknown), Host, Engine),
        ] {
            assert_eq!(mover(remote, local), expected, "{remote:?} and {local:?}");
        }
    }

    #[test]
    fn each_word_has_one_agent_for_ranks_that_have_it_mapped_and_for_others() {
        for (is_nics, mapped, expected) in [
            (true, None, Agent::Nic),
            (true, Some(MemKind::Host), Agent::Nic),
            (true, Some(GPU), Agent::Nic),
            (false, None, Agent::Owner),
            (false, Some(GPU), Agent::Owner),
            (false, Some(MemKind::Host), Agent::Cpu),
            (false, Some(MemKind::Pinned), Agent::Cpu),
        ] {
            assert_eq!(agent(is_nics, mapped), expected, "{is_nics} {mapped:?}");
        }
    }
}
