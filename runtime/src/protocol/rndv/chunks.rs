//! Messages that the sender's NIC writes chunk by chunk: while one chunk is on its way, the next is
//! registered with the NIC.

use super::{AT_ONCE, Limits, Violation};
use crate::error::OpError;
use crate::protocol::wire::Window;
use std::collections::VecDeque;

/// Windows that a receiver may show at a time. An honest one of any version shows fewer.
const WINDOWS: usize = 64;

/// The sender's side.
#[derive(Debug)]
pub(super) struct Sent {
    /// The receiver's name for the message.
    pub(super) rx: u64,
    /// Bytes from the first on that the NIC was told to write.
    pub(super) sent: usize,
    /// The windows that the receiver has shown, in the order of the message.
    windows: VecDeque<Window>,
    /// Windows whose end the receiver is told when their chunks have completed: no message can
    /// follow these on the same queue pair.
    counted: Vec<CountedWindow>,
    /// Chunks that the NIC has.
    in_flight: usize,
    /// Bytes that may go in fragments, after the receiver's NIC has refused further windows.
    pub(super) limit: usize,
    /// `true` if this rank's NIC does not reach the rest.
    is_refused: bool,
    /// `true` if the link had no room for a chunk.
    pub(super) is_blocked: bool,
    /// The error that ends it as soon as no chunk is in flight.
    failed: Option<OpError>,
}

/// Window whose chunks are counted: the receiver is told once all have completed.
#[derive(Debug)]
struct CountedWindow {
    at: usize,
    chunks: usize,
    /// `true` if all of its chunks were submitted.
    is_given: bool,
}

/// The next step of a sender.
#[derive(Debug)]
pub(super) enum ChunkStep {
    /// Nothing before a further event.
    Rest,
    /// Write the chunk `at` of `len` bytes into this window.
    Write { at: usize, len: usize, window: Window },
    /// Send the rest in fragments; tell the receiver first that no byte from there on is written,
    /// if that is this rank's doing.
    Fragments { unwritten: bool },
    /// All bytes are written, or the transfer has failed.
    End(Result<(), OpError>),
}

impl Sent {
    pub(super) fn new(rx: u64) -> Self {
        Self {
            rx,
            sent: 0,
            windows: VecDeque::new(),
            counted: Vec::new(),
            in_flight: 0,
            limit: 0,
            is_refused: false,
            is_blocked: false,
            failed: None,
        }
    }

    /// Adds a window. Windows may arrive in any order, since two threads may receive them.
    pub(super) fn show(&mut self, size: usize, window: Window) -> Result<(), Violation> {
        if self.is_refused {
            // It was shown before the receiver heard of that.
            return Ok(());
        }
        let end = window.at.checked_add(window.len).filter(|&end| window.len > 0 && end <= size);
        let end =
            end.ok_or(Violation::Broken("it wants bytes written that its message does not have"))?;
        let place = self.windows.partition_point(|other| other.at < window.at);
        let before = place.checked_sub(1).and_then(|at| self.windows.get(at));
        let is_free = window.at >= self.sent
            && before.is_none_or(|other| other.at + other.len <= window.at)
            && self.windows.get(place).is_none_or(|other| end <= other.at);
        if !is_free || self.windows.len() >= WINDOWS {
            return Err(Violation::Broken(
                "it wants bytes written more than once, or into too many places",
            ));
        }
        self.windows.insert(place, window);
        Ok(())
    }

    /// Returns the next step.
    pub(super) fn next(&mut self, size: usize, limits: &Limits) -> ChunkStep {
        if self.failed.is_none()
            && let Some(&window) = self.windows.front()
            && window.at <= self.sent
            && self.in_flight < AT_ONCE * limits.nics
        {
            let within = self.sent - window.at;
            let len = limits.chunk.min(window.len - within);
            return ChunkStep::Write { at: self.sent, len, window };
        }
        if self.in_flight > 0 {
            return ChunkStep::Rest;
        }
        if let Some(error) = self.failed.take() {
            return ChunkStep::End(Err(error));
        }
        if self.sent == size {
            return ChunkStep::End(Ok(()));
        }
        if self.is_refused {
            // After all chunks: only now are the written bytes in place, on every NIC.
            return ChunkStep::Fragments { unwritten: true };
        }
        if self.limit > self.sent && self.windows.is_empty() {
            return ChunkStep::Fragments { unwritten: false };
        }
        ChunkStep::Rest
    }

