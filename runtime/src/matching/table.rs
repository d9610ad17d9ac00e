//! A hash table of queues, in shards.

use super::MatchKey;
use carrack_transports::mem::prefetch::prefetch;
use carrack_transports::sync::BiasedLock;

/// Shards: enough that threads on different keys seldom use the same one.
const SHARDS: usize = 64;
/// Buckets that a shard begins with.
const BUCKETS: usize = 16;
/// Places that an empty shard may keep: it frees further ones.
const SPARE: usize = 1024;
/// No place.
const NIL: usize = usize::MAX;

/// Values of two sorts that wait for each other under a key. Under one key only one sort waits at a
/// time.
pub(crate) struct Table<A, B> {
    shards: Box<[BiasedLock<MatchShard<A, B>>; SHARDS]>,
}

/// Places in one vector, linked by their numbers. Values of one key form a line, first in, first
/// out; the bucket links the heads of lines. So a value is written once and read once, and only
/// further places need an allocation.
struct MatchShard<A, B> {
    places: Vec<MatchPlace<A, B>>,
    free: usize,
    /// The head of the first line of each bucket.
    buckets: Vec<usize>,
    lines: usize,
    /// The stamp of the next value that waits, never used twice.
    stamps: u64,
}

struct MatchPlace<A, B> {
    key: MatchKey,
    /// Head of the next line in the bucket, for the head of a line; the next free place, for a free
    /// one.
    below: usize,
    /// The next in line.
    behind: usize,
    /// Last value in the line, for the head of a line.
    last: usize,
    /// Number that tells the value from others that waited here under the same key.
    stamp: u64,
    held: PlaceContent,
    /// A free place keeps an emptied `B`: the next one is filled in field by field, and not moved.
    value: MatchValue<A, B>,
}

/// Content of a place: the kind of the value that waits there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PlaceContent {
    Nothing,
    A,
    B,
}

enum MatchValue<A, B> {
    A(A),
    B(B),
}

/// A key with its hash, for repeated lookups.
#[derive(Clone, Copy)]
pub(crate) struct HashedKey {
    key: MatchKey,
    hash: u64,
}

impl HashedKey {
    pub(super) fn key(&self) -> MatchKey {
        self.key
    }
}

impl From<MatchKey> for HashedKey {
    #[inline(always)]
    fn from(key: MatchKey) -> Self {
        Self { key, hash: hash(&key) }
    }
}

impl<A, B: Default> MatchPlace<A, B> {
    /// Puts in an `A`.
    #[inline]
    fn put_a(&mut self, value: A) {
        self.held = PlaceContent::A;
        let emptied = std::mem::replace(&mut self.value, MatchValue::A(value));
        // There is nothing in it to be dropped, which only this line knows.
        std::mem::forget(emptied);
    }

    /// Lets a `B` be filled in.
    #[inline(always)]
    fn put_b(&mut self, fill: impl FnOnce(&mut B)) {
        self.held = PlaceContent::B;
        if let MatchValue::B(place) = &mut self.value {
            fill(place);
        }
    }

    /// Takes the `A` out.
    #[inline]
    fn take_a(&mut self) -> Option<A> {
        self.held = PlaceContent::Nothing;
        match std::mem::replace(&mut self.value, MatchValue::B(B::default())) {
            MatchValue::A(value) => Some(value),
            MatchValue::B(_) => None,
        }
    }

    /// Lets the `B` be emptied.
    #[inline(always)]
    fn empty_b<T>(&mut self, empty: impl FnOnce(&mut B) -> T) -> Option<T> {
        self.held = PlaceContent::Nothing;
        match &mut self.value {
            MatchValue::A(_) => None,
            MatchValue::B(place) => Some(empty(place)),
        }
    }

    /// Returns the `B` that waits here.
    fn b(&self) -> Option<&B> {
        match &self.value {
            MatchValue::B(value) if self.held == PlaceContent::B => Some(value),
            _ => None,
        }
    }
}

impl<A, B: Default> MatchShard<A, B> {
    fn new() -> Self {
        Self { places: Vec::new(), free: NIL, buckets: Vec::new(), lines: 0, stamps: 0 }
    }

    #[inline]
    fn bucket(&self, hash: u64) -> usize {
        // The number of buckets is a power of two, and 0 only while nothing is in them.
        hash as usize & self.buckets.len().wrapping_sub(1)
    }

    /// Returns the head of a key's line, and the head above it in the bucket.
    #[inline]
    fn find(&self, key: &MatchKey, hash: u64) -> Option<(usize, usize)> {
        let mut above = NIL;
        let mut at = *self.buckets.get(self.bucket(hash))?;
        while let Some(place) = self.places.get(at) {
            if place.key == *key {
                return Some((at, above));
            }
            (above, at) = (at, place.below);
        }
        None
    }

