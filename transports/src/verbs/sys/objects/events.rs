//! Asynchronous events of a device.

use super::super::bindings::{
    IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_COMM_EST, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL,
    IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR,
    IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SM_CHANGE,
    IBV_EVENT_SQ_DRAINED, IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED, ibv_async_event,
    ibv_event_type,
};
use super::super::error::VerbsError;
use super::context::Context;
use std::os::fd::BorrowedFd;

/// An event of a device, a port or a queue. It is acknowledged already, so its subject may be
/// destroyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEvent {
    /// Kind: one of `IBV_EVENT_*`, or a newer number. `Verbs::event_name` has words for it.
    pub kind: ibv_event_type,
    /// Subject of the event.
    pub about: Subject,
}

/// Subject of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    /// A queue pair, by its number.
    QueuePair {
        /// Number as of [`QueuePair::number`](super::QueuePair::number).
        number: u32,
    },
    /// A completion queue, by its address in the library.
    CompletionQueue {
        /// The address of [`CompletionQueue::as_raw`](super::CompletionQueue::as_raw).
        address: usize,
    },
    /// A shared receive queue, by its address in the library.
    SharedReceiveQueue {
        /// The address of [`SharedReceiveQueue::as_raw`](super::SharedReceiveQueue::as_raw).
        address: usize,
    },
    /// A port; they count from 1.
    Port(u8),
    /// The whole device.
    Device,
    /// A subject that this version of Carrack does not know.
    Unknown,
}

impl Context {
    /// Returns the descriptor that is readable when there is an event. It does not block if the
    /// device was opened here.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: an open context has a descriptor for its events: checked when it was opened,
        // promised when it was adopted.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).async_fd) }
    }

    /// Returns the next event, without waiting. `None` if there is none, and for a context that
    /// the program opened, whose events are the program's.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        // An event that is not acknowledged would block the destruction of its subject for ever.
        if self.is_adopted() || self.verbs().functions().ack_async_event.is_none() {
            return Ok(None);
        }
        let mut event = ibv_async_event::default();
        // SAFETY: the context is open, and the place for the answer ours.
        match unsafe { self.verbs().get_async_event(self.as_raw(), &raw mut event) } {
            Ok(()) => {}
            Err(error) if [libc::EAGAIN, libc::EINTR].contains(&error.errno) => return Ok(None),
            Err(error) => return Err(self.name_in(error)),
        }
        // SAFETY: an event of this context that is not acknowledged: its subject is not destroyed
        // before that.
        let about = unsafe { subject(&event) };
        // SAFETY: got above, and acknowledged once.
        unsafe { self.verbs().ack_async_event(&raw mut event) }?;
        Ok(Some(AsyncEvent { kind: event.event_type, about }))
    }
}

/// Returns the object that an event is about.
///
/// # Safety
/// libibverbs has returned the event, and it is not acknowledged.
unsafe fn subject(event: &ibv_async_event) -> Subject {
    match event.event_type {
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => {
            // SAFETY: these are about a queue pair, which exists until the event is acknowledged.
            Subject::QueuePair { number: unsafe { (*event.element.qp).qp_num } }
        }
        IBV_EVENT_CQ_ERR => {
            // SAFETY: this is about a completion queue, of which only the address is taken.
            Subject::CompletionQueue { address: unsafe { event.element.cq }.addr() }
        }
        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
            // SAFETY: as above, of a shared receive queue.
            Subject::SharedReceiveQueue { address: unsafe { event.element.srq }.addr() }
        }
        IBV_EVENT_PORT_ACTIVE
        | IBV_EVENT_PORT_ERR
        | IBV_EVENT_LID_CHANGE
        | IBV_EVENT_PKEY_CHANGE
        | IBV_EVENT_SM_CHANGE
        | IBV_EVENT_CLIENT_REREGISTER
        | IBV_EVENT_GID_CHANGE => {
            // SAFETY: these are about a port.
            let port = unsafe { event.element.port_num };
            u8::try_from(port).map_or(Subject::Unknown, Subject::Port)
        }
        IBV_EVENT_DEVICE_FATAL => Subject::Device,
        _ => Subject::Unknown,
    }
}
