//! The ranks that share memory, and what each tells the others about itself.

use super::error::SharedAllocError;
use super::wire::TextBytes;
use crate::names::Rank;
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::GpuUuid;
use carrack_transports::net::boot_id;
use zerocopy::little_endian::{U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A set of ranks of a group that share memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Scope {
    /// The ranks of one node, that is, of one Linux kernel. Ranks in containers of one machine are
    /// on one node. Where containers keep GPU memory from being mapped, the making of the
    /// allocator or its first allocation fails and reports that.
    Node,
    /// The ranks of a node whose GPUs are at the same NUMA node, as Linux reports for their PCI
    /// addresses. GPUs without such a report count as one socket;
    /// [`describe`](super::SharedDeviceAllocator::describe) reports that.
    Socket,
}

/// Bytes of a reason in a message, at most.
const REASON: usize = 160;

/// The description of a rank, sent when an allocator is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct MemberDescription {
    pub(super) scope: Scope,
    /// The boot identifier of its kernel.
    pub(super) boot: u128,
    pub(super) socket: Option<u32>,
    pub(super) gpu: GpuUuid,
    /// A number for the group of the scope, used if this rank becomes its leader.
    pub(super) ticket: u32,
    /// The reason why it cannot take part.
    pub(super) trouble: Option<String>,
}

/// The bytes of a description: the same number for each.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DescriptionBytes {
    scope: u8,
    boot: U128,
    has_socket: u8,
    socket: U32,
    gpu: [u8; 16],
    ticket: U32,
    trouble: TextBytes<REASON>,
}

impl MemberDescription {
    /// Makes this rank's description, in spite of any trouble: the others wait for it.
    pub(super) fn of(
        gpu: &dyn Gpu,
        scope: Scope,
        ticket: Option<u32>,
    ) -> (Self, Result<u32, String>) {
        let (boot, socket) = (boot_id().map(u128::from_be_bytes), gpu.numa_node());
        let spent = || "it has made all the allocators that a rank can make".to_owned();
        let trouble = boot.as_ref().err().cloned().or_else(|| ticket.is_none().then(spent));
        let description = Self {
            scope,
            boot: boot.unwrap_or(0),
            socket: socket.as_ref().ok().copied(),
            gpu: gpu.info().uuid,
            ticket: ticket.unwrap_or(0),
            trouble,
        };
        (description, socket)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let scope = match self.scope {
            Scope::Node => 1,
            Scope::Socket => 2,
        };
        let bytes = DescriptionBytes {
            scope,
            boot: self.boot.into(),
            has_socket: self.socket.is_some().into(),
            socket: self.socket.unwrap_or(0).into(),
            gpu: self.gpu.0,
            ticket: self.ticket.into(),
            trouble: TextBytes::of(self.trouble.as_deref()),
        };
        bytes.as_bytes().to_vec()
    }

    /// Decodes a description. `None`: the bytes are no description.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let description = DescriptionBytes::ref_from_bytes(bytes).ok()?;
        let scope = match description.scope {
            1 => Scope::Node,
            2 => Scope::Socket,
            _ => return None,
        };
        let socket = match description.has_socket {
            0 => None,
            1 => Some(description.socket.get()),
            _ => return None,
        };
        let (boot, gpu, ticket) =
            (description.boot.get(), GpuUuid(description.gpu), description.ticket.get());
        Some(Self { scope, boot, socket, gpu, ticket, trouble: description.trouble.get()? })
    }

    /// Returns `true` if the two ranks share memory.
    fn is_with(&self, other: &Self) -> bool {
        self.boot == other.boot && (self.scope == Scope::Node || self.socket == other.socket)
    }
}

/// Checks the descriptions of all ranks. Every rank finds the same trouble.
pub(super) fn check(all: &[(Rank, MemberDescription)], me: Rank) -> Result<(), SharedAllocError> {
    if let Some((rank, why)) =
        all.iter().find_map(|(rank, description)| Some((*rank, description.trouble.clone()?)))
    {
        return Err(SharedAllocError::Unable { rank, why });
    }
    let ours = all.iter().find(|(rank, _)| *rank == me).map(|(_, description)| description.scope);
    let scopes = || all.iter().map(|(rank, description)| (*rank, description.scope));
    let first = scopes().next().map(|(_, scope)| scope);
    let differs = scopes()
        .find(|(_, scope)| Some(*scope) != ours)
        .or_else(|| scopes().find(|(_, scope)| Some(*scope) != first));
    match (differs, ours) {
        (Some((rank, theirs)), Some(ours)) => Err(SharedAllocError::Differ {
            rank,
            theirs: format!("an allocator of scope {theirs:?}"),
            ours: format!("one of scope {ours:?}"),
        }),
        _ => Ok(()),
    }
}

