//! The other process: this program again, in a role.

use crate::busy;
use crate::contexts;
use crate::copier;
use crate::copies;
use crate::pieces;
use crate::processes;
use crate::streams;
use crate::waits;
use carrack_transports::gpu::Handle;
use children::Running;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

const ROLE: &str = "CARRACK_CUDA_CHILD";

/// Time for which the other process is waited for.
const LIMIT: Duration = Duration::from_secs(300);

/// A process that plays a role. Killed when dropped.
pub struct Other {
    process: Running,
    pub wire: Wire,
}

impl Other {
    /// Starts it, with environment variables of its own.
    pub fn start(role: &str, environment: &[(&str, &str)]) -> Self {
        let (wire, theirs) = UnixStream::pair().unwrap();
        wire.set_read_timeout(Some(LIMIT)).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(environment.iter().copied())
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::inherit());
        let process = Running::start(&mut command).unwrap();
        Self { process, wire: Wire(wire) }
    }

    /// Plays a role that could cost the process its context or its life; it must end well.
    pub fn alone(role: &str) {
        Self::start(role, &[]).expect_success();
    }

    /// Waits for its end, which must be a good one.
    pub fn expect_success(self) {
        self.wire.0.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(self.process.heard(LIMIT).unwrap().status.success());
    }

    pub fn kill(&mut self) {
        self.process.signal(rustix::process::Signal::KILL);
        self.process.end();
    }
}

/// Plays the child's role; does nothing in a process that is no child.
pub fn play() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: standard input is the socket that `Other::start` gave, and nothing else uses it.
    let wire = Wire(UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) }));
    match role.split(": ").collect::<Vec<_>>()[..] {
        ["busy program"] => busy::busy_program(),
        ["next to a copier"] => copier::next_to_the_program(),
        ["kinds by a copier"] => copier::kinds(),
        ["captured"] => streams::next_to_a_capture(),
        ["next to a kernel"] => streams::next_to_a_kernel(),
        ["default streams"] => pieces::on_default_streams(),
        ["words"] => streams::words(),
        ["synchronisation"] => streams::synchronisation(),
        ["rule a"] => waits::rule_a(),
        ["rule b"] => waits::rule_b(),
        ["rule e"] => waits::rule_e(),
        ["copies in order"] => waits::copies_in_order(),
        ["event of another"] => processes::event_of_another(),
        ["destroyed context"] => contexts::in_a_destroyed_context(),
        ["freed memory"] => copies::of_freed_memory(),
        ["survivor", kind] => processes::survive(kind),
        ["import"] => processes::import(&wire),
        ["export", kind] => processes::export(&wire, kind),
        ["wait"] => processes::wait_for_events(&wire),
        ["rounds"] => processes::rounds(&wire),
        _ => panic!("no such role: {role}"),
    }
}

/// A socket over which two processes speak.
pub struct Wire(UnixStream);

impl Wire {
    pub fn say(&self, bytes: &[u8]) {
        let mut wire = &self.0;
        wire.write_all(&u32::try_from(bytes.len()).unwrap().to_le_bytes()).unwrap();
        wire.write_all(bytes).unwrap();
    }

    pub fn hear(&self) -> Vec<u8> {
        self.hear_or_end().expect("the other side ended")
    }

    /// Receives a message. `None`: the other side has hung up.
    pub fn hear_or_end(&self) -> Option<Vec<u8>> {
        let (mut wire, mut len) = (&self.0, [0; 4]);
        wire.read_exact(&mut len).ok()?;
        let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
        wire.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }

    #[track_caller]
    pub fn expect(&self, word: &str) {
        assert_eq!(String::from_utf8_lossy(&self.hear()), word);
    }

    /// Sends a handle. Its descriptor travels by SCM_RIGHTS (VMM rule 4).
    pub fn say_handle(&self, handle: &Handle) {
        self.say(&handle.encode());
        let Some(fd) = handle.fd() else { return };
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&self.0, &[IoSlice::new(b"f")], &mut control, SendFlags::empty()).unwrap();
    }

    pub fn hear_handle(&self) -> Handle {
        let text = self.hear().try_into().unwrap();
        if let Some(handle) = Handle::decode(&text, None) {
            return handle;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        recvmsg(&self.0, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
            .unwrap();
        let mut fds = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => Vec::new(),
        });
        Handle::decode(&text, fds.next()).unwrap()
    }
}
