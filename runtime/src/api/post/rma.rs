//! Puts and gets: bytes to and from other ranks' memory.

use super::options::{Outcome, Post, RetryReason, Tells};
use super::pieces::Carries;
use super::place::RmaPlace;
use super::submit::Kind;
use super::transmit::{own, tell_now};
use super::waiting::{Waiter, step};
use super::{PostGet, PostPut};
use crate::api::Runtime;
use crate::api::buffer::{Buffer, SendBuffer};
use crate::comp::Completion;
use crate::datapath::{Landing, Moving, NO_COMP, Port};
use crate::error::PostError;
use crate::names::{Rank, RemoteComp, Tag};
use crate::progress::Core;
use crate::progress::in_handler;
use crate::protocol::rma::{Mover, mover};
use crate::protocol::rndv::Ask;
use crate::protocol::wire::{Control, Request};
use crate::region::{Region, RemoteKey};
use carrack_transports::gpu::Stream;
use carrack_transports::mem::copy::{check_kinds, copy_now};
use carrack_transports::mem::{MemKind, PacketSource, Refused, RegionSlice, Transfer};
use std::sync::Arc;

/// The parameters of a put.
pub struct Put<'a> {
    /// `None` once it was posted.
    pub(super) buffer: Option<SendBuffer<'a>>,
    pub(super) place: RmaPlace<'a>,
}

/// The parameters of a get.
pub struct Get<'a> {
    /// `None` once it was posted.
    pub(super) buffer: Option<Buffer>,
    pub(super) place: RmaPlace<'a>,
}

/// Too much waits for peers already: nothing was begun.
pub(super) const BUSY: Outcome = Outcome::Retry(RetryReason::Unanswered);

impl Runtime {
    /// Writes `buffer` into the memory of `rank`, at `offset` in the region or part that `rmr`
    /// names.
    ///
    /// It completes when the bytes are visible there.
    pub fn post_put<'a>(
        &'a self,
        rank: Rank,
        buffer: impl Into<SendBuffer<'a>>,
        rmr: &'a RemoteKey,
        offset: u64,
    ) -> PostPut<'a> {
        let place = RmaPlace { rmr, offset, notify: None };
        Post::new(self, rank, Tag::default(), Put { buffer: Some(buffer.into()), place })
    }

    /// Fills `buffer` from the memory of `rank`, from `offset` in the region or part that `rmr`
    /// names.
    pub fn post_get<'a>(
        &'a self,
        rank: Rank,
        buffer: impl Into<Buffer>,
        rmr: &'a RemoteKey,
        offset: u64,
    ) -> PostGet<'a> {
        let place = RmaPlace { rmr, offset, notify: None };
        Post::new(self, rank, Tag::default(), Get { buffer: Some(buffer.into()), place })
    }
}

