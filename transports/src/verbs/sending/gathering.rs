//! Short messages that wait for more.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::{Held, SendingHalf, Unsent};
use crate::contract::{Busy, Header};
use crate::mem::MemRef;
use crate::verbs::bounces::{Bounces, Filled, HEADER};
use crate::verbs::memory::CreditWords;
use crate::verbs::signs::Signs;
use crate::verbs::sys::bindings::{IBV_WR_SEND_WITH_IMM, ibv_sge};
use crate::verbs::together::{self, Aggregate, AggregateRecord, TOGETHER};
use zerocopy::IntoBytes;

impl SendingHalf {
    /// Sends a message behind those that wait: with them, if it is short enough.
    #[inline(never)]
    pub(super) fn behind_gathered(
        &mut self,
        (header, bytes): (Header, MemRef<'_>),
        completed: u32,
        words: &CreditWords,
        bounces: &Bounces,
    ) -> Result<(), Unsent> {
        if let Some(record) = AggregateRecord::of(header, bytes) {
            self.append(&record, bounces)?;
            // Should the queue be full against its word, the next poll tries again.
            return self.send_off(bounces).or_else(Unsent::unless_busy);
        }
        self.by_itself((header, bytes), completed, words, bounces)
    }

    /// Sends a message by itself, behind those that wait.
    #[inline(never)]
    fn by_itself(
        &mut self,
        message: (Header, MemRef<'_>),
        completed: u32,
        words: &CreditWords,
        bounces: &Bounces,
    ) -> Result<(), Unsent> {
        self.send_off(bounces)?;
        self.room(completed, words)?;
        self.alone(message, completed, bounces)
    }

    /// Adds a message to those that wait for more. It is sent at once if it is too long for that,
    /// or if there is no buffer.
    pub(in crate::verbs) fn gather(
        &mut self,
        (header, bytes): (Header, MemRef<'_>),
        completed: u32,
        words: &CreditWords,
        (bounces, signs): (&Bounces, &Signs),
    ) -> Result<(), Unsent> {
        let Some(record) = AggregateRecord::of(header, bytes) else {
            return self.by_itself((header, bytes), completed, words, bounces);
        };
        let mut has_no_poller = false;
        if self.aggregate.is_none() {
            self.room(completed, words)?;
            self.give_back(completed, bounces);
            let Some(bounce) = bounces.take() else {
                return self.by_itself((header, bytes), completed, words, bounces);
            };
            self.sent += 1;
            self.aggregate = Some(Aggregate { bounce, len: HEADER });
            // A poller checks the list before it sleeps. A listed message may have been sent
            // already, and the poller be asleep since.
            has_no_poller = match self.is_listed {
                true => signs.gathered.is_asleep(),
                false => signs.gathered.put(self.connection),
            };
            self.is_listed = true;
        }
        let is_full = self.append(&record, bounces)?;
        match is_full || has_no_poller {
            true => self.send_off(bounces).or_else(Unsent::unless_busy),
            false => Ok(()),
        }
    }

    /// Adds a message to those that wait. Returns `true` if no other fits.
    fn append(&mut self, record: &AggregateRecord, bounces: &Bounces) -> Result<bool, Unsent> {
        let Some(aggregate) = &mut self.aggregate else { return Err(Unsent::Busy(Busy::Full)) };
        let (bytes, most) = (record.as_bytes(), bounces.room().min(together::MOST));
        // They wait although they are full, because the queue was full.
        if aggregate.len + bytes.len() > most {
            return Err(Unsent::Busy(Busy::Full));
        }
        let put = bounces.append(&aggregate.bounce, aggregate.len, bytes);
        put.map_err(|error| Unsent::Failed(error.to_string()))?;
        aggregate.len += bytes.len();
        Ok(aggregate.len + together::LONGEST > most)
    }

    /// Sends the messages that wait for more.
    pub(in crate::verbs) fn send_off(&mut self, bounces: &Bounces) -> Result<(), Unsent> {
        let Some(Aggregate { bounce, len }) = self.aggregate.take() else { return Ok(()) };
        let count = Header([(len - HEADER) as u64, 0]);
        let counted = bounces.append(&bounce, 0, count.0.as_bytes());
        let posted = match counted.and_then(|_| bounces.filled(&bounce, len)) {
            Ok(Filled { addr, len, key }) => {
                let mut part = [ibv_sge { addr, length: len, lkey: key }];
                let mut request = self.request(&mut part, IBV_WR_SEND_WITH_IMM);
                request.anon_1.imm_data = TOGETHER.to_be();
                // SAFETY: the bounce has no other user until the request completes.
                unsafe { self.post(&mut request, true) }
            }
            Err(error) => Err(Unsent::Failed(error.to_string())),
        };
        match posted {
            Ok(()) => self.held.push_back((self.posted, Held::Bounce(bounce))),
            Err(_) => self.aggregate = Some(Aggregate { bounce, len }),
        }
        posted
    }
}
