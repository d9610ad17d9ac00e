//! A reliable queue pair to one peer's device, shared by the device that serves it and the link
//! that sends through it.

use super::bounces::Bounces;
use super::memory::CreditWords;
use super::sending::{SendingHalf, Unsent};
use super::signs::Signs;
use super::sys::QueuePair;
use super::transfers::{Direction, Finished, Registrations};
use super::wire::QueuePairEnd;
use crate::contract::{
    BufferChunk, Busy, DownCause, Header, OpToken, PeerId, RemotePlace, Submit, SubmitError,
    WordChange,
};
use crate::mem::{Buffer, MemRef};
use crate::net::key::DeviceKey;
use crate::sync::BiasedLock;
use crossbeam_utils::CachePadded;
use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

const CONNECTING: u8 = 0;
const UP: u8 = 1;
const DOWN: u8 = 2;

/// See the [module](self).
pub(super) struct Connection {
    pub(super) index: u32,
    pub(super) peer: PeerId,
    pub(super) device: DeviceKey,
    state: AtomicU8,
    down: OnceLock<DownCause>,
    /// Links through it that are gone, until the device takes note.
    unwanted: AtomicU32,
    /// The device's signals.
    signs: Arc<Signs>,
    packet_size: usize,
    /// Sequence number of the last request that is known to be complete; written by the poller.
    completed: CachePadded<AtomicU32>,
    // Before the words: a request may read them.
    sending: BiasedLock<SendingHalf>,
    words: CreditWords,
    bounces: Arc<Bounces>,
}

impl Connection {
    pub(super) fn new(
        index: u32,
        (peer, device): (PeerId, DeviceKey),
        (queue, depth): (Arc<QueuePair>, u32),
        words: CreditWords,
        (bounces, signs): (Arc<Bounces>, Arc<Signs>),
    ) -> Self {
        Self {
            index,
            peer,
            device,
            state: AtomicU8::new(CONNECTING),
            down: OnceLock::new(),
            unwanted: AtomicU32::new(0),
            signs,
            packet_size: bounces.payload(),
            completed: CachePadded::new(AtomicU32::new(0)),
            sending: BiasedLock::new(SendingHalf::new(queue, depth, index)),
            words,
            bounces,
        }
    }

    /// Notes that one of its links has gone.
    pub(super) fn lose_link(&self) {
        self.unwanted.fetch_add(1, Ordering::AcqRel);
        self.signs.tell_news();
    }

    /// Returns the number of its links that have gone since the last call.
    pub(super) fn lost_links(&self) -> u32 {
        self.unwanted.swap(0, Ordering::AcqRel)
    }

    /// Returns the rank and its device.
    pub(super) fn identity(&self) -> (PeerId, DeviceKey) {
        (self.peer, self.device)
    }

    /// Returns the length of the largest message in bytes.
    #[inline(always)]
    pub(super) fn packet_size(&self) -> usize {
        self.packet_size
    }