    /// Notes that the NIC has taken the next chunk. Returns the window that the receiver is told
    /// of now: a message behind the chunk arrives after it, if they travel `in_order`.
    pub(super) fn given(&mut self, len: usize, in_order: bool) -> Option<usize> {
        let &Window { at, len: room, .. } = self.windows.front()?;
        self.in_flight += 1;
        self.sent += len;
        let is_given = self.sent == at + room;
        if is_given {
            self.windows.pop_front();
        }
        if in_order {
            return is_given.then_some(at);
        }
        match self.counted.iter_mut().find(|window| window.at == at) {
            Some(window) => (window.chunks, window.is_given) = (window.chunks + 1, is_given),
            None => self.counted.push(CountedWindow { at, chunks: 1, is_given }),
        }
        None
    }

    /// Notes that this rank's NIC does not reach the bytes from here on.
    pub(super) fn refuse(&mut self, size: usize) {
        self.is_refused = true;
        if self.windows.front().is_some_and(|window| window.len == size) {
            // The receiver of a whole message expects no chunks: it gets the written bytes again,
            // in fragments.
            self.sent = 0;
        }
        self.windows.clear();
    }

    pub(super) fn fail(&mut self, error: OpError) {
        self.failed.get_or_insert(error);
    }

    /// Notes the end of a chunk of the window that begins at `at`. Returns that window if the
    /// receiver is told of it now.
    pub(super) fn ended(&mut self, at: usize, failed: Option<OpError>) -> Option<usize> {
        self.in_flight -= 1;
        if let Some(error) = failed {
            self.fail(error);
            return None;
        }
        let found = self.counted.iter().position(|window| window.at == at)?;
        let window = &mut self.counted[found];
        window.chunks -= 1;
        (window.is_given && window.chunks == 0).then(|| self.counted.swap_remove(found).at)
    }
}

/// The receiver's side. A written chunk is deregistered at once, so that only a few are pinned.
#[derive(Debug)]
pub(super) struct RxChunks {
    /// Bytes that were shown, from the first on.
    shown: usize,
    /// Bytes that will be shown: all, unless a NIC has refused.
    until: usize,
    /// The beginnings and lengths of chunks that are shown and not written yet.
    open: Vec<(usize, usize)>,
}

impl RxChunks {
    pub(super) fn new(size: usize) -> Self {
        Self { shown: 0, until: size, open: Vec::new() }
    }

    /// Returns the next chunk that may be shown: its beginning and its length.
    pub(super) fn next(&self, limits: &Limits) -> Option<(usize, usize)> {
        let may = self.shown < self.until && self.open.len() < AT_ONCE * limits.nics;
        may.then(|| (self.shown, limits.chunk.min(self.until - self.shown)))
    }

    /// Notes that a chunk was shown.
    pub(super) fn shown(&mut self, at: usize, len: usize) {
        self.open.push((at, len));
        self.shown = at + len;
    }

    /// Notes that the NIC takes no further chunk.
    pub(super) fn refuse(&mut self) {
        self.until = self.shown;
    }

    /// Returns `true` if no chunk is shown, and none will be.
    pub(super) fn has_ended(&self) -> bool {
        self.open.is_empty() && self.shown >= self.until
    }

    /// Notes that the chunk at `at` is written, and returns its bytes. `None`: there is no such
    /// chunk.
    pub(super) fn written(&mut self, at: usize) -> Option<usize> {
        let found = self.open.iter().position(|(begin, _)| *begin == at)?;
        Some(self.open.swap_remove(found).1)
    }

