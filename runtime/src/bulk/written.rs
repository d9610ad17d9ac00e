//! Messages that the sender's NIC writes to their destination.

use super::Bulk;
use super::incoming::Arriving;
use super::inflow::Inflow;
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::Rank;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::protocol::wire::encode_landing;
use carrack_transports::contract::RemotePlace;
use carrack_transports::mem::{CopyError, MemKind};

/// Shorter messages go as parts: copying them takes less time than a registration with a NIC. An
/// estimate; on ConnectX devices a registration takes some tens of microseconds.
pub(crate) const WRITTEN: usize = 32 << 10;

impl DeviceInner {
    /// Lets the sender's NIC write to the destination of a message, where that is possible and
    /// pays: host memory, or GPU memory that this rank's NIC reaches, which then needs no blocks.
    pub(super) fn expose(&self, from: Rank, arriving: &mut Arriving) -> Option<RemotePlace> {
        let linked = self.known_route(from)?.linked()?;
        // The NIC writes no put here: with a reachable region the put would not have come as an
        // offer.
        let is_put = arriving.target.is_memory();
        if arriving.size < WRITTEN || is_put || !linked.caps.remote_memory {
            return None;
        }
        let buffer = arriving.target.buffer()?;
        match linked.link.expose(std::mem::take(buffer)) {
            Ok(exposed) => {
                let place = exposed.place_of_message();
                (arriving.exposed, arriving.inflow) = (Some(exposed), None);
                Some(place)
            }
            Err((why, back)) => {
                tracing::debug!(%from, why, "a message comes part by part");
                *buffer = back;
                None
            }
        }
    }
}

impl Bulk {
    /// Takes a message that the NIC has written.
    fn take_written(&self, from: Rank, landing: u64) -> Option<Arriving> {
        let mut all = self.arriving.lock();
        all.get(&landing).filter(|one| one.from == from && one.exposed.is_some())?;
        let whole = all.remove(&landing);
        self.arriving.set_count(all.len());
        whole
    }

    /// Takes the buffer of a message back that will not be written. Returns the limit of parts.
    /// `None`: there is no such message.
    fn take_unwritten(&self, from: Rank, landing: u64) -> Option<usize> {
        let mut all = self.arriving.lock();
        let one = all.get_mut(&landing).filter(|one| one.from == from)?;
        if !one.take_back() {
            return None;
        }
        let size = one.size;
        one.inflow = one.target.buffer().and_then(|buffer| Inflow::into(buffer, size));
        if one.inflow.is_none() {
            return Some(size);
        }
        drop(all);
        // Progress grants, when there is a block for the first bytes.
        let mut inflows = self.inflows.lock();
        inflows.push(landing);
        self.inflows.set_count(inflows.len());
        Some(0)
    }
}

impl Pass<'_> {
    /// Handles the end of a message that the NIC has written.
    pub(super) fn written(&mut self, from: Rank, landing: u64) -> Result<(), String> {
        let whole = self.device.bulk.take_written(from, landing);
        let mut whole = whole.ok_or("it has written what it was not asked to")?;
        // Before the completion is signaled, and while the NIC still knows the memory. The arrival
        // at the NIC does not mean that the GPU sees the bytes (gpu.md, streams rule 8).
        if let Some(gpu) = whole.exposed.as_ref().and_then(|exposed| exposed.flush())
            && let Err(cause) = gpu.flush_remote_writes()
        {
            let dst = MemKind::Device(gpu.info().uuid);
            let error = CopyError::Engine { dst, src: MemKind::Host, cause };
            whole.lost = Some(Box::new(OpError::Copy(error)));
        }
        whole.take_back();
        self.arrived(whole.from, whole.size, whole.target, whole.lost);
        Ok(())
    }

    /// Handles the news that a message will not be written: its sender's NIC does not reach its
    /// bytes.
    pub(super) fn unwritten(&mut self, from: Rank, landing: u64) -> Result<(), String> {
        let now = self.device.bulk.take_unwritten(from, landing);
        let now = now.ok_or("it will not write what it was not asked to")?;
        if now > 0 {
            self.device.control(
                self.inner,
                from,
                Message::Grant { landing },
                encode_landing(now as u64),
            );
        }
        Ok(())
    }
}
