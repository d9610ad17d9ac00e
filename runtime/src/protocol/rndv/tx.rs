//! The sender's side.

use super::chunks::{ChunkStep, Sent};
use super::{Actions, Limits, Violation};
use crate::error::OpError;
use crate::protocol::wire::{Control, TransferVerdict, Window};
use carrack_transports::contract::RemotePlace;

/// The kind of a transfer, which decides when it completes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Duty {
    /// A message: completes when its bytes have left, or the receiver has copied them.
    Message,
    /// An operation on the receiver's memory: completes when the receiver says so.
    Memory,
    /// Bytes that the receiver has asked for: complete when they have left.
    Answer,
}

/// A transfer to a peer: a message, a put, or the answer to a get.
#[derive(Debug)]
pub(crate) struct RndvSender {
    name: u64,
    size: usize,
    duty: Duty,
    /// `true` if it is written as a whole by a NIC, and not in chunks.
    in_one: bool,
    method: TxMethod,
}

/// Method by which its bytes go.
#[derive(Debug)]
enum TxMethod {
    /// An unknown method: the RTS has no answer yet, or the receiver copies the bytes.
    Offered,
    Fragments {
        /// The receiver's name for the message.
        rx: u64,
        sent: usize,
        /// Bytes that the receiver has granted.
        limit: usize,
    },
    Whole {
        rx: u64,
        place: RemotePlace,
    },
    Chunks(Box<Sent>),
    /// All are sent, and the owner's verdict follows.
    Judged,
}

/// Something that happens to a transfer.
#[derive(Clone, Debug)]
pub(crate) enum TxEvent {
    /// The receiver takes fragments.
    Cts { rx: u64, limit: usize },
    /// The receiver's NIC takes all of it.
    CtsWrite { rx: u64, place: RemotePlace },
    /// The receiver's NIC takes a part of it.
    CtsChunk { rx: u64, window: Window },
    /// The receiver takes more fragments.
    Grant { limit: usize },
    /// The receiver ends it.
    Fin(TransferVerdict),
    /// The link may have room again.
    Go,
    /// Fragments have left, these many bytes.
    Left(usize),
    /// The link has taken all of it, and ends the operation.
    WholeGiven,
    /// The link has taken the chunk; a message behind it arrives after it, or not.
    ChunkGiven { len: usize, in_order: bool },
    /// The link has no room for the chunk.
    ChunkBusy,
    /// A chunk of the window that begins at `at` has completed.
    ChunkEnded { at: usize, failed: Option<OpError> },
    /// This rank's NIC does not reach the bytes.
    Unregistered,
    /// The bytes cannot be read, or the link has failed.
    Failed(OpError),
    /// The peer is gone.
    Down(OpError),
}

/// An action for a transfer.
#[derive(Clone, Debug)]
pub(crate) enum TxAction {
    /// Send a message, behind bytes that were submitted before.
    Send(Control),
    /// Submit fragments: answered by [`TxEvent::Left`], once for each, or by none.
    Fragments { rx: u64, from: usize, to: usize },
    /// Give all of it to the NIC: [`TxEvent::WholeGiven`], [`TxEvent::Unregistered`], or nothing
    /// while the link has no room.
    Whole { place: RemotePlace },
    /// Give a chunk to the NIC, of the window that begins at `window`: [`TxEvent::ChunkGiven`],
    /// [`TxEvent::ChunkBusy`], [`TxEvent::Unregistered`].
    Chunk { place: RemotePlace, at: usize, len: usize, window: usize },
    /// End the operation as the receiver says.
    Judge(TransferVerdict),
    /// End the operation.
    End(Result<(), OpError>),
    /// Forget it: the link has the operation.
    Leave,
}

impl RndvSender {
    /// Returns a transfer whose RTS is sent under `name`. With `in_one` a NIC writes it as a whole.
    pub(crate) fn offered(name: u64, size: usize, duty: Duty, in_one: bool) -> Self {
        Self { name, size, duty, in_one, method: TxMethod::Offered }
    }

    /// Returns the answer to a get, which the asker has named `rx`.
    pub(crate) fn answer(name: u64, size: usize, rx: u64, limit: usize) -> Self {
        let method = TxMethod::Fragments { rx, sent: 0, limit };
        Self { name, size, duty: Duty::Answer, in_one: true, method }
    }

    pub(crate) fn duty(&self) -> Duty {
        self.duty
    }

