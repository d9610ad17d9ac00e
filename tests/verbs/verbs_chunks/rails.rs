//! Messages that are dealt out over several NICs of a rank.

use super::fixture::{CHUNK, ChunkFixture, Kind};
use crate::support::sink::Sink;
use crate::support::{Watchdog, pattern, settle, until, until_with_errors};
use carrack::transports::contract::{
    Batch, BufferChunk, Device, Domain, DownCause, Identity, OpToken, PeerId, RemotePlace, Submit,
    SubmitError, Transport,
};
use carrack::transports::mem::{Buffer, HostAllocator, PacketPool};
use carrack::{OpError, Rank, Synchronizer, Tag};
use carrack_simulators::nic::{Call, Config, SimulatedNic, Visibility, Which};
use carrack_transports::verbs::VerbsOptions;
use std::sync::Arc;
use std::time::Duration;

/// Returns two ranks of `devices` devices, all of which are connected. The counters of each of the
/// receiver's devices have seen writes since.
fn connected(devices: [usize; 2]) -> ChunkFixture {
    let fixture = ChunkFixture::over(devices, [CHUNK, CHUNK]);
    let last = devices[0].min(devices[1]) - 1;
    let mut seed = 0;
    // The first messages may end before the further connections are up.
    while fixture.counters_of(last)[1].written == 0 {
        seed += 1;
        arrives(&fixture, seed, 4 * CHUNK);
        settle(&fixture.ranks);
    }
    fixture
}

fn arrives(fixture: &ChunkFixture, seed: u64, size: usize) {
    let bytes = pattern(seed, size);
    let status = fixture.send((0, Kind::Vec.filled(&bytes)), (1, vec![0; size].into()));
    assert!(status.bytes() == Some(&bytes[..]), "{size} B");
}

/// Chunks that each of the receiver's devices was written.
fn written(fixture: &ChunkFixture) -> Vec<usize> {
    let written = |device| fixture.counters_of(device)[1].written as usize / CHUNK;
    (0..fixture.devices[0].min(fixture.devices[1])).map(written).collect()
}

#[test]
fn a_long_message_goes_over_all_nics_and_each_is_shown_two_chunks_at_a_time() {
    let _watchdog = Watchdog::over("messages over several NICs");
    for devices in [[2, 2], [4, 4], [3, 2], [2, 4]] {
        let fixture = connected(devices);
        let before = written(&fixture);
        let (nics, chunks) = (before.len(), 8 * before.len());
        arrives(&fixture, 99, chunks * CHUNK);
        let new: Vec<_> = written(&fixture)
            .into_iter()
            .zip(before)
            .map(|(after, before)| after - before)
            .collect();
        // Each device begins with two chunks; further ones go to the device that is done first.
        assert!(
            new.iter().all(|&chunks| chunks >= 2) && new.iter().sum::<usize>() == chunks,
            "{new:?}"
        );
        for device in 0..nics {
            let [here, there] = fixture.counters_of(device);
            // One, where a NIC is quicker than who gives it the next.
            assert!((1..=2 * nics).contains(&(here.to_be_read.most as usize / CHUNK)), "{here:?}");
            // The chunks, and some words.
            assert_eq!(there.to_be_written.most as usize / CHUNK, 2, "{there:?}");
            assert_eq!((here.to_be_read.now, there.to_be_written.now as usize / CHUNK), (0, 0));
        }
        arrives(&fixture, 98, 7 * CHUNK + 3);
    }
}

#[test]
fn a_chunk_of_a_slow_nic_is_told_of_when_it_is_written_and_the_others_carry_the_rest() {
    let _watchdog = Watchdog::over("a slow NIC");
    let fixture = connected([2, 2]);
    let (size, bytes) = (12 * CHUNK, pattern(7, 12 * CHUNK));
    let (before, words) = (written(&fixture), fixture.counters_of(1)[1].to_be_written.now);
    let held = fixture.nics[0].faults().hold_device(1);
    let (left, came) = fixture.begin((0, bytes.clone().into()), (1, vec![0; size].into()), None);
    let the_rest_is_there = [before[0] + 10, before[1]];
    until(&fixture.ranks, || written(&fixture) == the_rest_is_there);
    settle(&fixture.ranks);
    assert_eq!((left.count(), came.count()), (0, 0));
    let waiting = fixture.counters_of(1)[1].to_be_written.now - words;
    assert_eq!(waiting, 2 * CHUNK as u64, "two chunks are shown to it all the time");
    assert_eq!(written(&fixture), the_rest_is_there);
    drop(held);
    assert!(came.one(&fixture.ranks).bytes() == Some(&bytes[..]));
    assert!(left.one(&fixture.ranks).error.is_none());
    assert_eq!(written(&fixture), [before[0] + 10, before[1] + 2]);
}

