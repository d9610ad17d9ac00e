//! Memory of both ranks that the other one reads and writes.

use super::error::PerfError;
use super::memory::Memory;
use super::seat::Seat;
use carrack::buffer::Region;
use carrack::{Buffer, CompQueue, Mr, RemoteKey, Status, Tag};

/// Room for what names a region.
const NAME: usize = 512;

/// Memory of this rank, and of the seat at the other one: made by both at the same time.
pub(super) struct Window {
    pub(super) mine: Region,
    pub(super) theirs: RemoteKey,
    _registered: Mr,
}

impl Window {
    /// Of as many bytes as `content` on each side, and eight at least, in such memory. The content
    /// lies there before the other side knows of it.
    pub(super) fn open(seat: &Seat, memory: &Memory, content: &[u8]) -> Result<Self, PerfError> {
        let Seat { runtime, device, peer, tag, .. } = seat;
        let mine = memory.window(runtime, content.len().max(8))?;
        mine.whole().write(content)?;
        let registered = runtime.register_memory(&mine)?;
        let tag = Tag(tag.0 | 1 << 63);
        let over = CompQueue::new(2);
        let mut receive = runtime.post_recv(*peer, vec![0; NAME], tag).device(device).comp(&over);
        receive.submit()?;
        let name = registered.remote_key().to_bytes();
        let mut send = runtime.post_send(*peer, &name[..], tag).device(device);
        seat.post(|| send.try_submit())?;
        let status = seat.next_of(&over)?;
        let theirs = RemoteKey::from_bytes(status.bytes().unwrap_or_default())?;
        Ok(Self { mine, theirs, _registered: registered })
    }

    /// Returns the window's content, as if it had come in a message.
    pub(super) fn holds(&self, status: Status) -> Status {
        let whole = self.mine.slice(0, status.size.min(self.mine.len()));
        Status { buffer: whole.map_or(Buffer::Empty, Buffer::Region), ..status }
    }
}
