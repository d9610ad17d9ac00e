//! A receive that a message meets.

use super::found::Found;
use super::{Meeting, Met, found};
use crate::comp::{Gathered, Plain, Status};
use crate::matching::{Content, Receive, Unexpected};
use crate::names::{Rank, Tag};
use crate::op::OpContext;
use carrack_transports::contract::Payload;
use carrack_transports::mem::copy::try_copy_now;
use carrack_transports::mem::{Buffer, MemRef, SmallBytes};

impl Receive {
    /// Takes a message of a few bytes, if the CPU can copy them; else message and receive stay a
    /// pair. `at_once`: its completion object is told now, if it is a queue or a synchronizer with
    /// room.
    #[inline(always)]
    pub(super) fn take_small(
        &mut self,
        (from, tag, bytes): (Rank, Tag, &SmallBytes),
        met: &mut Met,
        at_once: bool,
    ) -> Found {
        let view = MemRef::host(bytes.as_slice());
        if at_once && self.ends((from, tag, view), met) {
            return Found::Kept;
        }
        self.meets_small((from, tag, bytes), met)
    }

    /// Takes a message, and tells the completion object. Returns `true` if that is all there was to
    /// do: the CPU can copy the message, and the object is plain and has room. Else nothing is
    /// told, and the receive is as it was.
    #[inline(always)]
    pub(super) fn ends(
        &mut self,
        (from, tag, bytes): (Rank, Tag, MemRef<'_>),
        met: &mut Met,
    ) -> bool {
        let size = bytes.len();
        let Some(object) = self.op.comp.as_ref().and_then(|comp| comp.as_plain()) else {
            return false;
        };
        let Some(to) = self.buffer.view_mut() else { return false };
        if !(to.place().is_host() && bytes.place().is_host()) || size > to.len() {
            return false;
        }
        match object {
            Plain::Queue(queue) => {
                let Some(place) = queue.reserve() else { return false };
                let is_copied = try_copy_now(to, bytes);
                debug_assert!(is_copied, "it fits into host memory");
                let user_context = self.op.user_context;
                let buffer = std::mem::take(&mut self.buffer);
                place.fill(Status { rank: from, tag, size, user_context, buffer, error: None });
            }
            Plain::Synchronizer(gathered) => {
                let user_context = self.op.user_context;
                let made =
                    |buffer| Status { rank: from, tag, size, user_context, buffer, error: None };
                if !ends_gathered(gathered, (&mut self.buffer, bytes), made) {
                    return false;
                }
            }
        }
        if let Some(told) = self.op.comp.take() {
            met.told.push(told);
        }
        true
    }

    /// Keeps it with its message.
    #[cold]
    #[inline(never)]
    fn meets_small(
        &mut self,
        (from, tag, bytes): (Rank, Tag, &SmallBytes),
        met: &mut Met,
    ) -> Found {
        if !is_copied(&mut self.buffer, MemRef::host(bytes.as_slice())) {
            return self.meets(from, tag, Payload::Small(*bytes), met);
        }
        let Self { buffer, op: OpContext { comp, user_context, .. } } = self.take();
        let size = bytes.as_slice().len();
        let status = Status { rank: from, tag, size, user_context, buffer, error: None };
        found(met, Meeting::InPlace(comp, status))
    }

    /// Keeps it with its message, whose bytes are still to be moved.
    #[inline(never)]
    pub(super) fn meets(&mut self, from: Rank, tag: Tag, payload: Payload, met: &mut Met) -> Found {
        let message = Unexpected { from, tag, content: Content::Here(payload) };
        found(met, Meeting::Pair(message, self.take()))
    }
}

/// Copies a message, and adds its status to a synchronizer. Returns `false` if there is no room, or
/// another thread has the synchronizer's lock.
#[inline(never)]
fn ends_gathered(
    gathered: &Gathered,
    (buffer, bytes): (&mut Buffer, MemRef<'_>),
    made: impl Fn(Buffer) -> Status,
) -> bool {
    gathered.push_made(&mut || {
        let is_copied = is_copied(buffer, bytes);
        debug_assert!(is_copied, "it fits into host memory");
        made(std::mem::take(buffer))
    })
}

/// Copies a message. Returns `false` if it is too long, or an engine is needed.
#[inline(always)]
fn is_copied(to: &mut Buffer, bytes: MemRef<'_>) -> bool {
    to.view_mut().is_some_and(|to| try_copy_now(to, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comp::{AsCompletion, CompQueue};

    /// Another thread may still cancel the receive, whose buffer is then as it was.
    #[test]
    fn a_receive_whose_queue_is_full_is_left_as_it_was() {
        let queue = CompQueue::new(1);
        let status = || OpContext::of_runtime(Rank(0), Tag(0), 8, None).status(Buffer::Empty, None);
        while queue.as_completion().signal(status()).is_ok() {}
        let op = OpContext::of_runtime(Rank(0), Tag(0), 0, Some(queue.as_completion().clone()));
        let mut receive = Receive { buffer: vec![7; 8].into(), op };
        let bytes = SmallBytes::first(6, [1; _]);
        let message = (Rank(0), Tag(0), MemRef::host(bytes.as_slice()));
        let mut met = Met::default();
        assert!(!receive.ends(message, &mut met));
        assert!(matches!(&receive.buffer, Buffer::Vec(bytes) if *bytes == [7; 8]));
        drop(queue.pop());
        assert!(receive.ends(message, &mut met));
        assert!(matches!(&receive.buffer, Buffer::Empty));
    }
}
