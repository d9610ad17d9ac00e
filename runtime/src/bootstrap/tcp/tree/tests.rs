//! All ranks of a job in one thread, their frames in whatever order the links allow.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

/// A job without I/O: each link a queue.
struct Job {
    trees: Vec<Tree>,
    links: BTreeMap<(usize, usize), VecDeque<Envelope>>,
    /// What each rank was told, and the values that each has got.
    fences: Vec<u64>,
    values: Vec<HashMap<String, Vec<u8>>>,
    gone: Vec<Vec<(u32, Departure)>>,
    refused: Vec<bool>,
}

impl Job {
    fn new(size: u32) -> Self {
        let of = usize::try_from(size).unwrap();
        let trees = (0..size).map(|rank| Tree::new(rank, rank, size)).collect();
        let mut job = Self {
            trees,
            links: BTreeMap::new(),
            fences: vec![0; of],
            values: vec![HashMap::new(); of],
            gone: vec![Vec::new(); of],
            refused: vec![false; of],
        };
        for place in 1..size {
            let above = above(place).unwrap() as usize;
            let at = job.trees[above].vacancy(place).unwrap();
            let out = job.trees[above].attach(at, place);
            job.send(above, out);
        }
        job
    }

    fn send(&mut self, from: usize, out: Outgoing) {
        for (side, envelope) in out {
            let to = match side {
                Side::Own => {
                    self.told(from, envelope);
                    continue;
                }
                Side::Above => above(from as u32).unwrap() as usize,
                Side::Below(at) => from * ARITY as usize + 1 + at,
            };
            self.links.entry((from, to)).or_default().push_back(envelope);
        }
    }

    fn told(&mut self, rank: usize, envelope: Envelope) {
        match envelope.frame {
            Frame::Value { key, value } => {
                let twice = self.values[rank].insert(key, value);
                assert_eq!(twice, None, "answered twice");
            }
            Frame::FenceDone { number } => self.fences[rank] = number,
            Frame::Gone { rank: lost, how } => self.gone[rank].push((lost, how)),
            Frame::Refused { .. } => self.refused[rank] = true,
            other => panic!("{other:?} is for no rank"),
        }
    }

    fn say(&mut self, rank: usize, frame: Frame) {
        let out =
            self.trees[rank].handle(Side::Own, Envelope { rank: rank as u32, frame }).unwrap();
        self.send(rank, out);
    }

    /// Delivers one frame of some link. False if there is none.
    fn step(&mut self, which: Option<prop::sample::Index>) -> bool {
        let busy: Vec<_> = self
            .links
            .iter()
            .filter(|(_, frames)| !frames.is_empty())
            .map(|(link, _)| *link)
            .collect();
        if busy.is_empty() {
            return false;
        }
        let (from, to) = which.map_or(busy[0], |which| *which.get(&busy));
        let envelope = self.links.get_mut(&(from, to)).unwrap().pop_front().unwrap();
        let side =
            if from < to { Side::Above } else { Side::Below(from - to * ARITY as usize - 1) };
        let out = self.trees[to].handle(side, envelope).unwrap();
        self.send(to, out);
        true
    }

    fn settle(&mut self, which: Option<prop::sample::Index>) {
        while self.step(which) {}
    }
}

#[derive(Clone, Debug)]
enum Act {
    Put(u8),
    Get(u8),
    Fence,
    Deliver(prop::sample::Index),
}

fn act() -> impl Strategy<Value = Act> {
    let index = any::<prop::sample::Index>();
    prop_oneof![
        2 => (0..20_u8).prop_map(Act::Put),
        2 => (0..20_u8).prop_map(Act::Get),
        2 => Just(Act::Fence),
        6 => index.prop_map(Act::Deliver),
    ]
}

fn value(key: u8) -> Vec<u8> {
    vec![key; usize::from(key)]
}

