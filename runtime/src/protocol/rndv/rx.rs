//! The receiver's side.

use super::chunks::RxChunks;
use super::{Actions, Limits, Violation, name_of_answer};
use crate::names::{RemoteComp, Tag};
use crate::protocol::wire::{Control, Request, TransferVerdict, Window};
use carrack_transports::contract::RemotePlace;

/// A transfer to this rank: a message, a put, or the answer to a get.
#[derive(Debug)]
pub(crate) struct RndvReceiver {
    name: u64,
    size: usize,
    ask: Ask,
    method: RxMethod,
    got: usize,
    /// Bytes that will come: all, unless the sender has failed.
    until: usize,
    /// The sender knows of it, by a CTS or by the get itself.
    is_asked: bool,
    /// Bytes that the sender knows it may send in fragments.
    told: usize,
    /// Bytes that arrive are dropped: an engine has failed, or the operation has ended.
    drops: bool,
    /// The operation has ended.
    has_ended: bool,
}

/// The request for the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    /// The answer to an RTS, by the sender's name for the message.
    Rts(u64),
    /// A get.
    Get { comp: RemoteComp, tag: Tag, request: Request },
    /// Another message asks for them.
    Elsewhere,
}

/// Method by which its bytes come.
#[derive(Debug)]
enum RxMethod {
    /// Fragments that the CPU copies.
    Fragments,
    /// Fragments, through blocks that an engine empties.
    Staged,
    /// The sender's NIC writes all of it.
    Whole,
    /// The sender's NIC writes it chunk by chunk.
    Chunks(Box<RxChunks>),
    /// The kernel copies it.
    Copied,
}

/// The scheme for the bytes, with what its first message says.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scheme {
    /// Fragments that the CPU copies.
    Fragments,
    /// Fragments, through blocks that an engine empties.
    Staged,
    /// The place of the whole message.
    Whole(RemotePlace),
    /// The place of the first chunk, and its bytes.
    Chunks(RemotePlace, usize),
}

/// Something that happens to a transfer.
#[derive(Clone, Debug)]
pub(crate) enum RxEvent {
    /// The scheme was chosen, for the first time or anew.
    Begin(Scheme),
    /// A fragment of `len` bytes has come.
    Fragment { offset: u64, len: usize },
    /// Blocks are free for bytes up to here.
    Blocks(usize),
    /// All bytes are in place: an engine has copied the last.
    Placed,
    /// An engine has failed: the bytes cannot be placed.
    Lost,
    /// The NIC has written all of it, or the chunk at `at`.
    FinWrite { at: u64 },
    /// The NIC writes no byte from `at` on.
    Unwritten { at: u64 },
    /// A chunk was shown to the NIC.
    Shown { at: usize, len: usize, place: RemotePlace },
    /// The NIC takes no further chunk.
    NotShown,
    /// The sender, or the owner of the memory, has ended it.
    Fin(TransferVerdict),
    /// The transfer's deadline has passed.
    Expired,
    /// The peer is gone.
    Down,
}

/// An action for a transfer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum RxAction {
    /// Send a message.
    Send(Control),
    /// Copy the fragment to its place, from this byte of the message on.
    Store(usize),
    /// Show a chunk to the NIC: [`RxEvent::Shown`] or [`RxEvent::NotShown`].
    Show { at: usize, len: usize },
    /// Take a chunk back from the NIC.
    Hide(usize),
    /// Let the GPU see what the NIC has written.
    Flush,
    /// Take the buffer back from the NIC.
    TakeBack,
    /// Choose the scheme for bytes that the NIC does not write: [`RxEvent::Begin`].
    Choose,
    /// End the operation: its bytes are here, or lost.
    Arrived,
    /// End the operation with the error of the event, without its bytes. Bytes may still come.
    Fail,
    /// Forget it: nothing comes any more.
    Leave,
}

const UNASKED: Violation = Violation::Broken("it has written what it was not asked to");

impl RndvReceiver {
    /// Returns a transfer for which a scheme is chosen next.
    pub(crate) fn new(name: u64, size: usize, ask: Ask) -> Self {
        let (method, got, until, told) = (RxMethod::Fragments, 0, size, 0);
        let (is_asked, drops, has_ended) = (false, false, false);
        Self { name, size, ask, method, got, until, is_asked, told, drops, has_ended }
    }

    /// Returns a message that the kernel copies. `tx`: the sender's name for it.
    pub(crate) fn copied(name: u64, size: usize, tx: u64) -> Self {
        Self { method: RxMethod::Copied, ..Self::new(name, size, Ask::Rts(tx)) }
    }

    /// Returns its name.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }

    /// Returns the sender's name for the message, or 0.
    pub(crate) fn tx(&self) -> u64 {
        match self.ask {
            Ask::Rts(tx) => tx,
            Ask::Get { .. } | Ask::Elsewhere => 0,
        }
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn got(&self) -> usize {
        self.got
    }

    /// Returns `true` if its operation has ended, and only its bytes are still expected.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns `true` if an engine copies its bytes, unless they are dropped.
    pub(crate) fn is_staged(&self) -> bool {
        matches!(self.method, RxMethod::Staged) && !self.drops
    }

    /// Returns `true` if the kernel copies its bytes.
    pub(crate) fn is_copied(&self) -> bool {
        matches!(self.method, RxMethod::Copied)
    }

    /// Returns `true` if progress has to check it: an engine is copying, or its sender needs a
    /// grant.
    pub(crate) fn wants_to_go(&self) -> bool {
        matches!(self.method, RxMethod::Staged) && (!self.drops || self.told < self.size)
    }

    /// Handles an event.
    ///
    /// # Errors
    /// The peer should not have caused it.
    pub(crate) fn on(
        &mut self,
        event: RxEvent,
        limits: &Limits,
        actions: &mut Actions<RxAction>,
    ) -> Result<(), Violation> {
        match event {
            RxEvent::Begin(scheme) => self.begin(scheme, limits, actions),
            RxEvent::Fragment { offset, len } => self.fragment(offset, len, actions)?,
            RxEvent::Blocks(granted) => {
                let granted = if self.drops { self.size } else { granted };
                // Further grants wait for bytes, which prove that the sender has the request.
                if granted > self.told && (self.told == 0 || self.got > 0) {
                    self.grant(granted, actions);
                }
            }
            RxEvent::Placed => self.arrive(actions),
            RxEvent::Lost => {
                self.drops = true;
                self.look(actions);
            }
            RxEvent::FinWrite { at } => self.fin_write(at, limits, actions)?,
            RxEvent::Unwritten { at } => self.unwritten(at, limits, actions)?,
            RxEvent::Shown { at, len, place } => {
                if let RxMethod::Chunks(shown) = &mut self.method {
                    shown.shown(at, len);
                    let window = Window { at, len, place };
                    let (tx, rx) = (self.tx(), self.name);
                    actions.push_back(RxAction::Send(Control::CtsChunk { tx, rx, window }));
                    self.show(limits, actions);
                }
            }
            RxEvent::NotShown => {
                if let RxMethod::Chunks(shown) = &mut self.method {
                    shown.refuse();
                    self.show(limits, actions);
                }
            }
            RxEvent::Fin(verdict) => {
                let is_refusal =
                    !matches!(verdict, TransferVerdict::Done | TransferVerdict::Held(_));
                if !is_refusal || self.is_copied() {
                    return Err(Violation::Stray);
                }
                // Fragments that another thread has yet to take in are valid, though no operation
                // needs them.
                self.until = match verdict {
                    TransferVerdict::Broken { sent } => {
                        usize::try_from(sent).map_or(self.size, |sent| sent.min(self.size))
                    }
                    _ => 0,
                };
                self.give_up(actions);
            }
            RxEvent::Expired => {
                if matches!(self.ask, Ask::Get { .. }) && !self.is_asked {
                    // The owner has not heard of this get: no bytes will come.
                    self.until = 0;
                }
                self.give_up(actions);
            }
            RxEvent::Down => {
                self.until = 0;
                self.give_up(actions);
            }
        }
        Ok(())
    }

    /// Takes a scheme, and asks for the bytes.
    fn begin(&mut self, scheme: Scheme, limits: &Limits, actions: &mut Actions<RxAction>) {
        let (tx, rx) = (self.tx(), self.name);
        self.method = match scheme {
            Scheme::Fragments => {
                self.grant(self.size, actions);
                RxMethod::Fragments
            }
            Scheme::Staged => RxMethod::Staged,
            Scheme::Whole(place) => {
                self.is_asked = true;
                actions.push_back(RxAction::Send(Control::CtsWrite { tx, rx, place }));
                RxMethod::Whole
            }
            Scheme::Chunks(place, len) => {
                self.is_asked = true;
                let mut shown = Box::new(RxChunks::new(self.size));
                shown.shown(0, len);
                let window = Window { at: 0, len, place };
                actions.push_back(RxAction::Send(Control::CtsChunk { tx, rx, window }));
                self.method = RxMethod::Chunks(shown);
                return self.show(limits, actions);
            }
        };
    }

    /// Tells the sender how many bytes may come in fragments. The first time this is the request.
    fn grant(&mut self, limit: usize, actions: &mut Actions<RxAction>) {
        let (is_first, rx) = (!self.is_asked, self.name);
        (self.is_asked, self.told) = (true, limit);
        let limit = limit as u64;
        let message = match self.ask {
            Ask::Elsewhere => return,
            Ask::Rts(tx) if is_first => Control::Cts { tx, rx, limit },
            Ask::Rts(tx) => Control::Grant { tx, limit },
            Ask::Get { comp, tag, request } if is_first => {
                let request = Request { name: rx, second: limit, ..request };
                Control::Get { comp, tag, request }
            }
            Ask::Get { .. } => Control::Grant { tx: name_of_answer(rx), limit },
        };
        actions.push_back(RxAction::Send(message));
    }

    fn fragment(
        &mut self,
        offset: u64,
        len: usize,
        actions: &mut Actions<RxAction>,
    ) -> Result<(), Violation> {
        match self.method {
            RxMethod::Fragments | RxMethod::Staged => {}
            RxMethod::Whole | RxMethod::Chunks(_) => {
                return Err(Violation::Broken(
                    "it sent a fragment of a message that it is to write",
                ));
            }
            RxMethod::Copied => {
                return Err(Violation::Broken(
                    "it sent a fragment of a message that it was not asked for",
                ));
            }
        }
        let inside = usize::try_from(offset).ok().filter(|offset| {
            offset.checked_add(len).is_some_and(|end| end <= self.size) && len > 0
        });
        let offset =
            inside.ok_or(Violation::Broken("it sent a fragment that lies outside its message"))?;
        if !self.drops {
            actions.push_back(RxAction::Store(offset));
        }
        self.got += len;
        self.look(actions);
        Ok(())
    }

    /// Ends it if its last byte has come. A staged message ends when its last block is copied.
    fn look(&mut self, actions: &mut Actions<RxAction>) {
        if self.got >= self.until && !self.is_staged() {
            self.arrive(actions);
        }
    }

    fn arrive(&mut self, actions: &mut Actions<RxAction>) {
        actions.push_back(if self.has_ended { RxAction::Leave } else { RxAction::Arrived });
    }

    /// Ends the operation without its bytes.
    fn give_up(&mut self, actions: &mut Actions<RxAction>) {
        if self.until == 0 && matches!(self.method, RxMethod::Whole | RxMethod::Chunks(_)) {
            actions.push_back(RxAction::TakeBack);
        }
        if !self.has_ended {
            actions.push_back(RxAction::Fail);
        }
        (self.has_ended, self.drops) = (true, true);
        if self.got >= self.until {
            actions.push_back(RxAction::Leave);
        }
    }

    /// Handles the FIN of a write.
    fn fin_write(
        &mut self,
        at: u64,
        limits: &Limits,
        actions: &mut Actions<RxAction>,
    ) -> Result<(), Violation> {
        match &mut self.method {
            RxMethod::Whole if at == 0 => {
                // Before the completion is signalled, and while the NIC still knows the memory.
                // The arrival at the NIC does not mean that the GPU sees the bytes.
                actions.extend([RxAction::Flush, RxAction::TakeBack]);
                self.got = self.size;
                self.arrive(actions);
            }
            RxMethod::Chunks(shown) => {
                let at = usize::try_from(at).map_err(|_| UNASKED)?;
                self.got += shown.written(at).ok_or(UNASKED)?;
                actions.push_back(RxAction::Hide(at));
                if self.got >= self.size {
                    actions.push_back(RxAction::TakeBack);
                    self.arrive(actions);
                } else {
                    self.show(limits, actions);
                }
            }
            _ => return Err(UNASKED),
        }
        Ok(())
    }

    /// Handles the message that the sender's NIC does not reach its bytes from `at` on.
    fn unwritten(
        &mut self,
        at: u64,
        limits: &Limits,
        actions: &mut Actions<RxAction>,
    ) -> Result<(), Violation> {
        match &mut self.method {
            RxMethod::Whole if at == 0 => actions.extend([RxAction::TakeBack, RxAction::Choose]),
            RxMethod::Chunks(shown) => {
                let at = usize::try_from(at).map_err(|_| UNASKED)?;
                let (len, hidden) = shown.unwritten(at).ok_or(UNASKED)?;
                self.got += len;
                actions.extend(hidden.into_iter().map(RxAction::Hide));
                self.show(limits, actions);
            }
            _ => return Err(UNASKED),
        }
        Ok(())
    }

    /// Shows the next chunk, or grants the rest in fragments if no NIC takes further chunks.
    fn show(&mut self, limits: &Limits, actions: &mut Actions<RxAction>) {
        let RxMethod::Chunks(shown) = &self.method else { return };
        if let Some((at, len)) = shown.next(limits) {
            actions.push_back(RxAction::Show { at, len });
        } else if shown.has_ended() && self.got < self.size {
            actions.extend([RxAction::TakeBack, RxAction::Choose]);
        }
    }
}
