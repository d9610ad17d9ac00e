//! Buffers of this rank that peers' puts are scattered into, until they are taken back.

use crate::contract::{Exposed, ExposedChunks, PeerId, RemotePlace};
use crate::mem::{Buffer, MemMut};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The windows of a device.
#[derive(Debug, Default)]
pub(super) struct Windows {
    last: AtomicU64,
    open: Mutex<HashMap<u64, Arc<Window>>>,
}

/// A buffer that one peer writes. Nothing is written after it was taken back, since a write holds
/// its lock.
#[derive(Debug)]
pub(super) struct Window {
    peer: PeerId,
    len: u64,
    buffer: Mutex<Option<Buffer>>,
}

impl Windows {
    /// Opens a window for a peer.
    ///
    /// # Errors
    /// The reason, with the buffer: the CPU cannot write it in one piece.
    pub(super) fn open(
        self: &Arc<Self>,
        peer: PeerId,
        buffer: Buffer,
    ) -> Result<OpenWindow, (String, Buffer)> {
        if !buffer.kind().is_host() {
            return Err((format!("a socket cannot be read into {} memory", buffer.kind()), buffer));
        }
        if !buffer.has_view_mut() {
            return Err(("the buffer has several parts, or may not be written".into(), buffer));
        }
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let len = buffer.len() as u64;
        let window = Arc::new(Window { peer, len, buffer: Mutex::new(Some(buffer)) });
        self.open.lock().insert(number, window.clone());
        Ok(OpenWindow { windows: self.clone(), number, window })
    }

    /// Returns the window of a put of `len` bytes; `None` if it was taken back.
    ///
    /// # Errors
    /// The put is another peer's, or leaves the window.
    pub(super) fn find(
        &self,
        number: u64,
        peer: PeerId,
        (at, len): (u64, u64),
    ) -> Result<Option<Arc<Window>>, String> {
        if number == 0 || number > self.last.load(Ordering::Relaxed) {
            return Err(format!("a put to window {number}, which was never open"));
        }
        let Some(window) = self.open.lock().get(&number).cloned() else { return Ok(None) };
        if window.peer != peer {
            return Err(format!("a put to window {number}, which is another rank's"));
        }
        if at.checked_add(len).is_none_or(|end| end > window.len) {
            return Err(format!("a put of {len} bytes at {at} of a window of {}", window.len));
        }
        Ok(Some(window))
    }
}

impl Window {
    /// Calls `write` with `len` bytes from `at` on, unless the window was taken back.
    pub(super) fn write<T>(
        &self,
        at: u64,
        len: usize,
        write: impl FnOnce(MemMut<'_>) -> T,
    ) -> Option<T> {
        let mut buffer = self.buffer.lock();
        let at = usize::try_from(at).ok()?;
        Some(write(buffer.as_mut()?.view_mut()?.part(at, len)))
    }
}

/// A window, on the side of its owner. Dropping it takes the buffer back.
#[derive(Debug)]
pub(super) struct OpenWindow {
    windows: Arc<Windows>,
    number: u64,
    window: Arc<Window>,
}

impl OpenWindow {
    fn close(&self) -> Buffer {
        self.windows.open.lock().remove(&self.number);
        self.window.buffer.lock().take().unwrap_or_default()
    }
}

impl Drop for OpenWindow {
    fn drop(&mut self) {
        self.close();
    }
}

impl Exposed for OpenWindow {
    fn place(&self) -> RemotePlace {
        RemotePlace { addr: 0, key: self.number }
    }

    fn take_back(self: Box<Self>) -> Buffer {
        self.close()
    }
}

impl ExposedChunks for OpenWindow {
    fn show(&mut self, at: usize, _: usize) -> Result<RemotePlace, String> {
        Ok(RemotePlace { addr: at as u64, key: self.number })
    }

    fn hide(&mut self, _: usize) {}

    fn take_back(self: Box<Self>) -> Buffer {
        self.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::MemRef;
    use crate::mem::copy::copy_now;

    const PEER: PeerId = PeerId(3);

    #[test]
    fn a_window_is_written_until_it_is_taken_back() {
        let windows = Arc::new(Windows::default());
        let open = Box::new(windows.open(PEER, vec![0; 8].into()).unwrap());
        let window = windows.find(1, PEER, (2, 6)).unwrap().unwrap();
        let write = |at, bytes: &[u8]| {
            window.write(at, bytes.len(), |to| copy_now(to, MemRef::host(bytes)).unwrap())
        };
        assert_eq!(write(2, b"two"), Some(()));
        let buffer = Exposed::take_back(open);
        assert_eq!(buffer.as_slice(), Some(&b"\0\0two\0\0\0"[..]));
        assert_eq!(write(0, b"no"), None);
        assert!(windows.find(1, PEER, (0, 1)).unwrap().is_none());
    }

    #[test]
    fn a_put_that_cannot_be_is_refused() {
        let windows = Arc::new(Windows::default());
        let _open = windows.open(PEER, vec![0; 8].into()).unwrap();
        for (number, peer, range) in [
            (0, PEER, (0, 1)),
            (2, PEER, (0, 1)),
            (1, PeerId(4), (0, 1)),
            (1, PEER, (8, 1)),
            (1, PEER, (0, 9)),
            (1, PEER, (u64::MAX, 2)),
        ] {
            assert!(windows.find(number, peer, range).is_err(), "{number} {peer} {range:?}");
        }
        assert!(windows.open(PEER, bytes::Bytes::from_static(b"read only").into()).is_err());
    }
}
