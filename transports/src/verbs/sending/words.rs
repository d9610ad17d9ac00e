//! Atomic operations on words of a peer's memory, which the peer's NIC carries out.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::{RESERVE, SendingHalf, Unsent};
use crate::contract::{Busy, OpToken, RemotePlace, WordChange};
use crate::mem::{Buffer, SmallBytes};
use crate::verbs::bounces::Bounces;
use crate::verbs::sys::bindings::{
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD,
    ibv_send_wr__bindgen_ty_2__bindgen_ty_2, ibv_sge,
};
use crate::verbs::transfers::{PlaceKey, RdmaTransfer, Via};

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

impl SendingHalf {
    /// Changes a word. Its old value arrives in a bounce buffer of this side's. The NIC holds
    /// operations back beyond the queue pair's limit of atomic operations and reads in flight.
    pub(in crate::verbs) fn atomic(
        &mut self,
        (word, change): (RemotePlace, WordChange),
        token: OpToken,
        completed: u32,
        bounces: &Bounces,
    ) -> Result<(), Unsent> {
        let key = PlaceKey::decode(word.key);
        let PlaceKey { rkey, words, .. } =
            key.ok_or_else(|| Unsent::Wrong("it has named a key that is none".into()))?;
        if !words {
            // Its NIC would refuse it, which ends the connection.
            return Err(Unsent::Unregistered("its words have another agent than its NIC".into()));
        }
        if !word.addr.is_multiple_of(WORD as u64) {
            // As above.
            return Err(Unsent::Unregistered(format!(
                "the word at {:#x} is not aligned",
                word.addr
            )));
        }
        if self.outstanding(completed) + RESERVE >= self.depth {
            return Err(Unsent::Busy(Busy::Full));
        }
        self.give_back(completed, bounces);
        let Some(bounce) = bounces.take() else { return Err(Unsent::Busy(Busy::NoPacket)) };
        let held = match bounces.plain(&bounce, None, WORD) {
            Ok(held) => held,
            Err(error) => {
                bounces.give_back(bounce);
                return Err(Unsent::Unregistered(error.to_string()));
            }
        };
        let (opcode, compare_add, swap) = match change {
            WordChange::Add(value) => (IBV_WR_ATOMIC_FETCH_AND_ADD, value, 0),
            WordChange::Swap { expected, new } => (IBV_WR_ATOMIC_CMP_AND_SWP, expected, new),
        };
        let mut part = [ibv_sge { addr: held.addr, length: held.len, lkey: held.key }];
        let mut request = self.request(&mut part, opcode);
        request.wr.atomic = ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
            remote_addr: word.addr,
            compare_add,
            swap,
            rkey,
        };
        // SAFETY: the bounce has no other user until the request completes.
        match unsafe { self.post_as(&mut request, true, true) } {
            Ok(()) => {
                let room = SmallBytes::zeroed(WORD).unwrap_or(SmallBytes::empty());
                self.hold(RdmaTransfer::new(token, Via::Word(bounce), Buffer::Small(room)));
                Ok(())
            }
            Err(error) => {
                bounces.give_back(bounce);
                Err(error)
            }
        }
    }
}
