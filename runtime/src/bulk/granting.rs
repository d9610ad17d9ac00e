//! Requests for bytes: all at once into host memory, and as far as there are blocks onto a GPU.

use super::Bulk;
use super::incoming::{Arriving, Target};
use super::staging::Staging;
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::Rank;
use crate::op::Ended;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::protocol::wire::{
    Request, Window, encode_clear, encode_landing, encode_window, encode_writable,
};
use crate::runtime::Inner;
use carrack_transports::contract::RemotePlace;

/// A request for bytes.
pub(super) enum Ask {
    /// Bytes of an offer, by the sender's name for it.
    Offered(u64),
    /// Bytes of an offer, which the sender's NIC writes to a place.
    Written(u64, RemotePlace),
    /// Bytes of an offer, whose first chunk the sender's NIC writes.
    Window(u64, Window),
    /// Bytes of a region.
    Region(Message, Request),
}

/// An action for a message on its way onto a GPU, done without locks.
enum Todo {
    /// Ask for its bytes, with a first limit.
    Ask(Rank, u64, Box<Ask>, usize),
    /// More may come.
    Grant(Rank, u64, usize),
    /// All are in place.
    Over(Box<Arriving>),
    /// It has ended without its bytes.
    Tell(Ended),
}

/// The result of a look at a message.
enum Look {
    /// The message needs another look; its sender may have to be told something.
    Again(Option<Todo>),
    /// The remaining parts need no further look.
    Enough(Option<Todo>),
    Over,
}

impl Arriving {
    /// Moves the engine on. With `must` it gets at least one block: no earlier message of its
    /// sender is in progress.
    fn look(&mut self, landing: u64, staging: &Staging, must: bool, moved: &mut bool) -> Look {
        if let (Some(inflow), Some(buffer)) = (&mut self.inflow, self.target.buffer()) {
            match inflow.step(buffer, staging, must) {
                Ok(stepped) => {
                    *moved |= stepped.moved;
                    let granted = inflow.granted();
                    return if stepped.is_over {
                        Look::Over
                    } else {
                        Look::Again(self.tell(landing, granted))
                    };
                }
                Err(cause) => self.lose(OpError::Copy(cause)),
            }
        }
        *moved = true;
        if self.got >= self.until {
            return Look::Over;
        }
        // The rest is received and dropped, so that its sender completes.
        match self.tell(landing, self.size) {
            None if self.told < self.size => Look::Again(None),
            told => Look::Enough(told),
        }
    }

    /// Returns the message that tells the sender a new limit, if any. The first is the request
    /// itself. Further ones wait until bytes have arrived, which proves that the sender has the
    /// request.
    fn tell(&mut self, landing: u64, granted: usize) -> Option<Todo> {
        if granted <= self.told || (self.told > 0 && self.got == 0) {
            return None;
        }
        self.told = granted;
        Some(match self.ask.take() {
            Some(ask) => Todo::Ask(self.from, landing, ask, granted),
            None => Todo::Grant(self.from, landing, granted),
        })
    }
}

impl DeviceInner {
    /// Asks for the parts of an offered message.
    pub(super) fn ask_for_parts(
        &self,
        runtime: &Inner,
        token: u64,
        (from, size, target): (Rank, usize, Target),
    ) {
        let landing = self.bulk.name();
        let mut arriving = Arriving::new(from, size, target);
        let chunk = runtime.settings.verbs_chunk();
        if let Some(ask) = self.expose_chunks(from, &mut arriving, token, chunk) {
            self.await_parts(runtime, landing, arriving, ask);
            return self.show_chunks(runtime, (from, landing));
        }
        let ask = match self.expose(from, &mut arriving) {
            Some(place) => Ask::Written(token, place),
            None => Ask::Offered(token),
        };
        self.await_parts(runtime, landing, arriving, ask);
    }

    /// Asks the owner of a region for its bytes: a get.
    pub(crate) fn expect(
        &self,
        runtime: &Inner,
        (from, size, target): (Rank, usize, Target),
        message: Message,
        request: Request,
    ) {
        let landing = self.bulk.name();
        let ask = Ask::Region(message, Request { token: landing, ..request });
        self.await_parts(runtime, landing, Arriving::new(from, size, target), ask);
    }

