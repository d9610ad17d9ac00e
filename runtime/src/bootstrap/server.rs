//! The store's half of the bootstrap: frames in, frames out, no I/O.
//!
//! `carrack run`, or rank 0's thread, moves the bytes; this module interprets them. A rank that
//! breaks the protocol is cut off, and the others are told as if it had died. It can fail its own
//! messages and nothing else.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::error::Departure;
use super::job::JobId;
use super::protocol::{Frame, MAX_VALUE, VERSION};

/// The table, the fence and the departures of one job.
#[derive(Debug)]
pub struct Server {
    job: JobId,
    table: HashMap<String, Vec<u8>>,
    /// Ranks that asked for a key before it was put.
    waiting: HashMap<String, Vec<u32>>,
    ranks: Vec<RankState>,
    /// Ranks that have reached the fence after `fences_done`.
    fence_arrived: u32,
    fences_done: u64,
}

#[derive(Clone, Debug, Default)]
struct RankState {
    /// Number of fences that it has reached.
    fences: u64,
    gone: Option<Departure>,
}

/// Frames to send, each with the rank that is to get it.
pub type Outgoing = Vec<(u32, Frame)>;

impl Server {
    /// Returns a server for `size` ranks of this job.
    pub fn new(job: JobId, size: u32) -> Self {
        Self {
            job,
            table: HashMap::new(),
            waiting: HashMap::new(),
            ranks: vec![RankState::default(); size as usize],
            fence_arrived: 0,
            fences_done: 0,
        }
    }

    /// Returns the way in which a rank has left, if it has.
    pub fn departure(&self, rank: u32) -> Option<Departure> {
        self.ranks.get(rank as usize)?.gone
    }

    /// Returns the departures that the other ranks were told of.
    pub fn departures(&self) -> impl Iterator<Item = Frame> {
        let gone = (0..).zip(&self.ranks).filter_map(|(rank, state)| Some((rank, state.gone?)));
        gone.map(|(rank, how)| Frame::Gone { rank, how })
    }

    /// Returns `true` if all ranks have left.
    pub fn have_all_left(&self) -> bool {
        self.ranks.iter().all(|state| state.gone.is_some())
    }

    /// Notes that these ranks will not come, and tells the others all of them: an operation waits
    /// for its own peer.
    pub fn lost(&mut self, missing: &[u32], how: Departure) -> Outgoing {
        for &rank in missing {
            if let Some(state) = self.ranks.get_mut(rank as usize) {
                state.gone.get_or_insert(how);
            }
        }
        let frames = missing.chunks(MAX_VALUE / 4);
        let frames = frames.map(|ranks| Frame::Lost { ranks: ranks.into(), how });
        frames.flat_map(|frame| self.to_others(missing[0], &frame)).collect()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        // The number came from a u32.
        u32::try_from(self.ranks.len()).unwrap_or(u32::MAX)
    }

    /// Returns the frame that a rank must find in its socket when it starts.
    pub fn hello(&self, rank: u32) -> Frame {
        Frame::Hello { version: VERSION, rank, size: self.size(), job: self.job.clone() }
    }

    /// Handles the bytes of one frame of a rank.
    pub fn receive(&mut self, rank: u32, bytes: &[u8]) -> Outgoing {
        // As in `handle`: a rank that is gone cannot be told that its frame was bad.
        if self.ranks.get(rank as usize).is_none_or(|state| state.gone.is_some()) {
            return Outgoing::new();
        }
        match Frame::decode(bytes) {
            Ok(frame) => self.handle(rank, frame),
            Err(bad) => self.refuse(rank, format!("rank {rank} sent a bad frame: {bad}")),
        }
    }

    /// Handles one frame of a rank. Frames of a rank that is gone, or never came, are ignored.
    pub fn handle(&mut self, rank: u32, frame: Frame) -> Outgoing {
        match self.ranks.get(rank as usize) {
            Some(state) if state.gone.is_none() => {}
            // Values that it put before its end stay; no frame may follow.
            _ => return Vec::new(),
        }
        match frame {
            Frame::Put { key, value } => self.put(rank, key, value),
            Frame::Get { key } => self.get(rank, key),
            Frame::Fence { number } => self.fence(rank, number),
            Frame::Finished => self.departed(rank, Departure::Finished),
            Frame::Hello { .. }
            | Frame::Value { .. }
            | Frame::Missing { .. }
            | Frame::FenceDone { .. }
            | Frame::Gone { .. }
            | Frame::Lost { .. }
            | Frame::Refused { .. } => {
                self.refuse(rank, format!("rank {rank} sent a frame that only the store sends"))
            }
        }
    }