#[test]
fn what_is_no_longer_than_a_chunk_goes_over_the_first_nic_alone() {
    let _watchdog = Watchdog::over("short messages with several NICs");
    let fixture = connected([2, 2]);
    let before = fixture.counters_of(1);
    for (seed, size) in (0..).zip([1, 5000, 40_000, CHUNK]) {
        arrives(&fixture, seed, size);
    }
    assert_eq!(fixture.counters_of(1), before);
}

/// The receiver hears of a chunk by its first NIC, which says nothing of the others' writes: those
/// are read behind.
#[test]
fn a_chunk_is_told_of_when_it_can_be_seen_whatever_nic_has_written_it() {
    let _watchdog = Watchdog::over("chunks that are seen late");
    let fixture = connected([3, 3]);
    fixture.nics[1].faults().write_visibility(Visibility::WithCompletion, false);
    for seed in 0..20 {
        arrives(&fixture, seed, 9 * CHUNK + 5);
    }
}

#[test]
fn whatever_nic_refuses_a_chunk_the_rest_comes_part_by_part() {
    let _watchdog = Watchdog::over("refusals of several NICs");
    let fixture = connected([2, 2]);
    for side in [0, 1] {
        for k in 1..=8 {
            fixture.nics[side].faults().fail_call(Call::RegMr, Which::Nth(k), libc::ENOMEM);
            arrives(&fixture, k, 7 * CHUNK + 5);
        }
        fixture.nics[side].faults().heal_call(Call::RegMr);
    }
    for device in [0, 1] {
        assert_eq!(fixture.counters_of(device)[0].to_be_read.now, 0);
    }
}

#[test]
fn many_messages_both_ways_share_the_nics() {
    let _watchdog = Watchdog::over("many messages over several NICs");
    let fixture = connected([2, 2]);
    fixture.carries_both_ways(20, 19_973);
}

/// Begins a message. Each of the sender's two NICs has chunks of it, and does not begin with them.
fn in_the_midst(fixture: &ChunkFixture, size: usize) -> (Sink, Sink) {
    let shown = || fixture.counters_of(1)[1].to_be_written.now;
    let before = shown();
    let ends = fixture.begin((0, pattern(1, size).into()), (1, vec![0; size].into()), None);
    while shown() < before + CHUNK as u64 {
        fixture.ranks[1].progress().unwrap();
    }
    ends
}

/// Waits until both have ended, which each does once and with its buffer.
fn both_end(fixture: &ChunkFixture, ends: [&Sink; 2], size: usize) -> [carrack::Status; 2] {
    until_with_errors(&fixture.ranks, || ends.iter().all(|end| end.count() > 0));
    let mut steps = 0;
    until_with_errors(&fixture.ranks, || {
        steps += 1;
        steps > 300
    });
    ends.map(|end| {
        let mut all = end.take();
        assert_eq!(all.len(), 1, "{all:?}");
        let status = all.pop().unwrap();
        assert_eq!(status.buffer.len(), size);
        status
    })
}

#[test]
fn a_further_nic_that_fails_in_the_midst_ends_the_message_and_the_connection_with_the_peer() {
    for lost in [0, 1] {
        let _watchdog = Watchdog::over("a further NIC that fails");
        let fixture = connected([2, 2]);
        let size = 12 * CHUNK;
        let (left, came) = in_the_midst(&fixture, size);
        let held = [0, 1].map(|device| fixture.nics[0].faults().hold_device(device));
        settle(&fixture.ranks);
        assert!(fixture.nics[lost].set_port(1, 1, false));
        drop(held);
        for status in both_end(&fixture, [&left, &came], size) {
            assert!(
                matches!(status.error.as_deref(), Some(OpError::PeerDown { .. })),
                "{status:?}"
            );
        }
    }
}

