//! A rank's cube: its layout in memory, and its layers.

use crate::gpus::Result;
use crate::heat;
use crate::kernels::{self, Kernels};
use crate::steps::{self, Put, Steps};
use carrack::buffer::Region;
use carrack::transports::gpu::{Flavour, Gpu, Stream};
use carrack::{Rank, Runtime, Strided};
use std::ops::Range;
use std::sync::Arc;

/// Layout of two fields, in cells of 8 bytes: each has depths of rows of cells. The first and the
/// last row of each depth are layers of the neighbours.
#[derive(Clone, Copy)]
pub(crate) struct Layout {
    /// Cells of the cube each way.
    pub(crate) cells: usize,
}

impl Layout {
    /// Cells of a depth.
    pub(crate) fn plane(&self) -> usize {
        (self.cells + 2) * self.cells
    }

    fn field(&self, odd: u64) -> usize {
        odd as usize % 2 * self.cells * self.plane()
    }

    /// Returns the layer of a field with row `row` of each depth.
    fn layer(&self, odd: u64, row: usize) -> Strided {
        let (offset, wide) = (8 * (self.field(odd) + row * self.cells), 8 * self.cells);
        Strided { offset, count: [wide, self.cells, 1], pitch: [8 * self.plane(), 0] }
    }
}

struct Block {
    layout: Layout,
    memory: Region,
    kernels: Box<dyn Kernels>,
}

impl Block {
    fn fields(&self, step: u64) -> [usize; 2] {
        [self.layout.field(step), self.layout.field(step + 1)]
    }

    /// Returns the cells of these depths, rows of the cube and columns.
    fn read(&self, part: &[Range<usize>; 3], step: u64) -> Result<Vec<f64>> {
        let [depths, rows, columns] = part.clone();
        let mut cells = Vec::new();
        for depth in depths {
            for row in rows.clone() {
                let row = self.layout.field(step)
                    + depth * self.layout.plane()
                    + (row + 1) * self.layout.cells;
                let slice = self.memory.slice(8 * (row + columns.start), 8 * columns.len());
                let bytes = slice.ok_or("cells outside of the cube")?.to_vec()?;
                let floats = bytes.as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell));
                cells.extend(floats);
            }
        }
        Ok(cells)
    }
}

impl steps::Block for Block {
    fn interior(&self, stream: &Arc<dyn Stream>, step: u64) -> Result<()> {
        self.kernels.rows(stream, self.fields(step), 2..self.layout.cells)
    }

    fn border(&self, stream: &Arc<dyn Stream>, step: u64) -> Result<()> {
        for row in [1, self.layout.cells] {
            self.kernels.rows(stream, self.fields(step), row..row + 1)?;
        }
        Ok(())
    }

    fn put(&self, step: u64, put: &Put<'_>) -> Result<()> {
        // The first layer goes behind the last one of the neighbour before, and the last layer
        // before the first one of the neighbour behind.
        let (layout, last) = (self.layout, self.layout.cells);
        let [ours, theirs] =
            [[1, last + 1], [last, 0]][put.to.side].map(|row| layout.layer(step + 1, row));
        let (rank, rmr) = (put.to.rank, &put.to.rmr);
        let post = put.runtime.post_put_strided(rank, &self.memory, &ours, rmr, &theirs);
        post.remote_comp(put.to.name).on_stream(put.stream).comp(put.done).submit()?;
        Ok(())
    }
}

/// A cube of the bar.
pub(crate) struct Cube<'a> {
    runtime: &'a Runtime,
    layout: Layout,
    steps: Steps<'a, Block>,
}

impl<'a> Cube<'a> {
    /// Creates the cube at its beginning. Collective over all ranks, and so is dropping it.
    pub(crate) fn new(runtime: &'a Runtime, gpu: &Arc<dyn Gpu>, cells: usize) -> Result<Self> {
        let layout = Layout { cells };
        let memory = gpu.allocate(2 * 8 * cells * layout.plane(), Flavour::Plain)?;
        let before = runtime.rank().0 as usize * cells;
        for depth in 0..cells {
            let places = (before..before + cells + 2)
                .flat_map(|row| (0..cells).map(move |column| [depth, row, column]));
            let plane: Vec<u8> =
                places.flat_map(|place| heat::begin(place).to_le_bytes()).collect();
            for odd in 0..2 {
                let at = 8 * (layout.field(odd) + depth * layout.plane());
                memory
                    .slice(at, plane.len())
                    .ok_or("a depth outside of the cube")?
                    .write(&plane)?;
            }
        }
        let registered = runtime.register_memory(&memory)?;
        let me = runtime.rank().0;
        let sides = [me.checked_sub(1), Some(me + 1).filter(|&rank| rank < runtime.size())];
        let steps =
            Steps::new(runtime, gpu, registered, &sides.map(|side| side.map(Rank)), || {
                let kernels = kernels::on(gpu, &memory, layout)?;
                Ok(Block { layout, memory, kernels })
            })?;
        Ok(Self { runtime, layout, steps })
    }

    /// Computes `steps` steps, and returns the seconds of each.
    pub(crate) fn exchange(&mut self, steps: u64) -> Result<f64> {
        self.steps.exchange(steps)
    }

    /// Computes steps without the exchange. The work is the same, and the results at the border
    /// are wrong.
    pub(crate) fn compute(&mut self, steps: u64) -> Result<f64> {
        self.steps.compute(steps)
    }

    /// Compares the cells of these depths, rows of the cube and columns with the result of one CPU.
    pub(crate) fn compare(&mut self, part: &[Range<usize>; 3]) -> Result<()> {
        let (cells, step) = (self.layout.cells, self.steps.count());
        // The bar has a row before the first cube, and one behind the last.
        let before = self.runtime.rank().0 as usize * cells + 1;
        let [depths, rows, columns] = part.clone();
        let whole = [depths, rows.start + before..rows.end + before, columns];
        let all = [cells, self.runtime.size() as usize * cells + 2, cells];
        let wanted = heat::alone(&whole, all, step as usize);
        self.steps.look(|block| {
            let found = block.read(part, step)?;
            let wrong = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
            match wrong {
                None if found.len() == wanted.len() => Ok(()),
                wrong => Err(format!("{part:?}: cell {wrong:?} is wrong").into()),
            }
        })
    }
}