    /// Begins a line with an empty place, or adds one to the end of the line.
    #[inline(always)]
    fn occupy(&mut self, key: MatchKey, hash: u64, head: Option<usize>) -> &mut MatchPlace<A, B> {
        if head.is_none() && self.lines >= self.buckets.len() {
            self.grow();
        }
        let at = if self.free < self.places.len() { self.free } else { self.extend(key) };
        let bucket = self.bucket(hash);
        self.stamps += 1;
        let below = match head {
            None => {
                self.lines += 1;
                std::mem::replace(&mut self.buckets[bucket], at)
            }
            Some(head) => {
                let last = std::mem::replace(&mut self.places[head].last, at);
                self.places[last].behind = at;
                NIL
            }
        };
        let stamp = self.stamps;
        let place = &mut self.places[at];
        self.free = std::mem::replace(&mut place.below, below);
        (place.key, place.behind, place.last, place.stamp) = (key, NIL, at, stamp);
        place
    }

    /// Makes one more place, a free one.
    #[cold]
    fn extend(&mut self, key: MatchKey) -> usize {
        let value = MatchValue::B(B::default());
        let place = MatchPlace {
            key,
            below: NIL,
            behind: NIL,
            last: NIL,
            stamp: 0,
            held: PlaceContent::Nothing,
            value,
        };
        self.places.push(place);
        self.places.len() - 1
    }

    /// Has the processor fetch a place, which the next message of its line needs: with a thousand
    /// receives posted it is in no near cache.
    #[inline(always)]
    fn fetch(&self, at: usize) {
        prefetch(self.places.as_ptr().wrapping_add(at).cast(), size_of::<MatchPlace<A, B>>());
    }

    /// Frees the emptied head of a line.
    #[inline(always)]
    fn free_head(&mut self, (head, above): (usize, usize), hash: u64) {
        let place = &mut self.places[head];
        let (below, next, last) = (place.below, place.behind, place.last);
        place.below = std::mem::replace(&mut self.free, head);
        self.fetch(next);
        self.close_up((next, above), hash, (below, last));
    }

    /// Links what is left of a line, which begins with `next`, into its bucket.
    #[inline(always)]
    fn close_up(
        &mut self,
        (mut next, above): (usize, usize),
        hash: u64,
        (below, last): (usize, usize),
    ) {
        match self.places.get_mut(next) {
            Some(place) => (place.below, place.last) = (below, last),
            None => {
                self.lines -= 1;
                next = below;
            }
        }
        match self.places.get_mut(above) {
            Some(above) => above.below = next,
            None => {
                let bucket = self.bucket(hash);
                self.buckets[bucket] = next;
            }
        }
        self.shrink();
    }

    /// Takes values out of the front of a line as long as `take` is true of their places, and frees
    /// these.
    #[inline(always)]
    fn advance(
        &mut self,
        (head, above): (usize, usize),
        hash: u64,
        mut take: impl FnMut(&mut MatchPlace<A, B>) -> bool,
    ) {
        let MatchPlace { below, last, .. } = self.places[head];
        let mut next = head;
        while let Some(place) = self.places.get(next) {
            self.fetch(place.behind);
            let place = &mut self.places[next];
            if !take(place) {
                break;
            }
            place.below = std::mem::replace(&mut self.free, next);
            next = place.behind;
        }
        if next != head {
            self.close_up((next, above), hash, (below, last));
        }
    }

    /// Takes the `A` at the front of a line.
    #[inline(never)]
    fn take_a(&mut self, line: (usize, usize), hash: u64) -> Option<A> {
        let mut taken = None;
        self.advance(line, hash, |place| {
            taken.is_none() && {
                taken = place.take_a();
                true
            }
        });
        taken
    }

    /// Takes the `B` of this stamp out of a line, wherever in it.
    fn pluck(&mut self, (head, above): (usize, usize), hash: u64, stamp: u64) -> Option<B> {
        let mut plucked = None;
        if self.places[head].stamp == stamp {
            self.advance((head, above), hash, |place| {
                plucked.is_none() && {
                    plucked = place.empty_b(std::mem::take);
                    true
                }
            });
            return plucked;
        }
        let mut before = head;
        loop {
            let at = self.places[before].behind;
            let place = self.places.get_mut(at)?;
            if place.stamp == stamp {
                plucked = place.empty_b(std::mem::take);
                place.below = std::mem::replace(&mut self.free, at);
                let behind = place.behind;
                self.places[before].behind = behind;
                if self.places[head].last == at {
                    self.places[head].last = before;
                }
                return plucked;
            }
            before = at;
        }
    }

