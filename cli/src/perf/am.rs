//! Active messages.

use super::error::PerfError;
use super::line::Line;
use super::seat::Seat;
use carrack::Buffer;
use carrack::buffer::RegionSlice;
use carrack::post::PostAm;

/// A line of active messages.
pub(super) struct AmLine<'a> {
    seat: &'a Seat,
    message: Message<'a>,
}

/// The message of a line.
enum Message<'a> {
    /// Borrowed bytes: one operation that is called for each message.
    Borrowed(PostAm<'a>),
    /// Memory that the operation owns while it runs: built for each message.
    Owned(RegionSlice),
}

impl<'a> AmLine<'a> {
    /// A line that sends `payload`.
    pub(super) fn new(seat: &'a Seat, payload: &'a Buffer) -> Self {
        let message = match payload {
            Buffer::Region(slice) => Message::Owned(slice.clone()),
            host => {
                let bytes = host.as_slice().unwrap_or_default();
                Message::Borrowed(
                    seat.runtime.post_am(seat.peer, bytes, seat.arrivals_name).device(&seat.device),
                )
            }
        };
        Self { seat, message }
    }
}

impl AmLine<'_> {
    #[inline(always)]
    fn give(&mut self, more: bool) -> Result<(), PerfError> {
        match &mut self.message {
            Message::Borrowed(message) => {
                message.again().set_more(more);
                self.seat.post(|| message.try_submit())
            }
            Message::Owned(slice) => {
                let Seat { runtime, device, peer, arrivals_name, .. } = self.seat;
                let mut message =
                    runtime.post_am(*peer, slice.clone(), *arrivals_name).device(device);
                self.seat.post(|| message.try_submit())
            }
        }
    }
}

impl Line for AmLine<'_> {
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
        self.seat.take(count)
    }
}
