//! A copy that takes time, holding both of its ends until it has ended.

use super::copy::{copy, copy_on};
use super::{Buffer, Copied, CopyError, MemKind, MemMut, MemRef, RegionSlice};
use crate::fork::Owner;
use crate::gpu::{GpuError, GpuEvent, Stream};

/// A copy from one buffer to the start of another. It owns both, so neither can be freed or reused
/// while an engine is at work; dropping it early waits for the engine.
#[derive(Debug)]
pub struct Transfer {
    dst: Buffer,
    src: Buffer,
    state: TransferState,
}

#[derive(Debug)]
enum TransferState {
    Done,
    /// The copy is with the process whose engine copies.
    Pending(GpuEvent, Owner),
    Failed(Box<CopyError>),
}

impl TransferState {
    #[inline]
    fn pending(event: GpuEvent) -> Self {
        Self::Pending(event, Owner::this_process())
    }
}

/// A transfer that did not begin; it returns both buffers.
#[derive(Debug)]
pub struct Refused {
    /// The target, untouched.
    pub dst: Buffer,
    /// The source.
    pub src: Buffer,
    /// The reason.
    pub cause: CopyError,
}

impl Transfer {
    /// Begins the copy of all of `src`.
    ///
    /// # Errors
    /// [`Refused`], which gives the buffers back, when the target is too short or may not be
    /// written, a kind is unknown, or the engine refused.
    #[inline]
    pub fn start(dst: Buffer, src: Buffer) -> Result<Self, Box<Refused>> {
        let len = src.len();
        // SAFETY: the event is waited for before the buffers go.
        Self::start_by((dst, 0), (src, 0), len, |dst, src| unsafe { copy(dst, src) })
    }

    /// Begins the copy of all of `src`, where both are parts of regions: like
    /// [`start`](Self::start), with fewer moves.
    ///
    /// # Errors
    /// The errors of [`start`](Self::start).
    #[inline]
    pub fn between(dst: RegionSlice, src: RegionSlice) -> Result<Self, Box<Refused>> {
        // SAFETY: the event is waited for before the buffers go.
        let copied = unsafe { copy(dst.view_mut(), src.view()) };
        let (dst, src) = (Buffer::Region(dst), Buffer::Region(src));
        match copied {
            Ok(Copied::Done) => Ok(Self { dst, src, state: TransferState::Done }),
            Ok(Copied::Pending(event)) => {
                Ok(Self { dst, src, state: TransferState::pending(event) })
            }
            Err(cause) => Err(Box::new(Refused { dst, src, cause })),
        }
    }

    /// Begins the copy of `len` bytes. The offsets next to the buffers are in bytes.
    ///
    /// # Errors
    /// The errors of [`start`](Self::start), and one for a source that ends before `len` bytes.
    pub fn start_part(
        dst: (Buffer, usize),
        src: (Buffer, usize),
        len: usize,
    ) -> Result<Self, Box<Refused>> {
        // SAFETY: as in `start`.
        Self::start_by(dst, src, len, |dst, src| unsafe { copy(dst, src) })
    }

    /// Begins a copy as `start`, on a stream: behind the work that the stream has, and before
    /// later work.
    ///
    /// # Errors
    /// The errors of `start`, and one for a side that a stream's engine does not reach.
    pub fn start_on(stream: &dyn Stream, dst: Buffer, src: Buffer) -> Result<Self, Box<Refused>> {
        let len = src.len();
        // SAFETY: as in `start`.
        Self::start_by((dst, 0), (src, 0), len, |dst, src| unsafe { copy_on(stream, dst, src) })
    }