impl<K> Post<'_, K> {
    pub(super) fn done(&self, size: usize, buffer: Buffer) -> Outcome {
        Outcome::Done(self.desc.context(size, None).status(buffer, None))
    }

    /// Tells the owner's completion object, if one was named.
    pub(super) fn tell(&self, device: &Port, place: &RmaPlace<'_>, size: usize) {
        if let Some(comp) = place.notify {
            tell(&self.runtime.0, device, self.desc.rank, (comp, self.desc.tag), size);
        }
    }

    /// Copies between two buffers of which a GPU's engine has to touch one, in the order of a
    /// stream or as soon as it can. The error comes with the caller's buffer.
    pub(super) fn transfer(
        &self,
        place: &RmaPlace<'_>,
        (dst, src): (Buffer, Buffer),
        gives_source: bool,
        comp: Option<&Arc<dyn Completion>>,
        stream: Option<&Arc<dyn Stream>>,
    ) -> Result<Outcome, Box<(PostError, Buffer)>> {
        let size = src.len();
        let started = match stream {
            Some(stream) => Transfer::start_on(&**stream, dst, src).map(Moving::Engine),
            None => Moving::start(dst, src, &self.runtime.0.staging),
        };
        match started {
            Ok(transfer) => {
                let landing = Landing {
                    transfer,
                    op: self.desc.context(size, comp.cloned()),
                    gives_source,
                    notify: place.notify,
                    name: self.device_inner().transfers.now(),
                    owed: None,
                };
                match stream {
                    Some(stream) => {
                        let number = self.runtime.0.streams.number();
                        self.device_inner().ordered.push_copy(number, stream, landing);
                    }
                    None => self.device_inner().landings.add(landing),
                }
                Ok(Outcome::Posted)
            }
            Err(refused) => {
                let Refused { dst, src, cause } = *refused;
                Err(Box::new((PostError::Memory(cause), if gives_source { src } else { dst })))
            }
        }
    }

    /// Returns the result of the call, once the operation has begun or not.
    #[inline]
    pub(super) fn called(&self, begun: Result<Outcome, PostError>) -> Result<Outcome, PostError> {
        match self.desc.mode.submits() {
            false => begun,
            true => self.submitted(begun?),
        }
    }

    #[inline(never)]
    fn submitted(&self, begun: Outcome) -> Result<Outcome, PostError> {
        match begun {
            Outcome::Done(status) => {
                Ok(tell_now(self.runtime, self.device_inner(), self.desc.comp, status))
            }
            Outcome::Posted => Ok(Outcome::Posted),
            Outcome::Retry(_) => {
                let limit = self.runtime.0.settings.offers();
                Err(PostError::OffersFull { rank: self.desc.rank, limit })
            }
        }
    }
}

/// Notifies a completion object of another rank of a put or a get of its memory.
pub(super) fn tell(
    runtime: &Core,
    device: &Port,
    rank: Rank,
    (comp, tag): (RemoteComp, Tag),
    size: usize,
) {
    device.deaf.sent(0);
    device.control(runtime, rank, Control::Notify { comp, tag, size: size as u64 });
}

impl<K> Post<'_, K> {
    /// Begins an operation, and waits for its end in `wait`. A handler must not wait: there the
    /// operation begins only if it `ends_at_once`.
    #[inline]
    pub(super) fn begin_or_wait<B>(
        &mut self,
        ends_at_once: impl FnOnce(&Self) -> bool,
        mut begin: B,
    ) -> Result<Outcome, PostError>
    where
        B: FnMut(&mut Self, Option<&Arc<dyn Completion>>) -> Result<Outcome, PostError>,
    {
        if !self.desc.mode.waits() {
            let begun = begin(self, self.desc.comp);
            return self.called(begun);
        }
        if in_handler() && !ends_at_once(self) {
            return Err(PostError::WouldBlock);
        }
        let waiter = Waiter::new();
        loop {
            match begin(self, Some(waiter.as_completion()))? {
                Outcome::Posted => return waiter.status(self.runtime).map(Outcome::Done),
                Outcome::Retry(_) if in_handler() => return Err(PostError::WouldBlock),
                Outcome::Retry(_) => step(self.runtime, self.device_inner()),
                done @ Outcome::Done(_) => {
                    waiter.spare();
                    return Ok(done);
                }
            }
        }
    }

    /// Checks the length of borrowed bytes, which are copied unless the call waits.
    #[inline(always)]
    pub(super) fn check_borrowed(&self, bytes: Option<&[u8]>) -> Result<(), PostError> {
        match bytes {
            Some(bytes) if !self.desc.mode.waits() => {
                let (len, max) = (bytes.len(), self.device_inner().host_pool.packet_size());
                if len > max { Err(PostError::Borrowed { len, max }) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }
}

impl Tells for Put<'_> {
    fn tell(&mut self, comp: RemoteComp) {
        self.place.notify = Some(comp);
    }
}

impl Kind for Put<'_> {
    const NAME: &'static str = "a put";

    fn may_end_unseen(&self) -> bool {
        true
    }

    fn take_back(&mut self, buffer: Buffer) -> bool {
        if !matches!(buffer, Buffer::Empty) {
            self.hold(buffer);
        }
        self.buffer.is_some()
    }

    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.once(|post| match post.in_pieces() {
            Some(called) => called,
            None => post.call_put(),
        })
    }
}

