//! NICs that register some chunks and refuse the next: written chunks stay, and the rest travels
//! in fragments.

use super::fixture::{CHUNK, ChunkFixture, Kind};
use crate::support::{Watchdog, pattern};
use carrack_simulators::nic::{Call, Which};

const CHUNKS: usize = 5;
const SIZE: usize = (CHUNKS - 1) * CHUNK + 1234;

/// Sends, with what was ordered, and returns how many chunks the receiver's NIC has seen written.
fn arrives(fixture: &ChunkFixture, seed: u64) -> usize {
    let (bytes, before) = (pattern(seed, SIZE), fixture.counters());
    let status = fixture.send((0, Kind::Vec.filled(&bytes)), (1, vec![0; SIZE].into()));
    assert_eq!(status.bytes(), Some(&bytes[..]));
    fixture.nics.iter().for_each(|nic| nic.faults().heal_call(Call::RegMr));
    assert_eq!(fixture.registered(), [0, 0]);
    fixture.chunks_written(1, &before)
}

#[test]
fn the_rest_comes_part_by_part_when_the_senders_nic_refuses_the_kth_chunk() {
    let _watchdog = Watchdog::over("a sender's refusals");
    let fixture = ChunkFixture::new();
    for k in 1..=CHUNKS {
        fixture.nics[0].faults().fail_call(Call::RegMr, Which::Nth(k as u64), libc::ENOMEM);
        assert_eq!(arrives(&fixture, k as u64), k - 1, "chunk {k}");
    }
    // And afterwards all is as it was.
    assert_eq!(arrives(&fixture, 77), CHUNKS - 1);
}

#[test]
fn the_rest_comes_part_by_part_when_the_receivers_nic_refuses_the_kth_chunk() {
    let _watchdog = Watchdog::over("a receiver's refusals");
    let fixture = ChunkFixture::new();
    for k in 1..=CHUNKS {
        fixture.nics[1].faults().fail_call(Call::RegMr, Which::Nth(k as u64), libc::ENOMEM);
        // With the first it is asked for once more, and then shown whole, of which the sender
        // writes chunk by chunk.
        let written = arrives(&fixture, k as u64);
        assert_eq!(written, if k == 1 { CHUNKS - 1 } else { k - 1 }, "chunk {k}");
    }
    fixture.nics[1].faults().fail_call(Call::RegMr, Which::All, libc::ENOMEM);
    assert_eq!(arrives(&fixture, 77), 0);
}

#[test]
fn both_nics_may_refuse_at_once() {
    let _watchdog = Watchdog::over("refusals on both sides");
    let fixture = ChunkFixture::new();
    for here in 1..=CHUNKS {
        for there in 2..=CHUNKS {
            fixture.nics[0].faults().fail_call(Call::RegMr, Which::Nth(here as u64), libc::ENOMEM);
            fixture.nics[1].faults().fail_call(Call::RegMr, Which::Nth(there as u64), libc::ENOMEM);
            assert_eq!(
                arrives(&fixture, (here * 10 + there) as u64),
                (here - 1).min(there - 1),
                "{here} {there}"
            );
        }
    }
}

#[test]
fn a_receiver_of_longer_chunks_is_written_to_in_those_of_the_sender() {
    let _watchdog = Watchdog::over("chunks of two lengths");
    for chunks in [[CHUNK, 64 * CHUNK], [CHUNK, 2 * CHUNK], [64 * CHUNK, CHUNK], [2 * CHUNK, CHUNK]]
    {
        let fixture = ChunkFixture::with(chunks);
        assert_eq!(arrives(&fixture, 1), CHUNKS - 1);
        let most = fixture.counters()[0].to_be_read.most;
        // Two at a time, or one where the NIC is quicker than who gives it the next.
        let shorter = chunks[0].min(chunks[1]) as u64;
        assert!((shorter..=2 * shorter).contains(&most), "{chunks:?}: {most}");
        for k in 1..=CHUNKS as u64 {
            fixture.nics[0].faults().fail_call(Call::RegMr, Which::Nth(k), libc::ENOMEM);
            arrives(&fixture, k);
        }
    }
}
