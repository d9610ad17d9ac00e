//! Messages that lie in memory of a GPU, fetched from there by the receiver's copy engine.
//!
//! ```text
//! sender                                receiver
//!   introduce (name, key) ───────────►   keeps the key: once for each region
//!   RTS (size, tx, name, offset) ─────►  meets its receive; maps the region, once;
//!                                        its copy engine fetches the bytes
//!   ◄──────────────────────── FIN (tx)
//!                                        or, where it cannot be mapped:
//!   ◄─────────────── CTS (tx, rx, limit)
//!   copies the bytes into host memory, and sends them in fragments
//! ```
//!
//! The exposed region is a whole allocation, for all messages in it, as long as the program holds
//! it. The runtime does not keep the memory. Fetched bytes count only if the region was not
//! withdrawn meanwhile; else the receiver asks for fragments, and finds out if the sender is gone.

use super::carrier::Carrier;
use super::landing::{Fetched, Landing, Owed};
use super::port::Port;
use super::target::Target;
use super::through::Moving;
use crate::names::Rank;
use crate::op::OpContext;
use crate::peer::route::Linked;
use crate::protocol::header::Message;
use crate::protocol::wire::{Mapped, Rts};
use carrack_transports::contract::{
    Busy, Domain, Exported, Header, Imported, Locality, Op, Payload, Submit, SubmitError,
    WeakImported, WireKey,
};
use carrack_transports::gpu::{Flavour, Gpu};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, MapError, MemMut, MemRef, Region, WeakRegion};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Regions that are exposed at a time; beyond that the least recently used one is withdrawn.
const EXPOSED: usize = 256;
/// Known regions of one peer, at most: a bound of the memory that a peer can make this rank use.
const KNOWN: usize = 2 * EXPOSED;
/// Bytes of a key, at most.
const LONGEST_KEY: usize = 1024;

/// Regions of a rank in which messages lie. This does not keep them alive: see
/// [`Keeper`](carrack_transports::mem::Keeper).
#[derive(Default)]
pub(crate) struct Exposures(Mutex<ExposureList>);

#[derive(Default)]
struct ExposureList {
    /// The latest at the end.
    all: VecDeque<Arc<Exposure>>,
    names: u64,
    /// The runtime is ending.
    is_ending: bool,
}

struct Exposure {
    region: WeakRegion,
    /// The addresses of the region.
    range: Range<usize>,
    name: u64,
    /// The export, or the reason why it failed.
    exported: Result<Exported, String>,
    /// The devices and ranks that have been told.
    told: Mutex<BTreeSet<(u32, Rank)>>,
}

impl Exposures {
    fn list(&self) -> MutexGuard<'_, ExposureList> {
        self.0.lock()
    }

    /// Returns the exposure of a region: its export, or the reason against one. `None`: not now.
    fn expose(&self, domain: &dyn Domain, region: &Region) -> Option<Arc<Exposure>> {
        let mut list = self.list();
        if list.is_ending {
            return None;
        }
        if let Some(latest) = list.all.back()
            && latest.region.is_of(region)
        {
            return Some(latest.clone());
        }
        let known = list.all.iter().position(|one| one.region.is_of(region));
        if let Some(one) = known.and_then(|at| list.all.remove(at)) {
            list.all.push_back(one.clone());
            return Some(one);
        }
        list.names += 1;
        let name = list.names;
        // Without the lock: this may free memory of the program, and run its code.
        drop(list);
        // First withdraw the region that lay at its address before: a peer's driver may not open
        // one while it has the other open.
        self.withdraw_gone();
        let exported = match region.is_joined() {
            true => {
                Err("it is made of several handles, whose names are too long for an introduction"
                    .into())
            }
            false => match domain.export(region) {
                // The next message tries again.
                Err(MapError::Lacking(_)) => return None,
                exported => exported.map_err(|why| why.to_string()),
            },
        };
        if let Err(why) = &exported {
            tracing::info!(why, "messages from a region go by way of host memory");
        }
        let range = region.addr()..region.addr().saturating_add(region.len());
        let (region, told) = (region.downgrade(), Mutex::default());
        let one = Arc::new(Exposure { region, range, name, exported, told });
        let mut list = self.list();
        list.all.push_back(one.clone());
        let old = if list.all.len() > EXPOSED { list.all.pop_front() } else { None };
        drop(list);
        drop(old);
        Some(one)
    }

    /// Withdraws regions that are gone.
    pub(crate) fn withdraw_gone(&self) {
        let mut list = self.list();
        if list.all.iter().all(|one| !one.region.is_gone()) {
            return;
        }
        let (gone, kept) =
            std::mem::take(&mut list.all).into_iter().partition(|one| one.region.is_gone());
        list.all = kept;
        drop(list);
        drop::<VecDeque<_>>(gone);
    }

    /// Withdraws regions that overlap a range of addresses.
    pub(crate) fn withdraw(&self, range: &Range<usize>) {
        let mut list = self.list();
        let (gone, kept) = std::mem::take(&mut list.all)
            .into_iter()
            .partition(|one| one.range.start < range.end && range.start < one.range.end);
        list.all = kept;
        drop(list);
        drop::<VecDeque<_>>(gone);
    }

    /// Withdraws all regions, before buffers are given back from which peers may be fetching.
    pub(crate) fn end(&self) {
        let mut list = self.list();
        list.is_ending = true;
        let all = std::mem::take(&mut list.all);
        drop(list);
        drop(all);
    }
}