    /// Gives back the memory that an empty shard does not need.
    #[inline(always)]
    fn shrink(&mut self) {
        if self.lines == 0 && self.places.len() > SPARE {
            self.begin_anew();
        }
    }

    #[cold]
    #[inline(never)]
    fn begin_anew(&mut self) {
        *self = Self { stamps: self.stamps, ..Self::new() };
    }

    #[cold]
    fn grow(&mut self) {
        let heads = self.heads();
        let count = (self.buckets.len() * 2).max(BUCKETS);
        self.buckets.clear();
        self.buckets.resize(count, NIL);
        for head in heads {
            let bucket = self.bucket(hash(&self.places[head].key));
            self.places[head].below = std::mem::replace(&mut self.buckets[bucket], head);
        }
    }

    /// Returns the heads of all lines.
    fn heads(&self) -> Vec<usize> {
        let mut heads = Vec::with_capacity(self.lines);
        for &first in &self.buckets {
            let mut at = first;
            while let Some(place) = self.places.get(at) {
                heads.push(at);
                at = place.below;
            }
        }
        heads
    }
}

impl<A, B: Default> Table<A, B> {
    pub(crate) fn new() -> Self {
        Self { shards: Box::new(std::array::from_fn(|_| BiasedLock::new(MatchShard::new()))) }
    }

    /// Gives the oldest `B`s under the key in place to `taken`: a move costs more than all the
    /// rest. Takes them as long as the result is `true`; `taken` has to take everything that needs
    /// a drop then. It gets their numbers, from 0 on. Returns the number of those taken.
    #[inline(always)]
    pub(crate) fn take_run(
        &self,
        key: MatchKey,
        mut taken: impl FnMut(usize, &mut B) -> bool,
    ) -> usize {
        let hash = hash(&key);
        let mut shard = self.shard(hash).lock();
        let Some(line) = shard.find(&key, hash) else { return 0 };
        let mut count = 0;
        shard.advance(line, hash, |place| {
            let MatchValue::B(value) = &mut place.value else { return false };
            if place.held != PlaceContent::B || !taken(count, value) {
                return false;
            }
            place.held = PlaceContent::Nothing;
            count += 1;
            true
        });
        count
    }

    /// Gives the oldest `B` under the key to `taken`, as [`take_run`](Self::take_run), and takes it
    /// if the result is `true`. Otherwise it waits on. Returns the result, `false` without a `B`.
    #[inline(always)]
    pub(crate) fn take_first(&self, key: MatchKey, taken: impl FnOnce(&mut B) -> bool) -> bool {
        let hash = hash(&key);
        let mut shard = self.shard(hash).lock();
        let Some((head, above)) = shard.find(&key, hash) else { return false };
        let place = &mut shard.places[head];
        let MatchValue::B(value) = &mut place.value else { return false };
        if place.held != PlaceContent::B || !taken(value) {
            return false;
        }
        place.held = PlaceContent::Nothing;
        shard.free_head((head, above), hash);
        true
    }

    /// Takes the oldest `B` under the key, and returns the result of `taken`, which gets it in
    /// place as with [`take_run`](Self::take_run). Without a `B` the `A` is made, and waits.
    ///
    /// # Errors
    /// The stamp of the value that waits.
    #[inline(always)]
    pub(crate) fn meet_b<R, T>(
        &self,
        key: MatchKey,
        value: R,
        taken: impl FnOnce(R, &mut B) -> T,
        keep_as: impl FnOnce(R) -> A,
    ) -> Result<T, u64> {
        let hash = hash(&key);
        let mut shard = self.shard(hash).lock();
        let line = shard.find(&key, hash);
        if let Some((head, above)) = line
            && shard.places[head].held == PlaceContent::B
        {
            let (mut given, mut result) = (Some((value, taken)), None);
            shard.advance((head, above), hash, |place| {
                let Some((value, taken)) = given.take() else { return false };
                result = place.empty_b(|theirs| taken(value, theirs));
                true
            });
            return result.ok_or(0);
        }
        let kept = keep_as(value);
        shard.occupy(key, hash, line.map(|(head, _)| head)).put_a(kept);
        Err(shard.stamps)
    }

