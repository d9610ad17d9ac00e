//! Steps of a block whose neighbours are other ranks, in the order of streams. The host waits for
//! no GPU.
//!
//! Two streams share a step. The border stream waits for the neighbours' edges of the previous
//! step, computes the cells at the border, and puts the new edges. Meanwhile the interior stream
//! computes the other cells. Each begins a step when both have ended the one before.
//!
//! The fields of odd and even steps have memory of their own. A neighbour needs an edge of each
//! step from this rank, so it is one step ahead at most. Its puts for the next step therefore hit
//! memory that no kernel reads.

use crate::gpus::Result;
use carrack::transports::gpu::{Gpu, GpuEvent, Stream};
use carrack::{Counter, Mr, Rank, RemoteComp, RemoteKey, Runtime, StreamCounter, WaitError};
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps that the host queues in advance. A stream has room for some hundred operations, and then
/// blocks the thread that adds more.
const AHEAD: usize = 16;

/// Sleep between two looks at a simulated GPU. It computes on the CPUs of the ranks, which threads
/// that poll would keep from it.
const LOOK: Duration = Duration::from_micros(100);

/// Returns the cells of a block each way and the steps that the command line asks for, in this
/// order.
pub(crate) fn asked(
    words: &[String],
    cells: RangeInclusive<u64>,
    otherwise: [u64; 2],
) -> std::result::Result<[u64; 2], String> {
    let number = |at: usize| match words.get(at) {
        Some(word) => {
            word.parse().map_err(|_| format!("{word} is no number of {}", ["cells", "steps"][at]))
        }
        None => Ok(otherwise[at]),
    };
    let [size, steps] = [number(0)?, number(1)?];
    if !cells.contains(&size) {
        let (least, most) = (cells.start(), cells.end());
        return Err(format!("a block of {size} cells each way: it has {least} to {most}"));
    }
    if steps == 0 {
        return Err("0 steps: there is one at least".into());
    }
    Ok([size, steps])
}

/// Checks that all ranks were started with the same arguments.
pub(crate) fn agree(runtime: &Runtime, arguments: &[u64]) -> Result<()> {
    let words: Vec<u8> = arguments.iter().flat_map(|word| word.to_le_bytes()).collect();
    if runtime.allgather(&words)?.iter().any(|theirs| *theirs != words) {
        return Err("the ranks were started with different arguments: give all the same".into());
    }
    Ok(())
}

/// A rank's part of the field. Steps count from 0; step 0 computes the field of step 1.
pub(crate) trait Block {
    /// Computes all cells except those at the border, in the order of a stream.
    fn interior(&self, stream: &Arc<dyn Stream>, step: u64) -> Result<()>;

    /// Computes the cells at the border, in the order of a stream.
    fn border(&self, stream: &Arc<dyn Stream>, step: u64) -> Result<()>;

    /// Puts an edge that a step has computed to a neighbour.
    fn put(&self, step: u64, put: &Put<'_>) -> Result<()>;
}

/// Put of an edge: its target, its stream, and the counter of completed puts.
pub(crate) struct Put<'s> {
    pub(crate) runtime: &'s Runtime,
    pub(crate) to: &'s Neighbour,
    pub(crate) stream: &'s Arc<dyn Stream>,
    pub(crate) done: &'s Counter,
}

pub(crate) struct Neighbour {
    pub(crate) rank: Rank,
    /// The side of this rank's block. That of the neighbour's differs in the last bit.
    pub(crate) side: usize,
    pub(crate) rmr: RemoteKey,
    /// The neighbour's counter of edges from this rank, and this rank's counter of edges from it.
    pub(crate) name: RemoteComp,
    arrived: StreamCounter,
}

pub(crate) struct Steps<'a, B: Block> {
    runtime: &'a Runtime,
    block: Rc<B>,
    _registered: Mr,
    border: Arc<dyn Stream>,
    interior: Arc<dyn Stream>,
    simulated: bool,
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

