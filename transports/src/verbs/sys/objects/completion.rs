//! Completion queues, and the channels that wake sleepers.

use super::super::bindings::{ibv_comp_channel, ibv_cq, ibv_wc};
use super::super::error::VerbsError;
use super::super::table::{Answer, set_errno};
use super::context::{Context, make_non_blocking};
use super::handle::VerbsPointer;
use parking_lot::Mutex;
use std::ffi::c_int;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

/// A descriptor that becomes readable when a completion queue receives a completion, if that was
/// requested.
pub struct CompletionChannel {
    raw: VerbsPointer<ibv_comp_channel>,
    context: Arc<Context>,
}

impl CompletionChannel {
    /// Creates a channel.
    ///
    /// # Errors
    /// There are too many descriptors, or the device does not answer.
    pub fn create(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        let functions = context.verbs().functions();
        if functions.get_cq_event.is_none() || functions.ack_cq_events.is_none() {
            // An event that is not acknowledged would block the destruction of its queue for ever.
            return Err(context.name_in(VerbsError::new("ibv_create_comp_channel", libc::ENOSYS)));
        }
        // SAFETY: the context is open.
        let raw = unsafe { context.verbs().create_comp_channel(context.as_raw()) };
        // SAFETY: a successful answer is not null.
        let raw = unsafe { VerbsPointer::new(raw.map_err(|error| context.name_in(error))?) };
        let channel = Arc::new(Self { raw, context: Arc::clone(context) });
        // SAFETY: the channel exists, and its descriptor is open.
        unsafe { make_non_blocking("ibv_create_comp_channel", (*raw.raw()).fd) }
            .map_err(|error| context.name_in(error))?;
        Ok(channel)
    }

    /// Returns the descriptor, which does not block.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel exists; checked to be a descriptor when the channel
        // was created.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).fd) }
    }

    /// Takes all events, so that the descriptor can be waited on again. Returns their number.
    pub fn take_events(&self) -> usize {
        let (mut queue, mut of) = (ptr::null_mut(), ptr::null_mut());
        let mut taken = 0;
        let verbs = self.context.verbs();
        loop {
            // SAFETY: the channel is there, and the places for the answers are ours.
            match unsafe { verbs.get_cq_event(self.as_raw(), &raw mut queue, &raw mut of) } {
                Ok(()) => taken += 1,
                Err(error) if error.errno == libc::EINTR => continue,
                Err(error) => {
                    if error.errno != libc::EAGAIN {
                        tracing::warn!(error = %self.context.name_in(error), "the events of \
                            completion queues");
                    }
                    return taken;
                }
            }
            // SAFETY: an event of a queue that is not destroyed before this call, once for each
            // event. The function exists: checked when the channel was created.
            let _ = unsafe { verbs.ack_cq_events(queue, 1) };
        }
    }

    /// Returns the library's own structure, which exists as long as this.
    pub fn as_raw(&self) -> *mut ibv_comp_channel {
        self.raw.raw()
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made here, and its queues held it.
        self.context.release("completion channel", |verbs| unsafe {
            verbs.destroy_comp_channel(self.as_raw())
        });
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionChannel({})", self.context.name())
    }
}

/// A queue of completions.
pub struct CompletionQueue {
    raw: VerbsPointer<ibv_cq>,
    /// Number of places; also the lock for resizing.
    depth: Mutex<u32>,
    channel: Option<Arc<CompletionChannel>>,
    context: Arc<Context>,
}

/// A completion queue that cannot be polled any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PollFailure {
    /// Answer of the device's library: not 0.
    pub code: i32,
}

impl std::error::Error for PollFailure {}

impl fmt::Display for PollFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ibv_poll_cq answered {}: the completion queue or its device has failed",
            self.code
        )
    }
}

