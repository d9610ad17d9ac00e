//! Gets from the peer's memory, additions to it, and puts that are waited for.
//!
//! Rank 0 does all of it. Rank 1 makes progress until it is told that it is over: memory that is
//! not mapped is reached through its owner.

use super::check::lent;
use super::error::PerfError;
use super::figures::Measured;
use super::memory::Memory;
use super::plan::Test;
use super::seat::Seat;
use super::stream::AHEAD;
use super::window::Window;
use super::{latency, stream};
use carrack::{Buffer, CompQueue, Status};
use quanta::Clock;

/// A repeated operation on remote memory, and its progress.
pub(super) struct Fetch<'a> {
    seat: &'a Seat,
    window: &'a Window,
    what: What,
    begun: u64,
}

enum What {
    /// The whole window, into the same memory each time. The buffer that came back is at hand for
    /// the next one; while others are in flight, another handle to that memory is made.
    Get { room: Buffer, spare: Option<Buffer> },
    /// The same bytes are put into the window.
    Put(Buffer),
    /// One is added to the window's first word.
    Add,
}

impl<'a> Fetch<'a> {
    /// Gets of the whole window, `size` bytes, into memory of this kind.
    pub(super) fn get(
        seat: &'a Seat,
        window: &'a Window,
        memory: &Memory,
        size: usize,
    ) -> Result<Self, PerfError> {
        let room = memory.target(size)?;
        let spare = Some(another(&room));
        Ok(Self { seat, window, what: What::Get { room, spare }, begun: 0 })
    }

    /// Puts of `payload` into the window.
    pub(super) fn put(seat: &'a Seat, window: &'a Window, payload: Buffer) -> Self {
        Self { seat, window, what: What::Put(payload), begun: 0 }
    }

    /// Additions of one.
    pub(super) fn add(seat: &'a Seat, window: &'a Window) -> Self {
        Self { seat, window, what: What::Add, begun: 0 }
    }

    /// Begins one.
    #[inline]
    fn begin(&mut self) -> Result<(), PerfError> {
        let Seat { runtime, device, peer, over, .. } = self.seat;
        let theirs = &self.window.theirs;
        self.begun += 1;
        match &mut self.what {
            What::Get { room, spare } => {
                let buffer = spare.take().unwrap_or_else(|| another(room));
                let mut get = runtime.post_get(*peer, buffer, theirs, 0).device(device).comp(over);
                *spare = self.seat.begin(|| get.try_submit())?.map(|status| status.buffer);
                Ok(())
            }
            What::Put(payload) => {
                let mut put =
                    runtime.post_put(*peer, lent(payload), theirs, 0).device(device).comp(over);
                self.seat.start(|| put.try_submit())
            }
            What::Add => {
                let mut add = runtime.post_fetch_add(*peer, theirs, 0, 1).device(device).comp(over);
                self.seat.start(|| add.try_submit())
            }
        }
    }

    /// As rank 0: `count` of them, and the peer is told when all are over.
    pub(super) fn measure(
        mut self,
        test: Test,
        clock: &Clock,
        count: u64,
        size: usize,
    ) -> Result<Measured, PerfError> {
        let measured = match test {
            Test::Latency => Measured::Spans(latency::each(clock, count, || {
                self.begin()?;
                self.seat.settle(0)
            })?),
            Test::Bandwidth | Test::Rate => {
                let window = stream::window(size);
                self.windows(1, window)?;
                let start = clock.raw();
                self.windows(count / window, window)?;
                Measured::Stream(clock.raw().saturating_sub(start).max(1))
            }
        };
        if matches!(self.what, What::Add) {
            let held = add_once(self.seat, self.window, 0)?;
            if held != self.begun {
                return Err(PerfError::Sum { added: self.begun, held });
            }
        }
        self.seat.signal(self.seat.arrivals_name)?;
        Ok(measured)
    }

    /// Runs this number of windows, some of them in flight at once.
    fn windows(&mut self, windows: u64, length: u64) -> Result<(), PerfError> {
        for _ in 0..windows {
            self.seat.settle((AHEAD - 1) * length)?;
            for _ in 0..length {
                self.begin()?;
            }
        }
        self.seat.settle(0)
    }
}

/// As rank 1: lets the peer fetch.
pub(super) fn lend(seat: &Seat) -> Result<Measured, PerfError> {
    seat.take(1)?;
    Ok(Measured::Nothing)
}

/// Another handle to the same memory, or other memory of the same size.
fn another(room: &Buffer) -> Buffer {
    match room {
        Buffer::Region(slice) => Buffer::Region(slice.clone()),
        other => Buffer::Vec(vec![0; other.len()]),
    }
}

/// Gets the peer's window into `buffer`.
pub(super) fn get_once(seat: &Seat, window: &Window, buffer: Buffer) -> Result<Status, PerfError> {
    let over = CompQueue::new(2);
    let get = seat.runtime.post_get(seat.peer, buffer, &window.theirs, 0);
    let mut get = get.device(&seat.device).comp(&over);
    get.submit()?;
    seat.next_of(&over)
}

/// Adds to the first word of the peer's window, and tells what it held.
pub(super) fn add_once(seat: &Seat, window: &Window, value: u64) -> Result<u64, PerfError> {
    let over = CompQueue::new(2);
    let add = seat.runtime.post_fetch_add(seat.peer, &window.theirs, 0, value);
    let mut add = add.device(&seat.device).comp(&over);
    add.submit()?;
    // A status without a value holds no word: nothing that was added could be told from it.
    Ok(seat.next_of(&over)?.value().unwrap_or(u64::MAX))
}
