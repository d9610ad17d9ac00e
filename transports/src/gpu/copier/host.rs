//! The host's side: giving copies to the kernel, and launching it.

use super::lease::{Given, give};
use super::list::{Board, CopyPiece, PIECES};
use super::page::{Command, LINES, Page};
use crate::gpu::{CopierState, GpuError, GpuEvent, Sequence};
use parking_lot::Mutex;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A driver's way to run the kernel.
pub trait Launcher: Send + Sync + Sized + 'static {
    /// Owner of the memory that kernels share with the host.
    type Board: Deref<Target = Board> + Send + Sync;

    /// Returns the kernels' address of that memory.
    fn address_of_board(&self) -> u64;

    /// Launches the kernel of a generation, behind those that were launched before. Does not wait
    /// for it.
    ///
    /// # Errors
    /// There is no such kernel.
    fn launch(&self, generation: u64) -> Result<(), NoKernel>;

    /// Returns `true` if all kernels that were launched have ended, in whatever way.
    ///
    /// # Errors
    /// The driver's: the kernels have ended, and none can run any more.
    fn have_ended(&self) -> Result<bool, GpuError>;

    /// Waits for some instructions.
    fn pause(&self) {
        std::hint::spin_loop();
    }
}

/// The reason why there is no kernel, and will be none.
#[derive(Clone, Debug)]
pub enum NoKernel {
    /// Another process wants one on this GPU, too. The text names it, and says what to do. No call
    /// of the driver was made.
    Shared(String),
    /// The driver's error.
    Failed(GpuError),
}

impl From<GpuError> for NoKernel {
    fn from(why: GpuError) -> Self {
        Self::Failed(why)
    }
}

impl fmt::Display for NoKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shared(why) => f.write_str(why),
            Self::Failed(why) => why.fmt(f),
        }
    }
}

/// Polls of an answer between two queries whether the kernel still runs.
const LOOKS: u32 = 1024;

/// A process's copier. The event of a copy is its number here.
pub struct Resident<L: Launcher> {
    board: L::Board,
    /// Launches the kernels.
    pub launcher: L,
    turn: Mutex<LaunchState>,
    /// The number of the last command that was given.
    given: AtomicU64,
    /// Queries of answers that had not come.
    asked: AtomicU32,
    /// The reason why no more copies are given.
    failed: OnceLock<NoKernel>,
    launches: AtomicU64,
    copies: AtomicU64,
}

/// Lock that is held while a thread gives a command, or launches a kernel.
#[derive(Default)]
struct LaunchState {
    /// The last kernel that was launched.
    generation: u64,
    /// The last kernel that was asked to leave.
    stopped: u64,
}

impl<L: Launcher> Resident<L> {
    /// Creates a copier whose kernels use this memory.
    pub fn new(board: L::Board, launcher: L) -> Arc<Self> {
        Arc::new(Self {
            board,
            launcher,
            turn: Mutex::default(),
            given: AtomicU64::new(0),
            asked: AtomicU32::new(0),
            failed: OnceLock::new(),
            launches: AtomicU64::new(0),
            copies: AtomicU64::new(0),
        })
    }

    #[inline]
    fn page(&self) -> &Page {
        &self.board.page
    }

    /// Returns `true` if a kernel is known to run and not known to leave.
    #[inline]
    pub fn runs(&self) -> bool {
        self.page().begun() > self.page().leaving()
    }

    /// Gives a copy to the kernel, if one is known to run. `None`: the caller does the copy.
    pub fn give(self: &Arc<Self>, command: Command) -> Option<GpuEvent> {
        self.give_numbered(|_| command)
    }

    /// Gives the kernel up to [`PIECES`] copies at once: with one number, and so one event.
    pub fn give_many(
        self: &Arc<Self>,
        pieces: impl ExactSizeIterator<Item = CopyPiece>,
    ) -> Option<GpuEvent> {
        if pieces.len() > PIECES {
            return None;
        }
        let at = self.launcher.address_of_board();
        self.give_numbered(|number| self.board.write(at, number, pieces))
    }

    #[inline]
    fn give_numbered(self: &Arc<Self>, command: impl FnOnce(u64) -> Command) -> Option<GpuEvent> {
        if self.failed.get().is_some() {
            return None;
        }
        let turn = self.turn.lock();
        let generation = turn.generation;
        if self.page().begun() != generation || turn.stopped == generation || !self.runs() {
            return None;
        }
        let number = self.given.load(Ordering::Relaxed) + 1;
        if !self.wait_until(|page| page.answered() + LINES >= number) {
            return None;
        }
        let mut looks = 0_u32;
        let has_ended = || {
            looks = looks.wrapping_add(1);
            self.launcher.pause();
            looks.is_multiple_of(LOOKS) && self.launcher.have_ended() != Ok(false)
        };
        let given = give(self.page(), generation, number, command(number), has_ended);
        self.given.store(number, Ordering::Release);
        match given {
            Given::Taken => {
                drop(turn);
                self.copies.fetch_add(1, Ordering::Relaxed);
                Some(GpuEvent::numbered(Arc::clone(self) as Arc<dyn Sequence>, number))
            }
            Given::TakenBack => None,
            Given::Lost => {
                self.fail(lost().into());
                None
            }
        }
    }