#[test]
fn a_rank_that_goes_in_the_midst_ends_the_other_ones_message() {
    for gone in [0, 1] {
        let _watchdog = Watchdog::over("a rank of several NICs that goes");
        let mut fixture = connected([2, 2]);
        let size = 12 * CHUNK;
        let (left, came) = in_the_midst(&fixture, size);
        let held = [0, 1].map(|device| fixture.nics[0].faults().hold_device(device));
        settle(&fixture.ranks);
        drop(held);
        drop(fixture.ranks.remove(gone));
        for status in both_end(&fixture, [&left, &came], size) {
            assert!(
                matches!(status.error.as_deref(), Some(OpError::PeerDown { .. } | OpError::Closed)),
                "{status:?}"
            );
        }
    }
}

#[test]
fn ranks_that_sleep_between_chunks_are_woken_whatever_nic_has_something_to_tell() {
    let _watchdog = Watchdog::over("sleep over several NICs");
    let fixture = connected([3, 3]);
    let size = 20 * CHUNK + 7;
    std::thread::scope(|scope| {
        for (at, rank) in fixture.ranks.iter().enumerate() {
            scope.spawn(move || {
                let peer = Rank(1 - at as u32);
                for seed in 0..10 {
                    let (came, left) = (Synchronizer::new(1), Synchronizer::new(1));
                    let mut recv = rank.post_recv(peer, vec![0; size], Tag(seed)).comp(&came);
                    recv.submit().unwrap();
                    let mut send = rank.post_send(peer, pattern(seed, size), Tag(seed)).comp(&left);
                    send.submit().unwrap();
                    let status = came.wait(rank).unwrap().pop().unwrap();
                    assert!(status.bytes() == Some(&pattern(seed, size)[..]));
                    assert!(left.wait(rank).unwrap()[0].error.is_none());
                }
            });
        }
    });
}

#[test]
fn it_is_said_over_how_many_nics_large_messages_go_and_in_what_chunks() {
    for (devices, says) in [([3, 2], ", over 2 NICs in turn"), ([1, 4], "in chunks of that size")] {
        let fixture = ChunkFixture::over(devices, [CHUNK, CHUNK]);
        let paths = fixture.ranks[0].explain(Duration::from_secs(10)).swap_remove(1);
        let host = paths.kinds.into_iter().find(|kind| kind.memory == "host").unwrap();
        assert!(
            host.way.contains("from 64 KiB on in chunks") && host.way.ends_with(says),
            "{}",
            host.way
        );
    }
}

#[test]
fn a_peer_that_names_a_nic_which_is_not_there_loses_its_connection() {
    let fabric = "chunks by a NIC that is not there".to_owned();
    let open = |me| {
        let config = Config { fabric: Some(fabric.clone()), ..Config::devices(2) };
        let nic = Arc::new(SimulatedNic::new(config).unwrap());
        let transport = nic.transport(VerbsOptions { rails: 2, ..VerbsOptions::default() });
        let info = transport.devices().unwrap().remove(0);
        let domain =
            transport.open(&info, Identity { me: PeerId(me), ranks: 2, secret: [5; 16] }).unwrap();
        let device =
            domain.device(Arc::new(PacketPool::new(Arc::new(HostAllocator), 8 << 10, 64))).unwrap();
        (domain, device)
    };
    let sides: [(Arc<dyn Domain>, Arc<dyn Device>); 2] = [open(0), open(1)];
    let link = sides[0].1.connect(&sides[1].1.address(), PeerId(1)).unwrap();
    assert_eq!(link.nics(), 2);
    let mut batch = Batch::new(8);
    while !link.is_up() {
        for (_, device) in &sides {
            device.poll(&mut batch, &mut |batch: &mut Batch| drop(batch.drain()));
        }
    }
    let chunk = BufferChunk { of: Arc::new(Buffer::Vec(vec![1; 100_000])), at: 0, len: CHUNK };
    let put = |rail: u64| {
        link.put_chunk(RemotePlace { addr: 0, key: 1 | rail << 33 }, &chunk, OpToken(1))
    };
    // That one is there, and not connected so far.
    assert!(matches!(put(1), Ok(Submit::Busy(_))));
    assert!(link.is_up());
    let Err(SubmitError::Down { cause: DownCause::Protocol(why), .. }) = put(2) else {
        panic!("it was taken")
    };
    assert!(why.contains("NIC 2"), "{why}");
}
