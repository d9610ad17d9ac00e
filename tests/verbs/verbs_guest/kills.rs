//! A rank is killed during traffic among three. Operations of the others with it end, and failed
//! ones name it. Operations among the others go on.

use super::course::{Course, Parting};
use super::is_in_guests;
use super::network::LIMIT;
use crate::support::{Watchdog, rng};
use carrack::Rank;
use rand::Rng;

const STEPS: u64 = 100;

#[test]
fn a_rank_that_is_killed_harms_no_other_rank() {
    if !is_in_guests("kills", "1") {
        return;
    }
    let count = std::env::var("TEST_KILLS").map_or(3, |text| text.parse().expect("a number"));
    let _watchdog = Watchdog::patient("kills", LIMIT * (1 + count / 10));
    let mut rng = rng();
    for number in 0..count {
        let (rank, after) = (rng.random_range(0..3), rng.random_range(0..2 * STEPS));
        println!("kill {number}: rank {rank} after {after} steps");
        let parting = Parting::Kill { rank, after };
        Course { ranks: 3, parting, ..Course::of(STEPS) }.start(&[]).succeed_except(Rank(rank));
    }
}
