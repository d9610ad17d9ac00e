//! Operations that are awaited.
//!
//! `runtime.post_send(…).await` posts when it is first polled, and is ready when the operation has
//! ended. Any executor works while [`Runtime::drive`] as one of its tasks, a progress thread, or a
//! loop of the program makes progress. [`Runtime::block_on`] does both on this thread.

use super::desc::OpDesc;
use super::options::Post;
use super::submit::Kind;
use crate::api::{Runtime, Ticket};
use crate::comp::{Completion, Status};
use crate::error::{AwaitError, PostError, ProgressError, WaitError};
use crate::progress::Core;
use crate::progress::in_handler;
use parking_lot::{Mutex, MutexGuard};
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// The future of an operation, made from a [`Post`].
///
/// The first poll posts the operation. It is [`PostError::Undriven`] if nothing has made progress
/// before: no [`drive`](Runtime::drive), no progress thread, no call of
/// [`progress`](Runtime::progress). The operation waits in the peer's backlog if necessary; while
/// that is full, progress wakes it to try again. Dropping the future of a
/// [posted](Self::is_posted) operation detaches the operation, which goes on and keeps its buffer;
/// a [`deadline`](Post::deadline) limits it. `.comp` has no effect here.
#[must_use = "an operation that is not posted yet is lost with this: await it"]
pub struct Operation<'a, K> {
    state: OperationState<'a, K>,
    cell: Arc<Cell>,
    object: Arc<dyn Completion>,
}

enum OperationState<'a, K> {
    Unposted(Post<'a, K>),
    /// The cell will be told, or has been.
    Posted(Option<Ticket>),
    /// It was not posted. `None` once the future has returned the error.
    Refused(Option<PostError>),
    /// The future has returned its status.
    Spent,
}

/// The status for the future, or the future's waker.
#[derive(Default)]
struct Cell(Mutex<(Option<Status>, Option<Waker>)>);

impl Cell {
    fn lock(&self) -> MutexGuard<'_, (Option<Status>, Option<Waker>)> {
        self.0.lock()
    }
}

impl Completion for Cell {
    fn signal(&self, status: Status) -> Result<(), Status> {
        let waker = {
            let mut cell = self.lock();
            cell.0 = Some(status);
            cell.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    fn runs_user_code(&self) -> bool {
        self.lock().1.is_some()
    }

    fn describe(&self) -> String {
        "a future".into()
    }
}

impl<'a, K: Kind + Unpin> IntoFuture for Post<'a, K> {
    type Output = Result<Status, AwaitError>;
    type IntoFuture = Operation<'a, K>;

    fn into_future(self) -> Operation<'a, K> {
        let cell = Arc::new(Cell::default());
        Operation { state: OperationState::Unposted(self), object: cell.clone(), cell }
    }
}

impl<'a, K: Kind + Unpin> Post<'a, K> {
    /// Posts the operation now, and returns the future: so that several are in flight at the same
    /// time. It is never [`PostError::Undriven`]: where nothing makes progress, its future does not
    /// end.
    ///
    /// While the peer's backlog is full, or the limit of offers is reached, a poll of the future
    /// posts the operation once there is room. What is posted in between is then earlier, and
    /// dropping the future before posts nothing: [`is_posted`](Operation::is_posted) tells.
    pub fn start(self) -> Operation<'a, K> {
        let mut operation = self.into_future();
        operation.post();
        operation
    }
}

impl<K: Kind> Post<'_, K> {
    /// Submits it, with another completion object for this once.
    fn submit_telling(self, comp: &Arc<dyn Completion>) -> (Self, Result<(), PostError>) {
        let Self { runtime, desc, order, kind } = self;
        let mut post = Post { runtime, desc: OpDesc { comp: Some(comp), ..desc }, order, kind };
        let outcome = post.submit();
        let Post { order, kind, .. } = post;
        (Self { runtime, desc, order, kind }, outcome)
    }
}

impl<K: Kind> Operation<'_, K> {
    /// Returns the ticket for [`Runtime::cancel`], if it is a receive that waits for its message.
    pub fn ticket(&self) -> Option<Ticket> {
        match &self.state {
            OperationState::Posted(ticket) => *ticket,
            _ => None,
        }
    }

    /// Returns `true` once the operation is posted: it goes on without its future.
    pub fn is_posted(&self) -> bool {
        match self.state {
            OperationState::Posted(_) | OperationState::Spent => true,
            OperationState::Unposted(_) | OperationState::Refused(_) => false,
        }
    }

    /// Posts it, if it is not posted and need not wait.
    fn post(&mut self) {
        self.state = match std::mem::replace(&mut self.state, OperationState::Spent) {
            OperationState::Unposted(post) => match post.submit_telling(&self.object) {
                (post, Ok(())) => {
                    let name = post.kind.name();
                    OperationState::Posted(name.map(|name| post.runtime.ticket(name)))
                }
                (post, Err(PostError::BacklogFull { .. } | PostError::OffersFull { .. })) => {
                    OperationState::Unposted(post)
                }
                (_, Err(error)) => OperationState::Refused(Some(error)),
            },
            other => other,
        };
    }
}