proptest! {
    #[test]
    fn what_was_put_is_got_and_no_fence_opens_before_all_have_reached_it(
        size in 1..40_u32,
        acts in proptest::collection::vec((any::<prop::sample::Index>(), act()), 0..300),
        which: prop::sample::Index,
    ) {
        let mut job = Job::new(size);
        let ranks = size as usize;
        let (mut reached, mut put) = (vec![0; ranks], HashSet::new());
        let mut asked = vec![HashSet::new(); ranks];
        for (rank, act) in acts {
            let rank = rank.index(ranks);
            match act {
                Act::Put(key) => {
                    put.insert(key);
                    job.say(rank, Frame::Put { key: key.to_string(), value: value(key) });
                }
                Act::Get(key) => {
                    if asked[rank].insert(key) {
                        job.say(rank, Frame::Get { key: key.to_string() });
                    }
                }
                Act::Fence if reached[rank] == job.fences[rank] => {
                    reached[rank] += 1;
                    job.say(rank, Frame::Fence { number: reached[rank] });
                }
                Act::Fence => {}
                Act::Deliver(which) => {
                    job.step(Some(which));
                }
            }
            let open = job.fences.iter().max().unwrap();
            prop_assert!(reached.iter().all(|reached| reached >= open));
        }
        job.settle(Some(which));
        let all = *reached.iter().min().unwrap();
        prop_assert!(job.fences.iter().all(|done| *done == all), "{:?} of {:?}", job.fences, reached);
        for (rank, asked) in asked.iter().enumerate() {
            for key in asked {
                let expected = put.contains(key).then(|| value(*key));
                prop_assert_eq!(job.values[rank].get(&key.to_string()).cloned(), expected);
            }
        }
        // And all leave, the top last of all.
        for rank in 0..ranks {
            prop_assert!(!job.trees[0].is_over());
            job.say(rank, Frame::Finished);
            job.settle(Some(which));
        }
        prop_assert!(job.trees.iter().all(Tree::is_over));
        let told = job.gone.iter().enumerate().all(|(rank, gone)| rank == 0 || gone == &[(0, Departure::Finished)]);
        prop_assert!(told, "{:?}", job.gone);
    }

    #[test]
    fn a_rank_that_is_cut_off_is_told_to_all_that_are_left_and_all_can_leave(
        size in 2..60_u32, victim: prop::sample::Index, which: prop::sample::Index,
    ) {
        let mut job = Job::new(size);
        let victim = victim.index(size as usize - 1) + 1;
        let above = above(victim as u32).unwrap() as usize;
        let side = Side::Below(victim - above * ARITY as usize - 1);
        let out = job.trees[above].cut(side, 0, Departure::Disconnected);
        job.send(above, out);
        for below in 0..job.trees[victim].places_below() {
            let below = victim * ARITY as usize + 1 + below;
            let out = job.trees[below].cut(Side::Above, victim as u32, Departure::Disconnected);
            job.send(below, out);
        }
        job.settle(Some(which));
        for rank in (0..size as usize).filter(|rank| *rank != victim) {
            prop_assert_eq!(&job.gone[rank], &[(victim as u32, Departure::Disconnected)]);
            job.say(rank, Frame::Finished);
        }
        job.settle(Some(which));
        prop_assert!((0..size as usize).all(|rank| rank == victim || job.trees[rank].is_over()));
    }

    #[test]
    fn frames_of_any_kind_from_any_side_are_an_error_or_harmless(
        place in 0..3_u32,
        frames in proptest::collection::vec((0..4_usize, any::<[u8; 3]>(), any::<u64>()), 0..60),
    ) {
        let mut tree = Tree::new(7, place, 20);
        for at in 0..tree.places_below().min(2) {
            tree.attach(at, 10 + at as u32);
        }
        for (side, [kind, key, rank], number) in frames {
            let side = match side {
                0 => Side::Own,
                1 if place > 0 => Side::Above,
                side if tree.places_below() > side % 2 => Side::Below(side % 2),
                _ => continue,
            };
            let (key, value, number) = (key.to_string(), vec![rank; 3], number % 4);
            let frame = match kind % 8 {
                0 => Frame::Put { key, value },
                1 => Frame::Get { key },
                2 => Frame::Value { key, value },
                3 => Frame::Fence { number },
                4 => Frame::FenceDone { number },
                5 => Frame::Gone { rank: u32::from(rank), how: Departure::Disconnected },
                6 => Frame::Refused { why: key },
                _ => Frame::Finished,
            };
            if tree.handle(side, Envelope { rank: u32::from(rank), frame }).is_err() {
                tree.cut(side, 0, Departure::Misbehaved);
            }
        }
    }
}

#[test]
fn a_second_value_costs_its_rank_its_word_and_nobody_elses() {
    let mut job = Job::new(40);
    let put = |value: &[u8]| Frame::Put { key: "a".into(), value: value.into() };
    job.say(30, put(b"1"));
    job.settle(None);
    job.say(31, put(b"2"));
    job.settle(None);
    assert_eq!(job.refused.iter().filter(|refused| **refused).count(), 1);
    assert!(job.refused[31]);
    assert_eq!(job.gone[5], [(31, Departure::Misbehaved)]);
    job.say(31, Frame::Put { key: "b".into(), value: vec![] });
    job.say(5, Frame::Get { key: "b".into() });
    job.say(5, Frame::Get { key: "a".into() });
    job.settle(None);
    assert_eq!(job.values[5].get("a").unwrap(), b"1");
    assert_eq!(job.values[5].get("b"), None);
}