    /// Launches a kernel if there is none.
    pub fn renew(&self) {
        if self.failed.get().is_some() || self.page().gone() < self.launches.load(Ordering::Relaxed)
        {
            return;
        }
        // The thread that holds it gives a copy, or launches a kernel.
        let Some(mut turn) = self.turn.try_lock() else { return };
        if self.page().gone() < turn.generation {
            return;
        }
        match self.launcher.launch(turn.generation + 1) {
            Ok(()) => {
                turn.generation += 1;
                self.launches.store(turn.generation, Ordering::Relaxed);
            }
            Err(why) => self.fail(why),
        }
    }

    /// Waits until all copies that were given have ended: some microseconds. Failed ones have
    /// ended.
    #[inline]
    pub fn settle(&self) {
        let given = self.given.load(Ordering::Acquire);
        if self.page().answered() < given {
            self.wait_until(|page| page.answered() >= given);
        }
    }

    /// Asks the kernel to end when it has done what it was given, before a driver call that would
    /// wait for it.
    pub fn end_early(&self) {
        let mut turn = self.turn.lock();
        if turn.stopped != turn.generation && self.page().gone() < turn.generation {
            turn.stopped = turn.generation;
            self.page().stop(turn.generation);
        }
    }

    /// Returns the state, for reports.
    pub fn state(&self) -> CopierState {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        match self.failed.get() {
            Some(why) => CopierState::Refused(why.to_string()),
            None => {
                CopierState::On { launches: count(&self.launches), copies: count(&self.copies) }
            }
        }
    }

    /// Waits for a condition that only the kernel can bring about. Returns `false` if the kernel
    /// has ended without it.
    fn wait_until(&self, is_so: impl Fn(&Page) -> bool) -> bool {
        let mut looks = 0_u32;
        while !is_so(self.page()) {
            self.launcher.pause();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) && !self.is_alive(&is_so) {
                return false;
            }
        }
        true
    }

    /// Returns `true` if the condition holds, or a kernel may still bring it about.
    fn is_alive(&self, is_so: &impl Fn(&Page) -> bool) -> bool {
        match self.launcher.have_ended() {
            Ok(false) => true,
            // The kernel's last act may have met the condition.
            _ if is_so(self.page()) => true,
            Ok(true) => {
                self.fail(lost().into());
                false
            }
            Err(why) => {
                self.fail(why.into());
                false
            }
        }
    }

    fn fail(&self, why: NoKernel) {
        if self.failed.set(why.clone()).is_ok() {
            tracing::warn!(%why, "the resident copier is given no more copies");
        }
    }
}

impl<L: Launcher> Sequence for Resident<L> {
    #[inline]
    fn query(&self, number: u64) -> Result<bool, GpuError> {
        if self.page().answered() >= number {
            return Ok(true);
        }
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let is_answered = |page: &Page| page.answered() >= number;
        if asked.is_multiple_of(LOOKS) && !self.is_alive(&is_answered)
            || self.failed.get().is_some()
        {
            return match self.failed.get() {
                _ if is_answered(self.page()) => Ok(true),
                None => Ok(false),
                Some(NoKernel::Failed(why)) => Err(why.clone()),
                // Cannot occur: a launch is tried when all kernels are gone, and those answered
                // the commands that they took.
                Some(NoKernel::Shared(_)) => Err(lost()),
            };
        }
        Ok(false)
    }

    fn wait(&self, number: u64) -> Result<(), GpuError> {
        while !self.query(number)? {
            self.launcher.pause();
        }
        Ok(())
    }
}

impl<L: Launcher> fmt::Debug for Resident<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Resident({} given, {} answered)",
            self.given.load(Ordering::Relaxed),
            self.page().answered()
        )
    }
}

/// Returns the error of a kernel that ended without an answer.
#[cold]
fn lost() -> GpuError {
    GpuError {
        call: "copier",
        code: 719,
        name: "LAUNCH_FAILED",
        hint: "the resident copier's kernel ended without having answered: run without \
            CARRACK_GPU_COPIER, and report it"
            .to_owned(),
    }
}
