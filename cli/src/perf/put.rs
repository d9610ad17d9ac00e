//! Puts into memory that the peer has mapped.

use super::error::PerfError;
use super::line::Line;
use super::seat::Seat;
use carrack::buffer::Region;
use carrack::{Buffer, CompQueue, Mr, Rmr, Status, Tag};

/// Room for what names a region.
const NAME: usize = 512;

/// Memory of this rank, and of the seat at the other one: made by both at the same time.
pub(super) struct Window {
    pub(super) mine: Region,
    pub(super) theirs: Rmr,
    _registered: Mr,
}

impl Window {
    /// Of `size` bytes on each side, and one at least.
    pub(super) fn open(seat: &Seat, size: usize) -> Result<Self, PerfError> {
        let Seat { runtime, device, peer, tag, .. } = seat;
        let mine = runtime.allocate(size.max(1))?;
        let registered = runtime.register_memory(&mine)?;
        let tag = Tag(tag.0 | 1 << 63);
        let over = CompQueue::new(2);
        let mut receive =
            runtime.post_recv(*peer, vec![0; NAME], tag).device(device).comp(&over).allow_done(false);
        seat.post(|| receive.call())?;
        let name = runtime.get_rmr(&registered).to_bytes();
        let mut send = runtime.post_send(*peer, &name[..], tag).device(device);
        seat.post(|| send.call())?;
        seat.until(|| !over.is_empty())?;
        let status = over.pop().ok_or(PerfError::GivenUp)?.ok()?;
        let theirs = Rmr::from_bytes(status.bytes().unwrap_or_default())?;
        Ok(Self { mine, theirs, _registered: registered })
    }

    /// What lies here, as if it had come in a message.
    pub(super) fn holds(&self, status: Status) -> Status {
        let whole = self.mine.slice(0, status.size.min(self.mine.len()));
        Status { buffer: whole.map_or(Buffer::Empty, Buffer::Region), ..status }
    }
}

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