impl<'a, B: Block> Steps<'a, B> {
    /// Begins with a block in registered memory, and the neighbour on each of its sides. Collective
    /// over all ranks. The GPU's context is the calling thread's when `block` is called.
    pub(crate) fn new(
        runtime: &'a Runtime,
        gpu: &Arc<dyn Gpu>,
        registered: Mr,
        sides: &[Option<Rank>],
        block: impl FnOnce() -> Result<B>,
    ) -> Result<Self> {
        // Each rank's region, and the names of its counters.
        let mut own = registered.remote_key().to_bytes();
        let long = own.len();
        let mut arrived = Vec::new();
        for _ in sides {
            let counter = StreamCounter::new(runtime, gpu)?;
            own.extend(runtime.register_comp(&counter)?.0.to_le_bytes());
            arrived.push(counter);
        }
        let all = runtime.allgather(&own)?;
        let mut neighbours = Vec::new();
        for ((side, rank), arrived) in sides.iter().enumerate().zip(arrived) {
            let Some(rank) = *rank else { continue };
            arrived.watch(rank);
            let (rmr, names) = all[rank.0 as usize].split_at(long);
            let width = names.len() / sides.len();
            let opposite = &names[(side ^ 1) * width..][..width];
            let name = RemoteComp(u32::from_le_bytes(opposite.try_into()?));
            let rmr = RemoteKey::from_bytes(rmr)?;
            neighbours.push(Neighbour { rank, side, rmr, name, arrived });
        }
        gpu.make_current()?;
        let block = Rc::new(block()?);
        runtime.barrier()?;
        Ok(Self {
            runtime,
            block,
            _registered: registered,
            border: gpu.stream()?,
            interior: gpu.stream()?,
            simulated: gpu.info().simulated,
            neighbours,
            step: 0,
            exchanged: 0,
            put: Counter::new(),
            posted: 0,
            has_failed: false,
        })
    }

    /// Returns the steps that the field has seen.
    pub(crate) fn count(&self) -> u64 {
        self.step
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

    /// Reads the block between steps.
    pub(crate) fn look<R>(&mut self, read: impl FnOnce(&B) -> Result<R>) -> Result<R> {
        read(&self.block).inspect_err(|_| self.has_failed = true)
    }

    fn go(&mut self, steps: u64, exchanges: bool) -> Result<f64> {
        self.runtime.barrier()?;
        let began = Instant::now();
        let mut ends = VecDeque::from([[self.border.record()?, self.interior.record()?]]);
        for _ in 0..steps {
            let [border, interior] = ends.back().expect("one is always there").clone();
            self.interior.wait(&border)?;
            self.border.wait(&interior)?;
            self.block.interior(&self.interior, self.step)?;
            // The first edges are part of the initial field.
            if exchanges && self.exchanged > 0 {
                for neighbour in &self.neighbours {
                    neighbour.arrived.wait_on(&self.border, self.exchanged)?;
                }
            }
            self.block.border(&self.border, self.step)?;
            // The event precedes the puts: the next interior may begin once the border is
            // computed.
            let computed = self.border.record()?;
            if exchanges {
                self.give_edges()?;
            }
            self.step += 1;
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
        self.runtime.wait(|| put.get() + put.failed() >= posted)?;
        match self.neighbours.iter().find_map(|neighbour| neighbour.arrived.error()) {
            Some(error) => Err(error.into()),
            None if put.failed() > 0 => Err("an edge has not reached its neighbour".into()),
            None => Ok(began.elapsed().as_secs_f64() / steps as f64),
        }
    }

    /// Puts the edges to the neighbours, in the order of the stream that computes them.
    fn give_edges(&mut self) -> Result<()> {
        self.exchanged += 1;
        for to in &self.neighbours {
            let (runtime, stream, done) = (self.runtime, &self.border, &self.put);
            self.block.put(self.step, &Put { runtime, to, stream, done })?;
            self.posted += 1;
        }
        Ok(())
    }

    /// Makes progress until both events have fired.
    fn settle(&self, [one, other]: &[GpuEvent; 2]) -> Result<()> {
        while !(one.query()? && other.query()?) {
            if !self.simulated {
                self.runtime.progress()?;
                continue;
            }
            match self.runtime.wait_for(LOOK, || false) {
                Err(WaitError::TimedOut(_)) => {}
                ended => ended?,
            }
        }
        Ok(())
    }
}

impl<B: Block> Drop for Steps<'_, B> {
    fn drop(&mut self) {
        if self.has_failed {
            // A wait for the streams, or for ranks that wait for this one, might never end. The
            // end of this rank releases them. The kernels stay loaded, since their unloading would
            // wait for the streams.
            std::mem::forget(Rc::clone(&self.block));
            return;
        }
        // The memory may go when no neighbour puts into it and no kernel uses it. The caller has
        // seen earlier errors.
        let _ = self.border.synchronize();
        let _ = self.interior.synchronize();
        let _ = self.runtime.barrier();
    }
}
