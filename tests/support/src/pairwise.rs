//! All pairs of the values of several parameters, in few rows.

use carrack::Matching;
use rand::{Rng, rngs::SmallRng};
use std::collections::HashSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Am,
    Send(Matching),
}

pub const OPERATIONS: [Operation; 5] = [
    Operation::Am,
    Operation::Send(Matching::None),
    Operation::Send(Matching::RankOnly),
    Operation::Send(Matching::TagOnly),
    Operation::Send(Matching::RankTag),
];

/// Returns rows, one value for each parameter, such that each pair of values of two parameters is
/// in some row. `sizes` says how many values each parameter has.
pub fn rows(sizes: &[usize], rng: &mut SmallRng) -> Vec<Vec<usize>> {
    let mut open: HashSet<(usize, usize, usize, usize)> = HashSet::new();
    for (one, &ones) in sizes.iter().enumerate() {
        for (other, &others) in sizes.iter().enumerate().skip(one + 1) {
            open.extend((0..ones).flat_map(|a| (0..others).map(move |b| (one, a, other, b))));
        }
    }
    let mut rows = Vec::new();
    while let Some(&(one, a, other, b)) = open.iter().next() {
        let candidate = |rng: &mut SmallRng| {
            let mut row: Vec<usize> = sizes.iter().map(|&size| rng.random_range(0..size)).collect();
            (row[one], row[other]) = (a, b);
            row
        };
        let covered = |row: &[usize]| {
            open.iter().filter(|&&(one, a, other, b)| row[one] == a && row[other] == b).count()
        };
        let best = (0..30).map(|_| candidate(rng)).max_by_key(|row| covered(row)).unwrap();
        open.retain(|&(one, a, other, b)| !(best[one] == a && best[other] == b));
        rows.push(best);
    }
    rows
}

#[test]
fn every_pair_of_values_is_in_some_row() {
    let sizes = [3, 4, 2, 5];
    let rows = rows(&sizes, &mut super::rng());
    for one in 0..sizes.len() {
        for other in one + 1..sizes.len() {
            for a in 0..sizes[one] {
                for b in 0..sizes[other] {
                    assert!(rows.iter().any(|row| row[one] == a && row[other] == b));
                }
            }
        }
    }
    assert!(rows.len() < 3 * 4 * 2 * 5);
}
