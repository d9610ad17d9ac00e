//! Waiting without burning a core.
//!
//! A waiting thread first spins: a message between two busy ranks takes a fraction of a
//! microsecond, a wake-up several. Then it sleeps on the descriptors that every transport arms,
//! and on one of the runtime's own. By that one, threads that make progress wake threads that wait
//! for its results.

use super::Core;
use crate::chores::Chore;
use crate::datapath::Device;
use crate::error::{ProgressError, WaitError};
use carrack_transports::contract::Armed;
use carrack_transports::sync::{Sleepers, losses_of_this_thread};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest sleep without a look at everything: covers sources that cannot be armed (a GPU's
/// events), and peers that tamper with each other's wake-ups.
const LONGEST: Duration = Duration::from_millis(500);
/// Sleep while an operation is in flight that no descriptor reports. Also the first of several
/// sleeps while a peer has not published its address: each further one is twice as long.
const SHORT: Duration = Duration::from_micros(100);
/// Longest sleep while deliveries wait for room in their completion objects or for packets, or
/// messages for room at a peer, of which no descriptor tells over shared memory. The first of
/// several is [`SHORT`], each further one an eighth longer: so a wait takes about an eighth longer
/// than its cause.
const ROOM: Duration = Duration::from_millis(10);
/// Longest sleep until a missing address is looked up again, of which the bootstrap's descriptor
/// does not tell.
const UNTOLD: Duration = Duration::from_millis(5);

impl Core {
    /// Waits for a caller that returns errors of progress.
    pub(crate) fn wait(
        &self,
        done: &dyn Fn() -> bool,
        limit: Option<Duration>,
    ) -> Result<(), WaitError> {
        self.wait_with(done, limit, true)
    }

    /// Waits for a caller with another result: errors of progress are kept for a call that returns
    /// them.
    pub(crate) fn wait_keeping(
        &self,
        done: &dyn Fn() -> bool,
        limit: Option<Duration>,
    ) -> Result<(), WaitError> {
        self.wait_with(done, limit, false)
    }

    fn wait_with(
        &self,
        done: &dyn Fn() -> bool,
        limit: Option<Duration>,
        reports: bool,
    ) -> Result<(), WaitError> {
        if self.is_forked() {
            return Err(ProgressError::Forked.into());
        }
        self.note_driven();
        let limit = limit.map(|limit| (limit, Instant::now()));
        let mut quiet_since = None;
        let (mut spins, mut moves) = (0_u32, 0_u32);
        let mut losses = losses_of_this_thread();
        let mut nap = SHORT;
        loop {
            if done() {
                return Ok(());
            }
            let progress = if reports {
                self.progress_everything()
            } else {
                self.progress_everything_keeping()
            };
            match progress {
                Ok(true) => {
                    (spins, nap, quiet_since) = (0, SHORT, None);
                    moves = moves.wrapping_add(1);
                    // What moves may be of others, without an end.
                    if moves.is_multiple_of(64)
                        && let Some((limit, start)) = limit
                        && start.elapsed() >= limit
                        && !done()
                    {
                        return Err(WaitError::TimedOut(limit));
                    }
                    continue;
                }
                Ok(false) => {}
                Err(error) if done() => {
                    let _ = self.kept(error);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
            // The clock is read only now and then, because that takes as long as a poll. A poll
            // that lost a lock may have taken much longer.
            spins += 1;
            let lost = std::mem::replace(&mut losses, losses_of_this_thread()) != losses;
            if !lost && !spins.is_multiple_of(16) && !self.settings.spin().is_zero() {
                std::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            if let Some((limit, _)) = limit.filter(|(limit, start)| now - *start >= *limit) {
                return Err(WaitError::TimedOut(limit));
            }
            if now - *quiet_since.get_or_insert(now) < self.settings.spin() {
                if spins.is_multiple_of(64) {
                    std::thread::yield_now();
                }
                continue;
            }
            let left = limit.map_or(LONGEST, |(limit, start)| limit.saturating_sub(now - start));
            // An error that another thread keeps from now on wakes this thread.
            let done = || done() || reports && self.chores.there().has(Chore::Complaints);
            self.sleep(&done, left.min(LONGEST), &mut nap);
            (spins, quiet_since) = (0, None);
        }
    }

    /// Sleeps until something happens, or `done` returns `true` on another thread, or the time is
    /// up. Where it waits for what no descriptor tells, it sleeps no longer than `nap`, which then
    /// grows.
    #[cold]
    fn sleep(&self, done: &dyn Fn() -> bool, longest: Duration, nap: &mut Duration) {
        let (sleep, fd) = self.prepare_sleep(longest, nap);
        sleep.run(done, fd);
    }

    /// Returns the sleep of a thread that is to wake a future, apart from the runtime.
    pub(crate) fn sleep_apart(&self, nap: &mut Duration) -> Sleep {
        let (mut sleep, bootstrap) = self.prepare_sleep(LONGEST, nap);
        if bootstrap.is_some() {
            // The descriptor stays with the runtime.
            (sleep.span, *nap) = (UNTOLD.min(sleep.span), UNTOLD.min(*nap));
        }
        sleep
    }

    /// Decides how long to sleep, and on which descriptor of the bootstrap.
    fn prepare_sleep(
        &self,
        longest: Duration,
        nap: &mut Duration,
    ) -> (Sleep, Option<BorrowedFd<'_>>) {
        self.look_after_domains();
        let devices = self.devices().clone();
        let mut bootstrap = None;
        // This comes before the checks below: a change from now on rings the bell.
        self.sleepers.begin();
        // Work that waits for an engine or for room is looked at again soon.
        let soon = self.retries.any()
            || !self.words.is_empty()
            || devices.iter().any(|device| device.0.has_chores());
        let mut span = if soon { SHORT } else { LONGEST };
        let waits = |device: &Device| device.0.has_backlog() || !device.0.undelivered.is_empty();
        let waits = !soon && devices.iter().any(waits);
        if waits {
            *nap = ROOM.min(*nap);
            (span, *nap) = (*nap, *nap * 9 / 8);
        }
        if !self.absent.is_empty() || devices.iter().any(|device| device.0.waits_for_absent()) {
            // A descriptor that is readable right after a search for all absent peers reports
            // another event, and would wake this thread again and again.
            match self.bootstrap.wait_fd().filter(|fd| !is_readable(fd)) {
                Some(fd) => bootstrap = Some(fd),
                None => *nap = UNTOLD.min(*nap),
            }
            span = span.min(*nap);
            if !waits {
                *nap = LONGEST.min(*nap * 2);
            }
        }
        let span = self.deadlines.limit(span.min(longest));
        (Sleep { devices, sleepers: self.sleepers.clone(), span }, bootstrap)
    }
}

/// A sleep until something happens. It does not keep the runtime alive.
///
/// It counts as a sleeper as soon as it is made, so a change that comes before it [runs](Self::run)
/// ends it at once.
pub(crate) struct Sleep {
    devices: Vec<Device>,
    sleepers: Arc<Sleepers>,
    span: Duration,
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.sleepers.end();
    }
}

impl Sleep {
    /// Wakes the thread that sleeps.
    pub(crate) fn end(&self) -> impl Fn() + Send + 'static {
        let sleepers = self.sleepers.clone();
        move || sleepers.wake()
    }

    /// Sleeps, unless `done` returns `true` already.
    pub(crate) fn run(&self, done: &dyn Fn() -> bool, further: Option<BorrowedFd<'_>>) {
        let lanes: Vec<_> = self.devices.iter().flat_map(|device| device.0.lanes.iter()).collect();
        let mut armed = Vec::with_capacity(lanes.len());
        let mut fds = vec![PollFd::from_borrowed_fd(self.sleepers.as_fd(), PollFlags::IN)];
        fds.extend(further.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let mut ready = done();
        for lane in &lanes {
            if ready {
                break;
            }
            match lane.device.arm() {
                Armed::Ready => {
                    ready = true;
                    lane.pace.rouse();
                }
                Armed::Wait(fd) => {
                    armed.push(lane);
                    fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
                }
            }
        }
        if !ready {
            let timeout = Timespec {
                tv_sec: i64::try_from(self.span.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(self.span.subsec_nanos()),
            };
            // An interruption counts as an event: the caller checks its condition and sleeps again.
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
        }
        let first = fds.len() - armed.len();
        for (lane, fd) in armed.into_iter().zip(&fds[first..]) {
            // Without a sleep it is not known.
            lane.device.disarm(ready || !fd.revents().is_empty());
            lane.pace.rouse();
        }
    }
}

fn is_readable(fd: &BorrowedFd<'_>) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now))
        .is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::{Bootstrap, BootstrapError, InProcess, JobId};
    use crate::settings::{GpuChoice, Settings, TransportChoice};
    use crate::{Rank, Runtime, Tag};
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::OwnedFd;

    /// A rank of a job, with a descriptor that has nothing to tell.
    struct Quiet(InProcess, OwnedFd);

    impl Bootstrap for Quiet {
        fn rank(&self) -> u32 {
            self.0.rank()
        }

        fn size(&self) -> u32 {
            self.0.size()
        }

        fn job(&self) -> &JobId {
            self.0.job()
        }

        fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
            self.0.put(key, value)
        }

        fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
            self.0.get(key)
        }

        fn fence(&self) -> Result<(), BootstrapError> {
            self.0.fence()
        }

        fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.1.as_fd())
        }
    }

    /// Starts the first rank of two. The other one is not there yet.
    fn start() -> (Runtime, InProcess) {
        let mut job = InProcess::job(2).unwrap();
        let (one, zero) = (job.pop().unwrap(), job.pop().unwrap());
        let settings =
            Settings::builder().transports(vec![TransportChoice::Loopback]).gpu(GpuChoice::None);
        let settings = settings.build_from_vars::<String, String>([]).unwrap();
        let bootstrap = Quiet(zero, eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let builder = Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap));
        (builder.start().unwrap(), one)
    }

    #[test]
    fn a_sleep_without_the_descriptor_of_the_bootstrap_is_short_while_a_rank_is_awaited() {
        let (runtime, _other) = start();
        let core = &runtime.0;
        let spans = |nap: &mut Duration| -> Vec<_> {
            (0..20).map(|_| core.sleep_apart(nap).span).collect()
        };
        assert_eq!(spans(&mut SHORT.clone()), [LONGEST; 20], "nothing is awaited");
        runtime.post_send(Rank(1), b"x", Tag(1)).submit().unwrap();
        let mut nap = SHORT;
        let spans = spans(&mut nap);
        assert!(spans.iter().all(|span| *span <= UNTOLD), "{spans:?}");
        // A thread that has the descriptor hears of the rank.
        let spans: Vec<_> = (0..20).map(|_| core.prepare_sleep(LONGEST, &mut nap)).collect();
        assert!(spans.iter().all(|(_, fd)| fd.is_some()));
        assert_eq!(spans.last().unwrap().0.span, LONGEST);
    }

    #[test]
    fn sleeps_get_longer_while_messages_queue_for_a_peer_that_takes_none() {
        let settings = Settings::builder().transports(vec![TransportChoice::Shm]);
        let settings = settings.gpu(GpuChoice::None).setting("shm_slots", 8);
        let settings = settings.build_from_vars::<String, String>([]).unwrap();
        let ranks = Runtime::in_process_with(2, &settings).unwrap();
        let until_queued = || {
            while ranks[0].pending().operations.is_empty() {
                ranks[0].post_send(Rank(1), b"x", Tag(1)).submit().unwrap();
                ranks[1].progress().unwrap();
            }
        };
        ranks[0].post_send(Rank(1), b"x", Tag(1)).submit().unwrap();
        let core = &ranks[0].0;
        while core.devices()[0].0.waits_for_absent() {
            ranks.iter().for_each(|rank| assert!(rank.progress().is_ok()));
        }
        until_queued();
        let mut nap = SHORT;
        let spans: Vec<_> = (0..60).map(|_| core.prepare_sleep(LONGEST, &mut nap).0.span).collect();
        assert!(spans.is_sorted() && spans[0] == SHORT && spans[59] == ROOM, "{spans:?}");
    }

    #[test]
    fn a_rank_that_has_not_started_is_named_with_the_time_that_it_was_waited_for() {
        let (runtime, _other) = start();
        let trouble = runtime.explain(Duration::from_millis(10)).swap_remove(1).trouble;
        let trouble = trouble.unwrap();
        assert!(trouble.starts_with("rank 1 has not published an address"), "{trouble}");
        assert!(trouble.contains("10ms"), "{trouble}");
    }

    #[test]
    fn the_end_of_a_runtime_wakes_threads_that_sleep_apart() {
        let (runtime, _other) = start();
        let sleep = runtime.0.sleep_apart(&mut SHORT.clone());
        assert!(!is_readable(&sleep.sleepers.as_fd()));
        drop(runtime);
        assert!(is_readable(&sleep.sleepers.as_fd()), "it sleeps on, for a runtime that is gone");
    }
}
