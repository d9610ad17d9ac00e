//! One thread's place at a rank.

use super::error::PerfError;
use super::memory::Memory;
use super::tally::{Tally, landing_queue};
use carrack::post::{Kind, Post};
use carrack::{
    Buffer, CompQueue, Device, Outcome, ProgressError, Rank, RemoteComp, Runtime, Status, Tag,
    WaitError,
};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Fruitless polls between two looks at whether the peer is still there: some milliseconds.
const LOOK_EVERY: u32 = 1 << 18;
/// Sleep between two such looks.
const NAP: Duration = Duration::from_millis(100);
/// Messages that wait to be checked: one at a time, and room for a surprise.
const CHECKS: usize = 4;

/// A thread's way of waiting.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pace {
    /// The thread polls without pause.
    #[value(name = "poll")]
    Spin,
    /// The thread sleeps when there is nothing to do: where threads share cores, one that spins
    /// keeps others from theirs.
    Sleep,
}

/// A device with all that goes with it. Both ranks make theirs in the same order, so that devices
/// and names are the same on both.
///
/// If the pace is `Spin` and the device is the seat's own, at most one thread makes progress on it
/// while a round runs. Before and after the round, the rank's main thread does.
///
/// Threads write to their seats with each message, and share no cache line, nor a pair of them that
/// a processor fetches together.
#[repr(align(128))]
pub(super) struct Seat {
    pub(super) runtime: Runtime,
    pub(super) device: Device,
    pub(super) peer: Rank,
    pub(super) pace: Pace,
    /// CPUs of its thread.
    pub(super) cpus: Vec<usize>,
    /// Tag of this seat's matched messages.
    pub(super) tag: Tag,
    /// Active messages. `taken` counts those of all rounds that were taken, because a quick peer's
    /// message may arrive before its round has begun on this side.
    arrivals: Tally,
    taken: Cell<u64>,
    pub(super) arrivals_name: RemoteComp,
    /// Windows that the peer has received.
    pub(super) acks: Tally,
    acks_name: RemoteComp,
    /// Operations on the peer's memory that ended after their call; `posted` counts all that were
    /// in flight after it.
    pub(super) ended: Tally,
    posted: Cell<u64>,
    /// Active messages whose bytes are looked at.
    pub(super) checks: CompQueue,
    pub(super) checks_name: RemoteComp,
    /// Devices that no other seat polls. This seat polls them while it waits, so that a peer's end
    /// is noticed.
    bystanders: Vec<Device>,
    /// `true` if another seat of this rank has failed.
    given_up: Arc<AtomicBool>,
    fruitless: Cell<u32>,
}

impl Seat {
    /// Creates the seat of this number, whose active messages land in such memory.
    pub(super) fn new(
        runtime: &Runtime,
        memory: &Memory,
        device: Device,
        peer: Rank,
        given_up: &Arc<AtomicBool>,
        number: usize,
    ) -> Result<Self, PerfError> {
        let (arrivals, acks) = (Tally::new(Some(memory)), Tally::new(None));
        let checks = CompQueue::new(CHECKS);
        Ok(Self {
            device,
            peer,
            pace: Pace::Sleep,
            cpus: Vec::new(),
            tag: Tag(number as u64),
            arrivals_name: runtime.register_comp(&arrivals)?,
            arrivals,
            taken: Cell::new(0),
            acks_name: runtime.register_comp(&acks)?,
            acks,
            ended: Tally::new(None),
            posted: Cell::new(0),
            checks_name: runtime.register_comp(&landing_queue(checks.clone(), memory))?,
            checks,
            bystanders: Vec::new(),
            given_up: given_up.clone(),
            fruitless: Cell::new(0),
            runtime: runtime.clone(),
        })
    }

    /// Prepares for a point: its thread's way of waiting and CPUs, and the devices that no other
    /// seat polls. `is_shared` says that other seats use its device.
    pub(super) fn prepare(
        &mut self,
        pace: Pace,
        is_shared: bool,
        cpus: Vec<usize>,
        bystanders: Vec<Device>,
    ) {
        self.pace = pace;
        self.cpus = cpus;
        // A thread that sleeps makes progress on all devices first.
        let by_many = is_shared || pace == Pace::Sleep;
        self.arrivals.set_shared(by_many);
        self.acks.set_shared(by_many);
        self.ended.set_shared(by_many);
        self.bystanders = bystanders;
    }

    /// Tells the other seats of this rank that it is no use to go on.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Posts an operation that ends unseen.
    #[inline(always)]
    pub(super) fn send<K: Kind>(&self, op: &mut Post<'_, K>) -> Result<(), PerfError> {
        self.post(op, || ())
    }

    /// Posts an operation that completes to `over`; [`settle`](Self::settle) waits for it.
    #[inline(always)]
    pub(super) fn begin<K: Kind>(&self, op: &mut Post<'_, K>) -> Result<(), PerfError> {
        self.post(op, || self.count_posted())
    }

