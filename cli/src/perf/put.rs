//! Puts into memory that the peer has mapped.

use super::error::PerfError;
use super::line::Line;
use super::seat::Seat;
use super::window::Window;
use carrack::Buffer;

/// A line of puts. The last of each window carries a signal, so that both sides know how far they are.
pub(super) struct PutLine<'a> {
    seat: &'a Seat,
    window: &'a Window,
    payload: &'a [u8],
    /// Puts of which one carries a signal. The first put always does.
    every: u64,
    sent: u64,
}

impl<'a> PutLine<'a> {
    /// A line that puts `payload`.
    pub(super) fn new(seat: &'a Seat, window: &'a Window, payload: &'a Buffer, every: u64) -> Self {
        Self { seat, window, payload: payload.as_slice().unwrap_or_default(), every, sent: 0 }
    }
}

impl Line for PutLine<'_> {
    #[inline]
    fn send(&mut self) -> Result<(), PerfError> {
        let Seat { runtime, device, peer, arrivals_name, .. } = self.seat;
        let mut put = runtime.post_put(*peer, self.payload, &self.window.theirs, 0).device(device);
        if self.sent.is_multiple_of(self.every) {
            put = put.remote_comp(*arrivals_name);
        }
        self.sent += 1;
        self.seat.post(|| put.call())
    }

    #[inline]
    fn receive(&mut self, count: u64) -> Result<(), PerfError> {
        // The first message stands alone; then a window is one signal.
        self.seat.take(count.div_ceil(self.every))
    }
}
