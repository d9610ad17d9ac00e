//! What a device tells unasked.

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

/// Something that happened to a device, a port or a queue. It is acknowledged already: what it is
/// about may be destroyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AsyncEvent {
    /// What happened: one of `IBV_EVENT_*`, or a number that is newer than these.
    /// `Verbs::event_name` has words for it.
    pub kind: ibv_event_type,
    /// To what.
    pub about: Subject,
}

/// What an event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    /// A queue pair, by its number.
    QueuePair {
        /// As [`QueuePair::number`](super::QueuePair::number) has it.
        number: u32,
    },
    /// A completion queue, by where the library has it.
    CompletionQueue {
        /// The address of [`CompletionQueue::as_raw`](super::CompletionQueue::as_raw).
        address: usize,
    },
    /// A shared receive queue, by where the library has it.
    SharedReceiveQueue {
        /// The address of [`SharedReceiveQueue::as_raw`](super::SharedReceiveQueue::as_raw).
        address: usize,
    },
    /// A port; they count from 1.
    Port(u8),
    /// The whole device.
    Device,
    /// Something that this version of Carrack has no word for.
    Unknown,
}

impl Context {
    /// The descriptor that can be read when something has happened. Of a device that was opened
    /// here it does not block.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: an open context has a descriptor for its events: looked at where it was opened,
        // promised where it was adopted.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).async_fd) }
    }

    /// What has happened, if anything has; does not wait. `None` also for a context that the
    /// program opened, whose events are the program's.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>, VerbsError> {
        // What could not be acknowledged would hold up the end of what it is about for ever.
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
        // SAFETY: an event of this context that is not acknowledged: what it is about is not
        // destroyed before it is.
        let about = unsafe { subject(&event) };
        // SAFETY: got above, and acknowledged once.
        unsafe { self.verbs().ack_async_event(&raw mut event) }?;
        Ok(Some(AsyncEvent { kind: event.event_type, about }))
    }
}

/// # Safety
/// libibverbs has given the event, and it is not acknowledged.
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
            // SAFETY: these are about a queue pair, which is there until the event is acknowledged.
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
