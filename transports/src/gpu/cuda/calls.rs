//! The driver's calls: one table, made when the library is opened.
//!
//! Each entry may be missing; calling it then is an error that names it. Results are integers, so
//! no answer of a driver is undefined behaviour.

use super::error::{self, MISSING_CALL, NOT_READY};
use super::rows::{Copy2d, Copy3d, CopyAttributes};
use super::sys::{
    AccessDesc, AllocationHandle, AllocationProp, Bytes64, ContextHandle, CuDevice, DevicePtr,
    EventHandle, FunctionHandle, Location, MemOp, ModuleHandle, PoolHandle, PoolProps,
    StreamHandle, Uuid,
};
use crate::dynamic::find;
use crate::gpu::GpuError;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::mem::ManuallyDrop;

macro_rules! calls {
    (
        questions { $($question:ident($about:ident: $kind:ty) = $asked:literal;)* }
        $($name:ident($($arg:ident: $type:ty),*) = $symbol:literal $(or $older:literal)?;)*
    ) => {
        /// The calls that this driver's library has.
        pub(super) struct Calls {
            /// Path of the library.
            pub(super) path: String,
            /// Library, never closed: the driver has threads and exit handlers of its own.
            _library: ManuallyDrop<Library>,
            $($name: Option<unsafe extern "C" fn($($type),*) -> c_int>,)*
            $($question: Option<unsafe extern "C" fn($kind) -> c_int>,)*
        }

        impl Calls {
            /// Looks all of them up.
            pub(super) fn of(library: Library, path: String) -> Self {
                $(let $name = find(&library, $symbol)$(.or_else(|| find(&library, $older)))?;)*
                $(let $question = find(&library, $asked);)*
                $(
                    // SAFETY: a symbol of this name is a function of this signature: the driver's
                    // interface does not change under a name. An entry is a nullable function
                    // pointer of the C calling convention.
                    let $name = $name.map(|found| unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($type),*) -> c_int,
                        >(found)
                    });
                )*
                $(
                    // SAFETY: as above.
                    let $question = $question.map(|found| unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($kind) -> c_int,
                        >(found)
                    });
                )*
                Self { path, _library: ManuallyDrop::new(library), $($name,)* $($question),* }
            }

            /// Returns the names of the calls that the library lacks.
            pub(super) fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.is_none() { missing.push($symbol); })*
                $(if self.$question.is_none() { missing.push($asked); })*
                missing
            }

            $(
                /// Makes the driver's call of that name. The driver's code becomes an error.
                ///
                /// # Safety
                /// As the driver's documentation of the call of that name says.
                #[inline]
                #[allow(clippy::too_many_arguments, reason = "the driver's")]
                pub(super) unsafe fn $name(&self, $($arg: $type),*) -> Result<(), GpuError> {
                    let Some(call) = self.$name else { return Err(self.lacks($symbol)) };
                    // SAFETY: passed on from the caller.
                    match unsafe { call($($arg),*) } {
                        0 => Ok(()),
                        code => Err(self.error($symbol, code)),
                    }
                }
            )*

            $(
                /// Returns `true` if the event has fired, or the stream is idle. `NOT_READY` is
                /// the most frequent answer, and no error.
                ///
                /// # Safety
                /// As the driver's documentation of the call of that name says.
                #[inline]
                pub(super) unsafe fn $question(&self, $about: $kind) -> Result<bool, GpuError> {
                    let Some(call) = self.$question else { return Err(self.lacks($asked)) };
                    // SAFETY: passed on from the caller.
                    match unsafe { call($about) } {
                        0 => Ok(true),
                        NOT_READY => Ok(false),
                        code => Err(self.error($asked, code)),
                    }
                }
            )*
        }
    };
}

