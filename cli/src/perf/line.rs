//! Steps that the measuring loop repeats: messages between two seats, or operations of one.

use super::error::PerfError;
use super::figures::Measured;
use super::measure::{AHEAD, Round, window};
use super::seat::{Pace, Seat};
use carrack::buffer::{RegionSlice, SendBuffer};
use carrack::post::{Carries, Post, PostRecv};
use carrack::transports::mem::Transfer;
use carrack::{Buffer, CompQueue, Status};
use std::collections::VecDeque;

/// Operations of one size, one after another. The loop is compiled for each kind of line.
pub(super) trait Line {
    /// `true` if the peer has a line, too, and answers: with messages, or by acknowledging windows.
    const IS_ANSWERED: bool;

    /// Begins an operation. `more`: others follow at once.
    fn begin(&mut self, more: bool) -> Result<(), PerfError>;

    /// Waits for `count` more messages of the peer.
    fn take(&mut self, count: u64) -> Result<(), PerfError>;

    /// Waits until at most `most` of the operations are in flight as far as this side knows.
    fn settle(&mut self, most: u64) -> Result<(), PerfError>;
}

/// A line whose operations end as its seat counts.
pub(super) struct Of<'a, const IS_ANSWERED: bool, B, T> {
    seat: &'a Seat,
    begin: B,
    take: T,
}

impl<'a, B, T> Of<'a, true, B, T>
where
    B: FnMut(bool) -> Result<(), PerfError>,
    T: FnMut(u64) -> Result<(), PerfError>,
{
    /// Returns the messages of both sides.
    pub(super) fn both(seat: &'a Seat, begin: B, take: T) -> Self {
        Self { seat, begin, take }
    }
}

impl<const IS_ANSWERED: bool, B, T> Line for Of<'_, IS_ANSWERED, B, T>
where
    B: FnMut(bool) -> Result<(), PerfError>,
    T: FnMut(u64) -> Result<(), PerfError>,
{
    const IS_ANSWERED: bool = IS_ANSWERED;

    #[inline(always)]
    fn begin(&mut self, more: bool) -> Result<(), PerfError> {
        (self.begin)(more)
    }

    #[inline(always)]
    fn take(&mut self, count: u64) -> Result<(), PerfError> {
        (self.take)(count)
    }

    #[inline(always)]
    fn settle(&mut self, most: u64) -> Result<(), PerfError> {
        self.seat.settle(most)
    }
}

impl Round<'_> {
    /// Measures operations of rank 0 alone on memory of rank 1. `verify` has the number that were
    /// begun, while rank 1 still lends its memory.
    pub(super) fn alone(
        &self,
        seat: &Seat,
        mut begin: impl FnMut() -> Result<(), PerfError>,
        verify: impl FnOnce(u64) -> Result<(), PerfError>,
    ) -> Result<Measured, PerfError> {
        let mut begun = 0;
        let begin = |_| {
            begun += 1;
            begin()
        };
        let mut line = Of::<false, _, _> { seat, begin, take: |_| Ok(()) };
        let measured = self.line(&mut line, seat)?;
        if self.leads {
            verify(begun)?;
            seat.signal(seat.arrivals_name)?;
        }
        Ok(measured)
    }
}

/// Returns what an operation takes of a buffer: a slice of its region, or its borrowed bytes.
#[inline]
pub(super) fn lent(payload: &Buffer) -> SendBuffer<'_> {
    match payload {
        Buffer::Region(slice) => SendBuffer::from(slice.clone()),
        host => SendBuffer::Borrowed(host.as_slice().unwrap_or_default()),
    }
}

/// An operation that is posted over and over with one payload.
pub(super) struct Repeated<'a, K> {
    payload: &'a Buffer,
    op: Post<'a, K>,
}

