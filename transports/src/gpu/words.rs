//! Words of pinned host memory that the CPU writes and streams wait for.
//!
//! Only the CPUs of the process that owns a word write it. Streams, and polling kernels, only read
//! it.

#![expect(unsafe_code, reason = "streams are told words by address")]

use super::{Flavour, Gpu, GpuError, GpuEvent, Stream};
use crate::fork::Owner;
use crate::mem::Region;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::Arc;

/// Bytes that words are cut from at a time.
const PAGE: usize = 4096;

/// Bytes from one word to the next: a GPU that polls one does not slow down the writer of another.
const STRIDE: usize = 64;

/// Waits that are remembered for a word before ended ones are removed.
const REMEMBERED: usize = 8;

/// Words of one device, for reuse.
pub struct GpuWords {
    gpu: Arc<dyn Gpu>,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    /// Words that hold 0, and that no stream will read.
    fresh: Vec<(Region, usize)>,
    /// Words that a stream may still read.
    used: Vec<WordPlace>,
    /// Words of gates, which go on counting when reused.
    gates: Vec<WordPlace>,
}

/// A word, and the streams that may still read it.
struct WordPlace {
    page: Region,
    offset: usize,
    /// A forked child neither reads nor writes it: pinned memory may be absent there, and the
    /// streams belong to the parent.
    owner: Owner,
    /// Events behind the streams' waits. Not locked during driver calls: giving a wait to a full
    /// stream blocks until the stream goes on. The writer of the word must not wait for that.
    waits: Mutex<Remembered>,
}

struct Remembered {
    waits: Vec<GpuEvent>,
    /// Number of waits at which ended ones are removed.
    limit: usize,
}

impl Remembered {
    fn forget_released(&mut self) {
        self.waits.retain(|wait| wait.query() == Ok(false));
    }
}

impl WordPlace {
    fn at((page, offset): (Region, usize)) -> Self {
        let owner = Owner::this_process();
        Self {
            page,
            offset,
            owner,
            waits: Mutex::new(Remembered { waits: Vec::new(), limit: REMEMBERED }),
        }
    }

    fn get(&self) -> u64 {
        self.add(0)
    }

    fn add(&self, more: u64) -> u64 {
        // Cannot fail: within the page, aligned, and host memory.
        self.page.fetch_add(self.offset, more).unwrap_or(0)
    }

    fn swap(&self, expected: u64, new: u64) -> u64 {
        self.page.compare_swap(self.offset, expected, new).unwrap_or(0)
    }

    fn addr(&self) -> usize {
        self.page.addr() + self.offset
    }

    /// Returns `true` if no stream will read the word any more.
    fn is_left(&mut self) -> bool {
        let remembered = self.waits.get_mut();
        remembered.forget_released();
        remembered.waits.is_empty()
    }

    /// Has a stream wait until the word has reached `value`.
    fn hold(&self, stream: &dyn Stream, value: u64) -> Result<(), GpuError> {
        // SAFETY: an aligned word of pinned memory, used by atomics only. It stays until the stream
        // is past the wait. `waits` tells, and a page is not freed while one of its words has a
        // wait left.
        let past = unsafe { stream.wait_value64(self.addr() as *const u64, value) }?;
        let mut remembered = self.waits.lock();
        // A stream passes its waits in order: the last one stands for all.
        remembered.waits.retain(|earlier| !past.is_behind(earlier));
        if remembered.waits.len() >= remembered.limit {
            remembered.forget_released();
            remembered.limit = REMEMBERED.max(2 * remembered.waits.len());
        }
        remembered.waits.push(past);
        Ok(())
    }
}

impl Drop for WordPlace {
    fn drop(&mut self) {
        if self.owner.is_here() && !self.is_left() {
            // A stream that is held up elsewhere may read the word at any time.
            tracing::debug!(
                addr = self.addr(),
                "a page stays for a stream that has still to come to a word"
            );
            std::mem::forget(self.page.clone());
        }
    }
}

