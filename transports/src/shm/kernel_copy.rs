//! The kernel's cross-memory copy: one copy from process to process, without shared memory.

#![expect(unsafe_code, reason = "memory of other processes is read and written")]

use super::device::is_dead;
use super::link::SendingEnd;
use super::segment::Segment;
use crate::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::contract::{DownCause, PeerMemory, PeerMemoryError};
use crate::mem::{MemMut, MemRef};
use crate::sync::revocable::Presence;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once, Weak};

/// The memory of the process `pid`.
#[derive(Debug)]
pub(super) struct KernelCopy {
    pid: libc::pid_t,
    /// `true` if the peer is this very process. All of its addresses are mapped, and the kernel
    /// would refuse none.
    is_here: bool,
    /// Descriptor that is readable when the process is dead. `None` on an old kernel: that is then
    /// not known here.
    process: Option<Arc<OwnedFd>>,
    /// The link's segment, with the word by which the process revokes this rank's access.
    segment: Arc<Segment>,
    link: Weak<SendingEnd>,
    /// `true` once the process has mapped the segment.
    has_answered: AtomicBool,
    /// Ticks at which the process was last seen alive by [`write`](PeerMemory::write).
    alive_at: AtomicU64,
}

/// Ticks for which a process that was alive counts as alive: a look is a system call. The kernel
/// gives a number out again only once it has given out all others, 32768 by default, and starts far
/// fewer processes in 0.1 ms.
const ALIVE: u64 = 100 * TICKS_PER_MICROSECOND;

/// Direction of a copy.
#[derive(Clone, Copy)]
enum KernelCopyDirection {
    Here,
    There,
}

impl KernelCopy {
    pub(super) fn of(
        pid: libc::pid_t,
        process: Option<Arc<OwnedFd>>,
        segment: Arc<Segment>,
        link: Weak<SendingEnd>,
    ) -> Self {
        let is_here = is_this_process(pid);
        let (has_answered, alive_at) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { pid, is_here, process, segment, link, has_answered, alive_at }
    }

    /// Returns `true` if the process has ended, as of a moment ago.
    fn has_ended(&self) -> bool {
        let now = ticks();
        if now.wrapping_sub(self.alive_at.load(Ordering::Relaxed)) < ALIVE {
            return false;
        }
        let has_ended = self.is_gone();
        if !has_ended {
            self.alive_at.store(now, Ordering::Relaxed);
        }
        has_ended
    }

