//! A program's own use of CUDA: raw calls, through cudarc.

use cudarc::driver::sys as cu;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Fails the test where the driver refuses the user.
#[track_caller]
pub fn ok(result: cu::CUresult) {
    assert_eq!(result, cu::CUresult::CUDA_SUCCESS);
}

/// Returns the calling thread's context.
pub fn current() -> usize {
    let mut context = null_mut();
    // SAFETY: the place for the answer is local.
    unsafe { ok(cu::cuCtxGetCurrent(&raw mut context)) };
    context as usize
}

/// Makes a context current, or none.
pub fn set_current(context: usize) {
    // SAFETY: the tests pass contexts that are alive, or 0.
    unsafe { ok(cu::cuCtxSetCurrent(context as cu::CUcontext)) };
}

/// Returns a device's primary context, retained to the end of the program.
pub fn primary(device: i32) -> usize {
    let mut context = null_mut();
    // SAFETY: the place for the answer is local.
    unsafe { ok(cu::cuDevicePrimaryCtxRetain(&raw mut context, device)) };
    context as usize
}

/// Creates a context of the user's own, which is current when this returns.
pub fn new_context(device: i32) -> usize {
    let mut context = null_mut();
    // SAFETY: the place for the answer is local; no parameters means the defaults.
    unsafe { ok(cu::cuCtxCreate_v4(&raw mut context, null_mut(), 0, device)) };
    context as usize
}

pub fn destroy_context(context: usize) {
    // SAFETY: made by `new_context`, and not used by the test afterwards.
    unsafe { ok(cu::cuCtxDestroy_v2(context as cu::CUcontext)) };
}

/// Allocates memory in the current context, as `cudaMalloc` does.
pub fn alloc(len: usize) -> usize {
    let mut ptr = 0;
    // SAFETY: the place for the answer is local.
    unsafe { ok(cu::cuMemAlloc_v2(&raw mut ptr, len)) };
    usize::try_from(ptr).unwrap()
}

pub fn free(ptr: usize) {
    // SAFETY: made by `alloc`, and not used by the test afterwards.
    unsafe { ok(cu::cuMemFree_v2(ptr as u64)) };
}

/// Creates a stream in the current context. `flags` say whether the legacy default stream waits for
/// it.
pub fn stream(flags: u32) -> usize {
    let mut stream = null_mut();
    // SAFETY: the place for the answer is local.
    unsafe { ok(cu::cuStreamCreate(&raw mut stream, flags)) };
    stream as usize
}

/// Begins to capture a stream into a graph, in the mode in which other threads may not make every
/// call meanwhile.
pub fn begin_capture(stream: usize) {
    let mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a stream made by `stream`.
    unsafe { ok(cu::cuStreamBeginCapture_v2(stream as cu::CUstream, mode)) };
}

/// Ends the capture and returns the driver's code: a call of another thread may have spoilt the
/// graph.
pub fn end_capture(stream: usize) -> u32 {
    let mut graph = null_mut();
    // SAFETY: as above; the place for the answer is local.
    unsafe { cu::cuStreamEndCapture(stream as cu::CUstream, &raw mut graph) as u32 }
}

/// Creates an event without a time, in the current context.
pub fn event() -> usize {
    let mut event = null_mut();
    // SAFETY: the place for the answer is local.
    unsafe { ok(cu::cuEventCreate(&raw mut event, 2)) };
    event as usize
}

pub fn record(event: usize, stream: usize) {
    // SAFETY: made by `event` and `stream`, in the current context.
    unsafe { ok(cu::cuEventRecord(event as cu::CUevent, stream as cu::CUstream)) };
}

pub fn synchronize(stream: usize) {
    // SAFETY: a stream that is alive, or a default one.
    unsafe { ok(cu::cuStreamSynchronize(stream as cu::CUstream)) };
}

/// Waits for all work of the current context, as `cudaDeviceSynchronize` does.
pub fn synchronize_all() {
    // SAFETY: no arguments.
    unsafe { ok(cu::cuCtxSynchronize()) };
}

/// VMM memory: a range of `handles` allocations of `granule` bytes each, with access for `devices`
/// only.
pub struct Mapping {
    pub ptr: usize,
    pub len: usize,
    /// Bytes of addresses that are reserved.
    span: usize,
}

impl Mapping {
    pub fn granule(owner: i32) -> usize {
        let mut granule = 0;
        let prop = Self::prop(owner);
        let which = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the places for question and answer are local.
        unsafe { ok(cu::cuMemGetAllocationGranularity(&raw mut granule, &raw const prop, which)) };
        granule
    }

    pub fn new(owner: i32, handles: usize, devices: &[i32]) -> Self {
        let (granule, prop) = (Self::granule(owner), Self::prop(owner));
        let (len, mut ptr) = (granule * handles, 0);
        // SAFETY: addresses that were just reserved are mapped piece by piece, and given access
        // to.
        unsafe {
            // Nothing is mapped behind it.
            ok(cu::cuMemAddressReserve(&raw mut ptr, len + granule, 0, 0, 0));
            for at in 0..handles {
                let mut handle = 0;
                ok(cu::cuMemCreate(&raw mut handle, granule, &raw const prop, 0));
                ok(cu::cuMemMap(ptr + (at * granule) as u64, granule, 0, handle, 0));
                ok(cu::cuMemRelease(handle));
            }
            for &device in devices {
                let access = cu::CUmemAccessDesc {
                    location: Self::location(device),
                    flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                };
                ok(cu::cuMemSetAccess(ptr, len, &raw const access, 1));
            }
        }
        Self { ptr: usize::try_from(ptr).unwrap(), len, span: len + granule }
    }

