//! Messages that lie in memory of a GPU, fetched from there by the receiver's copy engine.
//!
//! ```text
//! sender                                receiver
//!   introduce (name, key) ───────────►   keeps the key: once for each region
//!   offer (size, token, name, offset) ►  meets its receive; maps the region, once; its copy engine fetches the bytes
//!   ◄───────────────────── finish (token)
//!                                        or, where it cannot be mapped:
//!   ◄─────────── clear (token, landing)
//!   copies the bytes into host memory, and sends them part by part
//! ```
//!
//! A region is exposed as long as somebody else than this list has it, so nobody's memory is kept for it.

use super::incoming::Target;
use super::wire::{Mapped, Offer};
use crate::device::{DeviceInner, Outstanding};
use crate::names::Rank;
use crate::peer::route::Linked;
use crate::progress::Landing;
use crate::protocol::header::Message;
use crate::runtime::Inner;
use carrack_transports::contract::{Exported, Header, Imported, Op, Payload, Submit, SubmitError, WireKey};
use carrack_transports::cuda_ipc;
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, MemMut, MemRef, Region, Transfer};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Regions that are exposed at a time; the one that was used longest ago makes room.
const EXPOSED: usize = 256;
/// Regions of one peer's that are known at a time. It exposes no more, unless it means harm.
const KNOWN: usize = 2 * EXPOSED;
/// Bytes of a key, at most.
const LONGEST_KEY: usize = 1024;

/// Regions of a rank's in which messages lie.
#[derive(Default)]
pub(crate) struct Exposures(Mutex<State>);

#[derive(Default)]
struct State {
    /// The latest at the end.
    all: VecDeque<Exposure>,
    names: u64,
}

struct Exposure {
    region: Region,
    name: u64,
    /// Or why it cannot be exported.
    exported: Result<Exported, String>,
    /// The devices and ranks that have been told.
    told: HashSet<(u32, Rank)>,
}

impl Exposures {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of regions that nobody else has.
    pub(crate) fn let_go(&self) {
        let mut state = self.state();
        if state.all.is_empty() {
            return;
        }
        let (kept, gone) = std::mem::take(&mut state.all).into_iter().partition(|one: &Exposure| {
            // Here, and in the export.
            let own = if one.exported.is_ok() { 2 } else { 1 };
            one.region.handles() > own
        });
        state.all = kept;
        drop(state);
        drop::<VecDeque<_>>(gone);
    }
}

/// Regions of peers' in which messages lie, by the rank and its name for them.
#[derive(Default)]
pub(crate) struct Introduced(Mutex<HashMap<(Rank, u64), Arc<Known>>>);

/// A region of a peer's.
struct Known {
    key: WireKey,
    imported: OnceLock<Result<Imported, String>>,
}

impl Introduced {
    fn all(&self) -> MutexGuard<'_, HashMap<(Rank, u64), Arc<Known>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer tells of a region.
    ///
    /// # Errors
    /// It makes no sense.
    pub(crate) fn introduce(&self, by: Rank, name: u64, key: &Payload) -> Result<(), String> {
        if key.len() > LONGEST_KEY {
            return Err(format!("it introduces a region by {} bytes", key.len()));
        }
        let mut bytes = vec![0; key.len()];
        copy_now(MemMut::host(&mut bytes), key.view()).map_err(|error| error.to_string())?;
        let mut all = self.all();
        let theirs: Vec<u64> = all.keys().filter(|(rank, _)| *rank == by).map(|(_, name)| *name).collect();
        if theirs.len() >= KNOWN
            && let Some(&oldest) = theirs.iter().min()
        {
            all.remove(&(by, oldest));
        }
        all.insert((by, name), Arc::new(Known { key: WireKey(bytes), imported: OnceLock::new() }));
        Ok(())
    }

    /// Lets go of what has been withdrawn over there.
    pub(crate) fn let_go(&self) {
        let gone: Vec<_> = {
            let mut all = self.all();
            let ended = |known: &Known| {
                known
                    .imported
                    .get()
                    .is_some_and(|known| known.as_ref().is_ok_and(|known| known.region().is_none()))
            };
            all.extract_if(|_, known| ended(known)).collect()
        };
        drop(gone);
    }

    /// Forgets a peer that is gone.
    pub(crate) fn forget(&self, peer: Rank) {
        let gone: Vec<_> = self.all().extract_if(|(rank, _), _| *rank == peer).collect();
        drop(gone);
    }
}

