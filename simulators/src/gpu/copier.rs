//! Small copies by a resident kernel, which is a thread here, and runs the code that the lease's
//! model checks.

use super::engine::{CopyPart, End, carry_out};
use super::error::{LAUNCH_FAILED, NOT_SUPPORTED, OPERATING_SYSTEM, error};
use super::event::failed;
use super::faults::{GpuFaults, count};
use super::standstill::Standstill;
use carrack_transports::gpu::copier::{
    Board, Command, CopierState, CopyPiece, Kernel, LEASE, LIFE, Launcher, NoKernel, PIECES,
    Resident, fits, fits_among_others, shared,
};
use carrack_transports::gpu::{GpuError, GpuEvent};
use parking_lot::Mutex;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

/// The copier of a device, if it was asked for, and the count of engine copies.
pub(super) struct Copier {
    resident: OnceLock<Result<Arc<Resident<ThreadLauncher>>, GpuError>>,
    /// Copies in flight on the library's own streams.
    in_flight: Arc<AtomicUsize>,
}

impl Copier {
    pub(super) fn new() -> Self {
        Self { resident: OnceLock::new(), in_flight: Arc::default() }
    }

    /// Sets the copier up at the first copy, as on a real device.
    pub(super) fn find(
        &self,
        faults: &Arc<GpuFaults>,
        standstill: &Arc<Standstill>,
    ) -> Option<&Arc<Resident<ThreadLauncher>>> {
        let find = || {
            if faults.refuses_copiers() {
                return Err(error("copier", NOT_SUPPORTED, "no copier, ordered by a test"));
            }
            let (faults, standstill) = (Arc::clone(faults), Arc::clone(standstill));
            let launcher = ThreadLauncher {
                board: Arc::new(Board::new()),
                parts: Arc::default(),
                last: Mutex::default(),
                faults,
                standstill,
            };
            let resident = Resident::new(Arc::clone(&launcher.board), launcher);
            resident.renew();
            Ok(resident)
        };
        self.resident.get_or_init(find).as_ref().ok()
    }

    /// Gives copies between two devices' memory to the kernel, which takes all or none. If it does
    /// not, returns them, with `true` if only a kernel is missing.
    pub(super) fn offer(
        &self,
        resident: &Arc<Resident<ThreadLauncher>>,
        parts: Vec<CopyPart>,
    ) -> Result<GpuEvent, (bool, Vec<CopyPart>)> {
        let pieces: Vec<CopyPiece> = parts.iter().map(place).collect();
        let fit = |&(dst, src, len): &CopyPiece| match pieces.len() {
            1 => fits(dst, src, len),
            _ => fits_among_others(dst, src, len),
        };
        let on_devices =
            |(dst, src, _): &CopyPart| matches!((dst, src), (End::Device(..), End::Device(..)));
        if pieces.len() > PIECES || !pieces.iter().all(fit) || !parts.iter().all(on_devices) {
            return Err((false, parts));
        }
        if !resident.runs() {
            return Err((true, parts));
        }
        if self.in_flight.load(Ordering::SeqCst) > 0 {
            return Err((false, parts));
        }
        let parts_given = &resident.launcher.parts;
        parts_given.lock().push((pieces.clone(), parts));
        let given = match *pieces {
            [(dst, src, len)] => u32::try_from(len).ok().and_then(|len| {
                let (dst, src) = (dst as u64, src as u64);
                resident.give(Command { dst, src, len })
            }),
            _ => resident.give_many(pieces.iter().copied()),
        };
        match given {
            Some(event) => {
                count(&resident.launcher.faults.counts.copier_copies);
                Ok(event)
            }
            None => match take(parts_given, &pieces) {
                Some(parts) => Err((true, parts)),
                // A kernel that is lost by now did them. Repeating them would need the ends.
                None => {
                    Ok(failed(error("copier", LAUNCH_FAILED, "the kernel was lost under a copy")))
                }
            },
        }
    }

    /// Counts one more copy for an engine, until the guard is dropped.
    pub(super) fn engine_begins(&self) -> EngineCopy {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        EngineCopy(Arc::clone(&self.in_flight))
    }

