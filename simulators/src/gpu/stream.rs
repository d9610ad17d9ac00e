//! Streams of the user's own, and the closures that stand for kernels.

use super::engine::{Copy, Queue, StreamJob, Word, load, store};
use super::error::{ILLEGAL_ADDRESS, INVALID_VALUE, error};
use super::event::Promise;
use super::faults::count;
use super::memory::Alias;
use super::shared::Shared;
use carrack_transports::gpu::{Gpu, GpuError, GpuEvent, GpuInfo, Grid, Pieces, Stream};
use carrack_transports::mem::{MemKind, Region, RegionSlice};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A stream of the simulated driver: a thread that does its work in order. When the last handle is
/// dropped, the remaining work is still done.
pub struct FakeStream {
    shared: Arc<Shared>,
    ordinal: usize,
    /// Number among the streams of the device.
    number: usize,
    queue: Queue,
}

impl FakeStream {
    pub(super) fn new(shared: Arc<Shared>, ordinal: usize) -> Result<Self, GpuError> {
        let device = shared.device("stream", ordinal)?;
        let number = device.turn.fetch_add(1, Ordering::Relaxed);
        let standstill = Arc::clone(&device.standstill);
        let queue = Queue::start(
            format!("fake-gpu{ordinal}-user"),
            Arc::clone(&shared.faults),
            standstill,
        )?;
        Ok(Self { shared, ordinal, number, queue })
    }

    /// Runs a closure on the stream, as a kernel: in order, asynchronously, and with access to
    /// device memory through its [`Kernel`].
    ///
    /// # Errors
    /// The stream's thread has ended. Every later event of the stream reports an error of the
    /// kernel itself, or its panic (719). The stream does no more work: kernel errors are sticky.
    pub fn launch(
        &self,
        kernel: impl FnOnce(&mut Kernel) -> Result<(), GpuError> + Send + 'static,
    ) -> Result<(), GpuError> {
        let mut access = Kernel {
            shared: Arc::clone(&self.shared),
            ordinal: self.ordinal,
            held: Vec::new(),
            fault: None,
        };
        let body = Box::new(move || {
            let outcome = kernel(&mut access);
            // An illegal access counts, also if the kernel ignored it.
            access.fault.take().map_or(outcome, Err)
        });
        self.queue
            .give(StreamJob::Launch { body, delay: self.shared.faults.delay_of_launches() })?;
        count(&self.shared.faults.counts.launches);
        Ok(())
    }
}

// SAFETY: as for `FakeGpu`. A wait's promise is kept once the engine has read the word for the
// last time.
unsafe impl Stream for FakeStream {
    fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError> {
        Ok(self.shared.gpu("stream", self.ordinal)?)
    }

    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError> {
        let (copy, event) = self.shared.gpu("copy", self.ordinal)?.checked(dst, src, len)?;
        self.queue.give(copy.map_or_else(StreamJob::Record, StreamJob::Copy))?;
        count(&self.shared.faults.counts.copies);
        Ok(event)
    }

    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<GpuEvent, GpuError> {
        self.give_together(self.shared.gpu("copy", self.ordinal)?.checked_pieces(pieces)?)
    }

    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        self.give_together(self.shared.gpu("copy", self.ordinal)?.checked_grid(dst, src, grid)?)
    }

    fn record(&self) -> Result<GpuEvent, GpuError> {
        let (promise, event) = Promise::new();
        self.queue.give(StreamJob::Record(promise))?;
        Ok(event)
    }

    /// Makes the stream wait for an event. An event that fails also fails the stream: later work
    /// would use data that have not arrived.
    fn wait(&self, event: &GpuEvent) -> Result<(), GpuError> {
        self.queue.give(StreamJob::Wait(event.clone()))
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        self.record()?.wait()
    }

    unsafe fn write_value64(&self, word: *mut u64, value: u64) -> Result<(), GpuError> {
        let word = self.word("write_value64", word)?;
        self.launch(move |_| {
            word.store(value);
            Ok(())
        })
    }

    unsafe fn wait_value64(&self, word: *const u64, value: u64) -> Result<GpuEvent, GpuError> {
        let word = self.word("wait_value64", word.cast_mut())?;
        let begin = || {
            self.queue.give(StreamJob::Hold(word, value))?;
            self.record()
        };
        if self.shared.faults.takes_all_waits() {
            return begin();
        }
        self.shared.device("wait_value64", self.ordinal)?.waits.arm(self.number, begin)
    }
}

impl FakeStream {
    fn give_together(
        &self,
        checked: (Result<Copy, Promise>, GpuEvent),
    ) -> Result<GpuEvent, GpuError> {
        let (copies, event) = checked;
        self.queue.give(copies.map_or_else(StreamJob::Record, StreamJob::Copy))?;
        count(&self.shared.faults.counts.batches);
        Ok(event)
    }

    /// Returns a word of host memory for the stream to read or write. Device memory is refused
    /// here.
    fn word(&self, call: &'static str, word: *mut u64) -> Result<Word, GpuError> {
        let bad =
            |what: &str| Err(error(call, INVALID_VALUE, format!("the word at {word:p} {what}")));
        match NonNull::new(word) {
            Some(word) if !word.is_aligned() => bad("is not aligned to 8 bytes"),
            Some(word) if self.shared.window_of(word.addr().get()).is_some() => {
                bad("is no host memory")
            }
            Some(word) => Ok(Word(word)),
            None => bad("is null"),
        }
    }
}

