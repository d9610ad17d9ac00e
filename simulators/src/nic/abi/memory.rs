//! Protection domains, memory regions, address handles.

use super::super::device::NicDevice;
use super::super::faults::Call;
use super::super::memory::{Access, Domain};
use super::super::queue_pair::AddressVector;
use super::device::{KnownContext, known_context};
use super::{free, known, make, pointer};
use carrack_transports::verbs::sys::bindings::{
    ibv_ah_attr, ibv_context, ibv_mr, ibv_parent_domain_init_attr, ibv_pd, ibv_td, ibv_td_init_attr,
};
use rustix::io::Errno;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// State of a protection domain.
pub(super) struct KnownDomain {
    pub(super) device: Arc<NicDevice>,
    pub(super) number: Domain,
    /// Number of objects that were made in it and not destroyed.
    pub(super) users: AtomicUsize,
    /// The domain that this one is around.
    parent: *mut ibv_pd,
    /// Set if objects made in it are for one thread at a time.
    pub(super) thread: Option<Arc<OneAtATime>>,
}

/// A thread domain: set while a thread works in it.
#[derive(Debug, Default)]
pub(super) struct OneAtATime(AtomicBool);

impl OneAtATime {
    /// Runs `act`, unless another thread is working in the domain. A real library would be
    /// corrupted; this one returns an error.
    pub(super) fn alone<T>(&self, act: impl FnOnce() -> T) -> Result<T, Errno> {
        if self.0.swap(true, Ordering::SeqCst) {
            return Err(Errno::BUSY);
        }
        let done = act();
        self.0.store(false, Ordering::SeqCst);
        Ok(done)
    }
}

/// Returns the state of a protection domain.
///
/// # Safety
/// As [`known`].
pub(super) unsafe fn known_domain<'a>(pd: *mut ibv_pd) -> &'a KnownDomain {
    // SAFETY: passed on.
    unsafe { known(pd) }
}

fn adopt(context: &KnownContext) {
    context.children.fetch_add(1, Ordering::SeqCst);
}

pub(super) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: of the contract.
    let parent = unsafe { known_context(context) };
    let device = &parent.device;
    let result = device.check().and_then(|()| device.faults.check(Call::AllocPd));
    pointer(result.and_then(|()| device.new_domain()).map(|number| {
        adopt(parent);
        let users = AtomicUsize::new(0);
        let known = KnownDomain {
            device: Arc::clone(device),
            number,
            users,
            parent: null_mut(),
            thread: None,
        };
        make(ibv_pd { context, handle: number.0 }, known)
    }))
}

pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: of the contract.
    let known = unsafe { known_domain(pd) };
    if known.users.load(Ordering::SeqCst) > 0 {
        return Errno::BUSY.raw_os_error();
    }
    // SAFETY: of the contract; a context outlives the objects made of it.
    unsafe { known_context((*pd).context) }.children.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: of the contract: it is not used any more.
    let known = unsafe { free::<ibv_pd, KnownDomain>(pd) };
    if known.parent.is_null() {
        known.device.domains.remove();
    } else {
        // SAFETY: the parent cannot be destroyed before this one.
        unsafe { known_domain(known.parent) }.users.fetch_sub(1, Ordering::SeqCst);
    }
    0
}

pub(super) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    _: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: of the contract.
    let parent = unsafe { known_context(context) };
    let device = &parent.device;
    let has = if device.limits.thread_domains > 0 { Ok(()) } else { Err(Errno::OPNOTSUPP) };
    pointer(device.check().and(has).and_then(|()| device.thread_domains.add()).map(|()| {
        adopt(parent);
        make(ibv_td { context }, Arc::<OneAtATime>::default())
    }))
}

pub(super) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: of the contract; a context outlives the objects made of it.
    unsafe {
        let parent = known_context((*td).context);
        parent.children.fetch_sub(1, Ordering::SeqCst);
        parent.device.thread_domains.remove();
        free::<ibv_td, Arc<OneAtATime>>(td);
    }
    0
}

pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: of the contract.
    let (above, parent, td, wants) =
        unsafe { (known_context(context), (*attr).pd, (*attr).td, (*attr).comp_mask) };
    if parent.is_null() || wants != 0 {
        return pointer(Err(if wants != 0 { Errno::OPNOTSUPP } else { Errno::INVAL }));
    }
    // SAFETY: of the contract.
    let whose = unsafe { known_domain(parent) };
    // SAFETY: of the contract: null, or one that `alloc_td` gave.
    let thread =
        (!td.is_null()).then(|| Arc::clone(unsafe { known::<ibv_td, Arc<OneAtATime>>(td) }));
    pointer(whose.device.check().map(|()| {
        adopt(above);
        whose.users.fetch_add(1, Ordering::SeqCst);
        let users = AtomicUsize::new(0);
        let known = KnownDomain {
            device: Arc::clone(&whose.device),
            number: whose.number,
            users,
            parent,
            thread,
        };
        make(ibv_pd { context, handle: whose.number.0 }, known)
    }))
}

fn register(
    pd: *mut ibv_pd,
    call: Call,
    (addr, length): (*mut c_void, usize),
    add: impl FnOnce(&KnownDomain) -> Result<u32, Errno>,
) -> *mut ibv_mr {
    // SAFETY: of the contract of the functions that call this.
    let domain = unsafe { known_domain(pd) };
    let result = domain.device.check().and_then(|()| domain.device.faults.check(call));
    pointer(result.and_then(|()| add(domain)).map(|key| {
        domain.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: as above.
        let context = unsafe { (*pd).context };
        make(ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key }, ())
    }))
}

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: passed on.
    unsafe { reg_mr_iova2(pd, addr, len, addr.expose_provenance() as u64, access.cast_unsigned()) }
}

pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    register(pd, Call::RegMr, (addr, len), |domain| {
        let at = addr.expose_provenance();
        domain.device.regions.register(domain.number, at, len, iova, Access(access))
    })
}

pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    register(pd, Call::RegDmabufMr, (null_mut(), len), |domain| {
        if fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: of the contract: the program's descriptor is open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let access = Access(access.cast_unsigned());
        domain.device.regions.register_descriptor(domain.number, fd, (offset, len), iova, access)
    })
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: of the contract; a domain outlives the objects made in it.
    let (domain, key) = unsafe { (known_domain((*mr).pd), (*mr).lkey) };
    if !domain.device.regions.deregister(key) {
        return Errno::INVAL.raw_os_error();
    }
    domain.users.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: of the contract: it is not used any more.
    unsafe { free::<ibv_mr, ()>(mr) };
    0
}

/// Converts an `ibv_ah_attr`.
///
/// # Safety
/// `attr` points to one.
pub(super) unsafe fn vector(attr: *const ibv_ah_attr) -> AddressVector {
    // SAFETY: of the contract; the bytes of a GID are valid for every member of the union.
    unsafe {
        let global =
            ((*attr).is_global != 0).then(|| ((*attr).grh.dgid.raw, (*attr).grh.sgid_index));
        AddressVector { global, lid: (*attr).dlid, port: (*attr).port_num }
    }
}
