//! A number that grows, and that streams wait for.

use super::{AsCompletion, Completion, Status};
use crate::error::OpError;
use crate::names::Rank;
use carrack_transports::contract::DownCause;
use carrack_transports::gpu::words::GpuWord;
use carrack_transports::gpu::{GpuError, Stream};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Counts operations that succeeded, in a word that streams of GPUs wait for. A kernel begins when
/// its data has arrived, without a wait on the host. A registered counter counts the signals of
/// other ranks.
///
/// Progress raises the count, on any thread. So a thread of the program has to make progress, or
/// the runtime's own (`CARRACK_PROGRESS=thread`).
///
/// # When the count cannot be reached any more
/// A failed operation *poisons* the counter: all streams that wait for it go on, now and later,
/// whatever the count; [`error`](Self::error) returns the first failure. The end of a rank while a
/// stream waits does the same: of any rank, or of the ranks given to [`watch`](Self::watch). So
/// does the end of the runtime. The work behind the wait then runs on missing data. A kernel can
/// test the word at [`device_addr`](Self::device_addr), which has the bit [`POISON`](Self::POISON)
/// set.
///
/// # Rules against deadlock
/// - A waiting stream takes up one of the context's connections to its GPU. At most two fewer than
///   `CUDA_DEVICE_MAX_CONNECTIONS` (8 by default) may wait at a time; [`wait_on`](Self::wait_on)
///   refuses one more. Streams that wait for events of waiting streams are not counted.
/// - Calls of CUDA that wait for all of a context block while a stream of it waits. These are
///   `cudaFree`, `cudaFreeHost`, `cudaHostUnregister`, `cudaDeviceSynchronize`, loading and
///   unloading a module. The thread that makes progress must not call them meanwhile; other threads
///   may. The runtime defers its own.
/// - A kernel that takes up the whole GPU, and waits for a result of later work, waits for ever, as
///   in any CUDA program.
#[derive(Clone)]
pub struct StreamCounter {
    counted: Arc<StreamCounterState>,
    object: Arc<dyn Completion>,
}

/// The word and state of a [`StreamCounter`].
pub(crate) struct StreamCounterState {
    word: GpuWord,
    /// The first failure.
    error: Mutex<Option<OpError>>,
    /// The highest count that a stream waits for.
    awaited: AtomicU64,
    /// The ranks whose end poisons it; every rank's does if the list is empty.
    watched: Mutex<Vec<Rank>>,
    ranks: Weak<dyn Ranks>,
}

/// The ranks of a runtime whose end counters have to notice.
pub(crate) trait Ranks: Send + Sync {
    /// Returns a rank that is gone and `is_meant`, and the reason of its end.
    fn find_gone(&self, is_meant: &dyn Fn(Rank) -> bool) -> Option<(Rank, DownCause)>;

    /// Makes sure that the end of a rank will be noticed.
    fn listen_to(&self, rank: Rank);
}

impl StreamCounterState {
    pub(crate) fn new(word: GpuWord, ranks: Weak<dyn Ranks>) -> Self {
        let (error, watched) = (Mutex::default(), Mutex::default());
        Self { word, error, awaited: AtomicU64::new(0), watched, ranks }
    }

    fn fail(&self, error: OpError) {
        self.error.lock().get_or_insert(error);
        self.word.poison();
    }

    fn count(&self) -> u64 {
        self.word.get() & !GpuWord::POISON
    }

    /// Returns `true` if the end of a rank poisons it.
    pub(crate) fn hears_of(&self, rank: Rank) -> bool {
        let watched = self.watched.lock();
        watched.is_empty() || watched.contains(&rank)
    }

    /// Poisons the counter if streams wait for a higher count.
    pub(crate) fn give_up(&self, error: impl FnOnce() -> OpError) {
        if self.awaited.load(Ordering::SeqCst) > self.count() {
            self.fail(error());
        }
    }

    /// Returns the reason why the count cannot be reached any more, if there is one.
    fn why_unreachable(&self) -> Option<OpError> {
        let Some(ranks) = self.ranks.upgrade() else { return Some(OpError::Closed) };
        let (rank, cause) = ranks.find_gone(&|rank| self.hears_of(rank))?;
        Some(OpError::PeerDown { rank, cause })
    }
}

impl Completion for StreamCounterState {
    fn signal(&self, status: Status) -> Result<(), Status> {
        match status.error {
            None => self.word.raise(),
            Some(error) => self.fail(*error),
        }
        Ok(())
    }

    fn runs_user_code(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        "a counter that streams wait for".into()
    }
}

impl Drop for StreamCounterState {
    fn drop(&mut self) {
        // No operation can raise it any more.
        if self.word.is_here() && self.awaited.load(Ordering::SeqCst) > self.count() {
            self.word.poison();
        }
    }
}

impl StreamCounter {
    /// The bit that poison sets in the word: above all counts.
    pub const POISON: u64 = GpuWord::POISON;

    /// Lets work that `stream` is given later begin only when the count has reached `count`.
    ///
    /// It does not block, unless the stream is full. CUDA's streams take about a thousand
    /// operations, and block the caller of further ones. So the thread that makes progress keeps a
    /// waiting stream at most a few hundred operations ahead.
    ///
    /// # Errors
    /// `TOO_MANY_WAITING`: the limit of waiting streams of the context is reached, and the stream
    /// got no work. `INVALID_VALUE`: the count is no number of operations. And the driver's own.
    pub fn wait_on(&self, stream: &Arc<dyn Stream>, count: u64) -> Result<(), GpuError> {
        if count >= Self::POISON {
            let hint = format!("{count} operations: a count is less than {}", Self::POISON);
            return Err(GpuError { call: "wait_on", code: 1, name: "INVALID_VALUE", hint });
        }
        let StreamCounterState { word, awaited, .. } = &*self.counted;
        // Before the check for ended ranks: a rank's end is noted first, and looks for waits
        // afterwards.
        awaited.fetch_max(count, Ordering::SeqCst);
        if self.counted.count() < count
            && let Some(error) = self.counted.why_unreachable()
        {
            self.counted.fail(error);
        }
        word.hold(&**stream, count)
    }

    /// Lets the end of `rank` poison it, and only that of watched ranks. May be called for
    /// several. Without any, the end of each rank does, so that no stream waits for ever.
    pub fn watch(&self, rank: Rank) {
        self.counted.watched.lock().push(rank);
        if let Some(ranks) = self.counted.ranks.upgrade() {
            ranks.listen_to(rank);
        }
    }

    /// Returns the number of operations that succeeded.
    pub fn value(&self) -> u64 {
        self.counted.count()
    }

    /// Returns the first failure, if it was poisoned. Streams that waited have gone on regardless.
    pub fn error(&self) -> Option<OpError> {
        self.counted.error.lock().clone()
    }

    /// Returns the address of the word: 8 bytes that kernels of all devices of the driver can
    /// read. Only the runtime may write them. Valid while there is a handle to the counter.
    pub fn device_addr(&self) -> usize {
        self.counted.word.addr()
    }
}

impl From<Arc<StreamCounterState>> for StreamCounter {
    fn from(counted: Arc<StreamCounterState>) -> Self {
        Self { object: counted.clone(), counted }
    }
}

impl AsCompletion for StreamCounter {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}

impl std::fmt::Debug for StreamCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.error() {
            None => write!(f, "StreamCounter({})", self.value()),
            Some(error) => write!(f, "StreamCounter({}, poisoned: {error})", self.value()),
        }
    }
}
