//! Messages with any header and any bytes, as a hostile rank of the job could send them. It has the
//! job's secret, and a transport, but not our runtime.
#![no_main]

use arbitrary::Arbitrary;
use carrack::bootstrap::{Bootstrap, InProcess};
use carrack::packet::{HostAllocator, PacketPool};
use carrack::settings::{Settings, TransportChoice};
use carrack::{CompQueue, Counter, Matching, Rank, Runtime, Tag};
use carrack_transports::contract::{AddressBlob, Batch, Header, Identity, Op, PeerId, Transport};
use carrack_transports::loopback::Loopback;
use carrack_transports::mem::MemRef;
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Step {
    Send {
        words: [u64; 2],
        len: u16,
    },
    /// A header that is nearly right.
    Near {
        kind: u8,
        policy: u8,
        engine: u8,
        comp: u8,
        tag: u8,
        len: u8,
    },
    Receive {
        policy: u8,
        tag: u8,
        room: u8,
    },
    Progress,
    Take,
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
    let (queue, counter) = (CompQueue::new(2), Counter::new());
    runtime.register_comp(&queue)?;
    runtime.register_comp(&counter)?;

    let loopback = Loopback::new(8 << 10);
    let identity = Identity { me: PeerId(1), ranks: 2, secret: *theirs.job().as_bytes() };
    let domain = loopback.open(&loopback.devices()?.remove(0), identity)?;
    let device = domain.device(Arc::new(PacketPool::new(Arc::new(HostAllocator), 8 << 10, 16)))?;
    // As `device/0/0` has it: a count of one, the name and its length, the address and its length.
    let published = theirs.get("device/0/0")?.ok_or("an address")?;
    let address = AddressBlob(published[1 + 1 + "loopback".len() + 2..].to_vec());
    let link = device.connect(&address, PeerId(0))?;

    for step in steps {
        match step {
            Step::Send { words, len } => {
                let bytes = vec![1; usize::from(len) % 9000];
                let _ = link
                    .submit(Op::AmCopied { header: Header(words), bytes: MemRef::host(&bytes) });
            }
            Step::Near { kind, policy, engine, comp, tag, len } => {
                let word = u64::from(kind % 4)
                    | u64::from(policy % 6) << 8
                    | u64::from(engine % 4) << 16
                    | u64::from(comp % 5) << 32;
                let header = Header([word, u64::from(tag % 4)]);
                let _ = link.submit(Op::AmCopied {
                    header,
                    bytes: MemRef::host(&vec![2; usize::from(len)]),
                });
            }
            Step::Receive { policy, tag, room } => {
                let policies =
                    [Matching::None, Matching::RankOnly, Matching::TagOnly, Matching::RankTag];
                let policy = policies[usize::from(policy) % policies.len()];
                let buffer = vec![3; usize::from(room)];
                let tag = Tag(u64::from(tag % 4));
                let post = runtime.post_recv(Rank(1), buffer, tag).matching(policy);
                let _ = post.comp(&counter).try_submit();
            }
            Step::Progress => {
                let _ = runtime.progress().map_err(|error| error.to_string());
                let mut dropped = |batch: &mut Batch| batch.drain().for_each(drop);
                let _ = device.poll(&mut Batch::new(8), &mut dropped);
            }
            Step::Take => drop(queue.pop()),
        }
    }
    Ok(())
}