    /// Notes that bytes from `from` on will not be written. Returns the written bytes of that
    /// byte's chunk, and the chunks that are shown in vain. `None`: `from` is in no shown chunk.
    pub(super) fn unwritten(&mut self, from: usize) -> Option<(usize, Vec<usize>)> {
        let &(begin, _) =
            self.open.iter().find(|(begin, len)| (*begin..begin + len).contains(&from))?;
        let hidden = self.open.extract_if(.., |(at, _)| *at >= begin).map(|(at, _)| at).collect();
        (self.shown, self.until) = (from, from);
        Some((from - begin, hidden))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_transports::contract::RemotePlace;

    const LIMITS: Limits = Limits { chunk: 10, nics: 1 };

    fn window(at: usize, len: usize) -> Window {
        Window { at, len, place: RemotePlace { addr: 0, key: 0 } }
    }

    #[test]
    fn windows_come_in_any_order_and_once_and_within_the_message() {
        let mut sent = Sent::new(5);
        assert_eq!(
            (sent.show(100, window(20, 10)), sent.show(100, window(0, 10))),
            (Ok(()), Ok(()))
        );
        for (at, len) in [(20, 10), (15, 10), (25, 1), (0, 1), (95, 10), (usize::MAX, 2), (40, 0)] {
            assert!(sent.show(100, window(at, len)).is_err(), "{at} {len}");
        }
        assert_eq!(
            (sent.show(100, window(10, 10)), sent.show(100, window(90, 10))),
            (Ok(()), Ok(()))
        );
        let order: Vec<_> = sent.windows.iter().map(|window| window.at).collect();
        assert_eq!(order, [0, 10, 20, 90]);
    }

    #[test]
    fn a_receiver_cannot_show_more_windows_than_there_is_room_for() {
        let mut sent = Sent::new(5);
        assert!((0..WINDOWS).all(|at| sent.show(100, window(at, 1)).is_ok()));
        assert!(sent.show(100, window(WINDOWS, 1)).is_err());
    }

    #[test]
    fn a_chunk_that_is_written_makes_room_for_the_next_and_the_last_is_what_is_left() {
        let mut shown = RxChunks::new(95);
        let next = |shown: &mut RxChunks| {
            let next = shown.next(&LIMITS);
            next.inspect(|&(at, len)| shown.shown(at, len))
        };
        assert_eq!(
            [next(&mut shown), next(&mut shown), next(&mut shown)],
            [Some((0, 10)), Some((10, 10)), None]
        );
        assert_eq!(shown.written(20), None, "it was not shown");
        for chunk in 0..8 {
            // The later one may be heard of first.
            assert_eq!(shown.written(10 * (chunk ^ 1)), Some(10));
            assert_eq!(shown.written(10 * (chunk ^ 1)), None, "it is written already");
            let end = (20 + 10 * chunk, 10.min(95 - 20 - 10 * chunk.min(7)));
            assert_eq!(next(&mut shown), Some(end));
        }
        assert_eq!((next(&mut shown), shown.open.len()), (None, 2));
    }

    #[test]
    fn behind_bytes_that_a_sender_refuses_nothing_is_shown_and_its_written_bytes_count() {
        let mut shown = RxChunks::new(95);
        shown.shown(0, 10);
        shown.shown(10, 10);
        assert_eq!(shown.unwritten(20), None, "that was not to be written");
        assert_eq!(shown.unwritten(13), Some((3, vec![10])));
        assert_eq!(
            (shown.next(&LIMITS), shown.written(10), shown.has_ended()),
            (None, None, false)
        );
        assert_eq!((shown.written(0), shown.has_ended()), (Some(10), true));
    }

    #[test]
    fn a_nic_that_refuses_a_chunk_is_asked_for_no_other() {
        let mut shown = RxChunks::new(95);
        shown.shown(0, 10);
        shown.refuse();
        assert_eq!(
            (shown.next(&LIMITS), shown.written(0), shown.has_ended()),
            (None, Some(10), true)
        );
    }
}
