//! A whole runtime as the victim.

#![expect(unsafe_code, reason = "the ends of a ring are made by unsafe functions")]

use super::*;
use carrack::PeerState;
use carrack::buffer::Region;

/// A runtime as rank 0, an honest one as rank 2, and in the place of rank 1 an attacker who knows
/// the secret.
pub(super) struct Job3 {
    pub(super) ranks: [Runtime; 2],
    pub(super) producer: Producer<SegmentSlots>,
    pub(super) segment: Arc<Segment>,
    pub(super) _channel: Channel,
}

impl Job3 {
    pub(super) fn new(geometry: Geometry) -> Self {
        let mut job = unstarted(3);
        let (two, one, zero) = (job.pop().unwrap(), job.pop().unwrap(), job.pop().unwrap());
        let ranks = [start(zero, OverShm::settings()), start(two, OverShm::settings())];
        let published = one.get("device/0/0").unwrap().unwrap();
        // The last of what is published is the address of the only transport.
        let name = published.windows(8).position(|part| part == b"carrack-").unwrap();
        let mut channel = Channel::connect(&published[name..]).unwrap();
        let (segment, fd) = Segment::create(geometry).unwrap();
        let me = Identity { me: ATTACKER, ranks: 3, secret: *one.job().as_bytes() };
        let mut greeting = greeting(Role::Dialer, &me).unwrap();
        while !matches!(greeting.advance(&mut channel).unwrap(), Progress::Proven(_)) {
            ranks.iter().for_each(|rank| _ = rank.progress());
        }
        let hello = HandshakeMessage::Hello { geometry };
        channel.send(&hello.encode(), &[fd.as_fd()]).unwrap();
        // SAFETY: the only writing end of a fresh ring.
        let producer = unsafe { Producer::new(SegmentSlots::of(segment.clone())) };
        std::mem::forget(one);
        Self { ranks, producer, segment, _channel: channel }
    }

    pub(super) fn push(&mut self, kind: u8, header: [u64; 2], bytes: &[u8]) {
        while self.producer.push(kind, header, MemRef::host(bytes)).is_err() {
            for rank in &self.ranks {
                let _ = rank.progress();
            }
        }
    }
}

pub(super) fn am_header(comp: u32, tag: u64) -> [u64; 2] {
    [1 | u64::from(comp) << 32, tag]
}

#[test]
fn headers_that_make_no_sense_are_told_of_by_name_and_others_go_on() {
    let _watchdog = Watchdog::over("headers");
    let mut rng = rng();
    let mut job = Job3::new(GEOMETRY);
    let sink = Sink::keeping();
    let name = job.ranks[0].register_comp(&sink).unwrap();
    for word in [
        0,
        3,
        0xff,
        1 | 7 << 8,
        1 | 1 << 16,
        2 | 4 << 8,
        2 | 3 << 8 | 256 << 16,
        2 | 3 << 8 | 1 << 32,
    ] {
        job.push(INLINE, [word, 0], b"x");
        job.push(INLINE, am_header(name.0, word), b"x");
        let errors = until_with_errors(&job.ranks[..1], || sink.count() > 0);
        assert_eq!(sink.take().len(), 1);
        assert!(
            matches!(&errors[..], [ProgressError::Malformed { from: Rank(1), .. }]),
            "{word:#x}: {errors:?}"
        );
    }
    // Any headers at all.
    for number in 0..5000 {
        let header =
            [rng.random::<u64>() & [u64::MAX, 0xffff_ffff_0000_0003][number % 2], rng.random()];
        job.push(INLINE, header, b"12345678");
    }
    let honest = &job.ranks[1];
    sent(&job.ranks[1..], || {
        let _ = job.ranks[0].progress();
        honest.post_am(Rank(0), b"honest", name).tag(Tag(77)).try_submit()
    });
    let mut came = false;
    until_with_errors(&job.ranks, || {
        came |= sink
            .take()
            .iter()
            .any(|status| status.rank == Rank(2) && status.bytes() == Some(b"honest"));
        came
    });
}

