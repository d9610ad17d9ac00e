//! The kernels on an NVIDIA GPU, as a program brings its own: through cudarc, on streams of
//! Carrack's.

#![expect(unsafe_code, reason = "a kernel of its own is handed to the driver")]

use crate::field::{Kernels, Step};
use crate::gpus::Result;
use crate::heat::RATE;
use carrack::buffer::Region;
use carrack::transports::gpu::Stream;
use carrack::transports::gpu::cuda::CudaStream;
use cudarc::driver::{result, sys};
use std::any::Any;
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// Threads of a block.
const WIDE: u32 = 64;
const HIGH: u32 = 4;

/// The kernels, for memory in which fields lie. The context is the calling thread's.
pub(crate) struct CudaKernels {
    memory: Region,
    module: sys::CUmodule,
    interior: sys::CUfunction,
    border: sys::CUfunction,
}

impl CudaKernels {
    /// Has the driver compile them for the device. It waits for all of the context's streams, so it
    /// comes first.
    pub(crate) fn new(memory: &Region) -> Result<Self> {
        let text = CString::new(include_str!("heat.ptx"))?;
        // SAFETY: the text ends with a zero; the module is unloaded once, in `drop`, and its
        // functions are used before.
        unsafe {
            let module = result::module::load_data(text.as_ptr().cast())?;
            let interior = result::module::get_function(module, c"interior".into())?;
            let border = result::module::get_function(module, c"border".into())?;
            Ok(Self { memory: memory.clone(), module, interior, border })
        }
    }

    /// The address of a cell, as kernels have it.
    fn at(&self, cell: usize) -> u64 {
        (self.memory.addr() + 8 * cell) as u64
    }

    /// Launches one of them.
    ///
    /// # Safety
    /// `arguments` are those of the kernel, and what it touches is there until the stream has come
    /// past it.
    unsafe fn launch(
        &self,
        kernel: sys::CUfunction,
        stream: &Arc<dyn Stream>,
        (grid, block): ([u32; 2], [u32; 2]),
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let any: &dyn Any = &**stream;
        let stream = any.downcast_ref::<CudaStream>().ok_or("a stream of another driver")?;
        let raw = stream.as_raw() as sys::CUstream;
        let ([columns, rows], [wide, high]) = (grid, block);
        // SAFETY: as promised.
        unsafe {
            result::launch_kernel(kernel, (columns, rows, 1), (wide, high, 1), 0, raw, arguments)?
        };
        Ok(())
    }
}

impl Kernels for CudaKernels {
    fn interior(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()> {
        let (mut rows, mut columns) = (step.layout.rows as u32, step.layout.columns as u32);
        let grid = [(columns - 2).div_ceil(WIDE), (rows - 2).div_ceil(HIGH)];
        let (mut from, mut to, mut rate) = (self.at(step.from), self.at(step.to), RATE);
        let mut arguments: [*mut c_void; 5] = [
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut rows).cast(),
            (&raw mut columns).cast(),
            (&raw mut rate).cast(),
        ];
        // SAFETY: these are its arguments; the fields lie in memory that this keeps, and `Field`
        // waits for its streams.
        unsafe { self.launch(self.interior, stream, (grid, [WIDE, HIGH]), &mut arguments) }
    }

    fn border(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()> {
        let (mut rows, mut columns) = (step.layout.rows as u32, step.layout.columns as u32);
        let grid = [(2 * columns + 2 * (rows - 2)).div_ceil(WIDE * HIGH), 1];
        let (mut from, mut to, mut rate) = (self.at(step.from), self.at(step.to), RATE);
        let [mut beside_left, mut beside_right] = step.beside.map(|cell| self.at(cell));
        let [mut edge_left, mut edge_right] = step.edges.map(|cell| self.at(cell));
        let mut arguments: [*mut c_void; 9] = [
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut beside_left).cast(),
            (&raw mut beside_right).cast(),
            (&raw mut edge_left).cast(),
            (&raw mut edge_right).cast(),
            (&raw mut rows).cast(),
            (&raw mut columns).cast(),
            (&raw mut rate).cast(),
        ];
        // SAFETY: as above.
        unsafe { self.launch(self.border, stream, (grid, [WIDE * HIGH, 1]), &mut arguments) }
    }
}

impl Drop for CudaKernels {
    fn drop(&mut self) {
        // SAFETY: loaded in `new`; `Field` has waited for its streams. A driver that is gone
        // already has nothing to unload.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
