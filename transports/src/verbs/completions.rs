//! Meaning of completions.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::device::RdmaPolling;
use super::entries::Phase;
use super::receives::Taken;
use super::sending::BYE;
use super::sys::Subject;
use super::sys::bindings::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SRQ_ERR, IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_RECV,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WC_WITH_IMM, IBV_WC_WR_FLUSH_ERR, ibv_wc,
};
use super::together::{OpenedAggregate, TOGETHER};
use super::wr_id::WrId;
use crate::contract::{Batch, DownCause, Event, Payload, SmallArrival};

impl RdmaPolling {
    /// Handles the completion at an index of `space`.
    #[inline(always)]
    pub(super) fn complete_at(&mut self, at: usize, batch: &mut Batch) {
        if !self.arrived_short(at, batch) {
            let completion = self.space[at];
            self.complete(&completion, batch);
        }
    }

    /// Takes a message in. Returns `false` if it is not short, or did not come by itself. The most
    /// frequent path.
    #[inline(always)]
    fn arrived_short(&mut self, at: usize, batch: &mut Batch) -> bool {
        let Self { space, entries, receives, owing, .. } = self;
        let completion = &space[at];
        if completion.status == IBV_WC_SUCCESS
            && completion.wc_flags & IBV_WC_WITH_IMM == 0
            && let WrId::Receive(slot) = WrId::decode(completion.wr_id)
            && let Some(entry) = entries.of_queue_pair(completion.qp_num)
            && let Some((header, bytes)) = receives.take_short(slot, completion.byte_len as usize)
        {
            entry.take_in(owing);
            batch.push_small(SmallArrival::new(entry.connection.peer, header, bytes));
            return true;
        }
        false
    }

    #[inline(never)]
    pub(super) fn complete(&mut self, completion: &ibv_wc, batch: &mut Batch) {
        if completion.status != IBV_WC_SUCCESS {
            return self.failed(completion);
        }
        match WrId::decode(completion.wr_id) {
            WrId::Receive(slot) => self.arrived(slot, completion, batch),
            WrId::Send { connection, sequence } => {
                if let Some(entry) = self.entries.get(connection) {
                    entry.connection.complete(sequence);
                }
            }
            WrId::Transfer { connection, sequence } => self.transferred(connection, sequence),
            // The messages sent before it have arrived.
            WrId::Bye { connection } => self.parted(connection),
            WrId::Last { connection } => self.drained(connection),
            WrId::Unknown => {}
        }
    }

    fn arrived(&mut self, slot: u32, completion: &ibv_wc, batch: &mut Batch) {
        let Some(entry) = self.entries.of_queue_pair(completion.qp_num) else {
            return self.receives.again(slot);
        };
        let (index, from) = (entry.connection.index, entry.connection.peer);
        let has_word = completion.wc_flags & IBV_WC_WITH_IMM != 0;
        // SAFETY: the flag says that it is an immediate; any four bytes are valid.
        let word = has_word.then(|| u32::from_be(unsafe { completion.anon_1.imm_data }));
        // A write with an immediate takes a receive, too, and leaves its memory as it was.
        let is_message = completion.opcode == IBV_WC_RECV;
        if let Some(word) = word.filter(|word| *word != TOGETHER || !is_message) {
            return self.told(slot, index, word);
        }
        let Some((taken, placed)) = self.receives.take(slot, completion.byte_len as usize, index)
        else {
            let why =
                format!("a message of {} bytes is too short for a header", completion.byte_len);
            return self.end(index, DownCause::Protocol(why));
        };
        if placed {
            self.credit(index);
        }
        if has_word {
            let (header, payload) = match taken {
                Taken::Small(header, bytes) => (header, Payload::Small(bytes)),
                Taken::Large(header, payload) => (header, payload),
            };
            if header.0 != [payload.len() as u64, 0] {
                let why = format!(
                    "{} bytes of messages that go together, said to be {}",
                    payload.len(),
                    header.0[0]
                );
                return self.end(index, DownCause::Protocol(why));
            }
            self.opened = Some(OpenedAggregate::new(index, from, payload));
            return self.take_out(batch);
        }
        match taken {
            Taken::Small(header, bytes) => batch.push_small(SmallArrival::new(from, header, bytes)),
            Taken::Large(header, payload) => batch.push(Event::arrived(from, header, payload)),
        }
    }

    /// Takes messages of one request out, up to the room of the batch. Later completions wait
    /// until all are taken.
    pub(super) fn take_out(&mut self, batch: &mut Batch) {
        let Some(opened) = &mut self.opened else { return };
        let index = opened.connection;
        let failed = loop {
            if batch.is_full() {
                return;
            }
            match opened.next() {
                Ok(Some(message)) => batch.push_small(message),
                Ok(None) => break None,
                Err(why) => break Some(why),
            }
        };
        self.opened = None;
        if let Some(why) = failed {
            self.end(
                index,
                DownCause::Protocol(format!("messages that go together are none: {why}")),
            );
        }
    }

    /// Handles a word between devices.
    #[cold]
    fn told(&mut self, slot: u32, index: u32, word: u32) {
        self.receives.again(slot);
        match word {
            BYE => self.end(index, DownCause::Closed),
            other => self
                .end(index, DownCause::Protocol(format!("it said {other}, which means nothing"))),
        }
    }

    /// Notes that an operation on a peer's memory has ended.
    fn transferred(&mut self, index: u32, sequence: u32) {
        let Some(entry) = self.entries.get(index) else { return };
        entry.connection.complete(sequence);
        if !self.ending.contains(&index) {
            self.ending.push(index);
        }
    }

