//! Flag by which a producer learns that its consumer has stopped looking.
//!
//! A consumer with many rings looks at those that were busy lately. It cools a ring that has gone
//! quiet: from then on the producer must ring a bell ([`super::bells`]) for each message. The
//! danger is a message published just as the ring cools. The producer saw it warm, the consumer
//! saw it empty, and the consumer does not look again. A full barrier on both sides excludes that;
//! [`super::barrier`] makes it free for the producer.

use super::barrier::{Barrier, heavy, light};
use super::primitives::{AtomicU32, Ordering};

/// The flag of one ring, in memory that both sides see. Zero, as fresh memory is, means cold.
#[repr(transparent)]
#[derive(Debug)]
pub struct Attention(AtomicU32);

const COLD: u32 = 0;
const WARM: u32 = 1;

impl Attention {
    /// A cold flag.
    #[allow(
        clippy::new_without_default,
        reason = "flags are found in zeroed memory; only tests make one"
    )]
    pub fn new() -> Self {
        Self(AtomicU32::new(COLD))
    }

    /// Returns `true` if the producer, after it has published, must tell the consumer.
    #[inline(always)]
    pub fn is_needed(&self, fenced: bool) -> bool {
        light(fenced);
        // Any value except WARM counts as cold: a consumer that writes an invalid one gets bells.
        self.0.load(Ordering::Relaxed) != WARM
    }

    /// Announces that the consumer will look by itself from now on.
    pub fn warm(&self) {
        self.0.store(WARM, Ordering::Relaxed);
    }

    /// Announces that the consumer will not look unless told. After this (for several rings: after
    /// the last one) call [`settle`], then look once more.
    pub fn cool(&self) {
        self.0.store(COLD, Ordering::Relaxed);
    }
}

/// Runs the barrier between cooling and the last look.
pub fn settle(barrier: Barrier) {
    heavy(barrier);
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32 as Plain;
    use loom::thread;

    #[test]
    fn loom_a_message_published_while_the_ring_cools_is_seen_or_belled() {
        loom::model(|| {
            let (flag, message) = (Arc::new(Attention::new()), Arc::new(Plain::new(0)));
            flag.warm();
            let producer = {
                let (flag, message) = (flag.clone(), message.clone());
                thread::spawn(move || {
                    message.store(1, Ordering::Release);
                    flag.is_needed(true)
                })
            };
            flag.cool();
            settle(Barrier::between_processes());
            let seen = message.load(Ordering::Acquire) == 1;
            let belled = producer.join().unwrap();
            assert!(seen || belled);
        });
    }
}
