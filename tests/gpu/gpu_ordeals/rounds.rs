//! Resources that are given back are free again.

use crate::support::Watchdog;
use crate::support::amount;
use crate::support::gpu_ranks::{Gpus, Kind, PATIENCE, filled, get, holds, put, receive, send};
use crate::support::possessions::Possessions;
use crate::support::ranks::{Ranks, Role};
use carrack::region::Region;
use carrack::transports::mem::AllocId;
use carrack::{Rank, RemoteKey, Runtime, Tag};
use std::time::Duration;

/// Rounds of allocating, registering, putting, getting, sending, and releasing all of it.
pub(crate) fn count() -> u64 {
    amount("TEST_ROUNDS", 400, 2000)
}

/// gpu.md, legacy IPC rules 4 and 5. From the middle to the end mappings and descriptors do not
/// become more. With a simulated driver neither do its allocations and openings.
#[test]
fn after_thousands_of_rounds_mappings_and_descriptors_are_what_they_were_in_the_middle() {
    let limit = Duration::from_secs(120 + count() / 20);
    let _watchdog = Watchdog::patient("rounds", limit);
    Ranks::start("gpu_ordeals::rounds", 2, &[count()]).succeed();
}

const LEN: usize = 100_000;
const KINDS: [Kind; 5] =
    [Kind::Plain(0), Kind::Shareable(1), Kind::Pooled(0), Kind::Plain(1), Kind::Shareable(0)];
const WINDOW: Tag = Tag(1);
const MESSAGE: Tag = Tag(2);
const OVER: Tag = Tag(3);

pub(crate) fn rank(role: &Role) {
    let rounds = role.words[0];
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let one = |round| match role.rank {
        0 => uses(&gpus, &runtime, round),
        _ => lends(&gpus, &runtime, round),
    };
    // Threads, streams, packets and what is kept for the next come with the first half.
    let (mut last, mut middle) = (Names::new(), None);
    for round in 0..rounds {
        last = one(round);
        if round == rounds / 2 {
            middle = Some(settled(role, &gpus, &runtime, "middle", &last, None));
        }
    }
    let end = settled(role, &gpus, &runtime, "end", &last, middle.as_ref());
    println!("after {} rounds {middle:?}, after {rounds} {end:?}", rounds / 2);
    role.meet("over", &runtime, 0..2);
}

/// The names of what a round had allocated.
type Names = Vec<(usize, AllocId)>;

fn name(region: &Region) -> (usize, AllocId) {
    (region.addr(), region.id())
}

/// Uses a window of the other rank, and a message into its memory.
fn uses(gpus: &Gpus, runtime: &Runtime, round: u64) -> Names {
    let came = receive(runtime, Rank(1), vec![0; 4000], WINDOW).unwrap().ok().unwrap();
    let rmr = RemoteKey::from_bytes(&came.buffer.to_vec().unwrap()[..came.size]).unwrap();
    let kind = KINDS[round as usize % KINDS.len()];
    assert_eq!(
        put(runtime, || kind.full(gpus, LEN, round), &rmr, 5).why().is_empty(),
        kind.is_mapped()
    );
    let (_, buffer) = get(runtime, || kind.empty(gpus, LEN), &rmr, 5);
    holds(&buffer, LEN, round);
    let region = kind.region(gpus, LEN);
    region.whole().write(&filled(LEN, round + 7)).unwrap();
    let names = vec![name(&region)];
    send(runtime, Rank(1), region.whole(), MESSAGE).unwrap().ok().unwrap();
    drop((region, rmr));
    send(runtime, Rank(1), vec![1], OVER).unwrap().ok().unwrap();
    names
}

fn lends(gpus: &Gpus, runtime: &Runtime, round: u64) -> Names {
    let kind = KINDS[round as usize % KINDS.len()];
    let region = kind.region(gpus, LEN + 10);
    let mr = runtime.register_memory(&region).unwrap();
    send(runtime, Rank(0), mr.remote_key().to_bytes(), WINDOW).unwrap().ok().unwrap();
    let status = receive(runtime, Rank(0), kind.empty(gpus, LEN), MESSAGE).unwrap().ok().unwrap();
    holds(&status.buffer, LEN, round + 7);
    receive(runtime, Rank(0), vec![0; 1], OVER).unwrap().ok().unwrap();
    vec![name(&region)]
}

/// Waits until what the last round had is freed, and this rank has no more than it had; then
/// counts. Memory that others had mapped is freed when they have noticed.
fn settled(
    role: &Role,
    gpus: &Gpus,
    runtime: &Runtime,
    when: &str,
    last: &Names,
    before: Option<&Possessions>,
) -> Possessions {
    let is_freed = || last.iter().all(|name| !gpus.has(*name));
    let is_empty = || {
        let live = Possessions::of_this_process(gpus).live;
        live.is_none_or(|live| live == [0; 3])
    };
    let waited = runtime.wait_for(PATIENCE, || is_freed() && is_empty());
    assert!(waited.is_ok(), "{when}: {:?} and no less", Possessions::of_this_process(gpus));
    if let Some(before) = before {
        let waited =
            runtime.wait_for(PATIENCE, || Possessions::of_this_process(gpus).within(before));
        let now = Possessions::of_this_process(gpus);
        assert!(waited.is_ok(), "{before:?} in the middle, and at the end {now:?}");
    }
    // Neither goes on before both have counted.
    let possessions = Possessions::of_this_process(gpus);
    role.meet(&format!("settled {when}"), runtime, 0..2);
    possessions
}
