//! Asynchronous events.

use super::super::device::{AsyncEvent, Source};
use super::completion::known_cq;
use super::device::known_context;
use super::minus_one;
use super::queue_pair::{known_pair, known_srq};
use carrack_transports::verbs::sys::bindings::{self as ibv, ibv_async_event, ibv_context};
use std::ffi::c_int;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::Ordering;

type Element = ibv::ibv_async_event__bindgen_ty_1;

pub(super) unsafe extern "C" fn get_async_event(
    context: *mut ibv_context,
    place: *mut ibv_async_event,
) -> c_int {
    // SAFETY: of the contract.
    let taken = unsafe { known_context(context) }.events.take();
    minus_one(taken.map(|AsyncEvent { kind, source }| {
        let element = match source {
            Source::Queue(pair) => {
                pair.given.given();
                Element { qp: with_exposed_provenance_mut(pair.handle.load(Ordering::SeqCst)) }
            }
            Source::Completions(queue) => {
                queue.asynchronous.given();
                Element { cq: with_exposed_provenance_mut(queue.handle.load(Ordering::SeqCst)) }
            }
            Source::Receives(queue) => {
                queue.given.given();
                Element { srq: with_exposed_provenance_mut(queue.handle.load(Ordering::SeqCst)) }
            }
            Source::Port(number) => Element { port_num: c_int::from(number) },
            Source::Device => Element { port_num: 0 },
        };
        // SAFETY: of the contract: a place for an event.
        unsafe { place.write(ibv_async_event { element, event_type: kind }) };
    }))
}

pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: of the contract: an event that the program received, whose object exists until this
    // call. Its kind decides which field of the union was written, as in `get_async_event`.
    unsafe {
        let element = (*event).element;
        match (*event).event_type {
            ibv::IBV_EVENT_CQ_ERR => known_cq(element.cq).asynchronous.acknowledge(1),
            ibv::IBV_EVENT_SRQ_ERR | ibv::IBV_EVENT_SRQ_LIMIT_REACHED => {
                known_srq(element.srq).given.acknowledge(1);
            }
            ibv::IBV_EVENT_QP_FATAL
            | ibv::IBV_EVENT_QP_REQ_ERR
            | ibv::IBV_EVENT_QP_ACCESS_ERR
            | ibv::IBV_EVENT_COMM_EST
            | ibv::IBV_EVENT_QP_LAST_WQE_REACHED => {
                known_pair(element.qp).pair.given.acknowledge(1)
            }
            _ => {}
        }
    }
}
