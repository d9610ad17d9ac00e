//! A barrier with a time limit at first, and without one at the end. In between, a rank prints
//! everything that does not depend on the others.

use super::ExplainError;
use carrack::{CollectiveError, Group, Runtime, WaitError};
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Barrier of all members of a group.
pub(super) struct Meeting<'g>(RefCell<State<'g>>);

enum State<'g> {
    Begun(Pin<Box<dyn Future<Output = Result<(), CollectiveError>> + 'g>>),
    Ended(Result<(), CollectiveError>),
}

impl<'g> Meeting<'g> {
    /// Begins the barrier. It is the group's next operation; the others learn of this member when
    /// it waits for them.
    pub(super) fn of(group: &'g Group) -> Self {
        Self(RefCell::new(State::Begun(Box::pin(group.barrier_async()))))
    }

    /// Waits, for `limit` at most, until all members have entered the barrier.
    ///
    /// # Errors
    /// The reason why nothing is known of the others.
    pub(super) fn wait(&self, runtime: &Runtime, limit: Duration) -> Result<(), String> {
        runtime.wait_for(limit, || self.has_ended()).map_err(|why| match why {
            WaitError::TimedOut(limit) => format!("a rank has not come within {limit:?}"),
            why => why.to_string(),
        })?;
        match &*self.0.borrow() {
            State::Ended(Err(why)) => Err(why.to_string()),
            _ => Ok(()),
        }
    }

    /// Polls the barrier. Returns `true` if it has ended. The caller polls after all progress, so
    /// the future needs no waker.
    fn has_ended(&self) -> bool {
        let mut state = self.0.borrow_mut();
        let State::Begun(barrier) = &mut *state else { return true };
        let Poll::Ready(how) = barrier.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        else {
            return false;
        };
        *state = State::Ended(how);
        true
    }

    /// Waits without a limit until all members have entered the barrier.
    pub(super) fn end(self, runtime: &Runtime) -> Result<(), ExplainError> {
        match self.0.into_inner() {
            State::Begun(barrier) => Ok(runtime.block_on(barrier)??),
            State::Ended(how) => Ok(how?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack::settings::{GpuChoice, Settings};
    use std::sync::Barrier;

    fn ranks(size: u32) -> Vec<Runtime> {
        let settings = Settings::builder().gpu(GpuChoice::None);
        let settings = settings.build_from_vars(std::iter::empty::<(String, String)>()).unwrap();
        Runtime::in_process_with(size, &settings).unwrap()
    }

    #[test]
    fn who_does_not_come_is_waited_for_as_long_as_was_said_and_at_the_end() {
        let ranks = ranks(3);
        let have_waited = Barrier::new(3);
        let waits = |rank: &Runtime| {
            let world = rank.world();
            let meeting = Meeting::of(&world);
            let why = meeting.wait(rank, Duration::from_millis(10)).unwrap_err();
            assert!(why.contains("not come within 10ms"), "{why}");
            have_waited.wait();
            meeting.end(rank).unwrap();
        };
        std::thread::scope(|scope| {
            ranks[..2].iter().for_each(|rank| drop(scope.spawn(|| waits(rank))));
            have_waited.wait();
            // A meeting is a barrier.
            ranks[2].barrier().unwrap();
        });
    }

    #[test]
    fn when_all_have_come_every_wait_ends_and_the_next_operation_is_the_next() {
        let come = |rank: &Runtime| {
            let world = rank.world();
            let meeting = Meeting::of(&world);
            meeting.wait(rank, Duration::from_secs(600)).unwrap();
            meeting.wait(rank, Duration::ZERO).unwrap();
            meeting.end(rank).unwrap();
            let heard = rank.allgather(&rank.rank().0.to_le_bytes()).unwrap();
            assert_eq!(heard, [0_u32, 1].map(|rank| rank.to_le_bytes().to_vec()));
        };
        let ranks = ranks(2);
        std::thread::scope(|scope| ranks.iter().for_each(|rank| drop(scope.spawn(|| come(rank)))));
    }
}