    /// Expects bytes that the caller is about to request. Returns their name, for the owner.
    pub(crate) fn expect_answer(
        &self,
        runtime: &Inner,
        from: Rank,
        (size, target): (usize, Target),
    ) -> u64 {
        let (landing, deadline) = (self.bulk.name(), target.deadline());
        let mut all = self.bulk.arriving.lock();
        all.insert(landing, Arriving::new(from, size, target));
        self.bulk.arriving.set_count(all.len());
        drop(all);
        runtime.deadlines.note(deadline);
        landing
    }

    fn await_parts(&self, runtime: &Inner, landing: u64, mut arriving: Arriving, ask: Ask) {
        let (from, deadline) = (arriving.from, arriving.target.deadline());
        let mut ask = Some(ask);
        let is_staged = arriving.inflow.is_some();
        if is_staged {
            // Progress asks when there is a block for the first bytes.
            arriving.ask = ask.take().map(Box::new);
        }
        let mut all = self.bulk.arriving.lock();
        all.insert(landing, arriving);
        self.bulk.arriving.set_count(all.len());
        drop(all);
        runtime.deadlines.note(deadline);
        if is_staged {
            let mut inflows = self.bulk.inflows.lock();
            inflows.push(landing);
            self.bulk.inflows.set_count(inflows.len());
        }
        if let Some(ask) = ask {
            self.ask(runtime, (from, landing), ask, None);
        }
        self.end_if_gone(runtime, from);
    }

    /// Sends a request. Without a limit all bytes may come at once.
    fn ask(&self, runtime: &Inner, (from, landing): (Rank, u64), ask: Ask, limit: Option<usize>) {
        let limit = limit.map(|limit| limit as u64);
        match ask {
            Ask::Offered(token) => {
                self.control(runtime, from, Message::Clear { token }, encode_clear(landing, limit));
            }
            Ask::Written(token, place) => {
                let payload = encode_writable(landing, place);
                self.control(runtime, from, Message::Clear { token }, payload);
            }
            Ask::Window(token, window) => {
                self.control(
                    runtime,
                    from,
                    Message::Clear { token },
                    encode_window(landing, window),
                );
            }
            Ask::Region(message, request) => {
                let request = Request { second: limit.unwrap_or(0), ..request };
                self.control(runtime, from, message, request.encode());
            }
        }
    }
}

impl Bulk {
    /// Looks at all messages on their way onto GPUs.
    fn look_at_inflows(&self, staging: &Staging, moved: &mut bool) -> Vec<Todo> {
        let Some(mut inflows) = self.inflows.try_lock() else { return Vec::new() };
        let mut all = self.arriving.lock();
        let (mut todo, mut begun) = (Vec::new(), Vec::new());
        inflows.retain(|landing| {
            let Some(one) = all.get_mut(landing) else { return false };
            if one.is_ending() {
                let Some(error) = one.ends_with() else { return true };
                todo.extend(one.give_up(*error).map(Todo::Tell));
                if one.got >= one.until {
                    all.remove(landing);
                }
                return false;
            }
            let must = !begun.contains(&one.from);
            begun.push(one.from);
            match one.look(*landing, staging, must, moved) {
                Look::Again(told) => {
                    todo.extend(told);
                    return true;
                }
                Look::Enough(told) => todo.extend(told),
                Look::Over => todo.extend(all.remove(landing).map(|one| Todo::Over(Box::new(one)))),
            }
            false
        });
        self.inflows.set_count(inflows.len());
        self.arriving.set_count(all.len());
        todo
    }
}

impl Pass<'_> {
    /// Moves on the copies onto GPUs, and grants more bytes.
    #[cold]
    pub(crate) fn move_inflows(&mut self) {
        for todo in self.device.bulk.look_at_inflows(&self.inner.staging, &mut self.moved) {
            match todo {
                Todo::Ask(from, landing, ask, limit) => {
                    self.device.ask(self.inner, (from, landing), *ask, Some(limit));
                }
                Todo::Grant(from, landing, limit) => {
                    let message = Message::Grant { landing };
                    self.device.control(self.inner, from, message, encode_landing(limit as u64));
                }
                Todo::Over(one) => self.arrived(one.from, one.size, one.target, one.lost),
                Todo::Tell((comp, status)) => self.signal(comp.as_ref(), status),
            }
        }
    }
}