    /// Keeps the process from giving back buffers that it has named, while the value lives.
    fn enter(&self) -> Result<Presence<'_>, PeerMemoryError> {
        let is_open = self.has_answered.load(Ordering::Relaxed) || self.is_answered();
        let inside = is_open.then(|| self.segment.access().enter()).flatten();
        inside.ok_or(PeerMemoryError::Gone(DownCause::Closed))
    }

    #[cold]
    fn is_answered(&self) -> bool {
        let has_answered = self.link.upgrade().is_some_and(|link| link.has_answered());
        self.has_answered.store(has_answered, Ordering::Relaxed);
        has_answered
    }

    fn copy(
        &self,
        direction: KernelCopyDirection,
        local: *mut u8,
        len: usize,
        addr: u64,
    ) -> Result<(), PeerMemoryError> {
        let _inside = self.enter()?;
        let mut done = 0;
        while done < len {
            let here =
                libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: len - done };
            let there = there(addr, done, len - done)?;
            match self.call(direction, &[here], &[there]) {
                Ok(copied) => done += copied,
                // The kernel allowed it before.
                Err(PeerMemoryError::Refused(why)) if done > 0 => {
                    return Err(PeerMemoryError::Failed(why));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes one system call. Returns the number of bytes copied: fewer than asked for if only
    /// some can be copied, but never 0, which is an error.
    fn call(
        &self,
        direction: KernelCopyDirection,
        here: &[libc::iovec],
        there: &[libc::iovec],
    ) -> Result<usize, PeerMemoryError> {
        let (local, remote) = (here.as_ptr(), there.as_ptr());
        let (locals, remotes) = (here.len() as libc::c_ulong, there.len() as libc::c_ulong);
        loop {
            // SAFETY: the local ranges are those of views, valid for their lengths and host
            // memory. The kernel checks the remote ones. It writes to another process's memory
            // only: `write` refuses this one.
            let copied = unsafe {
                match direction {
                    KernelCopyDirection::Here => {
                        libc::process_vm_readv(self.pid, local, locals, remote, remotes, 0)
                    }
                    KernelCopyDirection::There => {
                        libc::process_vm_writev(self.pid, local, locals, remote, remotes, 0)
                    }
                }
            };
            match usize::try_from(copied) {
                Ok(0) => return Err(PeerMemoryError::Failed("nothing is mapped there".into())),
                Ok(copied) => return Ok(copied),
                Err(_) => match errno() {
                    Errno::INTR => {}
                    error @ (Errno::PERM | Errno::NOSYS | Errno::ACCESS) => {
                        return Err(PeerMemoryError::Refused(format!(
                            "{error}; a container without CAP_SYS_PTRACE, a seccomp filter or \
                            kernel.yama.ptrace_scope may be why"
                        )));
                    }
                    Errno::SRCH => return Err(gone()),
                    error => return Err(PeerMemoryError::Failed(error.to_string())),
                },
            }
        }
    }
}

/// Returns `true` if a peer's number, as the kernel says it, is that of this process.
pub(super) fn is_this_process(pid: libc::pid_t) -> bool {
    pid.unsigned_abs() == std::process::id()
}

/// Returns a range of the other process's memory.
fn there(addr: u64, from: usize, len: usize) -> Result<libc::iovec, PeerMemoryError> {
    let begin = usize::try_from(addr).ok().and_then(|addr| addr.checked_add(from));
    let begin = begin.ok_or_else(|| PeerMemoryError::Failed("the address overflows".into()))?;
    Ok(libc::iovec { iov_base: begin as *mut libc::c_void, iov_len: len })
}

fn gone() -> PeerMemoryError {
    PeerMemoryError::Gone(DownCause::Gone("found while copying its memory".into()))
}

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

impl PeerMemory for KernelCopy {
    fn is_ready(&self) -> bool {
        let never_will = || self.link.upgrade().is_none_or(|link| link.is_down());
        self.has_answered.load(Ordering::Relaxed) || self.is_answered() || never_will()
    }

    fn is_gone(&self) -> bool {
        self.process.as_ref().is_some_and(|process| is_dead(process.as_fd()))
    }

    fn read(&self, addr: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError> {
        if !to.place().is_host() {
            return Err(PeerMemoryError::Failed(format!(
                "it cannot fill {} memory",
                to.place().kind()
            )));
        }
        self.copy(KernelCopyDirection::Here, to.as_mut_ptr(), to.len(), addr)
    }

    fn read_many(&self, many: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError> {
        let (mut here, mut theirs) =
            (Vec::with_capacity(many.len()), Vec::with_capacity(many.len()));
        for (addr, to) in many {
            if !to.place().is_host() {
                return Err(PeerMemoryError::Failed(format!(
                    "it cannot fill {} memory",
                    to.place().kind()
                )));
            }
            here.push(libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() });
            theirs.push(there(*addr, 0, to.len())?);
        }
        let inside = self.enter()?;
        let mut copied = self.call(KernelCopyDirection::Here, &here, &theirs)?;
        drop(inside);
        let whole = many.iter().take_while(|(_, to)| {
            let rest = copied.checked_sub(to.len());
            copied = rest.unwrap_or(0);
            rest.is_some()
        });
        Ok(whole.count())
    }

    fn write(&self, addr: u64, from: MemRef<'_>) -> Result<(), PeerMemoryError> {
        if !from.place().is_host() {
            return Err(PeerMemoryError::Failed(format!(
                "it cannot read {} memory",
                from.place().kind()
            )));
        }
        if self.is_here {
            let why =
                "the peer is this process, where an address that is wrong would be written to";
            return Err(PeerMemoryError::Refused(why.into()));
        }
        // A number that was used again is another process's.
        if self.has_ended() {
            return Err(gone());
        }
        self.copy(KernelCopyDirection::There, from.as_ptr().cast_mut(), from.len(), addr)
    }
}

/// Lets the other ranks read and write this process where Yama would allow only its parents to
/// (scope 1, the default of several distributions). A kernel without Yama does not know the
/// request, and needs none.
pub(super) fn allow_peers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the call takes integers, and touches no memory of this process.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::Geometry;
    use crate::shm::pair::linked;
    use rustix::process::{PidfdFlags, pidfd_open};
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    /// Returns the address of memory that a process does not use: the far end of its stack.
    fn unused(child: &Child) -> u64 {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
        let stack = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
        u64::from_str_radix(stack.split_once('-').unwrap().0, 16).unwrap()
    }

    /// Makes the memory of a process that has answered.
    fn of(pid: u32) -> KernelCopy {
        let (segment, _fd) =
            Segment::create(Geometry { slots: 8, chunks: 1, chunk_size: 64 }).unwrap();
        let this = KernelCopy::of(pid.cast_signed(), None, segment, Weak::new());
        this.has_answered.store(true, Ordering::Relaxed);
        this
    }

    #[test]
    fn memory_is_read_and_written_and_an_address_that_is_not_mapped_is_an_error() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let there = unused(&child);
        let other = of(child.id());
        let mut here = vec![0; 5002];
        let mut read = |from: u64| other.read(from, MemMut::host(&mut here)).map(|()| here.clone());
        match other.write(there + 1, MemRef::host(&[9; 5000])) {
            Err(PeerMemoryError::Refused(why)) => println!("not tested: {why}"),
            done => {
                done.unwrap();
                let found = read(there).unwrap();
                assert!(found[0] == 0 && found[1..5001] == [9; 5000] && found[5001] == 0);
                assert!(matches!(read(8), Err(PeerMemoryError::Failed(_))));
                let beyond = other.write(u64::MAX - 4, MemRef::host(&[9; 10]));
                assert!(matches!(beyond, Err(PeerMemoryError::Failed(_))));
                assert!(other.read(8, MemMut::host(&mut [])).is_ok());
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_peer_of_this_process_is_read_from_and_never_written_to() {
        let there = vec![7_u8; 5000];
        let this = of(std::process::id());
        let refused = this.write(there.as_ptr() as u64, MemRef::host(&[9; 5000]));
        assert!(matches!(refused, Err(PeerMemoryError::Refused(_))), "{refused:?}");
        assert_eq!(std::hint::black_box(&there), &[7; 5000]);
        let mut here = vec![0; 5000];
        match this.read(there.as_ptr() as u64, MemMut::host(&mut here)) {
            Err(PeerMemoryError::Refused(why)) => println!("not tested: {why}"),
            done => {
                done.unwrap();
                assert_eq!(here, there);
            }
        }
    }

    #[test]
    fn ranks_of_one_process_neither_write_each_others_memory_nor_ask_each_other_to() {
        let (_devices, link) = linked(Geometry { slots: 16, chunks: 2, chunk_size: 4096 });
        let memory = vec![7_u8; 64];
        let written =
            link.peer_memory().unwrap().write(memory.as_ptr() as u64, MemRef::host(&[9; 64]));
        assert!(matches!(written, Err(PeerMemoryError::Refused(_))), "{written:?}");
        assert_eq!(std::hint::black_box(&memory), &[7; 64]);
        assert!(link.splits().is_none(), "a peer would be asked to write here");
    }

    #[test]
    fn of_several_reads_those_are_done_that_come_before_one_that_cannot_be() {
        let this = of(std::process::id());
        let (there, mut here) = ([7_u8; 5000], [[0_u8; 5000]; 3]);
        let addr = there.as_ptr() as u64;
        let [first, second, third] = &mut here;
        let many =
            [(addr, MemMut::host(first)), (8, MemMut::host(second)), (addr, MemMut::host(third))];
        match this.read_many(&many) {
            Err(PeerMemoryError::Refused(why)) => return println!("not tested: {why}"),
            done => assert_eq!(done, Ok(1)),
        }
        assert!(matches!(this.read_many(&many[1..]), Err(PeerMemoryError::Failed(_))));
        assert_eq!(here, [[7; 5000], [0; 5000], [0; 5000]]);
    }

    #[test]
    fn memory_is_not_read_or_written_once_its_owner_has_revoked_that_or_before_it_has_answered() {
        let there = vec![7_u8; 100];
        let this = of(std::process::id());
        let mut here = vec![0; 100];
        match this.read(there.as_ptr() as u64, MemMut::host(&mut here)) {
            Err(PeerMemoryError::Refused(why)) => return println!("not tested: {why}"),
            done => done.unwrap(),
        }
        assert!(this.segment.access().revoke(), "no copy is in progress");
        here.fill(1);
        let gone = Err(PeerMemoryError::Gone(DownCause::Closed));
        assert_eq!(this.read(there.as_ptr() as u64, MemMut::host(&mut here)), gone);
        let many = [(there.as_ptr() as u64, MemMut::host(&mut here))];
        assert_eq!(this.read_many(&many), Err(PeerMemoryError::Gone(DownCause::Closed)));
        assert!(here == [1; 100] && there == [7; 100]);
        // A link that is gone never answers.
        let unanswered =
            KernelCopy { has_answered: AtomicBool::new(false), ..of(std::process::id()) };
        assert_eq!(unanswered.read(there.as_ptr() as u64, MemMut::host(&mut here)), gone);
        assert_eq!(here, [1; 100]);
    }

    #[test]
    fn the_end_of_a_process_that_was_alive_a_moment_ago_is_noticed_a_moment_later() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
            child.kill().unwrap();
            child.wait().unwrap();
            return println!("not tested: the kernel has no such descriptors");
        };
        let other = KernelCopy { process: Some(Arc::new(process)), ..of(child.id()) };
        assert!(!other.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        let (start, limit) = (Instant::now(), Duration::from_secs(10));
        while !other.has_ended() {
            assert!(start.elapsed() < limit, "writes go to whichever process has its number");
        }
    }

    #[test]
    fn a_process_that_has_ended_is_told_from_an_address_that_is_wrong() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let this = of(child.id());
        match this.read(0x1000, MemMut::host(&mut [0; 10])) {
            Err(PeerMemoryError::Refused(why)) => println!("not tested: {why}"),
            other => assert!(
                matches!(other, Err(PeerMemoryError::Gone(DownCause::Gone(_)))),
                "{other:?}"
            ),
        }
    }
}
