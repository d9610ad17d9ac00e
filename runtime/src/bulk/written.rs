//! Messages that the sender's NIC writes to where they go.

use super::Bulk;
use super::incoming::Arriving;
use super::inflow::Inflow;
use super::wire::encode_landing;
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::Rank;
use crate::progress::Pass;
use crate::protocol::header::Message;
use carrack_transports::contract::RemotePlace;
use carrack_transports::mem::{CopyError, MemKind};

/// Shorter messages go part by part: their bytes are copied sooner than their memory is made known
/// to a NIC. An estimate; on ConnectX devices registering takes some tens of microseconds.
pub(crate) const WRITTEN: usize = 32 << 10;

impl DeviceInner {
    /// Lets the sender's NIC write to where a message goes, where that is worth while and can be
    /// had: host memory, or a GPU's that this rank's NIC reaches, which then needs no blocks.
    pub(super) fn expose(&self, from: Rank, arriving: &mut Arriving) -> Option<RemotePlace> {
        let linked = self.known_route(from)?.linked()?;
        // The bytes of a put are not written: if the NIC could reach the region, it would not have
        // come to this.
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
    /// All of a message has been written to where it was to go.
    fn take_written(&self, from: Rank, landing: u64) -> Option<Arriving> {
        let mut all = self.arriving.lock();
        all.get(&landing).filter(|one| one.from == from && one.exposed.is_some())?;
        let whole = all.remove(&landing);
        self.arriving.set_count(all.len());
        whole
    }

    /// A message will not be written, and its buffer is this rank's again. How many bytes may come
    /// now; `None`: there is no such message.
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
    /// All of a message has been written to where it was to go.
    pub(super) fn written(&mut self, from: Rank, landing: u64) -> Result<(), String> {
        let whole = self.device.bulk.take_written(from, landing);
        let mut whole = whole.ok_or("it has written what it was not asked to")?;
        // Before anybody hears of it, and while the NIC still knows the memory: its word for the
        // bytes' arrival does not mean that the GPU sees them (gpu.md, streams rule 8).
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

    /// A message will not be written: its sender's NIC does not reach its bytes.
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