    /// Ends the kernel, before a call that would wait for it.
    pub(super) fn end_early(&self) {
        if let Some(Ok(resident)) = self.resident.get() {
            resident.end_early();
        }
    }

    pub(super) fn state(&self) -> Option<CopierState> {
        Some(match self.resident.get()? {
            Ok(resident) => resident.state(),
            Err(why) => CopierState::Refused(why.to_string()),
        })
    }
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copier({:?})", self.state())
    }
}

/// Guard of a copy in an engine.
pub(super) struct EngineCopy(Arc<AtomicUsize>);

impl Drop for EngineCopy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Memory of copies that were given to the kernel, held until they are done. The key is the list
/// that the kernel will find.
type GivenCopies = Mutex<Vec<(Vec<CopyPiece>, Vec<CopyPart>)>>;

fn place((dst, src, len): &CopyPart) -> CopyPiece {
    let addr = |end: &End| end.address().as_ptr() as usize;
    (addr(dst), addr(src), *len)
}

fn take(parts: &GivenCopies, pieces: &[CopyPiece]) -> Option<Vec<CopyPart>> {
    let mut parts = parts.lock();
    let at = parts.iter().position(|(given, _)| given == pieces)?;
    Some(parts.remove(at).1)
}

/// Launcher of the thread that stands for a kernel.
pub(super) struct ThreadLauncher {
    board: Arc<Board>,
    parts: Arc<GivenCopies>,
    /// The last kernel's thread.
    last: Mutex<Option<JoinHandle<()>>>,
    faults: Arc<GpuFaults>,
    standstill: Arc<Standstill>,
}

impl Launcher for ThreadLauncher {
    type Board = Arc<Board>;

    fn address_of_board(&self) -> u64 {
        std::ptr::from_ref::<Board>(&self.board) as u64
    }

    fn launch(&self, generation: u64) -> Result<(), NoKernel> {
        if let Some(pid) = self.faults.shares_copiers() {
            return Err(NoKernel::Shared(shared(pid)));
        }
        let (board, parts, faults) =
            (Arc::clone(&self.board), Arc::clone(&self.parts), Arc::clone(&self.faults));
        let at = self.address_of_board();
        let standstill = Arc::clone(&self.standstill);
        // Later waiters for the device also wait for the kernel.
        let resident = standstill.kernel_begins();
        let delay = self.faults.delay_of_launches();
        let body = move || {
            let _resident = resident;
            std::thread::sleep(delay);
            while faults.stalls_copiers() {
                std::thread::yield_now();
            }
            run((&board, at), generation, &parts, &faults);
        };
        let thread = std::thread::Builder::new().name("fake-gpu-copier".into()).spawn(body);
        let thread = thread
            .map_err(|why| error("copier", OPERATING_SYSTEM, format!("no thread for it: {why}")))?;
        *self.last.lock() = Some(thread);
        count(&self.faults.counts.copier_launches);
        Ok(())
    }

    fn have_ended(&self) -> Result<bool, GpuError> {
        Ok(self.last.lock().as_ref().is_none_or(JoinHandle::is_finished))
    }

    /// Yields: there may be fewer processors than threads that wait for each other.
    fn pause(&self) {
        std::thread::yield_now();
    }
}

/// Runs the kernel.
fn run((board, at): (&Board, u64), generation: u64, parts: &GivenCopies, faults: &GpuFaults) {
    let mut kernel = Kernel::begin(&board.page, generation);
    let copy = |command: Command| {
        // The memory is released before the end of the copies is visible.
        for part in take(parts, &board.pieces(at, command)).into_iter().flatten() {
            carry_out(part);
        }
    };
    let begun = Instant::now();
    let mut last = begun;
    loop {
        if faults.loses_copiers() && !parts.lock().is_empty() {
            // Ends without a word, and with the copy not done.
            return;
        }
        let now = Instant::now();
        if kernel.look(copy) {
            last = now;
        } else if now - last > LEASE {
            break;
        }
        if kernel.is_stopped() || now - begun > LIFE {
            break;
        }
        std::thread::yield_now();
    }
    kernel.leave(copy);
}
