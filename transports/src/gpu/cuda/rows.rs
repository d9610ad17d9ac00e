//! The driver's structures for copies in batches and of rows, in addition to those of `sys`.

use super::sys::{DevicePtr, Location, memory_type};
use std::ffi::{c_int, c_uint};

/// `CUmemcpyAttributes`: attributes of some copies of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyAttributes {
    pub(super) order: c_int,
    pub(super) src_hint: Location,
    pub(super) dst_hint: Location,
    pub(super) flags: c_uint,
}

impl CopyAttributes {
    /// Sources are read in the order of the stream (`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`). The
    /// hints are for managed memory, which is never copied here.
    pub(super) const IN_ORDER: Self = {
        let nowhere = Location { kind: 0, id: 0 };
        Self { order: 1, src_hint: nowhere, dst_hint: nowhere, flags: 0 }
    };
}

/// One end of `CUDA_MEMCPY2D` and `CUDA_MEMCPY3D`: the address and sort of memory of rows. The
/// driver reads `host` for host memory, else `device`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) addr: usize,
    pub(super) is_host: bool,
    pub(super) pitch: usize,
    /// Rows from one plane to the next.
    pub(super) height: usize,
}

impl Rows {
    const fn memory_type(self) -> c_uint {
        if self.is_host { memory_type::HOST } else { memory_type::DEVICE }
    }

    const fn ends(self) -> (usize, DevicePtr) {
        if self.is_host { (self.addr, 0) } else { (0, self.addr) }
    }
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy2d {
    pub(super) src_x: usize,
    pub(super) src_y: usize,
    pub(super) src_type: c_uint,
    pub(super) src_host: usize,
    pub(super) src_device: DevicePtr,
    pub(super) src_array: usize,
    pub(super) src_pitch: usize,
    pub(super) dst_x: usize,
    pub(super) dst_y: usize,
    pub(super) dst_type: c_uint,
    pub(super) dst_host: usize,
    pub(super) dst_device: DevicePtr,
    pub(super) dst_array: usize,
    pub(super) dst_pitch: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

impl Copy2d {
    /// Copies `height` rows of `width` bytes.
    pub(super) const fn of(dst: Rows, src: Rows, [width, height]: [usize; 2]) -> Self {
        let ((dst_host, dst_device), (src_host, src_device)) = (dst.ends(), src.ends());
        Self {
            src_x: 0,
            src_y: 0,
            src_type: src.memory_type(),
            src_host,
            src_device,
            src_array: 0,
            src_pitch: src.pitch,
            dst_x: 0,
            dst_y: 0,
            dst_type: dst.memory_type(),
            dst_host,
            dst_device,
            dst_array: 0,
            dst_pitch: dst.pitch,
            width,
            height,
        }
    }
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy3d {
    pub(super) src_x: usize,
    pub(super) src_y: usize,
    pub(super) src_z: usize,
    pub(super) src_lod: usize,
    pub(super) src_type: c_uint,
    pub(super) src_host: usize,
    pub(super) src_device: DevicePtr,
    pub(super) src_array: usize,
    pub(super) reserved0: usize,
    pub(super) src_pitch: usize,
    pub(super) src_height: usize,
    pub(super) dst_x: usize,
    pub(super) dst_y: usize,
    pub(super) dst_z: usize,
    pub(super) dst_lod: usize,
    pub(super) dst_type: c_uint,
    pub(super) dst_host: usize,
    pub(super) dst_device: DevicePtr,
    pub(super) dst_array: usize,
    pub(super) reserved1: usize,
    pub(super) dst_pitch: usize,
    pub(super) dst_height: usize,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
}

impl Copy3d {
    /// Copies `depth` planes of `height` rows of `width` bytes.
    pub(super) const fn of(dst: Rows, src: Rows, [width, height, depth]: [usize; 3]) -> Self {
        let ((dst_host, dst_device), (src_host, src_device)) = (dst.ends(), src.ends());
        Self {
            src_x: 0,
            src_y: 0,
            src_z: 0,
            src_lod: 0,
            src_type: src.memory_type(),
            src_host,
            src_device,
            src_array: 0,
            reserved0: 0,
            src_pitch: src.pitch,
            src_height: src.height,
            dst_x: 0,
            dst_y: 0,
            dst_z: 0,
            dst_lod: 0,
            dst_type: dst.memory_type(),
            dst_host,
            dst_device,
            dst_array: 0,
            reserved1: 0,
            dst_pitch: dst.pitch,
            dst_height: dst.height,
            width,
            height,
            depth,
        }
    }
}

#[cfg(test)]
mod layout {
    //! Layout, compared as in `sys`.

    use super::*;
    use crate::gpu::cuda::sys::same;
    use cudarc::driver::sys as theirs;

    #[test]
    fn our_structures_lie_as_those_of_the_headers_do() {
        same!(
            CopyAttributes,
            theirs::CUmemcpyAttributes,
            order = srcAccessOrder,
            src_hint = srcLocHint,
            dst_hint = dstLocHint,
            flags = flags
        );
        same!(
            Copy2d,
            theirs::CUDA_MEMCPY2D,
            src_x = srcXInBytes,
            src_y = srcY,
            src_type = srcMemoryType,
            src_host = srcHost,
            src_device = srcDevice,
            src_array = srcArray,
            src_pitch = srcPitch,
            dst_x = dstXInBytes,
            dst_y = dstY,
            dst_type = dstMemoryType,
            dst_host = dstHost,
            dst_device = dstDevice,
            dst_array = dstArray,
            dst_pitch = dstPitch,
            width = WidthInBytes,
            height = Height
        );
        same!(
            Copy3d,
            theirs::CUDA_MEMCPY3D,
            src_x = srcXInBytes,
            src_y = srcY,
            src_z = srcZ,
            src_lod = srcLOD,
            src_type = srcMemoryType,
            src_host = srcHost,
            src_device = srcDevice,
            src_array = srcArray,
            reserved0 = reserved0,
            src_pitch = srcPitch,
            src_height = srcHeight,
            dst_x = dstXInBytes,
            dst_y = dstY,
            dst_z = dstZ,
            dst_lod = dstLOD,
            dst_type = dstMemoryType,
            dst_host = dstHost,
            dst_device = dstDevice,
            dst_array = dstArray,
            reserved1 = reserved1,
            dst_pitch = dstPitch,
            dst_height = dstHeight,
            width = WidthInBytes,
            height = Height,
            depth = Depth
        );
        let order = theirs::CUmemcpySrcAccessOrder_enum::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        assert_eq!(CopyAttributes::IN_ORDER.order, order as i32);
    }
}
