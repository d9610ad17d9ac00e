//! Bells of many rings: a two-level bit set.

use super::primitives::{AtomicU64, Ordering};

/// Bells that any number of producers ring and one consumer collects, in memory that all of them
/// see. Collecting costs one load when no bell rang, at any number of bells.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Bells {
    /// Bit `w`: some bell of word `w` has rung.
    summary: AtomicU64,
    _rest_of_line: [u64; 7],
    words: [AtomicU64; 64],
}

impl Bells {
    /// Number of bells.
    pub const COUNT: usize = 64 * 64;

    /// Makes silent bells, as fresh memory holds them.
    #[allow(
        clippy::new_without_default,
        reason = "bells are found in zeroed memory; only tests make some"
    )]
    pub fn new() -> Self {
        Self {
            summary: AtomicU64::new(0),
            _rest_of_line: [0; 7],
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Rings a bell. A number out of range is ignored.
    pub fn ring(&self, bell: u32) {
        let (word, bit) = (bell as usize / 64, bell % 64);
        let Some(bits) = self.words.get(word) else { return };
        // Word first: a consumer that finds the summary's bit finds the bell. Always written, even
        // if the bit is set already: the write makes the message visible to the consumer that
        // collects the bit.
        bits.fetch_or(1 << bit, Ordering::Release);
        self.summary.fetch_or(1 << word, Ordering::Release);
    }

    /// Returns `true` if any bell has rung.
    #[inline(always)]
    pub fn any(&self) -> bool {
        self.summary.load(Ordering::Relaxed) != 0
    }

    /// Takes all bells that rang, and names each once.
    pub fn collect(&self, mut rang: impl FnMut(u32)) {
        let mut summary = self.summary.swap(0, Ordering::Acquire);
        while summary != 0 {
            let word = summary.trailing_zeros();
            summary &= summary - 1;
            let mut bits = self.words[word as usize].swap(0, Ordering::Acquire);
            while bits != 0 {
                rang(word * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    #[test]
    fn loom_a_bell_rung_while_others_are_collected_is_not_lost() {
        loom::model(|| {
            let bells = Arc::new(Bells::new());
            let message = Arc::new(AtomicU32::new(0));
            let producer = {
                let (bells, message) = (bells.clone(), message.clone());
                thread::spawn(move || {
                    message.store(1, Ordering::Relaxed);
                    bells.ring(5);
                })
            };
            let mut rang = 0;
            let mut look = || {
                bells.collect(|bell| {
                    assert_eq!(bell, 5);
                    assert_eq!(
                        message.load(Ordering::Relaxed),
                        1,
                        "the message is seen with its bell"
                    );
                    rang += 1;
                });
            };
            look();
            producer.join().unwrap();
            look();
            assert_eq!(rang, 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_every_bell_that_rang_is_named_once() {
        let bells = Bells::new();
        for bell in [0, 63, 64, 4095, 4095, 4096, u32::MAX] {
            bells.ring(bell);
        }
        assert!(bells.any());
        let mut rang = Vec::new();
        bells.collect(|bell| rang.push(bell));
        assert_eq!(rang, [0, 63, 64, 4095], "those out of range are ignored");
        assert!(!bells.any());
        bells.collect(|_| unreachable!("nothing rang"));
    }
}
