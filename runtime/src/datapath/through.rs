//! Copies within this process between GPU memory and pageable host memory, block by block. The
//! driver's own call would wait until the engine has copied all bytes. Copies that go
//! together share a block while they fit, and the engine gets them in one call.

use crate::staging::{BLOCK, Direction, Staging, StagingBlock};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, ByWay, CopyError, MemKind, Refused, Together, Transfer};
use std::sync::Arc;

/// Bytes of pageable host memory that a driver's call takes in before it returns, without a wait
/// for the engine. See "API synchronization behavior" in the CUDA driver's documentation.
const AT_ONCE: usize = 64 << 10;

/// A copy that an engine does, alone or with the CPU's help.
pub(crate) enum Moving {
    /// The engine copies directly.
    Engine(Transfer),
    /// The copy goes through blocks.
    Through(Box<Through>),
}

impl From<Transfer> for Moving {
    fn from(transfer: Transfer) -> Self {
        Self::Engine(transfer)
    }
}

impl Moving {
    /// Begins the copy of all of `src`, as [`Transfer::start`] does; no call waits for an engine.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub(crate) fn start(
        dst: Buffer,
        src: Buffer,
        staging: &Arc<Staging>,
    ) -> Result<Self, Box<Refused>> {
        if matches!((dst.kind(), src.kind()), (MemKind::Device(_), MemKind::Device(_))) {
            return Transfer::start(dst, src).map(Self::Engine);
        }
        Self::start_with_host(dst, src, staging)
    }

    fn start_with_host(
        mut dst: Buffer,
        src: Buffer,
        staging: &Arc<Staging>,
    ) -> Result<Self, Box<Refused>> {
        let len = src.len();
        let gpu = match (dst.kind(), src.kind()) {
            (MemKind::Host, MemKind::Device(_)) => src.view().place().gpu().cloned(),
            (MemKind::Device(_), MemKind::Host) if len > AT_ONCE => {
                dst.view().place().gpu().cloned()
            }
            _ => None,
        };
        let Some(gpu) = gpu.filter(|_| len <= dst.len() && dst.view_mut().is_some()) else {
            return Transfer::start(dst, src).map(Self::Engine);
        };
        let from_gpu = matches!(src.kind(), MemKind::Device(_));
        let mut through = Through::new(CopyEnds::One(dst, src), (len, from_gpu), gpu, staging);
        match through.step(false) {
            Ok(()) => Ok(Self::Through(Box::new(through))),
            Err(cause) => {
                let (dst, src) = through.ends.take();
                Err(Box::new(Refused { dst, src, cause }))
            }
        }
    }

    /// Begins copies that go together; no call waits for an engine.
    ///
    /// The engine's error. No copy is in flight then.
    pub(crate) fn start_together(
        together: Together,
        staging: &Arc<Staging>,
    ) -> Result<Self, CopyError> {
        if !together.goes_by_way() {
            return together.start().map(Self::Engine);
        }
        let (dst, src) = together.kinds();
        let by_way = ByWay::of(together).ok_or(CopyError::Unknown { dst, src })?;
        let (what, gpu) = ((by_way.len(), by_way.is_from_gpu()), by_way.gpu().clone());
        let mut through = Through::new(CopyEnds::Many(by_way), what, gpu, staging);
        through.step(false).map(|()| Self::Through(Box::new(through)))
    }

    /// Returns the outcome, or `None` while it is in flight. Never waits. The `first` caller of
    /// all copies that wait is sure to get a block.
    pub(crate) fn poll(&mut self, first: bool) -> Option<Result<(), CopyError>> {
        match self {
            Self::Engine(transfer) => transfer.poll(),
            Self::Through(through) => through.poll(first),
        }
    }

    /// Polls as [`poll`](Self::poll), without the outcome. Returns `true` if the copy has ended.
    #[inline]
    pub(crate) fn has_ended(&mut self, first: bool) -> bool {
        match self {
            Self::Engine(transfer) => transfer.has_ended(),
            Self::Through(through) => through.poll(first).is_some(),
        }
    }

    /// Returns the error of a copy that has failed.
    #[inline]
    pub(crate) fn failure(&self) -> Option<CopyError> {
        match self {
            Self::Engine(transfer) => transfer.failure().cloned(),
            Self::Through(through) => through.failed.clone(),
        }
    }

    /// Returns `true` if it is known to end no earlier than `earlier`, without a query.
    pub(crate) fn is_behind(&self, earlier: &Self) -> bool {
        match (self, earlier) {
            (Self::Engine(transfer), Self::Engine(earlier)) => transfer.is_behind(earlier),
            _ => false,
        }
    }

    /// Abandons the copy, as [`Transfer::abandon`].
    pub(crate) fn abandon(self) {
        match self {
            Self::Engine(transfer) => transfer.abandon(),
            Self::Through(through) => std::mem::forget(through),
        }
    }

    /// Gives back target and source, in this order, after waiting for an engine that uses them.
    /// Both are empty for many copies.
    pub(crate) fn take_buffers(&mut self) -> (Buffer, Buffer) {
        match self {
            Self::Engine(transfer) => transfer.take_buffers(),
            Self::Through(through) => {
                through.settle();
                through.ends.take()
            }
        }
    }
}

