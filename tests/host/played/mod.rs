//! A peer that the test plays, below a runtime of its own. The test says what comes from it, which
//! messages it takes, and what else happens during a call of the transport. So two threads meet in
//! one order only.

mod alone;
mod holders;
mod late;
mod transfers;

use crate::support::sink::Sink;
use crate::support::*;
use carrack::bootstrap::Bootstrap;
use carrack::transports::contract::{
    AddressBlob, Armed, Batch, Busy, Caps, Cost, Device, DeviceInfo, Domain, DownCause, Event,
    Exposed, Header, Identity, Link, Locality, Matcher, Op, OpToken, Payload, PeerId, PeerMemory,
    Polled, Reach, RemotePlace, Split, Splits, Submit, SubmitError, Transport, Unavailable,
};
use carrack::transports::mem::copy::copy_now;
use carrack::transports::mem::{Buffer, MemMut, MemRef, PacketSource, SmallBytes};
use carrack::{Runtime, RuntimeBuilder};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The peer. The runtime is rank 0.
const PEER: PeerId = PeerId(1);

const SEND: u64 = 2;
const RTS_SEND: u64 = 4;
const FRAGMENT: u64 = 5;
const CTS: u64 = 8;
const CTS_WRITE: u64 = 9;
const GRANT: u64 = 11;
const FIN_WRITE: u64 = 12;
const UNWRITTEN: u64 = 13;
const FIN: u64 = 14;
const HELP: u64 = 15;

/// Verdicts in a FIN.
const BROKEN: u64 = 7;

/// Bytes that a message brings at most.
const LONGEST: usize = 4096;

/// The one word by which the runtime and the peer share a copy.
struct Splitting(Split);

impl Splits for Splitting {
    fn count(&self) -> u32 {
        1
    }

    fn get(&self, number: u32) -> Option<&Split> {
        (number == 0).then_some(&self.0)
    }
}

/// A message that the peer was sent.
struct Message {
    header: [u64; 2],
    bytes: Vec<u8>,
}

impl Message {
    fn kind(&self) -> u64 {
        self.header[0] & 0xff
    }

    /// Returns a word behind the header.
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[8 * at..][..8].try_into().unwrap())
    }
}

type Taking = dyn Fn(&Message) -> Result<Submit, SubmitError> + Send + Sync;
/// A buffer that the peer's NIC reaches, or the reason why not, with the buffer.
type Shown = Result<Box<dyn Exposed>, (String, Buffer)>;
type Exposing = dyn Fn(Buffer) -> Shown + Send + Sync;

/// The state of the peer that the test plays.
#[derive(Default)]
struct Peer {
    /// Events that come from it next.
    coming: Mutex<VecDeque<Event>>,
    /// The messages that it has taken.
    taken: Mutex<Vec<Message>>,
    /// The buffers that its link has, until its device closes.
    given: Mutex<Vec<(OpToken, Buffer)>>,
    /// Test of a message, in the call that submits it: `true` if the peer takes it. Without one, it
    /// takes all.
    taking: Mutex<Option<Arc<Taking>>>,
    memory: OnceLock<Arc<dyn PeerMemory>>,
    splits: OnceLock<Arc<dyn Splits>>,
    /// The NIC of its link, if that reaches buffers.
    exposing: Mutex<Option<Arc<Exposing>>>,
    /// `true` while it may copy from and to this process.
    may_copy: AtomicBool,
}

impl Peer {
    /// Sends a message of a few words.
    fn sends(&self, header: [u64; 2], words: &[u64]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut small = SmallBytes::zeroed(bytes.len()).unwrap();
        small.as_mut_slice().copy_from_slice(&bytes);
        self.brings(Event::arrived(PEER, Header(header), Payload::Small(small)));
    }

    /// Offers a message of `size` bytes at `addr`, by the name `tx`, to receives by rank and tag.
    fn offers(&self, (tx, tag): (u64, u64), size: usize, addr: u64) {
        self.sends([RTS_SEND | 3 << 8, tag], &[size as u64, tx, addr, 0, 0]);
    }

    fn brings(&self, event: Event) {
        self.coming.lock().push_back(event);
    }

    fn goes(&self) {
        self.brings(Event::PeerDown {
            peer: PEER,
            cause: DownCause::Gone("its process has ended".into()),
        });
    }

    /// Decides from now on whether it takes a message.
    fn takes(
        &self,
        taking: impl Fn(&Message) -> Result<Submit, SubmitError> + Send + Sync + 'static,
    ) {
        *self.taking.lock() = Some(Arc::new(taking));
    }

    fn exposes(&self, exposing: impl Fn(Buffer) -> Shown + Send + Sync + 'static) {
        *self.exposing.lock() = Some(Arc::new(exposing));
    }

    /// Returns the messages of a kind that it has taken, and forgets all.
    fn took(&self, kind: u64) -> Vec<Message> {
        let taken = std::mem::take(&mut *self.taken.lock());
        taken.into_iter().filter(|message| message.kind() == kind).collect()
    }

    /// Returns `true` if it has taken a message of a kind.
    fn has_taken(&self, kind: u64) -> bool {
        self.taken.lock().iter().any(|message| message.kind() == kind)
    }

    fn took_one(&self, kind: u64) -> Message {
        let mut taken = self.took(kind);
        assert_eq!(taken.len(), 1, "messages of kind {kind}");
        taken.pop().unwrap()
    }
}

/// A runtime, and the peer below it.
struct Play {
    peer: Arc<Peer>,
    ranks: [Runtime; 1],
}

impl Play {
    fn new() -> Self {
        Self::with(Arc::default(), |builder| builder)
    }

