//! Functions of NVIDIA's library beyond libibverbs.

use super::bindings::{MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT, ibv_device, ibv_mr, ibv_pd};
use super::error::VerbsError;
use super::library;
use super::table::{Answer, set_errno};
use libloading::os::unix::Library;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;

type IsSupported = unsafe extern "C" fn(device: *mut ibv_device) -> bool;
type RegDmabufMr = unsafe extern "C" fn(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
    mlx5_access: c_int,
) -> *mut ibv_mr;

/// The functions of libmlx5 that Carrack uses, each of which may be missing.
#[derive(Default)]
pub(super) struct Mlx5 {
    is_supported: Option<IsSupported>,
    reg_dmabuf_mr: Option<RegDmabufMr>,
    /// Never closed: libibverbs uses the same library for its devices.
    _library: Option<ManuallyDrop<Library>>,
}

impl Mlx5 {
    /// Returns an empty table.
    pub(super) fn none() -> Self {
        Self::default()
    }

    /// Opens the machine's library. Without one the table is empty.
    pub(super) fn open() -> Self {
        let Ok(library) = library::open(library::MLX5) else { return Self::none() };
        let is_supported = library::find(&library, "mlx5dv_is_supported").map(|found| {
            // SAFETY: a symbol of this name is a function of this signature.
            unsafe { std::mem::transmute::<*mut c_void, IsSupported>(found) }
        });
        let reg_dmabuf_mr = library::find(&library, "mlx5dv_reg_dmabuf_mr").map(|found| {
            // SAFETY: as above.
            unsafe { std::mem::transmute::<*mut c_void, RegDmabufMr>(found) }
        });
        Self { is_supported, reg_dmabuf_mr, _library: Some(ManuallyDrop::new(library)) }
    }

    /// Returns `true` if a device is one of NVIDIA's.
    ///
    /// # Safety
    /// It is a device of the machine's libibverbs.
    pub(super) unsafe fn is_mlx5(&self, device: *mut ibv_device) -> bool {
        // SAFETY: passed on from the caller.
        self.is_supported.is_some_and(|call| unsafe { call(device) })
    }

    /// Registers memory of a dma-buf, which the NIC then accesses over a PCIe function of its own
    /// instead of the CPU's.
    ///
    /// # Safety
    /// As `mlx5dv_reg_dmabuf_mr(3)` says.
    pub(super) unsafe fn reg_dmabuf_mr_direct(
        &self,
        pd: *mut ibv_pd,
        (offset, len): (u64, usize),
        iova: u64,
        fd: c_int,
        access: c_int,
    ) -> Result<*mut ibv_mr, VerbsError> {
        const CALL: &str = "mlx5dv_reg_dmabuf_mr";
        let Some(call) = self.reg_dmabuf_mr else {
            let remedy =
                "libmlx5.so.1 is not there or has no such function: rdma-core 55 and newer have it";
            return Err(VerbsError::because(CALL, libc::ENOSYS, remedy));
        };
        let direct =
            c_int::try_from(MLX5_IB_UAPI_REG_DMABUF_ACCESS_DATA_DIRECT).unwrap_or_default();
        set_errno(0);
        // SAFETY: passed on from the caller.
        let mr = unsafe { call(pd, offset, len, iova, fd, access, direct) };
        mr.good().map_err(|errno| VerbsError::new(CALL, errno))
    }
}
