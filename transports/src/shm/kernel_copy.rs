//! The kernel's cross-memory copy: one copy from process to process, no memory shared.

use super::device::is_dead;
use super::link::Outgoing;
use super::segment::BellPage;
use crate::contract::{DownCause, PeerMemory, PeerMemoryError};
use crate::mem::{MemMut, MemRef};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once, OnceLock, Weak};

/// The memory of the process with this number.
#[derive(Debug)]
pub(super) struct KernelCopy {
    pid: libc::pid_t,
    /// Readable when the process is dead. Without one (an old kernel) that is not known here.
    process: Option<Arc<OwnedFd>>,
    /// Where its device says that it has closed: its buffers may be in other use from then on. There once it has answered.
    page: OnceLock<Arc<BellPage>>,
    link: Weak<Outgoing>,
}

/// Which way the bytes go.
#[derive(Clone, Copy)]
enum Way {
    Here,
    There,
}

impl KernelCopy {
    pub(super) fn of(pid: libc::pid_t, process: Option<Arc<OwnedFd>>, link: Weak<Outgoing>) -> Self {
        Self { pid, process, page: OnceLock::new(), link }
    }

    fn page(&self) -> Option<&Arc<BellPage>> {
        if self.page.get().is_none()
            && let Some(page) = self.link.upgrade().and_then(|link| link.page())
        {
            let _ = self.page.set(page);
        }
        self.page.get()
    }

    fn copy(&self, way: Way, local: *mut u8, len: usize, addr: u64) -> Result<(), PeerMemoryError> {
        let mut done = 0;
        while done < len {
            let here = libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: len - done };
            let there = there(addr, done, len - done)?;
            match self.call(way, &[here], &[there]) {
                Ok(copied) => done += copied,
                // It was done before.
                Err(PeerMemoryError::Refused(why)) if done > 0 => return Err(PeerMemoryError::Failed(why)),
                Err(error) => return Err(error),
            }
        }
        self.is_open()
    }

    /// One call of the kernel. The bytes copied: not all, where not all can be, and never none of some.
    fn call(&self, way: Way, here: &[libc::iovec], there: &[libc::iovec]) -> Result<usize, PeerMemoryError> {
        let (local, remote) = (here.as_ptr(), there.as_ptr());
        let (locals, remotes) = (here.len() as libc::c_ulong, there.len() as libc::c_ulong);
        loop {
            // SAFETY: the local ranges are those of views, valid for their lengths and host memory; the kernel checks the
            // other ones, which are not of this process.
            let copied = unsafe {
                match way {
                    Way::Here => libc::process_vm_readv(self.pid, local, locals, remote, remotes, 0),
                    Way::There => libc::process_vm_writev(self.pid, local, locals, remote, remotes, 0),
                }
            };
            match usize::try_from(copied) {
                Ok(0) => return Err(PeerMemoryError::Failed("nothing is mapped there".into())),
                Ok(copied) => return Ok(copied),
                Err(_) => match errno() {
                    Errno::INTR => {}
                    error @ (Errno::PERM | Errno::NOSYS | Errno::ACCESS) => {
                        return Err(PeerMemoryError::Refused(format!(
                            "{error}; a container without CAP_SYS_PTRACE, a seccomp filter or kernel.yama.ptrace_scope may be why"
                        )));
                    }
                    Errno::SRCH => return Err(gone()),
                    error => return Err(PeerMemoryError::Failed(error.to_string())),
                },
            }
        }
    }

    /// After the bytes: if it has not closed by now, they were what it had offered.
    fn is_open(&self) -> Result<(), PeerMemoryError> {
        match self.page() {
            Some(page) if page.closed().load(Ordering::SeqCst) != 0 => {
                Err(PeerMemoryError::Gone(DownCause::Closed))
            }
            _ => Ok(()),
        }
    }
}

