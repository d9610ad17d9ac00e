//! The operations of a device that are in flight with a peer, each under its name.
//!
//! One thread at a time carries an operation on. It takes the operation out, acts without the lock,
//! and puts it back. Events that come meanwhile wait on the operation's entry, and the same thread
//! handles them next. So each operation sees its events one after the other. No call of a
//! transport, a driver or the kernel happens under a lock of the table.
//!
//! The table is sharded by peer. A peer's end is noted in its shard. So an operation is either
//! there when the peer ends, and is ended, or is refused afterwards. A flush is not refused: it
//! waits for operations that are elsewhere, too, and those end.
//!
//! Names are numbers that are used once, and are looked up together with the peer's rank. A late,
//! repeated or forged name finds nothing.

use super::slots::{OpSlot, OpSlots};
use crate::deadline::{Deadline, Deadlines};
use crate::names::Rank;
use carrack_transports::contract::DownCause;
use carrack_transports::mem::emptied;
use carrack_transports::sync::biased_lock::{BiasedGuard, BiasedLock};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Shards of a table.
const SHARDS: usize = 16;

/// Boxes that a shard keeps for further operations. The allocator is slow where many operations are
/// in flight: it has few free pieces of a size at hand.
const SPARES: usize = 64;

/// An operation in a table.
pub(crate) trait OpEntry: Sized {
    /// Events of an operation.
    type Event;

    /// Returns the other side.
    fn peer(&self) -> Rank;

    /// Returns its kind, the same for all its life.
    fn kind(&self) -> OpKind;

    /// Returns its deadline.
    fn deadline(&self) -> Deadline;
}

/// Kind of an operation, by which operations are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpKind {
    /// A message, or an operation that the peer has asked for.
    Message,
    /// An operation of this rank on the peer's memory: flushes wait for it.
    Memory,
    /// A flush.
    Flush,
}

/// The result of a lookup by name.
pub(crate) enum Taken<E: OpEntry> {
    /// The operation, and the event to handle.
    Out(Box<E>, E::Event),
    /// Another thread carries the operation on, and handles the event next.
    Queued,
    /// No such operation.
    Unknown(E::Event),
}

/// An operation that could not be added, and the end of its peer if that is why.
pub(crate) type RefusedOp<E> = (Box<E>, Option<DownCause>);

/// The state of an operation after a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Flow {
    /// The operation stays in the table.
    Stays,
    /// The operation has ended.
    Ends,
}

/// See the module.
pub(crate) struct OpTable<E: OpEntry> {
    shards: [BiasedLock<OpShard<E>>; SHARDS],
    count: AtomicUsize,
    next: AtomicU64,
}

struct OpShard<E: OpEntry> {
    slots: OpSlots<E>,
    down: HashMap<Rank, DownCause>,
    spares: Vec<Box<MaybeUninit<E>>>,
}

impl<E: OpEntry> Default for OpTable<E> {
    fn default() -> Self {
        let shard = |_| {
            let (slots, down, spares) = (OpSlots::new(), HashMap::new(), Vec::new());
            BiasedLock::new(OpShard { slots, down, spares })
        };
        Self {
            shards: std::array::from_fn(shard),
            count: AtomicUsize::new(0),
            next: AtomicU64::new(1),
        }
    }
}

