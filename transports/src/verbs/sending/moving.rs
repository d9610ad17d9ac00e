//! Transfers between buffers and a peer's memory.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::{RESERVE, SendingHalf, Unsent};
use crate::contract::{BufferChunk, Busy, OpToken, RemotePlace};
use crate::mem::Buffer;
use crate::verbs::bounces::{Bounces, Filled};
use crate::verbs::memory::addresses;
use crate::verbs::sys::bindings::{IBV_SEND_INLINE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, ibv_sge};
use crate::verbs::transfers::{Direction, PIECE, PlaceKey, RdmaTransfer, Registrations, Via};

impl SendingHalf {
    /// Writes a buffer to a peer's memory, or fills it from there. The buffer is taken once that
    /// has begun.
    pub(in crate::verbs) fn transfer(
        &mut self,
        (direction, remote): (Direction, RemotePlace),
        (buffer, token): (&mut Buffer, OpToken),
        completed: u32,
        (registrations, bounces): (&Registrations, &Bounces),
    ) -> Result<(), Unsent> {
        let (rkey, behind) = Self::named((direction, remote), registrations)?;
        if PlaceKey::decode(remote.key).is_some_and(|key| key.rail > 0) {
            return Err(Unsent::Wrong("it has named a key of another NIC's".into()));
        }
        // A copy is quicker than a registration. A region is registered already, or will be for
        // the next time.
        let is_small = buffer.len() <= bounces.payload() && buffer.view().place().is_host();
        if is_small && !matches!(buffer, Buffer::Region(_)) {
            let way = (direction, remote.addr, rkey);
            return self.small_transfer(way, (buffer, token), completed, (bounces, behind));
        }
        let part = 0..buffer.len();
        self.find_room(part.len(), behind, completed)?;
        let registration =
            registrations.of((buffer, part.clone()), direction).map_err(Unsent::Unregistered)?;
        let Some((base, len)) = addresses(buffer) else {
            return Err(Unsent::Unregistered("it is not in one piece".into()));
        };
        let here = (base, len, registration.memory.lkey());
        // SAFETY: the buffer lies in the registration, and both are held from here on, if any of
        // it has begun.
        let begun = unsafe { self.move_bytes((direction, remote.addr, rkey), here, behind) }?;
        // Also if a part was refused: posted requests still use it. It is released when the queue
        // pair is gone.
        self.hold(RdmaTransfer::new(
            token,
            Via::Registration(registration, direction),
            std::mem::take(buffer),
        ));
        begun
    }

    /// Writes a part of a buffer to a peer's memory, and shares the buffer until that has ended.
    pub(in crate::verbs) fn put_chunk(
        &mut self,
        remote: RemotePlace,
        (chunk, token): (&BufferChunk, OpToken),
        completed: u32,
        registrations: &Registrations,
    ) -> Result<(), Unsent> {
        let (rkey, behind) = Self::named((Direction::Put, remote), registrations)?;
        let part = chunk.at..chunk.at.saturating_add(chunk.len);
        self.find_room(part.len(), behind, completed)?;
        let registered = registrations.of((&chunk.of, part.clone()), Direction::Put);
        let registration = registered.map_err(Unsent::Unregistered)?;
        let Some((base, _)) = addresses(&chunk.of) else {
            return Err(Unsent::Unregistered("it is not in one piece".into()));
        };
        let here = (base.wrapping_add(part.start), part.len(), registration.memory.lkey());
        // SAFETY: the part lies in the registration. If any of it has begun, the registration and a
        // share of the buffer are held from here on.
        let begun = unsafe { self.move_bytes((Direction::Put, remote.addr, rkey), here, behind) }?;
        self.hold(RdmaTransfer::new(
            token,
            Via::Shared(registration, chunk.of.clone()),
            Buffer::Empty,
        ));
        begun
    }

    /// Returns the remote key of a peer's place, and the local place for the read behind the
    /// write, if one is needed.
    fn named(
        (direction, remote): (Direction, RemotePlace),
        registrations: &Registrations,
    ) -> Result<(u32, Option<(u64, u32)>), Unsent> {
        let key = PlaceKey::decode(remote.key);
        let PlaceKey { rkey, read_behind, .. } =
            key.ok_or_else(|| Unsent::Wrong("it has named a key that is none".into()))?;
        let behind = (read_behind && direction == Direction::Put).then(|| registrations.nowhere());
        Ok((rkey, behind.transpose().map_err(Unsent::Unregistered)?))
    }

    /// Checks that there is room for the requests that `len` bytes take.
    fn find_room(
        &self,
        len: usize,
        behind: Option<(u64, u32)>,
        completed: u32,
    ) -> Result<(), Unsent> {
        let pieces = len.div_ceil(PIECE) + usize::from(behind.is_some());
        let pieces = u32::try_from(pieces).unwrap_or(u32::MAX);
        if pieces.saturating_add(self.outstanding(completed) + RESERVE) < self.depth {
            return Ok(());
        }
        if pieces + RESERVE >= self.depth {
            let why = format!("{len} bytes take more requests than the {} of a queue", self.depth);
            return Err(Unsent::Unregistered(why));
        }
        Err(Unsent::Busy(Busy::Full))
    }

