//! Messages that the kernel copies here from their sender's memory.

use super::in_flight::{Event, InFlight, Run};
use super::rx::RxOp;
use super::share::{ASK_AHEAD, is_worth_it};
use super::{At, Transfers};
use crate::names::Rank;
use crate::op::Flow;
use crate::peer::shares::{MOST, OtherPieces, Share};
use carrack_transports::contract::{PeerMemory, PeerMemoryError};
use carrack_transports::mem::{Buffer, MemMut};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[cfg(test)]
mod tests;

/// Messages that are copied by one call of the kernel, at most.
const TOGETHER: usize = 16;

/// Looks at the sender's pieces of the only message before other work has its turn. They take one
/// or two microseconds, in which a sender that began a little later ends.
const LOOKS: u32 = 50;

/// The kernel's copy of a message.
pub(super) struct Pull {
    /// The address in the sender's memory.
    addr: u64,
    memory: Arc<dyn PeerMemory>,
    /// The share of the sender that helps. Declared before the buffer: its drop keeps the sender
    /// from taking further pieces.
    share: Option<Box<Share>>,
    /// The buffer of an operation that has ended, while its sender may still write to it.
    kept: Option<Box<Buffer>>,
    done: usize,
    /// `true` if its sender was asked to help, where that pays.
    is_asked: bool,
    /// The error that stopped the copy. Reported once the sender has stopped helping.
    failed: Option<Box<PeerMemoryError>>,
    /// `true` if a copy together with others has failed.
    is_apart: bool,
}