impl GpuWords {
    /// Creates the words of a device. Allocates no memory before the first word.
    pub fn of(gpu: &Arc<dyn Gpu>) -> Arc<Self> {
        Arc::new(Self { gpu: gpu.clone(), places: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock()
    }

    /// Returns a word that holds 0.
    ///
    /// # Errors
    /// There is no pinned memory.
    pub fn word(self: &Arc<Self>) -> Result<GpuWord, GpuError> {
        Ok(GpuWord { words: self.clone(), place: Some(self.fresh()?) })
    }

    fn fresh(&self) -> Result<WordPlace, GpuError> {
        let mut places = self.lock();
        if places.fresh.is_empty() {
            let mut used = std::mem::take(&mut places.used);
            for place in used.extract_if(.., WordPlace::is_left) {
                place.add(place.get().wrapping_neg());
                places.fresh.push((place.page.clone(), place.offset));
            }
            places.used = used;
        }
        if let Some(free) = places.fresh.pop() {
            return Ok(WordPlace::at(free));
        }
        let page = self.gpu.allocate(PAGE, Flavour::Pinned)?;
        for offset in (0..PAGE).step_by(STRIDE) {
            let place = WordPlace::at((page.clone(), offset));
            place.add(place.get().wrapping_neg());
            places.fresh.push((page.clone(), offset));
        }
        places
            .fresh
            .pop()
            .map(WordPlace::at)
            .ok_or_else(|| GpuError::unsupported("words", "no word in a page"))
    }

    /// Returns an open gate.
    ///
    /// # Errors
    /// There is no pinned memory.
    pub fn gate(self: &Arc<Self>) -> Result<Gate, GpuError> {
        let kept = self.lock().gates.pop();
        let place = match kept {
            Some(place) => place,
            None => self.fresh()?,
        };
        Ok(Gate { words: self.clone(), place: Some(place), is_shut: false })
    }
}

impl fmt::Debug for GpuWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = self.lock();
        write!(
            f,
            "GpuWords({} free, {} used, of {})",
            places.fresh.len(),
            places.used.len(),
            self.gpu.info().uuid
        )
    }
}

/// A word that counts up. Its memory is reused when the last stream is past it.
pub struct GpuWord {
    words: Arc<GpuWords>,
    /// `None` only while it is dropped.
    place: Option<WordPlace>,
}

impl GpuWord {
    /// Bit that is or-ed into a word to release all its waiters. The result exceeds every awaited
    /// value, and is ahead of it also as a signed difference.
    pub const POISON: u64 = 1 << 62;

    fn place(&self) -> &WordPlace {
        match &self.place {
            Some(place) => place,
            None => unreachable!("a word has its place until it is dropped"),
        }
    }

    /// Returns its value. Writes made before the word was raised to it are then visible.
    pub fn get(&self) -> u64 {
        self.place().get()
    }

    /// Adds one.
    pub fn raise(&self) {
        self.place().add(1);
    }

    /// Releases all waiters, now and later.
    pub fn poison(&self) {
        let place = self.place();
        let mut held = place.get();
        while held & Self::POISON == 0 {
            match place.swap(held, held | Self::POISON) {
                now if now == held => break,
                now => held = now,
            }
        }
    }

    /// Lets later work on a stream begin only when the word has reached `value`. If it has, the
    /// stream is given nothing.
    ///
    /// # Errors
    /// The driver's; and `TOO_MANY_WAITING`, if the maximum number of the context's streams wait.
    pub fn hold(&self, stream: &dyn Stream, value: u64) -> Result<(), GpuError> {
        if has_reached(self.get(), value) { Ok(()) } else { self.place().hold(stream, value) }
    }

    /// Returns `true` if it is this process's word, and not that of a parent process.
    pub fn is_here(&self) -> bool {
        self.place().owner.is_here()
    }

    /// Returns its address, for the CPU and for kernels of all devices.
    pub fn addr(&self) -> usize {
        self.place().addr()
    }
}

/// Returns `true` if `held` has reached `value`. Streams compare so: the difference is a signed
/// number.
fn has_reached(held: u64, value: u64) -> bool {
    held.wrapping_sub(value).cast_signed() >= 0
}

impl Drop for GpuWord {
    fn drop(&mut self) {
        self.words.lock().used.extend(self.place.take());
    }
}

impl fmt::Debug for GpuWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuWord({:#x} at {:#x})", self.get(), self.addr())
    }
}

/// A gate holds a stream up until the gate is dropped, which opens it. So the stream goes on,
/// whatever ends.
pub struct Gate {
    words: Arc<GpuWords>,
    place: Option<WordPlace>,
    is_shut: bool,
}

impl Gate {
    /// Lets later work on a stream begin only when the gate is dropped.
    ///
    /// # Errors
    /// As [`GpuWord::hold`].
    pub fn shut(&mut self, stream: &dyn Stream) -> Result<(), GpuError> {
        let Some(place) = &self.place else { return Ok(()) };
        // One more than any value awaited before: streams that have yet to pass earlier waits find
        // them ended.
        place.hold(stream, place.get().wrapping_add(1))?;
        self.is_shut = true;
        Ok(())
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        if !place.owner.is_here() {
            return;
        }
        if self.is_shut {
            place.add(1);
        }
        self.words.lock().gates.push(place);
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_shut { "Gate(shut)" } else { "Gate(open)" })
    }
}