impl fmt::Debug for FakeStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FakeStream(device {}, simulated)", self.ordinal)
    }
}

/// A running kernel's view: the memory of its own device, of peers within its reach, and of the
/// host.
pub struct Kernel {
    shared: Arc<Shared>,
    ordinal: usize,
    /// Memory that was given out as raw pointers, held until the kernel ends.
    held: Vec<Arc<Alias>>,
    fault: Option<GpuError>,
}

impl Kernel {
    /// Returns the device that the kernel runs on.
    ///
    /// # Errors
    /// Never, for a kernel that runs.
    pub fn device(&self) -> Result<&GpuInfo, GpuError> {
        self.shared.device("kernel", self.ordinal).map(|device| &device.info)
    }

    /// Returns a pointer to the `region.len()` bytes of `region`, valid until the kernel returns.
    /// Peers, engines and other processes may write them at any time, so no references should be
    /// made.
    ///
    /// # Errors
    /// 700, which also fails the kernel: the memory is not this driver's, or out of the device's
    /// reach.
    pub fn alias(&mut self, region: &Region) -> Result<*mut u8, GpuError> {
        let resolved = self.resolve(region);
        self.or_fault(resolved)
    }

    /// Fails the kernel if the outcome is an error: it is an illegal access.
    fn or_fault<T>(&mut self, outcome: Result<T, GpuError>) -> Result<T, GpuError> {
        outcome.map_err(|why| {
            let fault = error("kernel", ILLEGAL_ADDRESS, why.to_string());
            self.fault.get_or_insert_with(|| fault.clone());
            fault
        })
    }

    fn resolve(&mut self, region: &Region) -> Result<*mut u8, GpuError> {
        if region.kind().is_host() {
            // As pinned memory, which a kernel sees at the same address.
            return Ok(region.addr() as *mut u8);
        }
        let found = self.shared.find_region("kernel", region)?;
        if region.len() > found.len - (region.addr() - found.base) {
            let hint =
                format!("{region:?} goes on in another allocation: give its parts one by one");
            return Err(error("kernel", INVALID_VALUE, hint));
        }
        let owner = self.shared.device("kernel", found.ordinal)?.info.uuid;
        self.shared.reaches("kernel", self.ordinal, owner)?;
        let start = found.alias.at(region.addr() - found.base).as_ptr();
        self.held.push(found.alias);
        Ok(start)
    }

    /// Reads device memory by its address alone, as an argument of a kernel: for example a
    /// packet's.
    ///
    /// # Errors
    /// As [`alias`](Self::alias).
    pub fn read_at(&mut self, addr: usize, len: usize) -> Result<Vec<u8>, GpuError> {
        let start = self.resolve_at(addr, len);
        let start = self.or_fault(start)?;
        // SAFETY: `len` bytes from there lie in the allocation, whose alias is held.
        Ok(unsafe { load(start, len) })
    }

    fn resolve_at(&mut self, addr: usize, len: usize) -> Result<*mut u8, GpuError> {
        let outside =
            || error("kernel", INVALID_VALUE, format!("{addr:#x}+{len} is no allocation's"));
        let found = self.shared.find(addr).filter(|found| len <= found.len - (addr - found.base));
        let found = found.ok_or_else(outside)?;
        let owner = self.shared.device("kernel", found.ordinal)?.info.uuid;
        self.shared.reaches("kernel", self.ordinal, owner)?;
        let start = found.alias.at(addr - found.base).as_ptr();
        self.held.push(found.alias);
        Ok(start)
    }

    /// Reads a slice.
    ///
    /// # Errors
    /// As [`alias`](Self::alias).
    pub fn read(&mut self, slice: &RegionSlice) -> Result<Vec<u8>, GpuError> {
        let start = self.alias(slice.region())?;
        // SAFETY: the slice lies in its region, all of which `alias` made accessible.
        Ok(unsafe { load(start.add(slice.offset()), slice.len()) })
    }

    /// Writes `bytes` to the start of a slice. Bytes that do not fit are an illegal access.
    ///
    /// # Errors
    /// As [`alias`](Self::alias).
    pub fn write(&mut self, slice: &RegionSlice, bytes: &[u8]) -> Result<(), GpuError> {
        if bytes.len() > slice.len() {
            let hint = format!("{} bytes written to a slice of {}", bytes.len(), slice.len());
            let fault = error("kernel", ILLEGAL_ADDRESS, hint);
            self.fault.get_or_insert_with(|| fault.clone());
            return Err(fault);
        }
        let start = self.alias(slice.region())?;
        // SAFETY: the slice lies in its region, all of which `alias` made accessible.
        unsafe { store(start.add(slice.offset()), bytes) };
        Ok(())
    }

    /// Changes a slice in place. The closure works on a private copy, loaded before and stored
    /// after it. A reference into the memory would be unsound: others may write it at any time.
    ///
    /// # Errors
    /// As [`alias`](Self::alias).
    pub fn with_bytes<R>(
        &mut self,
        slice: &RegionSlice,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, GpuError> {
        let mut bytes = self.read(slice)?;
        let answer = change(&mut bytes);
        self.write(slice, &bytes)?;
        Ok(answer)
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel(device {}, simulated)", self.ordinal)
    }
}
