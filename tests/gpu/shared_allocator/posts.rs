//! Operations on such memory: as on any other region.

use super::{BLOCK, check, on_one_gpu};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{
    Gpus, Kind, Went, filled, get, heard, holds, put, receive, registered, send, told,
};
use crate::support::ranks::{Ranks, Role};
use crate::support::words::are_all;
use carrack::alloc::SharedRegion;
use carrack::{Buffer, Rank, Tag};

#[test]
fn it_is_sent_from_received_into_put_to_and_got_from_as_any_memory() {
    let _watchdog = Watchdog::over("posts");
    Ranks::start("shared_allocator::posts", 3, &[]).succeed();
}

const LEN: usize = BLOCK + 4097;
const LENGTHS: [usize; 5] = [1, 8, 8193, 100_001, LEN - 100];

/// Runs the role: rank 0 leads, and rank 1 has what it allocates, too. Rank 2 has it as well, and
/// has its remote keys from both.
pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let pool = allocator.pool(4 * BLOCK).unwrap();
    let first = pool.allocate(1000).unwrap();
    for (turn, shared) in
        [allocator.allocate(LEN).unwrap(), pool.allocate(LEN).unwrap()].into_iter().enumerate()
    {
        let salt = 100 * turn as u64;
        between(role, &gpus, &runtime, &shared, salt);
        // The leader registers it, and so does another one, whose registration goes by its own
        // help.
        for owner in [0, 1] {
            let name = format!("{turn} of {owner}");
            if role.rank == owner {
                let mr = registered(role, &runtime, &name, &shared);
                heard(role, &runtime, &format!("{name} is done"), 2);
                drop(mr);
                check(&shared.subregion(50, 100_001).unwrap(), salt + 7);
                check(&shared.subregion(LEN - 40, 40).unwrap(), salt + 8);
            } else if role.rank == 2 {
                let rmr = told(role, &name, owner);
                let ways = [
                    put(&runtime, || Kind::Plain(0).full(&gpus, 100_001, salt + 7), &rmr, 50),
                    put(&runtime, || filled(40, salt + 8).into(), &rmr, LEN as u64 - 40),
                    get(&runtime, || Kind::Plain(0).empty(&gpus, 40), &rmr, LEN as u64 - 40).0,
                ];
                let is_leaders = owner == 0;
                assert!(ways.iter().all(|way| (*way == Went::Mapped) == is_leaders), "{ways:?}");
                let (_, got) = get(&runtime, || Kind::Host.empty(&gpus, 100_001), &rmr, 50);
                holds(&got, 100_001, salt + 7);
                role.says(&format!("{name} is done"));
            }
            runtime.barrier().unwrap();
        }
    }
    drop(first);
    role.meet("over", &runtime, 0..3);
}

/// Sends between all kinds of memory and this one, both ways, with bytes around that stay as they
/// are.
fn between(role: &Role, gpus: &Gpus, runtime: &carrack::Runtime, shared: &SharedRegion, salt: u64) {
    let kinds = [Kind::Host, Kind::Pinned, Kind::Plain(1), Kind::Shareable(0)];
    for (from, to) in [(0, 1), (1, 0), (2, 1)] {
        for (at, kind) in kinds.into_iter().enumerate() {
            for len in LENGTHS {
                let salt = salt + 1000 * at as u64 + len as u64;
                // Into it, and out of it.
                if role.rank == to {
                    shared.whole().write(&[0xee; LEN]).unwrap();
                    let slice: Buffer = shared.slice(50, len).unwrap().into();
                    let status =
                        receive(runtime, Rank(from), slice, Tag(salt)).unwrap().ok().unwrap();
                    assert_eq!(status.size, len);
                    holds(&status.buffer, len, salt);
                    let bytes = shared.whole().to_vec().unwrap();
                    assert!(are_all(&[&bytes[..50], &bytes[50 + len..]], 0xee), "{kind:?} {len}");
                    send(runtime, Rank(from), shared.slice(50, len).unwrap(), Tag(salt))
                        .unwrap()
                        .ok()
                        .unwrap();
                } else if role.rank == from {
                    send(runtime, Rank(to), kind.full(gpus, len, salt), Tag(salt))
                        .unwrap()
                        .ok()
                        .unwrap();
                    let status = receive(runtime, Rank(to), kind.empty(gpus, len), Tag(salt))
                        .unwrap()
                        .ok()
                        .unwrap();
                    holds(&status.buffer, len, salt);
                }
            }
        }
        runtime.barrier().unwrap();
    }
}