/// Returns the ranks that share memory with this rank, itself among them, in rank order. The first
/// is the leader.
pub(super) fn of(all: &[(Rank, MemberDescription)], me: Rank) -> Vec<(Rank, MemberDescription)> {
    let Some((_, mine)) = all.iter().find(|(rank, _)| *rank == me) else { return Vec::new() };
    let mut with: Vec<_> =
        all.iter().filter(|(_, description)| description.is_with(mine)).cloned().collect();
    with.sort_by_key(|(rank, _)| *rank);
    with
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn description(scope: Scope, boot: u128, socket: Option<u32>) -> MemberDescription {
        MemberDescription { scope, boot, socket, gpu: GpuUuid([7; 16]), ticket: 3, trouble: None }
    }

    fn ranks(
        descriptions: impl IntoIterator<Item = MemberDescription>,
    ) -> Vec<(Rank, MemberDescription)> {
        (0..).map(Rank).zip(descriptions).collect()
    }

    fn with(all: &[(Rank, MemberDescription)], me: u32) -> Vec<u32> {
        of(all, Rank(me)).iter().map(|(rank, _)| rank.0).collect()
    }

    #[test]
    fn ranks_have_memory_together_by_node_or_by_socket_and_the_lowest_leads() {
        let places = [
            (1, Some(0)),
            (2, Some(0)),
            (1, Some(1)),
            (1, Some(0)),
            (2, Some(0)),
            (1, None),
            (1, None),
        ];
        let of_scope = |scope| ranks(places.map(|(boot, socket)| description(scope, boot, socket)));
        let (nodes, sockets) = (of_scope(Scope::Node), of_scope(Scope::Socket));
        assert_eq!(with(&nodes, 3), [0, 2, 3, 5, 6]);
        assert_eq!(with(&nodes, 1), [1, 4]);
        assert_eq!(with(&sockets, 3), [0, 3]);
        assert_eq!(with(&sockets, 2), [2]);
        assert_eq!(with(&sockets, 6), [5, 6], "those of which nothing is known are of one socket");
        let mut turned = nodes.clone();
        turned.reverse();
        assert_eq!(with(&turned, 4), [1, 4], "whatever the group's order is");
    }

    #[test]
    fn what_is_wrong_is_named_at_every_rank() {
        let mut all = ranks([
            description(Scope::Node, 1, None),
            description(Scope::Node, 1, None),
            description(Scope::Node, 1, None),
        ]);
        assert!(check(&all, Rank(0)).is_ok());
        all[2].1.scope = Scope::Socket;
        let named = |me| match check(&all, Rank(me)) {
            Err(SharedAllocError::Differ { rank, .. }) => rank.0,
            other => panic!("{other:?}"),
        };
        assert_eq!([named(0), named(1), named(2)], [2, 2, 0]);
        all[1].1.trouble = Some("no kernel".into());
        for me in 0..3 {
            let why = check(&all, Rank(me)).unwrap_err().to_string();
            assert!(why.contains("rank 1") && why.contains("no kernel"), "{why}");
        }
    }

    proptest! {
        #[test]
        fn a_card_survives_the_wire_and_other_bytes_are_none(
            boot: u128, socket: Option<u32>, gpu: [u8; 16], ticket: u32, trouble: Option<String>,
            by_socket: bool, other: Vec<u8>, at: usize, to: u8,
        ) {
            let scope = if by_socket { Scope::Socket } else { Scope::Node };
            let short = trouble.clone().filter(|text| text.len() <= REASON);
            let gpu = GpuUuid(gpu);
            let description =
                MemberDescription { scope, boot, socket, gpu, ticket, trouble: short };
            let mut bytes = description.encode();
            prop_assert_eq!(MemberDescription::decode(&bytes), Some(description.clone()));
            let long = MemberDescription { trouble, ..description };
            prop_assert_eq!(long.encode().len(), bytes.len(), "all are of one length");
            prop_assert!(MemberDescription::decode(&long.encode()).is_some());
            let _ = MemberDescription::decode(&other);
            prop_assert!(MemberDescription::decode(&bytes[1..]).is_none());
            let at = at % bytes.len();
            bytes[at] = to;
            if let Some(description) = MemberDescription::decode(&bytes) {
                prop_assert!(description.trouble.is_none_or(|text| text.len() <= REASON));
            }
        }
    }
}
