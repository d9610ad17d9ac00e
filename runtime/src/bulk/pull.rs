//! The receiver's side of messages that the kernel copies.

use super::incoming::Target;
use super::share::{ASK_AHEAD, MOST, Others, Share, is_worth_it};
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::Rank;
use crate::op::Ended;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::protocol::wire::{Offer, Verdict};
use carrack_transports::contract::{PeerMemory, PeerMemoryError};
use carrack_transports::mem::{Buffer, MemMut};
use std::collections::VecDeque;
use std::sync::Arc;

/// Leaks a buffer that a peer's kernel may still be copying, and that cannot be waited for any
/// longer.
pub(super) fn abandon(buffer: Option<Buffer>, to: Rank) {
    let size = buffer.as_ref().map_or(0, Buffer::len);
    tracing::warn!(
        rank = to.0,
        size,
        "the memory of a buffer stays taken: a peer that is stopped may be copying it"
    );
    std::mem::forget(buffer);
}

/// Messages that are copied by one call of the kernel, at most.
const TOGETHER: usize = 16;

/// A message that the kernel copies here.
pub(crate) struct Pull {
    pub(super) from: Rank,
    pub(super) size: usize,
    pub(super) target: Target,
    /// The buffer of an operation that has ended, while its sender may still write to it.
    kept: Option<Buffer>,
    offer: Offer,
    memory: Arc<dyn PeerMemory>,
    done: usize,
    /// `true` if its sender was asked to help, where that pays.
    is_asked: bool,
    /// Its sender may help.
    pub(super) share: Option<Share>,
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

/// The result of a turn of a pull.
enum Pulled {
    Over,
    /// The remaining bytes are with the sender.
    Waits(Box<Pull>),
    /// More bytes are left.
    Begun(Box<Pull>),
}

impl Pass<'_> {
    /// Lets the kernel copy the offered messages in order, up to the limit of one call.
    #[cold]
    pub(crate) fn move_pulls(&mut self) {
        let bulk = &self.device.bulk;
        let mut turn = {
            let Some(mut pulls) = bulk.pulls.try_lock() else { return };
            let turn = std::mem::take(&mut *pulls);
            bulk.pulls.set_count(0);
            turn
        };
        let mut budget = MOST;
        let (mut left, mut begun) = (VecDeque::new(), None);
        while budget > 0 {
            if self.pull_together(&mut turn, &mut budget) {
                continue;
            }
            let Some(mut pull) = turn.pop_front() else { break };
            // The next ones, too: their senders reach them while this one is copied.
            let is_alone = turn.is_empty();
            self.ask_for_help(&mut pull, is_alone);
            turn.iter_mut().take(ASK_AHEAD).for_each(|pull| self.ask_for_help(pull, false));
            match self.pull(pull, &mut budget) {
                Pulled::Over => {}
                Pulled::Waits(pull) => left.push_back(pull),
                Pulled::Begun(pull) => begun = Some(pull),
            }
        }
        let waits: Vec<Rank> = left.iter().map(|pull| pull.from).collect();
        left.append(&mut turn);
        // Behind those that had no turn, and before those that have arrived meanwhile.
        left.extend(begun);
        let mut pulls = bulk.pulls.lock();
        left.append(&mut pulls);
        *pulls = left;
        bulk.pulls.set_count(pulls.len());
        drop(pulls);
        // A peer may have gone while another thread had these out of the list. Those that wait for
        // it would wait for ever.
        waits.into_iter().for_each(|from| self.device.end_if_gone(self.inner, from));
    }

    fn ask_for_help(&self, pull: &mut Pull, is_alone: bool) {
        if !pull.memory.is_ready() || std::mem::replace(&mut pull.is_asked, true) {
            return;
        }
        if is_worth_it(pull.size, is_alone)
            && let Some(place) = pull.place()
        {
            pull.share = self.device.ask_for_help(self.inner, pull.from, pull.offer.token, place);
        }
    }

    /// Copies several messages of one peer at the front by one call of the kernel. Returns `true`
    /// if there were several.
    fn pull_together(&mut self, turn: &mut VecDeque<Box<Pull>>, budget: &mut usize) -> bool {
        let Some(from) = turn.front().map(|first| first.from) else { return false };
        let mut size = 0;
        let together = turn.iter().take_while(|pull| {
            size += pull.size;
            size <= *budget && pull.from == from && pull.can_go_with_others()
        });
        let count = together.take(TOGETHER).count();
        if count < 2 {
            return false;
        }
        let mut many: Vec<_> = turn.drain(..count).collect();
        let memory = many[0].memory.clone();
        let places: Option<Vec<_>> =
            many.iter_mut().map(|pull| Some((pull.offer.addr, pull.room()?))).collect();
        let done = places.map_or(0, |places| memory.read_many(&places).unwrap_or(0));
        let mut left = many.split_off(done);
        if let Some(pull) = left.first_mut() {
            // Its own copy will report the error.
            pull.is_apart = true;
        }
        left.into_iter().rev().for_each(|pull| turn.push_front(pull));
        for pull in many {
            *budget = budget.saturating_sub(pull.size);
            self.pulled(*pull);
        }
        true
    }

    /// Copies as much of one message as one turn may.
    fn pull(&mut self, mut pull: Box<Pull>, budget: &mut usize) -> Pulled {
        loop {
            match pull.step() {
                Step::Copied(len) => {
                    self.moved = true;
                    *budget = budget.saturating_sub(len);
                    if *budget == 0 {
                        return Pulled::Begun(pull);
                    }
                }
                Step::Waits => {
                    self.expire_pull(&mut pull);
                    return Pulled::Waits(pull);
                }
                Step::Over => {
                    self.pulled(*pull);
                    return Pulled::Over;
                }
                Step::Failed(why) => {
                    self.not_pulled(*pull, why);
                    return Pulled::Over;
                }
            }
        }
    }

