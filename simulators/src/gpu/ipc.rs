//! Handles by which one process opens another's memory.
//!
//! The byte form names the exporter's descriptor and is opened through `/proc/<pid>/fd/<n>`, with
//! the rules of legacy CUDA IPC (gpu.md). It is invalid in the exporting process, and once the
//! exporter has freed the memory or is gone. Repeated openings are counted. It needs a common pid
//! namespace and user, as legacy IPC does. The descriptor form is the memory itself.

use super::alloc::Placed;
use super::error::{
    INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, error,
};
use super::faults::count;
use super::memory::{MEMFD_NAME, inspect};
use super::shared::{Exportable, Shared};
use carrack_transports::gpu::{GpuError, Handle, HandleForm, HandleKey, Reservation};
use carrack_transports::mem::{AllocId, GpuUuid, Region};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

const MAGIC: [u8; 4] = *b"CFG1";

/// Content of the 64 bytes of a handle.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Name {
    pid: u32,
    /// Start time of the process, in ticks since boot: a pid is reused, the pair is not.
    started: u64,
    fd: u32,
    /// Inode of the descriptor's memory: a descriptor's number is reused, an inode is not.
    inode: u64,
    id: AllocId,
    /// The exporter's address in blocks of 2 MiB, for people.
    block: u32,
    len: u64,
    gpu: GpuUuid,
}

/// A name as the bytes of a handle.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct NameBytes {
    magic: [u8; 4],
    pid: U32,
    started: U64,
    fd: U32,
    block: U32,
    inode: U64,
    id: U64,
    len: U64,
    gpu: [u8; 16],
}

impl Name {
    fn encode(&self) -> [u8; 64] {
        transmute!(NameBytes {
            magic: MAGIC,
            pid: self.pid.into(),
            started: self.started.into(),
            fd: self.fd.into(),
            block: self.block.into(),
            inode: self.inode.into(),
            id: self.id.0.into(),
            len: self.len.into(),
            gpu: self.gpu.0,
        })
    }

    /// Decodes a name. The bytes may be arbitrary, and are checked when they are used.
    fn decode(bytes: &[u8; 64]) -> Option<Self> {
        let name: &NameBytes = transmute_ref!(bytes);
        (name.magic == MAGIC).then(|| Self {
            pid: name.pid.get(),
            started: name.started.get(),
            fd: name.fd.get(),
            inode: name.inode.get(),
            id: AllocId(name.id.get()),
            block: name.block.get(),
            len: name.len.get(),
            gpu: GpuUuid(name.gpu),
        })
    }
}

/// Memory that was opened by bytes and is still mapped.
#[derive(Debug, Default)]
pub(super) struct Opened(Mutex<HashMap<Name, Weak<Placed>>>);

/// One opening of a handle, with what holds its mapping.
struct Opening<T> {
    shared: Arc<Shared>,
    _held: T,
}

impl<T> Drop for Opening<T> {
    fn drop(&mut self) {
        count(&self.shared.faults.counts.closes);
    }
}