impl<'p> Post<'_, Put<'p>> {
    /// Does something with the buffer, out of its place.
    fn with_buffer<R>(&mut self, with: impl FnOnce(&Self, &mut Option<SendBuffer<'p>>) -> R) -> R {
        let mut buffer = self.kind.buffer.take();
        let result = with(self, &mut buffer);
        self.kind.buffer = buffer;
        result
    }
}

impl Post<'_, Put<'_>> {
    fn call_put(&mut self) -> Result<Outcome, PostError> {
        if let Some(SendBuffer::Borrowed(bytes)) = self.kind.buffer {
            self.check_borrowed(Some(bytes))?;
        }
        let at_once = |this: &Self| {
            let kind = this.kind.buffer.as_ref().map_or(MemKind::Host, SendBuffer::kind);
            this.order.is_none() && this.ends_at_once(&this.kind.place, kind)
        };
        self.begin_or_wait(at_once, |this, comp| {
            this.in_order(
                |this| this.begin(comp),
                |this, order| this.with_buffer(|this, given| this.begin_later(order, given, comp)),
            )
        })
    }

    /// Begins it. The buffer stays in its place where the CPU copies it at once.
    pub(super) fn begin(
        &mut self,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let place = self.kind.place;
        let Some(buffer) = self.kind.buffer.as_ref() else { return Err(PostError::Spent) };
        let size = buffer.len();
        let remote = self.remote(&place, size as u64, buffer.gpu())?;
        if self.waits_to_notify(place.notify) {
            return Ok(BUSY);
        }
        if let Some((region, at)) = remote
            && mover(Some(region.kind()), buffer.kind()) == Mover::Cpu
            && let Some(target) = region.part_mut(at, size)
        {
            copy_now(target, buffer.view()).map_err(PostError::Memory)?;
            self.tell(self.device_inner(), &place, size);
            let buffer = take(&mut self.kind.buffer);
            return Ok(self.done(size, buffer));
        }
        if let Some((region, at)) = remote
            && matches!(region.kind(), MemKind::Device(_))
            && let Some(target) = region.slice(at, size)
            && let Some(source) = take_slice_on_gpu(&mut self.kind.buffer)
        {
            return match self.begin_between(&place, (target, source), comp) {
                Ok(outcome) => Ok(outcome),
                Err(refused) => {
                    self.kind.buffer = Some(SendBuffer::Owned(refused.src));
                    Err(PostError::Memory(refused.cause))
                }
            };
        }
        self.with_buffer(|this, given| this.begin_by_others(&place, given, remote, comp))
    }

    /// Begins what an engine, a NIC or the owner of the memory carries out.
    #[inline(never)]
    fn begin_by_others(
        &self,
        place: &RmaPlace<'_>,
        given: &mut Option<SendBuffer<'_>>,
        remote: Option<(&Region, usize)>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let Some(buffer) = given.as_ref() else { return Err(PostError::Spent) };
        let (size, device) = (buffer.len(), self.device_inner());
        if remote.is_none() {
            check_kinds(MemKind::Host, buffer.view().place().kind()).map_err(PostError::Memory)?;
            if let Some(begun) = self.put_by_nic(place, given, comp)? {
                return Ok(begun);
            }
            if device.transfers.is_full() {
                return Ok(BUSY);
            }
        }
        let (owned, borrowed) = own_or_take(device, given);
        if let Some(slice) = remote.and_then(|(region, at)| region.slice(at, size)) {
            return self.transfer(place, (Buffer::Region(slice), owned), true, comp, None).map_err(
                |refused| {
                    let (error, buffer) = *refused;
                    *given = Some(borrowed.map_or(SendBuffer::Owned(buffer), SendBuffer::Borrowed));
                    error
                },
            );
        }
        let (notified, tag) = (place.notify.unwrap_or(NO_COMP), self.desc.tag);
        let request = self.request(place, size as u64);
        let operation = self.desc.context(size, comp.cloned());
        device.request(&self.runtime.0, operation, owned, |name, addr| Control::RtsPut {
            comp: notified,
            tag,
            request: Request { name, second: addr, ..request },
        });
        Ok(Outcome::Posted)
    }
}