    #[inline(always)]
    fn post<K: Kind>(&self, op: &mut Post<'_, K>, posted: impl Fn()) -> Result<(), PerfError> {
        // The outcome stays where it is: to hand a status on takes half as long as a small message.
        loop {
            let called = op.try_submit();
            match &called {
                Ok(Outcome::Done(_)) => return Ok(()),
                Ok(Outcome::Posted) => {
                    posted();
                    return Ok(());
                }
                Ok(Outcome::Retry(_)) => self.poll()?,
                Err(_) => return Ok(called.map(drop)?),
            }
        }
    }

    /// Begins an operation, too. Returns its buffer if it has ended already.
    #[inline(always)]
    pub(super) fn begin_with_buffer<K: Kind>(
        &self,
        op: &mut Post<'_, K>,
    ) -> Result<Option<Buffer>, PerfError> {
        loop {
            match op.try_submit()? {
                Outcome::Done(status) => return Ok(Some(status.buffer)),
                Outcome::Posted => {
                    self.count_posted();
                    return Ok(None);
                }
                Outcome::Retry(_) => self.poll()?,
            }
        }
    }

    #[inline]
    fn count_posted(&self) {
        self.posted.set(self.posted.get() + 1);
    }

    /// Posts an operation on this seat's device, and waits until it ends.
    pub(super) fn wait<'a, K: Kind>(&'a self, op: Post<'a, K>) -> Result<Status, PerfError> {
        let ended = CompQueue::new(2);
        op.device(&self.device).comp(&ended).submit()?;
        self.next_of(&ended)
    }

    /// Waits until at most `most` of the started operations are in flight.
    #[inline]
    pub(super) fn settle(&self, most: u64) -> Result<(), PerfError> {
        let wanted = self.posted.get().saturating_sub(most);
        self.until(|| self.ended.get() >= wanted)
    }

    /// Waits for the next status of a queue. A failed one is an error.
    pub(super) fn next_of(&self, queue: &CompQueue) -> Result<Status, PerfError> {
        loop {
            if let Some(status) = queue.pop() {
                return Ok(status.ok()?);
            }
            self.until(|| !queue.is_empty())?;
        }
    }

    /// Sends an empty active message to an object of the peer's seat.
    #[inline]
    pub(super) fn signal(&self, name: RemoteComp) -> Result<(), PerfError> {
        self.send(&mut self.runtime.post_am(self.peer, &[], name).device(&self.device))
    }

    /// Waits until `done` says so, making progress.
    #[inline]
    pub(super) fn until(&self, done: impl Fn() -> bool) -> Result<(), PerfError> {
        match self.pace {
            Pace::Sleep => self.sleep_until(&done),
            Pace::Spin => self.look_until(done),
        }
    }

    /// Waits like `until`, without sleep: no event reports this condition.
    #[inline]
    pub(super) fn look_until(&self, done: impl Fn() -> bool) -> Result<(), PerfError> {
        while !done() {
            self.poll()?;
        }
        Ok(())
    }

    /// Waits for `count` more active messages.
    #[inline]
    pub(super) fn take(&self, count: u64) -> Result<(), PerfError> {
        let taken = self.taken.get() + count;
        self.taken.set(taken);
        self.until(|| self.arrivals.get() >= taken)
    }

    /// Makes progress once.
    #[inline]
    fn poll(&self) -> Result<(), PerfError> {
        match self.runtime.progress_device(&self.device) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => passing(error)?,
        }
        if self.pace == Pace::Sleep {
            std::thread::yield_now();
        }
        let fruitless = self.fruitless.get() + 1;
        self.fruitless.set(fruitless);
        if fruitless.is_multiple_of(LOOK_EVERY) {
            self.look_around()?;
        }
        Ok(())
    }

    #[cold]
    fn sleep_until(&self, done: &dyn Fn() -> bool) -> Result<(), PerfError> {
        loop {
            match self.runtime.wait_for(NAP, done) {
                Ok(()) => return Ok(()),
                Err(WaitError::TimedOut(_)) => self.look_around()?,
                Err(WaitError::Progress(error)) => passing(error)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Makes progress on everything, and returns the reason to give up, if there is one.
    #[cold]
    fn look_around(&self) -> Result<(), PerfError> {
        self.runtime.progress()?;
        for device in &self.bystanders {
            self.runtime.progress_device(device)?;
        }
        if let Some(cause) = self.runtime.peer_down(self.peer) {
            return Err(PerfError::PeerGone { rank: self.peer, cause });
        }
        if self.given_up.load(Ordering::Relaxed) {
            return Err(PerfError::GivenUp);
        }
        match self.arrivals.failed().or(self.acks.failed()).or(self.ended.failed()) {
            Some(why) => Err(PerfError::Arrival { peer: self.peer, why: why.to_owned() }),
            None => Ok(()),
        }
    }

    /// Tells the peer's seat of the same number that a window has come in.
    #[inline]
    pub(super) fn acknowledge(&self) -> Result<(), PerfError> {
        self.signal(self.acks_name)
    }
}

/// Returns an error unless it says only that messages wait for a packet. Packets come back by
/// themselves, since perf keeps none.
#[cold]
fn passing(error: ProgressError) -> Result<(), PerfError> {
    match error {
        ProgressError::NoPacket(_) => Ok(()),
        error => Err(error.into()),
    }
}