    /// Returns the bytes that have left, or were given to a NIC.
    pub(crate) fn sent(&self) -> usize {
        match &self.method {
            TxMethod::Offered | TxMethod::Whole { .. } => 0,
            TxMethod::Fragments { sent, .. } => *sent,
            TxMethod::Chunks(chunks) => chunks.sent,
            TxMethod::Judged => self.size,
        }
    }

    /// Returns `true` while the receiver may be copying the bytes by itself.
    pub(crate) fn is_offered(&self) -> bool {
        matches!(self.method, TxMethod::Offered)
    }

    /// Returns `true` if it goes on by [`TxEvent::Go`].
    pub(crate) fn wants_to_go(&self) -> bool {
        match &self.method {
            TxMethod::Offered | TxMethod::Judged => false,
            TxMethod::Fragments { sent, limit, .. } => *sent < (*limit).min(self.size),
            TxMethod::Whole { .. } => true,
            TxMethod::Chunks(chunks) => chunks.is_blocked,
        }
    }

    /// Handles an event.
    ///
    /// # Errors
    /// The peer should not have caused it.
    pub(crate) fn on(
        &mut self,
        event: TxEvent,
        limits: &Limits,
        actions: &mut Actions<TxAction>,
    ) -> Result<(), Violation> {
        match event {
            TxEvent::Cts { rx, limit } => match self.method {
                TxMethod::Offered => self.method = TxMethod::Fragments { rx, sent: 0, limit },
                _ => return Err(Violation::Stray),
            },
            TxEvent::CtsWrite { rx, place } => match self.method {
                TxMethod::Offered => self.write(rx, place, limits, actions)?,
                _ => return Err(Violation::Stray),
            },
            TxEvent::CtsChunk { rx, window } => self.show(rx, window, limits, actions)?,
            TxEvent::Grant { limit: granted } => match &mut self.method {
                TxMethod::Fragments { limit, .. } => *limit = granted.max(*limit),
                TxMethod::Chunks(chunks) => {
                    chunks.limit = granted.max(chunks.limit);
                    self.go_on(limits, actions);
                }
                // It has ended here because its source failed, or the grant is late.
                _ => {}
            },
            TxEvent::Fin(verdict) => match self.method {
                TxMethod::Offered | TxMethod::Judged => actions.push_back(TxAction::Judge(verdict)),
                _ => return Err(Violation::Stray),
            },
            TxEvent::Go => match self.method {
                TxMethod::Fragments { rx, sent, limit } => {
                    let to = limit.min(self.size);
                    if sent < to {
                        actions.push_back(TxAction::Fragments { rx, from: sent, to });
                    }
                }
                TxMethod::Whole { place, .. } => actions.push_back(TxAction::Whole { place }),
                TxMethod::Chunks(_) => self.go_on(limits, actions),
                TxMethod::Offered | TxMethod::Judged => {}
            },
            TxEvent::Left(len) => {
                if let TxMethod::Fragments { sent, .. } = &mut self.method {
                    *sent += len;
                    if *sent == self.size {
                        match self.duty {
                            Duty::Memory => self.method = TxMethod::Judged,
                            Duty::Message | Duty::Answer => {
                                actions.push_back(TxAction::End(Ok(())))
                            }
                        }
                    }
                }
            }
            TxEvent::WholeGiven => {
                if let TxMethod::Whole { rx, .. } = self.method {
                    // On the same link, so behind the bytes.
                    actions.push_back(TxAction::Send(Control::FinWrite { rx, at: 0 }));
                    actions.push_back(TxAction::Leave);
                }
            }
            TxEvent::ChunkGiven { len, in_order } => {
                if let TxMethod::Chunks(chunks) = &mut self.method {
                    let rx = chunks.rx;
                    if let Some(at) = chunks.given(len, in_order) {
                        actions.push_back(TxAction::Send(Control::FinWrite { rx, at: at as u64 }));
                    }
                    self.go_on(limits, actions);
                }
            }
            TxEvent::ChunkBusy => {
                if let TxMethod::Chunks(chunks) = &mut self.method {
                    chunks.is_blocked = true;
                }
            }
            TxEvent::ChunkEnded { at, failed } => {
                if let TxMethod::Chunks(chunks) = &mut self.method {
                    let rx = chunks.rx;
                    if let Some(at) = chunks.ended(at, failed) {
                        actions.push_back(TxAction::Send(Control::FinWrite { rx, at: at as u64 }));
                    }
                    self.go_on(limits, actions);
                }
            }
            TxEvent::Unregistered => match &mut self.method {
                TxMethod::Whole { rx, .. } => {
                    let rx = *rx;
                    self.go_in_fragments(rx, actions);
                }
                TxMethod::Chunks(chunks) => {
                    chunks.refuse(self.size);
                    self.go_on(limits, actions);
                }
                _ => {}
            },
            TxEvent::Failed(error) => match &mut self.method {
                TxMethod::Chunks(chunks) => {
                    chunks.fail(error);
                    self.go_on(limits, actions);
                }
                TxMethod::Fragments { rx, .. } | TxMethod::Whole { rx, .. } => {
                    // The receiver is told where its message breaks off.
                    let (name, sent) = (*rx, self.sent() as u64);
                    let verdict = TransferVerdict::Broken { sent };
                    actions.push_back(TxAction::Send(Control::Fin { name, verdict }));
                    actions.push_back(TxAction::End(Err(error)));
                }
                TxMethod::Offered | TxMethod::Judged => {
                    actions.push_back(TxAction::End(Err(error)))
                }
            },
            TxEvent::Down(error) => match &mut self.method {
                TxMethod::Chunks(chunks) => {
                    // The NIC may still be reading: the link gives the chunks back.
                    chunks.fail(error);
                    self.go_on(limits, actions);
                }
                _ => actions.push_back(TxAction::End(Err(error))),
            },
        }
        Ok(())
    }

