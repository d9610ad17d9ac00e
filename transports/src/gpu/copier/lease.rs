//! The kernel's side of the lease: when it ends, and that it takes no command afterwards. The
//! simulated GPU runs this code; NVIDIA's `cuda/copier.ptx` is the same in another language.
//!
//! A kernel that leaves says so, and then looks once more. A host that gives a command writes it,
//! and then reads whether the kernel is leaving. All agree on the order of both, so either the
//! kernel finds the command, or the host finds the kernel leaving. If both do, the host waits for
//! the kernel's last word, and then reads whether the command was done.
//!
//! The watching warps, each on a sheet of its own, combine what they find. The last look is at one
//! sheet: the host wrote to all of them before it read.

use super::page::{Command, Page, SHEETS};
use crate::sync::primitives::{Ordering, fence};
use std::ops::RangeTo;

/// A kernel that runs.
#[derive(Debug)]
pub struct Kernel<'a> {
    page: &'a Page,
    generation: u64,
    next: u64,
}

impl<'a> Kernel<'a> {
    /// Begins a kernel's lease, when the previous kernel has ended.
    pub fn begin(page: &'a Page, generation: u64) -> Self {
        let next = page.answered() + 1;
        page.begin(generation);
        Self { page, generation, next }
    }

    /// Carries out all commands that have arrived, in order, and answers. Returns `true` if there
    /// were any.
    pub fn look(&mut self, copy: impl FnMut(Command)) -> bool {
        self.look_at(..SHEETS, copy)
    }

    fn look_at(&mut self, sheets: RangeTo<usize>, mut copy: impl FnMut(Command)) -> bool {
        let first = self.next;
        while let Some(command) = self.page.read(sheets, self.next) {
            copy(command);
            self.next += 1;
        }
        if self.next != first {
            self.page.answer(self.next - 1);
        }
        self.next != first
    }

    /// Returns `true` if it was asked to leave.
    pub fn is_stopped(&self) -> bool {
        self.page.is_stopped(self.generation)
    }

    /// Ends the kernel's lease, after a last look for a command.
    pub fn leave(mut self, copy: impl FnMut(Command)) {
        self.page.leave(self.generation);
        fence(Ordering::SeqCst);
        self.look_at(..1, copy);
        self.page.go(self.generation);
    }
}

/// Outcome of giving a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Given {
    /// The kernel has it, or has done it already.
    Taken,
    /// No kernel will ever take it.
    TakenBack,
    /// The kernel ended without its last word: the outcome is unknown.
    Lost,
}

/// Gives a command to the kernel of a generation, which has begun. `has_ended` returns `true` if
/// the kernel has ended, in whatever way; it is called while the kernel is leaving.
pub(super) fn give(
    page: &Page,
    generation: u64,
    number: u64,
    command: Command,
    mut has_ended: impl FnMut() -> bool,
) -> Given {
    page.write(number, command);
    fence(Ordering::SeqCst);
    if page.leaving() < generation {
        return Given::Taken;
    }
    while page.gone() < generation {
        if has_ended() && page.gone() < generation {
            return Given::Lost;
        }
    }
    if page.answered() >= number {
        return Given::Taken;
    }
    // The kernel is gone, and the next one begins behind what is answered: the caller does the
    // copy.
    page.take_back(number);
    Given::TakenBack
}