    /// Notes that a rank has left, and tells the others. Only the first departure counts, so a rank
    /// that finished and then exits is reported once. A rank that finished and is then killed is
    /// reported again, because its memory is lost.
    pub fn departed(&mut self, rank: u32, how: Departure) -> Outgoing {
        let Some(state) = self.ranks.get_mut(rank as usize) else {
            return Vec::new();
        };
        match (state.gone, how) {
            (None, _) | (Some(Departure::Finished), Departure::Killed(_)) => state.gone = Some(how),
            (Some(_), _) => return Vec::new(),
        }
        for waiting in self.waiting.values_mut() {
            waiting.retain(|waiter| *waiter != rank);
        }
        self.to_others(rank, &Frame::Gone { rank, how })
    }

    fn put(&mut self, rank: u32, key: String, value: Vec<u8>) -> Outgoing {
        match self.table.entry(key) {
            Entry::Occupied(entry) if *entry.get() == value => Vec::new(),
            Entry::Occupied(entry) => {
                let why = format!(
                    "rank {rank} put a second value under the key {:?}; a key is written once",
                    entry.key()
                );
                self.refuse(rank, why)
            }
            Entry::Vacant(entry) => {
                let waiters = self.waiting.remove(entry.key()).unwrap_or_default();
                let answer = Frame::Value { key: entry.key().clone(), value: value.clone() };
                entry.insert(value);
                waiters.into_iter().map(|waiter| (waiter, answer.clone())).collect()
            }
        }
    }

    fn get(&mut self, rank: u32, key: String) -> Outgoing {
        if let Some(value) = self.table.get(&key) {
            return vec![(rank, Frame::Value { value: value.clone(), key })];
        }
        // A client asks once.
        self.waiting.entry(key.clone()).or_default().push(rank);
        vec![(rank, Frame::Missing { key })]
    }

    fn fence(&mut self, rank: u32, number: u64) -> Outgoing {
        let state = &mut self.ranks[rank as usize];
        // A rank may reach only the next fence, after the previous one has completed.
        if state.fences != self.fences_done || number != state.fences + 1 {
            let why = format!("rank {rank} entered fence {number} out of turn");
            return self.refuse(rank, why);
        }
        state.fences = number;
        self.fence_arrived += 1;
        if self.fence_arrived < self.size() {
            return Vec::new();
        }
        self.fence_arrived = 0;
        self.fences_done = number;
        (0..self.size()).map(|to| (to, Frame::FenceDone { number })).collect()
    }

    fn refuse(&mut self, rank: u32, why: String) -> Outgoing {
        let mut outgoing = self.departed(rank, Departure::Misbehaved);
        outgoing.push((rank, Frame::Refused { why }));
        outgoing
    }

