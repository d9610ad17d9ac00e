//! Classification of an address: one batched query.

use super::driver::OpenedLibrary;
use super::error::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, because};
use super::sys::{ContextHandle, handle_type, memory_type, pointer};
use crate::gpu::{Extent, Forms, Gpu, GpuError, HandleForm};
use crate::mem::{AllocId, MemKind};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Attributes of the query, in the order in which drivers learned them. A driver that does not
/// know the last ones is asked for fewer.
const ATTRIBUTES: [c_int; 10] = [
    pointer::MEMORY_TYPE,
    pointer::CONTEXT,
    pointer::DEVICE_ORDINAL,
    pointer::IS_MANAGED,
    pointer::BUFFER_ID,
    pointer::RANGE_START_ADDR,
    pointer::RANGE_SIZE,
    pointer::IS_LEGACY_CUDA_IPC_CAPABLE,
    pointer::ALLOWED_HANDLE_TYPES,
    pointer::MEMPOOL_HANDLE,
];

/// Number of leading attributes that every driver has to know.
const NEEDED: usize = 7;

/// Number of all attributes.
pub(super) const ALL: usize = ATTRIBUTES.len();

/// The driver's answers about an address that it knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    memory_type: u32,
    /// Null for VMM and pool memory, which is no error (gpu.md, VMM rule 1).
    pub(super) context: ContextHandle,
    pub(super) ordinal: i32,
    managed: bool,
    pub(super) id: AllocId,
    pub(super) start: usize,
    pub(super) size: usize,
    pub(super) legacy_ipc: bool,
    pub(super) handle_types: c_int,
    pub(super) pool: usize,
}

impl Facts {
    /// Returns `true` if the memory was mapped by the VMM calls: memory of a device, but of no
    /// context and no pool.
    fn is_vmm(&self) -> bool {
        let on_device = self.memory_type == memory_type::DEVICE && !self.managed;
        on_device && self.context == ContextHandle::NULL && self.pool == 0
    }
}

impl OpenedLibrary {
    /// Asks the driver. Returns `None` for host memory that it does not know. Needs no context.
    pub(super) fn facts(&self, addr: usize) -> Result<Option<Facts>, GpuError> {
        let known = self.attributes.load(Ordering::Relaxed);
        let mut count = known;
        let answers = loop {
            match self.ask(addr, count) {
                Ok(answers) => break answers,
                // This driver does not know an attribute, or has no answer to it for this address.
                Err(error) if error.code == INVALID_VALUE && count > NEEDED => count -= 1,
                // Some drivers return this error for an unknown address; most return empty
                // answers.
                Err(error) if error.code == INVALID_VALUE => return Ok(None),
                Err(error) => return Err(error),
            }
        };
        let [kind, context, ordinal, managed, id, start, size, legacy, handles, pool] = answers;
        if low(kind) == 0 && low(managed) == 0 {
            return Ok(None);
        }
        // Device memory has all attributes: one without an answer is unknown to this driver for
        // good.
        if count < known && low(kind) == memory_type::DEVICE && low(managed) == 0 {
            self.attributes.store(count, Ordering::Relaxed);
        }
        let word = |answer: u64| usize::try_from(answer).unwrap_or(usize::MAX);
        let mut facts = Facts {
            memory_type: low(kind),
            context: ContextHandle(word(context)),
            ordinal: low(ordinal).cast_signed(),
            managed: low(managed) != 0,
            id: AllocId(id),
            start: word(start),
            size: word(size),
            legacy_ipc: low(legacy) != 0,
            handle_types: low(handles).cast_signed(),
            pool: word(pool),
        };
        if facts.is_vmm() {
            self.narrow(addr, &mut facts);
        }
        Ok(Some(facts))
    }

    /// Narrows the range of VMM memory to one mapping (gpu.md, VMM rule 2). The driver's range is
    /// that of the reserved addresses (seen on driver 580), which may hold several handles. A
    /// driver without the attributes leaves the range as it is.
    fn narrow(&self, addr: usize, facts: &mut Facts) {
        let (mut start, mut size) = (0_usize, 0_usize);
        let places: [*mut c_void; 2] = [(&raw mut start).cast(), (&raw mut size).cast()];
        let attributes = [pointer::MAPPING_BASE_ADDR, pointer::MAPPING_SIZE];
        // SAFETY: two attributes, of 8 bytes each, and a place for either.
        let asked = unsafe {
            self.calls.pointer_get_attributes(2, attributes.as_ptr(), places.as_ptr(), addr)
        };
        if asked.is_ok() && start <= addr && addr - start < size {
            (facts.start, facts.size) = (start, size);
        }
    }

