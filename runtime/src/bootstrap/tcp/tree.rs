//! One rank's part of the tree: frames in, frames out, no I/O.
//!
//! A rank has a *place* in the tree, counted from the top, and up to [`ARITY`] places below it.
//! Puts go up to place 0, which has the whole table. Gets go up until somebody knows, and what
//! comes down is kept on the way: a key is written once, so what is kept is never stale, and many
//! who ask for one key ask place 0 but once for each of its neighbours. A fence is told upwards
//! once all below have reached it.
//!
//! Of departures the first orderly one and the first other one are told to all; that is what fences
//! and gets ask.
//!
//! A rank leaves when all below it have left: it says so, is heard, and goes. So the top is the
//! last.

#![forbid(unsafe_code)]

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use super::super::error::Departure;
use super::super::protocol::{Frame, MAX_PUT_PER_RANK, MAX_WAITING_PER_RANK};
use super::wire::Envelope;

/// How many places are below a place: 4096 ranks are three levels, and no rank has more than 17
/// connections.
pub const ARITY: u32 = 16;

/// What a rank other than the top keeps of what came down, in bytes of keys and values. What comes
/// beyond that is asked for again.
const KEPT: usize = 1 << 20;

/// Where a frame comes from, or goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The rank above.
    Above,
    /// This rank itself.
    Own,
    /// The rank in this one of the places below.
    Below(usize),
}

/// Frames to send, and to whom.
pub type Outgoing = Vec<(Side, Envelope)>;

/// The place above a place; none above the top.
pub fn above(place: u32) -> Option<u32> {
    place.checked_sub(1).map(|below| below / ARITY)
}

/// How many places are below a place of a job of so many ranks.
fn count_below(place: u32, size: u32) -> usize {
    let first = u64::from(place) * u64::from(ARITY) + 1;
    // At most ARITY, so it fits.
    usize::try_from(u64::from(size).saturating_sub(first).min(u64::from(ARITY))).unwrap_or(0)
}

/// One rank's part.
#[derive(Debug)]
pub struct Tree {
    rank: u32,
    place: u32,
    below: Vec<Below>,
    /// All that was put, at the top; elsewhere what came down.
    table: HashMap<String, Vec<u8>>,
    kept: usize,
    /// Who asked for what is not here.
    waiting: HashMap<String, Vec<Side>>,
    own_fence: u64,
    own_waiting: usize,
    fences_done: u64,
    fence_is_told: bool,
    /// The first departures of each kind, as this rank has heard of them.
    finished: Option<u32>,
    lost: Option<(u32, Departure)>,
    own_is_finished: bool,
    /// Whether the rank above is gone.
    is_cut_off: bool,
    leave: Leave,
    /// What each rank has put, in bytes, and those that have been refused: at the top.
    put_by: HashMap<u32, usize>,
    refused: HashSet<u32>,
}

#[derive(Debug, Default)]
struct Below {
    state: Attached,
    rank: u32,
    fence: u64,
    waiting: usize,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Attached {
    #[default]
    NotYet,
    Here,
    Left,
}

#[derive(Debug, PartialEq, Eq)]
enum Leave {
    Not,
    Told,
    Over,
}

impl Tree {
    /// The part of `rank` at `place`, in a job of `size`.
    pub fn new(rank: u32, place: u32, size: u32) -> Self {
        Self {
            rank,
            place,
            below: (0..count_below(place, size)).map(|_| Below::default()).collect(),
            table: HashMap::new(),
            kept: 0,
            waiting: HashMap::new(),
            own_fence: 0,
            own_waiting: 0,
            fences_done: 0,
            fence_is_told: false,
            finished: None,
            lost: None,
            own_is_finished: false,
            is_cut_off: false,
            leave: Leave::Not,
            put_by: HashMap::new(),
            refused: HashSet::new(),
        }
    }

    /// How many places are below this one.
    pub fn places_below(&self) -> usize {
        self.below.len()
    }

    /// Whether this rank has said that it has finished, all below it have left, and the rank above
    /// knows.
    pub fn is_over(&self) -> bool {
        self.leave == Leave::Over
    }

    /// Which of the places below this is, if it is one and nobody has taken it.
    pub fn vacancy(&self, place: u32) -> Option<usize> {
        let first = self.place.checked_mul(ARITY)?.checked_add(1)?;
        let at = usize::try_from(place.checked_sub(first)?).ok()?;
        (self.below.get(at)?.state == Attached::NotYet).then_some(at)
    }

    /// How many of the places below nobody has come to.
    pub fn vacancies(&self) -> usize {
        self.below.iter().filter(|below| below.state == Attached::NotYet).count()
    }

    /// Takes in that a rank has come to a place below, and tells it what it has missed.
    pub fn attach(&mut self, at: usize, rank: u32) -> Outgoing {
        let mut out = Outgoing::new();
        let Some(below) = self.below.get_mut(at) else { return out };
        *below = Below { state: Attached::Here, rank, fence: self.fences_done, waiting: 0 };
        for (rank, how) in
            self.finished.map(|rank| (rank, Departure::Finished)).into_iter().chain(self.lost)
        {
            out.push((Side::Below(at), Envelope { rank, frame: Frame::Gone { rank, how } }));
        }
        out
    }

