//! A hash table of queues, in shards.

use super::Key;
use carrack_transports::sync::TryLock;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Shards: enough that threads on different keys seldom meet in one.
const SHARDS: usize = 64;
/// Empty queues that a shard keeps for the next key that needs more than one place.
const SPARE: usize = 8;

/// Values of two sorts that wait for each other under a key. Under one key only one sort waits at a time.
pub(crate) struct Table<A, B> {
    shards: Box<[TryLock<Shard<A, B>>]>,
}

struct Shard<A, B> {
    queues: HashMap<Key, Waiting<A, B>, BuildHasherDefault<KeyHasher>>,
    spare_a: Vec<VecDeque<A>>,
    spare_b: Vec<VecDeque<B>>,
}

enum Waiting<A, B> {
    A(Line<A>),
    B(Line<B>),
}

/// First in, first out; the common case of one value needs no allocation.
struct Line<T> {
    first: T,
    rest: VecDeque<T>,
}

impl<T> Line<T> {
    fn push(&mut self, value: T, spare: &mut Vec<VecDeque<T>>) {
        if self.rest.capacity() == 0
            && let Some(queue) = spare.pop()
        {
            self.rest = queue;
        }
        self.rest.push_back(value);
    }

    /// The first value; `Err` with the empty queue when it was the last.
    fn pop(mut self) -> (T, Result<Self, VecDeque<T>>) {
        match self.rest.pop_front() {
            Some(next) => (self.first, Ok(Self { first: next, rest: self.rest })),
            None => (self.first, Err(self.rest)),
        }
    }
}

fn keep<T>(spare: &mut Vec<VecDeque<T>>, queue: VecDeque<T>) {
    // Queues that once held very many are not kept: memory would never shrink.
    if spare.len() < SPARE && (1..=1024).contains(&queue.capacity()) {
        spare.push(queue);
    }
}

impl<A, B> Table<A, B> {
    pub(crate) fn new() -> Self {
        let shard = || Shard { queues: HashMap::default(), spare_a: Vec::new(), spare_b: Vec::new() };
        Self { shards: (0..SHARDS).map(|_| TryLock::new(shard())).collect() }
    }

    fn shard(&self, key: &Key) -> &TryLock<Shard<A, B>> {
        // The upper bits: the map inside uses the lower ones.
        &self.shards[(hash(key) >> 58) as usize % SHARDS]
    }

    /// The oldest `B` under the key; or, when there is none, the `A` stays and waits. It is made only then.
    pub(crate) fn meet_b<R>(&self, key: Key, value: R, keep_as: impl FnOnce(R) -> A) -> Option<(R, B)> {
        let mut guard = self.shard(&key).lock();
        let shard = &mut *guard;
        match shard.queues.get_mut(&key) {
            Some(Waiting::A(line)) => {
                line.push(keep_as(value), &mut shard.spare_a);
                None
            }
            Some(Waiting::B(_)) => {
                let Some(Waiting::B(line)) = shard.queues.remove(&key) else { return None };
                let (partner, left) = line.pop();
                match left {
                    Ok(line) => drop(shard.queues.insert(key, Waiting::B(line))),
                    Err(empty) => keep(&mut shard.spare_b, empty),
                }
                Some((value, partner))
            }
            None => {
                let line = Line { first: keep_as(value), rest: VecDeque::new() };
                shard.queues.insert(key, Waiting::A(line));
                None
            }
        }
    }

    /// The oldest `A` under the key; or, when there is none, the `B` stays and waits.
    pub(crate) fn meet_a<R>(&self, key: Key, value: R, keep_as: impl FnOnce(R) -> B) -> Option<(R, A)> {
        let mut guard = self.shard(&key).lock();
        let shard = &mut *guard;
        match shard.queues.get_mut(&key) {
            Some(Waiting::B(line)) => {
                line.push(keep_as(value), &mut shard.spare_b);
                None
            }
            Some(Waiting::A(_)) => {
                let Some(Waiting::A(line)) = shard.queues.remove(&key) else { return None };
                let (partner, left) = line.pop();
                match left {
                    Ok(line) => drop(shard.queues.insert(key, Waiting::A(line))),
                    Err(empty) => keep(&mut shard.spare_a, empty),
                }
                Some((value, partner))
            }
            None => {
                let line = Line { first: keep_as(value), rest: VecDeque::new() };
                shard.queues.insert(key, Waiting::B(line));
                None
            }
        }
    }

