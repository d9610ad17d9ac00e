//! A rank's block: its layout in memory, and its steps.
//!
//! Two streams share a step. The border stream waits for the neighbours' edges of the previous
//! step, computes the cells at the border, and puts the new edges. Meanwhile the interior stream
//! computes the other cells. Each begins a step when both have ended the one before.
//!
//! The fields of odd and even steps have memory of their own. A neighbour needs an edge of each
//! step from this rank, so it is one step ahead at most. Its puts for the next step therefore hit
//! memory that no kernel reads.

use crate::cuda::CudaKernels;
use crate::gpus::Result;
use crate::grid::{Grid, SIDES, Side};
use crate::heat;
use crate::simulated::SimulatedKernels;
use carrack::buffer::{Region, RegionSlice};
use carrack::transports::gpu::{Event, Flavour, Gpu, Stream};
use carrack::{Counter, Mr, Rank, RemoteComp, RemoteKey, Runtime, StreamCounter};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Steps that the host queues in advance. A stream has room for some hundred operations, and then
/// blocks the thread that adds more.
const AHEAD: usize = 16;
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
    pub(crate) beside: [usize; 2],
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

struct Neighbour {
    rank: Rank,
    side: Side,
    rmr: RemoteKey,
    /// The neighbour's counter of edges from this rank, and this rank's counter of edges from it.
    name: RemoteComp,
    arrived: StreamCounter,
}

pub(crate) struct Field<'a> {
    runtime: &'a Runtime,
    grid: Grid,
    layout: Layout,
    memory: Region,
    _registered: Mr,
    kernels: Rc<dyn Kernels>,
    border: Arc<dyn Stream>,
    interior: Arc<dyn Stream>,
    neighbours: Vec<Neighbour>,
    /// Steps so far, and the number of edges that each neighbour has put.
    step: u64,
    exchanged: u64,
    put: Counter,
    posted: u64,
    /// `true` after an error during the steps. The streams may then wait for edges that no rank
    /// puts any more.
    has_failed: bool,
}

impl<'a> Field<'a> {
    /// Creates the field at its beginning. Collective over all ranks.
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