    fn with(peer: Arc<Peer>, more: impl FnOnce(RuntimeBuilder) -> RuntimeBuilder) -> Self {
        let mut job = unstarted(2);
        let (one, zero) = (job.pop().unwrap(), job.pop().unwrap());
        let transport = Box::new(Played(peer.clone()));
        let builder = Runtime::builder().settings(built(OverShm::settings())).transport(transport);
        let runtime = more(builder.bootstrap(Box::new(zero))).start().unwrap();
        let published = one.get("device/0/0").unwrap().unwrap();
        one.put("device/1/0", &published).unwrap();
        // Its end would be that of a rank.
        std::mem::forget(one);
        Self { peer, ranks: [runtime] }
    }

    fn runtime(&self) -> &Runtime {
        &self.ranks[0]
    }

    /// Makes progress until `done`; errors of progress are the test's failure.
    #[track_caller]
    fn until(&self, done: impl FnMut() -> bool) {
        until(&self.ranks, done);
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        // They may hold the runtime.
        *self.peer.taking.lock() = None;
        *self.peer.exposing.lock() = None;
    }
}

/// The transport to the peer, by the name of one that the settings choose.
struct Played(Arc<Peer>);

struct PlayedDomain(Arc<Peer>, Caps);

struct PlayedDevice {
    peer: Arc<Peer>,
    polling: Mutex<()>,
}

struct PlayedLink(Arc<Peer>);

impl Transport for Played {
    fn name(&self) -> &'static str {
        OverShm::PATH
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        Ok(vec![DeviceInfo { name: "played".into(), note: "by the test".into() }])
    }

    fn open(&self, _: &DeviceInfo, _: Identity) -> Result<Arc<dyn Domain>, Unavailable> {
        let exposes = self.0.exposing.lock().is_some();
        let caps = Caps {
            am_inline: SmallBytes::MAX,
            am_copied: LONGEST,
            am_owned: LONGEST,
            am_from_device: true,
            remote_memory: exposes,
            windows: exposes,
            polls_kernel: false,
            chunk: 4 << 20,
            locality: Locality::Network,
        };
        Ok(Arc::new(PlayedDomain(self.0.clone(), caps)))
    }
}

impl Domain for PlayedDomain {
    fn caps(&self) -> &Caps {
        &self.1
    }

    fn device(&self, _: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        Ok(Arc::new(PlayedDevice { peer: self.0.clone(), polling: Mutex::default() }))
    }
}

impl Device for PlayedDevice {
    fn address(&self) -> AddressBlob {
        AddressBlob(b"here".to_vec())
    }

    fn reach(&self, _: &AddressBlob) -> Reach {
        Reach::Yes(Cost { latency_ns: 1 })
    }

    fn connect(&self, _: &AddressBlob, _: PeerId) -> Result<Arc<dyn Link>, SubmitError> {
        Ok(Arc::new(PlayedLink(self.peer.clone())))
    }

    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled {
        let Some(_polling) = self.polling.try_lock() else { return Polled::Busy };
        let coming = std::mem::take(&mut *self.peer.coming.lock());
        if coming.is_empty() {
            return Polled::Idle;
        }
        if coming.len() == 1
            && let Some(Event::Arrived { from, header, payload: Payload::Small(bytes), .. }) =
                coming.iter().next()
            && matcher.match_in_place(*from, *header, MemRef::host(bytes.as_slice()))
        {
            return Polled::Some;
        }
        coming.into_iter().for_each(|event| batch.push(event));
        matcher.match_all(batch);
        Polled::Some
    }

    fn arm(&self) -> Armed<'_> {
        Armed::Ready
    }

    fn disarm(&self, _is_told: bool) {}

    fn revoke(&self, _: PeerId) -> bool {
        !self.peer.may_copy.load(Ordering::SeqCst)
    }

    fn close(&self) {
        for (token, buffer) in std::mem::take(&mut *self.peer.given.lock()) {
            self.peer.brings(Event::Completion { token, buffer, outcome: Ok(()) });
        }
    }
}

impl Link for PlayedLink {
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError> {
        let (header, from) = match op {
            Op::AmCopied { header, bytes } => (header, bytes),
            Op::AmOwned { buffer, token, .. } => {
                self.0.given.lock().push((token, std::mem::take(buffer)));
                return Ok(Submit::Posted);
            }
            _ => panic!("no such operation is offered"),
        };
        let mut bytes = vec![0; from.len()];
        copy_now(MemMut::host(&mut bytes), from).unwrap();
        let message = Message { header: header.0, bytes };
        // Outside the lock: it may call the runtime.
        let taking = self.0.taking.lock().clone();
        let taken = taking.map_or(Ok(Submit::Done), |taking| taking(&message));
        if taken == Ok(Submit::Done) {
            self.0.taken.lock().push(message);
        }
        taken
    }

    fn peer_memory(&self) -> Result<Arc<dyn PeerMemory>, String> {
        self.0.memory.get().cloned().ok_or_else(|| "no peer reaches it".into())
    }

    fn splits(&self) -> Option<Arc<dyn Splits>> {
        self.0.splits.get().cloned()
    }

    fn expose(&self, buffer: Buffer) -> Shown {
        let exposing = self.0.exposing.lock().clone();
        match exposing {
            Some(exposing) => exposing(buffer),
            None => Err(("it has no NIC".into(), buffer)),
        }
    }

    fn is_up(&self) -> bool {
        true
    }
}

/// Runs on a thread of its own, while the caller stands still.
fn elsewhere<T: Send>(runs: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(runs).join().unwrap())
}