    /// Takes out every `B` whose key is one of those.
    pub(crate) fn take_b(&self, which: impl Fn(&Key) -> bool) -> Vec<B> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            let found = shard
                .lock()
                .queues
                .extract_if(|key, waiting| matches!(waiting, Waiting::B(_)) && which(key))
                .collect::<Vec<_>>();
            for (_, waiting) in found {
                if let Waiting::B(line) = waiting {
                    taken.push(line.first);
                    taken.extend(line.rest);
                }
            }
        }
        taken
    }

    /// How many of each sort wait.
    pub(crate) fn count(&self) -> (usize, usize) {
        let mut count = (0, 0);
        for shard in &self.shards {
            for waiting in shard.lock().queues.values() {
                match waiting {
                    Waiting::A(line) => count.0 += 1 + line.rest.len(),
                    Waiting::B(line) => count.1 += 1 + line.rest.len(),
                }
            }
        }
        count
    }
}

fn hash(key: &Key) -> u64 {
    let mut hasher = KeyHasher::default();
    key.hash(&mut hasher);
    hasher.finish()
}

/// Multiply and fold, a few cycles a word. Keys come from ranks of one job, which share a secret; a hostile
/// one could make its own messages slow to match, no more.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        let product = u128::from(self.0) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
        (product >> 64) as u64 ^ product as u64
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(29) ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matching::Matching;
    use crate::names::{Rank, Tag};
    use proptest::prelude::*;

    fn key(policy: Matching, rank: u32, tag: u64) -> Key {
        Key::new(policy, Rank(rank), Tag(tag))
    }

    #[test]
    fn policies_never_collide() {
        let table: Table<u32, u32> = Table::new();
        assert!(table.meet_b(key(Matching::RankOnly, 5, 9), 1, |v| v).is_none());
        assert!(table.meet_a(key(Matching::TagOnly, 9, 5), 2, |v| v).is_none());
        assert!(table.meet_a(key(Matching::None, 0, 0), 3, |v| v).is_none());
        assert_eq!(table.meet_a(key(Matching::RankOnly, 5, 1), 4, |v| v), Some((4, 1)));
        assert_eq!(table.count(), (0, 2));
    }

    proptest! {
        /// Against the plainest model there is: two lists, searched from the front.
        #[test]
        fn values_of_a_key_meet_in_order(steps in proptest::collection::vec((any::<bool>(), 0_u8..4, 0_u32..3, 0_u64..3), 0..200)) {
            let table: Table<usize, usize> = Table::new();
            let mut model = (Vec::<(Key, usize)>::new(), Vec::<(Key, usize)>::new());
            for (at, (is_a, policy, rank, tag)) in steps.into_iter().enumerate() {
                let key = key(Matching::from_code(policy).unwrap(), rank, tag);
                let (mine, theirs) = if is_a { (&mut model.0, &mut model.1) } else { (&mut model.1, &mut model.0) };
                let expected = match theirs.iter().position(|(other, _)| *other == key) {
                    Some(found) => Some((at, theirs.remove(found).1)),
                    None => { mine.push((key, at)); None }
                };
                let got = if is_a { table.meet_b(key, at, |v| v) } else { table.meet_a(key, at, |v| v) };
                prop_assert_eq!(got, expected);
            }
            prop_assert_eq!(table.count(), (model.0.len(), model.1.len()));
            let mut left = table.take_b(|key| key.is_of(Rank(1)));
            left.sort_unstable();
            let expected: Vec<usize> = model.1.iter().filter(|(key, _)| key.is_of(Rank(1))).map(|(_, at)| *at).collect();
            prop_assert_eq!(left, expected);
        }
    }
}
