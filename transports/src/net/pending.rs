//! Pending connections, which are not authenticated yet: bounded in number and time.
//!
//! Each holds the bytes of one unfinished message at most. When there are too many, or one has been
//! here for too long, the oldest goes. A rank to which that happens calls again.

use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Part of the process's descriptors that pending connections take at most: the rest is for peers
/// and the program's files.
const PART: u64 = 4;

/// Pending connections of a device, or twice the number of ranks where that is more.
const CALLERS: usize = 1024;

/// Time in which a caller of a device proves itself. A rank that computes for longer calls again.
pub const PROOF: Duration = Duration::from_secs(600);

/// Time between two lines about connections that were refused.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Pending connections, by place.
#[derive(Debug)]
pub struct Pending<T> {
    places: Vec<Option<PendingEntry<T>>>,
    free: Vec<u32>,
    /// Places by the order in which they were taken.
    order: BTreeMap<u64, u32>,
    next: u64,
    most: usize,
    patience: Duration,
    turned_away: u64,
    /// Time when a line was last written, and the number that had been turned away then.
    told: Option<(Instant, u64)>,
}

#[derive(Debug)]
struct PendingEntry<T> {
    number: u64,
    since: Instant,
    value: T,
}

impl<T> Pending<T> {
    /// Creates an empty set for at most `most` connections, each for at most `patience`. Where the
    /// process may have few descriptors, there are fewer.
    pub fn new(most: usize, patience: Duration) -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            order: BTreeMap::new(),
            next: 0,
            most,
            patience,
            turned_away: 0,
            told: None,
        }
    }

    /// Creates an empty set for a device of a job of this number of ranks, all of which may call at
    /// the same time.
    pub fn of_ranks(ranks: u32) -> Self {
        Self::new(CALLERS.max(2 * ranks as usize), PROOF)
    }

    /// Returns the place that has to go before another connection is admitted, if there is no room.
    pub fn crowded(&self) -> Option<u32> {
        if self.order.len() < self.most.min(part()) { None } else { self.oldest() }
    }

    /// Returns the place of the oldest connection.
    pub fn oldest(&self) -> Option<u32> {
        self.order.first_key_value().map(|(_, place)| *place)
    }

    /// Admits a connection to a place. The oldest goes if there is no room.
    pub fn admit(&mut self, value: T, now: Instant) -> u32 {
        while let Some(place) = self.crowded() {
            self.take(place);
        }
        let entry = PendingEntry { number: self.next, since: now, value };
        self.next += 1;
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.places.push(None);
                u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.order.insert(entry.number, at);
        self.places[at as usize] = Some(entry);
        at
    }

    /// Returns the connection at a place.
    pub fn get(&self, place: u32) -> Option<&T> {
        self.places.get(place as usize)?.as_ref().map(|entry| &entry.value)
    }

    /// Returns the connection at a place.
    pub fn get_mut(&mut self, place: u32) -> Option<&mut T> {
        self.places.get_mut(place as usize)?.as_mut().map(|entry| &mut entry.value)
    }

    /// Notes that a connection has proved itself. It keeps its place until it is taken out, and is
    /// not counted.
    pub fn proved(&mut self, place: u32) {
        if let Some(Some(entry)) = self.places.get(place as usize) {
            self.order.remove(&entry.number);
        }
    }

    /// Takes a connection out: it is let in, refused or gone.
    pub fn take(&mut self, place: u32) -> Option<T> {
        let taken = self.places.get_mut(place as usize)?.take()?;
        self.order.remove(&taken.number);
        self.free.push(place);
        Some(taken.value)
    }

    /// Takes out those that have been here for too long. Returns how many.
    pub fn expire(&mut self, now: Instant) -> usize {
        let mut expired = 0;
        while let Some(place) = self.oldest()
            && let Some(Some(entry)) = self.places.get(place as usize)
            && now.saturating_duration_since(entry.since) >= self.patience
        {
            self.take(place);
            expired += 1;
        }
        expired
    }

    /// Returns the moment at which the next one has been here for too long.
    pub fn deadline(&self) -> Option<Instant> {
        let entry = self.places.get(self.oldest()? as usize)?.as_ref()?;
        entry.since.checked_add(self.patience)
    }

    /// Returns the places that are taken, in the order in which that happened.
    pub fn places(&self) -> Vec<u32> {
        let taken = (0..).zip(&self.places).filter_map(|(at, entry)| Some((entry.as_ref()?, at)));
        let mut taken: Vec<_> = taken.map(|(entry, at)| (entry.number, at)).collect();
        taken.sort_unstable();
        taken.into_iter().map(|(_, at)| at).collect()
    }

    /// Takes all out.
    pub fn drain(&mut self) -> Vec<T> {
        self.places().into_iter().filter_map(|place| self.take(place)).collect()
    }

    /// Returns the number of pending connections.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Counts a connection that was refused, and logs it unless that was done a short time ago.
    pub fn refused(&mut self, caller: &str, why: &str, now: Instant) {
        self.turned_away += 1;
        let is_due =
            self.told.is_none_or(|(last, _)| now.saturating_duration_since(last) >= BETWEEN_LINES);
        if is_due {
            let since = self.turned_away - self.told.map_or(0, |(_, before)| before);
            self.told = Some((now, self.turned_away));
            tracing::warn!(caller, why, since, "a connection was refused");
        }
    }
}