    /// Puts another allocation in the place of one of them.
    pub fn remap(&self, owner: i32, at: usize) {
        let (granule, prop, mut handle) = (Self::granule(owner), Self::prop(owner), 0);
        let ptr = (self.ptr + at * granule) as u64;
        let access = cu::CUmemAccessDesc {
            location: Self::location(owner),
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a piece of this value's own range, which is not in use.
        unsafe {
            ok(cu::cuMemUnmap(ptr, granule));
            ok(cu::cuMemCreate(&raw mut handle, granule, &raw const prop, 0));
            ok(cu::cuMemMap(ptr, granule, 0, handle, 0));
            ok(cu::cuMemRelease(handle));
            ok(cu::cuMemSetAccess(ptr, granule, &raw const access, 1));
        }
    }

    fn location(device: i32) -> cu::CUmemLocation {
        cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
    }

    fn prop(owner: i32) -> cu::CUmemAllocationProp {
        // SAFETY: plain data, of which zero means nothing asked for.
        let mut prop: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location = Self::location(owner);
        prop
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and used no more.
        unsafe {
            ok(cu::cuMemUnmap(self.ptr as u64, self.len));
            ok(cu::cuMemAddressFree(self.ptr as u64, self.span));
        }
    }
}

/// A kernel that runs until a word of pinned memory is not 0, or for five seconds.
const SPIN: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 flag)
{
    .reg .u64 %flag, %start, %now, %gone;
    .reg .u32 %word;
    .reg .pred %stop;
    ld.param.u64 %flag, [flag];
    mov.u64 %start, %globaltimer;
LOOP:
    ld.volatile.u32 %word, [%flag];
    setp.ne.u32 %stop, %word, 0;
    @%stop bra DONE;
    mov.u64 %now, %globaltimer;
    sub.u64 %gone, %now, %start;
    setp.gt.u64 %stop, %gone, 5000000000;
    @%stop bra DONE;
    bra LOOP;
DONE:
    ret;
}
\0";

/// Launches it, on a stream or on the legacy default stream (0), in the current context.
pub fn spin(stream: usize, flag: usize) {
    let (mut module, mut function, mut flag) = (null_mut(), null_mut(), flag as u64);
    let mut arguments: [*mut c_void; 1] = [(&raw mut flag).cast()];
    // SAFETY: the text is a kernel with one argument, which is read before the call returns. The
    // word that it names stays until the kernel has ended.
    unsafe {
        ok(cu::cuModuleLoadData(&raw mut module, SPIN.as_ptr().cast()));
        ok(cu::cuModuleGetFunction(&raw mut function, module, c"spin".as_ptr()));
        let stream = stream as cu::CUstream;
        ok(cu::cuLaunchKernel(
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            stream,
            arguments.as_mut_ptr(),
            null_mut(),
        ));
    }
}

/// Returns the flags of the current context.
pub fn context_flags() -> u32 {
    let mut flags = 0;
    // SAFETY: the place for the answer is local.
    unsafe { ok(cu::cuCtxGetFlags(&raw mut flags)) };
    flags
}

/// Starts a plain copy on a stream, as a program does.
pub fn copy_async(dst: usize, src: usize, len: usize, stream: usize) {
    // SAFETY: the callers keep the memory until they have synchronised.
    unsafe { ok(cu::cuMemcpyDtoDAsync_v2(dst as u64, src as u64, len, stream as cu::CUstream)) };
}

/// Returns `true` if the driver refuses a plain copy between device addresses.
pub fn copy_is_refused(dst: usize, src: usize, len: usize) -> bool {
    // SAFETY: the callers give allocated ranges; what is not accessible is refused.
    unsafe { cu::cuMemcpyDtoD_v2(dst as u64, src as u64, len) != cu::CUresult::CUDA_SUCCESS }
}

/// Turns on peer access of the current context to another, as a program may have done earlier.
pub fn enable_peer(context: usize) {
    // SAFETY: a context that is alive.
    let result = unsafe { cu::cuCtxEnablePeerAccess(context as cu::CUcontext, 0) };
    let already = cu::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    assert!([cu::CUresult::CUDA_SUCCESS, already].contains(&result), "{result:?}");
}

/// Returns the driver's own name of a code.
pub fn name_of(code: i32) -> String {
    let mut name = null();
    // SAFETY: the place for the answer is local, and the codes asked for are ones of the headers.
    unsafe {
        let code: cu::CUresult = std::mem::transmute(code);
        ok(cu::cuGetErrorName(code, &raw mut name));
        std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned()
    }
}

/// Allocates memory of a device's default pool, ordered by a stream, as `cudaMallocAsync` does, in
/// the current context. `None`: the pool has no more.
pub fn alloc_from_pool(device: i32, len: usize, stream: usize) -> Option<usize> {
    let (mut pool, mut ptr) = (null_mut(), 0);
    // SAFETY: the places for the answers are local, and the stream is alive.
    let result = unsafe {
        ok(cu::cuDeviceGetDefaultMemPool(&raw mut pool, device));
        cu::cuMemAllocFromPoolAsync(&raw mut ptr, len, pool, stream as cu::CUstream)
    };
    synchronize(stream);
    (result == cu::CUresult::CUDA_SUCCESS).then(|| usize::try_from(ptr).unwrap())
}

pub fn free_to_pool(ptr: usize, stream: usize) {
    // SAFETY: made by `alloc_from_pool`, and not used by the test afterwards.
    unsafe { ok(cu::cuMemFreeAsync(ptr as u64, stream as cu::CUstream)) };
}
