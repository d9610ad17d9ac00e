//! Messages of a peer about rendezvous and remote memory: RTS, CTS, fragments, FIN and requests.
//! They are nearly right or have wrong numbers, while operations of all kinds are in flight. Each
//! operation must end exactly once.
#![no_main]

use arbitrary::Arbitrary;
use carrack::bootstrap::{Bootstrap, InProcess};
use carrack::buffer::Region;
use carrack::packet::{HostAllocator, PacketPool};
use carrack::settings::{Settings, TransportChoice};
use carrack::{Counter, Outcome, Piece, PostError, Rank, RemoteKey, Runtime, Tag};
use carrack_transports::contract::{AddressBlob, Batch, Header, Identity, Op, PeerId, Transport};
use carrack_transports::loopback::Loopback;
use carrack_transports::mem::MemRef;
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

/// Length of the region that peers may access, in bytes.
const ROOM: usize = 20_000;

/// Number that is likely to be a valid value.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Word {
    Small(u8),
    Len(u16),
    Any(u64),
}

impl Word {
    fn get(self) -> u64 {
        match self {
            Self::Small(number) => number.into(),
            Self::Len(number) => number.into(),
            Self::Any(number) => number,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// One of the messages, with `count` words after its header.
    Say {
        kind: u8,
        comp: u8,
        second: Word,
        words: [Word; 5],
        count: u8,
    },
    /// A fragment of `len` bytes.
    Part {
        landing: u8,
        offset: Word,
        len: u16,
    },
    /// A request for the registered region, at any offset.
    Request {
        kind: u8,
        token: Word,
        offset: Word,
        first: Word,
        second: Word,
    },
    /// Pieces of the region that there is, offered or asked for.
    Pieces {
        token: Word,
        landing: u8,
        count: Word,
        size: Word,
    },
    /// A fragment that is a list of places, followed by `len` bytes.
    List {
        landing: u8,
        places: Vec<(Word, Word)>,
        len: u16,
    },
    Send {
        len: u16,
    },
    Receive {
        tag: u8,
        room: u16,
    },
    Put {
        len: u16,
        number: Word,
    },
    /// Pieces of these lengths in bytes, put or got.
    Batch {
        is_put: bool,
        lens: Vec<u16>,
        number: Word,
    },
    Get {
        len: u16,
        number: Word,
    },
    Add {
        number: Word,
    },
    Flush,
    Progress,
}

fuzz_target!(|steps: Vec<Step>| {
    let _ = play(steps);
});

fn play(steps: Vec<Step>) -> Result<(), Box<dyn std::error::Error>> {
    let [mine, theirs] = <[InProcess; 2]>::try_from(InProcess::job(2)?).map_err(|_| "two ranks")?;
    let settings = Settings::builder()
        .transports([TransportChoice::Loopback])
        .build_from_vars([("", ""); 0])?;
    let runtime = Runtime::builder().settings(settings).bootstrap(Box::new(mine)).start()?;
    let ended = Counter::new();
    let told = Counter::new();
    runtime.register_comp(&told)?;
    let region = Region::host(ROOM);
    let registered = runtime.register_memory(&region)?;
    let rmr = registered.remote_key().to_bytes();
    let number = u64::from_le_bytes(*rmr[4..].first_chunk().ok_or("a number")?);

    let loopback = Loopback::new(8 << 10);
    let identity = Identity { me: PeerId(1), ranks: 2, secret: *theirs.job().as_bytes() };
    let domain = loopback.open(&loopback.devices()?.remove(0), identity)?;
    let device = domain.device(Arc::new(PacketPool::new(Arc::new(HostAllocator), 8 << 10, 16)))?;
    // This rank's address, so that messages to it are sent and not kept back. It is published as a
    // count of one, the transport's name and its length, the address and its length.
    let address = device.address();
    let name = b"loopback";
    let mut published = vec![1, name.len() as u8];
    published.extend(name);
    published.extend((address.0.len() as u16).to_le_bytes());
    published.extend(&address.0);
    theirs.put("device/1/0", &published)?;
    let published = theirs.get("device/0/0")?.ok_or("an address")?;
    let link =
        device.connect(&AddressBlob(published[1 + 1 + name.len() + 2..].to_vec()), PeerId(0))?;
    let say = |header: [u64; 2], bytes: &[u8]| {
        let _ = link.submit(Op::AmCopied { header: Header(header), bytes: MemRef::host(bytes) });
    };
    let flat = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
    // A remote key of rank 1 with any number, longer than any access.
    let remote = |number: u64| {
        let bytes = [&1_u32.to_le_bytes()[..], &flat(&[number, 0, 1 << 20])].concat();
        RemoteKey::from_bytes(&bytes)
    };
    let mut posted = 0;
    let mut count = |outcome: Result<Outcome, PostError>| {
        posted += u64::from(outcome.is_ok_and(|outcome| outcome.is_posted()));
    };

    for step in steps {
        match step {
            Step::Say { kind, comp, second, words, count } => {
                // From the RTS of an active message on.
                let kind = 3 + u64::from(kind % 25);
                let mut words = words.map(Word::get);
                if kind == 3 {
                    // The receiver allocates at once whatever length the offer has.
                    words[0] %= 1 << 16;
                }
                let header = kind | u64::from(comp % 4) << 32;
                let header = if kind == 4 { kind | 3 << 8 } else { header };
                say([header, second.get()], &flat(&words[..usize::from(count % 6)]));
            }
            Step::Part { landing, offset, len } => {
                let bytes = vec![9; usize::from(len) % 8193];
                say([5 | offset.get() << 8, landing.into()], &bytes);
            }
            Step::Request { kind, token, offset, first, second } => {
                let kind = [17, 18, 20][usize::from(kind % 3)];
                let words = [token.get(), number, offset.get(), first.get(), second.get()];
                say([kind, u64::from(kind == 20 && second.get() % 2 == 0)], &flat(&words));
            }
            Step::Pieces { token, landing, count, size } => {
                // The list's own size is added, so that the size can be nearly right.
                let size = size.get().wrapping_add(count.get().wrapping_mul(16));
                say([19, landing.into()], &flat(&[token.get(), number, count.get(), size, 0]));
            }
            Step::List { landing, places, len } => {
                let words: Vec<_> =
                    places.iter().flat_map(|(at, len)| [at.get(), len.get()]).collect();
                let mut bytes = flat(&words);
                bytes.resize(bytes.len() + usize::from(len), 8);
                bytes.truncate(8192);
                say([5, landing.into()], &bytes);
            }
            Step::Batch { is_put, lens, number } => {
                let rmr = remote(number.get())?;
                let local = Region::host(lens.iter().copied().map(usize::from).sum());
                let mut at = 0;
                let pieces: Vec<_> = lens
                    .iter()
                    .map(|&len| {
                        let range = at..at + usize::from(len);
                        at = range.end;
                        Piece { local: &local, offset: range.start as u64, range, rmr: &rmr }
                    })
                    .collect();
                count(match is_put {
                    true => runtime.post_put_batch(Rank(1), &pieces).comp(&ended).try_submit(),
                    false => runtime.post_get_batch(Rank(1), &pieces).comp(&ended).try_submit(),
                });
            }
            Step::Send { len } => {
                let bytes = vec![1; 8193 + usize::from(len)];
                count(runtime.post_send(Rank(1), bytes, Tag(1)).comp(&ended).try_submit());
            }
            Step::Receive { tag, room } => {
                let buffer = vec![0; room.into()];
                let tag = Tag(u64::from(tag % 4));
                count(runtime.post_recv(Rank(1), buffer, tag).comp(&ended).try_submit());
            }
            Step::Put { len, number } => {
                let rmr = remote(number.get())?;
                let bytes = vec![1; len.into()];
                count(runtime.post_put(Rank(1), bytes, &rmr, 0).comp(&ended).try_submit());
            }
            Step::Get { len, number } => {
                let rmr = remote(number.get())?;
                let bytes = vec![1; len.into()];
                count(runtime.post_get(Rank(1), bytes, &rmr, 0).comp(&ended).try_submit());
            }
            Step::Add { number } => {
                let rmr = remote(number.get())?;
                count(runtime.post_fetch_add(Rank(1), &rmr, 0, 1).comp(&ended).try_submit());
            }
            Step::Flush => count(runtime.post_flush(Rank(1)).comp(&ended).try_submit()),
            Step::Progress => {
                let _ = runtime.progress().map_err(|error| error.to_string());
                let mut dropped = |batch: &mut Batch| batch.drain().for_each(drop);
                let _ = device.poll(&mut Batch::new(8), &mut dropped);
            }
        }
    }
    drop((registered, runtime));
    assert_eq!(ended.get() + ended.failed(), posted, "an operation has not ended, or has twice");
    Ok(())
}
