//! The receiver's side of a message that its sender's NIC writes chunk by chunk. While one chunk
//! is written, the next is registered with this rank's NIC. A written chunk is deregistered at
//! once, so that only a few are pinned.

use super::Bulk;
use super::granting::Ask;
use super::incoming::Arriving;
use super::writing::AT_ONCE;
use crate::device::DeviceInner;
use crate::names::Rank;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::protocol::wire::{Window, encode_landing, encode_window};
use crate::runtime::Inner;
use carrack_transports::contract::ExposedChunks;
use carrack_transports::mem::Buffer;

/// The buffer of a message, some of whose chunks the sender's NIC reaches.
pub(super) struct Showing {
    exposed: Box<dyn ExposedChunks>,
    /// The sender's name for the message.
    token: u64,
    /// Bytes of a chunk, at most.
    chunk: usize,
    /// Bytes that were shown, from the first on.
    shown: usize,
    /// Bytes that will be shown: all, unless a NIC has refused.
    until: usize,
    /// The beginnings and lengths of chunks that are shown and not written yet.
    open: Vec<(usize, usize)>,
}

/// The next action for a message, done without locks.
enum Next {
    /// Its sender has enough to do.
    Waits,
    /// Send a further window to the sender.
    Show { token: u64, window: Window },
    /// Grant the rest as parts: up to this many bytes in all.
    Grant(usize),
}

impl Showing {
    pub(super) fn new(
        exposed: Box<dyn ExposedChunks>,
        token: u64,
        chunk: usize,
        size: usize,
    ) -> Self {
        Self { exposed, token, chunk, shown: 0, until: size, open: Vec::new() }
    }

    /// Shows the next chunk, if one may be shown.
    ///
    /// The NIC refuses it. No further chunk is shown.
    pub(super) fn next(&mut self) -> Result<Option<Window>, String> {
        if self.shown >= self.until || self.open.len() >= AT_ONCE * self.exposed.nics() {
            return Ok(None);
        }
        let (at, len) = (self.shown, self.chunk.min(self.until - self.shown));
        match self.exposed.show(at, len) {
            Ok(place) => {
                self.open.push((at, len));
                self.shown += len;
                Ok(Some(Window { at, len, place }))
            }
            Err(why) => {
                self.until = self.shown;
                Err(why)
            }
        }
    }

    /// Notes that the chunk at `at` is written, and returns its bytes. `None`: there is no such
    /// chunk.
    fn written(&mut self, at: usize) -> Option<usize> {
        let found = self.open.iter().position(|(begin, _)| *begin == at)?;
        self.exposed.hide(at);
        Some(self.open.swap_remove(found).1)
    }

    /// Notes that bytes from `from` on will not be written. Returns the written bytes of that
    /// byte's chunk. `None`: `from` is in no shown chunk.
    fn unwritten(&mut self, from: usize) -> Option<usize> {
        let &(begin, _) =
            self.open.iter().find(|(begin, len)| (*begin..begin + len).contains(&from))?;
        for (at, _) in self.open.extract_if(.., |(at, _)| *at >= begin) {
            self.exposed.hide(at);
        }
        (self.shown, self.until) = (from, from);
        Some(from - begin)
    }

    pub(super) fn take_back(self) -> Buffer {
        self.exposed.take_back()
    }
}

impl Arriving {
    /// Returns the next action, after a chunk was shown or written.
    fn go_on(&mut self) -> Next {
        let Some(showing) = &mut self.showing else { return Next::Waits };
        match showing.next() {
            Ok(Some(window)) => return Next::Show { token: showing.token, window },
            Ok(None) => {}
            Err(why) => tracing::info!(from = %self.from, why, "a message goes on part by part"),
        }
        if showing.open.is_empty() && self.got < self.size {
            self.take_back();
            return Next::Grant(self.size);
        }
        Next::Waits
    }
}

impl DeviceInner {
    /// Lets the sender's NIC write to the first chunk of a long message's buffer.
    pub(super) fn expose_chunks(
        &self,
        from: Rank,
        arriving: &mut Arriving,
        token: u64,
        chunk: usize,
    ) -> Option<Ask> {
        let linked = self.known_route(from)?.linked()?;
        let is_put = arriving.target.is_memory();
        let buffer = arriving.target.buffer()?;
        if arriving.size <= chunk
            || is_put
            || !linked.caps.remote_memory
            || !buffer.kind().is_host()
        {
            return None;
        }
        let refused = match linked.link.expose_chunks(std::mem::take(buffer)) {
            Err((why, back)) => (why, back),
            Ok(exposed) => {
                let mut showing = Box::new(Showing::new(exposed, token, chunk, arriving.size));
                match showing.next() {
                    Ok(window) => {
                        arriving.showing = Some(showing);
                        return window.map(|window| Ask::Window(token, window));
                    }
                    Err(why) => (why, showing.take_back()),
                }
            }
        };
        let (why, back) = refused;
        tracing::debug!(%from, why, "a message comes part by part");
        *buffer = back;
        None
    }