#[cfg(all(test, loom))]
#[expect(unsafe_code, reason = "plain words are shared between threads")]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    /// The memory that commands copy to: a count of each command.
    struct Done([UnsafeCell<u32>; 3]);

    // SAFETY: loom finds two threads that touch one cell at a time.
    unsafe impl Sync for Done {}
    // SAFETY: as above.
    unsafe impl Send for Done {}

    impl Done {
        fn new() -> Arc<Self> {
            Arc::new(Self([0; 3].map(UnsafeCell::new)))
        }

        fn add(&self, at: u64) {
            let at = usize::try_from(at).unwrap();
            // SAFETY: loom finds another thread that touches it.
            self.0[at].with_mut(|cell| unsafe { *cell += 1 });
        }

        fn get(&self, at: usize) -> u32 {
            // SAFETY: as above.
            self.0[at].with(|cell| unsafe { *cell })
        }
    }

    fn command(at: u64) -> Command {
        // The pieces tell whether they belong together.
        Command { dst: at, src: at << 32 | at, len: u32::try_from(at).unwrap() }
    }

    fn carry_out(done: &Done) -> impl FnMut(Command) + '_ {
        |given: Command| {
            assert_eq!(given, command(given.dst), "a torn command");
            done.add(given.dst);
        }
    }

    /// Starts a kernel on a thread: it looks `looks` times, and then leaves.
    fn kernel(
        page: &Arc<Page>,
        done: &Arc<Done>,
        generation: u64,
        looks: usize,
    ) -> thread::JoinHandle<()> {
        let (page, done) = (page.clone(), done.clone());
        thread::spawn(move || {
            let mut kernel = Kernel::begin(&page, generation);
            for _ in 0..looks {
                kernel.look(carry_out(&done));
            }
            kernel.leave(carry_out(&done));
        })
    }

    /// A command that was given is done once, and is done when it is answered. A command that was
    /// taken back is never done.
    #[test]
    fn loom_a_command_given_while_the_kernel_leaves_is_done_once_or_given_back() {
        loom::model(|| {
            let (page, done) = (Arc::new(Page::new()), Done::new());
            let running = kernel(&page, &done, 1, 0);
            let given = give(&page, 1, 1, command(1), || {
                thread::yield_now();
                false
            });
            match given {
                // An answer that has come already says that it is done.
                Given::Taken if page.answered() == 1 => assert_eq!(done.get(1), 1),
                Given::Taken => {}
                // The caller copies it, which the kernel must not do at the same time.
                Given::TakenBack => done.add(1),
                Given::Lost => unreachable!("the kernel always says its last word"),
            }
            running.join().unwrap();
            assert_eq!(page.answered(), 1, "a command was lost");
            // The next kernel begins behind it, whichever side did it.
            let mut next = Kernel::begin(&page, 2);
            assert!(!next.look(carry_out(&done)));
            assert_eq!(give(&page, 2, 2, command(2), || false), Given::Taken);
            assert!(next.look(carry_out(&done)));
            assert_eq!([done.get(1), done.get(2)], [1, 1]);
        });
    }

    /// A command is never seen torn, though its words are written and read one by one, in the
    /// place of an earlier command.
    #[test]
    fn loom_a_command_is_taken_whole_or_not_at_all() {
        loom::model(|| {
            let (page, done) = (Arc::new(Page::new()), Done::new());
            page.write(1, command(1));
            Kernel::begin(&page, 1).look(carry_out(&done));
            // The commands in between have ended.
            page.take_back(4);
            let writer = {
                let page = page.clone();
                thread::spawn(move || page.write(5, command(2)))
            };
            let mut kernel = Kernel::begin(&page, 2);
            kernel.look(carry_out(&done));
            writer.join().unwrap();
            kernel.look(carry_out(&done));
            assert_eq!([done.get(1), done.get(2)], [1, 1]);
            assert_eq!(page.answered(), 5);
        });
    }

    /// A kernel that is asked to leave does the commands given before.
    #[test]
    fn loom_what_was_given_before_the_kernel_was_asked_to_leave_is_done() {
        loom::model(|| {
            let (page, done) = (Arc::new(Page::new()), Done::new());
            let running = {
                let (page, done) = (page.clone(), done.clone());
                thread::spawn(move || {
                    let kernel = Kernel::begin(&page, 1);
                    while !kernel.is_stopped() {
                        thread::yield_now();
                    }
                    kernel.leave(carry_out(&done));
                })
            };
            assert_eq!(give(&page, 1, 1, command(1), || false), Given::Taken);
            page.stop(1);
            running.join().unwrap();
            assert_eq!((done.get(1), page.answered(), page.gone()), (1, 1, 1));
        });
    }
}
