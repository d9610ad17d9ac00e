//! How copies are given to a device: which way they go, to the resident copier or to a stream, and
//! how their end is known.

use super::copier::{Copier, Offered};
use super::device::{CudaGpu, Work};
use super::error::{INVALID_VALUE, NOT_SUPPORTED, because};
use super::event::Fired;
use super::home::Home;
use super::lane::Way;
use super::peer;
use super::sys::{ContextHandle, StreamHandle};
use crate::gpu::{Event, GpuError};
use crate::mem::{GpuUuid, MemKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl CudaGpu {
    /// What takes small copies, if that was asked for and can be had. Found out at the first copy:
    /// a context alone uses no GPU.
    #[inline]
    pub(super) fn copier_in<'a>(&self, home: &'a Arc<Home>) -> Option<&'a Copier> {
        match home.copier.get() {
            Some(copier) => copier.as_ref().ok(),
            None if self.shared.wants_copiers() => self.set_up_copier(home),
            None => None,
        }
    }

    /// Loading a kernel waits for the context, so it is done when no stream waits for a word.
    #[cold]
    fn set_up_copier<'a>(&self, home: &'a Arc<Home>) -> Option<&'a Copier> {
        if !home.is_copier_begun.swap(true, Ordering::SeqCst) {
            let (own, info) = (Arc::clone(home), self.info.clone());
            home.waits.when_none(move || {
                own.copier_is(&info, || Copier::set_up(&own, &info));
            });
        }
        home.copier.get()?.as_ref().ok()
    }

    /// Claims the GPU where copiers were asked for, for work on a stream of the user's: that needs
    /// no copier, and shares the GPU with whoever has one there. Memory alone claims none: reports
    /// allocate some on every GPU that they see, and a peer's is opened here.
    #[inline]
    pub(super) fn claim_for_copier(&self, home: &Home) {
        if home.claim.get().is_none() && self.shared.wants_copiers() {
            self.claim_now(home);
        }
    }

    #[cold]
    fn claim_now(&self, home: &Home) {
        if let Err(why) = home.claim_for_copier(&self.info) {
            home.copier_is(&self.info, || Err(why));
        }
    }

    /// Gives this device's engines access to a peer's ordinary memory, if any has been met in this
    /// process: to allocate it here, or to classify it, is to have the peer's home. What was opened
    /// from another process, and VMM and pool memory, bring their access along, so they cost no
    /// context on the peer.
    #[inline]
    fn make_reachable(&self, home: &Home, owner: GpuUuid) -> Result<(), GpuError> {
        let Some(at) = self.shared.position(owner) else { return Ok(()) };
        if peer::is_enabled(home, at) {
            return Ok(());
        }
        match self.shared.gpus()?.get(at).and_then(|other| other.known_home()) {
            Some(other) => peer::enable(home, other),
            None => Ok(()),
        }
    }

    /// Which way a copy goes, if it may be done at all.
    fn way(&self, home: &Home, dst: MemKind, src: MemKind) -> Result<Way, GpuError> {
        if let (MemKind::Device(to), MemKind::Device(from)) = (dst, src) {
            let (to_own, from_own) = (to == self.info.uuid, from == self.info.uuid);
            if !to_own {
                self.reach(home, to);
            }
            if !from_own {
                self.reach(home, from);
            }
            return Ok(if to_own && from_own { Way::Within } else { Way::Peer });
        }
        let refuse =
            |code, hint: &str| Err(because("copy", code, format!("{hint}: from {src} to {dst}")));
        let way = match (dst, src) {
            (MemKind::Managed(_), _) | (_, MemKind::Managed(_)) => {
                return refuse(
                    NOT_SUPPORTED,
                    "managed memory moves while it is used, and is not copied",
                );
            }
            (MemKind::Unknown, _) | (_, MemKind::Unknown) => {
                return refuse(INVALID_VALUE, "memory of unknown kind: classify it first");
            }
            (MemKind::Device(_), _) => Way::FromHost,
            (_, MemKind::Device(_)) => Way::ToHost,
            _ => return refuse(INVALID_VALUE, "the CPU copies between host and host"),
        };
        if let Some(owner) = dst.gpu().or(src.gpu()).filter(|owner| *owner != self.info.uuid) {
            self.reach(home, owner);
        }
        Ok(way)
    }

    /// As [`make_reachable`](Self::make_reachable), as far as it can be: a copy works without
    /// access, more slowly, since the driver takes it through host memory.
    #[inline]
    fn reach(&self, home: &Home, owner: GpuUuid) {
        if let Err(why) = self.make_reachable(home, owner) {
            tracing::debug!(%why, "no peer access");
        }
    }

    /// A copy between two contexts, told both: for VMM and pool memory that this device was given
    /// no access to, where the plain copy is refused (gpu.md, "Measured").
    fn copy_between_contexts(
        &self,
        home: &Home,
        (dst, src): (usize, usize),
        len: usize,
        stream: StreamHandle,
    ) -> Result<(), GpuError> {
        let end = |addr: usize| {
            let freed = || {
                let hint =
                    format!("nothing is allocated at {addr:#x}: never was, or freed already");
                because("copy", INVALID_VALUE, hint)
            };
            let facts = self.shared.facts(addr)?.ok_or_else(freed)?;
            let owner =
                usize::try_from(facts.ordinal).ok().and_then(|at| self.shared.gpus().ok()?.get(at));
            let context = match owner {
                Some(gpu) if facts.context == ContextHandle::NULL => gpu.home()?.context.raw,
                _ => facts.context,
            };
            Ok::<_, GpuError>(context)
        };
        let (to, from) = (end(dst)?, end(src)?);
        // SAFETY: the promise that `Gpu::copy` was given.
        unsafe { home.calls().memcpy_peer_async(dst, to, src, from, len, stream) }
    }

    /// Gives a stream one copy. The context is current.
    ///
    /// # Safety
    /// As `Gpu::copy`.
    #[inline(always)]
    pub(super) unsafe fn copy_one(
        &self,
        (home, way, stream): (&Home, Way, StreamHandle),
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<(), GpuError> {
        let (to, from) = (dst.0 as usize, src.0 as usize);
        let calls = home.calls();
        // Each call says which side is the device's: the one that finds it out by itself takes a
        // pointer to freed device memory for one to host memory, and lets the CPU go there.
        // SAFETY: the caller's promise; the driver refuses device addresses that are not allocated.
        let mut started = unsafe {
            match way {
                Way::FromHost => calls.memcpy_htod_async(to, src.0.cast(), len, stream),
                Way::ToHost => calls.memcpy_dtoh_async(dst.0.cast(), from, len, stream),
                Way::Within | Way::Peer => calls.memcpy_dtod_async(to, from, len, stream),
            }
        };
        if let Err(refused) = &started
            && refused.code == INVALID_VALUE
            && matches!(way, Way::Peer | Way::Within)
        {
            started = self.copy_between_contexts(home, (to, from), len, stream);
        }
        started.map_err(|error| match error.code {
            INVALID_VALUE if error.hint.is_empty() => {
                let hint = format!(
                    "{len} bytes from {} at {from:#x} to {} at {to:#x}: not allocated, freed already, or longer than \
                     the allocation",
                    src.1, dst.1
                );
                GpuError { hint, ..error }
            }
            _ => error,
        })
    }

    /// What the resident copier is offered, and else a stream given, for copies of one way, and how
    /// their end is known: on a stream of the user's, or on the library's own for that way. A
    /// `give` that fails leaves nothing under way.
    #[inline(always)]
    pub(super) fn give_copies(
        &self,
        users: Option<StreamHandle>,
        (dst, src): (MemKind, MemKind),
        offer: impl FnOnce(&Copier, &Home) -> Offered,
        give: impl FnOnce((&Home, Way, StreamHandle)) -> Result<(), GpuError>,
    ) -> Result<Event, GpuError> {
        let Work { home, copies } = self.work()?;
        let way = self.way(home, dst, src)?;
        let mut without_kernel = None;
        if users.is_none()
            && let Some(copier) = self.copier_in(home)
        {
            if matches!(way, Way::Within | Way::Peer) {
                match offer(copier, home) {
                    Offered::Taken(event) => return Ok(event),
                    Offered::NoKernel => without_kernel = Some(copier),
                    Offered::Not => {}
                }
            }
            copier.resident.settle();
        }
        let _current = home.context.enter()?;
        let stream = users.map_or_else(|| home.lane(way), Ok)?;
        // Before the copies, which no one could tell the end of without it.
        let over = users.map(|_| home.spare_event()).transpose()?;
        give((home, way, stream))?;
        let Some(over) = over else {
            let event = copies[way as usize].given();
            if let Some(copier) = without_kernel {
                copier.resident.renew();
            }
            return Ok(event);
        };
        over.record(stream).inspect_err(|_| {
            // Nobody could tell when it is over, so it has to be over now.
            // SAFETY: the stream is the user's, in this context.
            let _ = unsafe { home.calls().stream_synchronize(stream) };
        })
    }

    /// Starts a copy: on a stream of the user's, or on the library's own for that way.
    ///
    /// # Safety
    /// As `Gpu::copy`.
    pub(super) unsafe fn copy_on(
        &self,
        users: Option<StreamHandle>,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<Event, GpuError> {
        if len == 0 {
            self.way(&self.work()?.home, dst.1, src.1)?;
            return Ok(Event::new(Arc::new(Fired)));
        }
        let ends = (dst.0 as usize, src.0 as usize);
        let offer = |copier: &Copier, home: &Home| copier.offer(self, home, ends, len);
        // SAFETY: the caller's promise.
        self.give_copies(users, (dst.1, src.1), offer, |lane| unsafe {
            self.copy_one(lane, dst, src, len)
        })
    }
}
