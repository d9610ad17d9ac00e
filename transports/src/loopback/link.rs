//! One direction between two devices of a process.

use super::{LinkQueue, LoopbackInbox, LoopbackMessage, OnItsWay, SendNotice};
use crate::contract::{
    Busy, DownCause, Header, Link, Op, OpFailure, OpToken, Payload, PeerId, Submit, SubmitError,
};
use crate::mem::{Buffer, MemMut, MemRef, SmallBytes, Transfer, copy::copy_now};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Messages that wait in one link's queue before it is [`Busy::Full`].
pub(super) const QUEUE: usize = 256;

#[derive(Debug)]
pub(super) struct LoopbackLink {
    pub(super) peer: PeerId,
    pub(super) home: Arc<LoopbackInbox>,
    pub(super) target: Arc<LoopbackInbox>,
    pub(super) queue: Arc<LinkQueue>,
}

impl LoopbackLink {
    fn check(&self, len: usize) -> Result<(), SubmitError> {
        if !self.is_up() || self.home.closed.load(Ordering::Acquire) {
            return Err(SubmitError::Down { peer: self.peer, cause: DownCause::Closed });
        }
        let max = self.target.max_message.min(self.target.packets.packet_size());
        if len > max {
            return Err(SubmitError::TooLong { len, max });
        }
        Ok(())
    }

    /// Adds a message to the queue, made only when there is room. The argument of `make` is `true`
    /// if the queue is empty.
    pub(super) fn push(
        &self,
        make: impl FnOnce(bool) -> Result<LoopbackMessage, Submit>,
    ) -> Submit {
        let mut messages = self.queue.messages.lock();
        if messages.len() >= QUEUE {
            return Submit::Busy(Busy::Full);
        }
        let posted = match make(messages.is_empty()) {
            Ok(message) => {
                let posted = matches!(message.payload, OnItsWay::Landing(..));
                messages.push_back(message);
                posted
            }
            Err(submit) => return submit,
        };
        drop(messages);
        if !self.queue.listed.swap(true, Ordering::SeqCst) {
            self.target.announce(|ready| ready.queues.push_back(self.queue.clone()));
        }
        // The target may have closed since the check, and cleared its queues before this message
        // was in one.
        if self.target.closed.load(Ordering::Acquire) {
            self.queue.abandon();
        }
        // The same for this side. Only an operation that was posted has a completion to report.
        if posted && self.home.closed.load(Ordering::Acquire) {
            self.queue.take_back();
        }
        if posted { Submit::Posted } else { Submit::Done }
    }

    /// Sends host memory, which the caller may reuse when this returns.
    fn copied(&self, header: Header, bytes: MemRef<'_>) -> Result<Submit, SubmitError> {
        self.check(bytes.len())?;
        if !bytes.place().is_host() {
            return Err(SubmitError::Kind(bytes.place().kind()));
        }
        Ok(self.push(|is_first| {
            let payload = if let Some(mut small) = SmallBytes::zeroed(bytes.len()) {
                let _ = copy_now(MemMut::host(small.as_mut_slice()), bytes);
                Payload::Small(small)
            } else if let Some(mut packet) = self.target.packets.take() {
                packet.set_len(bytes.len());
                let _ = copy_now(packet.view_mut(), bytes);
                Payload::Packet(packet)
            } else if is_first {
                // While the target's user keeps all packets, messages go one at a time.
                let mut aside = vec![0; bytes.len()];
                let _ = copy_now(MemMut::host(&mut aside), bytes);
                Payload::Aside(aside)
            } else {
                return Err(Submit::Busy(Busy::NoPacket));
            };
            Ok(LoopbackMessage { header, payload: OnItsWay::There(payload) })
        }))
    }

    fn owned(
        &self,
        header: Header,
        buffer: &mut Buffer,
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        if buffer.kind().is_host() {
            return self.copied(header, buffer.view());
        }
        self.check(buffer.len())?;
        Ok(self.push(|_| {
            let mut packet = self.target.packets.take().ok_or(Submit::Busy(Busy::NoPacket))?;
            packet.set_len(buffer.len());
            let sender = SendNotice(self.home.clone(), token);
            match Transfer::start(Buffer::Packet(packet), std::mem::take(buffer)) {
                Ok(transfer) => {
                    Ok(LoopbackMessage { header, payload: OnItsWay::Landing(transfer, sender) })
                }
                Err(refused) => {
                    // Posted and already ended: the failure is an event like any other.
                    sender.tell(refused.src, Err(Box::new(OpFailure::Copy(refused.cause))));
                    Err(Submit::Posted)
                }
            }
        }))
    }
}

impl Link for LoopbackLink {
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError> {
        match op {
            Op::AmCopied { header, bytes } => self.copied(header, bytes),
            Op::AmOwned { header, buffer, token } => self.owned(header, buffer, token),
            Op::Put { .. } | Op::Get { .. } | Op::Atomic { .. } => {
                Err(SubmitError::no_remote_memory())
            }
        }
    }

    fn is_up(&self) -> bool {
        !self.target.closed.load(Ordering::Acquire) && !self.queue.ended.load(Ordering::Acquire)
    }
}

impl Drop for LoopbackLink {
    fn drop(&mut self) {
        if self.home.owner.is_here() {
            self.queue.end(&self.target);
        }
    }
}
