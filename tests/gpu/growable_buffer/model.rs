//! Random growing, shrinking, taking and dropping of parts, compared with a model of each part.

use super::{STRIPE, buffer, check, fill};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, are_real};
use carrack::alloc::GrowableError;
use carrack::region::Region;
use rand::{Rng, SeedableRng, rngs::SmallRng};

const MOST: usize = 7;

/// Part in use, the last stripe that it reaches into, and the bytes written there.
struct Held {
    region: Region,
    last: usize,
    salt: u64,
}

#[test]
fn whatever_is_called_in_whatever_order_is_done_or_refused_as_a_list_of_stripes_says() {
    let _watchdog = Watchdog::over("model");
    let gpus = Gpus::here();
    for seed in 0..if are_real() { 3 } else { 12 } {
        steps(&gpus, seed);
    }
    if let Some(fake) = &gpus.fake {
        let counters = fake.counters();
        assert_eq!(
            (counters.allocs - counters.frees, counters.reservations - counters.releases),
            (0, 0)
        );
    }
}

fn steps(gpus: &Gpus, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut buffer = buffer(gpus, MOST);
    let addr = buffer.addr();
    // What was written at the end of each stripe; parts are of their beginnings.
    let mut stripes: Vec<u64> = Vec::new();
    let mut held: Vec<Held> = Vec::new();
    for salt in 1000 * seed..1000 * seed + 60 {
        let len = random.random_range(0..=MOST * STRIPE + STRIPE / 2);
        let wanted = len.div_ceil(STRIPE);
        match random.random_range(0..10) {
            0..3 => match buffer.grow_to(len) {
                Ok(()) => {
                    assert!(len <= MOST * STRIPE);
                    for at in stripes.len()..wanted {
                        fill(&end_of(&buffer, at), salt + at as u64);
                        stripes.push(salt + at as u64);
                    }
                }
                Err(GrowableError::Beyond { .. }) => assert!(len > MOST * STRIPE),
                Err(other) => panic!("{other}"),
            },
            3..6 => {
                let highest = held.iter().map(|one| one.last + 1).max().unwrap_or(0);
                match buffer.shrink_to(len) {
                    Ok(()) => {
                        assert!(
                            highest <= wanted || wanted >= stripes.len(),
                            "it has shrunk under a part"
                        );
                        stripes.truncate(wanted);
                    }
                    Err(GrowableError::InUse { used, .. }) => {
                        assert!(highest > wanted);
                        assert_eq!(used, highest * STRIPE);
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            6..8 if !stripes.is_empty() => {
                let at = random.random_range(0..stripes.len());
                let region = buffer.pieces(at * STRIPE, 1 + len % (STRIPE / 2)).unwrap().remove(0);
                if held.iter().all(|one| one.last != at) {
                    fill(&region, salt);
                    held.push(Held { region, last: at, salt });
                }
            }
            _ if !held.is_empty() => drop(held.swap_remove(random.random_range(0..held.len()))),
            _ => {}
        }
        assert_eq!((buffer.len(), buffer.addr()), (stripes.len() * STRIPE, addr));
        for one in &held {
            assert_eq!(one.region.addr(), addr + one.last * STRIPE);
            check(&one.region, one.salt);
        }
        for (at, salt) in stripes.iter().enumerate() {
            check(&end_of(&buffer, at), *salt);
        }
    }
}

/// Returns the last bytes of a stripe.
fn end_of(buffer: &carrack::alloc::GrowableBuffer, at: usize) -> Region {
    buffer.region((at + 1) * STRIPE - 5003, 5003).unwrap()
}