impl<E: OpEntry> OpTable<E> {
    #[inline]
    fn shard(&self, peer: Rank) -> BiasedGuard<'_, OpShard<E>> {
        self.shards[peer.0 as usize % SHARDS].lock()
    }

    /// Returns a fresh name, larger than all before.
    pub(crate) fn name(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds an operation.
    ///
    /// # Errors
    /// Its peer is gone; or, without a cause, the name is taken.
    pub(crate) fn insert(&self, name: u64, entry: E) -> Result<(), RefusedOp<E>> {
        self.add(name, entry, false).map(|_| ())
    }

    /// Adds an operation, and returns it if the caller carries it on (`is_out`): events that come
    /// before it is given back wait.
    ///
    /// # Errors
    /// As [`insert`](Self::insert).
    pub(crate) fn add(
        &self,
        name: u64,
        entry: E,
        is_out: bool,
    ) -> Result<Option<Box<E>>, RefusedOp<E>> {
        let (peer, kind, deadline) = (entry.peer(), entry.kind(), entry.deadline());
        let mut shard = self.shard(peer);
        let shard = &mut *shard;
        if kind != OpKind::Flush
            && let Some(cause) = shard.down.get(&peer).cloned()
        {
            return Err((Box::new(entry), Some(cause)));
        }
        let Some(place) = shard.slots.vacant((peer, name)) else {
            return Err((Box::new(entry), None));
        };
        let entry = match shard.spares.pop() {
            Some(spare) => Box::write(spare, entry),
            None => Box::new(entry),
        };
        let (entry, out) = if is_out { (None, Some(entry)) } else { (Some(entry), None) };
        *place = Some(OpSlot { at: (peer, name), kind, deadline, entry, events: None });
        shard.slots.len += 1;
        self.count.fetch_add(1, Ordering::AcqRel);
        Ok(out)
    }

    /// Takes an operation out to carry it on, or leaves the event to the thread that does so.
    pub(crate) fn take(&self, at: (Rank, u64), event: E::Event) -> Taken<E> {
        let mut shard = self.shard(at.0);
        let Some(slot) = shard.slots.get_mut(at) else { return Taken::Unknown(event) };
        match slot.entry.take() {
            Some(entry) => Taken::Out(entry, event),
            None => {
                slot.events.get_or_insert_default().push_back(event);
                Taken::Queued
            }
        }
    }

    /// Returns `true` if there is such an operation.
    pub(crate) fn has(&self, at: (Rank, u64)) -> bool {
        self.shard(at.0).slots.find(at).is_some()
    }

    /// Takes an operation out, if no other thread carries it on.
    pub(crate) fn try_take(&self, at: (Rank, u64)) -> Option<Box<E>> {
        self.shard(at.0).slots.get_mut(at)?.entry.take()
    }

    /// Puts an operation back, unless an event has come for it: then the caller handles that.
    fn put_back(&self, at: (Rank, u64), entry: Box<E>) -> Option<(Box<E>, E::Event)> {
        let mut shard = self.shard(at.0);
        let slot = shard.slots.get_mut(at)?;
        if let Some(event) = slot.events.as_mut().and_then(|events| events.pop_front()) {
            return Some((entry, event));
        }
        slot.entry = Some(entry);
        None
    }

    /// Removes an operation that the caller has taken out, and that has ended.
    pub(crate) fn remove(&self, at: (Rank, u64)) {
        // Dropped without the lock: the payload of an event may run code of the user.
        let _slot = self.take_slot(&mut self.shard(at.0), at);
    }

    /// Removes an operation that the caller has taken out, and that has ended, and keeps its box.
    fn end(&self, at: (Rank, u64), entry: Box<E>) {
        // Without the lock, as above: so may a buffer.
        let spare = emptied(entry);
        let mut shard = self.shard(at.0);
        let _slot = self.take_slot(&mut shard, at);
        if shard.spares.len() < SPARES {
            shard.spares.push(spare);
        }
        drop(shard);
    }

    fn take_slot(&self, shard: &mut OpShard<E>, at: (Rank, u64)) -> Option<OpSlot<E>> {
        let slot = shard.slots.remove(at)?;
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(slot)
    }

    /// Handles an event, and those that come meanwhile. Returns the event if there is no such
    /// operation.
    pub(crate) fn on(
        &self,
        at: (Rank, u64),
        event: E::Event,
        mut carry_on: impl FnMut(&mut E, E::Event) -> Flow,
    ) -> Option<E::Event> {
        match self.take(at, event) {
            Taken::Out(mut entry, event) => {
                let flow = carry_on(&mut entry, event);
                self.give_back(at, entry, flow, carry_on);
                None
            }
            Taken::Queued => None,
            Taken::Unknown(event) => Some(event),
        }
    }

    /// Puts an operation back that was taken out, after a step, and handles the events that have
    /// come meanwhile. One that has ended is removed.
    pub(crate) fn give_back(
        &self,
        at: (Rank, u64),
        mut entry: Box<E>,
        mut flow: Flow,
        mut carry_on: impl FnMut(&mut E, E::Event) -> Flow,
    ) {
        while flow == Flow::Stays {
            let Some((out, event)) = self.put_back(at, entry) else { return };
            entry = out;
            flow = carry_on(&mut entry, event);
        }
        self.end(at, entry);
    }

    /// Notes that a peer is gone, and returns the names of its operations.
    pub(crate) fn fail(&self, peer: Rank, cause: &DownCause) -> Vec<u64> {
        let mut shard = self.shard(peer);
        shard.down.entry(peer).or_insert_with(|| cause.clone());
        let mut names: Vec<_> =
            shard.slots.all().filter_map(|slot| (slot.at.0 == peer).then_some(slot.at.1)).collect();
        // Operations end in the order in which they began.
        names.sort_unstable();
        names
    }

    /// Returns the operations whose deadline has passed, each once.
    pub(crate) fn expire(&self, now: Deadline, left: &Deadlines) -> Vec<(Rank, u64)> {
        let mut late = Vec::new();
        for shard in &self.shards {
            for slot in shard.lock().slots.places.iter_mut().flatten() {
                if left.passes(slot.deadline, now) {
                    slot.deadline = Deadline::NEVER;
                    late.push(slot.at);
                }
            }
        }
        late
    }

    /// Gives an operation that cannot end yet a further deadline.
    pub(crate) fn expect_by(&self, at: (Rank, u64), deadline: Deadline) {
        if let Some(slot) = self.shard(at.0).slots.get_mut(at) {
            slot.deadline = deadline;
        }
    }

    /// Takes all operations out: the runtime ends, and no other thread uses the table.
    pub(crate) fn drain(&self) -> Vec<Box<E>> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let slots = std::mem::replace(&mut shard.lock().slots, OpSlots::new());
            all.extend(slots.places.into_iter().flatten());
        }
        self.count.store(0, Ordering::Release);
        all.sort_unstable_by_key(|slot| slot.at.1);
        all.into_iter().filter_map(|slot| slot.entry).collect()
    }

    /// Returns the number of operations, which other threads may have changed since.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the number of operations with a peer that `is_meant`.
    pub(crate) fn count_of(&self, peer: Rank, is_meant: impl Fn(u64, OpKind) -> bool) -> usize {
        if self.count() == 0 {
            return 0;
        }
        let is_meant = |slot: &&OpSlot<E>| slot.at.0 == peer && is_meant(slot.at.1, slot.kind);
        self.shard(peer).slots.all().filter(is_meant).count()
    }

    /// Calls `each` with every operation that no thread carries on at the moment.
    pub(crate) fn each(&self, mut each: impl FnMut(&E)) {
        for shard in &self.shards {
            shard.lock().slots.all().filter_map(|slot| slot.entry.as_deref()).for_each(&mut each);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chores::Chores;
    use parking_lot::Mutex;
    use std::time::Duration;

    struct TestOp {
        peer: Rank,
        kind: OpKind,
        deadline: Deadline,
        seen: Vec<u32>,
    }

    impl OpEntry for TestOp {
        type Event = u32;

        fn peer(&self) -> Rank {
            self.peer
        }

        fn kind(&self) -> OpKind {
            self.kind
        }

        fn deadline(&self) -> Deadline {
            self.deadline
        }
    }

    fn op(peer: u32) -> TestOp {
        let (kind, deadline) = (OpKind::Message, Deadline::NEVER);
        TestOp { peer: Rank(peer), kind, deadline, seen: Vec::new() }
    }

    #[test]
    fn events_that_come_while_an_operation_is_carried_on_are_handled_next_and_in_order() {
        let table = OpTable::default();
        let name = table.name();
        table.insert(name, op(1)).ok().unwrap();
        let (at, mut seen) = ((Rank(1), name), Vec::new());
        let left = table.on(at, 0, |op, event| {
            seen.push(event);
            op.seen.push(event);
            if event == 0 {
                for next in 1..4 {
                    assert!(
                        table.on(at, next, |_, _| unreachable!("this thread has it")).is_none()
                    );
                }
            }
            if op.seen.len() < 4 { Flow::Stays } else { Flow::Ends }
        });
        assert_eq!((left, table.count(), seen), (None, 0, vec![0, 1, 2, 3]));
        assert_eq!(table.on(at, 9, |_, _| Flow::Stays), Some(9), "it has ended");
    }

    #[test]
    fn an_operation_that_its_adder_carries_on_first_hears_later_of_what_comes_meanwhile() {
        let table = OpTable::default();
        let at = (Rank(1), table.name());
        let out = table.add(at.1, op(1), true).ok().unwrap().unwrap();
        assert!(table.has(at) && table.try_take(at).is_none() && table.count() == 1);
        assert!(table.on(at, 7, |_, _| unreachable!("the adder has it")).is_none());
        let mut seen = Vec::new();
        table.give_back(at, out, Flow::Stays, |_, event| {
            seen.push(event);
            Flow::Ends
        });
        assert_eq!((seen, table.count()), (vec![7], 0));
    }

    #[test]
    fn a_name_is_found_only_together_with_its_peer() {
        let table = OpTable::default();
        let name = table.name();
        table.insert(name, op(1)).ok().unwrap();
        // The same shard, and another.
        for other in [Rank(1 + SHARDS as u32), Rank(2)] {
            assert_eq!(table.on((other, name), 1, |_, _| Flow::Ends), Some(1));
            assert!(table.try_take((other, name)).is_none());
        }
        assert!(table.insert(name, op(1)).is_err_and(|(_, cause)| cause.is_none()), "it is taken");
        assert!(table.try_take((Rank(1), name)).is_some());
        assert!(table.try_take((Rank(1), name)).is_none(), "one thread has it");
    }

    #[test]
    fn an_operation_is_found_among_others_until_it_is_removed() {
        // Ranks of one shard; names that follow each other, and those of answers.
        let peers = [1, 1 + SHARDS as u32, 1 + 40 * SHARDS as u32];
        let mut random = 7_u64;
        let mut next = move |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let (table, mut there) = (OpTable::<TestOp>::default(), Vec::new());
        for round in 0..20_000_u64 {
            let at =
                (Rank(peers[next(3) as usize]), (round - next(round.min(300) + 1)) | next(2) << 63);
            let is_there = there.contains(&at);
            assert_eq!(table.has(at), is_there);
            assert_eq!(table.insert(at.1, op(at.0.0)).is_err(), is_there, "{at:?}");
            if !is_there {
                there.push(at);
            }
            // At most 200 at a time, and none again and again.
            while there.len() as u64 > if round % 1000 < 500 { next(200) } else { 0 } {
                let at = there.swap_remove(next(there.len() as u64) as usize);
                let out = table.try_take(at).unwrap();
                assert_eq!(out.peer, at.0);
                table.give_back(at, out, Flow::Ends, |_, _| unreachable!("no event has come"));
            }
            assert_eq!(table.count(), there.len());
        }
    }

    #[test]
    fn an_operation_hears_of_its_peers_end_or_is_refused() {
        let table = OpTable::default();
        let (names, same_shard) = ([(); 4].map(|()| table.name()), 1 + SHARDS as u32);
        for (name, peer) in names.into_iter().zip([1, 2, 1, same_shard]) {
            table.insert(name, op(peer)).ok().unwrap();
        }
        assert_eq!(table.fail(Rank(1), &DownCause::Closed), [names[0], names[2]]);
        let (back, cause) = table.insert(table.name(), op(1)).err().unwrap();
        assert_eq!((back.peer, cause), (Rank(1), Some(DownCause::Closed)));
        assert!(table.insert(table.name(), op(same_shard)).is_ok(), "its shard's others stay");
        let flush = TestOp { kind: OpKind::Flush, ..op(1) };
        assert!(table.insert(table.name(), flush).is_ok(), "it ends by itself");
        assert_eq!(table.count_of(Rank(1), |_, kind| kind == OpKind::Message), 2);
        assert_eq!(table.count_of(Rank(1), |name, _| name < names[2]), 1);
        assert_eq!(table.drain().len(), 6);
    }

    #[test]
    fn a_deadline_passes_once() {
        let (table, left) = (OpTable::default(), Deadlines::new(&Chores::default()));
        let early = Deadline::after(Duration::from_millis(1));
        let names = [table.name(), table.name()];
        table.insert(names[0], TestOp { deadline: early, ..op(3) }).ok().unwrap();
        table.insert(names[1], op(3)).ok().unwrap();
        let now = Deadline::after(Duration::from_secs(1));
        assert_eq!(table.expire(now, &left), [(Rank(3), names[0])]);
        assert!(table.expire(now, &left).is_empty());
        table.expect_by((Rank(3), names[0]), early);
        assert_eq!(table.expire(now, &left), [(Rank(3), names[0])]);
    }

    #[test]
    fn threads_that_race_for_an_operation_lose_no_event() {
        let table = OpTable::<TestOp>::default();
        let name = table.name();
        table.insert(name, op(1)).ok().unwrap();
        let seen = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (table, seen) = (&table, &seen);
                scope.spawn(move || {
                    for event in 0..1000 {
                        table.on((Rank(1), name), thread * 1000 + event, |op, event| {
                            op.seen.push(event);
                            seen.lock().push(event);
                            Flow::Stays
                        });
                    }
                });
            }
        });
        let seen = seen.into_inner();
        for thread in 0..4 {
            let of_thread: Vec<_> =
                seen.iter().filter(|event| **event / 1000 == thread).copied().collect();
            assert_eq!(of_thread, (thread * 1000..thread * 1000 + 1000).collect::<Vec<_>>());
        }
        assert_eq!(table.drain()[0].seen, seen, "one at a time");
    }
}
