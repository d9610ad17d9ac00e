//! Keys by which importers find memory.

use super::broker::{self, BrokerAddress};
use crate::contract::WireKey;
use crate::gpu::Handle;
use crate::mem::MapError;
use crate::net::parts::{self, Rest};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use std::os::fd::OwnedFd;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Key of an allocation: its ledger, its handle, and the handle's descriptor in the exporter's
/// process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AllocationKey {
    /// The ledger's own key, which is that of shared host memory.
    pub(super) ledger: WireKey,
    pub(super) pid: u32,
    /// The descriptor's number, where the handle has one.
    pub(super) fd: Option<u32>,
    /// Address of the broker that hands out the descriptor, if there is one.
    pub(super) broker: Option<BrokerAddress>,
    /// `true` if the device is simulated: simulated and real drivers do not open each other's
    /// handles.
    pub(super) simulated: bool,
    /// Bytes of the region, which begins where the handle says.
    pub(super) len: u64,
    /// Handle as [`Handle::encode`] gives it.
    pub(super) handle: [u8; Handle::WIRE],
}

/// First bytes of a key; those of its ledger follow.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct KeyHead {
    pid: U32,
    fd: U32,
    simulated: U32,
    len: U64,
    broker: BrokerAddress,
    handle: [u8; Handle::WIRE],
}

const NO_FD: u32 = u32::MAX;
const NO_BROKER: BrokerAddress = [0; 24];

impl AllocationKey {
    pub(super) fn encode(&self) -> WireKey {
        let head = KeyHead {
            pid: self.pid.into(),
            fd: self.fd.unwrap_or(NO_FD).into(),
            simulated: u32::from(self.simulated).into(),
            len: self.len.into(),
            broker: self.broker.unwrap_or(NO_BROKER),
            handle: self.handle,
        };
        WireKey([head.as_bytes(), &self.ledger.0].concat())
    }

    pub(super) fn decode(key: &WireKey) -> Option<Self> {
        let (head, ledger) = KeyHead::ref_from_prefix(&key.0).ok()?;
        Some(Self {
            ledger: WireKey(ledger.to_vec()),
            pid: head.pid.get(),
            fd: Some(head.fd.get()).filter(|&fd| fd != NO_FD),
            broker: Some(head.broker).filter(|broker| *broker != NO_BROKER),
            simulated: head.simulated == 1,
            len: head.len.get(),
            handle: head.handle,
        })
    }

    /// Returns the handle with its descriptor. Fetches the descriptor if the kernel permits, which
    /// disturbs no thread; else asks the broker. `inode` is that of its ledger.
    pub(super) fn handle(&self, inode: u64) -> Result<Handle, MapError> {
        let fd = self.fd.map(|fd| match fetch(self.pid, fd) {
            Err(MapError::Refused(refused)) => {
                match self.broker.map(|broker| broker::ask(&broker, inode)) {
                    None => Err(format!("{refused}; nor is it handed out").into()),
                    Some(Err(MapError::Refused(why))) => Err(format!("{refused}; {why}").into()),
                    Some(asked) => asked,
                }
            }
            fetched => fetched,
        });
        let fd = fd.transpose()?;
        Handle::decode(&self.handle, fd).ok_or_else(|| "its handle is damaged".into())
    }
}

/// Fetches a descriptor of another process. The kernel permits it to a process that may copy from
/// that process's memory.
fn fetch(pid: u32, fd: u32) -> Result<OwnedFd, MapError> {
    let pid =
        i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or("its process number is none")?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())
        .map_err(|error| MapError::of("its process cannot be opened", error))?;
    rustix::process::pidfd_getfd(process, fd.cast_signed(), PidfdGetfdFlags::empty()).map_err(
        |error| {
            MapError::of(
                "its descriptor cannot be fetched from its process (a container without \
            CAP_SYS_PTRACE, a seccomp filter or kernel.yama.ptrace_scope may be why)",
                error,
            )
        },
    )
}

/// Key of memory that consists of several allocations, one behind the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Several {
    /// Offset of the region in the first allocation.
    pub(super) offset: u64,
    /// Bytes of the region.
    pub(super) len: u64,
    /// The keys of the whole allocations.
    pub(super) keys: Vec<WireKey>,
}

/// First bytes of such a key; the keys follow as parts.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SeveralHead {
    /// Zero in the place of a process's number, which is never 0.
    zero: U32,
    offset: U64,
    len: U64,
}

impl Several {
    /// Limit of the bytes of all keys: the room in a region's name.
    const MOST: usize = 60_000;

    pub(super) fn encode(&self) -> Result<WireKey, String> {
        let (offset, len) = (self.offset.into(), self.len.into());
        let mut bytes = SeveralHead { zero: 0.into(), offset, len }.as_bytes().to_vec();
        self.keys.iter().for_each(|key| parts::push::<U16>(&mut bytes, &key.0));
        if bytes.len() > Self::MOST {
            return Err(format!(
                "it is made of {} allocations, whose names are too long together: register fewer \
                at a time, or allocate longer ones",
                self.keys.len()
            ));
        }
        Ok(WireKey(bytes))
    }

    /// Returns `None` if it is no such key.
    pub(super) fn decode(WireKey(key): &WireKey) -> Option<Self> {
        let (mut rest, mut keys) = (Rest(key), Vec::new());
        let SeveralHead { zero, offset, len } = rest.head()?;
        while rest.end().is_none() {
            keys.push(WireKey(rest.part::<U16>()?.to_vec()));
        }
        (*zero == 0).then(|| Self { offset: offset.get(), len: len.get(), keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_several_survive_the_wire_and_too_many_are_refused() {
        let several = |count: usize| Several {
            offset: 7,
            len: 1 << 40,
            keys: (0..count).map(|at| WireKey(vec![at as u8; 200 + at % 3])).collect(),
        };
        for count in [0, 1, 200] {
            let key = several(count).encode().unwrap();
            assert_eq!(Several::decode(&key), Some(several(count)));
            assert!(
                count == 0
                    || Several::decode(&WireKey(key.0[..key.0.len() - 1].to_vec())).is_none()
            );
        }
        assert!(several(400).encode().unwrap_err().contains("400 allocations"));
        for len in 0..20 {
            assert!(Several::decode(&WireKey(vec![0; len])).is_none(), "cut off");
        }
        assert!(Several::decode(&WireKey(vec![1; 200])).is_none());
        assert!(Several::decode(&WireKey([&[0; 20][..], &[5; 7]].concat())).is_none());
    }

    #[test]
    fn a_key_survives_the_wire_and_nonsense_is_none() {
        let key = AllocationKey {
            ledger: WireKey(vec![3; 56]),
            pid: 77,
            fd: Some(5),
            broker: Some([4; 24]),
            simulated: true,
            len: 1 << 40,
            handle: [9; Handle::WIRE],
        };
        assert_eq!(AllocationKey::decode(&key.encode()), Some(key.clone()));
        let without = AllocationKey { fd: None, broker: None, ..key };
        assert_eq!(AllocationKey::decode(&without.encode()), Some(without));
        assert!(AllocationKey::decode(&WireKey(vec![0; 150])).is_none());
        assert!(fetch(u32::MAX, 0).is_err() && fetch(0, 0).is_err());
        assert!(fetch(std::process::id(), 1 << 20).unwrap_err().to_string().contains("descriptor"));
    }
}
