//! The driver's types and numbers, as its headers have them (`cuda.h` of 11.0 to 13.0).
//!
//! Handles are opaque to us, so they are words. Enumerations are plain integers: a newer driver
//! may answer with a number that no header of today has. `layout` checks sizes and offsets against
//! those of cudarc. `rows` has the structures of calls for many copies.

use crate::gpu::Rights;
use std::ffi::{c_int, c_uint};

/// `CUdevice`: this process's number of a device.
pub(super) type CuDevice = c_int;
/// `CUdeviceptr`: as long as an address.
pub(super) type DevicePtr = usize;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub(super) struct $name(pub(super) usize);

        impl $name {
            /// Null, which is no handle.
            pub(super) const NULL: Self = Self(0);
        }
    )*};
}

handles! {
    /// `CUcontext`.
    ContextHandle,
    /// `CUstream`.
    StreamHandle,
    /// `CUevent`.
    EventHandle,
    /// `CUmemoryPool`.
    PoolHandle,
    /// `CUmodule`.
    ModuleHandle,
    /// `CUfunction`.
    FunctionHandle,
}

/// `CUmemGenericAllocationHandle`.
pub(super) type AllocationHandle = u64;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Uuid(pub(super) [u8; 16]);

/// `CUipcMemHandle`, `CUipcEventHandle`, `CUmemFabricHandle` and `CUmemPoolPtrExportData`: 64
/// bytes each, handed over by address or by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Bytes64(pub(super) [u8; 64]);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

