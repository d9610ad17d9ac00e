//! The end of a job: the first cause decides the status. Ranks may speak for a moment, are then
//! asked to end, and are killed after their grace.

use std::time::{Duration, Instant};

use carrack_transports::stderr::say;

/// Time between the request to end and the kill.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// Time between a rank's failure and the request to the others, which may be about to print an
/// error of their own.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);

/// Time within which signals count as one: `timeout` signals its child, then its whole group.
const TOGETHER: Duration = Duration::from_millis(100);

/// An action that is due at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// The job has taken too long.
    TimeLimit,
    /// Ask the ranks that still run to end.
    Ask,
    /// Kill the ranks that still run.
    Kill,
}

/// A job's progress towards its end.
#[derive(Debug)]
pub(super) struct Ending {
    time_limit: Option<Instant>,
    /// Status of the first cause to end the job.
    status: Option<u8>,
    began: Option<Instant>,
    ask_at: Option<Instant>,
    kill_at: Option<Instant>,
}

impl Ending {
    /// Creates the ending of a job that may run until `time_limit`.
    pub(super) fn new(time_limit: Option<Instant>) -> Self {
        Self { time_limit, status: None, began: None, ask_at: None, kill_at: None }
    }

    /// Returns `true` if the job ends early.
    pub(super) fn has_begun(&self) -> bool {
        self.status.is_some()
    }

    /// Ends the job early with this status: asks the ranks after this time, and kills them after
    /// their grace. Returns `false` if something else had ended it before:
    /// the first cause stands, for what follows is mostly its consequence.
    pub(super) fn begin(&mut self, status: u8, now: Instant, asks_after: Duration) -> bool {
        if self.has_begun() {
            return false;
        }
        self.status = Some(status);
        self.time_limit = None;
        self.began = Some(now);
        self.ask_at = Some(now + asks_after);
        self.kill_at = Some(now + asks_after + GRACE);
        true
    }

    /// Asks the ranks at once where they would have been asked later. Returns `false` if they were
    /// asked before.
    pub(super) fn ask_now(&mut self, now: Instant) -> bool {
        if self.ask_at.is_none() {
            return false;
        }
        (self.began, self.ask_at, self.kill_at) = (Some(now), Some(now), Some(now + GRACE));
        true
    }

    /// Returns `true` if the job has just begun to end, for any cause.
    pub(super) fn has_just_begun(&self, now: Instant) -> bool {
        self.began.is_some_and(|at| at + TOGETHER > now)
    }

    /// Returns an action that is due by now, each once.
    pub(super) fn due(&mut self, now: Instant) -> Option<Due> {
        if self.ask_at.take_if(|at| *at <= now).is_some() {
            return Some(Due::Ask);
        }
        if self.kill_at.take_if(|at| *at <= now).is_some() {
            return Some(Due::Kill);
        }
        self.time_limit.take_if(|at| *at <= now).map(|_| Due::TimeLimit)
    }

    /// Returns the time at which the next step of the ending is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.ask_at.or(self.kill_at).or(self.time_limit)
    }

    /// Returns the exit status of the job. It is final once no process of the job runs.
    pub(super) fn status(&self) -> u8 {
        self.status.unwrap_or(0)
    }
}

/// Kills and waits for all descendants, and says on stderr which would not die.
pub(super) fn sweep_and_tell() {
    match children::sweep() {
        Ok(left) => left.iter().for_each(|pid| {
            say(format_args!("process {pid} of another user could not be killed; end it yourself"));
        }),
        Err(error) => say(format_args!("looking for processes to end failed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_signal_that_comes_right_behind_another_is_the_same() {
        let (mut ending, now) = (Ending::new(None), Instant::now());
        assert!(!ending.has_just_begun(now));
        assert!(ending.begin(143, now, LAST_WORDS));
        assert!(ending.has_just_begun(now + TOGETHER / 2));
        assert!(!ending.has_just_begun(now + TOGETHER));
    }

    #[test]
    fn a_job_that_nothing_ended_succeeds() {
        let mut ending = Ending::new(None);
        assert_eq!((ending.status(), ending.has_begun(), ending.deadline()), (0, false, None));
        assert_eq!(ending.due(Instant::now()), None);
    }

    #[test]
    fn a_signal_before_the_ranks_are_asked_has_them_asked_and_the_next_one_is_the_second() {
        let (mut ending, now) = (Ending::new(None), Instant::now());
        ending.begin(3, now, LAST_WORDS);
        let then = now + LAST_WORDS / 2;
        assert!(ending.ask_now(then) && ending.has_just_begun(then));
        assert_eq!((ending.due(then), ending.deadline()), (Some(Due::Ask), Some(then + GRACE)));
        assert!(!ending.ask_now(then) && !ending.has_just_begun(then + TOGETHER));
    }

    #[test]
    fn the_first_cause_decides_the_status() {
        let now = Instant::now();
        let mut ending = Ending::new(None);
        assert!(ending.begin(3, now, LAST_WORDS));
        assert!(!ending.begin(143, now, LAST_WORDS));
        assert_eq!(ending.status(), 3);
    }

    #[test]
    fn ranks_have_a_moment_to_speak_before_they_are_asked_to_end_and_grace_before_they_are_killed()
    {
        let now = Instant::now();
        let mut ending = Ending::new(Some(now + LAST_WORDS / 2));
        ending.begin(3, now, LAST_WORDS);
        assert_eq!(ending.due(now + LAST_WORDS * 3 / 4), None, "and the time limit is moot");
        assert_eq!(ending.deadline(), Some(now + LAST_WORDS));
        assert_eq!(ending.due(now + LAST_WORDS), Some(Due::Ask));
        assert_eq!(ending.due(now + GRACE), None);
        assert_eq!(ending.deadline(), Some(now + LAST_WORDS + GRACE));
        assert_eq!(ending.due(now + LAST_WORDS + GRACE), Some(Due::Kill));
        assert_eq!(ending.due(now + 2 * GRACE), None);
    }

    #[test]
    fn the_time_limit_is_told_once() {
        let now = Instant::now();
        let mut ending = Ending::new(Some(now + SECOND));
        assert_eq!((ending.due(now), ending.deadline()), (None, Some(now + SECOND)));
        assert_eq!(ending.due(now + SECOND), Some(Due::TimeLimit));
        assert_eq!(ending.due(now + SECOND), None);
    }
}
