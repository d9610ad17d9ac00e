//! A rank's block: its layout in memory, and its edges.

use crate::cuda::CudaKernels;
use crate::gpus::Result;
use crate::grid::{Grid, SIDES, Side};
use crate::heat;
use crate::simulated::SimulatedKernels;
use crate::steps::{self, Put, Steps};
use carrack::Runtime;
use carrack::buffer::{Region, RegionSlice};
use carrack::transports::gpu::{Flavour, Gpu, Stream};
use std::ops::Range;
use std::sync::Arc;

/// Largest difference between equal values, relative to the field's hottest cell. Only the order
/// of sums may differ.
const SAME: f64 = 1e-12;

/// Layout of a rank's memory, in cells of 8 bytes.
///
/// First come two fields, each with one more row above and one below for the neighbours' edges.
/// The columns follow, each contiguous: two incoming ones on each side, and one outgoing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Layout {
    fn field(&self, odd: usize) -> usize {
        odd * (self.rows + 2) * self.columns
    }

    /// Returns the place of the neighbour's edge on that side.
    fn incoming(&self, side: Side, odd: usize) -> usize {
        match side {
            Side::Up => self.field(odd),
            Side::Down => self.field(odd) + (self.rows + 1) * self.columns,
            Side::Left => self.field(2) + odd * self.rows,
            Side::Right => self.field(2) + (2 + odd) * self.rows,
        }
    }

    /// Returns the place of the rank's own edge on that side.
    fn outgoing(&self, side: Side, odd: usize) -> usize {
        match side {
            Side::Up => self.field(odd) + self.columns,
            Side::Down => self.field(odd) + self.rows * self.columns,
            Side::Left => self.field(2) + 4 * self.rows,
            Side::Right => self.field(2) + 5 * self.rows,
        }
    }

    /// Returns the cells of an edge.
    fn edge(&self, side: Side) -> usize {
        if matches!(side, Side::Up | Side::Down) { self.columns } else { self.rows }
    }

    fn cells(&self) -> usize {
        self.field(2) + 6 * self.rows
    }
}

/// Input and output of a step, as offsets in cells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) layout: Layout,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Columns of the neighbours on the left and on the right, which the step reads.
    pub(crate) neighbours: [usize; 2],
    /// The rank's own outermost columns, which the step writes for the neighbours.
    pub(crate) edges: [usize; 2],
}

/// Kernels that compute a step on the memory of the block, in the order of a stream.
pub(crate) trait Kernels {
    /// Computes all cells except those at the border.
    fn interior(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()>;

    /// Computes the cells at the border, and copies the outermost columns to the place that they
    /// are put from.
    fn border(&self, stream: &Arc<dyn Stream>, step: &Step) -> Result<()>;
}

/// The block in the memory of a GPU.
struct Block {
    layout: Layout,
    memory: Region,
    kernels: Box<dyn Kernels>,
}

impl steps::Block for Block {
    fn interior(&self, stream: &Arc<dyn Stream>, step: u64) -> Result<()> {
        self.kernels.interior(stream, &self.step(step))
    }

    fn border(&self, stream: &Arc<dyn Stream>, step: u64) -> Result<()> {
        self.kernels.border(stream, &self.step(step))
    }

    fn put(&self, step: u64, put: &Put<'_>) -> Result<()> {
        let (side, odd) = (SIDES[put.to.side], (step as usize + 1) % 2);
        let there = 8 * self.layout.incoming(SIDES[put.to.side ^ 1], odd) as u64;
        let edge = self.slice(self.layout.outgoing(side, odd), self.layout.edge(side))?;
        let post = put.runtime.post_put(put.to.rank, edge, &put.to.rmr, there);
        post.remote_comp(put.to.name).on_stream(put.stream).comp(put.done).submit()?;
        Ok(())
    }
}

impl Block {
    fn step(&self, step: u64) -> Step {
        let (from, to) = (step as usize % 2, (step as usize + 1) % 2);
        let layout = self.layout;
        let columns = [Side::Left, Side::Right];
        Step {
            layout,
            from: layout.field(from),
            to: layout.field(to),
            neighbours: columns.map(|side| layout.incoming(side, from)),
            edges: columns.map(|side| layout.outgoing(side, to)),
        }
    }