/// The ends of a copy.
enum CopyEnds {
    /// Target and source of one copy. The engine has the end that is on the GPU while it is at
    /// work.
    One(Buffer, Buffer),
    Many(ByWay),
}

impl CopyEnds {
    /// Lets the engine copy `len` bytes, from offset `at` on, with a block at the other end.
    fn start(
        &mut self,
        (block, len): (&StagingBlock, usize),
        at: usize,
        from_gpu: bool,
    ) -> Result<Transfer, CopyError> {
        let (dst, src) = match self {
            Self::One(dst, src) => (dst, src),
            Self::Many(by_way) => return by_way.start_by_engine(block.memory(), len),
        };
        let ends = if from_gpu {
            ((block.first(len), 0), (std::mem::take(src), at))
        } else {
            ((std::mem::take(dst), at), (block.first(len), 0))
        };
        Transfer::start_part(ends.0, ends.1, len).map_err(|refused| {
            if from_gpu {
                *src = refused.src;
            } else {
                *dst = refused.dst;
            }
            refused.cause
        })
    }

    /// Takes back the buffer that the engine had.
    fn end(&mut self, transfer: Transfer, from_gpu: bool) {
        let ends = transfer.into_buffers();
        match self {
            Self::One(_, src) if from_gpu => *src = ends.1,
            Self::One(dst, _) => *dst = ends.0,
            Self::Many(_) => {}
        }
    }

    /// Lets the CPU copy `len` bytes, from offset `at` on, between a block and the host memory.
    fn copy_now(
        &mut self,
        (block, len): (&StagingBlock, usize),
        at: usize,
        from_gpu: bool,
    ) -> Result<(), CopyError> {
        match self {
            Self::One(dst, _) if from_gpu => {
                let room = dst.view_mut().map(|room| room.part(at, len));
                room.map_or(Ok(()), |room| copy_now(room, block.first(len).view()))
            }
            Self::One(_, src) => {
                let mut room = block.first(len);
                room.view_mut().map_or(Ok(()), |room| copy_now(room, src.view().part(at, len)))
            }
            Self::Many(by_way) => by_way.copy_by_cpu(block.memory(), len),
        }
    }

    fn take(&mut self) -> (Buffer, Buffer) {
        match self {
            Self::One(dst, src) => (std::mem::take(dst), std::mem::take(src)),
            Self::Many(_) => (Buffer::Empty, Buffer::Empty),
        }
    }
}

/// A copy through blocks.
pub(crate) struct Through {
    /// The engine's transfer and its bytes; it has the end on the GPU meanwhile. Declared before
    /// its block: the drop of a transfer waits for the engine.
    copying: Option<(Transfer, StagingBlock, usize)>,
    /// The next block of a copy onto a GPU, which the engine has not begun.
    filled: Option<(StagingBlock, usize)>,
    ends: CopyEnds,
    len: usize,
    gpu: Arc<dyn Gpu>,
    from_gpu: bool,
    /// Bytes that a block was taken for.
    begun: usize,
    done: usize,
    failed: Option<CopyError>,
    staging: Arc<Staging>,
}

impl Through {
    /// Returns a copy of `len` bytes from a GPU or onto it, not begun.
    fn new(
        ends: CopyEnds,
        (len, from_gpu): (usize, bool),
        gpu: Arc<dyn Gpu>,
        staging: &Arc<Staging>,
    ) -> Self {
        let (begun, done, copying, filled, failed) = (0, 0, None, None, None);
        Self {
            copying,
            filled,
            ends,
            len,
            gpu,
            from_gpu,
            begun,
            done,
            failed,
            staging: staging.clone(),
        }
    }

    fn poll(&mut self, first: bool) -> Option<Result<(), CopyError>> {
        if self.failed.is_none() && self.done < self.len {
            self.failed = self.step(first).err();
        }
        if let Some(error) = &self.failed {
            return Some(Err(error.clone()));
        }
        (self.done == self.len).then_some(Ok(()))
    }

