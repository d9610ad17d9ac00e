//! A table of functions that records objects, their dependencies, and their destruction. It is
//! simulated: there is no device, and no bytes move. Each thread has an account of its own, so
//! tests do not see each other.
//!
//! It has two devices: `account0` has the extended functions of newer libraries, `account1` has
//! none.

use super::super::super::bindings::*;
use super::super::super::table::set_errno;
use crate::verbs::sys::{Functions, Verbs};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

/// Work of this number is refused.
pub(super) const REFUSED: u64 = 666;

/// Record of one thread.
#[derive(Clone, Copy, Default)]
pub(super) struct Account {
    pub(super) made: usize,
    pub(super) destroyed: usize,
    /// Attempts to destroy an object that others depend on, or that does not exist.
    pub(super) refused: usize,
    pub(super) acknowledged: usize,
}

#[derive(Default)]
struct Books {
    account: Account,
    /// Dependencies of each object, by address.
    stands_on: HashMap<usize, Vec<usize>>,
    devices: Vec<*mut ibv_device>,
    events: HashMap<usize, VecDeque<ibv_async_event>>,
    notified: HashMap<usize, VecDeque<*mut ibv_cq>>,
    completed: HashMap<usize, VecDeque<u64>>,
    failing: HashSet<usize>,
    boasting: HashSet<usize>,
    registration: Option<(&'static str, u32)>,
}

thread_local! {
    static BOOKS: RefCell<Books> = RefCell::default();
}

fn books<R>(with: impl FnOnce(&mut Books) -> R) -> R {
    BOOKS.with_borrow_mut(with)
}

impl Account {
    pub(super) fn now() -> Self {
        books(|books| books.account)
    }
}

/// Makes a device send an event.
pub(super) fn happens(context: *mut ibv_context, what: impl FnOnce(&mut ibv_async_event)) {
    let mut event = ibv_async_event::default();
    what(&mut event);
    books(|books| books.events.entry(context.addr()).or_default().push_back(event));
}

/// Makes a queue wake its channel.
pub(super) fn notifies(queue: *mut ibv_cq) {
    // SAFETY: the queue is there, since the test has it.
    let channel = unsafe { (*queue).channel };
    books(|books| books.notified.entry(channel.addr()).or_default().push_back(queue));
}

/// Makes polling a queue fail from now on.
pub(super) fn fails(queue: *mut ibv_cq) {
    books(|books| books.failing.insert(queue.addr()));
}

/// Makes polling a queue return one more than there was room for.
pub(super) fn boasts(queue: *mut ibv_cq) {
    books(|books| books.boasting.insert(queue.addr()));
}

/// Returns the function and the access of the last registration of memory.
pub(super) fn last_registration() -> (&'static str, u32) {
    books(|books| books.registration).expect("something was registered")
}

pub(super) fn verbs() -> Arc<Verbs> {
    // SAFETY: the functions keep what libibverbs promises, as far as these tests go.
    unsafe { Verbs::from_parts(functions(), "an account (simulated)") }
}

pub(super) fn functions() -> Functions {
    Functions {
        get_device_list: Some(get_device_list),
        free_device_list: Some(free_device_list),
        get_device_name: Some(get_device_name),
        open_device: Some(open_device),
        close_device: Some(close_device),
        query_device: Some(query_device),
        query_port: Some(query_port),
        query_gid: Some(query_gid),
        query_gid_table: Some(query_gid_table),
        alloc_pd: Some(alloc_pd),
        dealloc_pd: Some(destroy),
        reg_mr: Some(reg_mr),
        reg_mr_iova2: Some(reg_mr_iova2),
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
        dereg_mr: Some(destroy),
        create_comp_channel: Some(create_comp_channel),
        destroy_comp_channel: Some(destroy_comp_channel),
        create_cq: Some(create_cq),
        resize_cq: Some(resize_cq),
        destroy_cq: Some(destroy),
        get_cq_event: Some(get_cq_event),
        ack_cq_events: Some(ack_cq_events),
        create_srq: Some(create_srq),
        destroy_srq: Some(destroy),
        create_qp: Some(create_qp),
        modify_qp: Some(modify_qp),
        query_qp: Some(query_qp),
        destroy_qp: Some(destroy),
        get_async_event: Some(get_async_event),
        ack_async_event: Some(ack_async_event),
        fork_init: Some(fork_init),
        ..Functions::default()
    }
}

fn enter(address: usize, on: &[usize]) {
    books(|books| {
        books.account.made += 1;
        books.stands_on.insert(address, on.to_vec());
    });
}

fn made<T>(object: T, on: &[usize]) -> *mut T {
    let raw = Box::into_raw(Box::new(object));
    enter(raw.addr(), on);
    raw
}

/// Returns `true` if the object could be removed from the record.
fn leave(address: usize) -> bool {
    books(|books| {
        let needed = books.stands_on.values().any(|on| on.contains(&address));
        let gone = !needed && books.stands_on.remove(&address).is_some();
        if gone {
            books.account.destroyed += 1;
        } else {
            books.account.refused += 1;
        }
        gone
    })
}

unsafe extern "C" fn destroy<T>(object: *mut T) -> c_int {
    if !leave(object.addr()) {
        return libc::EBUSY;
    }
    // SAFETY: it was on the books, so `made` has made it, as this type.
    drop(unsafe { Box::from_raw(object) });
    0
}

fn descriptor() -> c_int {
    eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor").into_raw_fd()
}

fn refuse<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    ptr::null_mut()
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = books(|books| {
        if books.devices.is_empty() {
            for name in [c"account0", c"account1"] {
                let mut device = ibv_device::default();
                for (to, from) in device.name.iter_mut().zip(name.to_bytes()) {
                    *to = from.cast_signed();
                }
                books.devices.push(Box::into_raw(Box::new(device)));
            }
        }
        books.devices.clone()
    });
    // SAFETY: the caller's place for the answer.
    unsafe { *count = 2 };
    Box::into_raw(devices.into_boxed_slice()).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: made by `get_device_list`, of two.
    drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(list, 2)) });
}

unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: devices stay for ever.
    unsafe { (*device).name.as_ptr() }
}

unsafe extern "C" fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    let mut whole =
        Box::new(verbs_context { sz: size_of::<verbs_context>(), ..Default::default() });
    whole.context.device = device;
    whole.context.async_fd = descriptor();
    whole.context.ops.poll_cq = Some(poll_cq);
    whole.context.ops.req_notify_cq = Some(req_notify_cq);
    whole.context.ops.post_send = Some(post_send);
    whole.context.ops.post_recv = Some(post_recv);
    whole.context.ops.post_srq_recv = Some(post_srq_recv);
    if books(|books| books.devices[0] == device) {
        whole.context.abi_compat = ptr::without_provenance_mut(super::super::extended::IS_EXTENDED);
        whole.query_port = Some(query_port_ex);
        whole.query_device_ex = Some(query_device_ex);
        whole.alloc_td = Some(alloc_td);
        whole.dealloc_td = Some(destroy);
        whole.alloc_parent_domain = Some(alloc_parent_domain);
    }
    let whole = Box::into_raw(whole);
    // SAFETY: made above.
    let context = unsafe { &raw mut (*whole).context };
    enter(context.addr(), &[]);
    context
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    if !leave(context.addr()) {
        return libc::EBUSY;
    }
    // SAFETY: `open_device` has made it, with this around it.
    unsafe {
        drop(OwnedFd::from_raw_fd((*context).async_fd));
        drop(Box::from_raw(
            context
                .wrapping_byte_sub(std::mem::offset_of!(verbs_context, context))
                .cast::<verbs_context>(),
        ));
    }
    0
}

unsafe extern "C" fn query_device(_: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller's place for the answer.
    unsafe { (*attr).phys_port_cnt = 1 };
    0
}

unsafe extern "C" fn query_device_ex(
    _: *mut ibv_context,
    _: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    assert_eq!(size, size_of::<ibv_device_attr_ex>());
    // SAFETY: the caller's place for the answer.
    unsafe { (*attr).odp_caps.general_caps = 1 };
    0
}