    /// Posts the requests that move bytes between registered memory of this side and a peer's, and
    /// the read behind them if needed. The outer error: nothing was posted. The inner one: some
    /// requests were posted, but not all.
    ///
    /// # Safety
    /// If any request was posted, the memory and its registration stay until it completes.
    unsafe fn move_bytes(
        &mut self,
        (direction, there, rkey): (Direction, u64, u32),
        (base, len, lkey): (*mut u8, usize, u32),
        behind: Option<(u64, u32)>,
    ) -> Result<Result<(), Unsent>, Unsent> {
        let opcode = match direction {
            Direction::Put => IBV_WR_RDMA_WRITE,
            Direction::Get => IBV_WR_RDMA_READ,
        };
        for at in (0..len).step_by(PIECE) {
            let here = PIECE.min(len - at);
            let (addr, length) =
                (base.wrapping_add(at) as u64, u32::try_from(here).unwrap_or(u32::MAX));
            let mut part = [ibv_sge { addr, length, lkey }];
            let mut request = self.request(&mut part, opcode);
            request.wr.rdma.remote_addr = there.wrapping_add(at as u64);
            request.wr.rdma.rkey = rkey;
            let is_last = at + here == len && behind.is_none();
            // SAFETY: promised by the caller.
            if let Err(error) = unsafe { self.post_as(&mut request, is_last, is_last) } {
                if at > 0 {
                    return Ok(Err(Unsent::Failed(
                        "a request for a part of a buffer was refused".into(),
                    )));
                }
                return Err(error);
            }
        }
        Ok(self.read_behind((there, rkey), behind))
    }

    /// Reads a byte from where bytes were just written, so that the operation ends when they have
    /// reached the memory. The write's own completion does not tell that for a GPU's memory. The
    /// byte goes `nowhere`; `None`: no read is needed.
    fn read_behind(
        &mut self,
        (addr, rkey): (u64, u32),
        nowhere: Option<(u64, u32)>,
    ) -> Result<(), Unsent> {
        let Some((at, lkey)) = nowhere else { return Ok(()) };
        let mut part = [ibv_sge { addr: at, length: 1, lkey }];
        let mut request = self.request(&mut part, IBV_WR_RDMA_READ);
        request.wr.rdma.remote_addr = addr;
        request.wr.rdma.rkey = rkey;
        // SAFETY: the content of that place is ignored, and its registration ends before its
        // memory does.
        let posted = unsafe { self.post_as(&mut request, true, true) };
        posted.map_err(|_| Unsent::Failed("the read behind a write was refused".into()))
    }

    /// Starts a transfer as [`transfer`](Self::transfer) does, of a few bytes, which are copied.
    fn small_transfer(
        &mut self,
        (direction, addr, rkey): (Direction, u64, u32),
        (buffer, token): (&mut Buffer, OpToken),
        completed: u32,
        (bounces, behind): (&Bounces, Option<(u64, u32)>),
    ) -> Result<(), Unsent> {
        if self.outstanding(completed) + RESERVE + u32::from(behind.is_some()) >= self.depth {
            return Err(Unsent::Busy(Busy::Full));
        }
        let (len, is_put) = (buffer.len(), direction == Direction::Put);
        let goes_inline = is_put && len <= self.inline;
        let (filled, via) = if goes_inline {
            let length = u32::try_from(len).unwrap_or(u32::MAX);
            (Filled { addr: buffer.view().as_ptr() as u64, len: length, key: 0 }, Via::Inline)
        } else {
            self.give_back(completed, bounces);
            let Some(bounce) = bounces.take() else { return Err(Unsent::Busy(Busy::NoPacket)) };
            match bounces.plain(&bounce, is_put.then_some(&*buffer), len) {
                Ok(filled) => (filled, Via::Bounce(bounce, direction)),
                Err(error) => {
                    bounces.give_back(bounce);
                    return Err(Unsent::Unregistered(error.to_string()));
                }
            }
        };
        let mut part = [ibv_sge { addr: filled.addr, length: filled.len, lkey: filled.key }];
        let mut request =
            self.request(&mut part, if is_put { IBV_WR_RDMA_WRITE } else { IBV_WR_RDMA_READ });
        request.wr.rdma.remote_addr = addr;
        request.wr.rdma.rkey = rkey;
        request.send_flags = if goes_inline { IBV_SEND_INLINE } else { 0 };
        // SAFETY: the call copies inline bytes, which are host memory and borrowed during it. A
        // bounce has no other user until the request completes.
        match unsafe { self.post_as(&mut request, behind.is_none(), behind.is_none()) } {
            Ok(()) => {
                let read = self.read_behind((addr, rkey), behind);
                self.hold(RdmaTransfer::new(token, via, std::mem::take(buffer)));
                read
            }
            Err(error) => {
                *buffer = RdmaTransfer::new(token, via, std::mem::take(buffer)).fail(bounces).1;
                Err(error)
            }
        }
    }
}