    /// Advances by one block at most. After an error no copy is in flight.
    fn step(&mut self, must: bool) -> Result<(), CopyError> {
        let mut come = None;
        if let Some((transfer, ..)) = &mut self.copying {
            let Some(outcome) = transfer.poll() else {
                // The CPU fills the next block meanwhile.
                return if self.from_gpu { Ok(()) } else { self.fill(false) };
            };
            come = self.settle();
            outcome?;
        }
        if self.from_gpu {
            // The engine first: it copies the next block while the CPU copies this one.
            if let Some((block, len)) = self.next(must && come.is_none()) {
                let transfer = self.ends.start((&block, len), self.begun, true)?;
                self.copying = Some((transfer, block, len));
                self.begun += len;
            }
            if let Some((block, len)) = come {
                self.ends.copy_now((&block, len), self.done, true)?;
                self.done += len;
            }
            return Ok(());
        }
        self.done += come.map_or(0, |(_, len)| len);
        self.fill(must)?;
        if let Some((block, len)) = self.filled.take() {
            let transfer = self.ends.start((&block, len), self.done, false)?;
            self.copying = Some((transfer, block, len));
        }
        Ok(())
    }

    /// Returns a block for the next bytes, if bytes and a block are left.
    fn next(&self, must: bool) -> Option<(StagingBlock, usize)> {
        let len = (self.len - self.begun).min(BLOCK);
        if len == 0 {
            return None;
        }
        Some((self.staging.take(&self.gpu, Direction::Through, must)?, len))
    }

    /// Fills the next block, unless one is filled already.
    fn fill(&mut self, must: bool) -> Result<(), CopyError> {
        if self.filled.is_some() {
            return Ok(());
        }
        if let Some((block, len)) = self.next(must) {
            self.ends.copy_now((&block, len), self.begun, false)?;
            self.begun += len;
            self.filled = Some((block, len));
        }
        Ok(())
    }

    /// Takes back the end on the GPU, after waiting for the engine.
    fn settle(&mut self) -> Option<(StagingBlock, usize)> {
        let (transfer, block, len) = self.copying.take()?;
        self.ends.end(transfer, self.from_gpu);
        Some((block, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_simulators::gpu::{FailAt, FakeConfig, FakeDriver, Which};
    use carrack_transports::gpu::Flavour;
    use carrack_transports::mem::Region;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at / 3) as u8).collect()
    }

    fn ended(mut moving: Moving) -> (Result<(), CopyError>, (Buffer, Buffer)) {
        loop {
            if let Some(outcome) = moving.poll(true) {
                return (outcome, moving.take_buffers());
            }
        }
    }

