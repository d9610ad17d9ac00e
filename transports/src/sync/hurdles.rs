//! A count and three flags in one word.

use super::primitives::{AtomicU32, Ordering};

/// Obstacles: the number of waiting operations, which the holder of their lock sets, and three
/// flags that any thread raises. One load, without a lock, finds that there are none.
#[derive(Default, Debug)]
pub struct Hurdles(AtomicU32);

/// One of the three flags of [`Hurdles`], or several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flag(u32);

impl Flag {
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

const FLAGS: u32 = Flag::FIRST.and(Flag::SECOND).and(Flag::THIRD).0;

impl Hurdles {
    /// Returns `true` if there are no obstacles.
    #[inline(always)]
    pub fn none(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }

    /// Returns `true` if there are no obstacles except possibly these flags.
    #[inline]
    pub fn none_but(&self, flag: Flag) -> bool {
        self.0.load(Ordering::Acquire) & !flag.0 == 0
    }

    /// Returns `true` if a flag is raised.
    #[inline]
    pub fn has(&self, flag: Flag) -> bool {
        self.0.load(Ordering::Acquire) & flag.0 != 0
    }

    /// Raises or lowers a flag.
    pub fn set(&self, flag: Flag, is_raised: bool) {
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
            hurdles.set(Flag::SECOND, true);
            hurdles.set_count(3);
            let other = {
                let hurdles = hurdles.clone();
                thread::spawn(move || {
                    hurdles.set(Flag::FIRST, true);
                    hurdles.set(Flag::SECOND, false);
                })
            };
            hurdles.set_count(1);
            assert!(!hurdles.none_but(Flag::FIRST));
            hurdles.set_count(0);
            other.join().unwrap();
            assert!(hurdles.has(Flag::FIRST) && !hurdles.has(Flag::SECOND));
            assert!(!hurdles.none() && hurdles.none_but(Flag::FIRST));
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
        assert!(!hurdles.none() && !hurdles.has(Flag::FIRST) && !hurdles.has(Flag::SECOND));
        hurdles.set(Flag::FIRST, true);
        assert_eq!(hurdles.count(), (1 << 29) - 1);
        hurdles.set_count(0);
        assert!(!hurdles.none() && hurdles.has(Flag::FIRST) && !hurdles.has(Flag::SECOND));
        assert!(hurdles.none_but(Flag::FIRST) && !hurdles.none_but(Flag::SECOND));
        hurdles.set(Flag::THIRD, true);
        assert!(!hurdles.none_but(Flag::FIRST) && hurdles.none_but(Flag::FIRST.and(Flag::THIRD)));
        hurdles.set(Flag::THIRD, false);
        hurdles.set(Flag::FIRST, false);
        assert!(hurdles.none());
    }
}
