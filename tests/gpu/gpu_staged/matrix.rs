//! Matrix of memory kinds, lengths and operations.

use super::{BLOCK, completed, gpus, received, sent, settings};
use crate::support::keys::{forged, with_len};
use crate::support::ranks::Role;
use crate::support::words::{are_all, fill, wrong};
use carrack::region::AtomicError;
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::transports::mem::{CopyError, Region, RegionSlice};
use carrack::{
    CompQueue, OpError, PostError, Rank, RemoteComp, RemoteKey, Runtime, Status, Synchronizer, Tag,
};
use std::sync::Arc;

/// Host, pinned, and memory of each of two devices.
const KINDS: usize = 4;
const SIZES: [usize; 9] =
    [1, 8, 4099, 8193, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77_777, 5 * BLOCK + 4097];
const BORDER: usize = 67;
const POISON: u8 = 0xee;

/// Memory of some kind, with poison around a part of it.
struct PoisonedMemory {
    region: Region,
}

impl PoisonedMemory {
    fn new(gpus: &[Arc<dyn Gpu>], kind: usize) -> Self {
        let len = SIZES[SIZES.len() - 1] + 2 * BORDER;
        let region = match kind {
            0 => Region::host(len),
            1 => gpus[0].allocate(len, Flavour::Pinned).unwrap(),
            2 => gpus[0].allocate(len, Flavour::Plain).unwrap(),
            _ => gpus[gpus.len() - 1].allocate(len, Flavour::Shareable).unwrap(),
        };
        Self { region }
    }

    fn part(&self, len: usize) -> RegionSlice {
        self.region.slice(BORDER, len).unwrap()
    }

    fn poison(&self, len: usize) {
        self.region
            .slice(0, len + 2 * BORDER)
            .unwrap()
            .write(&vec![POISON; len + 2 * BORDER])
            .unwrap();
    }

    fn fill(&self, len: usize, salt: u64) {
        self.poison(len);
        let mut bytes = vec![0; len];
        fill(&mut bytes, salt, 0);
        self.part(len).write(&bytes).unwrap();
    }

    #[track_caller]
    fn check(&self, len: usize, salt: u64, what: &str) {
        let bytes = self.region.slice(0, len + 2 * BORDER).unwrap().to_vec().unwrap();
        let (before, rest) = bytes.split_at(BORDER);
        let (inside, behind) = rest.split_at(len);
        assert_eq!(wrong(inside, salt, 0), None, "{what}");
        assert!(are_all(&[before, behind], POISON), "around {what}");
    }

    #[track_caller]
    fn check_poison(&self, len: usize) {
        let bytes = self.region.slice(0, len + 2 * BORDER).unwrap().to_vec().unwrap();
        assert!(are_all(&[&bytes], POISON), "something was written");
    }
}

fn told(runtime: &Runtime, queue: &CompQueue) -> Status {
    runtime.wait_for(super::PATIENCE, || !queue.is_empty()).expect("it is told");
    queue.pop().unwrap().ok().unwrap()
}

fn exposed(
    role: &Role,
    runtime: &Runtime,
    memories: &[PoisonedMemory],
) -> Vec<carrack::region::Mr> {
    let expose = |(kind, memory): (usize, &PoisonedMemory)| {
        let mr = runtime.register_memory(&memory.region).unwrap();
        role.tells(&format!("memory {kind}"), &mr.remote_key().to_bytes());
        mr
    };
    memories.iter().enumerate().map(expose).collect()
}

fn found(role: &Role, by: u32) -> Vec<RemoteKey> {
    (0..KINDS)
        .map(|kind| RemoteKey::from_bytes(&role.told(&format!("memory {kind}"), by)).unwrap())
        .collect()
}