/// The result of a step of a pull.
pub(crate) enum PullStep {
    /// More bytes are left.
    Copied,
    /// The remaining bytes are with the sender, or the link is not ready.
    Waits,
    Ended,
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
            !matches!(share.others(), OtherPieces::Waiting)
        })
    }

    /// Keeps the buffer of an operation that has ended until its sender is done with it.
    pub(super) fn keep(&mut self, buffer: Option<Buffer>) {
        self.kept = buffer.map(Box::new);
    }

    /// Takes that buffer.
    pub(super) fn take_kept(&mut self) -> Option<Buffer> {
        self.kept.take().map(|kept| *kept)
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
    fn step(&mut self, buffer: Option<&mut Buffer>, size: usize, budget: &mut usize) -> PullStep {
        if !self.memory.is_ready() {
            return PullStep::Waits;
        }
        let next = match &self.share {
            None => None,
            Some(share) => match share.take() {
                Some(piece) => Some(piece),
                None => match share.others() {
                    OtherPieces::Waiting => return PullStep::Waits,
                    OtherPieces::Settled => {
                        return self
                            .failed
                            .take()
                            .map_or(PullStep::Ended, |why| PullStep::Failed(*why));
                    }
                    OtherPieces::Failed(from) => {
                        // The bytes are copied as if the sender had not helped.
                        (self.done, self.share) = (from, None);
                        None
                    }
                },
            },
        };
        if let Some(why) = self.failed.take() {
            return PullStep::Failed(*why);
        }
        let (begin, len) = next.unwrap_or((self.done, MOST.min(size - self.done)));
        if len == 0 {
            return PullStep::Ended;
        }
        match self.copy(buffer, size, (begin, len)) {
            Ok(()) => {
                self.done = begin + len;
                *budget = budget.saturating_sub(len);
                PullStep::Copied
            }
            Err(why) => match &self.share {
                Some(share) if !share.close() => {
                    self.failed = Some(Box::new(why));
                    PullStep::Waits
                }
                _ => PullStep::Failed(why),
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
        Some(self.kept.as_deref_mut().or(buffer)?.view_mut()?.part(0, size))
    }
}

/// Messages of one batch that the kernel copies as soon as the batch is delivered. Until then they
/// are not in the table: no list names them, no deadline ends them, and they count as one. So they
/// wait for the handlers of their batch.
#[derive(Default)]
pub(crate) struct Gathering {
    /// `true` while the only message of a batch is delivered: it is copied at once.
    pub(super) is_alone: bool,
    messages: Vec<RxOp>,
    bytes: usize,
}

impl Gathering {
    /// Begins with a batch of `len` events.
    #[inline]
    pub(crate) fn begin(&mut self, len: usize) {
        (self.is_alone, self.bytes) = (len == 1, 0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Takes a message that needs no help of its sender, or gives it back. It takes no more than
    /// two turns of the thread copy.
    pub(super) fn take(&mut self, transfers: &Transfers, mut rx: RxOp) -> Option<RxOp> {
        let (size, is_full) = (rx.size(), self.messages.len() == 2 * TOGETHER);
        let can_go = |(pull, _): (&mut Pull, _)| pull.can_go_with_others(size);
        if is_full || self.bytes + size > 2 * MOST || !rx.pull().is_some_and(can_go) {
            return Some(rx);
        }
        if self.messages.is_empty() {
            transfers.alone.fetch_add(1, Ordering::AcqRel);
        }
        self.bytes += size;
        self.messages.push(rx);
        None
    }
}

/// The copy of a message, its buffer, and the bytes of the message.
type Parts<'a> = (&'a mut Pull, Option<&'a mut Buffer>, usize);

/// Copies messages of one peer by one call of the kernel. Returns how many it has copied.
fn copy_together<'a>(messages: impl Iterator<Item = Option<Parts<'a>>>) -> usize {
    let (mut memory, mut places) = (None, Vec::with_capacity(TOGETHER));
    for parts in messages {
        let Some((pull, buffer, size)) = parts else { return 0 };
        memory.get_or_insert_with(|| pull.memory.clone());
        let addr = pull.addr;
        let Some(room) = pull.room(buffer, size) else { return 0 };
        places.push((addr, room));
    }
    memory.map_or(0, |memory| memory.read_many(&places).unwrap_or(0))
}

/// A message that was taken out of the table to be copied.
struct Out {
    at: At,
    transfer: Box<InFlight>,
}

impl Out {
    fn parts(&mut self) -> Option<Parts<'_>> {
        match &mut *self.transfer {
            InFlight::Rx(rx) => rx.parts(),
            _ => None,
        }
    }

    fn can_go_with_others(&mut self) -> Option<usize> {
        let (pull, _, size) = self.parts()?;
        pull.can_go_with_others(size).then_some(size)
    }
}

impl Run<'_> {
    /// Lets the kernel copy a message that comes alone, at once. Only one that is not all there
    /// then is added to the table, and waits for its next turn.
    pub(super) fn pull_alone(&mut self, mut rx: RxOp) {
        self.ask_for_help(&mut rx, true);
        let budget = &mut { MOST };
        let mut step = self.pull(&mut rx, budget);
        let awaits_others = |rx: &mut RxOp| rx.pull().is_some_and(|(pull, _)| pull.awaits_others());
        if matches!(step, Some(PullStep::Waits)) && awaits_others(&mut rx) {
            step = self.pull(&mut rx, budget);
        }
        match step {
            Some(PullStep::Ended) => {
                rx.pulled(self, PullStep::Ended);
            }
            step => self.pull_later(rx, step),
        }
    }

    /// Lets the kernel copy the messages of a batch, those of one peer by one call. One that it
    /// does not copy so is added to the table, and waits for its turn.
    #[cold]
    #[inline(never)]
    pub(crate) fn pull_gathered(&mut self, gathering: &mut Gathering) {
        let messages = &mut gathering.messages;
        while let Some(from) = messages.first().map(RxOp::peer) {
            if self.device.known_route(from).is_some_and(|route| route.down().is_some()) {
                // Its addresses are invalid. The table tells it of the end.
                let rx = messages.remove(0);
                self.pull_later(rx, None);
                continue;
            }
            if messages.len() == 1 {
                // Its sender may be asked to help.
                let rx = messages.remove(0);
                self.pull_alone(rx);
                break;
            }
            let first = messages.iter().take(TOGETHER);
            let count = first.take_while(|rx| rx.peer() == from).count();
            let done = copy_together(messages[..count].iter_mut().map(RxOp::parts));
            for rx in &mut messages[..done] {
                rx.pulled(self, PullStep::Ended);
            }
            messages.drain(..done);
            if done < count {
                let mut rx = messages.remove(0);
                if let Some((pull, _)) = rx.pull() {
                    // Its own copy will report the error.
                    pull.is_apart = true;
                }
                self.pull_later(rx, None);
            }
        }
        self.device.transfers.alone.fetch_sub(1, Ordering::AcqRel);
    }

    /// Adds a message to the table, after a step of its copy if there was one, and to those that
    /// the kernel copies.
    pub(super) fn pull_later(&mut self, rx: RxOp, step: Option<PullStep>) {
        let (at, has_failed) = (rx.at(), matches!(step, Some(PullStep::Failed(_))));
        self.begin(at.1, InFlight::Rx(rx), step.map(Event::Pulled));
        if !has_failed {
            let mut pulls = self.device.transfers.pulls.lock();
            pulls.push_back(at);
            self.device.transfers.pulls.set_count(pulls.len());
        }
    }

    /// Lets the kernel copy the offered messages in order, up to the limit of one call.
    #[cold]
    pub(crate) fn move_pulls(&mut self) {
        let transfers = &self.device.transfers;
        let mut names = {
            let Some(mut pulls) = transfers.pulls.try_lock() else { return };
            let names = std::mem::take(&mut *pulls);
            transfers.pulls.set_count(0);
            names
        };
        let mut budget = MOST;
        let mut turn = VecDeque::with_capacity(TOGETHER + ASK_AHEAD);
        let (mut waits, mut begun) = (Vec::new(), None);
        while budget > 0 {
            // The senders of the next messages are asked too: they can begin while this message is
            // copied.
            while turn.len() < TOGETHER + ASK_AHEAD
                && let Some(at) = names.pop_front()
            {
                match transfers.take_out(at) {
                    Some(transfer) => turn.push_back(Out { at, transfer }),
                    // Another thread carries it on, unless it has ended.
                    None if transfers.table.has(at) => waits.push(at),
                    None => {}
                }
            }
            if self.pull_together(&mut turn, &mut budget) {
                continue;
            }
            let Some(mut out) = turn.pop_front() else { break };
            let is_alone = turn.is_empty() && names.is_empty();
            let ahead = turn.iter_mut().take(ASK_AHEAD).map(|out| (out, false));
            for (out, is_alone) in std::iter::once((&mut out, is_alone)).chain(ahead) {
                if let InFlight::Rx(rx) = &mut *out.transfer {
                    self.ask_for_help(rx, is_alone);
                }
            }
            let Out { at, mut transfer } = out;
            let mut flow = Flow::Stays;
            if let InFlight::Rx(rx) = &mut *transfer
                && let Some(step) = self.pull(rx, &mut budget)
            {
                match step {
                    PullStep::Waits => waits.push(at),
                    PullStep::Copied => begun = Some(at),
                    PullStep::Ended | PullStep::Failed(_) => {}
                }
                flow = rx.pulled(self, step);
            }
            self.give_back(at, transfer, flow);
        }
        // It is put behind messages that had no turn, and before those that have arrived meanwhile.
        let mut left = names;
        turn.iter().rev().for_each(|out| left.push_front(out.at));
        waits.into_iter().rev().for_each(|at| left.push_front(at));
        left.extend(begun);
        for Out { at, transfer } in turn {
            self.give_back(at, transfer, Flow::Stays);
        }
        let mut pulls = transfers.pulls.lock();
        left.append(&mut pulls);
        *pulls = left;
        transfers.pulls.set_count(pulls.len());
    }

    fn ask_for_help(&self, rx: &mut RxOp, is_alone: bool) {
        let (size, tx, peer) = (rx.size(), rx.tx(), rx.peer());
        let Some((pull, buffer)) = rx.pull() else { return };
        if !pull.memory.is_ready() || std::mem::replace(&mut pull.is_asked, true) {
            return;
        }
        if !is_worth_it(size, is_alone) {
            return;
        }
        let place = pull.room(buffer, size).filter(|room| room.place().is_host());
        if let Some(place) = place.map(|room| (room.as_mut_ptr().cast_const(), room.len())) {
            pull.share = self.share_with(peer, tx, place).map(Box::new);
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
        let done = copy_together(many.iter_mut().map(Out::parts));
        let mut left = many.split_off(done);
        if let Some((pull, ..)) = left.first_mut().and_then(Out::parts) {
            // Its own copy will report the error.
            pull.is_apart = true;
        }
        left.into_iter().rev().for_each(|out| turn.push_front(out));
        for mut out in many {
            if let InFlight::Rx(rx) = &mut *out.transfer {
                *budget = budget.saturating_sub(rx.size());
                let flow = rx.pulled(self, PullStep::Ended);
                self.give_back(out.at, out.transfer, flow);
            }
        }
        true
    }

    /// Copies as much of one message as `budget` has bytes for. `None`: its bytes come another way.
    fn pull(&mut self, rx: &mut RxOp, budget: &mut usize) -> Option<PullStep> {
        let size = rx.size();
        let (pull, mut buffer) = rx.pull()?;
        loop {
            let step = pull.step(buffer.as_deref_mut(), size, budget);
            if !matches!(step, PullStep::Copied) {
                return Some(step);
            }
            self.moved = true;
            if *budget == 0 {
                return Some(step);
            }
        }
    }

    /// Notes that the kernel does not copy from a peer.
    pub(super) fn refuse_peer_memory(&self, from: Rank, why: String) {
        if let Some(linked) = self.device.known_route(from).and_then(|route| route.linked()) {
            linked.refuse_peer_memory(why);
        }
    }
}
