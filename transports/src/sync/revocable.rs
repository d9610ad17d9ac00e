//! The right to use an object of another process, which its owner can revoke.
//!
//! A *user* enters before each use and leaves after it. The owner revokes, and owns the object
//! alone once no user is inside, which [`revoke`](Revocable::revoke) tells. Both change one word:
//! if a user enters while the owner revokes, one sees the other. A user that is stopped inside
//! keeps the owner only from knowing that the object is free.

use super::primitives::{AtomicU32, Ordering};

/// A word in memory that both sides see. Zero, as in fresh memory, means that the right stands and
/// is not used.
#[repr(transparent)]
#[derive(Debug)]
pub struct Revocable(AtomicU32);

const REVOKED: u32 = 1 << 31;

impl Revocable {
    /// Makes a right that stands.
    #[allow(
        clippy::new_without_default,
        reason = "words are found in zeroed memory; only tests make one"
    )]
    pub fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Enters, for a user, until the value is dropped. `None`: the right was revoked.
    pub fn enter(&self) -> Option<Presence<'_>> {
        // Acquire and release: the use comes after this, whatever the order of its accesses.
        let inside = Presence(self);
        // On failure, dropping the value leaves again.
        (self.0.fetch_add(1, Ordering::AcqRel) & REVOKED == 0).then_some(inside)
    }

    /// Revokes the right, for the owner: no user enters any more. Returns `true` if none is
    /// inside; on `false`, ask again.
    pub fn revoke(&self) -> bool {
        // Acquire: the users' accesses inside have ended.
        self.0.fetch_or(REVOKED, Ordering::AcqRel) & !REVOKED == 0
    }
}

/// Presence of a user, until this is dropped.
#[derive(Debug)]
pub struct Presence<'a>(&'a Revocable);

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(all(test, loom))]
#[expect(unsafe_code, reason = "plain words are shared between threads")]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Thing {
        right: Revocable,
        bytes: UnsafeCell<u32>,
    }

    // SAFETY: loom finds out if the owner writes while a user is inside.
    unsafe impl Sync for Thing {}
    // SAFETY: as above.
    unsafe impl Send for Thing {}

    #[test]
    fn loom_what_is_revoked_is_used_by_none_who_enters_later_or_is_inside() {
        loom::model(|| {
            let thing = Arc::new(Thing { right: Revocable::new(), bytes: UnsafeCell::new(1) });
            let users = [0, 1].map(|_| {
                let thing = thing.clone();
                thread::spawn(move || {
                    if let Some(_inside) = thing.right.enter() {
                        // SAFETY: loom finds out if the owner is writing.
                        thing.bytes.with(|bytes| assert_eq!(unsafe { *bytes }, 1));
                    }
                })
            });
            while !thing.right.revoke() {
                thread::yield_now();
            }
            // SAFETY: loom finds out if a user is inside.
            thing.bytes.with_mut(|bytes| unsafe { *bytes = 2 });
            users.into_iter().for_each(|user| user.join().unwrap());
            assert!(thing.right.enter().is_none() && thing.right.revoke());
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_an_owner_knows_when_the_last_user_has_left() {
        let right = Revocable::new();
        let (one, other) = (right.enter().unwrap(), right.enter().unwrap());
        drop(one);
        assert!(!right.revoke() && right.enter().is_none());
        drop(other);
        assert!(right.revoke() && right.enter().is_none() && right.revoke());
    }
}