    #[cold]
    fn parted(&mut self, index: u32) {
        // A stale one of this number would have been flushed before its number was reused.
        if self.entries.get(index).is_some_and(|entry| entry.phase == Phase::Leaving) {
            // Through the error state: receives that the peer's messages have taken must come back
            // before the queue pair is destroyed.
            self.end(index, DownCause::Closed);
        }
    }

    /// Handles a request that has failed, or was flushed by a failed queue pair.
    #[cold]
    fn failed(&mut self, completion: &ibv_wc) {
        let index = match WrId::decode(completion.wr_id) {
            WrId::Receive(slot) => {
                self.receives.again(slot);
                self.entries.of_queue_pair(completion.qp_num).map(|entry| entry.connection.index)
            }
            // The resources are released when the queue pair is gone: a failed request may still
            // use them.
            WrId::Send { connection, .. }
            | WrId::Transfer { connection, .. }
            | WrId::Bye { connection } => Some(connection),
            WrId::Last { connection } => return self.drained(connection),
            WrId::Unknown => None,
        };
        let Some(index) = index else { return };
        tracing::debug!(
            status = completion.status,
            vendor = completion.vendor_err,
            index,
            "a request failed"
        );
        // Not every device reports the first failure first. A flush is the least informative.
        let cause = match completion.status {
            IBV_WC_WR_FLUSH_ERR => {
                DownCause::Gone("its queue pair went into the error state".into())
            }
            status => self.cause(status),
        };
        self.end(index, cause);
    }

    /// Returns the cause of a connection's end for the status of a failed request.
    fn cause(&self, status: u32) -> DownCause {
        match status {
            IBV_WC_RETRY_EXC_ERR => DownCause::Gone(self.shared.why_no_answer()),
            status => cause(status),
        }
    }

    /// Returns the cause of a queue pair's failure, from the completions so far.
    #[cold]
    fn told_by_completions(&mut self, queue_pair: u32) -> Option<DownCause> {
        loop {
            match self.queue.poll(&mut self.space[..]) {
                Ok([]) => break,
                Ok(found) => self.stash.extend(found.iter().copied()),
                Err(error) => {
                    self.lose(&error.to_string());
                    return None;
                }
            }
        }
        let says_why = |completion: &&ibv_wc| {
            completion.qp_num == queue_pair
                && ![IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR].contains(&completion.status)
        };
        self.stash.iter().find(says_why).map(|completion| self.cause(completion.status))
    }

    /// Reads the NIC's events.
    #[cold]
    pub(super) fn hear_nic(&mut self) {
        let shared = self.shared.clone();
        shared.hear();
    }

    /// Handles the NIC's events.
    pub(super) fn heed_nic(&mut self) {
        for event in self.shared.told_since(&mut self.heard) {
            let name = self.shared.context.verbs().event_name(event.kind);
            tracing::info!(event = %name, about = ?event.about, "the NIC tells");
            match (event.kind, event.about) {
                (
                    IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR,
                    Subject::QueuePair { number },
                ) => {
                    if let Some(index) =
                        self.entries.of_queue_pair(number).map(|entry| entry.connection.index)
                    {
                        // A completion says more, and a thread that has slept sees the event
                        // first.
                        let cause = self.told_by_completions(number);
                        let gave_up =
                            || DownCause::Gone(format!("the NIC gave its queue pair up: {name}"));
                        self.end(index, cause.unwrap_or_else(gave_up));
                    }
                }
                (IBV_EVENT_QP_LAST_WQE_REACHED, Subject::QueuePair { number }) => {
                    match self.entries.of_queue_pair(number) {
                        Some(entry) => entry.gave_last_receive = true,
                        None => self.partings.note_last_receive(number),
                    }
                }
                (IBV_EVENT_DEVICE_FATAL, _) => {
                    self.lose_everybody("the NIC is gone (IBV_EVENT_DEVICE_FATAL)")
                }
                (IBV_EVENT_CQ_ERR, Subject::CompletionQueue { address })
                    if address == self.queue.as_raw().addr() =>
                {
                    self.lose_everybody("its completion queue has failed (IBV_EVENT_CQ_ERR)");
                }
                (IBV_EVENT_SRQ_ERR, Subject::SharedReceiveQueue { address })
                    if self.receives.is(address) =>
                {
                    self.lose_everybody("its receive queue has failed (IBV_EVENT_SRQ_ERR)");
                }
                _ => {}
            }
        }
    }
}

/// Returns the cause for a status alone.
fn cause(status: u32) -> DownCause {
    let gone = |why: &str| DownCause::Gone(why.to_owned());
    match status {
        IBV_WC_RNR_RETRY_EXC_ERR => gone("it has no receive posted (RNR retries exceeded)"),
        IBV_WC_REM_ACCESS_ERR => {
            DownCause::Protocol("its NIC refuses access to its memory (remote access error)".into())
        }
        IBV_WC_REM_INV_REQ_ERR => DownCause::Protocol(
            "its NIC takes a request for invalid (remote invalid request)".into(),
        ),
        IBV_WC_REM_OP_ERR => gone("its NIC could not carry out a request (remote operation error)"),
        IBV_WC_LOC_LEN_ERR => DownCause::Protocol("it sent a message longer than a packet".into()),
        IBV_WC_LOC_PROT_ERR | IBV_WC_LOC_ACCESS_ERR | IBV_WC_LOC_QP_OP_ERR => DownCause::Lacking(
            format!("this rank's NIC refused a request of its own (completion status {status})"),
        ),
        status => gone(&format!("a request failed with completion status {status}")),
    }
}