    fn to_others(&self, from: u32, frame: &Frame) -> Outgoing {
        (0..self.size())
            .filter(|to| *to != from && self.ranks[*to as usize].gone.is_none())
            .map(|to| (to, frame.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(size: u32) -> Server {
        Server::new(JobId::from_bytes([7; 16]), size)
    }

    fn put(key: &str, value: &[u8]) -> Frame {
        Frame::Put { key: key.into(), value: value.into() }
    }

    fn get(key: &str) -> Frame {
        Frame::Get { key: key.into() }
    }

    fn value(key: &str, value: &[u8]) -> Frame {
        Frame::Value { key: key.into(), value: value.into() }
    }

    fn missing(key: &str) -> Frame {
        Frame::Missing { key: key.into() }
    }

    fn is_refused(outgoing: &Outgoing, rank: u32) -> bool {
        outgoing.iter().any(|(to, frame)| *to == rank && matches!(frame, Frame::Refused { .. }))
    }

    #[test]
    fn a_value_that_is_there_is_answered_at_once() {
        let mut server = server(2);
        assert_eq!(server.handle(0, put("a", b"1")), []);
        assert_eq!(server.handle(1, get("a")), [(1, value("a", b"1"))]);
        assert_eq!(server.handle(0, get("a")), [(0, value("a", b"1"))]);
    }

    #[test]
    fn a_value_that_is_not_there_yet_is_answered_once_when_it_is_put() {
        let mut server = server(3);
        assert_eq!(server.handle(1, get("a")), [(1, missing("a"))]);
        assert_eq!(server.handle(2, get("a")), [(2, missing("a"))]);
        assert_eq!(server.handle(0, put("b", b"no")), []);
        assert_eq!(
            server.handle(0, put("a", b"1")),
            [(1, value("a", b"1")), (2, value("a", b"1"))]
        );
        assert_eq!(server.handle(0, put("a", b"1")), [], "no rank waits any more");
    }

    #[test]
    fn a_key_is_written_once() {
        let mut server = server(2);
        assert_eq!(server.handle(0, put("a", b"1")), []);
        assert_eq!(server.handle(1, put("a", b"1")), [], "the same value changes nothing");
        assert!(is_refused(&server.handle(1, put("a", b"2")), 1));
        assert_eq!(server.handle(0, get("a")), [(0, value("a", b"1"))]);
    }

    #[test]
    fn a_fence_opens_when_the_last_rank_arrives_and_can_be_used_again() {
        let mut server = server(3);
        for number in 1..=3 {
            assert_eq!(server.handle(2, Frame::Fence { number }), []);
            assert_eq!(server.handle(0, Frame::Fence { number }), []);
            let done = Frame::FenceDone { number };
            assert_eq!(
                server.handle(1, Frame::Fence { number }),
                [(0, done.clone()), (1, done.clone()), (2, done)]
            );
        }
    }

    #[test]
    fn a_fence_out_of_turn_is_refused_and_the_others_are_told() {
        for number in [0, 2, u64::MAX] {
            let mut server = server(2);
            let outgoing = server.handle(0, Frame::Fence { number });
            assert!(is_refused(&outgoing, 0));
            assert!(outgoing.contains(&(1, Frame::Gone { rank: 0, how: Departure::Misbehaved })));
        }
        let mut server = server(2);
        assert_eq!(server.handle(0, Frame::Fence { number: 1 }), []);
        assert!(is_refused(&server.handle(0, Frame::Fence { number: 1 }), 0), "twice");
    }

    #[test]
    fn a_departure_is_told_once_to_those_who_remain() {
        let mut server = server(3);
        let gone = |rank, how| Frame::Gone { rank, how };
        assert_eq!(
            server.departed(1, Departure::Killed(9)),
            [(0, gone(1, Departure::Killed(9))), (2, gone(1, Departure::Killed(9)))]
        );
        assert_eq!(server.departed(1, Departure::Disconnected), []);
        assert_eq!(
            server.handle(0, Frame::Finished),
            [(2, gone(0, Departure::Finished))],
            "rank 1 is told nothing any more"
        );
        assert_eq!(server.departed(0, Departure::Exited(0)), []);
    }

    #[test]
    fn all_ranks_that_have_not_come_are_told_to_each_that_has() {
        let mut server = server(20_004);
        let late: Vec<u32> = (1..20_001).collect();
        let told = server.lost(&late, Departure::NeverCame);
        for to in [0, 20_001, 20_003] {
            let frames = told.iter().filter(|(rank, _)| *rank == to).map(|(_, frame)| frame);
            let frames: Vec<_> = frames.map(|it| Frame::decode(&it.encode()).unwrap()).collect();
            let ranks = frames.iter().flat_map(|frame| match frame {
                Frame::Lost { ranks, how: Departure::NeverCame } => ranks.to_vec(),
                other => panic!("{other:?}"),
            });
            assert_eq!((frames.len(), ranks.collect::<Vec<_>>()), (2, late.clone()));
        }
        assert!(!told.iter().any(|(rank, _)| late.contains(rank)));
        assert_eq!(server.lost(&[], Departure::NeverCame), []);
    }

    #[test]
    fn a_rank_killed_after_it_finished_is_reported_again() {
        let mut server = server(2);
        server.handle(0, Frame::Finished);
        let how = Departure::Killed(11);
        assert_eq!(server.departed(0, how), [(1, Frame::Gone { rank: 0, how })]);
    }

    #[test]
    fn what_a_rank_put_outlives_it() {
        let mut server = server(2);
        server.handle(0, put("a", b"1"));
        server.handle(0, Frame::Finished);
        assert_eq!(server.handle(0, put("b", b"2")), [], "ignored");
        assert_eq!(server.handle(1, get("a")), [(1, value("a", b"1"))]);
        assert_eq!(server.handle(1, get("b")), [(1, missing("b"))]);
    }

    #[test]
    fn a_rank_that_has_gone_is_sent_no_value() {
        let mut server = server(2);
        server.handle(1, get("a"));
        server.departed(1, Departure::Disconnected);
        assert_eq!(server.handle(0, put("a", b"1")), []);
    }

    #[test]
    fn bad_bytes_cost_their_sender_its_place_and_name_it() {
        let mut server = server(2);
        let outgoing = server.receive(1, &[99]);
        let reason = outgoing.iter().find_map(|(to, frame)| match frame {
            Frame::Refused { why } => Some((*to, why.as_str())),
            _ => None,
        });
        assert_eq!(
            reason,
            Some((1, "rank 1 sent a bad frame: its kind is 99, which no frame has"))
        );
        assert!(outgoing.contains(&(0, Frame::Gone { rank: 1, how: Departure::Misbehaved })));
        assert_eq!(server.receive(1, &Frame::Finished.encode()), [], "it is heard no more");
    }

    #[test]
    fn a_launchers_frame_from_a_rank_is_refused() {
        let mut server = server(1);
        let hello = server.hello(0);
        assert!(is_refused(&server.handle(0, hello), 0));
    }

    #[test]
    fn a_rank_that_does_not_exist_is_ignored() {
        let mut server = server(1);
        assert_eq!(server.handle(5, put("a", b"1")), []);
        assert_eq!(server.departed(5, Departure::Finished), []);
    }
}