impl<'a, K: Carries> Repeated<'a, K> {
    pub(super) fn new(
        payload: &'a Buffer,
        build: impl FnOnce(SendBuffer<'a>) -> Post<'a, K>,
    ) -> Self {
        Self { payload, op: build(lent(payload)) }
    }

    /// Posts it by the seat's [`send`](Seat::send) or [`begin`](Seat::begin).
    #[inline(always)]
    pub(super) fn post(
        &mut self,
        more: bool,
        by: impl FnOnce(&mut Post<'a, K>) -> Result<(), PerfError>,
    ) -> Result<(), PerfError> {
        match self.payload {
            Buffer::Region(slice) => self.op.refill(slice.clone()),
            _ => self.op.again(),
        }
        .set_more(more);
        by(&mut self.op)
    }
}

/// A line of sends and receives.
///
/// It posts exactly as many receives as messages will come, so that none is left over for the next
/// round. Some of them are posted at a time; the buffer of a receive that has ended goes into the
/// next one. Messages are sent from one buffer; large ones are received into one buffer.
pub(super) struct SendLine<'a, K> {
    seat: &'a Seat,
    message: Repeated<'a, K>,
    /// One receive, which is called for each message, with a buffer of its own each time.
    receive: PostRecv<'a>,
    ended: &'a CompQueue,
    size: usize,
    /// Receives that are still to be posted.
    to_post: u64,
    /// The receive has the buffer of the last one, and is not posted yet. That is done once the
    /// answer is on its way, or with the next receive: off the path that is measured where that is
    /// possible.
    is_spare: bool,
}

impl<'a, K: Carries> SendLine<'a, K> {
    /// Creates a line that sends `message`, and posts its first receives, which end in `ended`.
    pub(super) fn new(
        round: &Round<'_>,
        seat: &'a Seat,
        ended: &'a CompQueue,
        message: Repeated<'a, K>,
    ) -> Result<Self, PerfError> {
        // A message that is here already ends in the queue, too.
        let receive = seat.runtime.post_recv(seat.peer, Buffer::Empty, seat.tag);
        let receive = receive.device(&seat.device).comp(ended);
        let (size, (to_post, _)) = (round.point.size, round.incoming());
        let mut line = Self { seat, message, receive, ended, size, to_post, is_spare: false };
        for buffer in round.memory.buffers(posted(round), size)? {
            line.receive.refill(buffer);
            line.is_spare = true;
            line.post_spare()?;
        }
        Ok(line)
    }

    /// Posts a receive into the spare buffer, if there is one and a message for it is to come.
    #[inline]
    fn post_spare(&mut self) -> Result<(), PerfError> {
        if self.to_post == 0 || !std::mem::take(&mut self.is_spare) {
            return Ok(());
        }
        self.to_post -= 1;
        Ok(self.receive.submit()?)
    }
}

/// Creates the queue of a line's receives.
pub(super) fn queue(round: &Round<'_>) -> CompQueue {
    CompQueue::new(posted(round) + 1)
}

/// Receives that are posted at a time.
fn posted(round: &Round<'_>) -> usize {
    let (incoming, ahead) = round.incoming();
    usize::try_from(ahead.min(incoming)).unwrap_or(0)
}

impl<K: Carries> Line for SendLine<'_, K> {
    const IS_ANSWERED: bool = true;

    #[inline(always)]
    fn begin(&mut self, more: bool) -> Result<(), PerfError> {
        self.message.post(more, |message| self.seat.send(message))?;
        self.post_spare()
    }

    #[inline]
    fn take(&mut self, count: u64) -> Result<(), PerfError> {
        for _ in 0..count {
            self.post_spare()?;
            let buffer = loop {
                // The parts of a status are moved, and not all of it once more.
                match self.ended.pop() {
                    None => self.seat.until(|| !self.ended.is_empty())?,
                    Some(Status { error: Some(error), .. }) => return Err((*error).into()),
                    Some(Status { size: got, .. }) if got != self.size => {
                        return Err(PerfError::Length { what: "send", size: self.size, got });
                    }
                    Some(Status { buffer, .. }) => break buffer,
                }
            };
            self.receive.refill(buffer);
            self.is_spare = true;
        }
        Ok(())
    }

    /// Does nothing: a message has arrived once the receiver has taken it.
    #[inline]
    fn settle(&mut self, _most: u64) -> Result<(), PerfError> {
        Ok(())
    }
}

/// Copies within rank 0: what the driver's engine does, or the CPU where no GPU has to do with it,
/// without anything of a communication's.
pub(super) struct Copies {
    pub(super) from: RegionSlice,
    pub(super) to: RegionSlice,
    /// The way in which its thread waits.
    pub(super) pace: Pace,
    pub(super) in_flight: VecDeque<Transfer>,
}

impl Line for Copies {
    const IS_ANSWERED: bool = false;

    fn begin(&mut self, _more: bool) -> Result<(), PerfError> {
        // The limit of puts.
        self.settle(AHEAD * window(self.from.len()) - 1)?;
        let (to, from) = (Buffer::Region(self.to.clone()), Buffer::Region(self.from.clone()));
        self.in_flight.push_back(Transfer::start(to, from).map_err(|refused| refused.cause)?);
        Ok(())
    }

    fn take(&mut self, _count: u64) -> Result<(), PerfError> {
        Ok(())
    }

    fn settle(&mut self, most: u64) -> Result<(), PerfError> {
        while self.in_flight.len() as u64 > most
            && let Some(mut copy) = self.in_flight.pop_front()
        {
            loop {
                match copy.poll() {
                    Some(outcome) => break outcome?,
                    None if self.pace == Pace::Sleep => std::thread::yield_now(),
                    None => std::hint::spin_loop(),
                }
            }
        }
        Ok(())
    }
}
