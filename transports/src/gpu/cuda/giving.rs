//! Submission of copies to a device: the choice between the resident copier and a stream, and the
//! event for their end.

use super::copier::{Copier, Offered};
use super::device::{CudaGpu, Work};
use super::error::{INVALID_VALUE, NOT_SUPPORTED, because};
use super::event::Fired;
use super::home::Home;
use super::lane::CopyDirection;
use super::peer;
use super::sys::{ContextHandle, StreamHandle};
use crate::gpu::{GpuError, GpuEvent};
use crate::mem::{GpuUuid, MemKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl CudaGpu {
    /// Returns the copier for small copies, if it was asked for and is available. It is set up at
    /// the first copy: a context alone uses no GPU.
    #[inline]
    pub(super) fn copier_in<'a>(&self, home: &'a Arc<Home>) -> Option<&'a Copier> {
        match home.copier.get() {
            Some(copier) => copier.as_ref().ok(),
            None if self.shared.wants_copiers() => self.set_up_copier(home),
            None => None,
        }
    }

    /// Loads the kernel when no stream waits for a word, since loading waits for the context.
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

    /// Claims the GPU for work on a stream of the user's, if copiers were asked for. That work
    /// needs no copier, but shares the GPU with other processes that may have one there. Memory
    /// alone claims none: reports allocate some on every visible GPU, and peers' memory is opened
    /// here.
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

    /// Gives this device's engines access to a peer's ordinary memory, if the peer's home exists
    /// in this process. It exists once the process has allocated or classified such memory. Memory
    /// opened from another process, and VMM and pool memory, come with their access, so they cost
    /// no context on the peer.
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

    /// Returns the direction for a copy, or an error if the copy is not supported.
    fn direction(
        &self,
        home: &Home,
        dst: MemKind,
        src: MemKind,
    ) -> Result<CopyDirection, GpuError> {
        if let (MemKind::Device(to), MemKind::Device(from)) = (dst, src) {
            let (to_own, from_own) = (to == self.info.uuid, from == self.info.uuid);
            if !to_own {
                self.reach(home, to);
            }
            if !from_own {
                self.reach(home, from);
            }
            return Ok(if to_own && from_own {
                CopyDirection::Within
            } else {
                CopyDirection::Peer
            });
        }
        let refuse =
            |code, hint: &str| Err(because("copy", code, format!("{hint}: from {src} to {dst}")));
        let direction = match (dst, src) {
            (MemKind::Managed(_), _) | (_, MemKind::Managed(_)) => {
                return refuse(
                    NOT_SUPPORTED,
                    "managed memory moves while it is used, and is not copied",
                );
            }
            (MemKind::Unknown, _) | (_, MemKind::Unknown) => {
                return refuse(INVALID_VALUE, "memory of unknown kind: classify it first");
            }
            (MemKind::Device(_), _) => CopyDirection::FromHost,
            (_, MemKind::Device(_)) => CopyDirection::ToHost,
            _ => return refuse(INVALID_VALUE, "the CPU copies between host and host"),
        };
        if let Some(owner) = dst.gpu().or(src.gpu()).filter(|owner| *owner != self.info.uuid) {
            self.reach(home, owner);
        }
        Ok(direction)
    }

    /// Gives access to memory as [`make_reachable`](Self::make_reachable) does, but only logs a
    /// failure. A copy works without access, more slowly, since the driver takes it through host
    /// memory.
    #[inline]
    fn reach(&self, home: &Home, owner: GpuUuid) {
        if let Err(why) = self.make_reachable(home, owner) {
            tracing::debug!(%why, "no peer access");
        }
    }

    /// Gives a stream a copy that names both contexts. VMM and pool memory that this device has no
    /// access to needs it: the plain copy is refused (gpu.md, "Measured").
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
        // SAFETY: the promise of `Gpu::copy`'s caller.
        unsafe { home.calls().memcpy_peer_async(dst, to, src, from, len, stream) }
    }

    /// Gives a stream one copy. The context is current.
    ///
    /// # Safety
    /// As `Gpu::copy`.
    #[inline(always)]
    pub(super) unsafe fn copy_one(
        &self,
        (home, direction, stream): (&Home, CopyDirection, StreamHandle),
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<(), GpuError> {
        let (to, from) = (dst.0 as usize, src.0 as usize);
        let calls = home.calls();
        // Each call says which side is the device's. The one that finds it out itself takes a
        // pointer to freed device memory for a host pointer, and lets the CPU access it.
        // SAFETY: the caller's promise; the driver refuses device addresses that are not allocated.
        let mut started = unsafe {
            match direction {
                CopyDirection::FromHost => calls.memcpy_htod_async(to, src.0.cast(), len, stream),
                CopyDirection::ToHost => calls.memcpy_dtoh_async(dst.0.cast(), from, len, stream),
                CopyDirection::Within | CopyDirection::Peer => {
                    calls.memcpy_dtod_async(to, from, len, stream)
                }
            }
        };
        if let Err(refused) = &started
            && refused.code == INVALID_VALUE
            && matches!(direction, CopyDirection::Peer | CopyDirection::Within)
        {
            started = self.copy_between_contexts(home, (to, from), len, stream);
        }
        started.map_err(|error| match error.code {
            INVALID_VALUE if error.hint.is_empty() => {
                let hint = format!(
                    "{len} bytes from {} at {from:#x} to {} at {to:#x}: not allocated, freed \
                    already, or longer than \
                     the allocation",
                    src.1, dst.1
                );
                GpuError { hint, ..error }
            }
            _ => error,
        })
    }

    /// Offers copies of one direction to the resident copier, and else gives them to a stream: the
    /// user's, or the library's own for that direction. Returns their event. A `give` that fails
    /// leaves no copy in flight.
    #[inline(always)]
    pub(super) fn give_copies(
        &self,
        users: Option<StreamHandle>,
        (dst, src): (MemKind, MemKind),
        offer: impl FnOnce(&Copier, &Home) -> Offered,
        give: impl FnOnce((&Home, CopyDirection, StreamHandle)) -> Result<(), GpuError>,
    ) -> Result<GpuEvent, GpuError> {
        let Work { home, copies } = self.work()?;
        let direction = self.direction(home, dst, src)?;
        let mut without_kernel = None;
        if users.is_none()
            && let Some(copier) = self.copier_in(home)
        {
            if matches!(direction, CopyDirection::Within | CopyDirection::Peer) {
                match offer(copier, home) {
                    Offered::Taken(event) => return Ok(event),
                    Offered::NoKernel => without_kernel = Some(copier),
                    Offered::Not => {}
                }
            }
            copier.resident.settle();
        }
        let _current = home.context.enter()?;
        let stream = users.map_or_else(|| home.lane(direction), Ok)?;
        // Taken before the copies: without an event their end would be unknown.
        let end = users.map(|_| home.spare_event()).transpose()?;
        give((home, direction, stream))?;
        let Some(end) = end else {
            let event = copies[direction as usize].given();
            if let Some(copier) = without_kernel {
                copier.resident.renew();
            }
            return Ok(event);
        };
        end.record(stream).inspect_err(|_| {
            // The copies have no event, so they have to end before the call returns.
            // SAFETY: the stream is the user's, in this context.
            let _ = unsafe { home.calls().stream_synchronize(stream) };
        })
    }

    /// Starts a copy: on a stream of the user's, or on the library's own for that direction.
    ///
    /// # Safety
    /// As `Gpu::copy`.
    pub(super) unsafe fn copy_on(
        &self,
        users: Option<StreamHandle>,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError> {
        if len == 0 {
            self.direction(&self.work()?.home, dst.1, src.1)?;
            return Ok(GpuEvent::new(Arc::new(Fired)));
        }
        let ends = (dst.0 as usize, src.0 as usize);
        let offer = |copier: &Copier, home: &Home| copier.offer(self, home, ends, len);
        // SAFETY: the caller's promise.
        self.give_copies(users, (dst.1, src.1), offer, |lane| unsafe {
            self.copy_one(lane, dst, src, len)
        })
    }
}