    fn slice(&self, at: usize, cells: usize) -> Result<RegionSlice> {
        self.memory.slice(8 * at, 8 * cells).ok_or_else(|| "an edge outside of the block".into())
    }

    /// Returns the cells of some rows after `step` steps.
    fn read(&self, rows: Range<usize>, step: u64) -> Result<Vec<f64>> {
        let columns = self.layout.columns;
        let at = self.layout.outgoing(Side::Up, step as usize % 2) + rows.start * columns;
        let bytes = self.slice(at, rows.len() * columns)?.to_vec()?;
        Ok(bytes.as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell)).collect())
    }
}

pub(crate) struct Field<'a> {
    grid: Grid,
    layout: Layout,
    steps: Steps<'a, Block>,
}

impl<'a> Field<'a> {
    /// Creates the field at its beginning. Collective over all ranks, and so is dropping it.
    pub(crate) fn new(
        runtime: &'a Runtime,
        gpu: &Arc<dyn Gpu>,
        grid: Grid,
        [rows, columns]: [usize; 2],
    ) -> Result<Self> {
        let layout = Layout { rows, columns };
        let memory = gpu.allocate(8 * layout.cells(), Flavour::Plain)?;
        memory.whole().write(&bytes(&begin(&grid, layout)))?;
        let registered = runtime.register_memory(&memory)?;
        let sides = SIDES.map(|side| grid.neighbour(side));
        let steps = Steps::new(runtime, gpu, registered, &sides, || {
            let kernels: Box<dyn Kernels> = match gpu.info().simulated {
                true => Box::new(SimulatedKernels::new(&memory)),
                false => Box::new(CudaKernels::new(&memory)?),
            };
            Ok(Block { layout, memory, kernels })
        })?;
        Ok(Self { grid, layout, steps })
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

    /// Returns the cells of some of the block's rows, one row after another.
    pub(crate) fn cells(&mut self, rows: Range<usize>) -> Result<Vec<f64>> {
        let step = self.steps.count();
        self.steps.look(|block| block.read(rows, step))
    }

    /// Compares some of the block's rows with the result of one CPU, and returns their
    /// [`heat::distance`].
    pub(crate) fn compare(&mut self, rows: Range<usize>) -> Result<f64> {
        let (Layout { rows: high, columns: wide }, grid) = (self.layout, self.grid);
        let [first_row, first_column] =
            [grid.place(grid.me)[0] * high, grid.place(grid.me)[1] * wide];
        let part =
            [first_row + rows.start..first_row + rows.end, first_column..first_column + wide];
        let step = self.steps.count();
        let wanted = heat::alone(part, [grid.rows * high, grid.columns * wide], step);
        self.steps.look(|block| {
            let apart = heat::distance(&block.read(rows.clone(), step)?, &wanted);
            if apart <= SAME {
                return Ok(apart);
            }
            Err(format!("rows {rows:?} differ from what one CPU computes by {apart:e}").into())
        })
    }
}

/// Returns the first field with the neighbours' edges, and zeros everywhere else.
fn begin(grid: &Grid, layout: Layout) -> Vec<f64> {
    let Layout { rows, columns } = layout;
    let all = [grid.rows * rows, grid.columns * columns];
    let [row, column] = grid.place(grid.me);
    let (first_row, first_column) = ((row * rows) as isize, (column * columns) as isize);
    let cell = |row: usize, column: isize| {
        heat::begin(first_row + row as isize - 1, first_column + column, all)
    };
    let mut cells = vec![0.0; layout.cells()];
    for row in 0..rows + 2 {
        for column in 0..columns {
            cells[row * columns + column] = cell(row, column as isize);
        }
    }
    for (side, column) in [(Side::Left, -1), (Side::Right, columns as isize)] {
        let start = layout.incoming(side, 0);
        for row in 0..rows {
            cells[start + row] = cell(row + 1, column);
        }
    }
    cells
}

fn bytes(cells: &[f64]) -> Vec<u8> {
    cells.iter().flat_map(|cell| cell.to_le_bytes()).collect()
}
