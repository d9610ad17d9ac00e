//! Memory of both ranks that the other one reads and writes.

use super::error::PerfError;
use super::memory::Memory;
use super::plan::Point;
use super::seat::Seat;
use carrack::buffer::Region;
use carrack::{Mr, Piece, PostError, RemoteKey, Tag};

/// Room for what names a region.
const NAME: usize = 512;

/// Memory of this rank, and of the seat at the other one: made by both at the same time.
pub(super) struct Window {
    pub(super) mine: Region,
    pub(super) theirs: RemoteKey,
    _registered: Mr,
}

impl Window {
    /// Opens a window of as many bytes as `content` on each side, and eight at least, in such
    /// memory. The content lies there before the other side knows of it.
    pub(super) fn open(seat: &Seat, memory: &Memory, content: &[u8]) -> Result<Self, PerfError> {
        let Seat { runtime, device, peer, tag, .. } = seat;
        let mine = memory.window(runtime, content.len().max(8))?;
        mine.whole().write(content)?;
        let registered = runtime.register_memory(&mine)?;
        let tag = Tag(tag.0 | 1 << 63);
        let name = registered.remote_key().to_bytes();
        runtime.post_send(*peer, &name[..], tag).device(device).submit()?;
        let status = seat.wait(runtime.post_recv(*peer, vec![0; NAME], tag))?;
        let theirs = RemoteKey::from_bytes(status.bytes().unwrap_or_default())?;
        Ok(Self { mine, theirs, _registered: registered })
    }

    /// Returns the first bytes of this rank's memory.
    pub(super) fn content(&self, len: usize) -> Result<Vec<u8>, PerfError> {
        Ok(self.mine.slice(0, len).map_or(Ok(Vec::new()), |part| part.to_vec())?)
    }
}

/// Layout of a put of many pieces: each lies in the first half of a slot, so that no two of them
/// are one. Neighbours are swapped, so they are not rows at equal distances.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    size: usize,
    pieces: usize,
    /// Bytes on each side.
    pub(super) room: usize,
}

impl Slots {
    pub(super) fn of(Point { size, pieces, .. }: Point) -> Result<Self, PerfError> {
        let room = size.checked_mul(2).and_then(|slot| slot.checked_mul(pieces));
        Ok(Self { size, pieces, room: room.ok_or(PostError::NoMemory(usize::MAX))? })
    }

    /// Returns the remote and the local place of each piece.
    pub(super) fn places(self) -> impl Iterator<Item = (usize, usize)> {
        let slot = move |at: usize| if at ^ 1 < self.pieces { at ^ 1 } else { at };
        (0..self.pieces).map(move |at| (at * 2 * self.size, slot(at) * 2 * self.size))
    }

    pub(super) fn pieces<'a>(self, local: &'a Region, window: &'a Window) -> Vec<Piece<'a>> {
        let piece = |(to, from)| Piece {
            local,
            range: from..from + self.size,
            rmr: &window.theirs,
            offset: to as u64,
        };
        self.places().map(piece).collect()
    }
}
