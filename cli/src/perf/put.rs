//! Puts into the peer's memory.

use super::error::PerfError;
use super::line::Line;
use super::seat::Seat;
use super::window::Window;
use carrack::Buffer;
use carrack::buffer::{RegionSlice, SendBuffer};

/// A line of puts. The last of each window carries a signal, so that both sides know how far they
/// are.
pub(super) struct PutLine<'a> {
    seat: &'a Seat,
    window: &'a Window,
    payload: Payload<'a>,
    /// Puts of which one carries a signal. The first put always does.
    every: u64,
    sent: u64,
}

/// The payload of a line.
enum Payload<'a> {
    /// Bytes that the call copies.
    Borrowed(&'a [u8]),
    /// Memory that the operation owns while it runs.
    Lent(&'a RegionSlice),
}

impl<'a> PutLine<'a> {
    /// A line that puts `payload`.
    pub(super) fn new(seat: &'a Seat, window: &'a Window, payload: &'a Buffer, every: u64) -> Self {
        let payload = match payload {
            Buffer::Region(slice) => Payload::Lent(slice),
            host => Payload::Borrowed(host.as_slice().unwrap_or_default()),
        };
        Self { seat, window, payload, every, sent: 0 }
    }

    #[inline]
    fn put(&mut self, payload: impl Into<SendBuffer<'a>>) -> Result<(), PerfError> {
        let Seat { runtime, device, peer, arrivals_name, over, .. } = self.seat;
        let mut put =
            runtime.post_put(*peer, payload, &self.window.theirs, 0).device(device).comp(over);
        if self.sent.is_multiple_of(self.every) {
            put = put.remote_comp(*arrivals_name);
        }
        self.sent += 1;
        self.seat.start(|| put.try_submit())
    }
}

impl Line for PutLine<'_> {
    #[inline]
    fn send(&mut self) -> Result<(), PerfError> {
        match self.payload {
            Payload::Borrowed(bytes) => self.put(bytes),
            Payload::Lent(slice) => self.put(slice.clone()),
        }
    }

    #[inline]
    fn receive(&mut self, count: u64) -> Result<(), PerfError> {
        // The first message stands alone; then a window is one signal.
        self.seat.take(count.div_ceil(self.every))
    }

    /// A signal says that the bytes of its own put are there, and nothing of those before it: their
    /// sender knows.
    #[inline]
    fn settle(&mut self, most: u64) -> Result<(), PerfError> {
        self.seat.settle(most)
    }
}

/// Puts whose receiver looks at its memory.
pub(super) struct SeenLine<'a> {
    seat: &'a Seat,
    window: &'a Window,
    bytes: Vec<u8>,
    /// Place of the last byte.
    last: Option<RegionSlice>,
    /// Last byte of the latest put that was sent, and that arrived.
    sent: u8,
    seen: u8,
}

impl<'a> SeenLine<'a> {
    /// Creates a line for puts of `size` bytes, at least one. The windows hold zeros.
    pub(super) fn new(seat: &'a Seat, window: &'a Window, size: usize) -> Self {
        let size = size.max(1);
        let last = window.mine.slice(size - 1, 1);
        Self { seat, window, bytes: vec![0; size], last, sent: 0, seen: 0 }
    }
}

impl Line for SeenLine<'_> {
    #[inline]
    fn send(&mut self) -> Result<(), PerfError> {
        let Seat { runtime, device, peer, over, .. } = self.seat;
        self.sent = self.sent.wrapping_add(1);
        if let Some(last) = self.bytes.last_mut() {
            *last = self.sent;
        }
        let put = runtime.post_put(*peer, &self.bytes[..], &self.window.theirs, 0);
        let mut put = put.device(device).comp(over);
        self.seat.start(|| put.try_submit())
    }

    /// The last byte is there last: a NIC writes what one packet holds in the order of addresses,
    /// as those who poll memory take for granted, and a CPU that copies does, too.
    #[inline]
    fn receive(&mut self, count: u64) -> Result<(), PerfError> {
        for _ in 0..count {
            self.seen = self.seen.wrapping_add(1);
            let (last, seen) = (&self.last, self.seen);
            self.seat.look_until(|| {
                let mut byte = [0];
                last.as_ref().is_some_and(|last| last.read(&mut byte).is_ok()) && byte == [seen]
            })?;
        }
        Ok(())
    }

    #[inline]
    fn settle(&mut self, most: u64) -> Result<(), PerfError> {
        self.seat.settle(most)
    }
}