impl Post<'_, Put<'_>> {
    /// Begins a put from one GPU's memory to another's, the most common kind: as `transfer` does,
    /// without its other cases. Not inlined: a put of host memory does not pay for its stack.
    #[inline(never)]
    fn begin_between(
        &self,
        place: &RmaPlace<'_>,
        (target, source): (RegionSlice, RegionSlice),
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, Box<Refused>> {
        let op = self.desc.context(source.len(), comp.cloned());
        let transfer = Moving::Engine(Transfer::between(target, source)?);
        let device = self.device_inner();
        device.landings.add(Landing {
            transfer,
            op,
            gives_source: true,
            notify: place.notify,
            name: device.transfers.now(),
            owed: None,
        });
        Ok(Outcome::Posted)
    }
}

impl<K> Post<'_, K> {
    /// Returns the request to the owner, without the fields that only one side knows.
    fn request(&self, place: &RmaPlace<'_>, len: u64) -> Request {
        let offset = place.rmr.offset() + place.offset;
        Request { name: 0, region: place.rmr.number(), offset, first: len, second: 0 }
    }

    /// Asks the owner for an atomic operation.
    pub(super) fn ask_to_change(
        &self,
        place: &RmaPlace<'_>,
        swap: bool,
        (first, second): (u64, u64),
        comp: Option<&Arc<dyn Completion>>,
    ) -> Outcome {
        let request = Request { first, second, ..self.request(place, 8) };
        let device = self.device_inner();
        if device.transfers.is_full() {
            return BUSY;
        }
        let operation = self.desc.context(8, comp.cloned());
        device.request(&self.runtime.0, operation, Buffer::Empty, |name, _| Control::Atomic {
            swap,
            request: Request { name, ..request },
        });
        Outcome::Posted
    }
}

/// Returns the buffer, or a copy of borrowed bytes with the bytes themselves, to give back.
pub(super) fn own_or_take<'a>(
    device: &Port,
    given: &mut Option<SendBuffer<'a>>,
) -> (Buffer, Option<&'a [u8]>) {
    match given {
        Some(SendBuffer::Borrowed(bytes)) => (own(device, bytes), Some(*bytes)),
        _ => (take(given), None),
    }
}

/// Returns the part of a region in GPU memory, if that is put.
#[inline]
fn take_slice_on_gpu(given: &mut Option<SendBuffer<'_>>) -> Option<RegionSlice> {
    let Some(SendBuffer::Owned(Buffer::Region(slice))) = given else { return None };
    if !matches!(slice.kind(), MemKind::Device(_)) {
        return None;
    }
    match given.take() {
        Some(SendBuffer::Owned(Buffer::Region(slice))) => Some(slice),
        _ => None,
    }
}

/// Takes the buffer for the status; borrowed bytes stay, for [`Post::again`].
fn take(given: &mut Option<SendBuffer<'_>>) -> Buffer {
    match given.take() {
        Some(SendBuffer::Owned(buffer)) => buffer,
        borrowed => {
            *given = borrowed;
            Buffer::Empty
        }
    }
}

impl Tells for Get<'_> {
    fn tell(&mut self, comp: RemoteComp) {
        self.place.notify = Some(comp);
    }
}

impl Kind for Get<'_> {
    const NAME: &'static str = "a get";

    fn take_back(&mut self, buffer: Buffer) -> bool {
        // A buffer that the peer may still write stays with the runtime.
        let is_back = !matches!(buffer, Buffer::Empty);
        if is_back {
            self.hold(buffer);
        }
        is_back
    }

    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        match post.in_pieces() {
            Some(called) => called,
            None => post.call_get(),
        }
    }
}

impl Post<'_, Get<'_>> {
    fn call_get(&mut self) -> Result<Outcome, PostError> {
        let at_once = |this: &Self| {
            let kind = this.kind.buffer.as_ref().map_or(MemKind::Host, Buffer::kind);
            this.order.is_none() && this.ends_at_once(&this.kind.place, kind)
        };
        self.begin_or_wait(at_once, |this, comp| {
            this.in_order(
                |this| this.begin(comp),
                |this, order| this.with_buffer(|this, given| this.begin_later(order, given, comp)),
            )
        })
    }

