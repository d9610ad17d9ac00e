//! The end of a device: what was sent arrives, and messages that come are dropped.

use super::callers::Callers;
use super::device::{AT_ONCE, RdmaDevice, RdmaPolling};
use crate::contract::{Batch, Closing, Event};
use crate::net::sockets;
use crate::stderr;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time for which closing waits for sent messages to arrive, if the peer's memory has no room for
/// them.
const LINGER: Duration = Duration::from_secs(10);

/// The end of a device whose peers have not taken in everything yet.
pub(super) struct RdmaClosing {
    batch: Batch,
    /// Ended operations, for the polls that follow.
    ended: VecDeque<Event>,
    until: Instant,
}

impl RdmaDevice {
    /// Begins the device's end, or goes on with it.
    pub(super) fn advance_end(&self) -> Closing {
        let mut polling = self.polling.lock();
        if !polling.closed {
            let state = self.leave_all(&mut polling);
            if state != Closing::Over {
                return state;
            }
            polling.shut();
        }
        // After the first NIC, so that peers learn of its end first.
        let rails = self.rails.devices().iter();
        let state = rails.map(|rail| rail.advance_end()).max().unwrap_or(Closing::Over);
        if state == Closing::Over {
            self.poll_rails(&mut polling);
        }
        state
    }

    /// Says the end on all connections, and takes out those on which all that was sent has arrived.
    fn leave_all(&self, polling: &mut RdmaPolling) -> Closing {
        let mut closing = polling.closing.take().unwrap_or_else(|| RdmaClosing {
            batch: Batch::new(AT_ONCE),
            ended: VecDeque::new(),
            until: Instant::now() + LINGER,
        });
        let before = polling.entries.len();
        // Those that have come up since, too.
        for index in polling.entries.numbers() {
            polling.leave(index);
        }
        self.look_after(polling);
        polling.poll(&mut closing.batch);
        let left = polling.entries.len();
        // Most completions are no events.
        let has_moved = !closing.batch.is_empty() || left < before || polling.has_completion();
        closing.ended.extend(closing.batch.drain().filter(is_completion));
        if left > 0 && Instant::now() < closing.until {
            polling.closing = Some(closing);
            self.look_soon();
            return if has_moved { Closing::Moving } else { Closing::Waiting };
        }
        for index in polling.entries.numbers() {
            let Some(entry) = polling.entries.get(index) else { continue };
            stderr::say(format_args!(
                "messages to rank {} may be lost, since this rank ends and that one has not taken \
                 them within {} s: let it make progress until it has all",
                entry.connection.peer.0,
                LINGER.as_secs()
            ));
        }
        closing.ended.append(&mut polling.pending);
        polling.pending = closing.ended;
        Closing::Over
    }
}

impl RdmaPolling {
    /// Releases everything.
    fn shut(&mut self) {
        self.closed = true;
        for index in self.entries.numbers() {
            self.finish(index);
        }
        // Each posted operation is still completed.
        self.pending.retain(is_completion);
        self.stash.clear();
        self.opened = None;
        self.partings.clear();
        self.callers = Callers::of(self.shared.identity.ranks);
        sockets::close(self.listener.take());
        // All queue pairs are gone: no packet is received into any more.
        self.receives.close();
    }
}

fn is_completion(event: &Event) -> bool {
    matches!(event, Event::Completion { .. })
}