impl Location {
    /// Names the memory of a device.
    pub(super) const fn device(device: CuDevice) -> Self {
        Self { kind: 1, id: device }
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationProp {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: Location,
    pub(super) win32: usize,
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

impl AllocationProp {
    /// Describes memory of a device that stays where it is.
    pub(super) const fn of(device: CuDevice, handle_types: c_int, gpu_direct_rdma: bool) -> Self {
        Self {
            kind: PINNED,
            handle_types,
            location: Location::device(device),
            win32: 0,
            compression: 0,
            gpu_direct_rdma: gpu_direct_rdma as u8,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessDesc {
    pub(super) location: Location,
    pub(super) flags: c_int,
}

impl AccessDesc {
    /// Gives a device the right to read and write.
    pub(super) const fn read_write(device: CuDevice) -> Self {
        Self::of(device, Rights::ReadWrite)
    }

    /// Gives a device these rights.
    pub(super) const fn of(device: CuDevice, rights: Rights) -> Self {
        let flags = match rights {
            Rights::Read => ACCESS_READ,
            Rights::ReadWrite => ACCESS_READ_WRITE,
        };
        Self { location: Location::device(device), flags }
    }
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolProps {
    pub(super) kind: c_int,
    pub(super) handle_types: c_int,
    pub(super) location: Location,
    pub(super) win32: usize,
    pub(super) max_size: usize,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 54],
}

impl PoolProps {
    /// Describes a pool of a device's memory, without a bound.
    pub(super) const fn of(device: CuDevice, handle_types: c_int) -> Self {
        let location = Location::device(device);
        Self {
            kind: PINNED,
            handle_types,
            location,
            win32: 0,
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;

/// `CUmemAllocationHandleType`.
pub(super) mod handle_type {
    use std::ffi::c_int;
    pub(in super::super) const POSIX_FD: c_int = 1;
    pub(in super::super) const FABRIC: c_int = 8;
}

/// `CUstreamBatchMemOpParams`, of a wait or a write.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MemOp {
    pub(super) operation: c_uint,
    pub(super) at: DevicePtr,
    pub(super) value: u64,
    pub(super) flags: c_uint,
    pub(super) alias: DevicePtr,
    pub(super) reserved: u64,
}

impl MemOp {
    /// Describes an operation on a word of 64 bits.
    pub(super) const fn new(operation: c_uint, at: DevicePtr, value: u64, flags: c_uint) -> Self {
        Self { operation, at, value, flags, alias: 0, reserved: 0 }
    }
}

/// `CUpointer_attribute`.
pub(super) mod pointer {
    use std::ffi::c_int;
    pub(in super::super) const CONTEXT: c_int = 1;
    pub(in super::super) const MEMORY_TYPE: c_int = 2;
    pub(in super::super) const SYNC_MEMOPS: c_int = 6;
    pub(in super::super) const BUFFER_ID: c_int = 7;
    pub(in super::super) const IS_MANAGED: c_int = 8;
    pub(in super::super) const DEVICE_ORDINAL: c_int = 9;
    pub(in super::super) const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
    pub(in super::super) const RANGE_START_ADDR: c_int = 11;
    pub(in super::super) const RANGE_SIZE: c_int = 12;
    pub(in super::super) const ALLOWED_HANDLE_TYPES: c_int = 14;
    pub(in super::super) const MEMPOOL_HANDLE: c_int = 17;
    pub(in super::super) const MAPPING_SIZE: c_int = 18;
    pub(in super::super) const MAPPING_BASE_ADDR: c_int = 19;
}

/// `CUmemorytype`.
pub(super) mod memory_type {
    pub(in super::super) const HOST: u32 = 1;
    pub(in super::super) const DEVICE: u32 = 2;
    pub(in super::super) const UNIFIED: u32 = 4;
}

/// `CUdevice_attribute`.
pub(super) mod device {
    use std::ffi::c_int;
    pub(in super::super) const COMPUTE_MODE: c_int = 20;
    pub(in super::super) const HOST_POINTER_FOR_REGISTERED: c_int = 91;
    pub(in super::super) const GPU_DIRECT_RDMA_WITH_VMM: c_int = 110;
    pub(in super::super) const GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: c_int = 117;
    pub(in super::super) const GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
    pub(in super::super) const DMA_BUF_SUPPORTED: c_int = 124;
    pub(in super::super) const FABRIC_SUPPORTED: c_int = 128;
}

/// `CUdevice_P2PAttribute`.
pub(super) mod p2p {
    use std::ffi::c_int;
    pub(in super::super) const PERFORMANCE_RANK: c_int = 1;
    pub(in super::super) const ACCESS_SUPPORTED: c_int = 2;
    pub(in super::super) const NATIVE_ATOMIC_SUPPORTED: c_int = 3;
}

/// `CU_COMPUTEMODE_DEFAULT`.
pub(super) const COMPUTE_MODE_DEFAULT: c_int = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`.
pub(super) const ACCESS_READ: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const ACCESS_READ_WRITE: c_int = 3;
/// `CU_STREAM_NON_BLOCKING`.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_EVENT_INTERPROCESS`.
pub(super) const EVENT_INTERPROCESS: c_uint = 4;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
pub(super) const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// `CU_CTX_SYNC_MEMOPS`.
pub(super) const CTX_SYNC_MEMOPS: c_uint = 0x80;
/// `CU_MEMHOSTALLOC_PORTABLE`, `CU_MEMHOSTREGISTER_PORTABLE`.
pub(super) const HOST_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
pub(super) const HOST_DEVICE_MAP: c_uint = 2;
/// `CU_MEM_ATTACH_GLOBAL`.
pub(super) const ATTACH_GLOBAL: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(super) const GRANULARITY_MINIMUM: c_int = 0;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
pub(super) const GRANULARITY_RECOMMENDED: c_int = 1;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
pub(super) const WAIT_REACHED: c_uint = 0;
/// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`.
pub(super) const WRITE_WITHOUT_FENCE: c_uint = 1;
/// `CU_STREAM_MEM_OP_WAIT_VALUE_64`.
pub(super) const MEM_OP_WAIT_64: c_uint = 4;
/// `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
pub(super) const MEM_OP_WRITE_64: c_uint = 5;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub(super) const RANGE_HANDLE_DMA_BUF: c_int = 1;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
pub(super) const FLUSH_TARGET_CURRENT_CONTEXT: c_int = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
pub(super) const FLUSH_TO_OWNER: c_int = 100;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`, a bit.
pub(super) const FLUSHED_BY_HOST: c_int = 1;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`; more is more.
pub(super) const ORDERED_FOR_OWNER: c_int = 100;

/// Asserts that one of our structures has the layout of cudarc's.
#[cfg(test)]
macro_rules! same {
    ($ours:ty, $theirs:ty $(, $field:ident = $their_field:ident)*) => {
        assert_eq!(std::mem::size_of::<$ours>(), std::mem::size_of::<$theirs>(), stringify!($ours));
        let aligned = std::mem::align_of::<$ours>() <= std::mem::align_of::<$theirs>();
        assert!(aligned, stringify!($ours));
        $(
            assert_eq!(
                std::mem::offset_of!($ours, $field),
                std::mem::offset_of!($theirs, $their_field),
                stringify!($field)
            );
        )*
    };
}

#[cfg(test)]
pub(super) use same;

#[cfg(test)]
mod layout {
    //! cudarc's bindings are generated from NVIDIA's headers: they are the oracle.

    use super::*;
    use cudarc::driver::sys as theirs;
    use std::mem::offset_of;

    #[test]
    fn our_structures_lie_as_those_of_the_headers_do() {
        same!(Uuid, theirs::CUuuid);
        same!(Bytes64, theirs::CUipcMemHandle);
        same!(Bytes64, theirs::CUipcEventHandle);
        same!(Bytes64, theirs::CUmemFabricHandle);
        same!(Bytes64, theirs::CUmemPoolPtrExportData);
        same!(Location, theirs::CUmemLocation, kind = type_, id = id);
        same!(
            AllocationProp,
            theirs::CUmemAllocationProp,
            kind = type_,
            handle_types = requestedHandleTypes,
            location = location,
            win32 = win32HandleMetaData,
            compression = allocFlags
        );
        same!(AccessDesc, theirs::CUmemAccessDesc, location = location, flags = flags);
        same!(
            PoolProps,
            theirs::CUmemPoolProps,
            kind = allocType,
            handle_types = handleTypes,
            location = location,
            win32 = win32SecurityAttributes,
            max_size = maxSize,
            usage = usage
        );
        same!(
            MemOp,
            theirs::CUstreamBatchMemOpParams_union,
            operation = operation,
            operation = waitValue,
            operation = writeValue
        );
        {
            use theirs::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as Wait;
            use theirs::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as Write;
            for (ours, wait, write) in [
                (offset_of!(MemOp, at), offset_of!(Wait, address), offset_of!(Write, address)),
                (
                    offset_of!(MemOp, value),
                    offset_of!(Wait, __bindgen_anon_1),
                    offset_of!(Write, __bindgen_anon_1),
                ),
                (offset_of!(MemOp, flags), offset_of!(Wait, flags), offset_of!(Write, flags)),
                (offset_of!(MemOp, alias), offset_of!(Wait, alias), offset_of!(Write, alias)),
            ] {
                assert_eq!((ours, ours), (wait, write));
            }
        }
        same!(ContextHandle, theirs::CUcontext);
        same!(StreamHandle, theirs::CUstream);
        same!(EventHandle, theirs::CUevent);
        same!(PoolHandle, theirs::CUmemoryPool);
        same!(ModuleHandle, theirs::CUmodule);
        same!(FunctionHandle, theirs::CUfunction);
        same!(DevicePtr, theirs::CUdeviceptr);
        same!(AllocationHandle, theirs::CUmemGenericAllocationHandle);
    }

    #[test]
    fn our_numbers_are_those_of_the_headers() {
        use theirs::CUGPUDirectRDMAWritesOrdering_enum as Ordering;
        use theirs::CUdevice_P2PAttribute_enum as P2p;
        use theirs::CUdevice_attribute_enum as Attribute;
        use theirs::CUflushGPUDirectRDMAWritesOptions_enum as FlushOptions;
        use theirs::CUflushGPUDirectRDMAWritesScope_enum as FlushScope;
        use theirs::CUflushGPUDirectRDMAWritesTarget_enum as FlushTarget;
        use theirs::CUpointer_attribute_enum as Pointer;
        use theirs::CUstreamBatchMemOpType_enum as Both;
        use theirs::CUstreamWriteValue_flags_enum as Write;
        let pairs = [
            (pointer::CONTEXT, Pointer::CU_POINTER_ATTRIBUTE_CONTEXT as i32),
            (pointer::MEMORY_TYPE, Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as i32),
            (pointer::SYNC_MEMOPS, Pointer::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as i32),
            (pointer::BUFFER_ID, Pointer::CU_POINTER_ATTRIBUTE_BUFFER_ID as i32),
            (pointer::IS_MANAGED, Pointer::CU_POINTER_ATTRIBUTE_IS_MANAGED as i32),
            (pointer::DEVICE_ORDINAL, Pointer::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as i32),
            (
                pointer::IS_LEGACY_CUDA_IPC_CAPABLE,
                Pointer::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as i32,
            ),
            (pointer::RANGE_START_ADDR, Pointer::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as i32),
            (pointer::RANGE_SIZE, Pointer::CU_POINTER_ATTRIBUTE_RANGE_SIZE as i32),
            (
                pointer::ALLOWED_HANDLE_TYPES,
                Pointer::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as i32,
            ),
            (pointer::MAPPING_SIZE, Pointer::CU_POINTER_ATTRIBUTE_MAPPING_SIZE as i32),
            (pointer::MAPPING_BASE_ADDR, Pointer::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as i32),
            (pointer::MEMPOOL_HANDLE, Pointer::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as i32),
            (device::COMPUTE_MODE, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE as i32),
            (COMPUTE_MODE_DEFAULT, theirs::CUcomputemode_enum::CU_COMPUTEMODE_DEFAULT as i32),
            (
                device::HOST_POINTER_FOR_REGISTERED,
                Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM as i32,
            ),
            (
                device::GPU_DIRECT_RDMA_WITH_VMM,
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as i32,
            ),
            (
                device::GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as i32,
            ),
            (
                device::GPU_DIRECT_RDMA_WRITES_ORDERING,
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as i32,
            ),
            (device::DMA_BUF_SUPPORTED, Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED as i32),
            (
                RANGE_HANDLE_DMA_BUF,
                theirs::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as i32,
            ),
            (
                FLUSH_TARGET_CURRENT_CONTEXT,
                FlushTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX as i32,
            ),
            (FLUSH_TO_OWNER, FlushScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as i32),
            (FLUSHED_BY_HOST, FlushOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32),
            (ORDERED_FOR_OWNER, Ordering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32),
            (
                device::FABRIC_SUPPORTED,
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED as i32,
            ),
            (p2p::PERFORMANCE_RANK, P2p::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK as i32),
            (p2p::ACCESS_SUPPORTED, P2p::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED as i32),
            (
                p2p::NATIVE_ATOMIC_SUPPORTED,
                P2p::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED as i32,
            ),
        ];
        let flags = [
            (
                u32::try_from(ACCESS_READ).unwrap(),
                theirs::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READ as u32,
            ),
            (
                u32::try_from(ACCESS_READ_WRITE).unwrap(),
                theirs::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32,
            ),
            (WRITE_WITHOUT_FENCE, Write::CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER as u32),
            (MEM_OP_WAIT_64, Both::CU_STREAM_MEM_OP_WAIT_VALUE_64 as u32),
            (MEM_OP_WRITE_64, Both::CU_STREAM_MEM_OP_WRITE_VALUE_64 as u32),
        ];
        assert!(flags.iter().all(|(ours, headers)| ours == headers), "{flags:?}");
        for (at, (ours, headers)) in pairs.into_iter().enumerate() {
            assert_eq!(ours, headers, "the {at}th");
        }
    }
}