impl Inner {
    /// The transport that maps memory of GPUs, if there is one.
    fn maps(&self) -> Option<&dyn carrack_transports::contract::Domain> {
        let found = self.domains.iter().find(|(name, _)| *name == cuda_ipc::NAME);
        found.map(|(_, domain)| &**domain)
    }
}

impl DeviceInner {
    /// Offers a message that lies in memory of a GPU to a rank that can map it. `None`: it cannot be exported, and goes by
    /// way of host memory. The buffer is taken when the link has taken the offer.
    pub(crate) fn offer_mapped(
        &self,
        runtime: &Inner,
        linked: &Linked,
        header: Header,
        operation: Outstanding,
        buffer: &mut Buffer,
    ) -> Option<Result<Submit, SubmitError>> {
        let Buffer::Region(slice) = &*buffer else { return None };
        let domain = runtime.maps()?;
        if linked.transport != carrack_transports::shm::NAME {
            return None;
        }
        let (rank, region, offset) = (operation.rank, slice.region(), slice.offset() as u64);
        let mut state = runtime.exposures.state();
        let state = &mut *state;
        let known = state.all.iter().position(|one| one.region.is_same(region));
        let mut exposure = match known.and_then(|at| state.all.remove(at)) {
            Some(exposure) => exposure,
            None => {
                state.names += 1;
                let exported = domain.export(region);
                if let Err(why) = &exported {
                    tracing::info!(why, "messages from a region go by way of host memory");
                }
                let region = region.clone();
                Exposure { region, name: state.names, exported, told: HashSet::new() }
            }
        };
        let name = exposure.name;
        let told = match &exposure.exported {
            Err(_) => None,
            Ok(_) if exposure.told.contains(&(self.index, rank)) => Some(Ok(Submit::Done)),
            Ok(exported) => {
                let header = Message::Introduce { name }.encode();
                Some(linked.link.submit(Op::AmCopied { header, bytes: MemRef::host(&exported.key.0) }))
            }
        };
        if matches!(told, Some(Ok(Submit::Done))) {
            exposure.told.insert((self.index, rank));
        }
        state.all.push_back(exposure);
        let old = if state.all.len() > EXPOSED { state.all.pop_front() } else { None };
        match told? {
            Ok(Submit::Done) => {}
            other => return Some(other),
        }
        drop(old);
        let mapped = Some(Mapped { name, offset });
        Some(self.bulk.offer(linked, header, operation, buffer, &mut None, mapped))
    }

    /// Has a message fetched by the copy engine.
    ///
    /// # Errors
    /// It cannot be: the target is given back.
    pub(super) fn fetch(
        &self,
        runtime: &Inner,
        (from, offer): (Rank, Offer),
        mapped: Mapped,
        mut target: Target,
    ) -> Result<(), Target> {
        let known = self.bulk.introduced.all().get(&(from, mapped.name)).cloned();
        let near = target.buffer().and_then(|buffer| buffer.gpu().cloned());
        let source =
            known.as_ref().and_then(|known| known.part(runtime, near.as_ref(), mapped.offset, offer.size));
        let (Some(source), Some(place)) = (source, target.buffer()) else { return Err(target) };
        let size = source.len();
        match Transfer::start(std::mem::take(place), source) {
            Ok(transfer) => {
                let (comp, status) = target.end(from, size, None);
                let about = (from, status.tag, size);
                let landing = Landing::of_message(transfer, comp, about, status.user_context);
                self.add_landing(Landing { finish: Some(offer.token), ..landing });
                Ok(())
            }
            Err(refused) => {
                *place = refused.dst;
                Err(target)
            }
        }
    }
}

impl Known {
    /// A part of it, mapped here.
    fn part(&self, runtime: &Inner, near: Option<&Arc<dyn Gpu>>, offset: u64, size: u64) -> Option<Buffer> {
        let import = || {
            let domain = runtime.maps().ok_or("CARRACK_GPU_IPC=off")?;
            let imported = domain.import(&self.key, near);
            if let Err(why) = &imported {
                tracing::info!(why, "messages from a peer's GPU memory come by way of host memory");
            }
            imported
        };
        let region = self.imported.get_or_init(import).as_ref().ok()?.region()?;
        let slice = region.slice(usize::try_from(offset).ok()?, usize::try_from(size).ok()?)?;
        Some(Buffer::Region(slice))
    }
}
