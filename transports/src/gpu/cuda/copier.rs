//! Small copies by a resident kernel: its launch, and the choice of copies for it.

use super::calls::Calls;
use super::device::CudaGpu;
use super::ends::Ends;
use super::error::released;
use super::home::Home;
use super::sys::{self, DevicePtr, FunctionHandle, ModuleHandle, StreamHandle};
use crate::gpu::copier::{
    Board, Command, CopierState, GpuClaim, LEASE, LIFE, Launcher, NoKernel, PIECES, Resident, fits,
    fits_among_others,
};
use crate::gpu::{GpuError, GpuEvent, GpuInfo, Pieces};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

/// The kernel, for the driver to compile, with the zero that the driver looks for.
pub const KERNEL: &str = concat!(include_str!("copier.ptx"), "\0");

/// Threads of the kernel: one warp copies, fifteen sleep until there are many copies at once, and
/// four watch.
pub const THREADS: u32 = 640;

/// The copier of a device.
pub(super) struct Copier {
    pub(super) resident: Arc<Resident<Launch>>,
    ends: Ends,
}

/// Outcome of offering a copy.
pub(super) enum Offered {
    /// The kernel makes the copy.
    Taken(GpuEvent),
    /// The kernel would have taken it, but none runs.
    NoKernel,
    /// An engine has to do it.
    Not,
}

impl Copier {
    /// Loads the kernel and launches it for the first time.
    ///
    /// # Errors
    /// The reason why there is no copier, for reports.
    pub(super) fn set_up(home: &Arc<Home>, info: &GpuInfo) -> Result<Self, String> {
        let claim = home.claim_for_copier(info)?;
        // The claim may be old.
        claim.check()?;
        let board = new_board()?;
        let launch = Launch::load(home, board, claim).map_err(|why| why.to_string())?;
        let resident = Resident::new(board, launch);
        // The first launch takes longer than others, and is not waited for here.
        resident.renew();
        Ok(Self { resident, ends: Ends::default() })
    }

    /// Gives a copy between two places in memory of GPUs to the kernel, if possible.
    pub(super) fn offer(
        &self,
        gpu: &CudaGpu,
        home: &Home,
        (dst, src): (usize, usize),
        len: usize,
    ) -> Offered {
        if !fits(dst, src, len) {
            return Offered::Not;
        }
        let Ok(count) = u32::try_from(len) else { return Offered::Not };
        let runs = self.resident.runs();
        // Copies of an engine come first: they were begun before, and may touch the same bytes.
        if runs && !matches!(home.are_lanes_idle(), Ok(true)) {
            return Offered::Not;
        }
        if !self.ends.is_reached(gpu, home, dst, len) || !self.ends.is_reached(gpu, home, src, len)
        {
            return Offered::Not;
        }
        let given = if runs {
            self.resident.give(Command { dst: dst as u64, src: src as u64, len: count })
        } else {
            None
        };
        given.map_or(Offered::NoKernel, Offered::Taken)
    }

    /// Offers many copies between two kinds of memory, of which the kernel takes all or none.
    pub(super) fn offer_many(&self, gpu: &CudaGpu, home: &Home, pieces: &Pieces) -> Offered {
        if pieces.count() > PIECES || !fit(pieces) {
            return Offered::Not;
        }
        let runs = self.resident.runs();
        if runs && !matches!(home.are_lanes_idle(), Ok(true)) {
            return Offered::Not;
        }
        if !self.ends.are_all_reached(gpu, home, pieces) {
            return Offered::Not;
        }
        let given = if runs { self.resident.give_many(pieces.numbers()) } else { None };
        given.map_or(Offered::NoKernel, Offered::Taken)
    }

    /// Forgets what is known of the program's memory in a range.
    pub(super) fn forget(&self, range: &Range<usize>) {
        self.ends.forget(range);
    }
}

/// Returns `true` if the kernel takes copies like each of these. The aggregate of all of them
/// mostly suffices.
fn fit(pieces: &Pieces) -> bool {
    let all = pieces.all();
    fits_among_others(all.bits, all.bits, all.longest)
        || pieces.numbers().all(|(to, from, len)| fits_among_others(to, from, len))
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.resident.fmt(f)
    }
}

impl Home {
    /// Claims the GPU for a copier, once. No kernel is loaded, and nothing waits for the context.
    ///
    /// # Errors
    /// The reason why there is no copier, for reports.
    pub(super) fn claim_for_copier(&self, info: &GpuInfo) -> Result<Arc<GpuClaim>, String> {
        let claim = || {
            check(self.calls(), self.context.device)?;
            if !self.context.is_primary() {
                // A GPU switches between contexts in time slices, as it does between processes.
                return Err(
                    "the memory is of a context of the program's own: a copier runs in the \
                    primary one only, which \
                            is the runtime's (cudaMalloc's)"
                        .into(),
                );
            }
            GpuClaim::of(info.uuid).map(Arc::new)
        };
        self.claim.get_or_init(claim).clone()
    }

    /// Stores the outcome of a copier's set-up, and logs a failure. Later outcomes are ignored.
    pub(super) fn copier_is(
        &self,
        info: &GpuInfo,
        set_up: impl FnOnce() -> Result<Copier, String>,
    ) -> Option<&Copier> {
        let told = || {
            set_up().inspect_err(|why| tracing::warn!(gpu = %info.uuid, why, "no resident copier"))
        };
        self.copier.get_or_init(told).as_ref().ok()
    }

    /// Ends the resident kernel, before a driver call that would wait for its end.
    pub(super) fn end_copier_early(&self) {
        if let Some(Ok(copier)) = self.copier.get() {
            copier.resident.end_early();
        }
    }

