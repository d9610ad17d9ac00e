//! The kernels on an NVIDIA GPU.

#![expect(unsafe_code, reason = "a kernel of its own is handed to the driver")]

use crate::field::{Kernels, Step};
use crate::gpus::Result;
use crate::heat::RATE;
use crate::kernel::{Kernel, Module};
use carrack::buffer::Region;
use carrack::transports::gpu::Stream;
use std::ffi::c_void;
use std::sync::Arc;

/// Threads of a block.
const WIDE: u32 = 64;
const HIGH: u32 = 4;

/// The kernels, for memory in which fields lie. The context is the calling thread's.
pub(crate) struct CudaKernels {
    memory: Region,
    module: Module,
    interior: Kernel,
    border: Kernel,
}

impl CudaKernels {
    pub(crate) fn new(memory: &Region) -> Result<Self> {
        let module = Module::new(include_str!("heat.ptx"))?;
        let (interior, border) = (module.kernel(c"interior")?, module.kernel(c"border")?);
        Ok(Self { memory: memory.clone(), module, interior, border })
    }

    /// Returns the address of a cell, as kernels have it.
    fn at(&self, cell: usize) -> u64 {
        (self.memory.addr() + 8 * cell) as u64
    }
}

impl Kernels for CudaKernels {
    fn interior(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()> {
        let (mut rows, mut columns) = (step.layout.rows as u32, step.layout.columns as u32);
        let grid = ((columns - 2).div_ceil(WIDE), (rows - 2).div_ceil(HIGH), 1);
        let (mut from, mut to, mut rate) = (self.at(step.from), self.at(step.to), RATE);
        let mut arguments: [*mut c_void; 5] = [
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut rows).cast(),
            (&raw mut columns).cast(),
            (&raw mut rate).cast(),
        ];
        let shape = [grid, (WIDE, HIGH, 1)];
        // SAFETY: these are its arguments; the fields lie in memory that this keeps, and `Steps`
        // waits for its streams.
        unsafe { self.module.launch(self.interior, stream, shape, &mut arguments) }
    }

    fn border(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()> {
        let (mut rows, mut columns) = (step.layout.rows as u32, step.layout.columns as u32);
        let grid = ((2 * columns + 2 * (rows - 2)).div_ceil(WIDE * HIGH), 1, 1);
        let (mut from, mut to, mut rate) = (self.at(step.from), self.at(step.to), RATE);
        let [mut neighbour_left, mut neighbour_right] = step.neighbours.map(|cell| self.at(cell));
        let [mut edge_left, mut edge_right] = step.edges.map(|cell| self.at(cell));
        let mut arguments: [*mut c_void; 9] = [
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut neighbour_left).cast(),
            (&raw mut neighbour_right).cast(),
            (&raw mut edge_left).cast(),
            (&raw mut edge_right).cast(),
            (&raw mut rows).cast(),
            (&raw mut columns).cast(),
            (&raw mut rate).cast(),
        ];
        let shape = [grid, (WIDE * HIGH, 1, 1)];
        // SAFETY: as above.
        unsafe { self.module.launch(self.border, stream, shape, &mut arguments) }
    }
}
