//! Ranks of one process: the pointer itself.

use crate::support::gpu_ranks::{Gpus, Kind, can_order, filled, holds};
use crate::support::words::are_all;
use crate::support::{Job, OverLoopback, OverShm, Watchdog, unstarted, until};
use carrack::{Buffer, PostError, Rank, Runtime, Status, Synchronizer, Tag};
use carrack_simulators::gpu::FakeConfig;

/// gpu.md, legacy IPC rule 3. Between two devices the engine has peer access on demand, for VMM and
/// pool memory by the allocation, or takes a peer copy. Memory of every kind goes to every kind, on
/// one device and on two.
#[test]
fn ranks_of_one_process_use_each_others_memory_by_its_own_address() {
    let _watchdog = Watchdog::over("same process");
    everything::<OverLoopback>();
    everything::<OverShm>();
}

/// Devices without peer access to each other. Messages between them go by way of host memory. Puts
/// and gets are refused with the driver's reason. Transfers within a device go on. (A real driver
/// has a peer copy for this, and refuses nothing.)
#[test]
fn between_devices_that_do_not_reach_each_other_messages_go_by_way_of_host_memory() {
    let _watchdog = Watchdog::over("apart");
    if !can_order("devices that are apart") {
        return;
    }
    apart::<OverLoopback>();
    apart::<OverShm>();
}

fn apart<J: Job>() {
    let gpus = Gpus::of(FakeConfig { no_peer: vec![(0, 1)], ..FakeConfig::devices(2) });
    let ranks = ranks::<J>(&gpus);
    let kinds =
        [Kind::Plain(0), Kind::Shareable(0), Kind::Pooled(0), Kind::Plain(1), Kind::Pooled(1)];
    let device = |kind: Kind| usize::from(matches!(kind, Kind::Plain(1) | Kind::Pooled(1)));
    let mut salt = 0;
    for (from, to) in kinds.iter().flat_map(|from| kinds.iter().map(move |to| (*from, *to))) {
        for len in LENS {
            salt += 10;
            message(&ranks, &gpus, (from, to), len, salt);
            if device(from) == device(to) {
                remote::<J>(&ranks, &gpus, (from, to), len, salt + 1);
                continue;
            }
            let window = to.region(&gpus, len);
            window.whole().write(&vec![0xee; len]).unwrap();
            let mr = ranks[1].register_memory(&window).unwrap();
            let rmr = mr.remote_key();
            let done = Synchronizer::new(1);
            let mut put =
                ranks[0].post_put(Rank(1), from.full(&gpus, len, salt), &rmr, 0).comp(&done);
            let refusal = match put.submit() {
                Err(refusal) => Some(refusal.to_string()),
                Ok(_) => {
                    until(&ranks, || done.test());
                    done.take().unwrap().remove(0).ok().err().map(|error| error.to_string())
                }
            };
            let bytes = window.whole().to_vec().unwrap();
            match refusal {
                None => assert_eq!(bytes, filled(len, salt)),
                Some(why) => {
                    let known =
                        ["217 (PEER_ACCESS_UNSUPPORTED)", "its owner moves host memory only"];
                    assert!(known.iter().any(|known| why.contains(known)), "{why}");
                    assert!(are_all(&[&bytes], 0xee));
                }
            }
        }
    }
}

const LENS: [usize; 3] = [1, 8192, 300_001];

fn ranks<J: Job>(gpus: &Gpus) -> Vec<Runtime> {
    unstarted(2)
        .into_iter()
        .map(|bootstrap| gpus.rank(J::settings(), Box::new(bootstrap)))
        .collect()
}

fn everything<J: Job>() {
    let gpus = Gpus::here();
    let ranks = ranks::<J>(&gpus);
    let mut salt = 0;
    for from in Kind::ALL {
        for to in Kind::ALL {
            for len in LENS {
                salt += 10;
                message(&ranks, &gpus, (from, to), len, salt);
                remote::<J>(&ranks, &gpus, (from, to), len, salt + 1);
            }
        }
    }
    if let Some(fake) = &gpus.fake {
        assert_eq!((fake.counters().opens, fake.counters().maps), (0, 0), "nothing is opened");
    }
    crate::support::settle(&ranks);
    drop(ranks);
    if let Some(fake) = &gpus.fake {
        assert_eq!(fake.counters().allocs, fake.counters().frees, "nothing is kept");
    }
}

fn message(ranks: &[Runtime], gpus: &Gpus, (from, to): (Kind, Kind), len: usize, salt: u64) {
    let (left, came) = (Synchronizer::new(1), Synchronizer::new(1));
    ranks[1].post_recv(Rank(0), to.empty(gpus, len), Tag(salt)).comp(&came).submit().unwrap();
    let mut send = ranks[0].post_send(Rank(1), from.full(gpus, len, salt), Tag(salt));
    send = send.comp(&left);
    send.submit().unwrap();
    until(ranks, || left.test() && came.test());
    assert_eq!(ended(&left).size, len);
    let status = ended(&came);
    assert_eq!(status.size, len);
    holds(&status.buffer, len, salt);
}

fn ended(done: &Synchronizer) -> Status {
    done.take().unwrap().remove(0).ok().unwrap()
}

/// Puts to, and gets from, a window of rank 1, as rank 0.
fn remote<J: Job>(
    ranks: &[Runtime],
    gpus: &Gpus,
    (local, remote): (Kind, Kind),
    len: usize,
    salt: u64,
) {
    let region = remote.region(gpus, len + 20);
    region.whole().write(&vec![0xee; len + 20]).unwrap();
    let mr = ranks[1].register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    let put = |buffer: Buffer, done: &Synchronizer| {
        ranks[0].post_put(Rank(1), buffer, &rmr, 11).comp(done).submit()
    };
    let get = |buffer: Buffer, done: &Synchronizer| {
        ranks[0].post_get(Rank(1), buffer, &rmr, 11).comp(done).submit()
    };
    let what = format!("{local:?} to {remote:?}, {len} B over {}", J::NAME);
    went(ranks, local.full(gpus, len, salt), put, &what);
    let bytes = region.whole().to_vec().unwrap();
    assert_eq!(bytes[11..11 + len], filled(len, salt), "{what}");
    assert!(are_all(&[&bytes[..11], &bytes[11 + len..]], 0xee), "{what}");
    region.slice(11, len).unwrap().write(&filled(len, salt + 1)).unwrap();
    let status = went(ranks, local.empty(gpus, len), get, &what);
    holds(&status.buffer, len, salt + 1);
}

/// Calls an operation and waits for its end.
fn went(
    ranks: &[Runtime],
    buffer: Buffer,
    submit: impl FnOnce(Buffer, &Synchronizer) -> Result<(), PostError>,
    what: &str,
) -> Status {
    let done = Synchronizer::new(1);
    submit(buffer, &done).unwrap_or_else(|error| panic!("{what}: {error}"));
    until(ranks, || done.test());
    done.take().unwrap().remove(0).ok().unwrap_or_else(|error| panic!("{what}: {error}"))
}
