//! Completion queues and channels.

use super::super::completion::CompletionQueue;
use super::super::events::EventQueue;
use super::super::faults::Call;
use super::device::known_context;
use super::{free, known, make, minus_one, number, pointer};
use carrack_transports::verbs::sys::bindings::{ibv_comp_channel, ibv_context, ibv_cq, ibv_wc};
use rustix::io::Errno;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// State of a completion channel.
pub(super) struct KnownChannel {
    events: Arc<EventQueue<Arc<CompletionQueue>>>,
    /// Number of queues that use the channel.
    users: AtomicUsize,
}

/// Returns the state of a completion channel.
///
/// # Safety
/// As [`known`].
unsafe fn known_channel<'a>(channel: *mut ibv_comp_channel) -> &'a KnownChannel {
    // SAFETY: passed on.
    unsafe { known(channel) }
}

/// Returns the state of a completion queue.
///
/// # Safety
/// As [`known`].
pub(super) unsafe fn known_cq<'a>(cq: *mut ibv_cq) -> &'a Arc<CompletionQueue> {
    // SAFETY: passed on.
    unsafe { known(cq) }
}

pub(super) unsafe extern "C" fn create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    // SAFETY: of the contract.
    let parent = unsafe { known_context(context) };
    let device = &parent.device;
    let result = device.check().and_then(|()| device.faults.check(Call::CreateCompChannel));
    pointer(result.and_then(|()| EventQueue::new()).map(|events| {
        parent.children.fetch_add(1, Ordering::SeqCst);
        let fd = events.raw_fd();
        let known = KnownChannel { events: Arc::new(events), users: AtomicUsize::new(0) };
        make(ibv_comp_channel { context, fd, refcnt: 0 }, known)
    }))
}

pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: of the contract.
    if unsafe { known_channel(channel) }.users.load(Ordering::SeqCst) > 0 {
        return Errno::BUSY.raw_os_error();
    }
    // SAFETY: of the contract; a context outlives the objects made of it.
    unsafe {
        known_context((*channel).context).children.fetch_sub(1, Ordering::SeqCst);
        free::<ibv_comp_channel, KnownChannel>(channel);
    }
    0
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: of the contract.
    let parent = unsafe { known_context(context) };
    let device = &parent.device;
    let create = || {
        device.check()?;
        device.faults.check(Call::CreateCq)?;
        let capacity =
            u32::try_from(cqe).ok().filter(|cqe| (1..=device.limits.completions).contains(cqe));
        let capacity = capacity.filter(|_| vector == 0).ok_or(Errno::INVAL)?;
        device.completion_queues.add()?;
        let events = if channel.is_null() {
            None
        } else {
            // SAFETY: of the contract.
            let known = unsafe { known_channel(channel) };
            known.users.fetch_add(1, Ordering::SeqCst);
            Some(Arc::clone(&known.events))
        };
        parent.children.fetch_add(1, Ordering::SeqCst);
        let asynchronous = Arc::clone(&parent.events);
        let queue = CompletionQueue::new(
            capacity as usize,
            events,
            asynchronous,
            Arc::clone(&device.faults),
        );
        // SAFETY: all of its fields are numbers, pointers and locks of the C library, for which
        // zero is valid.
        let mut structure: ibv_cq = unsafe { std::mem::zeroed() };
        (structure.context, structure.channel, structure.cq_context) =
            (context, channel, cq_context);
        structure.cqe = cqe;
        let cq = make(structure, Arc::clone(&queue));
        queue.handle.store(cq.expose_provenance(), Ordering::SeqCst);
        Ok(cq)
    };
    pointer(create())
}

pub(super) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: of the contract.
    let (queue, context) = unsafe { (known_cq(cq), known_context((*cq).context)) };
    let device = &context.device;
    let resize = || {
        device.check()?;
        queue.faults.check(Call::ResizeCq)?;
        let capacity =
            u32::try_from(cqe).ok().filter(|cqe| (1..=device.limits.completions).contains(cqe));
        queue.resize(capacity.ok_or(Errno::INVAL)? as usize).then_some(()).ok_or(Errno::INVAL)?;
        // SAFETY: of the contract; libibverbs writes it here, too.
        unsafe { (*cq).cqe = cqe };
        Ok(())
    };
    number(resize())
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: of the contract.
    let (queue, context, channel) =
        unsafe { (known_cq(cq), known_context((*cq).context), (*cq).channel) };
    if queue.users.load(Ordering::SeqCst) > 0 {
        return Errno::BUSY.raw_os_error();
    }
    queue.close();
    if !channel.is_null() {
        // SAFETY: a channel outlives its queues.
        unsafe { known_channel(channel) }.users.fetch_sub(1, Ordering::SeqCst);
    }
    context.device.completion_queues.remove();
    context.children.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: of the contract: it is not used any more.
    drop(unsafe { free::<ibv_cq, Arc<CompletionQueue>>(cq) });
    0
}

pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: of the contract.
    let taken = unsafe { known_channel(channel) }.events.take();
    minus_one(taken.map(|queue| {
        queue.given.given();
        let found: *mut ibv_cq =
            std::ptr::with_exposed_provenance_mut(queue.handle.load(Ordering::SeqCst));
        // SAFETY: the queue's structure exists until it is destroyed, which has removed its
        // events; places for the answers are of the contract.
        unsafe {
            *cq = found;
            *cq_context = (*found).cq_context;
        }
    }))
}

pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: of the contract.
    unsafe { known_cq(cq) }.given.acknowledge(count);
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, places: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: of the contract.
    let queue = unsafe { known_cq(cq) };
    if queue.faults.check(Call::PollCq).is_err() {
        return -1;
    }
    // SAFETY: of the contract: places for the stated number of completions.
    let put = |at, what| unsafe { wc.add(at).write(what) };
    let count = queue.poll(put, usize::try_from(places).unwrap_or(0));
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: of the contract.
    let queue = unsafe { known_cq(cq) };
    number(queue.faults.check(Call::ReqNotifyCq).map(|()| queue.arm(solicited_only != 0)))
}
