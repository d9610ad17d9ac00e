//! Kernels on an NVIDIA GPU, as a program brings its own: through cudarc, on streams of Carrack's.

#![expect(unsafe_code, reason = "a kernel of its own is handed to the driver")]

use crate::gpus::Result;
use carrack::transports::gpu::Stream;
use carrack::transports::gpu::cuda::CudaStream;
use cudarc::driver::{result, sys};
use std::any::Any;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

/// Blocks of a grid and threads of a block, each in three dimensions.
pub(crate) type Shape = [(u32, u32, u32); 2];

/// Kernels that the driver has compiled from PTX. The context is the calling thread's.
pub(crate) struct Module(sys::CUmodule);

/// A kernel of a module.
#[derive(Clone, Copy)]
pub(crate) struct Kernel(sys::CUfunction);

impl Module {
    /// Has the driver compile them for the device. It waits for all of the context's streams, so it
    /// comes first.
    pub(crate) fn new(text: &str) -> Result<Self> {
        let text = CString::new(text)?;
        // SAFETY: the text ends with a zero.
        Ok(Self(unsafe { result::module::load_data(text.as_ptr().cast())? }))
    }

    pub(crate) fn kernel(&self, name: &CStr) -> Result<Kernel> {
        // SAFETY: the module is loaded.
        Ok(Kernel(unsafe { result::module::get_function(self.0, name.into())? }))
    }

    /// Launches one of its kernels on a stream.
    ///
    /// # Safety
    /// The kernel is this module's. `arguments` point to those that it has, and what it touches is
    /// there until the stream has come past it.
    pub(crate) unsafe fn launch(
        &self,
        Kernel(kernel): Kernel,
        stream: &Arc<dyn Stream>,
        [grid, block]: Shape,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let any: &dyn Any = &**stream;
        let stream = any.downcast_ref::<CudaStream>().ok_or("a stream of another driver")?;
        let raw = stream.as_raw() as sys::CUstream;
        // SAFETY: as promised.
        unsafe { result::launch_kernel(kernel, grid, block, 0, raw, arguments)? };
        Ok(())
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `new`; the steps have waited for their streams. A driver that is gone
        // already has nothing to unload.
        let _ = unsafe { result::module::unload(self.0) };
    }
}
