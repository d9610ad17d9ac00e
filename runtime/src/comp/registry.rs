//! The completion objects that other ranks can name.
//!
//! A message carries a number. Progress looks it up in the thread's snapshot of the table, so that
//! the path of a message takes no lock and counts no reference.

use super::Completion;
use crate::error::ResourceError;
use crate::names::RemoteComp;
use carrack_transports::sync::Handles;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of a table, at most: the numbers that names can have.
const LIMIT: usize = RemoteComp::NUMBERS;

/// The content of a slot.
enum SlotState {
    /// Free: the next object gets it.
    Free,
    /// Set aside by `reserve`: an object gets it by its name only.
    Reserved,
    /// Retired: each of its names has been used.
    Spent,
    /// An object, with a mark if the slot becomes reserved again.
    Used(Arc<dyn Completion>, bool),
}

struct CompSlot {
    /// Present name of the slot, or the next one if it is free.
    name: RemoteComp,
    state: SlotState,
}

/// A text, and the object that has its name.
type Texted = (Box<str>, Arc<dyn Completion>);

/// The table.
///
/// A slot gets another generation each time, so a message to an earlier object does not reach a
/// later one. A slot without a fresh generation is not used again. The next name depends only on
/// the order of the calls, so ranks that make the same calls have the same names. A reserved slot
/// keeps its name, which the program chose before it had the object.
///
/// Names by text are apart: they are the same whatever the order of the calls.
pub(crate) struct Registry {
    tables: Mutex<Tables>,
    /// Version, which grows with each change.
    version: AtomicU64,
}

#[derive(Default)]
struct Tables {
    slots: Vec<CompSlot>,
    texts: BTreeMap<RemoteComp, Texted>,
}

/// The table as it was at some version.
#[derive(Default)]
pub(crate) struct Snapshot {
    version: u64,
    comps: Box<[Option<NamedComp>]>,
    /// Objects with a name by text, in the order of their names.
    texts: Box<[NamedComp]>,
}

/// An object, and its name.
type NamedComp = (RemoteComp, Arc<dyn Completion>);

impl Snapshot {
    /// Returns the object under a name.
    #[inline]
    pub(crate) fn get(&self, comp: RemoteComp) -> Option<&Arc<dyn Completion>> {
        match self.comps.get(comp.number()) {
            Some(Some((name, object))) if *name == comp => Some(object),
            _ => self.by_text(comp),
        }
    }

    #[cold]
    fn by_text(&self, comp: RemoteComp) -> Option<&Arc<dyn Completion>> {
        let at = self.texts.binary_search_by_key(&comp, |(name, _)| *name).ok()?;
        Some(&self.texts[at].1)
    }
}

impl Registry {
    pub(crate) fn new() -> Self {
        // Slot 0 is never given: a header of zeros names no object.
        let first = CompSlot { name: RemoteComp(0), state: SlotState::Reserved };
        let tables = Tables { slots: vec![first], texts: BTreeMap::new() };
        Self { tables: Mutex::new(tables), version: AtomicU64::new(1) }
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock()
    }

    /// Brings a thread's snapshot up to date. One load when nothing has changed. Objects that are
    /// not registered any more go to `left`: their handles may be the last ones, and a drop runs
    /// the user's code.
    #[inline]
    pub(crate) fn refresh(&self, snapshot: &mut Snapshot, left: &mut Handles<dyn Completion>) {
        if self.version.load(Ordering::Acquire) != snapshot.version {
            self.read(snapshot, left);
        }
    }

    #[cold]
    fn read(&self, snapshot: &mut Snapshot, left: &mut Handles<dyn Completion>) {
        let tables = self.lock();
        snapshot.version = self.version.load(Ordering::Acquire);
        let comps = tables.slots.iter().map(|slot| match &slot.state {
            SlotState::Used(comp, _) => Some((slot.name, comp.clone())),
            SlotState::Free | SlotState::Reserved | SlotState::Spent => None,
        });
        let before = std::mem::replace(&mut snapshot.comps, comps.collect());
        let texts = tables.texts.iter().map(|(name, (_, comp))| (*name, comp.clone()));
        let texts_before = std::mem::replace(&mut snapshot.texts, texts.collect());
        drop(tables);
        let is_left = |(name, comp): &NamedComp| {
            snapshot.get(*name).is_none_or(|now| !Arc::ptr_eq(now, comp))
        };
        let before = before.into_iter().flatten().chain(texts_before);
        before.filter(is_left).for_each(|(_, comp)| left.push(comp));
    }

