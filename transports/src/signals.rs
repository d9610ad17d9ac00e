//! Signals to the process that become chores of progress.

#![expect(unsafe_code, reason = "a handler of a signal is registered")]

use crate::sync::Chores;
use crate::sync::chores::Bit;
use signal_hook::consts::SIGUSR1;
use signal_hook::low_level::{register, unregister};
use std::io;

/// A bit of a word of chores that a signal sets, until this is dropped.
#[derive(Debug)]
pub struct SignalListener(signal_hook::SigId);

impl SignalListener {
    /// Makes each SIGUSR1 set a bit. It wakes no thread: a system call of a sleeping thread is
    /// interrupted if the kernel delivers the signal to that thread.
    ///
    /// # Errors
    /// The kernel's, if it refuses a handler.
    pub fn to_usr1(chores: &Chores, chore: impl Into<Bit>) -> io::Result<Self> {
        let (chores, bit) = (chores.clone(), chore.into());
        let action = move || chores.raise(bit);
        // SAFETY: the action changes one atomic word, which is safe at any point where the signal
        // interrupts. It does not panic, and `unregister` drops what it owns outside of the
        // handler.
        unsafe { register(SIGUSR1, action) }.map(Self)
    }
}

impl Drop for SignalListener {
    fn drop(&mut self) {
        unregister(self.0);
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use signal_hook::low_level::raise;

    #[test]
    fn what_is_to_be_done_before_a_signal_and_while_it_is_pending_is_still_there_afterwards() {
        let own = Bit(1 << 17);
        let chores = Chores::default();
        let listener = SignalListener::to_usr1(&chores, own).unwrap();
        for chore in (0..usize::BITS).map(|at| Bit(1 << at)).filter(|bit| *bit != own) {
            for is_there_before in [true, false] {
                if is_there_before {
                    chores.set(chore, true);
                }
                // Its handler has run when this returns.
                raise(SIGUSR1).unwrap();
                if !is_there_before {
                    chores.set(chore, true);
                }
                assert!(chores.take(own) && !chores.take(own), "one of two threads prints");
                assert!(chores.take(chore), "{chore:?} is lost");
                assert!(!chores.there().any(), "nothing else is there");
            }
        }
        // The other listener still hears it: without a handler the signal would end the process.
        let other = Chores::default();
        let _other = SignalListener::to_usr1(&other, own).unwrap();
        drop(listener);
        raise(SIGUSR1).unwrap();
        assert!(other.there().has(own) && !chores.there().any());
    }
}
