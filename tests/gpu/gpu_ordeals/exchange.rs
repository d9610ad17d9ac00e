//! Exchange between two ranks. One puts to and gets from a window of the other, to the last byte.
//! Both send messages of every kind of memory.

use crate::support::gpu_ranks::{Gpus, Kind, Went, filled, get, heard, holds, put, receive, send};
use crate::support::ranks::Role;
use crate::support::words::{are_all, wrong};
use carrack::region::Region;
use carrack::{Rank, RemoteKey, Runtime, Tag};

/// Bytes of a window.
pub(crate) const LEN: usize = 3 << 20;
/// Parts of it, as odd as they come.
const PARTS: [(usize, usize); 4] = [(1, 8), (4097, 40), (12_345, 100_001), (7, (2 << 20) + 1)];
const POISON: u8 = 0xee;

/// Uses a window as the active rank, with memory of these kinds at this end. Returns by which way
/// each operation went.
pub(crate) fn uses(
    role: &Role,
    runtime: &Runtime,
    gpus: &Gpus,
    window: (&str, &RemoteKey),
    kinds: &[Kind],
) -> Vec<Went> {
    let (name, rmr) = window;
    let (owner, mut ways) = (rmr.owner().0, Vec::new());
    for kind in kinds {
        for (at, len) in PARTS {
            let turn = ways.len() as u64;
            let way = put(runtime, || kind.full(gpus, len, turn), rmr, at as u64);
            role.says(&format!("{name} put {turn}"));
            heard(role, runtime, &format!("{name} filled {turn}"), owner);
            let (back, buffer) = get(runtime, || kind.empty(gpus, len), rmr, at as u64);
            holds(&buffer, len, 1000 + turn);
            role.says(&format!("{name} got {turn}"));
            heard(role, runtime, &format!("{name} cleared {turn}"), owner);
            ways.extend([way, back]);
        }
    }
    ways
}

/// Lends a window to the other rank, and checks that it is written only at the right places.
pub(crate) fn lends(
    role: &Role,
    runtime: &Runtime,
    (name, region): (&str, &Region),
    by: u32,
    kinds: &[Kind],
) {
    let clear = || region.whole().write(&vec![POISON; LEN]).unwrap();
    clear();
    role.says(&format!("{name} is clear"));
    for (number, (at, len)) in kinds.iter().flat_map(|_| PARTS).enumerate() {
        let turn = 2 * number as u64;
        heard(role, runtime, &format!("{name} put {turn}"), by);
        let bytes = region.whole().to_vec().unwrap();
        let (before, rest) = bytes.split_at(at);
        let (part, behind) = rest.split_at(len);
        assert!(are_all(&[before, behind], POISON), "{name}: around {at}+{len}");
        assert_eq!(wrong(part, turn, 0), None, "{name}: {at}+{len}");
        region.slice(at, len).unwrap().write(&filled(len, 1000 + turn)).unwrap();
        role.says(&format!("{name} filled {turn}"));
        heard(role, runtime, &format!("{name} got {turn}"), by);
        clear();
        role.says(&format!("{name} cleared {turn}"));
    }
}

/// Messages from memory of each of these kinds into memory of each, in both directions.
pub(crate) fn messages(role: &Role, runtime: &Runtime, gpus: &Gpus, kinds: &[Kind]) {
    let mut salt = 0;
    for sender in 0..2 {
        for (from, to) in kinds.iter().flat_map(|from| kinds.iter().map(move |to| (from, to))) {
            for len in [1, 8193, 300_001] {
                salt += 1;
                if role.rank == sender {
                    let sent =
                        send(runtime, Rank(1 - sender), from.full(gpus, len, salt), Tag(salt));
                    assert_eq!(sent.unwrap().ok().unwrap().size, len, "{from:?} to {to:?}");
                } else {
                    let got = receive(runtime, Rank(sender), to.empty(gpus, len + 5), Tag(salt));
                    let status = got.unwrap().ok().unwrap();
                    assert_eq!(status.size, len, "{from:?} to {to:?}");
                    holds(&status.buffer, len, salt);
                }
            }
        }
    }
}
