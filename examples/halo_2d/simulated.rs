//! Kernels for a simulated GPU: closures that compute the same on the CPU.

use crate::field::{Kernels, Layout, Step};
use crate::gpus::Result;
use crate::heat::next;
use carrack::buffer::Region;
use carrack::transports::gpu::{GpuError, Stream};
use carrack_simulators::gpu::{FakeStream, Kernel};
use std::any::Any;
use std::sync::Arc;

type Outcome = std::result::Result<(), GpuError>;

pub(crate) struct SimulatedKernels {
    memory: Region,
}

impl SimulatedKernels {
    pub(crate) fn new(memory: &Region) -> Self {
        Self { memory: memory.clone() }
    }

    fn launch(
        &self,
        stream: &Arc<dyn Stream>,
        kernel: impl FnOnce(&mut Kernel, &Region) -> Outcome + Send + 'static,
    ) -> Result<()> {
        let any: &dyn Any = &**stream;
        let stream = any.downcast_ref::<FakeStream>().ok_or("a stream of another driver")?;
        let memory = self.memory.clone();
        Ok(stream.launch(move |access| kernel(access, &memory))?)
    }
}

/// Reads `cells` cells from `at` on.
fn read(
    kernel: &mut Kernel,
    memory: &Region,
    at: usize,
    cells: usize,
) -> std::result::Result<Vec<f64>, GpuError> {
    let slice = memory.slice(8 * at, 8 * cells).expect("cells of the block");
    let bytes = kernel.read(&slice)?;
    Ok(bytes.as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell)).collect())
}

fn write(
    kernel: &mut Kernel,
    memory: &Region,
    at: usize,
    cells: &[f64],
) -> std::result::Result<(), GpuError> {
    let slice = memory.slice(8 * at, 8 * cells.len()).expect("cells of the block");
    let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
    kernel.write(&slice, &bytes)
}

impl Kernels for SimulatedKernels {
    fn interior(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()> {
        let Step { layout: Layout { rows, columns }, from, to, .. } = *step;
        self.launch(stream, move |kernel, memory| {
            let old = read(kernel, memory, from + columns, rows * columns)?;
            for row in 1..rows - 1 {
                let cell = |column: usize| {
                    let here = row * columns + column;
                    let around =
                        [old[here - columns], old[here + columns], old[here - 1], old[here + 1]];
                    next(old[here], around)
                };
                let new: Vec<f64> = (1..columns - 1).map(cell).collect();
                write(kernel, memory, to + (row + 1) * columns + 1, &new)?;
            }
            Ok(())
        })
    }

    fn border(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()> {
        let Step { layout: Layout { rows, columns }, from, to, neighbours, edges } = *step;
        self.launch(stream, move |kernel, memory| {
            let old = read(kernel, memory, from, (rows + 2) * columns)?;
            let left = read(kernel, memory, neighbours[0], rows)?;
            let right = read(kernel, memory, neighbours[1], rows)?;
            let cell = |row: usize, column: usize| {
                let here = row * columns + column;
                let left = if column == 0 { left[row - 1] } else { old[here - 1] };
                let right = if column == columns - 1 { right[row - 1] } else { old[here + 1] };
                next(old[here], [old[here - columns], old[here + columns], left, right])
            };
            for row in [1, rows] {
                let new: Vec<f64> = (0..columns).map(|column| cell(row, column)).collect();
                write(kernel, memory, to + row * columns, &new)?;
            }
            for (column, edge) in [0, columns - 1].into_iter().zip(edges) {
                let new: Vec<f64> = (1..=rows).map(|row| cell(row, column)).collect();
                for row in 2..rows {
                    write(kernel, memory, to + row * columns + column, &new[row - 1..row])?;
                }
                write(kernel, memory, edge, &new)?;
            }
            Ok(())
        })
    }
}