    /// Begins it. The buffer stays in its place where the CPU fills it at once.
    pub(super) fn begin(
        &mut self,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let place = self.kind.place;
        let Some(buffer) = self.kind.buffer.as_mut() else { return Err(PostError::Spent) };
        let (size, local) = (buffer.len(), buffer.kind());
        let near = buffer.gpu().cloned();
        if !buffer.has_view_mut() {
            return Err(PostError::ReadOnly("Bytes"));
        }
        let remote = self.remote(&place, size as u64, near.as_ref())?;
        if self.waits_to_notify(place.notify) {
            return Ok(BUSY);
        }
        if let Some((region, at)) = remote
            && mover(Some(region.kind()), local) == Mover::Cpu
            && let Some(source) = region.part(at, size)
            && let Some(target) = self.kind.buffer.as_mut().and_then(Buffer::view_mut)
        {
            copy_now(target, source).map_err(PostError::Memory)?;
            self.tell(self.device_inner(), &place, size);
            let buffer = self.kind.buffer.take().unwrap_or_default();
            return Ok(self.done(size, buffer));
        }
        self.with_buffer(|this, given| this.begin_by_others(&place, given, remote, comp))
    }

    /// Does something with the buffer, out of its place.
    fn with_buffer<R>(&mut self, with: impl FnOnce(&Self, &mut Option<Buffer>) -> R) -> R {
        let mut buffer = self.kind.buffer.take();
        let result = with(self, &mut buffer);
        self.kind.buffer = buffer;
        result
    }

    /// Begins what an engine, a NIC or the owner of the memory carries out.
    #[inline(never)]
    fn begin_by_others(
        &self,
        place: &RmaPlace<'_>,
        given: &mut Option<Buffer>,
        remote: Option<(&Region, usize)>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let Some(buffer) = given.as_mut() else { return Err(PostError::Spent) };
        let (size, device) = (buffer.len(), self.device_inner());
        let Some(target) = buffer.view_mut() else { return Err(PostError::ReadOnly("Bytes")) };
        let place_kind = target.place().kind();
        if size == 0 {
            self.tell(device, place, 0);
            return Ok(self.done(0, given.take().unwrap_or_default()));
        }
        let Some((region, at)) = remote else {
            check_kinds(place_kind, MemKind::Host).map_err(PostError::Memory)?;
            if let Some(begun) = self.get_by_nic(place, given, comp)? {
                return Ok(begun);
            }
            if device.transfers.is_full() {
                return Ok(BUSY);
            }
            let buffer = given.take().unwrap_or_default();
            let op = self.desc.context(size, comp.cloned());
            let (notified, tag) = (place.notify.unwrap_or(NO_COMP), self.desc.tag);
            let request = self.request(place, size as u64);
            device.get(&self.runtime.0, (buffer, op), Ask::Get { comp: notified, tag, request });
            return Ok(Outcome::Posted);
        };
        let buffer = given.take().unwrap_or_default();
        let source = region.slice(at, size).map_or(Buffer::Empty, Buffer::Region);
        self.transfer(place, (buffer, source), false, comp, None).map_err(|refused| {
            let (error, buffer) = *refused;
            *given = Some(buffer);
            error
        })
    }
}

impl Carries for Put<'_> {
    const IS_SENT: bool = true;

    fn owned(&mut self) -> Option<&mut Buffer> {
        self.buffer.as_mut()?.owned()
    }

    fn hold(&mut self, buffer: Buffer) {
        self.buffer = Some(SendBuffer::Owned(buffer));
    }

    fn take(&mut self) -> Self {
        Self { buffer: self.buffer.take(), place: self.place }
    }
}

impl Carries for Get<'_> {
    const IS_SENT: bool = false;

    fn owned(&mut self) -> Option<&mut Buffer> {
        self.buffer.as_mut()
    }

    fn hold(&mut self, buffer: Buffer) {
        self.buffer = Some(buffer);
    }

    fn take(&mut self) -> Self {
        Self { buffer: self.buffer.take(), place: self.place }
    }
}