    /// Takes the oldest `A` under the key. Without one a `B` is filled in, and waits.
    ///
    /// # Errors
    /// The stamp of the value that waits.
    #[inline(always)]
    pub(super) fn meet_a(
        &self,
        key: impl Into<HashedKey>,
        fill: impl FnOnce(&mut B),
    ) -> Result<A, u64> {
        let HashedKey { key, hash } = key.into();
        let mut shard = self.shard(hash).lock();
        let line = shard.find(&key, hash);
        if let Some(line @ (head, _)) = line
            && shard.places[head].held == PlaceContent::A
        {
            return shard.take_a(line, hash).ok_or(0);
        }
        shard.occupy(key, hash, line.map(|(head, _)| head)).put_b(fill);
        Err(shard.stamps)
    }

    #[inline(always)]
    fn shard(&self, hash: u64) -> &BiasedLock<MatchShard<A, B>> {
        // The upper bits: the lower ones select the bucket.
        &self.shards[(hash >> 58) as usize % SHARDS]
    }

    /// Takes out the `B` that has this stamp, if it still waits.
    pub(crate) fn pluck_b(&self, key: MatchKey, stamp: u64) -> Option<B> {
        let hash = hash(&key);
        let mut shard = self.shard(hash).lock();
        let line = shard.find(&key, hash)?;
        shard.pluck(line, hash, stamp)
    }

    /// Looks at the `A` that the next `B` of this key would meet.
    pub(crate) fn peek_a<R>(&self, key: MatchKey, look: impl FnOnce(&A) -> R) -> Option<R> {
        let hash = hash(&key);
        let shard = self.shard(hash).lock();
        let (head, _) = shard.find(&key, hash)?;
        match &shard.places[head].value {
            MatchValue::A(value) => Some(look(value)),
            MatchValue::B(_) => None,
        }
    }

    /// Looks at some of the `A`s that wait, at most `most`, a shard at a time.
    pub(crate) fn some_a(&self, mut most: usize, mut look: impl FnMut(MatchKey, &A)) {
        for shard in self.shards.iter() {
            for place in &shard.lock().places {
                let MatchValue::A(value) = &place.value else { continue };
                if most == 0 {
                    return;
                }
                most -= 1;
                look(place.key, value);
            }
        }
    }

    /// Looks at every `B` that waits, a shard at a time.
    pub(crate) fn each_b(&self, mut look: impl FnMut(MatchKey, &B)) {
        for shard in self.shards.iter() {
            for place in &shard.lock().places {
                if let Some(value) = place.b() {
                    look(place.key, value);
                }
            }
        }
    }

    /// Takes out every `B` whose key is selected.
    pub(crate) fn take_b(&self, which: impl Fn(&MatchKey) -> bool) -> Vec<B> {
        let mut taken = Vec::new();
        for shard in self.shards.iter() {
            let mut shard = shard.lock();
            for head in shard.heads() {
                let MatchPlace { key, held, .. } = &shard.places[head];
                if *held != PlaceContent::B || !which(key) {
                    continue;
                }
                let (key, hash) = (*key, hash(key));
                if let Some(line) = shard.find(&key, hash) {
                    shard.advance(line, hash, |place| {
                        taken.extend(place.empty_b(std::mem::take));
                        true
                    });
                }
                // An empty shard has begun anew.
                if shard.lines == 0 {
                    break;
                }
            }
        }
        taken
    }

    /// Takes out every selected `B`, wherever in its line it stands.
    pub(crate) fn pluck_b_if(&self, which: impl Fn(&B) -> bool) -> Vec<B> {
        let mut plucked = Vec::new();
        for shard in self.shards.iter() {
            let mut shard = shard.lock();
            let meant: Vec<_> = shard
                .places
                .iter()
                .filter(|place| place.b().is_some_and(&which))
                .map(|place| (place.key, place.stamp))
                .collect();
            for (key, stamp) in meant {
                let hash = hash(&key);
                if let Some(line) = shard.find(&key, hash) {
                    plucked.extend(shard.pluck(line, hash, stamp));
                }
            }
        }
        plucked
    }

    /// Returns the numbers of waiting values of each sort.
    pub(crate) fn count(&self) -> (usize, usize) {
        let mut count = (0, 0);
        for shard in self.shards.iter() {
            for place in &shard.lock().places {
                match place.held {
                    PlaceContent::Nothing => {}
                    PlaceContent::A => count.0 += 1,
                    PlaceContent::B => count.1 += 1,
                }
            }
        }
        count
    }
}

/// Hashes by one multiplication, folded, as in wyhash. Keys come from ranks of one job, which
/// share a secret. A hostile rank could only make its own messages slow to match.
#[inline(always)]
fn hash(key: &MatchKey) -> u64 {
    let (who, tag) = (key.who ^ 0x9e37_79b9_7f4a_7c15, key.tag ^ 0xd6e8_feb8_6659_fd93);
    let product = u128::from(who) * u128::from(tag);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests;