/// Returns the number of pending connections for which this process has descriptors now. The
/// program may change its limit at any time.
fn part() -> usize {
    let limit = getrlimit(Resource::Nofile).current.map(|limit| (limit / PART).max(1));
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_connections_leave_room_for_the_last_to_come() {
        let (mut pending, now) = (Pending::new(100, Duration::from_secs(10)), Instant::now());
        let places: Vec<u32> = (0..1000).map(|number| pending.admit(number, now)).collect();
        assert_eq!(pending.len(), 100);
        assert!(places.iter().all(|place| *place < 100), "places are used again");
        let here: Vec<i32> =
            pending.places().into_iter().map(|place| *pending.get_mut(place).unwrap()).collect();
        assert_eq!(here, (900..1000).collect::<Vec<_>>());
        assert_eq!(pending.take(places[950]), Some(950));
        assert_eq!((pending.take(places[950]), pending.len(), pending.crowded()), (None, 99, None));
        // One that has proved itself is not pushed out.
        pending.proved(places[960]);
        let later: Vec<u32> = (0..1000).map(|number| pending.admit(number, now)).collect();
        assert!(!later.contains(&places[960]));
        assert_eq!((pending.get(places[960]), pending.len()), (Some(&960), 100));
        assert_eq!(pending.drain().len(), 101);
        assert!(pending.is_empty());
    }

    #[test]
    fn pending_connections_leave_most_of_the_descriptors_to_others() {
        let Some(limit) = getrlimit(Resource::Nofile).current.filter(|limit| *limit < 1 << 20)
        else {
            return println!("skipped: there are more descriptors than can be counted up to");
        };
        let (mut pending, now) =
            (Pending::new(usize::MAX, Duration::from_secs(10)), Instant::now());
        for number in 0..limit {
            pending.admit(number, now);
        }
        assert_eq!(pending.len() as u64, limit / 4);
    }

    #[test]
    fn one_that_says_nothing_goes_when_its_time_has_passed() {
        let (mut pending, now) = (Pending::new(100, Duration::from_secs(10)), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(pending.deadline(), None);
        pending.admit("first", at(0));
        let second = pending.admit("second", at(3));
        assert_eq!((pending.deadline(), pending.expire(at(9))), (Some(at(10)), 0));
        assert_eq!((pending.expire(at(12)), pending.deadline()), (1, Some(at(13))));
        assert_eq!(pending.get_mut(second), Some(&mut "second"));
        assert_eq!((pending.expire(at(13)), pending.len()), (1, 0));
    }

    #[test]
    fn those_that_are_refused_are_counted() {
        let (mut pending, now) = (Pending::<()>::new(1, Duration::from_secs(10)), Instant::now());
        for _ in 0..1000 {
            pending.refused("a process", "it knows no secret", now);
        }
        assert_eq!((pending.turned_away, pending.told), (1000, Some((now, 1))));
    }
}