/// The latest reasons why GPU memory of other ranks was not mapped here, for reports.
#[derive(Default)]
pub(crate) struct Unmapped(Mutex<HashMap<Rank, String>>);

impl Unmapped {
    /// Ranks with a reason, at most.
    const MOST: usize = 256;

    pub(super) fn note(&self, owner: Rank, why: &str) {
        let mut all = self.0.lock();
        if all.len() < Self::MOST || all.contains_key(&owner) {
            all.insert(owner, why.to_owned());
        }
    }

    pub(crate) fn of(&self, owner: Rank) -> Option<String> {
        self.0.lock().get(&owner).cloned()
    }
}

/// Regions of peers in which messages lie, by the rank and its name for them. Few exist as a rule;
/// each message looks one up, and peers choose the names.
#[derive(Default)]
pub(crate) struct Introduced(Mutex<BTreeMap<(Rank, u64), Arc<Known>>>);

/// A region of a peer.
pub(crate) struct Known {
    key: WireKey,
    imported: OnceLock<Result<RegionImport, String>>,
    /// The time of the last use: larger is later.
    used: AtomicU64,
}

/// The import of a region of a peer.
enum RegionImport {
    Mapped(Imported),
    /// A region of another rank in this process. A strong reference would keep it from being
    /// freed.
    Own(WeakImported),
}

impl RegionImport {
    fn of(imported: Imported) -> Self {
        if imported.is_own() { Self::Own(imported.downgrade()) } else { Self::Mapped(imported) }
    }

    fn get(&self) -> Option<Imported> {
        match self {
            Self::Mapped(imported) => Some(imported.clone()),
            Self::Own(own) => own.upgrade(),
        }
    }

    /// Returns `true` if its owner has withdrawn it.
    fn has_ended(&self) -> bool {
        match self {
            Self::Mapped(imported) => imported.region().is_none(),
            Self::Own(own) => own.upgrade().is_none_or(|imported| imported.region().is_none()),
        }
    }
}

impl Introduced {
    fn all(&self) -> MutexGuard<'_, BTreeMap<(Rank, u64), Arc<Known>>> {
        self.0.lock()
    }

    /// Releases some regions. They are closed without the lock.
    fn drop_those(&self, are_gone: impl Fn(Rank, &Known) -> bool) {
        let mut gone = Vec::new();
        self.all().retain(|&(rank, _), known| {
            let is_gone = are_gone(rank, known);
            if is_gone {
                gone.push(known.clone());
            }
            !is_gone
        });
        drop(gone);
    }

    /// Handles the introduction of a region by a peer.
    ///
    /// # Errors
    /// The key is too long, or cannot be read.
    pub(crate) fn introduce(&self, by: Rank, name: u64, key: &Payload) -> Result<(), String> {
        if key.len() > LONGEST_KEY {
            return Err(format!("it introduces a region by {} bytes", key.len()));
        }
        let mut bytes = vec![0; key.len()];
        copy_now(MemMut::host(&mut bytes), key.view()).map_err(|error| error.to_string())?;
        let known =
            Known { key: WireKey(bytes), imported: OnceLock::new(), used: AtomicU64::new(now()) };
        let mut all = self.all();
        let theirs = all.iter().filter(|((rank, _), _)| *rank == by);
        let oldest = theirs.clone().min_by_key(|(_, known)| known.used.load(Ordering::Relaxed));
        let oldest = if theirs.count() >= KNOWN { oldest.map(|(name, _)| *name) } else { None };
        let gone = oldest.and_then(|name| all.remove(&name));
        all.insert((by, name), Arc::new(known));
        drop(all);
        drop(gone);
        Ok(())
    }

    /// Releases the regions that their owners have withdrawn.
    pub(crate) fn release_withdrawn(&self) {
        self.drop_those(|_, known| {
            known
                .imported
                .get()
                .is_some_and(|held| held.as_ref().is_ok_and(RegionImport::has_ended))
        });
    }

    /// Forgets a peer that is gone.
    pub(crate) fn forget(&self, peer: Rank) {
        self.drop_those(|rank, _| rank == peer);
    }
}

/// Returns a number that is larger at each call.
fn now() -> u64 {
    static NOW: AtomicU64 = AtomicU64::new(0);
    NOW.fetch_add(1, Ordering::Relaxed)
}