    #[inline]
    fn start_by(
        (mut dst, to): (Buffer, usize),
        (src, from): (Buffer, usize),
        len: usize,
        copy: impl FnOnce(MemMut<'_>, MemRef<'_>) -> Result<Copied, CopyError>,
    ) -> Result<Self, Box<Refused>> {
        // Bytes held in place move together with this value: give them an address that stays.
        let src = match src {
            Buffer::Small(small) => Buffer::Vec(small.as_slice().to_vec()),
            other => other,
        };
        let there = src.len().saturating_sub(from);
        let started = match (&mut dst, len) {
            (Buffer::Small(_), _) => Err(CopyError::TooLong { len, room: 0 }),
            (_, len) if len > there => Err(CopyError::TooLong { len, room: there }),
            (dst, len) => match dst.view_mut() {
                // Both ranges outlive the engine's work: `Self` owns both buffers, whose bytes do
                // not move with it, and its `Drop` waits for the event.
                Some(all) => copy(all.part(to, usize::MAX), src.view().part(from, len)),
                None => Err(CopyError::TooLong { len, room: 0 }),
            },
        };
        match started {
            Ok(Copied::Done) => Ok(Self { dst, src, state: TransferState::Done }),
            Ok(Copied::Pending(event)) => {
                Ok(Self { dst, src, state: TransferState::pending(event) })
            }
            Err(cause) => Err(Box::new(Refused { dst, src, cause })),
        }
    }

    /// Holds a copy that was begun between parts of these buffers.
    pub(super) fn in_flight(dst: Buffer, src: Buffer, event: GpuEvent) -> Self {
        Self { dst, src, state: TransferState::pending(event) }
    }

    /// Returns the result, or `None` while the copy runs. Never blocks.
    #[inline]
    pub fn poll(&mut self) -> Option<Result<(), CopyError>> {
        self.has_ended().then(|| self.failure().map_or(Ok(()), |error| Err(error.clone())))
    }

    /// Returns `true` once the copy has ended. Never blocks.
    #[inline(always)]
    pub fn has_ended(&mut self) -> bool {
        let TransferState::Pending(event, _) = &self.state else { return true };
        match event.query() {
            Ok(false) => return false,
            Ok(true) => self.state = TransferState::Done,
            Err(cause) => self.fail(cause),
        }
        true
    }

    #[cold]
    fn fail(&mut self, cause: GpuError) {
        let (dst, src) = (kind_of(&self.dst), kind_of(&self.src));
        self.state = TransferState::Failed(Box::new(CopyError::Engine { dst, src, cause }));
    }

    /// Returns the error of a copy that has failed.
    #[inline]
    pub fn failure(&self) -> Option<&CopyError> {
        match &self.state {
            TransferState::Failed(error) => Some(error),
            TransferState::Done | TransferState::Pending(..) => None,
        }
    }

    /// Returns `true` if the copy surely ends after an earlier one, as far as is known without
    /// asking.
    pub fn is_behind(&self, earlier: &Self) -> bool {
        match (&self.state, &earlier.state) {
            (TransferState::Pending(event, _), TransferState::Pending(earlier, _)) => {
                event.is_behind(earlier)
            }
            _ => false,
        }
    }

    /// Returns target and source, in this order; waits while the copy runs.
    pub fn into_buffers(mut self) -> (Buffer, Buffer) {
        self.take_buffers()
    }

    /// Does the same, but leaves the transfer in place, ended and with two empty buffers.
    pub fn take_buffers(&mut self) -> (Buffer, Buffer) {
        self.settle();
        self.state = TransferState::Done;
        (std::mem::take(&mut self.dst), std::mem::take(&mut self.src))
    }

    /// Abandons a copy that may never end, because its stream waits for something. Its buffers are
    /// leaked, as an engine may still access them.
    pub fn abandon(self) {
        std::mem::forget(self);
    }

    fn settle(&mut self) {
        // A fork has no engine to wait for: the engine and the memory are its parent's.
        if let TransferState::Pending(event, owner) = &self.state
            && owner.is_here()
            && let Err(error) = event.wait()
        {
            // The driver reports that the work ended with an error; the engine writes nothing any
            // more.
            tracing::warn!(%error, "a copy failed after its operation was given up");
        }
    }
}

/// Returns a buffer's kind of memory; for a list, whose buffers are of one kind, the first one's.
fn kind_of(buffer: &Buffer) -> MemKind {
    match buffer {
        Buffer::List(list) => list.first().map_or(MemKind::Host, Buffer::kind),
        one => one.kind(),
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.settle();
    }
}