unsafe extern "C" fn query_port(_: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: the caller's place for the answer.
    unsafe { ((*attr).gid_tbl_len, (*attr).link_layer) = (3, 2) };
    0
}

unsafe extern "C" fn query_port_ex(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    size: usize,
) -> c_int {
    assert_eq!(size, size_of::<ibv_port_attr>());
    // SAFETY: passed on, and the caller's place for the answer.
    unsafe {
        (*attr).active_speed_ex = 128;
        query_port(context, port, attr)
    }
}

const PREFIX: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const V4: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];

unsafe extern "C" fn query_gid(
    _: *mut ibv_context,
    _: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let raw = match index {
        1 => PREFIX,
        2 => V4,
        _ => [0; 16],
    };
    // SAFETY: the caller's place for the answer.
    unsafe { (*gid).raw = raw };
    0
}

unsafe extern "C" fn query_gid_table(
    _: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    room: usize,
    _: u32,
    size: usize,
) -> isize {
    assert!(size == size_of::<ibv_gid_entry>() && room == 3);
    // The port's own, another port's, and one that no queue pair can name.
    for (at, (port_num, gid_index)) in [(1, 2), (2, 0), (1, 300)].into_iter().enumerate() {
        let gid = ibv_gid { raw: V4 };
        // SAFETY: within the room that the caller gives.
        unsafe {
            *entries.add(at) =
                ibv_gid_entry { gid, gid_index, port_num, gid_type: 2, ndev_ifindex: 7 }
        };
    }
    3
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    made(ibv_pd { context, ..Default::default() }, &[context.addr()])
}

unsafe extern "C" fn alloc_td(context: *mut ibv_context, _: *mut ibv_td_init_attr) -> *mut ibv_td {
    made(ibv_td { context }, &[context.addr()])
}

unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller's attributes.
    let on = unsafe { [(*attr).pd.addr(), (*attr).td.addr()] };
    made(ibv_pd { context, ..Default::default() }, &on)
}

fn registered(call: &'static str, pd: *mut ibv_pd, access: u32) -> *mut ibv_mr {
    books(|books| books.registration = Some((call, access)));
    made(ibv_mr { pd, lkey: 1, rkey: 2, ..Default::default() }, &[pd.addr()])
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    _: *mut c_void,
    _: usize,
    access: c_int,
) -> *mut ibv_mr {
    registered("ibv_reg_mr", pd, access.cast_unsigned())
}

unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ibv_pd,
    _: *mut c_void,
    _: usize,
    _: u64,
    access: c_uint,
) -> *mut ibv_mr {
    registered("ibv_reg_mr_iova2", pd, access)
}

unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    _: u64,
    _: usize,
    _: u64,
    _: c_int,
    access: c_int,
) -> *mut ibv_mr {
    if access.cast_unsigned() & IBV_ACCESS_RELAXED_ORDERING != 0 {
        return refuse(libc::EINVAL);
    }
    registered("ibv_reg_dmabuf_mr", pd, access.cast_unsigned())
}

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    made(ibv_comp_channel { context, fd: descriptor(), refcnt: 0 }, &[context.addr()])
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller's channel, or one that is gone already, which the books know.
    let fd = books(|books| books.stands_on.contains_key(&channel.addr()))
        .then(|| unsafe { (*channel).fd });
    // SAFETY: passed on.
    let answer = unsafe { destroy(channel) };
    if let (0, Some(fd)) = (answer, fd) {
        // SAFETY: the channel's own, which is gone.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    answer
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    // SAFETY: zeros are valid for locks of the C library, which are not taken here.
    let mut queue: ibv_cq = unsafe { std::mem::zeroed() };
    (queue.context, queue.channel) = (context, channel);
    queue.cqe = cqe.cast_unsigned().next_power_of_two().cast_signed();
    let on = [context.addr(), channel.addr()];
    made(queue, if channel.is_null() { &on[..1] } else { &on })
}