    fn ask(&self, addr: usize, count: usize) -> Result<[u64; ALL], GpuError> {
        // Each answer has 8 bytes, whatever its type. Bytes that the driver does not write stay 0.
        let mut answers = [0_u64; ALL];
        let first = (&raw mut answers).cast::<u64>();
        let places: [*mut c_void; ALL] = std::array::from_fn(|at| first.wrapping_add(at).cast());
        let asked = c_uint::try_from(count.min(ALL)).unwrap_or(0);
        // SAFETY: equal numbers of attributes and of places for their answers, none of which is
        // longer than 8 bytes.
        unsafe {
            self.calls.pointer_get_attributes(asked, ATTRIBUTES.as_ptr(), places.as_ptr(), addr)
        }?;
        Ok(answers)
    }

    /// Returns only the id of the allocation at an address.
    #[inline]
    pub(super) fn buffer_id(&self, addr: usize) -> Result<Option<AllocId>, GpuError> {
        let mut id = 0_u64;
        // SAFETY: the place for the answer is ours, and has its 8 bytes.
        let asked = unsafe {
            self.calls.pointer_get_attribute((&raw mut id).cast(), pointer::BUFFER_ID, addr)
        };
        match asked {
            Ok(()) => Ok(Some(AllocId(id))),
            Err(error) if error.code == INVALID_VALUE => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the bytes of an allocation from an address to its end; 0 if the driver does not
    /// say.
    pub(super) fn length_from(&self, addr: usize) -> Result<usize, GpuError> {
        let facts = self.facts(addr)?;
        let (mut start, mut size) = facts.map_or((0, 0), |facts| (facts.start, facts.size));
        if size == 0 {
            // SAFETY: the places for the answers are ours. The driver leaves unknown ones at 0.
            let _ =
                unsafe { self.calls.mem_get_address_range(&raw mut start, &raw mut size, addr) };
        }
        Ok(start.saturating_add(size).saturating_sub(addr))
    }

    /// Classifies an address. Returns `None` if the driver does not know it.
    pub(super) fn classify(&'static self, addr: usize) -> Result<Option<Extent>, GpuError> {
        self.facts(addr)?.map(|facts| self.extent(addr, facts)).transpose()
    }

    /// Interprets the facts.
    pub(super) fn extent(&'static self, addr: usize, facts: Facts) -> Result<Extent, GpuError> {
        let gpus = self.gpus()?;
        let owner = usize::try_from(facts.ordinal).ok().and_then(|at| gpus.get(at));
        let pinned = facts.memory_type == memory_type::HOST && !facts.managed;
        let gpu = match owner {
            Some(owner) => Some(self.engine(owner, facts.context)?),
            None if pinned => None,
            // Managed memory at rest belongs to no device; the first device stands for it.
            None if facts.managed => gpus.first().cloned(),
            None => {
                let hint = format!(
                    "{addr:#x} is memory of device {}, which this process cannot see: widen \
                    CUDA_VISIBLE_DEVICES",
                    facts.ordinal
                );
                return Err(because("cuPointerGetAttributes", INVALID_DEVICE, hint));
            }
        };
        // Memory of a context may have been opened by a handle in this process.
        let is_in_context = facts.context != ContextHandle::NULL;
        let opened = if is_in_context { self.opened.owner(addr) } else { None };
        let kind = match (facts.memory_type, owner.or(gpu.as_ref())) {
            _ if pinned => MemKind::Pinned,
            (_, Some(gpu)) if facts.managed => MemKind::Managed(gpu.info().uuid),
            (memory_type::UNIFIED, Some(gpu)) => MemKind::Managed(gpu.info().uuid),
            (memory_type::DEVICE, Some(gpu)) => MemKind::Device(opened.unwrap_or(gpu.info().uuid)),
            (other, _) => {
                let hint =
                    format!("{addr:#x} is memory of a type that is not known here ({other})");
                return Err(because("cuPointerGetAttributes", NOT_SUPPORTED, hint));
            }
        };
        let on_device = matches!(kind, MemKind::Device(_));
        let by_fd = on_device && facts.handle_types & handle_type::POSIX_FD != 0;
        let forms = Forms::NONE
            .with(HandleForm::Bytes, on_device && facts.legacy_ipc)
            .with(HandleForm::Fd, by_fd && facts.pool == 0)
            .with(HandleForm::Pool, by_fd && facts.pool != 0)
            .with(HandleForm::Fabric, on_device && facts.handle_types & handle_type::FABRIC != 0);
        // For some host memory the driver tells no range, so the end is unknown.
        let (base, len) =
            if facts.size == 0 { (addr, usize::MAX - addr) } else { (facts.start, facts.size) };
        let context = (facts.context != ContextHandle::NULL).then_some(facts.context.0 as u64);
        let gpu = gpu.map(|gpu| gpu as Arc<dyn Gpu>);
        Ok(Extent { base, len, kind, id: facts.id, gpu, context, forms })
    }
}

/// Returns an answer that is shorter than its place: the lower half, on machines that have these
/// GPUs.
fn low(answer: u64) -> u32 {
    u32::try_from(answer & u64::from(u32::MAX)).unwrap_or(0)
}