    /// Ends a message whose bytes have all been copied.
    fn pulled(&mut self, pull: Pull) {
        self.moved = true;
        let Pull { from, size, target, offer, .. } = pull;
        // A put's verdict follows its arrival, whichever way it came.
        if !target.is_memory() {
            let message = Message::Finish { token: offer.token };
            self.device.control(self.inner, from, message, Verdict::Done.encode());
        }
        self.arrived(from, size, target, None);
    }

    fn not_pulled(&mut self, pull: Pull, why: PeerMemoryError) {
        self.moved = true;
        let Pull { from, size, target, offer, .. } = pull;
        let error = match why {
            PeerMemoryError::Refused(why) => {
                if let Some(linked) = self.device.known_route(from).and_then(|route| route.linked())
                {
                    linked.refuse_peer_memory(why);
                }
                return self.device.ask_for_parts(self.inner, offer.token, (from, size, target));
            }
            PeerMemoryError::Gone(cause) => OpError::PeerDown { rank: from, cause },
            PeerMemoryError::Failed(why) => OpError::Transfer { rank: from, why },
        };
        let message = Message::Finish { token: offer.token };
        self.device.control(self.inner, from, message, Verdict::Failed.encode());
        if let Some((comp, status)) = target.fail(from, size, error) {
            self.signal(comp.as_ref(), status);
        }
    }

    /// Ends the operation of a message whose deadline has passed. Its buffer stays here until the
    /// sender is done with it.
    fn expire_pull(&mut self, pull: &mut Pull) {
        let deadline = pull.target.deadline();
        if !deadline.is_some() || !deadline.has_passed(Deadline::now()) {
            return;
        }
        let buffer = pull.target.buffer().map(std::mem::take);
        let target = std::mem::replace(&mut pull.target, Target::Nowhere);
        pull.kept = buffer;
        self.moved = true;
        self.inner.suspect(pull.from);
        if let Some((comp, status)) =
            target.fail(pull.from, pull.size, OpError::TimedOut(pull.from))
        {
            self.signal(comp.as_ref(), status);
        }
    }
}

impl Pull {
    /// Returns a pull of `size` bytes into a target in host memory.
    pub(super) fn new(
        from: Rank,
        (size, target): (usize, Target),
        offer: Offer,
        memory: Arc<dyn PeerMemory>,
    ) -> Self {
        Self {
            from,
            size,
            target,
            kept: None,
            offer,
            memory,
            done: 0,
            is_asked: false,
            share: None,
            failed: None,
            is_apart: false,
        }
    }

    /// Returns the buffer for its bytes.
    fn buffer(&mut self) -> Option<&mut Buffer> {
        self.kept.as_mut().or_else(|| self.target.buffer())
    }

    /// Returns the place for its bytes, as its sender needs it.
    fn place(&mut self) -> Option<(*const u8, usize)> {
        let room = self.room()?;
        room.place().is_host().then(|| (room.as_mut_ptr().cast_const(), room.len()))
    }

    /// Copies a piece.
    fn step(&mut self) -> Step {
        if !self.memory.is_ready() {
            return Step::Waits;
        }
        let left = (self.done, MOST.min(self.size - self.done));
        let next = match &self.share {
            None => (left.1 > 0).then_some(left),
            Some(share) => match share.take() {
                Some(piece) => Some(piece),
                None => match share.others() {
                    Others::Waiting => return Step::Waits,
                    Others::Settled => None,
                    Others::Failed(from) => {
                        // Copied as if the sender had not helped.
                        (self.done, self.share) = (from, None);
                        return self.step();
                    }
                },
            },
        };
        if let Some(why) = self.failed.take() {
            return Step::Failed(why);
        }
        let Some((begin, len)) = next else { return Step::Over };
        match self.copy(begin, len) {
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

    fn copy(&mut self, begin: usize, len: usize) -> Result<(), PeerMemoryError> {
        // An address that overflows is the sender's error, and refers to no memory.
        let addr = self.offer.addr.wrapping_add(begin as u64);
        let memory = self.memory.clone();
        let room = self
            .room()
            .ok_or_else(|| PeerMemoryError::Failed("the buffer cannot be written".into()))?;
        memory.read(addr, room.part(begin, len))
    }

    /// Returns the place for the whole message.
    fn room(&mut self) -> Option<MemMut<'_>> {
        let size = self.size;
        Some(self.buffer()?.view_mut()?.part(0, size))
    }

    /// Returns a description for diagnostics.
    pub(super) fn waits_for(&self) -> &'static str {
        match &self.share {
            None => "the kernel's copy",
            Some(_) => "the kernel's copy, and its sender's help",
        }
    }

    /// Returns `true` if it has not begun and needs no help of its sender.
    fn can_go_with_others(&self) -> bool {
        !self.is_apart
            && self.done == 0
            && self.share.is_none()
            && !is_worth_it(self.size, false)
            && self.memory.is_ready()
    }

    /// Ends it without its bytes. The buffer leaks if its sender may be writing to it (`is_used`).
    /// A dead sender does not write.
    pub(super) fn fail(mut self, error: OpError, is_used: bool) -> Option<Ended> {
        let helps = self.share.as_ref().is_some_and(|share| !share.close());
        if helps && is_used && !self.memory.is_gone() {
            abandon(self.buffer().map(std::mem::take), self.from);
        }
        self.target.fail(self.from, self.size, error)
    }
}