/// Runs the role: rank 0 posts, rank 1 owns. For each pair of kinds and each length there are a
/// message, and a put and a get, each with and without a notification.
pub(crate) fn every_pair(role: &Role) {
    let runtime = role.runtime(settings(role.words[0] == 1));
    let gpus = gpus(&runtime);
    let memories: Vec<_> = (0..KINDS).map(|kind| PoisonedMemory::new(&gpus, kind)).collect();
    let queue = CompQueue::new(16);
    let name = runtime.register_comp(&queue).unwrap();
    if role.rank == 0 {
        posts(&runtime, &memories, &found(role, 1), name);
    } else {
        let mrs = exposed(role, &runtime, &memories);
        owns(&runtime, &memories, &queue);
        drop(mrs);
    }
    assert!(runtime.pending().operations.is_empty(), "{}", runtime.pending());
    role.meet("over", &runtime, 0..2);
}

/// Returns the turns that both ranks take.
fn turns() -> impl Iterator<Item = (usize, usize, usize, u64)> {
    let pairs = (0..KINDS).flat_map(|near| (0..KINDS).map(move |far| (near, far)));
    let all = pairs.flat_map(|(near, far)| SIZES.map(|len| (near, far, len)));
    all.zip((10..).step_by(10)).map(|((near, far, len), salt)| (near, far, len, salt))
}

fn posts(runtime: &Runtime, memories: &[PoisonedMemory], rmrs: &[RemoteKey], name: RemoteComp) {
    let border = BORDER as u64;
    for (near, far, len, salt) in turns() {
        let (memory, rmr) = (&memories[near], &rmrs[far]);
        let what = format!("{len} bytes between kind {near} and kind {far}");
        let put = |salt: u64, notify: bool| {
            memory.fill(len, salt);
            let mut part = Some(memory.part(len));
            let status = completed(runtime, |done| {
                let post = runtime.post_put(Rank(1), part.take().unwrap(), rmr, border).comp(done);
                let mut post = post.tag(Tag(salt));
                if notify { post.remote_comp(name).submit() } else { post.submit() }
            });
            let status = status.unwrap().ok().unwrap();
            assert_eq!((status.size, status.buffer.len()), (len, len), "{what}");
        };
        let get = |salt: u64, notify: bool| {
            memory.poison(len);
            let mut part = Some(memory.part(len));
            let status = completed(runtime, |done| {
                let post = runtime.post_get(Rank(1), part.take().unwrap(), rmr, border).comp(done);
                let mut post = post.tag(Tag(salt));
                if notify { post.remote_comp(name).submit() } else { post.submit() }
            });
            let status = status.unwrap().ok().unwrap();
            assert_eq!((status.size, status.buffer.len()), (len, len), "{what}");
            memory.check(len, salt, &what);
        };
        runtime.barrier().unwrap();
        put(salt, false);
        completed(runtime, |done| runtime.post_flush(Rank(1)).comp(done).submit())
            .unwrap()
            .ok()
            .unwrap();
        runtime.barrier().unwrap();
        // It looks at it, and makes it anew.
        runtime.barrier().unwrap();
        put(salt + 1, true);
        runtime.barrier().unwrap();
        get(salt + 2, false);
        get(salt + 2, true);
        memory.fill(len, salt + 3);
        assert_eq!(
            sent(runtime, 1, memory.part(len), salt).unwrap().ok().unwrap().size,
            len,
            "{what}"
        );
    }
}

fn owns(runtime: &Runtime, memories: &[PoisonedMemory], queue: &CompQueue) {
    for (near, far, len, salt) in turns() {
        let memory = &memories[far];
        let what = format!("{len} bytes between kind {near} and kind {far}");
        memory.poison(len);
        runtime.barrier().unwrap();
        runtime.barrier().unwrap();
        memory.check(len, salt, &what);
        assert!(queue.is_empty(), "no notification was asked for");
        memory.poison(len);
        runtime.barrier().unwrap();
        let notice = told(runtime, queue);
        assert_eq!((notice.size, notice.tag, notice.rank), (len, Tag(salt + 1), Rank(0)), "{what}");
        memory.check(len, salt + 1, &what);
        memory.fill(len, salt + 2);
        runtime.barrier().unwrap();
        let notice = told(runtime, queue);
        assert_eq!((notice.size, notice.tag), (len, Tag(salt + 2)), "{what}");
        memory.poison(len);
        let status = received(runtime, 0, memory.part(len), salt).unwrap().ok().unwrap();
        assert_eq!(status.size, len);
        memory.check(len, salt + 3, &what);
    }
}