        // Each rank's region, and the names of its four counters.
        let counters = SIDES.map(|_| StreamCounter::new(runtime, gpu));
        let mut own = registered.remote_key().to_bytes();
        let long = own.len();
        let mut arrived = Vec::new();
        for counter in counters {
            let counter = counter?;
            own.extend(runtime.register_comp(&counter)?.0.to_le_bytes());
            arrived.push(counter);
        }
        let all = runtime.allgather(&own)?;
        let mut neighbours = Vec::new();
        for (at, (side, arrived)) in SIDES.into_iter().zip(arrived).enumerate() {
            let Some(rank) = grid.neighbour(side) else { continue };
            arrived.watch(rank);
            let (rmr, names) = all[rank.0 as usize].split_at(long);
            let width = names.len() / SIDES.len();
            let opposite = &names[(at ^ 1) * width..][..width];
            let name = RemoteComp(u32::from_le_bytes(opposite.try_into()?));
            neighbours.push(Neighbour {
                rank,
                side,
                rmr: RemoteKey::from_bytes(rmr)?,
                name,
                arrived,
            });
        }
        gpu.make_current()?;
        let kernels: Rc<dyn Kernels> = match gpu.info().simulated {
            true => Rc::new(SimulatedKernels::new(&memory)),
            false => Rc::new(CudaKernels::new(&memory)?),
        };
        runtime.barrier()?;
        Ok(Self {
            runtime,
            grid,
            layout,
            memory,
            _registered: registered,
            kernels,
            border: gpu.stream()?,
            interior: gpu.stream()?,
            neighbours,
            step: 0,
            exchanged: 0,
            put: Counter::new(),
            posted: 0,
            has_failed: false,
        })
    }

    /// Computes `steps` steps, and returns the seconds of each.
    pub(crate) fn exchange(&mut self, steps: u64) -> Result<f64> {
        self.go(steps, true).inspect_err(|_| self.has_failed = true)
    }

    /// Computes steps without the exchange. The work is the same, and the results at the border
    /// are wrong.
    pub(crate) fn compute(&mut self, steps: u64) -> Result<f64> {
        self.go(steps, false).inspect_err(|_| self.has_failed = true)
    }

    fn go(&mut self, steps: u64, exchanges: bool) -> Result<f64> {
        self.runtime.barrier()?;
        let began = Instant::now();
        let mut ends = VecDeque::from([[self.border.record()?, self.interior.record()?]]);
        for _ in 0..steps {
            let [border, interior] = ends.back().expect("one is always there").clone();
            self.interior.wait(&border)?;
            self.border.wait(&interior)?;
            let step = self.next_step();
            self.kernels.interior(&self.interior, &step)?;
            // The first edges are part of the initial field.
            if exchanges && self.exchanged > 0 {
                for neighbour in &self.neighbours {
                    neighbour.arrived.wait_on(&self.border, self.exchanged)?;
                }
            }
            self.kernels.border(&self.border, &step)?;
            self.step += 1;
            // The event precedes the puts: the next interior may begin once the border is
            // computed.
            let computed = self.border.record()?;
            if exchanges {
                self.give_edges()?;
            }
            ends.push_back([computed, self.interior.record()?]);
            while ends.len() > AHEAD {
                self.settle(&ends.pop_front().expect("there are more"))?;
            }
        }
        for end in ends {
            self.settle(&end)?;
        }
        let (border, put, posted) = (self.border.record()?, &self.put, self.posted);
        self.settle(&[border.clone(), border])?;
        self.runtime.wait(|| put.get() >= posted)?;
        match self.neighbours.iter().find_map(|neighbour| neighbour.arrived.error()) {
            Some(error) => Err(error.into()),
            None => Ok(began.elapsed().as_secs_f64() / steps as f64),
        }
    }

    fn next_step(&self) -> Step {
        let (from, to) = (self.step as usize % 2, (self.step as usize + 1) % 2);
        let layout = self.layout;
        let columns = [Side::Left, Side::Right];
        Step {
            layout,
            from: layout.field(from),
            to: layout.field(to),
            beside: columns.map(|side| layout.incoming(side, from)),
            edges: columns.map(|side| layout.outgoing(side, to)),
        }
    }

    /// Puts the edges to the neighbours, in the order of the stream that computes them.
    fn give_edges(&mut self) -> Result<()> {
        let odd = self.step as usize % 2;
        self.exchanged += 1;
        for Neighbour { rank, side, rmr, name, .. } in &self.neighbours {
            let opposite = SIDES[*side as usize ^ 1];
            let there = 8 * self.layout.incoming(opposite, odd) as u64;
            let edge = self.slice(self.layout.outgoing(*side, odd), self.layout.edge(*side))?;
            let put = self.runtime.post_put(*rank, edge, rmr, there).remote_comp(*name);
            let mut put = put.on_stream(&self.border).comp(&self.put);
            put.submit()?;
            self.posted += 1;
        }
        Ok(())
    }

    /// Makes progress until both events have fired.
    fn settle(&self, [one, other]: &[Event; 2]) -> Result<()> {
        while !(one.query()? && other.query()?) {
            self.runtime.progress()?;
        }
        Ok(())
    }

    fn slice(&self, at: usize, cells: usize) -> Result<RegionSlice> {
        self.memory.slice(8 * at, 8 * cells).ok_or_else(|| "an edge outside of the block".into())
    }

    /// Returns the cells of some of the block's rows, one row after another.
    pub(crate) fn cells(&mut self, rows: Range<usize>) -> Result<Vec<f64>> {
        self.read(rows).inspect_err(|_| self.has_failed = true)
    }

    fn read(&self, rows: Range<usize>) -> Result<Vec<f64>> {
        let columns = self.layout.columns;
        let at = self.layout.outgoing(Side::Up, self.step as usize % 2) + rows.start * columns;
        let bytes = self.slice(at, rows.len() * columns)?.to_vec()?;
        Ok(bytes.as_chunks().0.iter().map(|cell| f64::from_le_bytes(*cell)).collect())
    }

    /// Compares some of the block's rows with the result of one CPU, and returns their
    /// [`heat::distance`].
    pub(crate) fn compare(&mut self, rows: Range<usize>) -> Result<f64> {
        self.distance(rows).inspect_err(|_| self.has_failed = true)
    }

    fn distance(&self, rows: Range<usize>) -> Result<f64> {
        let (Layout { rows: high, columns: wide }, grid) = (self.layout, self.grid);
        let [first_row, first_column] =
            [grid.place(grid.me)[0] * high, grid.place(grid.me)[1] * wide];
        let part =
            [first_row + rows.start..first_row + rows.end, first_column..first_column + wide];
        let wanted = heat::alone(part, [grid.rows * high, grid.columns * wide], self.step);
        let apart = heat::distance(&self.read(rows.clone())?, &wanted);
        if apart <= SAME {
            return Ok(apart);
        }
        Err(format!("rows {rows:?} differ from what one CPU computes by {apart:e}").into())
    }
}

impl Drop for Field<'_> {
    fn drop(&mut self) {
        if self.has_failed {
            // A wait for the streams, or for ranks that wait for this one, might never end. The
            // end of this rank releases them. The kernels stay loaded, since their unloading would
            // wait for the streams.
            std::mem::forget(Rc::clone(&self.kernels));
            return;
        }
        // The memory may go when no neighbour puts into it and no kernel uses it. The caller has
        // seen earlier errors.
        let _ = self.border.synchronize();
        let _ = self.interior.synchronize();
        let _ = self.runtime.barrier();
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