    fn changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    fn name(at: usize) -> Result<RemoteComp, ResourceError> {
        let full = ResourceError::TooMany { what: "registered completion objects", limit: LIMIT };
        RemoteComp::of(at, 0).ok_or(full)
    }

    /// Gives the first free slot, or a new one.
    pub(crate) fn register(&self, comp: Arc<dyn Completion>) -> Result<RemoteComp, ResourceError> {
        let mut tables = self.lock();
        let slots = &mut tables.slots;
        let free = slots.iter().position(|slot| matches!(slot.state, SlotState::Free));
        let at = free.unwrap_or(slots.len());
        if at == slots.len() {
            slots.push(CompSlot { name: Self::name(at)?, state: SlotState::Free });
        }
        let slot = &mut slots[at];
        slot.state = SlotState::Used(comp, false);
        self.changed();
        Ok(slot.name)
    }

    /// Gives the name that is made of a text.
    ///
    /// # Errors
    /// An object has it.
    pub(crate) fn register_named(
        &self,
        text: &str,
        comp: Arc<dyn Completion>,
    ) -> Result<RemoteComp, ResourceError> {
        let name = RemoteComp::named(text);
        let mut tables = self.lock();
        match tables.texts.entry(name) {
            Entry::Occupied(taken) => {
                let (text, by) = (text.into(), taken.get().0.clone().into());
                return Err(ResourceError::Name { text, by });
            }
            Entry::Vacant(place) => _ = place.insert((text.into(), comp)),
        }
        self.changed();
        Ok(name)
    }

    /// Sets `count` slots in a row aside, and tells the first.
    pub(crate) fn reserve(&self, count: u32) -> Result<RemoteComp, ResourceError> {
        let mut tables = self.lock();
        let slots = &mut tables.slots;
        let first = slots.len();
        let name = Self::name(first)?;
        Self::name(first + count as usize)?;
        let names = (first..first + count as usize).filter_map(|at| RemoteComp::of(at, 0));
        slots.extend(names.map(|name| CompSlot { name, state: SlotState::Reserved }));
        Ok(name)
    }

    /// Gives a slot that was set aside.
    pub(crate) fn register_at(
        &self,
        name: RemoteComp,
        comp: Arc<dyn Completion>,
    ) -> Result<(), ResourceError> {
        let wrong = |why| ResourceError::Slot { slot: name, why };
        let mut tables = self.lock();
        let slots = &mut tables.slots;
        let slot =
            slots.get_mut(name.number()).filter(|slot| slot.name == name && name.number() != 0);
        match slot.map(|slot| &mut slot.state) {
            Some(state @ SlotState::Reserved) => *state = SlotState::Used(comp, true),
            Some(SlotState::Used(..)) => return Err(wrong("is in use: deregister it first")),
            _ => return Err(wrong("was not reserved: call reserve_comps first")),
        }
        self.changed();
        Ok(())
    }