const EACH: u64 = 150;

/// Runs the role: all ranks, the owner included, change words of each kind at the same time.
pub(crate) fn words(role: &Role) {
    let runtime = role.runtime(settings(role.words[0] == 1));
    let gpus = gpus(&runtime);
    let memories: Vec<_> = (0..KINDS).map(|kind| PoisonedMemory::new(&gpus, kind)).collect();
    let mrs = if role.rank == 1 { exposed(role, &runtime, &memories) } else { Vec::new() };
    if role.rank == 1 {
        for memory in &memories {
            memory.region.slice(0, 64).unwrap().write(&[0; 64]).unwrap();
        }
    }
    runtime.barrier().unwrap();
    let rmrs = found(role, 1);
    for (kind, rmr) in rmrs.iter().enumerate() {
        // Several at a time on one word, then compare-and-swap until it works.
        let done = Synchronizer::new(EACH as usize);
        for _ in 0..EACH {
            while let Err(error) = runtime.post_fetch_add(Rank(1), rmr, 8, 3).comp(&done).submit() {
                assert!(matches!(error, PostError::OffersFull { .. }), "{error}");
                runtime.progress().unwrap();
            }
        }
        runtime.wait_for(super::PATIENCE, || done.test()).unwrap();
        let mut seen: Vec<_> = done
            .take()
            .unwrap()
            .into_iter()
            .map(|one| one.ok().unwrap().value().unwrap())
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len() as u64, EACH, "kind {kind}: no two find the same");
        assert!(seen.iter().all(|held| held % 3 == 0 && *held < 9 * EACH));
        let mut held = 0;
        for _ in 0..10 {
            loop {
                let swap = completed(&runtime, |done| {
                    runtime.post_compare_swap(Rank(1), rmr, 16, held, held + 1).comp(done).submit()
                });
                let was = swap.unwrap().ok().unwrap().value().unwrap();
                if std::mem::replace(&mut held, was) == was {
                    break;
                }
            }
        }
        let odd = completed(&runtime, |done| {
            runtime.post_fetch_add(Rank(1), rmr, 20, 1).comp(done).submit()
        });
        match odd {
            Err(PostError::Atomic(AtomicError::Unaligned { .. })) => {}
            Ok(status) => {
                assert!(
                    matches!(status.error.as_deref(), Some(OpError::Word(Rank(1)))),
                    "{status:?}"
                )
            }
            Err(other) => panic!("{other}"),
        }
    }
    runtime.barrier().unwrap();
    if role.rank == 1 {
        for (kind, memory) in memories.iter().enumerate() {
            let bytes = memory.region.slice(0, 64).unwrap().to_vec().unwrap();
            let found: Vec<_> =
                bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
            assert_eq!(found, [0, 3 * 3 * EACH, 3 * 10, 0, 0, 0, 0, 0], "kind {kind}");
        }
    } else {
        refused(&runtime, &rmrs);
    }
    runtime.barrier().unwrap();
    drop(mrs);
    role.meet("over", &runtime, 0..3);
}

/// Checks that invalid requests are refused, by either side, and change nothing.
fn refused(runtime: &Runtime, rmrs: &[RemoteKey]) {
    for rmr in rmrs {
        // More than there is; and a generation that there never was.
        let long = with_len(rmr, 1 << 40);
        let stale = forged(&long, |key| key[8..12].copy_from_slice(&77_u32.to_le_bytes()));
        let ends = |what: Result<Status, PostError>| match what {
            Err(PostError::Outside { .. } | PostError::Stale(_)) => {}
            Ok(status) => {
                let error = status.error.expect("it is refused");
                assert!(
                    matches!(*error, OpError::Outside(Rank(1)) | OpError::Stale(Rank(1))),
                    "{error}"
                );
            }
            Err(other) => panic!("{other}"),
        };
        ends(completed(runtime, |done| {
            runtime.post_fetch_add(Rank(1), &long, 1 << 39, 1).comp(done).submit()
        }));
        ends(completed(runtime, |done| {
            runtime.post_put(Rank(1), vec![1; 9], &long, 1 << 39).comp(done).submit()
        }));
        ends(completed(runtime, |done| {
            runtime.post_get(Rank(1), vec![1; 9], &long, 1 << 39).comp(done).submit()
        }));
        if !is_mapped(runtime) {
            ends(completed(runtime, |done| {
                runtime.post_get(Rank(1), vec![1; 9], &stale, 0).comp(done).submit()
            }));
            ends(completed(runtime, |done| {
                runtime.post_fetch_add(Rank(1), &stale, 0, 1).comp(done).submit()
            }));
        }
    }
}