unsafe extern "C" fn resize_cq(queue: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the caller's queue.
    unsafe { (*queue).cqe = cqe.cast_unsigned().next_power_of_two().cast_signed() };
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    match books(|books| books.notified.get_mut(&channel.addr())?.pop_front()) {
        Some(notified) => {
            // SAFETY: the caller's place for the answer.
            unsafe { *queue = notified };
            0
        }
        None => {
            set_errno(libc::EAGAIN);
            -1
        }
    }
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, count: c_uint) {
    books(|books| books.account.acknowledged += count as usize);
}

unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, most: c_int, to: *mut ibv_wc) -> c_int {
    books(|books| {
        if books.failing.contains(&queue.addr()) {
            return -1;
        }
        if books.boasting.contains(&queue.addr()) {
            return most + 1;
        }
        let completed = books.completed.entry(queue.addr()).or_default();
        let count = completed.len().min(usize::try_from(most).unwrap_or_default());
        for (at, wr_id) in completed.drain(..count).enumerate() {
            // SAFETY: within the room that the caller gives.
            unsafe { (*to.add(at)).wr_id = wr_id };
        }
        c_int::try_from(count).unwrap_or(-1)
    })
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, _: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: as in `create_cq`; the caller's domain.
    let (mut queue, context) = unsafe { (std::mem::zeroed::<ibv_srq>(), (*pd).context) };
    (queue.pd, queue.context) = (pd, context);
    made(queue, &[pd.addr()])
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: as in `create_cq`; the caller's domain and attributes.
    let (mut pair, context, init) =
        unsafe { (std::mem::zeroed::<ibv_qp>(), (*pd).context, &mut *init) };
    init.cap.max_inline_data /= 2;
    init.cap.max_send_wr += 1;
    init.cap.max_send_sge += 1;
    (pair.pd, pair.context, pair.send_cq, pair.qp_num) = (pd, context, init.send_cq, 0x77);
    let on = [pd.addr(), init.send_cq.addr(), init.recv_cq.addr(), init.srq.addr()];
    made(pair, if init.srq.is_null() { &on[..3] } else { &on })
}

unsafe extern "C" fn modify_qp(pair: *mut ibv_qp, attr: *mut ibv_qp_attr, _: c_int) -> c_int {
    // SAFETY: the caller's.
    unsafe {
        if (*attr).port_num != 1 {
            return libc::EINVAL;
        }
        (*pair).state = (*attr).qp_state;
    }
    0
}

unsafe extern "C" fn query_qp(
    pair: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*attr).qp_state = (*pair).state };
    0
}

unsafe extern "C" fn post_send(
    pair: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let mut work = first;
    while !work.is_null() {
        // SAFETY: the caller's list and queue pair.
        let (wr_id, next, queue) = unsafe { ((*work).wr_id, (*work).next, (*pair).send_cq) };
        if wr_id == REFUSED {
            // SAFETY: the caller's place.
            unsafe { *bad = work };
            return libc::ENOMEM;
        }
        books(|books| books.completed.entry(queue.addr()).or_default().push_back(wr_id));
        work = next;
    }
    0
}

unsafe fn receive(first: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    let mut work = first;
    while !work.is_null() {
        // SAFETY: the caller's list and place. This one fails in the other way, by `errno`.
        unsafe {
            if (*work).wr_id == REFUSED {
                *bad = work;
                set_errno(libc::ENOMEM);
                return -1;
            }
            work = (*work).next;
        }
    }
    0
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: passed on.
    unsafe { receive(first, bad) }
}

unsafe extern "C" fn post_srq_recv(
    _: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: passed on.
    unsafe { receive(first, bad) }
}

unsafe extern "C" fn get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    match books(|books| books.events.get_mut(&context.addr())?.pop_front()) {
        Some(happened) => {
            // SAFETY: the caller's place for the answer.
            unsafe { *event = happened };
            0
        }
        None => {
            set_errno(libc::EAGAIN);
            -1
        }
    }
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {
    books(|books| books.account.acknowledged += 1);
}

unsafe extern "C" fn fork_init() -> c_int {
    0
}
