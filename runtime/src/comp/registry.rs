//! The completion objects that other ranks can name.
//!
//! A message carries a number; progress looks it up in a snapshot of the table that the thread keeps, so
//! that the path of a message takes no lock and counts no reference.

use super::Completion;
use crate::error::ResourceError;
use crate::names::RemoteComp;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Slots that a table can have: the wire carries 32 bits, this bounds the memory.
const LIMIT: usize = 1 << 20;

#[derive(Clone)]
enum Slot {
    /// Nobody's.
    Free,
    /// Set aside by `reserve`.
    Reserved,
    /// In use; says whether it goes back to reserved.
    Used(Arc<dyn Completion>, bool),
}

/// The table.
pub(crate) struct Registry {
    slots: Mutex<Vec<Slot>>,
    /// Grows with each change.
    version: AtomicU64,
}

/// The table as it was at some version.
#[derive(Clone, Default)]
pub(crate) struct Snapshot {
    version: u64,
    comps: Arc<[Option<Arc<dyn Completion>>]>,
}

impl Snapshot {
    /// The object under a number.
    #[inline]
    pub(crate) fn get(&self, comp: RemoteComp) -> Option<&Arc<dyn Completion>> {
        self.comps.get(comp.0 as usize)?.as_ref()
    }
}

impl Registry {
    pub(crate) fn new() -> Self {
        // Slot 0 is nobody's: a header of zeros names no object.
        Self { slots: Mutex::new(vec![Slot::Reserved]), version: AtomicU64::new(1) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings a thread's snapshot up to date. One load when nothing has changed.
    #[inline]
    pub(crate) fn refresh(&self, snapshot: &mut Snapshot) {
        if self.version.load(Ordering::Acquire) != snapshot.version {
            self.read(snapshot);
        }
    }

    #[cold]
    fn read(&self, snapshot: &mut Snapshot) {
        let slots = self.lock();
        snapshot.version = self.version.load(Ordering::Acquire);
        snapshot.comps = slots
            .iter()
            .map(|slot| match slot {
                Slot::Used(comp, _) => Some(comp.clone()),
                Slot::Free | Slot::Reserved => None,
            })
            .collect();
    }

    fn changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    fn name(at: usize) -> Result<RemoteComp, ResourceError> {
        let full = ResourceError::TooMany { what: "registered completion objects", limit: LIMIT };
        u32::try_from(at).ok().filter(|_| at < LIMIT).map(RemoteComp).ok_or(full)
    }

    /// The first free slot, or a new one.
    pub(crate) fn register(&self, comp: Arc<dyn Completion>) -> Result<RemoteComp, ResourceError> {
        let mut slots = self.lock();
        let at = slots.iter().position(|slot| matches!(slot, Slot::Free)).unwrap_or(slots.len());
        let name = Self::name(at)?;
        if at == slots.len() {
            slots.push(Slot::Free);
        }
        slots[at] = Slot::Used(comp, false);
        self.changed();
        Ok(name)
    }

    /// Sets `count` slots in a row aside, and tells the first.
    pub(crate) fn reserve(&self, count: u32) -> Result<RemoteComp, ResourceError> {
        let mut slots = self.lock();
        let first = Self::name(slots.len())?;
        Self::name(slots.len() + count as usize)?;
        slots.extend((0..count).map(|_| Slot::Reserved));
        Ok(first)
    }

    /// A slot that was set aside.
    pub(crate) fn register_at(
        &self,
        name: RemoteComp,
        comp: Arc<dyn Completion>,
    ) -> Result<(), ResourceError> {
        let wrong = |why| ResourceError::Slot { slot: name, why };
        let mut slots = self.lock();
        match slots.get_mut(name.0 as usize) {
            Some(slot @ Slot::Reserved) if name.0 != 0 => *slot = Slot::Used(comp, true),
            Some(Slot::Used(..)) => return Err(wrong("is in use: deregister it first")),
            _ => return Err(wrong("was not reserved: call reserve_comps first")),
        }
        self.changed();
        Ok(())
    }

    /// Frees a slot. Progress that is under way on another thread may still deliver to its object.
    pub(crate) fn deregister(&self, name: RemoteComp) -> Result<(), ResourceError> {
        let mut slots = self.lock();
        match slots.get_mut(name.0 as usize) {
            Some(slot @ Slot::Used(..)) => {
                let reserved = matches!(slot, Slot::Used(_, true));
                *slot = if reserved { Slot::Reserved } else { Slot::Free };
            }
            _ => return Err(ResourceError::Slot { slot: name, why: "is not in use" }),
        }
        self.changed();
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
        assert_eq!(registry.register(comp()).unwrap(), first);
    }

    #[test]
    fn reserved_slots_are_given_to_nobody_else() {
        let registry = Registry::new();
        let slots = registry.reserve(2).unwrap();
        let other = registry.register(comp()).unwrap();
        assert_eq!(other.0, slots.0 + 2);
        let at = RemoteComp(slots.0 + 1);
        registry.register_at(at, comp()).unwrap();
        assert!(registry.register_at(at, comp()).is_err(), "in use");
        assert!(registry.register_at(RemoteComp(99), comp()).is_err(), "never reserved");
        assert!(registry.register_at(RemoteComp(0), comp()).is_err(), "nobody's");
        registry.deregister(at).unwrap();
        registry.register_at(at, comp()).unwrap();
    }

    #[test]
    fn a_snapshot_changes_only_when_it_is_refreshed() {
        let (registry, mut snapshot) = (Registry::new(), Snapshot::default());
        let name = registry.register(comp()).unwrap();
        assert!(snapshot.get(name).is_none());
        registry.refresh(&mut snapshot);
        assert!(snapshot.get(name).is_some());
        registry.deregister(name).unwrap();
        assert!(snapshot.get(name).is_some());
        registry.refresh(&mut snapshot);
        assert!(snapshot.get(name).is_none());
    }
}
