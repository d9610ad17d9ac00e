//! The interface of the simulated NIC: functions of libibverbs, and objects with the layout of its
//! structures.
//!
//! | module | functions |
//! |---|---|
//! | `device` | devices, contexts, their attributes |
//! | `memory` | protection domains, memory regions, address handles |
//! | `completion` | completion queues and channels |
//! | `queue_pair` | queue pairs and shared receive queues |
//! | `post` | posting |
//! | `events` | asynchronous events |
//! | `words` | names of numbers |
//!
//! Each object is libibverbs' structure, followed by the simulation's state. Arguments are those
//! that libibverbs' own functions would take: pointers that these functions returned and that were
//! not destroyed. [`Verbs::from_parts`] requires that, and comments here call it "of the
//! contract".

#![expect(unsafe_code, reason = "functions and objects of C")]

mod completion;
mod device;
mod events;
mod memory;
mod post;
mod queue_pair;
mod words;

pub(super) use device::DeviceList;

use carrack_transports::verbs::sys::{Functions, Verbs};
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::Arc;

/// A structure of libibverbs, followed by the simulation's state of the object.
#[repr(C)]
struct Object<B, K> {
    base: B,
    known: K,
}

/// Makes an object, which lives until [`free`] is called.
fn make<B, K>(base: B, known: K) -> *mut B {
    Box::into_raw(Box::new(Object { base, known })).cast()
}

/// Returns the state of an object.
///
/// # Safety
/// `base` came from [`make`] with these types and is not freed while the answer is used.
unsafe fn known<'a, B, K>(base: *mut B) -> &'a K {
    // SAFETY: of the contract. The reference does not cover the structure in front, which programs
    // and libibverbs' inline functions use.
    unsafe { &(*base.cast::<Object<B, K>>()).known }
}

/// Frees an object and returns its state.
///
/// # Safety
/// As [`known`]; and the object is not used any more.
unsafe fn free<B, K>(base: *mut B) -> K {
    // SAFETY: of the contract: it came out of a box of this type.
    unsafe { Box::from_raw(base.cast::<Object<B, K>>()) }.known
}

/// Returns the answer of a function that returns an object.
fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|errno| {
        // SAFETY: this thread's errno can always be written.
        unsafe { *libc::__errno_location() = errno.raw_os_error() };
        std::ptr::null_mut()
    })
}

/// Returns the answer of a function that returns an error number.
fn number(result: Result<(), Errno>) -> c_int {
    result.err().map_or(0, Errno::raw_os_error)
}

/// Returns the answer of a function that returns -1 and sets `errno`.
fn minus_one(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            pointer::<u8>(Err(errno));
            -1
        }
    }
}

/// Returns the simulated libibverbs with the devices of this list.
pub(super) fn verbs(list: &DeviceList) -> Arc<Verbs> {
    // SAFETY: the functions do what libibverbs documents, lock what they share, and return its
    // structures. Their strings are constants, except names of devices, which live as long as the
    // devices.
    unsafe { Verbs::from_parts(functions(list), "simulated NIC") }
}

fn functions(list: &DeviceList) -> Functions {
    Functions {
        get_device_list: Some(list.function()),
        free_device_list: Some(device::free_device_list),
        get_device_name: Some(device::get_device_name),
        open_device: Some(device::open_device),
        close_device: Some(device::close_device),
        query_device: Some(device::query_device),
        query_port: Some(device::query_port),
        query_gid: Some(device::query_gid),
        query_gid_table: Some(device::query_gid_table),
        alloc_pd: Some(memory::alloc_pd),
        dealloc_pd: Some(memory::dealloc_pd),
        reg_mr: Some(memory::reg_mr),
        reg_mr_iova2: Some(memory::reg_mr_iova2),
        reg_dmabuf_mr: Some(memory::reg_dmabuf_mr),
        dereg_mr: Some(memory::dereg_mr),
        create_comp_channel: Some(completion::create_comp_channel),
        destroy_comp_channel: Some(completion::destroy_comp_channel),
        create_cq: Some(completion::create_cq),
        resize_cq: Some(completion::resize_cq),
        destroy_cq: Some(completion::destroy_cq),
        get_cq_event: Some(completion::get_cq_event),
        ack_cq_events: Some(completion::ack_cq_events),
        create_srq: Some(queue_pair::create_srq),
        modify_srq: Some(queue_pair::modify_srq),
        destroy_srq: Some(queue_pair::destroy_srq),
        create_qp: Some(queue_pair::create_qp),
        modify_qp: Some(queue_pair::modify_qp),
        query_qp: Some(queue_pair::query_qp),
        destroy_qp: Some(queue_pair::destroy_qp),
        get_async_event: Some(events::get_async_event),
        ack_async_event: Some(events::ack_async_event),
        fork_init: Some(device::fork_init),
        event_type_str: Some(words::event_type_str),
        port_state_str: Some(words::port_state_str),
    }
}