impl CompletionQueue {
    /// Creates a queue with room for at least `depth` completions. With a channel, it can wake
    /// sleeping threads.
    ///
    /// # Errors
    /// That is more than the device has, the channel is of another context, or the device does not
    /// answer.
    pub fn create(
        context: &Arc<Context>,
        depth: u32,
        channel: Option<&Arc<CompletionChannel>>,
    ) -> Result<Arc<Self>, VerbsError> {
        const CALL: &str = "ibv_create_cq";
        if let Some(channel) = channel {
            context.check_same(&channel.context, CALL, "completion channel")?;
        }
        // SAFETY: the context is open.
        let ops = unsafe { &(*context.as_raw()).ops };
        if ops.poll_cq.is_none() || ops.req_notify_cq.is_none() {
            return Err(context.name_in(VerbsError::new("ibv_poll_cq", libc::ENOSYS)));
        }
        let cqe =
            asked(depth).ok_or_else(|| context.name_in(VerbsError::new(CALL, libc::EINVAL)))?;
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.as_raw());
        // SAFETY: the context is open, and the channel is of it.
        let raw = unsafe {
            context.verbs().create_cq(context.as_raw(), cqe, ptr::null_mut(), raw_channel, 0)
        };
        // SAFETY: a successful answer is not null.
        let raw = unsafe { VerbsPointer::new(raw.map_err(|error| context.name_in(error))?) };
        // SAFETY: it exists, and has no other user yet.
        let depth = Mutex::new(unsafe { granted(raw) });
        Ok(Arc::new(Self {
            raw,
            depth,
            channel: channel.map(Arc::clone),
            context: Arc::clone(context),
        }))
    }

    /// Returns the number of completions that it has room for.
    pub fn depth(&self) -> u32 {
        *self.depth.lock()
    }

    /// Resizes it to at least `depth` completions, more or fewer than before. Present completions
    /// stay.
    ///
    /// # Errors
    /// That is more than the device has, or less than the queue holds; or the device cannot
    /// resize.
    pub fn resize(&self, depth: u32) -> Result<(), VerbsError> {
        let lacks_room = || self.context.name_in(VerbsError::new("ibv_resize_cq", libc::EINVAL));
        let cqe = asked(depth).ok_or_else(lacks_room)?;
        let mut depth = self.depth.lock();
        // SAFETY: the queue is there.
        unsafe { self.context.verbs().resize_cq(self.as_raw(), cqe) }
            .map_err(|error| self.context.name_in(error))?;
        // SAFETY: only resizing changes it, and the lock is held.
        *depth = unsafe { granted(self.raw) };
        Ok(())
    }

    /// Takes completions, the oldest first, and returns them; an empty slice if there are none.
    ///
    /// Of a failed completion a device writes only number, status and queue pair. The other fields
    /// of `into` keep old values.
    ///
    /// # Errors
    /// The queue has failed: it overran, or its device is gone.
    #[inline]
    pub fn poll<'a>(&self, into: &'a mut [ibv_wc]) -> Result<&'a [ibv_wc], PollFailure> {
        let most = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is there, and so is its context.
        let call = unsafe { (*(*self.as_raw()).context).ops.poll_cq };
        let Some(call) = call else { return Err(PollFailure { code: -libc::ENOSYS }) };
        // SAFETY: the queue exists, and there is room for the stated number.
        let answer = unsafe { call(self.as_raw(), most, into.as_mut_ptr()) };
        let taken = usize::try_from(answer).ok().and_then(|count| into.get(..count));
        taken.ok_or(PollFailure { code: answer })
    }

    /// Has the next completion wake the threads that wait for the channel's descriptor. Earlier
    /// completions wake none: poll once more after this call.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn request_notification(&self) -> Result<(), VerbsError> {
        const CALL: &str = "ibv_req_notify_cq";
        // SAFETY: the queue is there, and so is its context.
        let call = unsafe { (*(*self.as_raw()).context).ops.req_notify_cq };
        let lacks = || self.context.name_in(VerbsError::new(CALL, libc::ENOSYS));
        let call = call.ok_or_else(lacks)?;
        set_errno(0);
        // SAFETY: the queue is there.
        let answer = unsafe { call(self.as_raw(), 0) }.good();
        answer.map_err(|errno| self.context.name_in(VerbsError::new(CALL, errno)))
    }

    /// Returns the channel that it was created with.
    pub fn channel(&self) -> Option<&Arc<CompletionChannel>> {
        self.channel.as_ref()
    }

    /// Returns its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the library's own structure, which exists as long as this.
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_cq {
        self.raw.raw()
    }
}

/// Returns a depth in the type that libibverbs takes.
fn asked(depth: u32) -> Option<c_int> {
    c_int::try_from(depth).ok()
}

/// Returns the depth that the device has granted: it rounds up.
///
/// # Safety
/// The queue exists, and is not resized meanwhile.
unsafe fn granted(queue: VerbsPointer<ibv_cq>) -> u32 {
    // SAFETY: the caller's promise.
    u32::try_from(unsafe { (*queue.raw()).cqe }).unwrap_or_default()
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made here, and its queue pairs held it.
        self.context
            .release("completion queue", |verbs| unsafe { verbs.destroy_cq(self.as_raw()) });
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({}, {} deep)", self.context.name(), self.depth())
    }
}
