//! One simulated device.

use super::copier::ThreadLauncher;
use super::engine::{Copy, CopyPart, End, Queue, StreamJob};
use super::error::{INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, error};
use super::event::Promise;
use super::faults::{FailAt, GpuFaults, count};
use super::ipc;
use super::shared::{INTERNAL_STREAMS, Shared};
use super::shared_event::FakeSharedEvent;
use super::stream::FakeStream;
use carrack_transports::gpu::copier::Resident;
use carrack_transports::gpu::{
    Access, CopierState, DmaBuf, Extent, Flavour, Gpu, GpuError, GpuEvent, GpuInfo, Grid, Handle,
    HandleForm, HostRegistration, PeerInfo, Pieces, RemoteWrites, Reservation, Rights, SharedEvent,
    Stream,
};
use carrack_transports::mem::{GpuUuid, MemKind, Region};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One simulated device. Its memory lies at addresses where a load or a store of the CPU ends the
/// process.
pub struct FakeGpu {
    shared: Arc<Shared>,
    ordinal: usize,
    info: GpuInfo,
}

impl FakeGpu {
    pub(super) fn new(shared: Arc<Shared>, ordinal: usize, info: GpuInfo) -> Self {
        Self { shared, ordinal, info }
    }

    /// Returns the switches for faults, shared with the driver and its other devices.
    pub fn faults(&self) -> &Arc<GpuFaults> {
        &self.shared.faults
    }

    /// Returns a user's stream in its own type, for [`FakeStream::launch`].
    ///
    /// # Errors
    /// The system gives no thread for it.
    pub fn fake_stream(&self) -> Result<Arc<FakeStream>, GpuError> {
        FakeStream::new(Arc::clone(&self.shared), self.ordinal).map(Arc::new)
    }