/// Message kinds of large messages, with payloads that none of them has.
#[test]
fn a_control_message_that_cannot_be_read_ends_all_operations_with_its_sender() {
    let _watchdog = Watchdog::over("control messages");
    for kind in [FIN, GRANT, FIN_WRITE] {
        let mut job = Job3::new(GEOMETRY);
        let done = Sink::keeping();
        let posted = job.ranks[0].post_recv(Rank(1), vec![0; 8], Tag(1)).comp(&done).try_submit();
        assert!(posted.unwrap().is_posted());
        job.push(INLINE, [kind, 77], &[0xff; 3]);
        let errors = until_with_errors(&job.ranks[..1], || done.count() > 0);
        let of_sender =
            |error: &ProgressError| matches!(error, ProgressError::Malformed { from: Rank(1), .. });
        assert!(errors.iter().any(of_sender), "{kind}: {errors:?}");
        let error = done.take().pop().unwrap().error.unwrap();
        assert!(matches!(*error, OpError::PeerDown { rank: Rank(1), .. }), "{kind}: {error}");
    }
}

#[test]
fn a_message_longer_than_any_packet_here_does_not_stop_the_device() {
    let _watchdog = Watchdog::over("long chunks");
    // The sender's chunks are larger than the receiver's packets: no honest one's are.
    let mut job = Job3::new(Geometry { slots: 16, chunks: 2, chunk_size: 64 << 10 });
    let sink = Sink::keeping();
    let name = job.ranks[0].register_comp(&sink).unwrap();
    let long = vec![7; 64 << 10];
    copy_now(job.segment.chunk_mut(0).unwrap(), MemRef::host(&long)).unwrap();
    let place = (u64::from(64_u32 << 10) << 32).to_le_bytes();
    job.push(CHUNK, am_header(name.0, 1), &place);
    assert!(!happens(&job.ranks[..1], Duration::from_millis(50), || false));
    let mut am = job.ranks[1].post_am(Rank(0), b"honest", name);
    let start = Instant::now();
    while am.try_submit().unwrap().is_retry() && start.elapsed() < LIMIT / 2 {
        for rank in &job.ranks {
            let _ = rank.progress();
        }
    }
    let came = happens(&job.ranks, LIMIT / 2, || {
        sink.take().iter().any(|status| status.rank == Rank(2) && status.bytes() == Some(b"honest"))
    });
    assert!(came, "one peer's message stops those of all others: {:?}", job.ranks[0].progress());
}

#[test]
fn lists_of_pieces_that_make_no_sense_cost_nothing() {
    let _watchdog = Watchdog::over("pieces");
    let mut job = Job3::new(Geometry { slots: 1024, ..GEOMETRY });
    let mr = job.ranks[0].register_memory(&Region::host(64)).unwrap();
    let rmr = mr.remote_key().to_bytes();
    let region = u64::from_le_bytes(rmr[4..12].try_into().unwrap());
    // No list, one longer than any, more bytes than any has, fewer than the list, and bytes next
    // to the requested ones.
    for (landing, count, size) in [
        (0, 0, 0),
        (0, 0, 16),
        (0, 1025, 1025 * 16),
        (0, u64::MAX, 16),
        (0, 1 << 60, 1 << 63),
        (0, 1, 16 + (64 << 10) + 1),
        (0, 1, u64::MAX),
        (0, 2, 31),
        (7, 2, 33),
    ] {
        for token in 0..1000 {
            let words = [token, region, count, size, 0].map(u64::to_le_bytes);
            job.push(INLINE, [PIECES, landing], words.as_flattened());
        }
        let state = || job.ranks[0].peer_state(Rank(1));
        assert!(!happens(&job.ranks, Duration::from_millis(2), || state() != PeerState::Up));
        // Only the answers, which the attacker does not take.
        let is_coming =
            job.ranks[0].pending().operations.iter().any(|op| op.what.contains("on its way here"));
        assert!(!is_coming, "{count} pieces, {size} B");
    }
}
