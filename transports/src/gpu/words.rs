//! Words of pinned host memory that the CPU writes and streams wait for.
//!
//! One agent writes a word: the CPUs of the process that has it. Streams, and kernels that look,
//! only read it.

use super::{Event, Flavour, Gpu, GpuError, Stream, Until};
use crate::fork::Owner;
use crate::mem::Region;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that words are cut from at a time.
const PAGE: usize = 4096;

/// From one word to the next: a GPU that looks at one does not slow down who writes another.
const STRIDE: usize = 64;

/// Waits that are remembered of a word before those are looked for that are over.
const REMEMBERED: usize = 8;

/// Words of one device, to be used again and again.
pub struct Words {
    gpu: Arc<dyn Gpu>,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    /// Words that hold 0, and that no stream will come to.
    fresh: Vec<(Region, usize)>,
    /// Words that a stream may still come to.
    used: Vec<Place>,
    /// Gates that are shut by going on counting.
    gates: Vec<Place>,
}

/// A word, and the streams that may still come to it.
struct Place {
    page: Region,
    offset: usize,
    /// A fork neither reads nor writes it: pinned memory may not be there, and the streams are its
    /// parent's.
    owner: Owner,
    /// What fires when a stream is past its wait. Not locked while a driver is called: giving a
    /// wait to a stream that is full blocks until the stream goes on, and whoever writes the word
    /// must not wait for that.
    waits: Mutex<Remembered>,
}

struct Remembered {
    waits: Vec<Event>,
    /// How many before they are looked through.
    limit: usize,
}

impl Remembered {
    fn forget_released(&mut self) {
        self.waits.retain(|wait| wait.query() == Ok(false));
    }
}

impl Place {
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
        // Within the page, aligned, and host memory: there is nothing to fail.
        self.page.fetch_add(self.offset, more).unwrap_or(0)
    }

    fn swap(&self, expected: u64, new: u64) -> u64 {
        self.page.compare_swap(self.offset, expected, new).unwrap_or(0)
    }

    fn addr(&self) -> usize {
        self.page.addr() + self.offset
    }

    /// Whether no stream will come here any more.
    fn is_left(&mut self) -> bool {
        let remembered = self.waits.get_mut().unwrap_or_else(PoisonError::into_inner);
        remembered.forget_released();
        remembered.waits.is_empty()
    }

    /// Has a stream wait until the word has reached `value`.
    fn hold(&self, stream: &dyn Stream, value: u64) -> Result<(), GpuError> {
        // SAFETY: an aligned word of pinned memory, used by atomics only. It stays until the stream
        // has come to it: `waits` tells, and a page with a word that still has one is not given
        // back.
        let past =
            unsafe { stream.wait_value64(self.addr() as *const u64, value, Until::Reached) }?;
        let mut remembered = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        // A stream comes to its waits in order: the last one tells of all.
        remembered.waits.retain(|earlier| !past.is_behind(earlier));
        if remembered.waits.len() >= remembered.limit {
            remembered.forget_released();
            remembered.limit = REMEMBERED.max(2 * remembered.waits.len());
        }
        remembered.waits.push(past);
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.owner.is_here() && !self.is_left() {
            // A stream that is held up by something else may come here at any time.
            tracing::debug!(
                addr = self.addr(),
                "a page stays for a stream that has still to come to a word"
            );
            std::mem::forget(self.page.clone());
        }
    }
}

impl Words {
    /// Words for the streams of a device. Takes no memory before one is asked for.
    pub fn of(gpu: &Arc<dyn Gpu>) -> Arc<Self> {
        Arc::new(Self { gpu: gpu.clone(), places: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A word that holds 0.
    ///
    /// # Errors
    /// There is no pinned memory.
    pub fn word(self: &Arc<Self>) -> Result<Word, GpuError> {
        Ok(Word { words: self.clone(), place: Some(self.fresh()?) })
    }

    fn fresh(&self) -> Result<Place, GpuError> {
        let mut places = self.lock();
        if places.fresh.is_empty() {
            let mut used = std::mem::take(&mut places.used);
            for place in used.extract_if(.., Place::is_left) {
                place.add(place.get().wrapping_neg());
                places.fresh.push((place.page.clone(), place.offset));
            }
            places.used = used;
        }
        if let Some(free) = places.fresh.pop() {
            return Ok(Place::at(free));
        }
        let page = self.gpu.allocate(PAGE, Flavour::Pinned)?;
        for offset in (0..PAGE).step_by(STRIDE) {
            let place = Place::at((page.clone(), offset));
            place.add(place.get().wrapping_neg());
            places.fresh.push((page.clone(), offset));
        }
        places
            .fresh
            .pop()
            .map(Place::at)
            .ok_or_else(|| GpuError::unsupported("words", "no word in a page"))
    }

    /// A gate that is open.
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

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = self.lock();
        write!(
            f,
            "Words({} free, {} used, of {})",
            places.fresh.len(),
            places.used.len(),
            self.gpu.info().uuid
        )
    }
}

/// A word that counts up. Its memory is used again when the last stream has come past it.
pub struct Word {
    words: Arc<Words>,
    /// Always there, but while it is dropped.
    place: Option<Place>,
}

impl Word {
    /// What is or-ed into a word to release all who wait for it: more than anyone waits for, and,
    /// taken as a signed difference, still ahead of it.
    pub const POISON: u64 = 1 << 62;

    fn place(&self) -> &Place {
        match &self.place {
            Some(place) => place,
            None => unreachable!("a word has its place until it is dropped"),
        }
    }

    /// What it holds. What was written before it was raised is then to be seen.
    pub fn get(&self) -> u64 {
        self.place().get()
    }

    /// Adds one.
    pub fn raise(&self) {
        self.place().add(1);
    }

    /// Releases all who wait for it, now and later.
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

    /// Lets later work on a stream begin only when the word has reached `value`; nothing is given
    /// to the stream if it has.
    ///
    /// # Errors
    /// The driver's; and `TOO_MANY_WAITING`, when as many streams of the context wait as may.
    pub fn hold(&self, stream: &dyn Stream, value: u64) -> Result<(), GpuError> {
        if has_reached(self.get(), value) { Ok(()) } else { self.place().hold(stream, value) }
    }

    /// Whether it is this process's word, and not that of a process of which this is a fork.
    pub fn is_here(&self) -> bool {
        self.place().owner.is_here()
    }

    /// Where it is, for the CPU and for kernels of all devices.
    pub fn addr(&self) -> usize {
        self.place().addr()
    }
}

/// As streams compare: the difference is taken as a signed number.
fn has_reached(held: u64, value: u64) -> bool {
    held.wrapping_sub(value).cast_signed() >= 0
}

impl Drop for Word {
    fn drop(&mut self) {
        self.words.lock().used.extend(self.place.take());
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Word({:#x} at {:#x})", self.get(), self.addr())
    }
}

/// Holds a stream up until it is opened, or dropped, which opens it: so whatever ends, the stream
/// goes on.
pub struct Gate {
    words: Arc<Words>,
    place: Option<Place>,
    is_shut: bool,
}

impl Gate {
    /// Lets later work on a stream begin only when the gate is opened.
    ///
    /// # Errors
    /// As [`Word::hold`].
    pub fn shut(&mut self, stream: &dyn Stream) -> Result<(), GpuError> {
        let Some(place) = &self.place else { return Ok(()) };
        // One more than was ever waited for here: streams that are still to come past earlier waits
        // find them over.
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
