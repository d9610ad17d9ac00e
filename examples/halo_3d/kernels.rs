//! The kernel that computes rows of each depth: on an NVIDIA GPU, and as a closure on a simulated
//! one.

#![expect(unsafe_code, reason = "a kernel of its own is handed to the driver")]

use crate::cube::Layout;
use crate::gpus::Result;
use crate::heat::{RATE, next};
use crate::kernel::{Kernel, Module};
use carrack::buffer::Region;
use carrack::transports::gpu::{Gpu, Stream};
use carrack_simulators::gpu::FakeStream;
use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

/// Threads of a block.
const WIDE: u32 = 64;
const HIGH: u32 = 4;

pub(crate) trait Kernels {
    /// Computes rows of the second field from the first one. Fields begin at these cells.
    fn rows(&self, stream: &Arc<dyn Stream>, fields: [usize; 2], rows: Range<usize>) -> Result<()>;
}

/// Returns the kernel for that GPU, and for memory in which fields lie.
pub(crate) fn on(gpu: &Arc<dyn Gpu>, memory: &Region, layout: Layout) -> Result<Box<dyn Kernels>> {
    let memory = memory.clone();
    if gpu.info().simulated {
        return Ok(Box::new(Simulated { memory, layout }));
    }
    let module = Module::new(include_str!("heat.ptx"))?;
    let kernel = module.kernel(c"rows")?;
    Ok(Box::new(Cuda { memory, layout, module, kernel }))
}

struct Cuda {
    memory: Region,
    layout: Layout,
    module: Module,
    kernel: Kernel,
}

impl Kernels for Cuda {
    fn rows(&self, stream: &Arc<dyn Stream>, fields: [usize; 2], rows: Range<usize>) -> Result<()> {
        let mut cells = self.layout.cells as u32;
        let (mut first, mut count) = (rows.start as u32, rows.len() as u32);
        let [mut from, mut to] = fields.map(|cell| (self.memory.addr() + 8 * cell) as u64);
        let mut rate = RATE;
        let grid = ((cells - 2).div_ceil(WIDE), count.div_ceil(HIGH), cells - 2);
        let mut arguments: [*mut c_void; 6] = [
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut cells).cast(),
            (&raw mut first).cast(),
            (&raw mut count).cast(),
            (&raw mut rate).cast(),
        ];
        // SAFETY: these are its arguments; the fields lie in memory that this keeps, and `Steps`
        // waits for its streams.
        unsafe { self.module.launch(self.kernel, stream, [grid, (WIDE, HIGH, 1)], &mut arguments) }
    }
}

struct Simulated {
    memory: Region,
    layout: Layout,
}

impl Kernels for Simulated {
    fn rows(
        &self,
        stream: &Arc<dyn Stream>,
        [from, to]: [usize; 2],
        rows: Range<usize>,
    ) -> Result<()> {
        let any: &dyn Any = &**stream;
        let stream = any.downcast_ref::<FakeStream>().ok_or("a stream of another driver")?;
        let (memory, cells) = (self.memory.clone(), self.layout.cells);
        let (wide, plane) = (cells, self.layout.plane());
        let slice = move |first: usize, cells: usize| {
            memory.slice(8 * first, 8 * cells).expect("cells of the block")
        };
        Ok(stream.launch(move |access| {
            for depth in 1..cells - 1 {
                let bytes = access.read(&slice(from + (depth - 1) * plane, 3 * plane))?;
                let old: Vec<f64> =
                    bytes.as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell)).collect();
                for row in rows.clone() {
                    let cell = |column: usize| {
                        let here = plane + row * wide + column;
                        let around = [1, wide, plane].map(|far| old[here - far] + old[here + far]);
                        next(old[here], around)
                    };
                    let new: Vec<u8> =
                        (1..wide - 1).flat_map(|column| cell(column).to_le_bytes()).collect();
                    access.write(&slice(to + depth * plane + row * wide + 1, wide - 2), &new)?;
                }
            }
            Ok(())
        })?)
    }
}
