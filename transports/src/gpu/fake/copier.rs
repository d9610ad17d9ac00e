//! Small copies by a resident kernel, which is a thread here, and runs the code that the lease's model checks.

use super::engine::{End, carry_out};
use super::error::{LAUNCH_FAILED, NOT_SUPPORTED, OPERATING_SYSTEM, error};
use super::event::failed;
use super::faults::{Faults, count};
use super::lock;
use super::standstill::Standstill;
use crate::gpu::copier::{Command, CopierState, Kernel, LEASE, LIFE, Launcher, Page, Resident, fits};
use crate::gpu::{Event, GpuError};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

/// The copier of a device, if it was asked for, and what its engines are at.
pub(super) struct Copier {
    resident: OnceLock<Result<Arc<Resident<Launch>>, GpuError>>,
    /// Copies that the library's own streams were given, and that are not over.
    under_way: Arc<AtomicUsize>,
}

impl Copier {
    pub(super) fn new() -> Self {
        Self { resident: OnceLock::new(), under_way: Arc::default() }
    }

    /// Looked for at the first copy, as on a real device.
    pub(super) fn find(
        &self,
        faults: &Arc<Faults>,
        standstill: &Arc<Standstill>,
    ) -> Option<&Arc<Resident<Launch>>> {
        let find = || {
            if faults.refuses_copiers() {
                return Err(error("copier", NOT_SUPPORTED, "no copier, ordered by a test"));
            }
            let (faults, standstill) = (Arc::clone(faults), Arc::clone(standstill));
            let launch = Launch {
                page: Arc::new(Page::new()),
                ends: Arc::default(),
                last: Mutex::default(),
                faults,
                standstill,
            };
            let resident = Resident::new(Arc::clone(&launch.page), launch);
            resident.renew();
            Ok(resident)
        };
        self.resident.get_or_init(find).as_ref().ok()
    }

    /// Gives a copy between two devices' memory to the kernel. The ends come back where it has none, or is not to have this one;
    /// with whether a kernel is what it lacks.
    pub(super) fn offer(
        &self,
        resident: &Arc<Resident<Launch>>,
        (dst, src): (End, End),
        len: usize,
    ) -> Result<Event, (bool, End, End)> {
        let (to, from) = (dst.address().as_ptr() as usize, src.address().as_ptr() as usize);
        let both_on_devices = matches!((&dst, &src), (End::Device(..), End::Device(..)));
        let Some(len) = u32::try_from(len).ok().filter(|_| both_on_devices && fits(to, from, len)) else {
            return Err((false, dst, src));
        };
        if !resident.runs() {
            return Err((true, dst, src));
        }
        if self.under_way.load(Ordering::SeqCst) > 0 {
            return Err((false, dst, src));
        }
        let command = Command { dst: to as u64, src: from as u64, len };
        let ends = &resident.launcher.ends;
        lock(ends).push((command, dst, src));
        match resident.give(command) {
            Some(event) => {
                count(&resident.launcher.faults.counts.copier_copies);
                Ok(event)
            }
            None => match take(ends, command) {
                Some((dst, src)) => Err((true, dst, src)),
                // Carried out by a kernel that was then lost: to be copied again would need the ends.
                None => Ok(failed(error("copier", LAUNCH_FAILED, "the kernel was lost under a copy"))),
            },
        }
    }

    /// One more copy for an engine, until the guard is dropped.
    pub(super) fn engine_begins(&self) -> UnderWay {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        UnderWay(Arc::clone(&self.under_way))
    }

    /// Has the kernel end, before something that would wait for it.
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

/// An engine is at a copy.
pub(super) struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The memory of copies that were given to the kernel, held until they are done.
type Ends = Mutex<Vec<(Command, End, End)>>;

fn take(ends: &Ends, command: Command) -> Option<(End, End)> {
    let mut ends = lock(ends);
    let at = ends.iter().position(|(given, ..)| *given == command)?;
    let (_, dst, src) = ends.remove(at);
    Some((dst, src))
}

/// How the thread is started that stands for a kernel.
pub(super) struct Launch {
    page: Arc<Page>,
    ends: Arc<Ends>,
    /// The last kernel's thread.
    last: Mutex<Option<JoinHandle<()>>>,
    faults: Arc<Faults>,
    standstill: Arc<Standstill>,
}

impl Launcher for Launch {
    type Page = Arc<Page>;

    fn launch(&self, generation: u64) -> Result<(), GpuError> {
        let (page, ends, faults) = (Arc::clone(&self.page), Arc::clone(&self.ends), Arc::clone(&self.faults));
        let standstill = Arc::clone(&self.standstill);
        // Whoever waits for the device from here on waits for the kernel.
        let resident = standstill.kernel_begins();
        let delay = self.faults.delay_of_launches();
        let body = move || {
            let _resident = resident;
            std::thread::sleep(delay);
            while faults.stalls_copiers() {
                std::thread::yield_now();
            }
            run(&page, generation, &ends, &faults);
        };
        let thread = std::thread::Builder::new().name("fake-gpu-copier".into()).spawn(body);
        let thread =
            thread.map_err(|why| error("copier", OPERATING_SYSTEM, format!("no thread for it: {why}")))?;
        *lock(&self.last) = Some(thread);
        count(&self.faults.counts.copier_launches);
        Ok(())
    }

    fn are_over(&self) -> Result<bool, GpuError> {
        Ok(lock(&self.last).as_ref().is_none_or(JoinHandle::is_finished))
    }

    /// There may be fewer processors than threads that wait for each other.
    fn pause(&self) {
        std::thread::yield_now();
    }
}

/// The kernel.
fn run(page: &Page, generation: u64, ends: &Ends, faults: &Faults) {
    let mut kernel = Kernel::begin(page, generation);
    let copy = |command: Command| {
        let Some((dst, src)) = take(ends, command) else { return };
        // The memory is let go before anybody hears that the copy is over.
        carry_out(dst, src, command.len as usize);
    };
    let begun = Instant::now();
    let mut last = begun;
    loop {
        if faults.loses_copiers() && !lock(ends).is_empty() {
            // Without a word, and with what it was given.
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