    /// Waits as `cuCtxSynchronize`, and a program's freeing of memory, do: blocks while a stream
    /// of the device waits for a word.
    ///
    /// # Errors
    /// Never, for a device that exists.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.shared.device("synchronize", self.ordinal)?.standstill.until_none_waits();
        Ok(())
    }

    /// Checks the ends of a copy, and returns it with its event; without bytes only the event to
    /// be fired.
    #[allow(clippy::type_complexity, reason = "a copy, or the event of none")]
    pub(super) fn checked(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<(Result<Copy, Promise>, GpuEvent), GpuError> {
        let mut parts = Vec::with_capacity(1);
        self.add_parts(&mut parts, dst, src, len)?;
        self.together(parts)
    }

    /// Checks grouped copies as [`checked`](Self::checked) does one copy.
    #[allow(clippy::type_complexity, reason = "as above")]
    pub(super) fn checked_pieces(
        &self,
        pieces: &Pieces,
    ) -> Result<(Result<Copy, Promise>, GpuEvent), GpuError> {
        let (dst, src) = pieces.kinds();
        let mut parts = Vec::with_capacity(pieces.count());
        for (to, from, len) in pieces.iter() {
            self.add_parts(&mut parts, (to, dst), (from, src), len)?;
        }
        self.together(parts)
    }

    /// Adds a copy in two parts if it crosses from one allocation into the next.
    fn add_parts(
        &self,
        parts: &mut Vec<CopyPart>,
        (mut to, dst): (*mut u8, MemKind),
        (mut from, src): (*const u8, MemKind),
        mut len: usize,
    ) -> Result<(), GpuError> {
        while len > 0 {
            let borders = [to as usize, from as usize].map(|addr| self.shared.border(addr, len));
            let first = borders.into_iter().flatten().min().unwrap_or(len);
            parts.push(self.part((to, dst), (from, src), first)?);
            (to, from, len) = (to.wrapping_add(first), from.wrapping_add(first), len - first);
        }
        Ok(())
    }

    /// Checks the rows of a grid as [`checked`](Self::checked) does one copy.
    #[allow(clippy::type_complexity, reason = "as above")]
    pub(super) fn checked_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<(Result<Copy, Promise>, GpuEvent), GpuError> {
        let mut rows = Pieces::new(dst.1, src.1, 0);
        for (to, from) in grid.rows() {
            rows.push(dst.0.wrapping_add(to), src.0.wrapping_add(from), grid.count[0]);
        }
        self.checked_pieces(&rows)
    }

    #[allow(clippy::type_complexity, reason = "as above")]
    fn together(
        &self,
        parts: Vec<CopyPart>,
    ) -> Result<(Result<Copy, Promise>, GpuEvent), GpuError> {
        let (done, event) = Promise::new();
        if parts.is_empty() {
            return Ok((Err(done), event));
        }
        let fail = match self.shared.faults.next_copy() {
            Some((FailAt::Submit, why)) => return Err(why),
            Some((FailAt::Event, why)) => Some(why),
            None => None,
        };
        let delay = self.shared.faults.delay_of_copies();
        Ok((Ok(Copy { parts, delay, fail, done, in_flight: None }), event))
    }

    /// Checks both ends of a copy.
    fn part(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<CopyPart, GpuError> {
        let dst = self.end("target", dst.0, dst.1, len)?;
        let src = self.end("source", src.0.cast_mut(), src.1, len)?;
        Ok((dst, src, len))
    }

    /// Gives grouped copies to one of the library's own streams.
    fn give_together(
        &self,
        checked: (Result<Copy, Promise>, GpuEvent),
        is_for_copier: bool,
    ) -> Result<GpuEvent, GpuError> {
        match checked {
            (Ok(copies), event) => {
                if let Some(event) = self.give_to_copier_or_engine(copies, is_for_copier)? {
                    return Ok(event);
                }
                count(&self.shared.faults.counts.batches);
                Ok(event)
            }
            (Err(done), event) => {
                done.fire(Ok(()));
                Ok(event)
            }
        }
    }

    /// Checks one end of a copy, and finds the engine's address of it.
    fn end(&self, which: &str, ptr: *mut u8, kind: MemKind, len: usize) -> Result<End, GpuError> {
        let wrong = |what: String| {
            error("copy", INVALID_VALUE, format!("the {which} {ptr:p}+{len} {what}"))
        };
        let addr = ptr as usize;
        match kind {
            MemKind::Host | MemKind::Pinned => {
                let host = NonNull::new(ptr).ok_or_else(|| wrong("is null".into()))?;
                // The ends of the range suffice: a window is one mapping, and host memory does not
                // span it.
                if [addr, addr.saturating_add(len - 1)]
                    .iter()
                    .any(|at| self.shared.window_of(*at).is_some())
                {
                    return Err(wrong(format!(
                        "is device memory, and was said to be {kind}: classify it first"
                    )));
                }
                Ok(End::Host(host))
            }
            MemKind::Device(uuid) => {
                let found = self.shared.find(addr).ok_or_else(|| {
                    wrong(
                        "is no device memory of this process: never allocated, or freed already"
                            .into(),
                    )
                })?;
                let owner = &self.shared.device("copy", found.ordinal)?.info;
                // The caller names the device that opened the memory. A range of reserved
                // addresses may have memory of several devices, and is named after the first's.
                if owner.uuid != uuid && !found.is_for_others {
                    return Err(wrong(format!(
                        "belongs to {}, and was said to be {kind}",
                        owner.uuid
                    )));
                }
                let offset = addr - found.base;
                if len > found.len - offset {
                    let (base, whole) = (found.base, found.len);
                    return Err(wrong(format!(
                        "goes beyond the allocation's end: it is {base:#x}+{whole}"
                    )));
                }
                self.shared.reaches("copy", self.ordinal, owner.uuid)?;
                Ok(End::Device(found.alias, offset))
            }
            MemKind::Managed(_) => {
                Err(error("copy", NOT_SUPPORTED, "managed memory is not copied"))
            }
            MemKind::Unknown => Err(wrong("is of unknown kind: classify it first".into())),
        }
    }

    /// Returns the resident copier, if it was asked for.
    fn resident(&self) -> Result<Option<&Arc<Resident<ThreadLauncher>>>, GpuError> {
        if !self.shared.wants_copiers.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let device = self.shared.device("copy", self.ordinal)?;
        Ok(device.copier.find(&self.shared.faults, &device.standstill))
    }

    /// Gives copies to the resident kernel, which then provides the event, or to one of the
    /// library's own streams, behind all copies of the kernel.
    fn give_to_copier_or_engine(
        &self,
        mut copy: Copy,
        is_for_copier: bool,
    ) -> Result<Option<GpuEvent>, GpuError> {
        let Some(resident) = self.resident()? else {
            return self.give(StreamJob::Copy(copy)).map(|()| None);
        };
        let copier = &self.shared.device("copy", self.ordinal)?.copier;
        let mut lacks_kernel = false;
        if is_for_copier && !self.shared.faults.orders_copies() {
            match copier.offer(resident, copy.parts) {
                Ok(event) => return Ok(Some(event)),
                Err((lacks, parts)) => (lacks_kernel, copy.parts) = (lacks, parts),
            }
        }
        resident.settle();
        copy.in_flight = Some(copier.engine_begins());
        self.give(StreamJob::Copy(copy))?;
        if lacks_kernel {
            resident.renew();
        }
        Ok(None)
    }

    /// Gives a job to one of the library's own streams, in turn.
    fn give(&self, job: StreamJob) -> Result<(), GpuError> {
        let device = self.shared.device("copy", self.ordinal)?;
        let turn = device.turn.fetch_add(1, Ordering::Relaxed) % INTERNAL_STREAMS;
        let Some(slot) = device.streams.get(turn) else {
            return Err(error("copy", INVALID_VALUE, "no such stream"));
        };
        let mut stream = slot.lock();
        if let Some(queue) = stream.as_ref() {
            return queue.give(job);
        }
        let name = format!("fake-gpu{}-own{turn}", self.ordinal);
        let standstill = Arc::clone(&device.standstill);
        stream.insert(Queue::start(name, Arc::clone(&self.shared.faults), standstill)?).give(job)
    }
}

/// Returns `true` if none of `count` copies crosses from one allocation into the next. As with
/// NVIDIA's driver, the engine does those that cross.
fn are_at_most<E>(checked: &Result<Copy, E>, count: usize) -> bool {
    checked.as_ref().is_ok_and(|copy| copy.parts.len() <= count)
}

// SAFETY: each region is a mapping of its own. An engine keeps its promise by dropping the copy
// with its ends; it never has a refused copy.
unsafe impl Gpu for FakeGpu {
    fn info(&self) -> &GpuInfo {
        &self.info
    }

    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError> {
        self.shared.classify(addr)
    }

    fn check(&self) -> Result<(), GpuError> {
        match self.shared.faults.has_lost_contexts() {
            true => Err(error("check", INVALID_CONTEXT, "ordered by a test")),
            false => Ok(()),
        }
    }

    fn allocate(&self, len: usize, flavour: Flavour) -> Result<Region, GpuError> {
        self.shared.allocate(self.ordinal, len, flavour)
    }

    fn granularity(&self) -> Result<usize, GpuError> {
        self.shared.granularity()
    }

    fn reserve(&self, len: usize) -> Result<Reservation, GpuError> {
        self.shared.reserve(self.ordinal, len)
    }

    fn allocate_at(
        &self,
        reservation: &Reservation,
        offset: usize,
        len: usize,
        access: &[Access],
    ) -> Result<Region, GpuError> {
        self.shared.allocate_at(self.ordinal, reservation, (offset, len), access)
    }

    fn rights_at(&self, addr: usize) -> Result<Option<Rights>, GpuError> {
        let wrong = || {
            error(
                "get_access",
                INVALID_VALUE,
                format!("{addr:#x} is no memory that access is given to"),
            )
        };
        let found = self.shared.find(addr).ok_or_else(wrong)?;
        match found.access {
            Some(access) => {
                Ok(access.iter().find(|(device, _)| *device == self.ordinal).map(|one| one.1))
            }
            None if found.is_vmm => {
                let owner = self.shared.device("get_access", found.ordinal)?.info.uuid;
                Ok(self.reaches(owner).is_ok().then_some(Rights::ReadWrite))
            }
            None => Err(wrong()),
        }
    }

    fn keeps_from_writing(&self, owner: GpuUuid) -> Result<(), GpuError> {
        self.reaches(owner)?;
        if self.shared.faults.lets_readers_write() {
            let why = "it writes there all the same, as was ordered";
            return Err(error("set_access", NOT_SUPPORTED, why));
        }
        Ok(())
    }

    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError> {
        let is_to_pageable = dst.1 == MemKind::Host && !src.1.is_host();
        match self.checked(dst, src, len)? {
            (Ok(copy), event) => {
                // An engine does copies that cross from one allocation into the next.
                let is_one = copy.parts.len() == 1;
                if let Some(event) = self.give_to_copier_or_engine(copy, is_one)? {
                    return Ok(event);
                }
                count(&self.shared.faults.counts.copies);
                if is_to_pageable {
                    count(&self.shared.faults.counts.to_pageable);
                }
                Ok(event)
            }
            (Err(done), event) => {
                done.fire(Ok(()));
                Ok(event)
            }
        }
    }

    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<GpuEvent, GpuError> {
        let checked = self.checked_pieces(pieces)?;
        let are_whole = are_at_most(&checked.0, pieces.count());
        self.give_together(checked, are_whole)
    }

    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        // As with NVIDIA's driver: rows are the engine's, except a single one.
        let checked = self.checked_grid(dst, src, grid)?;
        let is_one = grid.count[1] == 1 && grid.count[2] == 1 && are_at_most(&checked.0, 1);
        self.give_together(checked, is_one)
    }

    fn how_pieces_go(&self) -> String {
        "by one call of the simulated driver, however many they are".into()
    }

    fn copier(&self) -> CopierState {
        let Ok(device) = self.shared.device("copier", self.ordinal) else {
            return CopierState::Off;
        };
        let wanted = self.shared.wants_copiers.load(Ordering::SeqCst);
        device.copier.state().unwrap_or(if wanted { CopierState::Wanted } else { CopierState::Off })
    }

    fn stream(&self) -> Result<Arc<dyn Stream>, GpuError> {
        Ok(self.fake_stream()?)
    }

    fn reaches(&self, peer: GpuUuid) -> Result<(), GpuError> {
        self.shared.reaches("reaches", self.ordinal, peer)
    }

    /// Returns `true` if the region has no GPU, or the device reaches that GPU: memory opened for
    /// one simulated device is open for all.
    fn reaches_region(&self, region: &Region) -> bool {
        region.kind().gpu().is_none_or(|owner| self.reaches(owner).is_ok())
    }

    fn numa_node(&self) -> Result<u32, String> {
        let device = self.shared.device("numa", self.ordinal).map_err(|why| why.to_string())?;
        device.numa.ok_or_else(|| "this simulated device was told of no NUMA node".into())
    }

    fn export(&self, region: &Region, form: HandleForm) -> Result<Handle, GpuError> {
        ipc::export(&self.shared, self.ordinal, region, form)
    }

    fn open(&self, handle: &Handle) -> Result<Region, GpuError> {
        ipc::open(&self.shared, self.ordinal, handle)
    }

    fn open_at(
        &self,
        reservation: &Reservation,
        offset: usize,
        handle: &Handle,
    ) -> Result<Region, GpuError> {
        ipc::open_at(&self.shared, self.ordinal, (reservation, offset), handle)
    }

    fn export_dmabuf(&self, addr: usize, len: usize) -> Result<DmaBuf, GpuError> {
        self.shared.export_dmabuf(self.ordinal, addr, len)
    }

    fn remote_writes(&self) -> RemoteWrites {
        self.shared.faults.remote_writes()
    }

    fn flush_remote_writes(&self) -> Result<(), GpuError> {
        self.shared.flush_remote_writes();
        Ok(())
    }

    fn peer(&self, peer: GpuUuid) -> Result<PeerInfo, GpuError> {
        let access = self.reaches(peer).is_ok();
        Ok(PeerInfo {
            access,
            performance_rank: 0,
            native_atomics: false,
            link: "simulated".into(),
        })
    }

    fn when_no_stream_waits(&self, task: Box<dyn FnOnce() + Send>) {
        match self.shared.device("look after", self.ordinal) {
            Ok(device) => device.waits.when_none(task),
            Err(_) => task(),
        }
    }

    unsafe fn register_host(
        &self,
        addr: *mut u8,
        len: usize,
    ) -> Result<HostRegistration, GpuError> {
        self.shared.register_host(self.ordinal, addr as usize, len)
    }

    fn shared_event(&self) -> Result<Arc<dyn SharedEvent>, GpuError> {
        Ok(Arc::new(FakeSharedEvent::new()?))
    }

    fn open_event(&self, handle: &[u8; 64]) -> Result<Arc<dyn SharedEvent>, GpuError> {
        Ok(Arc::new(FakeSharedEvent::open(handle)?))
    }
}

impl fmt::Debug for FakeGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FakeGpu({} #{}, simulated)", self.info.uuid, self.ordinal)
    }
}