    /// Shows as many further chunks of a message as may be shown.
    pub(super) fn show_chunks(&self, runtime: &Inner, (from, landing): (Rank, u64)) {
        loop {
            let next = match self.bulk.arriving.lock().get_mut(&landing) {
                Some(one) if one.from == from => one.go_on(),
                _ => return,
            };
            match next {
                Next::Show { token, window } => {
                    self.control(
                        runtime,
                        from,
                        Message::Clear { token },
                        encode_window(landing, window),
                    );
                }
                Next::Grant(size) => {
                    let limit = encode_landing(size as u64);
                    return self.control(runtime, from, Message::Grant { landing }, limit);
                }
                Next::Waits => return,
            }
        }
    }
}

impl Bulk {
    /// Notes that a chunk is written, or that no byte from `at` on will be. Returns the message
    /// when it is complete. `Err`: the receiver has not asked for it.
    fn take_chunk(
        &self,
        from: Rank,
        landing: u64,
        at: u64,
        is_written: bool,
    ) -> Result<Option<Arriving>, String> {
        let unasked = "it has written what it was not asked to, or will not write that";
        let mut all = self.arriving.lock();
        let one = all.get_mut(&landing).filter(|one| one.from == from).ok_or(unasked)?;
        let (showing, at) =
            (one.showing.as_mut().ok_or(unasked)?, usize::try_from(at).map_err(|_| unasked)?);
        let len = if is_written { showing.written(at) } else { showing.unwritten(at) };
        one.got += len.ok_or(unasked)?;
        if one.got < one.until {
            return Ok(None);
        }
        one.take_back();
        let whole = all.remove(&landing);
        self.arriving.set_count(all.len());
        Ok(whole)
    }

    /// Returns `true` if the message is written chunk by chunk.
    pub(super) fn shows_chunks(&self, landing: u64) -> bool {
        self.arriving.lock().get(&landing).is_some_and(|one| one.showing.is_some())
    }
}

impl Pass<'_> {
    /// Handles a written chunk, or the news that no byte from `at` on will be written.
    pub(super) fn chunk(
        &mut self,
        from: Rank,
        landing: u64,
        at: u64,
        is_written: bool,
    ) -> Result<(), String> {
        match self.device.bulk.take_chunk(from, landing, at, is_written)? {
            Some(whole) => self.arrived(whole.from, whole.size, whole.target, whole.lost),
            None => self.device.show_chunks(self.inner, (from, landing)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_transports::contract::RemotePlace;
    use parking_lot::Mutex;
    use std::sync::Arc;

    /// Keeps the shown chunks, and refuses the chunk that begins at `wall`.
    struct Shown {
        at: Arc<Mutex<Vec<usize>>>,
        wall: usize,
    }

    impl ExposedChunks for Shown {
        fn show(&mut self, at: usize, _: usize) -> Result<RemotePlace, String> {
            if at == self.wall {
                return Err("a wall".into());
            }
            self.at.lock().push(at);
            Ok(RemotePlace { addr: at as u64, key: 0 })
        }

        fn hide(&mut self, at: usize) {
            self.at.lock().retain(|other| *other != at);
        }

        fn take_back(self: Box<Self>) -> Buffer {
            Buffer::Empty
        }
    }

    /// A message of 95 bytes, in chunks of ten.
    fn showing(wall: usize) -> (Showing, Arc<Mutex<Vec<usize>>>) {
        let at = Arc::new(Mutex::new(Vec::new()));
        (Showing::new(Box::new(Shown { at: at.clone(), wall }), 1, 10, 95), at)
    }

    fn next(showing: &mut Showing) -> Option<(usize, usize)> {
        showing.next().unwrap().map(|window| (window.at, window.len))
    }

    #[test]
    fn a_chunk_that_is_written_makes_room_for_the_next_and_the_last_is_what_is_left() {
        let (mut showing, at) = showing(usize::MAX);
        assert_eq!(
            [next(&mut showing), next(&mut showing), next(&mut showing)],
            [Some((0, 10)), Some((10, 10)), None]
        );
        assert_eq!(showing.written(20), None, "it was not shown");
        for chunk in 0..8 {
            // The later one may be heard of first.
            assert_eq!(showing.written(10 * (chunk ^ 1)), Some(10));
            assert_eq!(showing.written(10 * (chunk ^ 1)), None, "it is written already");
            let end = (20 + 10 * chunk, 10.min(95 - 20 - 10 * chunk.min(7)));
            assert_eq!(next(&mut showing), Some(end));
        }
        assert_eq!((next(&mut showing), at.lock().len()), (None, 2));
    }

    #[test]
    fn behind_what_a_sender_refuses_nothing_is_shown_and_what_it_has_written_counts() {
        let (mut showing, at) = showing(usize::MAX);
        assert!(next(&mut showing).is_some() && next(&mut showing).is_some());
        assert_eq!(showing.unwritten(20), None, "that was not to be written");
        assert_eq!(showing.unwritten(13), Some(3));
        assert_eq!(*at.lock(), [0]);
        assert_eq!(
            (next(&mut showing), showing.written(10), showing.written(0)),
            (None, None, Some(10))
        );
        assert!(at.lock().is_empty() && showing.open.is_empty());
    }

    #[test]
    fn a_nic_that_refuses_a_chunk_is_asked_for_no_other() {
        let (mut showing, _) = showing(10);
        assert!(next(&mut showing).is_some());
        assert!(showing.next().is_err());
        assert_eq!(
            (next(&mut showing), showing.written(0), next(&mut showing)),
            (None, Some(10), None)
        );
    }
}
