//! Messages that the kernel copies here from their sender's memory.

use super::At;
use super::in_flight::{InFlight, Run};
use super::share::{ASK_AHEAD, is_worth_it};
use crate::error::OpError;
use crate::names::Rank;
use crate::op::Flow;
use crate::peer::shares::{MOST, Others, Share};
use carrack_transports::contract::{PeerMemory, PeerMemoryError};
use carrack_transports::mem::{Buffer, MemMut};
use std::collections::VecDeque;
use std::sync::Arc;

/// Messages that are copied by one call of the kernel, at most.
const TOGETHER: usize = 16;

/// Looks at the sender's pieces of the only message before other work has its turn: one or two
/// microseconds, in which a sender that began a little later ends.
const LOOKS: u32 = 50;

/// The kernel's copy of a message.
pub(super) struct Pull {
    /// The address in the sender's memory.
    addr: u64,
    memory: Arc<dyn PeerMemory>,
    /// The share of the sender that helps. Declared before the buffer: its drop keeps the sender
    /// from taking further pieces.
    share: Option<Share>,
    /// The buffer of an operation that has ended, while its sender may still write to it.
    kept: Option<Buffer>,
    done: usize,
    /// `true` if its sender was asked to help, where that pays.
    is_asked: bool,
    /// The error that stopped the copy. Reported once the sender has stopped helping.
    failed: Option<PeerMemoryError>,
    /// `true` if a copy together with others has failed.
    is_apart: bool,
}

/// The result of a step of a pull.
enum Step {
    /// This many bytes were copied.
    Copied(usize),
    /// The remaining bytes are with the sender, or the link is not ready.
    Waits,
    Over,
    Failed(PeerMemoryError),
}

impl Pull {
    pub(super) fn new(addr: u64, memory: Arc<dyn PeerMemory>) -> Self {
        let (kept, share, failed) = (None, None, None);
        Self { addr, memory, kept, done: 0, is_asked: false, share, failed, is_apart: false }
    }

    /// Returns a description for diagnostics.
    pub(super) fn waits_for(&self) -> &'static str {
        match &self.share {
            None => "the kernel's copy",
            Some(_) => "the kernel's copy, and its sender's help",
        }
    }

    /// Waits a moment for the pieces that the sender has. Returns `true` if it has ended with them.
    fn awaits_others(&self) -> bool {
        let Some(share) = &self.share else { return false };
        (0..LOOKS).any(|_| {
            std::hint::spin_loop();
            !matches!(share.others(), Others::Waiting)
        })
    }

    /// Keeps the buffer of an operation that has ended until its sender is done with it.
    pub(super) fn keep(&mut self, buffer: Option<Buffer>) {
        self.kept = buffer;
    }

    /// Takes that buffer.
    pub(super) fn take_kept(&mut self) -> Option<Buffer> {
        self.kept.take()
    }

    /// Returns `true` if its sender may be writing to the buffer, which a dead sender does not.
    pub(super) fn is_helped(&self) -> bool {
        self.share.as_ref().is_some_and(|share| !share.close()) && !self.memory.is_gone()
    }

    /// Returns `true` if it has not begun and needs no help of its sender.
    fn can_go_with_others(&self, size: usize) -> bool {
        !self.is_apart
            && self.done == 0
            && self.share.is_none()
            && !is_worth_it(size, false)
            && self.memory.is_ready()
    }

    /// Copies a piece of a message of `size` bytes.
    fn step(&mut self, buffer: Option<&mut Buffer>, size: usize) -> Step {
        if !self.memory.is_ready() {
            return Step::Waits;
        }
        let next = match &self.share {
            None => None,
            Some(share) => match share.take() {
                Some(piece) => Some(piece),
                None => match share.others() {
                    Others::Waiting => return Step::Waits,
                    Others::Settled => return self.failed.take().map_or(Step::Over, Step::Failed),
                    Others::Failed(from) => {
                        // The bytes are copied as if the sender had not helped.
                        (self.done, self.share) = (from, None);
                        None
                    }
                },
            },
        };
        if let Some(why) = self.failed.take() {
            return Step::Failed(why);
        }
        let (begin, len) = next.unwrap_or((self.done, MOST.min(size - self.done)));
        if len == 0 {
            return Step::Over;
        }
        match self.copy(buffer, size, (begin, len)) {
            Ok(()) => {
                self.done = begin + len;
                Step::Copied(len)
            }
            Err(why) => match &self.share {
                Some(share) if !share.close() => {
                    self.failed = Some(why);
                    Step::Waits
                }
                _ => Step::Failed(why),
            },
        }
    }

    fn copy(
        &mut self,
        buffer: Option<&mut Buffer>,
        size: usize,
        (begin, len): (usize, usize),
    ) -> Result<(), PeerMemoryError> {
        // An address that overflows is the sender's error, and refers to no memory.
        let addr = self.addr.wrapping_add(begin as u64);
        let memory = self.memory.clone();
        let room = self
            .room(buffer, size)
            .ok_or_else(|| PeerMemoryError::Failed("the buffer cannot be written".into()))?;
        memory.read(addr, room.part(begin, len))
    }

    /// Returns the place for the whole message.
    fn room<'b>(&'b mut self, buffer: Option<&'b mut Buffer>, size: usize) -> Option<MemMut<'b>> {
        Some(self.kept.as_mut().or(buffer)?.view_mut()?.part(0, size))
    }
}