    #[inline(always)]
    pub(super) fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == UP
    }

    pub(super) fn is_down(&self) -> bool {
        self.state.load(Ordering::Acquire) == DOWN
    }

    /// Returns the cause of its end.
    pub(super) fn down(&self) -> Option<&DownCause> {
        self.down.get()
    }

    /// Returns the queue pair, until it is closed.
    pub(super) fn queue(&self) -> Option<Arc<QueuePair>> {
        self.sending.lock().queue().cloned()
    }

    /// Stores the peer's end.
    pub(super) fn open(&self, end: &QueuePairEnd) {
        self.sending.lock().open(end);
    }

    /// Allows messages to be sent.
    pub(super) fn set_up(&self) {
        self.state.store(UP, Ordering::Release);
    }

    /// Notes that requests up to this one are complete.
    #[inline(always)]
    pub(super) fn complete(&self, sequence: u32) {
        self.completed.store(sequence, Ordering::Release);
    }

    /// Sends a message of host memory that a packet can hold. Written out instead of by `begin`,
    /// which would take 25 instructions more.
    #[inline]
    pub(super) fn send(&self, header: Header, bytes: MemRef<'_>) -> Result<Submit, SubmitError> {
        if !self.is_up() {
            return self.not_up();
        }
        let Some(mut sending) = self.sending.try_lock() else {
            return Ok(Submit::Busy(Busy::Lock));
        };
        // Checked again: it may have ended while another thread held the lock.
        if !self.is_up() {
            return self.not_up();
        }
        let completed = self.completed.load(Ordering::Acquire);
        let sent = sending.message((header, bytes), completed, &self.words, &self.bounces);
        self.told(sent.map(|()| Submit::Done))
    }

    /// Sends a message as [`send`](Self::send) does, when others follow it at once.
    pub(super) fn send_with_more(
        &self,
        header: Header,
        bytes: MemRef<'_>,
    ) -> Result<Submit, SubmitError> {
        if !self.is_up() {
            return self.not_up();
        }
        let Some(mut sending) = self.sending.try_lock() else {
            return Ok(Submit::Busy(Busy::Lock));
        };
        if !self.is_up() {
            return self.not_up();
        }
        let completed = self.completed.load(Ordering::Acquire);
        let given = (&*self.bounces, &*self.signs);
        let sent = sending.gather((header, bytes), completed, &self.words, given);
        self.told(sent.map(|()| Submit::Done))
    }

    /// Begins an operation on the peer's memory.
    pub(super) fn transfer(
        &self,
        way: (Direction, RemotePlace),
        what: (&mut Buffer, OpToken),
        registrations: &Registrations,
    ) -> Result<Submit, SubmitError> {
        let bounces = &*self.bounces;
        self.begin(|sending, completed| {
            sending.transfer(way, what, completed, (registrations, bounces))
        })
    }

    /// Begins an atomic operation on a word of the peer's memory.
    pub(super) fn atomic(
        &self,
        what: (RemotePlace, WordChange),
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        self.begin(|sending, completed| sending.atomic(what, token, completed, &self.bounces))
    }

    fn begin(
        &self,
        begin: impl FnOnce(&mut SendingHalf, u32) -> Result<(), Unsent>,
    ) -> Result<Submit, SubmitError> {
        if !self.is_up() {
            return self.not_up();
        }
        let Some(mut sending) = self.sending.try_lock() else {
            return Ok(Submit::Busy(Busy::Lock));
        };
        if !self.is_up() {
            return self.not_up();
        }
        let begun = begin(&mut sending, self.completed.load(Ordering::Acquire));
        self.told(begun.map(|()| Submit::Posted))
    }

    /// Begins to write a part of a buffer to the peer's memory.
    #[cold]
    pub(super) fn put_chunk(
        &self,
        to: RemotePlace,
        what: (&BufferChunk, OpToken),
        registrations: &Registrations,
    ) -> Result<Submit, SubmitError> {
        self.begin(|sending, completed| sending.put_chunk(to, what, completed, registrations))
    }

    /// Returns the operations on memory that have ended. `None`: another thread is sending, try
    /// again.
    pub(super) fn ended(&self) -> Option<Vec<Finished>> {
        let mut sending = self.sending.try_lock_at_once()?;
        Some(sending.ended(self.completed.load(Ordering::Acquire), &self.bounces))
    }

    #[inline(always)]
    fn told(&self, sent: Result<Submit, Unsent>) -> Result<Submit, SubmitError> {
        match sent {
            Ok(submit) => Ok(submit),
            Err(unsent) => self.told_of(unsent),
        }
    }

    #[inline(never)]
    fn told_of(&self, unsent: Unsent) -> Result<Submit, SubmitError> {
        match unsent {
            Unsent::Busy(busy) => Ok(Submit::Busy(busy)),
            Unsent::Unregistered(why) => Err(SubmitError::Unregistered(why)),
            Unsent::Wrong(why) => Err(self.break_off(DownCause::Protocol(why))),
            Unsent::Failed(why) => {
                Err(self
                    .break_off(DownCause::Gone(format!("its queue pair takes no request: {why}"))))
            }
        }
    }

    /// Breaks the connection off. The device will notice, and end it.
    #[cold]
    pub(super) fn break_off(&self, cause: DownCause) -> SubmitError {
        let cause = self.set_down(cause);
        self.signs.tell_news();
        SubmitError::Down { peer: self.peer, cause }
    }

    #[cold]
    fn not_up(&self) -> Result<Submit, SubmitError> {
        match self.down.get() {
            Some(cause) if self.is_down() => {
                Err(SubmitError::Down { peer: self.peer, cause: cause.clone() })
            }
            _ => Ok(Submit::Busy(Busy::Connecting)),
        }
    }

    /// Tells the peer how many messages were taken in. Returns `false` if the caller has to try
    /// again.
    pub(super) fn credit(&self, taken: u64) -> bool {
        let Some(mut sending) = self.sending.try_lock_at_once() else { return false };
        let said = sending.credit(taken, self.completed.load(Ordering::Acquire), &self.words);
        // A queue pair that takes no request is broken off, so that no credit is needed any more.
        !matches!(self.told(said.map(|()| Submit::Done)), Ok(Submit::Busy(_)))
    }

    /// Returns `true` if no message can be sent for lack of credits, as far as is known.
    pub(super) fn lacks_credits(&self) -> bool {
        self.sending.try_lock_at_once().is_some_and(|sending| sending.lacks_credits(&self.words))
    }

    /// Sends the messages that wait for more. Returns `false` if the caller has to try again.
    pub(super) fn send_off(&self) -> bool {
        let Some(mut sending) = self.sending.try_lock_at_once() else { return false };
        if !self.is_up() {
            return true;
        }
        let sent = sending.send_off(&self.bounces);
        sending.is_listed = matches!(sent, Err(Unsent::Busy(_)));
        drop(sending);
        !matches!(self.told(sent.map(|()| Submit::Done)), Ok(Submit::Busy(_)))
    }

    /// Stores the cause of the end, the first time, and stops messages. Returns the first cause.
    pub(super) fn set_down(&self, cause: DownCause) -> DownCause {
        let _ = self.down.set(cause.clone());
        self.state.store(DOWN, Ordering::Release);
        self.down.get().cloned().unwrap_or(cause)
    }

    /// Sends the last message. Returns `true` if its completion has to be awaited.
    pub(super) fn say_bye(&self) -> bool {
        let mut sending = self.sending.lock();
        let was_up = self.is_up();
        self.set_down(DownCause::Closed);
        was_up && sending.bye(&self.bounces)
    }

    /// Ends the queue pair. Returns `true` if a completion has to be awaited.
    pub(super) fn fail(&self, was_up: bool) -> bool {
        self.sending.lock().fail(was_up)
    }

    /// Closes the queue pair. Returns the operations on memory that had ended without a report,
    /// and those that had not ended.
    pub(super) fn close(&self) -> (Vec<Finished>, Vec<(OpToken, Buffer)>) {
        let mut sending = self.sending.lock();
        let ended = sending.ended(self.completed.load(Ordering::Acquire), &self.bounces);
        (ended, sending.close(&self.bounces))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({} of {}, up {})", self.index, self.peer, self.is_up())
    }
}
