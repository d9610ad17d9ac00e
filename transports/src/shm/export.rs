//! Regions in memfds, which importers open through the process that made them.

use crate::contract::{Exported, Imported, WireKey};
use crate::mem::shared::Share;
use crate::mem::{MapError, Region};
use rustix::fs::{Mode, OFlags};
use std::sync::Arc;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Content of a wire key: the memfd's location and the registration.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MemfdKey {
    /// The pid namespace of `pid`.
    namespace: U64,
    pid: U64,
    fd: U64,
    dev: U64,
    ino: U64,
    len: U64,
    epoch: U64,
}

/// Ends a registration when dropped.
struct ShareRegistration(Arc<Share>);

impl Drop for ShareRegistration {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn namespace() -> Result<u64, String> {
    let stat = rustix::fs::stat("/proc/self/ns/pid")
        .map_err(|error| format!("/proc cannot be read: {error}"))?;
    Ok(stat.st_ino)
}

/// Lets peers of this machine map a region.
pub(super) fn export(region: &Region) -> Result<Exported, MapError> {
    let share = region.share().ok_or(
        "it is memory of this process alone: allocate it with Runtime::allocate for peers to map \
         it",
    )?;
    Ok(Exported::new(export_shared(share)?, ShareRegistration(share.clone())))
}

/// Begins a registration of shared memory, which the caller ends, and returns its key.
pub(crate) fn export_shared(share: &Share) -> Result<WireKey, String> {
    let found = share.whereabouts().ok_or("it is memory of another process")?;
    let namespace = namespace()?;
    let key = MemfdKey {
        namespace: namespace.into(),
        pid: u64::from(std::process::id()).into(),
        fd: u64::from(found.fd).into(),
        dev: found.dev.into(),
        ino: found.ino.into(),
        len: found.len.into(),
        epoch: share.open().into(),
    };
    Ok(WireKey(key.as_bytes().to_vec()))
}

/// Shared memory of another process, mapped.
pub(crate) struct FoundShared {
    pub(crate) region: Region,
    /// Epoch of its registration.
    pub(crate) epoch: u64,
    /// Inode of its memfd, which no other memory has while this is mapped.
    pub(crate) inode: u64,
}

/// Maps a peer's region.
pub(super) fn import(key: &WireKey) -> Result<Imported, MapError> {
    let found = find_shared(key)?;
    Imported::mapped(found.region, found.epoch)
        .ok_or_else(|| "it cannot be told whether it stands".into())
}

/// Maps shared memory of a peer.
///
/// The descriptor is opened through `/proc`, where the kernel lets processes of one user open each
/// other's. The memfd must be the one that the key names, so a reused descriptor number is an
/// error.
pub(crate) fn find_shared(key: &WireKey) -> Result<FoundShared, MapError> {
    let key =
        MemfdKey::ref_from_bytes(&key.0).map_err(|_| "its key is not one of this transport's")?;
    if key.namespace != namespace()? {
        return Err("it is in another pid namespace, whose processes are not seen here".into());
    }
    let path = format!("/proc/{}/fd/{}", key.pid, key.fd);
    let fd =
        rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
            .map_err(|error| MapError::of(&format!("{path} cannot be opened"), error))?;
    let stat =
        rustix::fs::fstat(&fd).map_err(|error| format!("{path} cannot be examined: {error}"))?;
    if (stat.st_dev, stat.st_ino) != (key.dev.get(), key.ino.get()) {
        return Err("it is not there any more".into());
    }
    let region = Region::map_shared(&fd, key.len.get())?;
    Ok(FoundShared { region, epoch: key.epoch.get(), inode: key.ino.get() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_mapped_by_its_key_and_closed_with_its_registration() {
        let region = Region::shared(5000).unwrap();
        let exported = export(&region).unwrap();
        let imported = import(&exported.key).unwrap();
        imported.region().unwrap().slice(10, 3).unwrap().write(b"abc").unwrap();
        assert_eq!(region.slice(10, 3).unwrap().to_vec().unwrap(), b"abc");
        let again = export(&region).unwrap();
        drop(exported);
        assert!(imported.region().is_some(), "one registration is left");
        let key = again.key.clone();
        drop(again);
        assert!(imported.region().is_none());
        assert!(
            import(&key).unwrap().region().is_none(),
            "the memory is there, the registration is not"
        );
        drop((region, imported));
        assert!(import(&key).is_err());
    }

    #[test]
    fn a_key_that_leads_nowhere_or_elsewhere_is_an_error() {
        let region = Region::shared(5000).unwrap();
        let exported = export(&region).unwrap();
        let right = *MemfdKey::ref_from_bytes(&exported.key.0).unwrap();
        let encode = |key: MemfdKey| WireKey(key.as_bytes().to_vec());
        for wrong in [
            MemfdKey { namespace: 1.into(), ..right },
            MemfdKey { pid: u64::MAX.into(), ..right },
            MemfdKey { fd: (1 << 40).into(), ..right },
            MemfdKey { fd: 0.into(), ..right },
            MemfdKey { ino: (right.ino.get() + 1).into(), ..right },
            MemfdKey { len: (right.len.get() + 1).into(), ..right },
            MemfdKey { len: u64::MAX.into(), ..right },
        ] {
            assert!(import(&encode(wrong)).is_err(), "{wrong:?}");
        }
        assert!(
            import(&encode(MemfdKey { epoch: 77.into(), ..right })).unwrap().region().is_none()
        );
        assert!(import(&encode(MemfdKey { epoch: 0.into(), ..right })).unwrap().region().is_none());
        for len in [0, 1, 55, 57, 64] {
            assert!(import(&WireKey(vec![1; len])).is_err());
        }
        assert!(export(&Region::host(10)).unwrap_err().to_string().contains("allocate"));
        assert!(export(import(&exported.key).unwrap().region().unwrap()).is_err());
    }
}