impl<K: Kind + Unpin> Future for Operation<'_, K> {
    type Output = Result<Status, AwaitError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let OperationState::Unposted(post) = &self.state
            && !post.runtime.0.is_driven()
        {
            self.state = OperationState::Refused(Some(PostError::Undriven));
        }
        self.post();
        match std::mem::replace(&mut self.state, OperationState::Spent) {
            OperationState::Unposted(post) => {
                post.runtime.0.retries.add(context.waker());
                self.state = OperationState::Unposted(post);
                Poll::Pending
            }
            OperationState::Refused(error) => {
                self.state = OperationState::Refused(None);
                error.map_or(Poll::Pending, |error| Poll::Ready(Err(error.into())))
            }
            OperationState::Posted(ticket) => {
                let mut cell = self.cell.lock();
                match cell.0.take() {
                    Some(status) => Poll::Ready(status.ok().map_err(AwaitError::from)),
                    None => {
                        let before = cell.1.replace(context.waker().clone());
                        drop(cell);
                        // Without the lock: the last waker of a task drops the task.
                        drop(before);
                        self.state = OperationState::Posted(ticket);
                        Poll::Pending
                    }
                }
            }
            // A future that is polled after its end never wakes.
            OperationState::Spent => Poll::Pending,
        }
    }
}

/// Waker of a thread in `block_on`.
struct Ring {
    woken: AtomicBool,
    runtime: Weak<Core>,
}

impl Wake for Ring {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        if let Some(runtime) = self.runtime.upgrade() {
            runtime.sleepers.wake();
        }
    }
}

impl Runtime {
    /// Drives a future to its end on this thread, and makes progress meanwhile; sleeps when there
    /// is nothing to do. Errors of progress are kept: the next calls of
    /// [`progress`](Self::progress) and [`wait`](Self::wait) return them.
    ///
    /// # Errors
    /// Called in a forked process, or from a completion handler. The future is dropped, and was not
    /// polled. A collective operation that it had begun fails at all members.
    pub fn block_on<F: Future>(&self, future: F) -> Result<F::Output, WaitError> {
        let never = || None::<std::convert::Infallible>;
        match self.block_on_unless(future, Duration::MAX, never)? {
            Ok(output) => Ok(output),
            Err(never) => match never {},
        }
    }

    /// Refuses a call that would block where none may: before the call has begun anything.
    ///
    /// # Errors
    /// Called in a forked process, or from a completion handler.
    pub(crate) fn may_block(&self) -> Result<(), WaitError> {
        if in_handler() {
            return Err(ProgressError::InHandler.into());
        }
        if self.0.is_forked() {
            return Err(ProgressError::Forked.into());
        }
        Ok(())
    }

    /// Blocks as `block_on`, and checks now and then for a reason to give up.
    pub(crate) fn block_on_unless<F: Future, E>(
        &self,
        future: F,
        every: Duration,
        gives_up: impl Fn() -> Option<E>,
    ) -> Result<Result<F::Output, E>, WaitError> {
        self.may_block()?;
        // Before the first poll, which may post.
        self.0.note_driven();
        let ring =
            Arc::new(Ring { woken: AtomicBool::new(true), runtime: Arc::downgrade(&self.0) });
        let waker = Waker::from(ring.clone());
        let mut future = std::pin::pin!(future);
        let mut asked = Instant::now();
        loop {
            if ring.woken.swap(false, Ordering::AcqRel)
                && let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker))
            {
                return Ok(Ok(output));
            }
            if ring.woken.load(Ordering::Acquire) {
                // It has woken itself: its condition may still need progress.
                self.0.progress_everything_keeping()?;
            }
            if every < Duration::MAX && asked.elapsed() >= every {
                if let Some(reason) = gives_up() {
                    return Ok(Err(reason));
                }
                asked = Instant::now();
            }
            match self.0.wait_keeping(&|| ring.woken.load(Ordering::Acquire), Some(every)) {
                Ok(()) | Err(WaitError::TimedOut(_)) => {}
                Err(error) => return Err(error),
            }
        }
    }
}