/// A message that was taken out of the table to be copied.
struct Out {
    at: At,
    transfer: Box<InFlight>,
}

impl Out {
    /// Returns the copy, its buffer, and the bytes of the message.
    fn parts(&mut self) -> Option<(&mut Pull, Option<&mut Buffer>, usize)> {
        let InFlight::Rx(rx) = &mut *self.transfer else { return None };
        let size = rx.size();
        let (pull, buffer) = rx.pull()?;
        Some((pull, buffer, size))
    }

    fn can_go_with_others(&mut self) -> Option<usize> {
        let (pull, _, size) = self.parts()?;
        pull.can_go_with_others(size).then_some(size)
    }
}

/// The result of a turn of a pull.
enum Turn {
    /// It continues in another way, or has ended.
    Over(Flow),
    /// The remaining bytes are with the sender.
    Waits,
    /// More bytes are left.
    Begun,
}

impl Run<'_> {
    /// Lets the kernel copy the offered messages in order, up to the limit of one call.
    #[cold]
    pub(crate) fn move_pulls(&mut self) {
        let transfers = &self.device.transfers;
        let mut names = {
            let Some(mut pulls) = transfers.pulls.try_lock() else { return };
            if pulls.len() == 1
                && let Some(only) = pulls.pop_front()
            {
                transfers.pulls.set_count(0);
                drop(pulls);
                return self.move_only(only);
            }
            let names = std::mem::take(&mut *pulls);
            transfers.pulls.set_count(0);
            names
        };
        let mut budget = MOST;
        let (mut turn, mut waits, mut begun) = (VecDeque::new(), VecDeque::new(), None);
        while budget > 0 {
            // The senders of the next messages are asked too: they can begin while this message is
            // copied.
            while turn.len() < TOGETHER + ASK_AHEAD
                && let Some(at) = names.pop_front()
            {
                match transfers.take_out(at) {
                    Some(transfer) => turn.push_back(Out { at, transfer }),
                    // Another thread carries it on, unless it has ended.
                    None if transfers.table.has(at) => waits.push_back(at),
                    None => {}
                }
            }
            if self.pull_together(&mut turn, &mut budget) {
                continue;
            }
            let Some(mut out) = turn.pop_front() else { break };
            self.ask_for_help(&mut out, turn.is_empty() && names.is_empty());
            turn.iter_mut().take(ASK_AHEAD).for_each(|out| self.ask_for_help(out, false));
            let at = out.at;
            let flow = match self.pull(&mut out, &mut budget) {
                Turn::Over(flow) => flow,
                Turn::Waits => {
                    waits.push_back(at);
                    Flow::Stays
                }
                Turn::Begun => {
                    begun = Some(at);
                    Flow::Stays
                }
            };
            self.give_back(at, out.transfer, flow);
        }
        // It is put behind messages that had no turn, and before those that have arrived meanwhile.
        let mut left = waits;
        left.extend(turn.iter().map(|out| out.at));
        left.append(&mut names);
        left.extend(begun);
        for Out { at, transfer } in turn {
            self.give_back(at, transfer, Flow::Stays);
        }
        let mut pulls = transfers.pulls.lock();
        left.append(&mut pulls);
        *pulls = left;
        transfers.pulls.set_count(pulls.len());
    }

    /// Lets the kernel copy the only message, without the lists that the order of several needs.
    fn move_only(&mut self, at: At) {
        let transfers = &self.device.transfers;
        let is_left = match transfers.take_out(at) {
            Some(transfer) => {
                let mut out = Out { at, transfer };
                self.ask_for_help(&mut out, true);
                let mut turn = self.pull(&mut out, &mut { MOST });
                if matches!(turn, Turn::Waits)
                    && out.parts().is_some_and(|(pull, ..)| pull.awaits_others())
                {
                    turn = self.pull(&mut out, &mut { MOST });
                }
                let flow = match turn {
                    Turn::Over(flow) => Some(flow),
                    Turn::Waits | Turn::Begun => None,
                };
                let is_left = flow.is_none();
                self.give_back(at, out.transfer, flow.unwrap_or(Flow::Stays));
                is_left
            }
            // Another thread carries it on, unless it has ended.
            None => transfers.table.has(at),
        };
        if is_left {
            // Before those that have arrived meanwhile.
            let mut pulls = transfers.pulls.lock();
            pulls.push_front(at);
            transfers.pulls.set_count(pulls.len());
        }
    }

    fn ask_for_help(&self, out: &mut Out, is_alone: bool) {
        let peer = out.at.0;
        let InFlight::Rx(rx) = &mut *out.transfer else { return };
        let (size, tx) = (rx.size(), rx.tx());
        let Some((pull, buffer)) = rx.pull() else { return };
        if !pull.memory.is_ready() || std::mem::replace(&mut pull.is_asked, true) {
            return;
        }
        if !is_worth_it(size, is_alone) {
            return;
        }
        let place = pull.room(buffer, size).filter(|room| room.place().is_host());
        if let Some(place) = place.map(|room| (room.as_mut_ptr().cast_const(), room.len())) {
            pull.share = self.share_with(peer, tx, place);
        }
    }

    /// Copies several messages of one peer at the front by one call of the kernel. Returns `true`
    /// if there were several.
    fn pull_together(&mut self, turn: &mut VecDeque<Out>, budget: &mut usize) -> bool {
        let Some(from) = turn.front().map(|first| first.at.0) else { return false };
        let (mut size, mut count) = (0, 0);
        for out in turn.iter_mut().take(TOGETHER) {
            match out.can_go_with_others().filter(|_| out.at.0 == from) {
                Some(more) if size + more <= *budget => size += more,
                _ => break,
            }
            count += 1;
        }
        if count < 2 {
            return false;
        }
        let mut many: Vec<_> = turn.drain(..count).collect();
        let memory = many[0].parts().map(|(pull, ..)| pull.memory.clone());
        let places = many.iter_mut().map(|out| {
            let (pull, buffer, size) = out.parts()?;
            Some((pull.addr, pull.room(buffer, size)?))
        });
        let places: Option<Vec<_>> = places.collect();
        let done =
            memory.zip(places).map_or(0, |(memory, places)| memory.read_many(&places).unwrap_or(0));
        let mut left = many.split_off(done);
        if let Some((pull, ..)) = left.first_mut().and_then(Out::parts) {
            // Its own copy will report the error.
            pull.is_apart = true;
        }
        left.into_iter().rev().for_each(|out| turn.push_front(out));
        for mut out in many {
            if let InFlight::Rx(rx) = &mut *out.transfer {
                *budget = budget.saturating_sub(rx.size());
                let flow = rx.is_pulled(self);
                self.give_back(out.at, out.transfer, flow);
            }
        }
        true
    }

    /// Copies as much of one message as one turn may.
    fn pull(&mut self, out: &mut Out, budget: &mut usize) -> Turn {
        let from = out.at.0;
        let InFlight::Rx(rx) = &mut *out.transfer else { return Turn::Over(Flow::Stays) };
        let size = rx.size();
        loop {
            let Some((pull, buffer)) = rx.pull() else { return Turn::Over(Flow::Stays) };
            match pull.step(buffer, size) {
                Step::Copied(len) => {
                    self.moved = true;
                    *budget = budget.saturating_sub(len);
                    if *budget == 0 {
                        return Turn::Begun;
                    }
                }
                Step::Waits => return Turn::Waits,
                Step::Over => return Turn::Over(rx.is_pulled(self)),
                Step::Failed(PeerMemoryError::Refused(why)) => {
                    self.refuse_peer_memory(from, why);
                    return Turn::Over(rx.is_not_pulled(self));
                }
                Step::Failed(PeerMemoryError::Gone(cause)) => {
                    let error = OpError::PeerDown { rank: from, cause };
                    return Turn::Over(rx.has_failed(self, error));
                }
                Step::Failed(PeerMemoryError::Failed(why)) => {
                    return Turn::Over(rx.has_failed(self, OpError::Transfer { rank: from, why }));
                }
            }
        }
    }

    /// Notes that the kernel does not copy from a peer.
    fn refuse_peer_memory(&self, from: Rank, why: String) {
        if let Some(linked) = self.device.known_route(from).and_then(|route| route.linked()) {
            linked.refuse_peer_memory(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Runtime;
    use crate::datapath::Target;
    use crate::names::Tag;
    use crate::op::OpContext;
    use crate::peer::shares::Shares;
    use crate::protocol::rndv::Ask;
    use bytes::Bytes;
    use carrack_transports::contract::Splits;
    use carrack_transports::mem::MemRef;
    use carrack_transports::mem::copy::copy_now;
    use carrack_transports::sync::Split;
    use std::sync::atomic::{AtomicBool, Ordering};

    const ME: Rank = Rank(0);

    /// Memory that is full of sevens.
    struct Sevens;

    impl PeerMemory for Sevens {
        fn read(&self, _: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError> {
            let bytes = vec![7; to.len()];
            copy_now(to, MemRef::host(&bytes)).map_err(|_| unreachable!("host memory"))
        }

        fn is_ready(&self) -> bool {
            true
        }

        fn is_gone(&self) -> bool {
            false
        }

        fn read_many(&self, _: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError> {
            unreachable!("one message at a time")
        }

        fn write(&self, _: u64, _: MemRef<'_>) -> Result<(), PeerMemoryError> {
            unreachable!("nobody helps")
        }
    }

    #[test]
    fn a_pull_that_another_thread_carries_on_has_its_turn_when_that_is_done() {
        let ranks = Runtime::in_process(1).unwrap();
        let (core, device) = (&ranks[0].0, &ranks[0].default_device().0);
        let op = OpContext::of_runtime(ME, Tag(1), 0, None);
        let target = Target::Receive { buffer: Buffer::Vec(vec![0; 8]), op };
        let pull = Pull::new(0x1000, Arc::new(Sevens));
        let at = (ME, device.receive(core, (ME, 8, target), Ask::Rts(5), Some(pull)));
        let turn = |out: Option<Box<InFlight>>| {
            let mut run = Run::new(core, device);
            match out {
                Some(transfer) => run.give_back(at, transfer, Flow::Stays),
                None => run.move_pulls(),
            }
            run.into_ended()
        };
        let elsewhere = device.transfers.take_out(at);
        assert!(elsewhere.is_some() && turn(None).is_empty());
        assert!(turn(elsewhere).is_empty());
        let (_, status) = turn(None).pop().expect("it was forgotten");
        assert_eq!((status.error.is_none(), status.bytes()), (true, Some(&[7; 8][..])));
        assert!(turn(None).is_empty() && device.transfers.pulls.is_empty(), "it has ended");
    }

    struct One(Split);

    impl Splits for One {
        fn count(&self) -> u32 {
            1
        }

        fn get(&self, _: u32) -> Option<&Split> {
            Some(&self.0)
        }
    }

    /// Notes, when it is freed, whether the sender of the message could still take a piece.
    struct Freed(Arc<One>, u32, Arc<AtomicBool>);

    impl AsRef<[u8]> for Freed {
        fn as_ref(&self) -> &[u8] {
            &[0; 8]
        }
    }

    impl Drop for Freed {
        fn drop(&mut self) {
            self.2.store(self.0.0.take_back(self.1, 1, 1).is_some(), Ordering::SeqCst);
        }
    }

    #[test]
    fn no_sender_takes_a_piece_of_a_buffer_that_is_being_freed() {
        let (split, is_late) = (Arc::new(One(Split::new())), Arc::new(AtomicBool::new(true)));
        let share = Arc::new(Shares::new(split.clone())).take(8).unwrap();
        let mut pull = Pull::new(0x1000, Arc::new(Sevens));
        let freed = Freed(split, share.turn, is_late.clone());
        pull.share = Some(share);
        pull.keep(Some(Buffer::Bytes(Bytes::from_owner(freed))));
        drop(pull);
        assert!(!is_late.load(Ordering::SeqCst), "it takes a piece, and writes to freed memory");
    }
}