    /// Takes in a frame.
    ///
    /// # Errors
    ///
    /// Why the frame was wrong: then [`cut`](Self::cut) its side.
    pub fn handle(&mut self, from: Side, envelope: Envelope) -> Result<Outgoing, String> {
        let mut out = Outgoing::new();
        let rank = envelope.rank;
        match (from, envelope.frame) {
            (Side::Own | Side::Below(_), Frame::Put { key, value }) => {
                self.put(rank, key, value, &mut out)
            }
            (Side::Own | Side::Below(_), Frame::Get { key }) => self.get(from, key, &mut out)?,
            (Side::Own | Side::Below(_), Frame::Fence { number }) => {
                self.fence(from, number, &mut out)?
            }
            (Side::Own, Frame::Finished) => {
                self.own_is_finished = true;
                self.departed(from, self.rank, Departure::Finished, &mut out);
                self.leave_if_over(&mut out);
            }
            (Side::Below(at), Frame::Finished) => {
                self.below[at].state = Attached::Left;
                out.push((from, Envelope { rank: self.rank, frame: Frame::Finished }));
                self.leave_if_over(&mut out);
            }
            (Side::Above | Side::Below(_), Frame::Gone { rank, how }) => {
                self.departed(from, rank, how, &mut out);
                self.leave_if_over(&mut out);
            }
            (Side::Above, Frame::Value { key, value }) => self.value(key, value, &mut out),
            (Side::Above, Frame::FenceDone { number }) => self.fence_done(number, &mut out)?,
            (Side::Above, Frame::Refused { why }) => self.refused(rank, &why, &mut out),
            (Side::Above, Frame::Finished) => self.leave = Leave::Over,
            (_, frame) => return Err(format!("a frame that goes the other way: {frame:?}")),
        }
        Ok(out)
    }

    /// Takes in that a side is there no more. Nothing, if it has left in order.
    pub fn cut(&mut self, from: Side, above: u32, how: Departure) -> Outgoing {
        let mut out = Outgoing::new();
        match from {
            Side::Own => {}
            Side::Above if self.leave == Leave::Told => self.leave = Leave::Over,
            Side::Above => {
                self.is_cut_off = true;
                self.departed(from, above, how, &mut out);
                self.leave_if_over(&mut out);
            }
            Side::Below(at) => {
                let below = &mut self.below[at];
                if below.state != Attached::Left {
                    below.state = Attached::Left;
                    let rank = below.rank;
                    self.departed(from, rank, how, &mut out);
                }
                for waiting in self.waiting.values_mut() {
                    waiting.retain(|side| *side != from);
                }
                self.leave_if_over(&mut out);
            }
        }
        out
    }

    /// Takes in that a rank is gone which has no place here.
    pub fn missing(&mut self, rank: u32, how: Departure) -> Outgoing {
        let mut out = Outgoing::new();
        self.departed(Side::Own, rank, how, &mut out);
        self.leave_if_over(&mut out);
        out
    }

    fn is_top(&self) -> bool {
        self.place == 0
    }

    fn put(&mut self, rank: u32, key: String, value: Vec<u8>, out: &mut Outgoing) {
        if !self.is_top() {
            out.push((Side::Above, Envelope { rank, frame: Frame::Put { key, value } }));
            return;
        }
        if self.refused.contains(&rank) {
            return;
        }
        let bytes = self.put_by.entry(rank).or_default();
        *bytes += key.len() + value.len();
        if *bytes > MAX_PUT_PER_RANK {
            let why = format!("rank {rank} has put more than {MAX_PUT_PER_RANK} bytes in all");
            self.refuse(rank, &why, out);
            return;
        }
        match self.table.entry(key) {
            Entry::Occupied(entry) if *entry.get() == value => {}
            Entry::Occupied(entry) => {
                let why = format!(
                    "rank {rank} put a second value under the key {:?}; a key is written once",
                    entry.key()
                );
                self.refuse(rank, &why, out);
            }
            Entry::Vacant(entry) => {
                let key = entry.key().clone();
                entry.insert(value.clone());
                self.answer(&key, &value, out);
            }
        }
    }

    fn get(&mut self, from: Side, key: String, out: &mut Outgoing) -> Result<(), String> {
        if let Some(value) = self.table.get(&key) {
            let frame = Frame::Value { value: value.clone(), key };
            out.push((from, Envelope { rank: self.rank, frame }));
            return Ok(());
        }
        let is_top = self.is_top();
        let awaited = self.awaited(from);
        if *awaited == MAX_WAITING_PER_RANK {
            return Err(format!(
                "it waits for more than {MAX_WAITING_PER_RANK} keys that nobody has put"
            ));
        }
        *awaited += 1;
        let waiting = self.waiting.entry(key).or_insert_with_key(|key| {
            if !is_top {
                out.push((
                    Side::Above,
                    Envelope { rank: self.rank, frame: Frame::Get { key: key.clone() } },
                ));
            }
            Vec::new()
        });
        if waiting.contains(&from) {
            // Asking twice is answered once.
            *self.awaited(from) -= 1;
        } else {
            waiting.push(from);
        }
        Ok(())
    }

