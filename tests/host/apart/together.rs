//! Collectives of the two.

use super::{PairedRank, SIZE};
use crate::support::pattern;
use carrack::Rank;

pub(crate) fn meet(me: &PairedRank) {
    let world = me.runtime.world();
    for round in 0..50_u64 {
        me.meet();
        let told = [me.runtime.rank().0 as u8, round as u8];
        let want: Vec<Vec<u8>> = (0..SIZE).map(|rank| vec![rank as u8, round as u8]).collect();
        assert_eq!(me.runtime.allgather(&told).unwrap(), want);
        let root = Rank(round as u32 % SIZE);
        let bytes = pattern(me.seed ^ round, [0, 8, 5000, 100_000][round as usize % 4]);
        let own = if root == me.runtime.rank() { bytes.clone() } else { Vec::new() };
        assert!(world.broadcast(root, &own).unwrap() == bytes, "round {round}: other bytes");
    }
}