calls! {
    questions {
        stream_query(stream: StreamHandle) = "cuStreamQuery";
        event_query(event: EventHandle) = "cuEventQuery";
    }

    init(flags: c_uint) = "cuInit";
    driver_get_version(version: *mut c_int) = "cuDriverGetVersion";
    get_error_name(code: c_int, name: *mut *const c_char) = "cuGetErrorName";

    device_get_count(count: *mut c_int) = "cuDeviceGetCount";
    device_get(device: *mut CuDevice, ordinal: c_int) = "cuDeviceGet";
    device_get_name(name: *mut c_char, len: c_int, device: CuDevice) = "cuDeviceGetName";
    device_get_uuid(uuid: *mut Uuid, device: CuDevice) = "cuDeviceGetUuid_v2" or "cuDeviceGetUuid";
    device_get_pci_bus_id(id: *mut c_char, len: c_int, device: CuDevice) = "cuDeviceGetPCIBusId";
    device_total_mem(bytes: *mut usize, device: CuDevice) = "cuDeviceTotalMem_v2";
    device_get_attribute(value: *mut c_int, attribute: c_int, device: CuDevice)
        = "cuDeviceGetAttribute";
    device_can_access_peer(can: *mut c_int, device: CuDevice, peer: CuDevice)
        = "cuDeviceCanAccessPeer";
    device_get_p2p_attribute(value: *mut c_int, attribute: c_int, from: CuDevice, to: CuDevice)
        = "cuDeviceGetP2PAttribute";
    device_primary_ctx_retain(context: *mut ContextHandle, device: CuDevice)
        = "cuDevicePrimaryCtxRetain";
    device_primary_ctx_release(device: CuDevice)
        = "cuDevicePrimaryCtxRelease_v2" or "cuDevicePrimaryCtxRelease";
    device_primary_ctx_get_state(device: CuDevice, flags: *mut c_uint, active: *mut c_int)
        = "cuDevicePrimaryCtxGetState";

    ctx_get_current(context: *mut ContextHandle) = "cuCtxGetCurrent";
    ctx_set_current(context: ContextHandle) = "cuCtxSetCurrent";
    ctx_push_current(context: ContextHandle) = "cuCtxPushCurrent_v2";
    ctx_pop_current(context: *mut ContextHandle) = "cuCtxPopCurrent_v2";
    ctx_get_id(context: ContextHandle, id: *mut c_ulonglong) = "cuCtxGetId";
    ctx_get_flags(flags: *mut c_uint) = "cuCtxGetFlags";
    ctx_set_flags(flags: c_uint) = "cuCtxSetFlags";
    ctx_get_device(device: *mut CuDevice) = "cuCtxGetDevice";
    ctx_enable_peer_access(peer: ContextHandle, flags: c_uint) = "cuCtxEnablePeerAccess";

    mem_get_address_range(base: *mut DevicePtr, len: *mut usize, ptr: DevicePtr)
        = "cuMemGetAddressRange_v2";
    pointer_get_attribute(data: *mut c_void, attribute: c_int, ptr: DevicePtr)
        = "cuPointerGetAttribute";
    pointer_get_attributes(
        count: c_uint, attributes: *const c_int, data: *const *mut c_void, ptr: DevicePtr
    ) = "cuPointerGetAttributes";
    pointer_set_attribute(value: *const c_void, attribute: c_int, ptr: DevicePtr)
        = "cuPointerSetAttribute";

    mem_get_info(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2";
    mem_alloc(ptr: *mut DevicePtr, len: usize) = "cuMemAlloc_v2";
    mem_free(ptr: DevicePtr) = "cuMemFree_v2";
    mem_alloc_managed(ptr: *mut DevicePtr, len: usize, flags: c_uint) = "cuMemAllocManaged";
    mem_host_alloc(ptr: *mut *mut c_void, len: usize, flags: c_uint) = "cuMemHostAlloc";
    mem_free_host(ptr: *mut c_void) = "cuMemFreeHost";
    mem_host_register(ptr: *mut c_void, len: usize, flags: c_uint)
        = "cuMemHostRegister_v2" or "cuMemHostRegister";
    mem_host_unregister(ptr: *mut c_void) = "cuMemHostUnregister";
    mem_host_get_device_pointer(device: *mut DevicePtr, host: *mut c_void, flags: c_uint)
        = "cuMemHostGetDevicePointer_v2";

    mem_get_allocation_granularity(bytes: *mut usize, prop: *const AllocationProp, option: c_int)
        = "cuMemGetAllocationGranularity";
    mem_create(
        handle: *mut AllocationHandle, len: usize, prop: *const AllocationProp, flags: c_ulonglong
    ) = "cuMemCreate";
    mem_release(handle: AllocationHandle) = "cuMemRelease";
    mem_address_reserve(
        ptr: *mut DevicePtr, len: usize, align: usize, at: DevicePtr, flags: c_ulonglong
    ) = "cuMemAddressReserve";
    mem_address_free(ptr: DevicePtr, len: usize) = "cuMemAddressFree";
    mem_map(ptr: DevicePtr, len: usize, offset: usize, handle: AllocationHandle, flags: c_ulonglong)
        = "cuMemMap";
    mem_unmap(ptr: DevicePtr, len: usize) = "cuMemUnmap";
    mem_set_access(ptr: DevicePtr, len: usize, access: *const AccessDesc, count: usize)
        = "cuMemSetAccess";
    mem_get_access(flags: *mut c_ulonglong, location: *const Location, ptr: DevicePtr)
        = "cuMemGetAccess";
    mem_export_to_shareable_handle(
        to: *mut c_void, handle: AllocationHandle, kind: c_int, flags: c_ulonglong
    ) = "cuMemExportToShareableHandle";
    mem_import_from_shareable_handle(handle: *mut AllocationHandle, from: *mut c_void, kind: c_int)
        = "cuMemImportFromShareableHandle";
    mem_get_handle_for_address_range(
        to: *mut c_void, ptr: DevicePtr, len: usize, kind: c_int, flags: c_ulonglong
    ) = "cuMemGetHandleForAddressRange";
    flush_gpu_direct_rdma_writes(target: c_int, scope: c_int) = "cuFlushGPUDirectRDMAWrites";
    mem_retain_allocation_handle(handle: *mut AllocationHandle, ptr: *mut c_void)
        = "cuMemRetainAllocationHandle";

    mem_pool_create(pool: *mut PoolHandle, props: *const PoolProps) = "cuMemPoolCreate";
    mem_pool_destroy(pool: PoolHandle) = "cuMemPoolDestroy";
    mem_pool_set_access(pool: PoolHandle, access: *const AccessDesc, count: usize)
        = "cuMemPoolSetAccess";
    mem_alloc_from_pool_async(
        ptr: *mut DevicePtr, len: usize, pool: PoolHandle, stream: StreamHandle
    ) = "cuMemAllocFromPoolAsync";
    mem_free_async(ptr: DevicePtr, stream: StreamHandle) = "cuMemFreeAsync";
    mem_pool_export_to_shareable_handle(
        to: *mut c_void, pool: PoolHandle, kind: c_int, flags: c_ulonglong
    ) = "cuMemPoolExportToShareableHandle";
    mem_pool_import_from_shareable_handle(
        pool: *mut PoolHandle, from: *mut c_void, kind: c_int, flags: c_ulonglong
    ) = "cuMemPoolImportFromShareableHandle";
    mem_pool_export_pointer(data: *mut Bytes64, ptr: DevicePtr) = "cuMemPoolExportPointer";
    mem_pool_import_pointer(ptr: *mut DevicePtr, pool: PoolHandle, data: *mut Bytes64)
        = "cuMemPoolImportPointer";

    ipc_get_mem_handle(handle: *mut Bytes64, ptr: DevicePtr) = "cuIpcGetMemHandle";
    ipc_open_mem_handle(ptr: *mut DevicePtr, handle: Bytes64, flags: c_uint)
        = "cuIpcOpenMemHandle_v2";
    ipc_close_mem_handle(ptr: DevicePtr) = "cuIpcCloseMemHandle";
    ipc_get_event_handle(handle: *mut Bytes64, event: EventHandle) = "cuIpcGetEventHandle";
    ipc_open_event_handle(event: *mut EventHandle, handle: Bytes64) = "cuIpcOpenEventHandle";

    memcpy_htod_async(dst: DevicePtr, src: *const c_void, len: usize, stream: StreamHandle)
        = "cuMemcpyHtoDAsync_v2";
    memcpy_dtoh_async(dst: *mut c_void, src: DevicePtr, len: usize, stream: StreamHandle)
        = "cuMemcpyDtoHAsync_v2";
    memcpy_dtod_async(dst: DevicePtr, src: DevicePtr, len: usize, stream: StreamHandle)
        = "cuMemcpyDtoDAsync_v2";
    memcpy_batch_async(
        to: *const DevicePtr, from: *const DevicePtr, lens: *const usize, count: usize,
        attributes: *const CopyAttributes, begin: *const usize, sorts: usize, stream: StreamHandle
    ) = "cuMemcpyBatchAsync_v2";
    memcpy_batch_async_first(
        to: *const DevicePtr, from: *const DevicePtr, lens: *const usize, count: usize,
        attributes: *const CopyAttributes, begin: *const usize, sorts: usize, failed: *mut usize,
        stream: StreamHandle
    ) = "cuMemcpyBatchAsync";
    memcpy_2d_async(copy: *const Copy2d, stream: StreamHandle) = "cuMemcpy2DAsync_v2";
    memcpy_3d_async(copy: *const Copy3d, stream: StreamHandle) = "cuMemcpy3DAsync_v2";
    memcpy_peer_async(
        dst: DevicePtr, dst_context: ContextHandle, src: DevicePtr, src_context: ContextHandle,
        len: usize, stream: StreamHandle
    ) = "cuMemcpyPeerAsync";

    thread_exchange_stream_capture_mode(mode: *mut c_int) = "cuThreadExchangeStreamCaptureMode";
    stream_create(stream: *mut StreamHandle, flags: c_uint) = "cuStreamCreate";
    stream_destroy(stream: StreamHandle) = "cuStreamDestroy_v2";
    stream_is_capturing(stream: StreamHandle, status: *mut c_int) = "cuStreamIsCapturing";
    stream_get_ctx(stream: StreamHandle, context: *mut ContextHandle) = "cuStreamGetCtx";
    stream_wait_event(stream: StreamHandle, event: EventHandle, flags: c_uint)
        = "cuStreamWaitEvent";
    stream_synchronize(stream: StreamHandle) = "cuStreamSynchronize";
    stream_write_value64(stream: StreamHandle, at: DevicePtr, value: u64, flags: c_uint)
        = "cuStreamWriteValue64_v2";
    stream_write_value32(stream: StreamHandle, at: DevicePtr, value: u32, flags: c_uint)
        = "cuStreamWriteValue32_v2";
    stream_wait_value64(stream: StreamHandle, at: DevicePtr, value: u64, flags: c_uint)
        = "cuStreamWaitValue64_v2";
    stream_batch_mem_op(stream: StreamHandle, count: c_uint, operations: *mut MemOp, flags: c_uint)
        = "cuStreamBatchMemOp_v2";
    stream_wait_value32(stream: StreamHandle, at: DevicePtr, value: u32, flags: c_uint)
        = "cuStreamWaitValue32_v2";

    stream_create_with_priority(stream: *mut StreamHandle, flags: c_uint, priority: c_int)
        = "cuStreamCreateWithPriority";
    ctx_get_stream_priority_range(least: *mut c_int, greatest: *mut c_int)
        = "cuCtxGetStreamPriorityRange";

    module_load_data(module: *mut ModuleHandle, image: *const c_void) = "cuModuleLoadData";
    module_unload(module: ModuleHandle) = "cuModuleUnload";
    module_get_function(function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char)
        = "cuModuleGetFunction";
    launch_kernel(
        function: FunctionHandle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared: c_uint, stream: StreamHandle,
        arguments: *mut *mut c_void, extra: *mut *mut c_void
    ) = "cuLaunchKernel";

    event_create(event: *mut EventHandle, flags: c_uint) = "cuEventCreate";
    event_destroy(event: EventHandle) = "cuEventDestroy_v2";
    event_record(event: EventHandle, stream: StreamHandle) = "cuEventRecord";
    event_synchronize(event: EventHandle) = "cuEventSynchronize";
}

impl Calls {
    /// Returns the driver's answer as an error. The driver names a code that we have no name for.
    #[cold]
    pub(super) fn error(&self, call: &'static str, code: c_int) -> GpuError {
        let mut error = error::error(call, code);
        if error::describe(code).is_none()
            && let Some(name) = self.name_of(code)
        {
            error.name = name;
        }
        error
    }

    fn name_of(&self, code: c_int) -> Option<&'static str> {
        let mut name = std::ptr::null();
        // SAFETY: the place for the answer is ours.
        unsafe { self.get_error_name(code, &raw mut name) }.ok()?;
        if name.is_null() {
            return None;
        }
        // SAFETY: the driver answers with a string of its own that ends in a zero, and its library
        // is never closed.
        let name: &'static CStr = unsafe { CStr::from_ptr(name) };
        name.to_str().ok().map(|name| name.strip_prefix("CUDA_ERROR_").unwrap_or(name))
    }

    #[cold]
    fn lacks(&self, symbol: &'static str) -> GpuError {
        let hint = format!("{} has no such call: a newer driver has it", self.path);
        error::because(symbol, MISSING_CALL, hint)
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calls({}, without {:?})", self.path, self.missing())
    }
}