    /// Lets the NIC write to a place for all of it.
    fn write(
        &mut self,
        rx: u64,
        place: RemotePlace,
        limits: &Limits,
        actions: &mut Actions<TxAction>,
    ) -> Result<(), Violation> {
        if self.duty != Duty::Message {
            self.go_in_fragments(rx, actions);
        } else if self.in_one || self.size <= limits.chunk {
            self.method = TxMethod::Whole { rx, place };
            actions.push_back(TxAction::Whole { place });
        } else {
            return self.show(rx, Window { at: 0, len: self.size, place }, limits, actions);
        }
        Ok(())
    }

    /// Sends in fragments the bytes that a NIC does not reach, after the receiver has been told and
    /// has granted them.
    fn go_in_fragments(&mut self, rx: u64, actions: &mut Actions<TxAction>) {
        self.method = TxMethod::Fragments { rx, sent: 0, limit: 0 };
        actions.push_back(TxAction::Send(Control::Unwritten { rx, at: 0 }));
    }

    /// Handles a window that the receiver shows.
    fn show(
        &mut self,
        rx: u64,
        window: Window,
        limits: &Limits,
        actions: &mut Actions<TxAction>,
    ) -> Result<(), Violation> {
        match &mut self.method {
            TxMethod::Chunks(chunks) if chunks.rx == rx => chunks.show(self.size, window)?,
            TxMethod::Chunks(_) => {
                return Err(Violation::Broken("it calls a message by two names"));
            }
            TxMethod::Offered if self.duty == Duty::Message => {
                let mut chunks = Box::new(Sent::new(rx));
                let shown = chunks.show(self.size, window);
                self.method = TxMethod::Chunks(chunks);
                shown?;
            }
            // The message goes on in fragments, and the window is late.
            _ if window.at > 0 => return Ok(()),
            _ => {
                return Err(Violation::Broken(
                    "it wants to have written what was not offered to it",
                ));
            }
        }
        self.go_on(limits, actions);
        Ok(())
    }

    /// Continues a message that is written in chunks.
    fn go_on(&mut self, limits: &Limits, actions: &mut Actions<TxAction>) {
        let TxMethod::Chunks(chunks) = &mut self.method else { return };
        chunks.is_blocked = false;
        let (rx, sent, limit) = (chunks.rx, chunks.sent, chunks.limit);
        match chunks.next(self.size, limits) {
            ChunkStep::Rest => {}
            ChunkStep::Write { at, len, window } => {
                let within = (at - window.at) as u64;
                let place =
                    RemotePlace { addr: window.place.addr.wrapping_add(within), ..window.place };
                actions.push_back(TxAction::Chunk { place, at, len, window: window.at });
            }
            ChunkStep::Fragments { unwritten } => {
                if unwritten {
                    let at = sent as u64;
                    actions.push_back(TxAction::Send(Control::Unwritten { rx, at }));
                }
                self.method = TxMethod::Fragments { rx, sent, limit: limit.max(sent) };
            }
            ChunkStep::End(outcome) => {
                if outcome.is_err() {
                    // No chunk is in flight: the receiver may have its buffer back.
                    let verdict = TransferVerdict::Broken { sent: 0 };
                    actions.push_back(TxAction::Send(Control::Fin { name: rx, verdict }));
                }
                actions.push_back(TxAction::End(outcome));
            }
        }
    }

    /// Returns its name.
    pub(crate) fn name(&self) -> u64 {
        self.name
    }
}
