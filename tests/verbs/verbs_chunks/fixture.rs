//! Two ranks in this process, each with a simulated NIC of its own, and small chunks.

use crate::support::sink::Sink;
use crate::support::{Job, OverSimulatedNic, built, connect, pattern, settle, until};
use carrack::bootstrap::InProcess;
use carrack::region::Region;
use carrack::{Buffer, Rank, Runtime, Status, Tag};
use carrack_simulators::nic::{Config, HeldWork, MemoryCounters, SimulatedNic};
use carrack_transports::verbs::VerbsOptions;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 64 << 10;

/// Owner of a message's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Vec,
    Bytes,
    Region,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Vec, Self::Bytes, Self::Region];

    pub(crate) fn filled(self, bytes: &[u8]) -> Buffer {
        match self {
            Self::Vec => bytes.to_vec().into(),
            Self::Bytes => Buffer::Bytes(bytes.to_vec().into()),
            Self::Region => {
                let region = Region::host(bytes.len() + 13);
                let slice = region.slice(13, bytes.len()).unwrap();
                slice.write(bytes).unwrap();
                slice.into()
            }
        }
    }
}

pub(crate) struct ChunkFixture {
    pub(crate) ranks: Vec<Runtime>,
    pub(crate) nics: Vec<Arc<SimulatedNic>>,
    pub(crate) devices: [usize; 2],
    /// Counters at the time when the links were up.
    begun: [MemoryCounters; 2],
}

impl ChunkFixture {
    pub(crate) fn new() -> Self {
        Self::with([CHUNK, CHUNK])
    }

    /// Creates ranks with these chunk sizes in bytes.
    pub(crate) fn with(chunks: [usize; 2]) -> Self {
        Self::over([1, 1], chunks)
    }

    /// Creates ranks with these numbers of devices and chunk sizes in bytes.
    pub(crate) fn over(devices: [usize; 2], chunks: [usize; 2]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let fabric =
            format!("chunks {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let nic = |devices| {
            let config = Config { fabric: Some(fabric.clone()), ..Config::devices(devices) };
            Arc::new(SimulatedNic::new(config).unwrap())
        };
        let nics: Vec<_> = devices.into_iter().map(nic).collect();
        let start = |(at, bootstrap): (usize, InProcess)| {
            let settings = built(OverSimulatedNic::settings());
            let rails = u8::try_from(devices[at]).unwrap();
            let options = VerbsOptions {
                packet_size: settings.packet_size(),
                rails,
                chunk: chunks[at],
                timeout: 14,
                ..VerbsOptions::default()
            };
            let builder = Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap));
            builder.transport(Box::new(nics[at].transport(options))).start().unwrap()
        };
        let ranks: Vec<_> = InProcess::job(2).unwrap().into_iter().enumerate().map(start).collect();
        connect(&ranks);
        settle(&ranks);
        let mut fixture = Self { ranks, nics, begun: Default::default(), devices };
        fixture.begun = fixture.counters();
        fixture
    }

    /// Returns the counters of each rank's first device.
    pub(crate) fn counters(&self) -> [MemoryCounters; 2] {
        self.counters_of(0)
    }

    /// Returns the counters of each rank's device of that number.
    pub(crate) fn counters_of(&self, device: usize) -> [MemoryCounters; 2] {
        [0, 1].map(|rank: usize| self.nics[rank].memory_counters(device).unwrap())
    }

    /// Returns the bytes of messages that are registered: the first rank's to be read, the second's
    /// to be written.
    pub(crate) fn registered(&self) -> [u64; 2] {
        let [first, second] = self.counters();
        // Peers may write some words in addition.
        [first.to_be_read.now, second.to_be_written.now - self.begun[1].to_be_written.now]
    }

    /// Returns the number of whole chunks that a rank's peer has written to it since.
    pub(crate) fn chunks_written(&self, rank: usize, since: &[MemoryCounters; 2]) -> usize {
        // The peer also writes some words that acknowledge chunks.
        (self.counters()[rank].written - since[rank].written) as usize / CHUNK
    }

    /// Sends messages both ways at once, each by `more` bytes longer than the one before.
    pub(super) fn carries_both_ways(&self, count: u64, more: usize) {
        let begun = |number: u64| {
            let (from, size) = (usize::from(number % 2 == 1), CHUNK + number as usize * more);
            let bytes = pattern(number, size);
            let (given, room) = (bytes.clone().into(), vec![0; size].into());
            (bytes, self.begin((from, given), (1 - from, room), Some(Tag(number))))
        };
        for (bytes, (left, came)) in (0..count).map(begun).collect::<Vec<_>>() {
            assert!(came.one(&self.ranks).bytes() == Some(&bytes[..]));
            assert!(left.one(&self.ranks).error.is_none());
        }
    }

    /// Begins to send from one rank to another.
    pub(crate) fn begin(
        &self,
        (from, source): (usize, Buffer),
        (to, target): (usize, Buffer),
        tag: Option<Tag>,
    ) -> (Sink, Sink) {
        let (left, came) = (Sink::keeping(), Sink::keeping());
        let rank = |at: usize| Rank(u32::try_from(at).unwrap());
        let tag = tag.unwrap_or(Tag(5));
        let mut recv = self.ranks[to].post_recv(rank(from), target, tag).comp(&came);
        recv.submit().unwrap();
        let mut send = self.ranks[from].post_send(rank(to), source, tag).comp(&left);
        send.submit().unwrap();
        (left, came)
    }

    /// Returns `true` if the second rank has memory registered for its peer's writes.
    pub(crate) fn is_shown(&self) -> bool {
        self.counters()[1].to_be_written.now > self.begun[1].to_be_written.now
    }

    /// Lets the first rank's message go on until two of its chunks are with its NIC, which does not
    /// begin with them.
    pub(crate) fn stop_in_the_midst(&self) -> HeldWork {
        // Its offer is out; what it is asked for comes in all the same.
        while !self.is_shown() {
            self.ranks[1].progress().unwrap();
        }
        let held = self.nics[0].faults().hold_device(0);
        until(&self.ranks, || self.registered() == [2 * CHUNK as u64; 2]);
        // And it stays so.
        settle(&self.ranks);
        assert_eq!(self.registered(), [2 * CHUNK as u64; 2]);
        held
    }

    /// Sends from one rank to another, and waits for both ends: the receive's.
    #[track_caller]
    pub(crate) fn send(&self, from: (usize, Buffer), to: (usize, Buffer)) -> Status {
        let (left, came) = self.begin(from, to, None);
        let (left, came) = (left.one(&self.ranks), came.one(&self.ranks));
        assert!(left.error.is_none(), "{left:?}");
        assert!(came.error.is_none(), "{came:?}");
        came
    }
}