    /// Returns the state of its copier.
    pub(super) fn copier_state(&self) -> Option<CopierState> {
        Some(match self.copier.get()? {
            Ok(copier) => copier.resident.state(),
            Err(why) => CopierState::Refused(why.clone()),
        })
    }
}

/// Returns the state that is known before the device is used.
pub(super) fn before_use(calls: &Calls, device: sys::CuDevice) -> CopierState {
    check(calls, device).map_or_else(CopierState::Refused, |()| CopierState::Wanted)
}

/// Checks what can be checked without a context.
fn check(calls: &Calls, device: sys::CuDevice) -> Result<(), String> {
    if std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|set| set == "1") {
        // Each launch would wait for the kernel's end.
        return Err("CUDA_LAUNCH_BLOCKING=1 has the program wait for every kernel: unset it".into());
    }
    let mut mode = sys::COMPUTE_MODE_DEFAULT;
    // SAFETY: the place for the answer is ours.
    let asked =
        unsafe { calls.device_get_attribute(&raw mut mode, sys::device::COMPUTE_MODE, device) };
    match asked {
        Ok(()) if mode == sys::COMPUTE_MODE_DEFAULT => Ok(()),
        // MPS may own an exclusive device, with clients that are invisible here.
        Ok(()) => Err(format!(
            "the GPU's compute mode is {mode}, an exclusive one, where MPS may have others share \
            it: nvidia-smi -c DEFAULT"
        )),
        Err(why) => Err(why.to_string()),
    }
}

/// Allocates shared memory, which a fork does not copy. It outlives every context: it is never
/// unmapped.
fn new_board() -> Result<&'static Board, String> {
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let mapped = unsafe { mmap_anonymous(null_mut(), size_of::<Board>(), protection, flags) };
    let mapped = mapped.map_err(|why| format!("no host memory for it: {why}"))?;
    // SAFETY: whole pages, aligned as the system's pages are. All fields are atomics, for which
    // zeroes are values. The pages stay mapped to the end of the process.
    Ok(unsafe { &*mapped.cast::<Board>() })
}

/// Everything needed to launch the kernel.
pub(super) struct Launch {
    /// Weak, since the home owns the copier.
    home: Weak<Home>,
    claim: Arc<GpuClaim>,
    board: DevicePtr,
    stream: StreamHandle,
    function: FunctionHandle,
}

impl Launch {
    fn load(
        home: &Arc<Home>,
        board: &'static Board,
        claim: Arc<GpuClaim>,
    ) -> Result<Self, GpuError> {
        let calls = home.calls();
        let _current = home.context.enter()?;
        let host: *mut c_void = std::ptr::from_ref(board).cast_mut().cast();
        let flags = sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP;
        // SAFETY: pages that stay mapped, and that hold only atomics.
        unsafe { calls.mem_host_register(host, size_of::<Board>(), flags) }?;
        let loaded = Self::load_for(home, host, claim);
        if loaded.is_err() {
            // SAFETY: registered above, and used by nothing yet.
            released("host registration", unsafe { calls.mem_host_unregister(host) });
        }
        loaded
    }

    fn load_for(
        home: &Arc<Home>,
        host: *mut c_void,
        claim: Arc<GpuClaim>,
    ) -> Result<Self, GpuError> {
        let calls = home.calls();
        let (mut board, mut module) = (0, ModuleHandle::NULL);
        let (mut function, mut stream) = (FunctionHandle::NULL, StreamHandle::NULL);
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the places for the answers are ours; the text of the kernel and its name end with
        // a zero. Streams of the highest priority have connections of their own, so that no copy of
        // the library's stands behind the kernel.
        unsafe {
            calls.mem_host_get_device_pointer(&raw mut board, host, 0)?;
            calls.module_load_data(&raw mut module, KERNEL.as_ptr().cast())?;
            let rest = calls
                .module_get_function(&raw mut function, module, c"carrack_copier".as_ptr())
                .and_then(|()| {
                    calls.ctx_get_stream_priority_range(&raw mut least, &raw mut greatest)
                })
                .and_then(|()| {
                    calls.stream_create_with_priority(
                        &raw mut stream,
                        sys::STREAM_NON_BLOCKING,
                        greatest,
                    )
                });
            if let Err(why) = rest {
                released("module", calls.module_unload(module));
                return Err(why);
            }
        }
        Ok(Self { home: Arc::downgrade(home), claim, board, stream, function })
    }

    fn home(&self) -> Result<Arc<Home>, GpuError> {
        let gone = || super::error::error("cuLaunchKernel", super::error::CONTEXT_IS_DESTROYED);
        self.home.upgrade().ok_or_else(gone)
    }
}

impl Launcher for Launch {
    type Board = &'static Board;

    fn address_of_board(&self) -> u64 {
        self.board as u64
    }

    fn launch(&self, generation: u64) -> Result<(), NoKernel> {
        self.claim.check().map_err(NoKernel::Shared)?;
        let home = self.home()?;
        let _current = home.context.enter()?;
        let nanoseconds =
            |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut values = [self.board as u64, generation, nanoseconds(LEASE), nanoseconds(LIFE)];
        let mut arguments =
            values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: the kernel has these four arguments of 8 bytes, which are read before the call
        // returns. It touches its board, which stays, and the memory that commands name, which
        // stays until they are answered.
        unsafe {
            let arguments = arguments.as_mut_ptr();
            home.calls().launch_kernel(
                self.function,
                1,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream,
                arguments,
                null_mut(),
            )?;
        }
        Ok(())
    }

    fn have_ended(&self) -> Result<bool, GpuError> {
        self.home()?.is_idle(self.stream)
    }
}
