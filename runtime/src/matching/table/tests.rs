use super::*;
use crate::names::{Matching, Rank, Tag};
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;

fn key(policy: Matching, rank: u32, tag: u64) -> MatchKey {
    MatchKey::new(policy, Rank(rank), Tag(tag))
}

#[test]
fn policies_never_collide() {
    let table: Table<u32, u32> = Table::new();
    assert!(table.meet_b(key(Matching::RankOnly, 5, 9), 1, |a, b| (a, *b), |a| a).is_err());
    assert!(table.meet_a(key(Matching::TagOnly, 9, 5), |place| *place = 2).is_err());
    assert!(table.meet_a(key(Matching::None, 0, 0), |place| *place = 3).is_err());
    assert_eq!(table.meet_a(key(Matching::RankOnly, 5, 1), |place| *place = 4), Ok(1));
    assert_eq!(table.count(), (0, 2));
}

#[test]
fn a_table_that_held_very_many_gives_their_places_back() {
    let table: Table<u64, u64> = Table::new();
    let keys = || (0..400_000_u64).map(|tag| key(Matching::RankTag, 1, tag % 100_000));
    for (value, key) in (0..).zip(keys()) {
        assert!(table.meet_b(key, value, |_, _| (), |value| value).is_err());
    }
    assert_eq!(table.count(), (400_000, 0));
    for (value, key) in (0..).zip(keys()) {
        assert_eq!(table.meet_a(key, |place| *place = 0), Ok(value));
    }
    assert_eq!(table.count(), (0, 0));
    for shard in table.shards.iter() {
        assert!(shard.lock().places.capacity() <= SPARE);
    }
}

/// A receive's buffer and completion object are freed when it has been taken, not when its
/// place is used again.
#[test]
fn a_place_keeps_nothing_of_what_was_in_it() {
    let table: Table<Arc<()>, Option<Arc<()>>> = Table::new();
    let (key, held) = (key(Matching::RankTag, 1, 1), Arc::new(()));
    for _ in 0..3 {
        let kept = table.meet_a(key, |place| *place = Some(held.clone()));
        let stamp = kept.unwrap_err();
        assert_eq!(Arc::strong_count(&held), 2);
        drop(table.pluck_b(key, stamp));
        assert_eq!(Arc::strong_count(&held), 1);
        assert!(table.meet_b(key, held.clone(), |_, _| (), |message| message).is_err());
        assert_eq!(Arc::strong_count(&held), 2);
        drop(table.meet_a(key, |_| ()).unwrap());
        assert_eq!(Arc::strong_count(&held), 1);
    }
}

proptest! {
    /// The model is two lists, searched from the front.
    #[test]
    fn values_of_a_key_meet_in_order(
        steps in vec((0_u8..9, 0_u8..4, 0_u32..3, 0_u64..40), 0..1000),
    ) {
        let table: Table<usize, usize> = Table::new();
        let mut model = (Vec::<(MatchKey, usize)>::new(), Vec::<(MatchKey, usize)>::new());
        let mut stamps = Vec::new();
        for (at, (what, policy, rank, tag)) in steps.into_iter().enumerate() {
            let key = key(Matching::from_code(policy).unwrap(), rank, tag);
            if what == 6 {
                // Several messages come at once.
                let most = rank as usize + 1;
                let mut run = Vec::new();
                let count = table.take_run(key, |at, b| {
                    let takes = at < most;
                    takes.then(|| run.push((at, *b)));
                    takes
                });
                let of_key = model.1.iter().filter(|(other, _)| *other == key);
                let expected: Vec<_> =
                    of_key.map(|&(_, at)| at).take(most).enumerate().collect();
                prop_assert_eq!(&run, &expected);
                prop_assert_eq!(count, expected.len());
                model.1.retain(|&(_, at)| !expected.iter().any(|&(_, taken)| taken == at));
                continue;
            }
            if what == 8 {
                // A message comes alone, and takes what it meets or leaves it.
                let (mut met, takes) = (None, rank > 0);
                let taken = table.take_first(key, |b| {
                    met = Some(*b);
                    takes
                });
                let first = model.1.iter().position(|(other, _)| *other == key);
                prop_assert_eq!(met, first.map(|first| model.1[first].1));
                prop_assert_eq!(taken, takes && first.is_some());
                if let Some(first) = first.filter(|_| takes) {
                    model.1.remove(first);
                }
                continue;
            }
            if what == 7 {
                // A value that waits, or has waited, is taken out.
                let stamped = stamps.get(tag as usize * stamps.len() / 40);
                let Some(&(key, stamp, value)) = stamped else { continue };
                let there = model.1.iter().position(|&other| other == (key, value));
                let expected = there.map(|there| model.1.remove(there).1);
                prop_assert_eq!(table.pluck_b(key, stamp), expected);
                continue;
            }
            let is_a = what < 4;
            let (a, b) = (&mut model.0, &mut model.1);
            let (mine, theirs) = if is_a { (a, b) } else { (b, a) };
            let expected = match theirs.iter().position(|(other, _)| *other == key) {
                Some(found) => Some(theirs.remove(found).1),
                None => { mine.push((key, at)); None }
            };
            let got = if is_a {
                table.meet_b(key, at, |_, b| *b, |a| a)
            } else {
                table.meet_a(key, |place| *place = at)
            };
            if let (false, Err(stamp)) = (is_a, got) {
                stamps.push((key, stamp, at));
            }
            prop_assert_eq!(got.ok(), expected);
            let first = model.0.iter().find(|(other, _)| *other == key).map(|&(_, at)| at);
            prop_assert_eq!(table.peek_a(key, |&at| at), first);
        }
        prop_assert_eq!(table.count(), (model.0.len(), model.1.len()));
        let mut left = table.take_b(|key| key.is_of(Rank(1)));
        left.sort_unstable();
        let of_rank = model.1.iter().filter(|(key, _)| key.is_of(Rank(1)));
        let expected: Vec<usize> = of_rank.map(|(_, at)| *at).collect();
        prop_assert_eq!(left, expected);
    }
}