fn is_mapped(runtime: &Runtime) -> bool {
    runtime.settings().of_transports().cuda_ipc().gpu_ipc() == carrack::settings::AutoChoice::Auto
}

/// Runs the role: messages from device memory go into receives of the host and of a device that are
/// shorter.
pub(crate) fn truncated(role: &Role) {
    let runtime = role.runtime(settings(role.words[0] == 1));
    let gpus = gpus(&runtime);
    for (turn, len) in [1, 100, 8193, BLOCK + 1, 3 * BLOCK].into_iter().enumerate() {
        for kind in 0..KINDS {
            let memory = PoisonedMemory::new(&gpus, if role.rank == 0 { 2 } else { kind });
            let tag = (turn * KINDS + kind) as u64;
            let error = if role.rank == 0 {
                memory.fill(len, 5);
                sent(&runtime, 1, memory.part(len), tag).unwrap().error
            } else {
                memory.poison(len);
                let status = received(&runtime, 0, memory.part(len - 1), tag).unwrap();
                memory.check_poison(len);
                assert_eq!(status.buffer.len(), len - 1, "the buffer comes back");
                Some(status.error.expect("it was too long"))
            };
            match error.as_deref() {
                Some(OpError::Truncated { message, buffer }) => {
                    assert_eq!((*message, *buffer), (len, len - 1))
                }
                // The message was small, and in flight before the check.
                None if role.rank == 0 && len <= 8192 => {}
                other => panic!("{other:?}"),
            }
        }
    }
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: managed memory moves while it is used. The library does not touch it, and its
/// errors name it.
pub(crate) fn managed(role: &Role) {
    let runtime = role.runtime(settings(role.words[0] == 1));
    let region = gpus(&runtime)[0].allocate(BLOCK, Flavour::Managed).unwrap();
    let refused = runtime.register_memory(&region).unwrap_err();
    assert!(refused.to_string().contains("managed"), "{refused}");
    let window = Region::host(BLOCK);
    let mr = runtime.register_memory(&window).unwrap();
    role.tells("window", &mr.remote_key().to_bytes());
    if role.rank == 0 {
        let rmr = RemoteKey::from_bytes(&role.told("window", 1)).unwrap();
        for len in [9, BLOCK] {
            let part = || region.slice(0, len).unwrap();
            let put = runtime.post_put(Rank(1), part(), &rmr, 0).try_submit();
            assert!(matches!(put, Err(PostError::Memory(CopyError::Managed { .. }))), "{put:?}");
            let sent = sent(&runtime, 1, part(), 1).unwrap();
            assert!(
                matches!(sent.error.as_deref(), Some(OpError::Copy(CopyError::Managed { .. }))),
                "{sent:?}"
            );
        }
        for len in [9, BLOCK] {
            drop(sent(&runtime, 1, vec![1; len], 2).unwrap());
        }
    } else {
        for len in [9, BLOCK] {
            let got = received(&runtime, 0, region.slice(0, len).unwrap(), 2).unwrap();
            assert!(
                matches!(got.error.as_deref(), Some(OpError::Copy(CopyError::Managed { .. }))),
                "{got:?}"
            );
        }
    }
    role.meet("over", &runtime, 0..2);
    assert!(runtime.pending().operations.is_empty(), "{}", runtime.pending());
    drop(mr);
}