    #[test]
    fn every_length_arrives_both_ways_and_no_engine_writes_to_memory_that_is_not_pinned() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpu = driver.gpu(0).unwrap();
        let staging = Arc::default();
        for len in [1, 40, AT_ONCE, AT_ONCE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3] {
            let region = gpu.allocate(len, Flavour::Plain).unwrap();
            let want = bytes(len);
            let onto = Moving::start(region.whole().into(), want.clone().into(), &staging).unwrap();
            assert!(ended(onto).0.is_ok());
            let before = driver.counters().to_pageable;
            let from =
                Moving::start(vec![0; len + 1].into(), region.whole().into(), &staging).unwrap();
            let (outcome, (dst, src)) = ended(from);
            assert!(outcome.is_ok());
            assert_eq!((driver.counters().to_pageable, src.len()), (before, len));
            assert_eq!(dst.as_slice().unwrap()[..len], want[..]);
            assert_eq!(dst.as_slice().unwrap()[len], 0);
        }
        assert!(driver.counters().pinned <= 4);
    }

    #[test]
    fn a_copy_that_fails_in_the_midst_gives_both_buffers_back() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let region = driver.gpu(0).unwrap().allocate(5 * BLOCK, Flavour::Plain).unwrap();
        let host = || Buffer::Vec(vec![1; 5 * BLOCK]);
        let staging = Arc::default();
        for at in [FailAt::Submit, FailAt::Event] {
            for from_gpu in [true, false] {
                for nth in [1, 3] {
                    driver.faults().fail_copies(at, Which::Nth(nth), 700);
                    let on_gpu = Buffer::Region(region.whole());
                    let (dst, src) = if from_gpu { (host(), on_gpu) } else { (on_gpu, host()) };
                    let (dst, src) = match Moving::start(dst, src, &staging) {
                        Err(refused) => (refused.dst, refused.src),
                        Ok(moving) => {
                            let (outcome, buffers) = ended(moving);
                            assert!(
                                matches!(outcome, Err(CopyError::Engine { .. })),
                                "{outcome:?}"
                            );
                            buffers
                        }
                    };
                    assert_eq!((dst.len(), src.len()), (5 * BLOCK, 5 * BLOCK));
                    assert!(matches!(
                        (&dst, &src),
                        (Buffer::Region(_), _) | (_, Buffer::Region(_))
                    ));
                }
            }
        }
    }

    #[test]
    fn what_is_pinned_or_too_short_goes_as_it_always_did() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpu = driver.gpu(0).unwrap();
        let region: Region = gpu.allocate(100, Flavour::Plain).unwrap();
        let pinned = gpu.allocate(100, Flavour::Pinned).unwrap();
        let staging = Arc::default();
        let moving = Moving::start(pinned.whole().into(), region.whole().into(), &staging).unwrap();
        assert!(matches!(moving, Moving::Engine(_)));
        let refused =
            Moving::start(vec![0; 99].into(), region.whole().into(), &staging).err().unwrap();
        assert!(matches!(refused.cause, CopyError::TooLong { len: 100, room: 99 }));
    }

    /// Returns many copies between a region of host memory and one of a GPU, in another order
    /// there, with the expected bytes.
    fn many(gpu: &Arc<dyn Gpu>, lens: &[usize], from_gpu: bool) -> (Together, Region, Vec<u8>) {
        let room = lens.iter().sum::<usize>();
        let (host, device) = (Region::host(room), gpu.allocate(room, Flavour::Plain).unwrap());
        let (dst, src) = if from_gpu { (host, device) } else { (device, host) };
        let content = bytes(room);
        src.whole().write(&content).unwrap();
        let mut together = Together::between(&dst, &src, lens.len()).unwrap();
        let (mut at, mut end, mut wanted) = (0, room, vec![0; room]);
        for &len in lens {
            end -= len;
            assert!(together.push((&dst, end), (&src, at), len));
            wanted[end..end + len].copy_from_slice(&content[at..at + len]);
            at += len;
        }
        (together, dst, wanted)
    }

    #[test]
    fn copies_that_go_together_are_a_call_for_each_block_and_may_end_in_the_midst_of_one() {
        for has_pinned in [true, false] {
            let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
            driver.faults().refuse_pinned(!has_pinned);
            let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
            let staging = Arc::default();
            for lens in [
                vec![64; 1000],
                vec![BLOCK, 1, 0, BLOCK - 2, 1],
                vec![7; BLOCK / 4],
                vec![3, 2 * BLOCK + 5, 0, 40, BLOCK],
                vec![1],
            ] {
                for from_gpu in [true, false] {
                    let (together, target, wanted) = many(&gpu, &lens, from_gpu);
                    let before = driver.counters();
                    let (outcome, buffers) =
                        ended(Moving::start_together(together, &staging).unwrap());
                    let after = driver.counters();
                    assert!(outcome.is_ok() && matches!(buffers, (Buffer::Empty, Buffer::Empty)));
                    assert!(target.whole().to_vec().unwrap() == wanted, "from a GPU: {from_gpu}");
                    let blocks = wanted.len().div_ceil(BLOCK) as u64;
                    let calls = (after.batches - before.batches, after.copies - before.copies);
                    assert_eq!(calls, (blocks, 0), "from a GPU: {from_gpu}");
                }
            }
            assert!(driver.counters().pinned <= if has_pinned { 4 } else { 0 });
        }
    }

    #[test]
    fn copies_that_go_together_fail_once_and_let_their_regions_go() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
        let staging = Arc::default();
        for at in [FailAt::Submit, FailAt::Event] {
            for from_gpu in [true, false] {
                for nth in [1, 3] {
                    let (together, target, _) = many(&gpu, &[5000; BLOCK / 1000], from_gpu);
                    driver.faults().fail_copies(at, Which::Nth(nth), 700);
                    let begun = Moving::start_together(together, &staging);
                    assert_eq!(begun.is_err(), at == FailAt::Submit && nth == 1);
                    let error = begun.map_or_else(Err, |moving| ended(moving).0).unwrap_err();
                    assert!(matches!(error, CopyError::Engine { .. }), "{error}");
                    driver.faults().heal_copies();
                    assert!(target.into_sole().is_ok(), "held only here");
                }
            }
        }
    }
}
