//! A count and three flags in one word.

use super::primitives::{AtomicU32, Ordering};

/// Obstacles: the number of waiting operations, which the holder of their lock sets, and three
/// flags that any thread raises. One load, without a lock, finds that there are none.
#[derive(Default, Debug)]
pub struct Hurdles(AtomicU32);

/// One of the three flags of [`Hurdles`], or several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HurdleFlags(u32);

impl HurdleFlags {
    /// The first flag.
    pub const FIRST: Self = Self(1 << 31);
    /// The second flag.
    pub const SECOND: Self = Self(1 << 30);
    /// The third flag.
    pub const THIRD: Self = Self(1 << 29);

    /// Returns these flags and others.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

const FLAGS: u32 = HurdleFlags::FIRST.and(HurdleFlags::SECOND).and(HurdleFlags::THIRD).0;

impl Hurdles {
    /// Returns `true` if there are no obstacles.
    #[inline(always)]
    pub fn none(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Returns `true` if there are no obstacles except possibly these flags.
    #[inline]
    pub fn none_but(&self, flag: HurdleFlags) -> bool {
        self.0.load(Ordering::Acquire) & !flag.0 == 0
    }

    /// Returns `true` if a flag is raised.
    #[inline]
    pub fn has(&self, flag: HurdleFlags) -> bool {
        self.0.load(Ordering::Acquire) & flag.0 != 0
    }

    /// Raises or lowers a flag.
    pub fn set(&self, flag: HurdleFlags, is_raised: bool) {
        match is_raised {
            true => self.0.fetch_or(flag.0, Ordering::AcqRel),
            false => self.0.fetch_and(!flag.0, Ordering::AcqRel),
        };
    }

    /// Returns the number of waiting operations.
    pub fn count(&self) -> usize {
        (self.0.load(Ordering::Acquire) & !FLAGS) as usize
    }

    /// Sets the number of waiting operations. Only the holder of their lock calls it.
    pub fn set_count(&self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX).min(!FLAGS);
        // Only the flags can change in between, and adding a difference does not affect them.
        let before = self.0.load(Ordering::Acquire) & !FLAGS;
        self.0.fetch_add(count.wrapping_sub(before), Ordering::AcqRel);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_flags_that_change_while_the_count_does_stay_as_they_are_set() {
        loom::model(|| {
            let hurdles = Arc::new(Hurdles(AtomicU32::new(0)));
            hurdles.set(HurdleFlags::SECOND, true);
            hurdles.set_count(3);
            let other = {
                let hurdles = hurdles.clone();
                thread::spawn(move || {
                    hurdles.set(HurdleFlags::FIRST, true);
                    hurdles.set(HurdleFlags::SECOND, false);
                })
            };
            hurdles.set_count(1);
            assert!(!hurdles.none_but(HurdleFlags::FIRST));
            hurdles.set_count(0);
            other.join().unwrap();
            assert!(hurdles.has(HurdleFlags::FIRST) && !hurdles.has(HurdleFlags::SECOND));
            assert!(!hurdles.none() && hurdles.none_but(HurdleFlags::FIRST));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_the_count_and_each_flag_are_told_apart() {
        let hurdles = Hurdles::default();
        assert!(hurdles.none());
        hurdles.set_count(usize::MAX);
        assert!(
            !hurdles.none()
                && !hurdles.has(HurdleFlags::FIRST)
                && !hurdles.has(HurdleFlags::SECOND)
        );
        hurdles.set(HurdleFlags::FIRST, true);
        assert_eq!(hurdles.count(), (1 << 29) - 1);
        hurdles.set_count(0);
        assert!(
            !hurdles.none() && hurdles.has(HurdleFlags::FIRST) && !hurdles.has(HurdleFlags::SECOND)
        );
        assert!(hurdles.none_but(HurdleFlags::FIRST) && !hurdles.none_but(HurdleFlags::SECOND));
        hurdles.set(HurdleFlags::THIRD, true);
        assert!(
            !hurdles.none_but(HurdleFlags::FIRST)
                && hurdles.none_but(HurdleFlags::FIRST.and(HurdleFlags::THIRD))
        );
        hurdles.set(HurdleFlags::THIRD, false);
        hurdles.set(HurdleFlags::FIRST, false);
        assert!(hurdles.none());
    }
}
