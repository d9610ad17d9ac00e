//! Messages that are matched by receives.

use super::error::PerfError;
use super::line::{Line, Traffic};
use super::memory::Memory;
use super::seat::Seat;
use carrack::buffer::RegionSlice;
use carrack::post::{PostRecv, PostSend};
use carrack::{Buffer, CompQueue};

/// A line of sends and receives.
///
/// It posts exactly as many receives as messages will come, so that none is left over for the next
/// round, and keeps `depth` of them posted: the buffer of a receive that is over goes into the next
/// one. Messages are sent from one buffer; large ones are received into one buffer.
pub(super) struct SendLine<'a> {
    seat: &'a Seat,
    message: Message<'a>,
    /// One receive, which is called for each message, with a buffer of its own each time.
    receive: PostRecv<'a>,
    over: &'a CompQueue,
    size: usize,
    /// Receives that are still to be posted.
    to_post: u64,
    /// The receive has the buffer of the last one, and is to be posted. That is done once the
    /// answer is on its way, or with the next receive: off the path that is measured where that is
    /// possible.
    is_spare: bool,
}

/// The message of a line.
enum Message<'a> {
    /// Borrowed bytes: one operation that is called for each message.
    Borrowed(PostSend<'a>),
    /// Memory that the operation owns while it runs: built for each message.
    Owned(RegionSlice),
}

impl<'a> SendLine<'a> {
    /// A line that sends `payload` and has its first receives posted, into such memory.
    pub(super) fn new(
        seat: &'a Seat,
        payload: &'a Buffer,
        over: &'a CompQueue,
        memory: &Memory,
        traffic: Traffic,
    ) -> Result<Self, PerfError> {
        let message = match payload {
            Buffer::Region(slice) => Message::Owned(slice.clone()),
            host => {
                let bytes = host.as_slice().unwrap_or_default();
                Message::Borrowed(
                    seat.runtime.post_send(seat.peer, bytes, seat.tag).device(&seat.device),
                )
            }
        };
        // A message that is here already ends in the queue, too.
        let receive = seat
            .runtime
            .post_recv(seat.peer, Buffer::Empty, seat.tag)
            .device(&seat.device)
            .comp(over);
        let (size, to_post) = (traffic.size, traffic.incoming);
        let mut line = Self { seat, message, receive, over, size, to_post, is_spare: false };
        for buffer in memory.buffers(posted(traffic), traffic.size)? {
            line.receive.refill(buffer);
            line.is_spare = true;
            line.post_spare()?;
        }
        Ok(line)
    }

    /// The queue of a line's receives.
    pub(super) fn queue(traffic: Traffic) -> CompQueue {
        CompQueue::new(posted(traffic) + 1)
    }

    /// Posts a receive into the spare buffer, if there is one and a message for it is to come.
    #[inline]
    fn post_spare(&mut self) -> Result<(), PerfError> {
        if self.to_post == 0 {
            return Ok(());
        }
        if !std::mem::take(&mut self.is_spare) {
            return Ok(());
        }
        self.to_post -= 1;
        Ok(self.receive.submit()?)
    }
}

/// Receives that are posted at a time.
fn posted(traffic: Traffic) -> usize {
    usize::try_from(traffic.depth.min(traffic.incoming)).unwrap_or(0)
}

impl SendLine<'_> {
    #[inline(always)]
    fn give(&mut self, more: bool) -> Result<(), PerfError> {
        match &mut self.message {
            Message::Borrowed(message) => {
                message.again().set_more(more);
                self.seat.post(|| message.try_submit())?;
            }
            Message::Owned(slice) => {
                let Seat { runtime, device, peer, tag, .. } = self.seat;
                let mut message = runtime.post_send(*peer, slice.clone(), *tag).device(device);
                self.seat.post(|| message.try_submit())?;
            }
        }
        self.post_spare()
    }
}

impl Line for SendLine<'_> {
    #[inline]
    fn send(&mut self) -> Result<(), PerfError> {
        self.give(false)
    }

    #[inline]
    fn send_with_more(&mut self) -> Result<(), PerfError> {
        self.give(true)
    }

    #[inline]
    fn receive(&mut self, count: u64) -> Result<(), PerfError> {
        for _ in 0..count {
            self.post_spare()?;
            let status = loop {
                if let Some(status) = self.over.pop() {
                    break status;
                }
                self.seat.until(|| !self.over.is_empty())?;
            };
            if let Some(error) = status.error {
                return Err((*error).into());
            }
            if status.size != self.size {
                return Err(PerfError::Length { what: "send", size: self.size, got: status.size });
            }
            self.receive.refill(status.buffer);
            self.is_spare = true;
        }
        Ok(())
    }
}