/// Makes a handle of a region that was allocated on device `ordinal`.
pub(super) fn export(
    shared: &Shared,
    ordinal: usize,
    region: &Region,
    form: HandleForm,
) -> Result<Handle, GpuError> {
    if shared.faults.refuses_export(form) {
        return Err(error(
            "export",
            NOT_SUPPORTED,
            format!("{form:?} handles were ordered to be refused"),
        ));
    }
    let (found, way) = shared.exportable("export", region)?;
    if found.ordinal != ordinal {
        return Err(error(
            "export",
            INVALID_VALUE,
            "the memory belongs to another device: ask that one",
        ));
    }
    if region.addr() + region.len() > found.base + found.len {
        return Err(error(
            "export",
            INVALID_VALUE,
            "the memory is made of several handles: export each extent",
        ));
    }
    let gpu = shared.device("export", ordinal)?.info.uuid;
    let key = match (way, form) {
        (Exportable::Bytes { fd, inode }, HandleForm::Bytes) => {
            let pid = std::process::id();
            let started = start_time(pid).ok_or_else(|| {
                error("export", OPERATING_SYSTEM, "/proc/self/stat cannot be read")
            })?;
            let block = u32::try_from(found.base >> 21).unwrap_or(0);
            let len = found.len as u64;
            HandleKey::Bytes(
                Name { pid, started, fd, inode, id: found.id, block, len, gpu }.encode(),
            )
        }
        (Exportable::Fd(fd), HandleForm::Fd) => HandleKey::Fd(fd),
        (Exportable::Pool(fd), HandleForm::Pool) => HandleKey::Pool(fd, [0; 64]),
        (_, HandleForm::Fabric) => {
            return Err(error("export", NOT_SUPPORTED, "simulated devices are in no fabric"));
        }
        (Exportable::Not(why), _) => return Err(error("export", INVALID_VALUE, why)),
        (Exportable::Bytes { .. } | Exportable::Pool(_), HandleForm::Fd) => {
            let hint = "the memory has no descriptor of its own: allocate it as Flavour::Shareable";
            return Err(error("export", NOT_SUPPORTED, hint));
        }
        (Exportable::Fd(_) | Exportable::Pool(_), HandleForm::Bytes) => {
            let hint = "VMM and pool memory have no legacy handle: allocate it as Flavour::Plain";
            return Err(error("export", INVALID_VALUE, hint));
        }
        (Exportable::Bytes { .. } | Exportable::Fd(_), HandleForm::Pool) => {
            let hint = "the memory is of no pool: allocate it as Flavour::Pooled";
            return Err(error("export", NOT_SUPPORTED, hint));
        }
    };
    count(&shared.faults.counts.exports);
    Ok(Handle { gpu, id: found.id, len: found.len, offset: region.addr() - found.base, key })
}

/// Opens a handle for use by device `opener`.
pub(super) fn open(
    shared: &Arc<Shared>,
    opener: usize,
    handle: &Handle,
) -> Result<Region, GpuError> {
    if let Some(code) = shared.faults.opening_fails() {
        return Err(error("open", code, "a failure ordered by a test"));
    }
    let placed = match &handle.key {
        HandleKey::Bytes(bytes) => {
            let bad = || {
                error("open", INVALID_HANDLE, "these are not the bytes of a handle of this driver")
            };
            let name = Name::decode(bytes).ok_or_else(bad)?;
            if (handle.len as u64, handle.gpu) != (name.len, name.gpu) {
                return Err(error(
                    "open",
                    INVALID_HANDLE,
                    "the handle says one thing, and its bytes another",
                ));
            }
            open_bytes(shared, opener, name)?
        }
        HandleKey::Fd(fd) | HandleKey::Pool(fd, _) => {
            let ordinal = owner(shared, opener, handle.gpu)?;
            let (_, size) = inspect("open", fd)?;
            check_length(handle.len as u64, size)?;
            Arc::new(shared.adopt(ordinal, handle.len, handle.form(), fd)?)
        }
        HandleKey::Fabric(_) => {
            return Err(error("open", NOT_SUPPORTED, "simulated devices are in no fabric"));
        }
    };
    count(&shared.faults.counts.opens);
    let placement = placed.placement;
    let opening = Opening { shared: Arc::clone(shared), _held: placed };
    shared.region_for(opener, placement, Box::new(opening))
}

/// Opens a descriptor for use by device `opener`, at reserved addresses.
pub(super) fn open_at(
    shared: &Arc<Shared>,
    opener: usize,
    place: (&Reservation, usize),
    handle: &Handle,
) -> Result<Region, GpuError> {
    if let Some(code) = shared.faults.opening_fails() {
        return Err(error("open_at", code, "a failure ordered by a test"));
    }
    let HandleKey::Fd(fd) = &handle.key else {
        let hint = format!("{:?} handles are opened where the driver likes", handle.form());
        return Err(error("open_at", NOT_SUPPORTED, hint));
    };
    let ordinal = owner(shared, opener, handle.gpu)?;
    let (_, size) = inspect("open_at", fd)?;
    check_length(handle.len as u64, size)?;
    let (placement, piece) = shared.adopt_at(ordinal, place, handle.len, fd)?;
    count(&shared.faults.counts.opens);
    let opening = Opening { shared: Arc::clone(shared), _held: piece };
    shared.region_for(opener, placement, Box::new(opening))
}