impl Carrier {
    /// Returns the transport that maps GPU memory, if there is one.
    pub(crate) fn maps(&self) -> Option<(&'static str, &dyn Domain)> {
        let found = self.domains.iter().find(|(_, domain)| domain.maps_gpu_memory());
        found.map(|(name, domain)| (*name, &**domain))
    }

    /// Tries to export fresh memory of a device, for reports.
    ///
    /// # Errors
    /// The driver's reason.
    pub(crate) fn try_export(&self, gpu: &dyn Gpu) -> Result<(), String> {
        let Some((_, domain)) = self.maps() else { return Ok(()) };
        let region = gpu.allocate(1, Flavour::Plain).map_err(|why| why.to_string())?;
        domain.export(&region).map(drop).map_err(|why| why.to_string())
    }

    /// Returns `true` if the other end of a link may map this rank's GPU memory.
    pub(crate) fn may_map(&self, linked: &Linked) -> bool {
        linked.is_on_this_node && linked.caps.locality != Locality::Process && self.maps().is_some()
    }
}

impl Port {
    /// Offers a message in GPU memory to a rank that can map it. `None`: it cannot be exported,
    /// and goes through host memory. The buffer is taken once the link has taken the offer.
    pub(crate) fn offer_mapped(
        &self,
        carrier: &Carrier,
        linked: &Linked,
        header: Header,
        operation: OpContext,
        buffer: &mut Buffer,
    ) -> Option<Result<Submit, SubmitError>> {
        let Buffer::Region(slice) = &*buffer else { return None };
        let (rank, region) = (operation.rank, slice.region());
        let root = region.root();
        let exposure = carrier.exposures.expose(carrier.maps()?.1, root)?;
        let key = &exposure.exported.as_ref().ok()?.key.0;
        if self.transfers.is_full() {
            return Some(Ok(Submit::Busy(Busy::Full)));
        }
        let place = (self.index, rank);
        let mut told = exposure.told.lock();
        if !told.contains(&place) {
            let header = Message::Introduce { name: exposure.name }.encode();
            match linked.link.submit(Op::AmCopied { header, bytes: MemRef::host(key) }) {
                Ok(Submit::Done) => told.insert(place),
                other => return Some(other),
            };
        }
        drop(told);
        let offset = (region.addr() - root.addr() + slice.offset()) as u64;
        let mapped = Some(Mapped { name: exposure.name, offset });
        Some(self.transfers.offer(linked, header, operation, buffer, mapped))
    }

    /// Lets the copy engine fetch a message.
    ///
    /// # Errors
    /// The message cannot be fetched: the target is given back.
    pub(super) fn fetch(
        &self,
        carrier: &Carrier,
        (from, rts): (Rank, Rts),
        mapped: Mapped,
        mut target: Target,
    ) -> Result<(), Target> {
        let known = self.transfers.introduced.all().get(&(from, mapped.name)).cloned();
        let near = target.buffer().and_then(|buffer| buffer.gpu().cloned());
        let source = known
            .as_ref()
            .and_then(|known| known.part(carrier, from, near.as_ref(), (mapped.offset, rts.size)));
        let (Some(known), Some((imported, source)), Some(place)) = (known, source, target.buffer())
        else {
            return Err(target);
        };
        known.used.store(now(), Ordering::Relaxed);
        let size = source.len();
        match Moving::start(std::mem::take(place), source, &carrier.staging) {
            Ok(transfer) => {
                let landing = Landing::of_message(transfer, target.apart(from, size).0);
                let fetched = Fetched { tx: rts.tx, from: imported };
                let owed = Some(Box::new(Owed::Fetched(fetched)));
                self.landings.add(Landing { owed, ..landing });
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
    /// Returns a part of the region, mapped here.
    fn part(
        &self,
        carrier: &Carrier,
        owner: Rank,
        near: Option<&Arc<dyn Gpu>>,
        (offset, size): (u64, u64),
    ) -> Option<(Imported, Buffer)> {
        let import = || {
            let forbids = carrier.maps_nothing.as_ref().map(|why| why.reason.as_str());
            let (_, domain) =
                carrier.maps().ok_or(forbids.unwrap_or("no transport in the node"))?;
            let imported = carrier.import(domain, owner, &self.key, near);
            if let Err(why) = &imported {
                tracing::info!(%why, "messages from a peer's GPU memory come by way of host \
                    memory");
            }
            imported
        };
        let held = match self.imported.get() {
            Some(held) => held,
            None => {
                let held = match import() {
                    // The next message tries again.
                    Err(MapError::Lacking(_)) => return None,
                    imported => imported.map(RegionImport::of).map_err(|why| why.to_string()),
                };
                self.imported.get_or_init(|| held)
            }
        };
        let imported = held.as_ref().ok()?.get()?;
        let region = imported.region()?;
        let slice = region.slice(usize::try_from(offset).ok()?, usize::try_from(size).ok()?)?;
        Some((imported, Buffer::Region(slice)))
    }
}