    fn awaited(&mut self, side: Side) -> &mut usize {
        match side {
            Side::Below(at) => &mut self.below[at].waiting,
            Side::Own | Side::Above => &mut self.own_waiting,
        }
    }

    fn value(&mut self, key: String, value: Vec<u8>, out: &mut Outgoing) {
        self.answer(&key, &value, out);
        let bytes = key.len() + value.len();
        if self.kept + bytes <= KEPT && !self.table.contains_key(&key) {
            self.kept += bytes;
            self.table.insert(key, value);
        }
    }

    fn answer(&mut self, key: &str, value: &[u8], out: &mut Outgoing) {
        for side in self.waiting.remove(key).unwrap_or_default() {
            *self.awaited(side) -= 1;
            let frame = Frame::Value { key: key.to_owned(), value: value.to_vec() };
            out.push((side, Envelope { rank: self.rank, frame }));
        }
    }

    fn fence(&mut self, from: Side, number: u64, out: &mut Outgoing) -> Result<(), String> {
        let next = self.fences_done + 1;
        let reached = match from {
            Side::Below(at) => &mut self.below[at].fence,
            Side::Own | Side::Above => &mut self.own_fence,
        };
        // The next one, and only when the previous one is over.
        if *reached + 1 != next || number != next {
            return Err(format!("it entered fence {number} out of turn"));
        }
        *reached = number;
        if self.own_fence != next || self.below.iter().any(|below| below.fence != next) {
            return Ok(());
        }
        if self.is_top() {
            return self.fence_done(next, out);
        }
        self.fence_is_told = true;
        out.push((Side::Above, Envelope { rank: self.rank, frame: Frame::Fence { number } }));
        Ok(())
    }

    fn fence_done(&mut self, number: u64, out: &mut Outgoing) -> Result<(), String> {
        if number != self.fences_done + 1 || !(self.is_top() || self.fence_is_told) {
            return Err(format!(
                "fence {number} is over, it says, which this rank has not reached"
            ));
        }
        self.fences_done = number;
        self.fence_is_told = false;
        self.to_all(&Envelope { rank: self.rank, frame: Frame::FenceDone { number } }, out);
        Ok(())
    }

    /// Takes a departure in, if it is the first of its kind, and tells it on, up and down.
    fn departed(&mut self, from: Side, rank: u32, how: Departure, out: &mut Outgoing) {
        let is_news = if how.is_orderly() { self.finished.is_none() } else { self.lost.is_none() };
        if !is_news {
            return;
        }
        if how.is_orderly() {
            self.finished = Some(rank);
        } else {
            self.lost = Some((rank, how));
        }
        let gone = Envelope { rank, frame: Frame::Gone { rank, how } };
        if !self.is_top() && from != Side::Above {
            out.push((Side::Above, gone.clone()));
        }
        self.to_all(&gone, out);
    }

    fn refuse(&mut self, rank: u32, why: &str, out: &mut Outgoing) {
        self.refused.insert(rank);
        self.departed(Side::Own, rank, Departure::Misbehaved, out);
        self.refused(rank, why, out);
    }

    /// Nobody knows the way to a rank; refusals are rare.
    fn refused(&self, rank: u32, why: &str, out: &mut Outgoing) {
        self.to_all(&Envelope { rank, frame: Frame::Refused { why: why.to_owned() } }, out);
    }

    /// To this rank, if it is told what concerns it, and to those below.
    fn to_all(&self, envelope: &Envelope, out: &mut Outgoing) {
        let is_mine = match envelope.frame {
            Frame::Refused { .. } => envelope.rank == self.rank,
            Frame::Gone { .. } => envelope.rank != self.rank,
            _ => true,
        };
        if is_mine {
            out.push((Side::Own, envelope.clone()));
        }
        let here = self.below.iter().enumerate().filter(|(_, below)| below.state == Attached::Here);
        out.extend(here.map(|(at, _)| (Side::Below(at), envelope.clone())));
    }

    /// A place that nobody has come to is waited for, unless the job is broken: whoever was to come
    /// may be the one that is lost.
    fn leave_if_over(&mut self, out: &mut Outgoing) {
        let is_over = |below: &Below| match below.state {
            Attached::Left => true,
            Attached::NotYet => self.lost.is_some(),
            Attached::Here => false,
        };
        if !self.own_is_finished || self.leave != Leave::Not || !self.below.iter().all(is_over) {
            return;
        }
        if self.is_top() || self.is_cut_off {
            self.leave = Leave::Over;
        } else {
            self.leave = Leave::Told;
            out.push((Side::Above, Envelope { rank: self.rank, frame: Frame::Finished }));
        }
    }
}

#[cfg(test)]
mod tests;