    /// Frees a slot. Progress that another thread is making may still deliver to its object.
    pub(crate) fn deregister(&self, name: RemoteComp) -> Result<(), ResourceError> {
        if name.is_of_text() {
            let removed = self.lock().texts.remove(&name);
            self.changed();
            // Without the lock, as below.
            let unknown =
                ResourceError::Slot { slot: name, why: "is not in use: deregister a name once" };
            return removed.map(drop).ok_or(unknown);
        }
        let mut tables = self.lock();
        let slots = &mut tables.slots;
        let slot = slots.get_mut(name.number()).filter(|slot| slot.name == name);
        let Some(slot @ CompSlot { state: SlotState::Used(..), .. }) = slot else {
            return Err(ResourceError::Slot {
                slot: name,
                why: "is not in use: deregister a name once",
            });
        };
        let next = RemoteComp(name.0.wrapping_add(LIMIT as u32));
        let left = if matches!(slot.state, SlotState::Used(_, true)) {
            std::mem::replace(&mut slot.state, SlotState::Reserved)
        } else if next > name && !next.is_of_text() {
            slot.name = next;
            std::mem::replace(&mut slot.state, SlotState::Free)
        } else {
            std::mem::replace(&mut slot.state, SlotState::Spent)
        };
        self.changed();
        drop(tables);
        // Without the lock: this may be the last handle, and the drop of a handler's captures may
        // deregister others.
        drop(left);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comp::{AsCompletion, Counter};

    fn comp() -> Arc<dyn Completion> {
        Counter::new().as_completion().clone()
    }

    #[test]
    fn a_number_is_given_out_again_only_after_it_was_freed() {
        let registry = Registry::new();
        let first = registry.register(comp()).unwrap();
        let second = registry.register(comp()).unwrap();
        assert_ne!(first, second);
        registry.deregister(first).unwrap();
        assert!(registry.deregister(first).is_err(), "freed once");
        let again = registry.register(comp()).unwrap();
        assert_eq!(
            (again.number(), again.0),
            (first.number(), first.0 + (1 << 20)),
            "in the next generation"
        );
        assert!(registry.deregister(first).is_err(), "the earlier name frees no later object");
        registry.deregister(again).unwrap();
    }

    #[test]
    fn equal_calls_give_equal_names_and_no_name_is_given_twice() {
        let registries = [Registry::new(), Registry::new()];
        let mut given = std::collections::HashSet::new();
        let mut register = || {
            let [one, other] =
                registries.each_ref().map(|registry| registry.register(comp()).unwrap());
            assert_eq!(one, other);
            assert!(given.insert(one), "{one:?} was given before");
            one
        };
        let kept = register();
        // More rounds than a number has generations.
        for _ in 0..10_000 {
            let name = register();
            registries.iter().for_each(|registry| registry.deregister(name).unwrap());
        }
        let last = register();
        assert_eq!((kept.number(), last.number()), (1, 6), "four numbers have been used up");
        for name in [RemoteComp(2), RemoteComp(u32::MAX), RemoteComp(last.0 - (1 << 20))] {
            assert!(registries[0].register_at(name, comp()).is_err());
            assert!(registries[0].deregister(name).is_err());
        }
    }

    #[test]
    fn a_name_by_text_depends_on_no_order_and_stands_apart_from_the_others() {
        let (registry, mut snapshot) = (Registry::new(), Snapshot::default());
        let mut left = Handles::default();
        let (first, second) = (comp(), comp());
        let by_order = registry.register(comp()).unwrap();
        let halo = registry.register_named("halo", first.clone()).unwrap();
        assert_eq!(halo, RemoteComp::named("halo"));
        assert!(halo != RemoteComp::named("hal0") && halo.is_of_text() && !by_order.is_of_text());
        let taken = registry.register_named("halo", second.clone()).unwrap_err().to_string();
        assert!(taken.contains("halo"), "{taken}");
        registry.refresh(&mut snapshot, &mut left);
        assert!(Arc::ptr_eq(snapshot.get(halo).unwrap(), &first));
        assert!(snapshot.get(by_order).is_some());
        assert!(snapshot.get(RemoteComp::named("another")).is_none());
        registry.deregister(halo).unwrap();
        assert!(registry.deregister(halo).is_err(), "once");
        registry.register_named("halo", second.clone()).unwrap();
        registry.refresh(&mut snapshot, &mut left);
        assert!(Arc::ptr_eq(snapshot.get(halo).unwrap(), &second), "under the same name");
        assert!(left.take(&first).is_some() && left.is_empty());
    }

    #[test]
    fn reserved_slots_are_given_to_no_other_object() {
        let registry = Registry::new();
        let slots = registry.reserve(2).unwrap();
        let other = registry.register(comp()).unwrap();
        assert_eq!(other.0, slots.0 + 2);
        let at = RemoteComp(slots.0 + 1);
        registry.register_at(at, comp()).unwrap();
        assert!(registry.register_at(at, comp()).is_err(), "in use");
        assert!(registry.register_at(RemoteComp(99), comp()).is_err(), "never reserved");
        assert!(registry.register_at(RemoteComp(0), comp()).is_err(), "it names no object");
        registry.deregister(at).unwrap();
        registry.register_at(at, comp()).unwrap();
    }

    #[test]
    fn a_snapshot_changes_only_when_it_is_refreshed_and_leaves_what_is_not_registered_any_more() {
        let (registry, mut snapshot) = (Registry::new(), Snapshot::default());
        let mut left = Handles::default();
        let (first, second) = (comp(), comp());
        let name = registry.register(first.clone()).unwrap();
        assert!(snapshot.get(name).is_none());
        registry.refresh(&mut snapshot, &mut left);
        assert!(snapshot.get(name).is_some());
        registry.deregister(name).unwrap();
        assert!(snapshot.get(name).is_some() && left.is_empty());
        let again = registry.register(second.clone()).unwrap();
        registry.refresh(&mut snapshot, &mut left);
        assert!(snapshot.get(name).is_none(), "a late message finds no object");
        assert!(Arc::ptr_eq(snapshot.get(again).unwrap(), &second));
        assert!(left.take(&first).is_some() && left.is_empty());
    }
}
