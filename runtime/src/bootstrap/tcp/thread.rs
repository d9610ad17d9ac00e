//! The thread that serves the tree: asleep but for what comes.

#![forbid(unsafe_code)]

use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::super::error::BootstrapError;
use super::porch::Porch;
use super::state::State;

/// What the tree's thread shares with the program's.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Told when the thread has ended.
    over: Condvar,
    wake: OwnedFd,
}

impl Shared {
    pub(super) fn new(state: State) -> Result<Arc<Self>, BootstrapError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| BootstrapError::os("making an eventfd", errno))?;
        Ok(Arc::new(Self { state: Mutex::new(state), over: Condvar::new(), wake }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look again.
    pub(super) fn wake(&self) {
        // It can only fail when the counter is full: then it is awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Waits until the thread has ended.
    pub(super) fn wait_until_over(&self) {
        let state = self.over.wait_while(self.state(), |state| !state.is_over);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Ends the state however the thread ends.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.state().end();
        self.0.over.notify_all();
    }
}

/// Serves the tree until all is said and done, or the bootstrap is dropped.
pub(super) fn serve(shared: &Shared, mut porch: Porch) {
    let _ending = Ending(shared);
    loop {
        let mut state = shared.state();
        porch.expire(Instant::now(), &mut state);
        state.turn();
        if state.stop || state.may_end() {
            return;
        }
        let links = state.interests();
        drop(state);

        let mut fds = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        fds.extend(
            links
                .iter()
                .map(|(_, stream, flags)| PollFd::from_borrowed_fd((**stream).as_fd(), *flags)),
        );
        fds.extend(porch.callers().map(|caller: &TcpStream| PollFd::new(caller, PollFlags::IN)));
        fds.extend(porch.listener().map(|listener| PollFd::new(listener, PollFlags::IN)));
        let limit = porch.deadline().map(|at| at.saturating_duration_since(Instant::now()));
        // A range of the clock's that is too long is as good as none.
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        if poll(&mut fds, limit.as_ref()).is_err() {
            // Interrupted, or out of memory for a moment; what there is, the next turn finds.
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);

        let (woken, ready) = ready.split_first().unwrap_or((&false, &[]));
        let (of_links, others) = ready.split_at(links.len());
        if *woken {
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        }
        let mut state = shared.state();
        for ((side, _, flags), _) in links.iter().zip(of_links).filter(|(_, ready)| **ready) {
            if flags.contains(PollFlags::IN) {
                state.fill(*side);
            }
        }
        let callers = porch.callers().count();
        let speaking: Vec<usize> = (0..callers).filter(|at| others[*at]).collect();
        let knocks = others[callers..].first().copied().unwrap_or(false);
        porch.hear(&speaking, &mut state);
        drop(state);
        if knocks {
            porch.accept();
        }
    }
}