/// Part of the other process's memory.
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
    fn is_gone(&self) -> bool {
        self.process.as_ref().is_some_and(|process| is_dead(process.as_fd()))
    }

    fn read(&self, addr: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError> {
        if !to.place().is_host() {
            return Err(PeerMemoryError::Failed(format!("it cannot fill {} memory", to.place().kind())));
        }
        self.copy(Way::Here, to.as_mut_ptr(), to.len(), addr)
    }

    fn read_many(&self, many: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError> {
        let (mut here, mut theirs) = (Vec::with_capacity(many.len()), Vec::with_capacity(many.len()));
        for (addr, to) in many {
            if !to.place().is_host() {
                return Err(PeerMemoryError::Failed(format!("it cannot fill {} memory", to.place().kind())));
            }
            here.push(libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() });
            theirs.push(there(*addr, 0, to.len())?);
        }
        let mut copied = self.call(Way::Here, &here, &theirs)?;
        self.is_open()?;
        let whole = many.iter().take_while(|(_, to)| {
            let rest = copied.checked_sub(to.len());
            copied = rest.unwrap_or(0);
            rest.is_some()
        });
        Ok(whole.count())
    }

    fn write(&self, addr: u64, from: MemRef<'_>) -> Result<(), PeerMemoryError> {
        if !from.place().is_host() {
            return Err(PeerMemoryError::Failed(format!("it cannot read {} memory", from.place().kind())));
        }
        // A number that is used again is another process's.
        self.is_open()?;
        if self.is_gone() {
            return Err(gone());
        }
        self.copy(Way::There, from.as_ptr().cast_mut(), from.len(), addr)
    }
}

/// Lets the other ranks read and write this process where Yama would allow only its parents to (its scope 1, the
/// default of several distributions). Elsewhere the kernel does not know the request, and needs none.
pub(super) fn allow_peers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: takes integers, and touches no memory of ours.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_and_written_and_an_address_that_is_not_mapped_is_an_error() {
        let mut there = vec![7_u8; 10_000];
        let this = KernelCopy::of(std::process::id().cast_signed(), None, Weak::new());
        let mut here = vec![0; 9000];
        match this.read(there.as_ptr() as u64 + 100, MemMut::host(&mut here)) {
            Err(PeerMemoryError::Refused(why)) => return println!("not tested: {why}"),
            done => done.unwrap(),
        }
        assert_eq!(here, vec![7; 9000]);
        this.write(there.as_mut_ptr() as u64 + 1, MemRef::host(&[9; 5000])).unwrap();
        assert!(there[0] == 7 && there[1..5001].iter().all(|&byte| byte == 9) && there[5001] == 7);
        assert!(matches!(this.read(8, MemMut::host(&mut here)), Err(PeerMemoryError::Failed(_))));
        assert!(matches!(this.write(u64::MAX - 4, MemRef::host(&here)), Err(PeerMemoryError::Failed(_))));
        assert!(this.read(8, MemMut::host(&mut [])).is_ok());
    }

    #[test]
    fn of_several_reads_those_are_done_that_come_before_one_that_cannot_be() {
        let this = KernelCopy::of(std::process::id().cast_signed(), None, Weak::new());
        let (there, mut here) = ([7_u8; 5000], [[0_u8; 5000]; 3]);
        let addr = there.as_ptr() as u64;
        let [first, second, third] = &mut here;
        let many = [(addr, MemMut::host(first)), (8, MemMut::host(second)), (addr, MemMut::host(third))];
        match this.read_many(&many) {
            Err(PeerMemoryError::Refused(why)) => return println!("not tested: {why}"),
            done => assert_eq!(done, Ok(1)),
        }
        assert!(matches!(this.read_many(&many[1..]), Err(PeerMemoryError::Failed(_))));
        assert_eq!(here, [[7; 5000], [0; 5000], [0; 5000]]);
    }

    #[test]
    fn what_is_copied_while_its_owner_closes_is_not_taken_for_its_bytes() {
        let (page, _fd) = BellPage::create().unwrap();
        let (page, there) = (Arc::new(page), vec![7_u8; 100]);
        let this = KernelCopy::of(std::process::id().cast_signed(), None, Weak::new());
        this.page.set(page.clone()).unwrap();
        let mut here = vec![0; 100];
        match this.read(there.as_ptr() as u64, MemMut::host(&mut here)) {
            Err(PeerMemoryError::Refused(why)) => return println!("not tested: {why}"),
            done => done.unwrap(),
        }
        page.closed().store(1, Ordering::SeqCst);
        let error = this.read(there.as_ptr() as u64, MemMut::host(&mut here)).unwrap_err();
        assert_eq!(error, PeerMemoryError::Gone(DownCause::Closed));
    }

    #[test]
    fn a_process_that_has_ended_is_told_from_an_address_that_is_wrong() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let this = KernelCopy::of(child.id().cast_signed(), None, Weak::new());
        match this.read(0x1000, MemMut::host(&mut [0; 10])) {
            Err(PeerMemoryError::Refused(why)) => println!("not tested: {why}"),
            other => assert!(matches!(other, Err(PeerMemoryError::Gone(DownCause::Gone(_)))), "{other:?}"),
        }
    }
}