fn owner(shared: &Shared, opener: usize, gpu: GpuUuid) -> Result<usize, GpuError> {
    let ordinal = shared.ordinal("open", gpu)?;
    shared.reaches("open", opener, gpu)?;
    Ok(ordinal)
}

fn open_bytes(shared: &Arc<Shared>, opener: usize, name: Name) -> Result<Arc<Placed>, GpuError> {
    if name.pid == std::process::id() && start_time(name.pid) == Some(name.started) {
        let hint = "the exporting process cannot open its own handle: use the pointer itself";
        return Err(error("open", INVALID_CONTEXT, hint));
    }
    let ordinal = owner(shared, opener, name.gpu)?;
    let fd = descriptor(&name)?;
    // Held while the memory is mapped, so that two threads that open one handle get one mapping.
    let mut opened = shared.opened.0.lock();
    if let Some(placed) = opened.get(&name).and_then(Weak::upgrade) {
        return Ok(placed);
    }
    opened.retain(|_, placed| placed.strong_count() > 0);
    let len = usize::try_from(name.len).unwrap_or(usize::MAX);
    let placed = Arc::new(shared.adopt(ordinal, len, HandleForm::Bytes, fd)?);
    opened.insert(name, Arc::downgrade(&placed));
    Ok(placed)
}

/// Opens the exporter's memory, and checks that the handle means it.
fn descriptor(name: &Name) -> Result<OwnedFd, GpuError> {
    let gone = |what: String| {
        let hint = format!(
            "{what}: process {} has freed allocation {} (exported at {:#x}), has ended, or is in \
            another pid \
             namespace",
            name.pid,
            name.id.0,
            u64::from(name.block) << 21
        );
        error("open", INVALID_HANDLE, hint)
    };
    let path = format!("/proc/{}/fd/{}", name.pid, name.fd);
    // Opening a descriptor that means another file by now could block, or have effects: look
    // first.
    let target = fs::read_link(&path).map_err(|why| gone(format!("{path}: {why}")))?;
    if !target.to_string_lossy().starts_with(&format!("/memfd:{MEMFD_NAME}")) {
        return Err(gone(format!("{path} is {}", target.display())));
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = rustix::fs::open(&path, flags, Mode::empty())
        .map_err(|why| gone(format!("{path}: {why}")))?;
    // Checked first: memory that has just been created under that number may not be sealed yet.
    let found = rustix::fs::fstat(&fd).map_err(|why| gone(format!("{path}: {why}")))?;
    if found.st_ino != name.inode || start_time(name.pid) != Some(name.started) {
        return Err(gone(format!("{path} is other memory")));
    }
    let (_, size) = inspect("open", &fd)?;
    check_length(name.len, size)?;
    Ok(fd)
}

fn check_length(len: u64, size: usize) -> Result<(), GpuError> {
    if len == 0 || len > size as u64 || !size.is_multiple_of(super::memory::GRANULE) {
        let hint = format!("the handle says {len} bytes, the memory has {size}");
        return Err(error("open", INVALID_HANDLE, hint));
    }
    Ok(())
}

/// Returns the start time of a process, in ticks since boot. It is field 22 of the stat line,
/// counted from behind the name, which may contain anything.
pub(super) fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, behind) = stat.rsplit_once(')')?;
    behind.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_its_64_bytes_and_nonsense_is_no_name() {
        let name = Name {
            pid: 0x0102_0304,
            started: u64::MAX - 1,
            fd: 77,
            inode: 0x1122_3344_5566_7788,
            id: AllocId(9),
            block: 12,
            len: 1 << 40,
            gpu: GpuUuid([0xab; 16]),
        };
        assert_eq!(Name::decode(&name.encode()), Some(name));
        assert_eq!(name.encode()[48..], [0xab; 16], "the fields fill the handle");
        assert_eq!(Name::decode(&[0; 64]), None);
    }

    #[test]
    fn a_process_has_one_start_time_and_a_dead_one_has_none() {
        let own = start_time(std::process::id());
        assert!(own.is_some());
        assert_eq!(own, start_time(std::process::id()));
        assert_eq!(start_time(u32::MAX), None);
    }
}
