//! The simulated GPU: its memory traps the CPU, its handles work between real processes, and it
//! takes injected faults.
//!
//! The processes are this test binary again. A test starts it for the one test [`child`]. An
//! environment variable has the command, and standard input is one end of a socket pair.
//!
//! | module | one idea |
//! |---|---|
//! | `memory` | its trap for the CPU, classification of addresses, its amount |
//! | `engines` | copies, streams and kernels: their order, and their failures |
//! | `handles` | memory of other processes, and its release |

#![expect(unsafe_code, reason = "a child touches GPU memory, which must fault")]

mod engines;
mod handles;
mod memory;

use carrack_simulators::gpu::{FailAt, FakeConfig, FakeDriver, FakeGpu, FakeStream, Which};
use carrack_transports::gpu::{
    Driver, Flavour, Gpu, GpuError, GpuEvent, Handle, HandleForm, HandleKey, Stream,
};
use carrack_transports::mem::{AllocId, CopyError, GpuUuid, MemKind, Region};
use children::Running;
use rand::{Rng, RngCore, SeedableRng, rngs::SmallRng};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const ROLE: &str = "CARRACK_FAKE_GPU_CHILD";

// ---- the other process --------------------------------------------------------------------------

/// Time for which the other process is waited for.
const LIMIT: Duration = Duration::from_secs(30);

/// A process of this test binary that plays a role. Killed when dropped.
struct Other {
    process: Running,
    wire: UnixStream,
}

impl Other {
    fn start(role: &str) -> Self {
        let (wire, theirs) = UnixStream::pair().unwrap();
        wire.set_read_timeout(Some(LIMIT)).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "fake_gpu::child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null());
        let process = Running::start(&mut command).unwrap();
        Self { process, wire }
    }

    fn end(self) -> ExitStatus {
        drop(self.wire.shutdown(std::net::Shutdown::Write));
        self.process.heard(LIMIT).unwrap().status
    }

    fn kill(&mut self) {
        self.process.signal(rustix::process::Signal::KILL);
        self.process.end();
    }
}

fn say(mut wire: &UnixStream, bytes: &[u8]) {
    wire.write_all(&u32::try_from(bytes.len()).unwrap().to_le_bytes()).unwrap();
    wire.write_all(bytes).unwrap();
}

fn hear(mut wire: &UnixStream) -> Vec<u8> {
    let mut len = [0; 4];
    wire.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    wire.read_exact(&mut bytes).unwrap();
    bytes
}

/// Waits for the other side. Returns `false` if it has hung up.
fn told_to_go_on(mut wire: &UnixStream) -> bool {
    let mut len = [0; 4];
    let mut words = [0; 5];
    wire.read_exact(&mut len).is_ok() && wire.read_exact(&mut words).is_ok() && words == *b"go on"
}

fn say_handle(wire: &UnixStream, handle: &Handle) {
    say(wire, &handle.encode());
    let Some(fd) = handle.fd() else { return };
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(wire, &[IoSlice::new(b"f")], &mut control, SendFlags::empty()).unwrap();
}

fn hear_handle(wire: &UnixStream) -> Handle {
    let text = hear(wire).try_into().unwrap();
    if let Some(handle) = Handle::decode(&text, None) {
        return handle;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(wire, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .unwrap();
    let mut fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    Handle::decode(&text, fds.next()).unwrap()
}

/// Plays the role of a process that another test has started. Without a role it does nothing.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // SAFETY: standard input is the socket that `Other::start` gave, and nothing else uses it.
    let wire = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
    let role: Vec<&str> = role.split(' ').collect();
    match role[..] {
        ["load"] => {
            let region = driver(1).gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
            say(&wire, b"about to load");
            // SAFETY: it is not, which is the point: the load ends the process.
            let byte = unsafe { (region.addr() as *const u8).read_volatile() };
            say(&wire, &[byte]);
        }
        ["store"] => {
            let region = driver(1).gpu(0).unwrap().allocate(64, Flavour::Shareable).unwrap();
            say(&wire, b"about to store");
            // SAFETY: it is not, which is the point: the store ends the process.
            unsafe { (region.addr() as *mut u8).write_volatile(1) };
            say(&wire, b"stored");
        }
        ["freed"] => {
            let region = driver(1).gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
            let addr = region.addr();
            let keep = region.gpu().cloned();
            drop(region);
            say(&wire, b"about to load");
            // SAFETY: it is not, which is the point: the load ends the process.
            let byte = unsafe { (addr as *const u8).read_volatile() };
            say(&wire, &[byte]);
            drop(keep);
        }
        // Exports memory of the machine's device 1, with devices counted the other way round.
        ["export", form, len, seed] => {
            let form = match form {
                "bytes" => HandleForm::Bytes,
                "fd" => HandleForm::Fd,
                _ => HandleForm::Pool,
            };
            let (len, seed) = (len.parse().unwrap(), seed.parse().unwrap());
            let config = FakeConfig { visible: Some(vec![1, 0]), ..FakeConfig::devices(2) };
            let gpu = FakeDriver::new(config).unwrap().gpu(0).unwrap();
            let region = gpu.allocate(len, flavour(form)).unwrap();
            region.whole().write(&payload(len, seed)).unwrap();
            say_handle(&wire, &gpu.export(&region, form).unwrap());
            if told_to_go_on(&wire) {
                assert_eq!(region.whole().to_vec().unwrap(), payload(len, seed + 1));
                say(&wire, b"as expected");
            }
            if told_to_go_on(&wire) {
                drop(region);
                say(&wire, b"freed");
            }
            told_to_go_on(&wire);
        }
        // Opens what it is given, sees all of it, writes all of it.
        ["import", seed] => {
            let seed: u64 = seed.parse().unwrap();
            let config = FakeConfig { visible: Some(vec![1, 0]), ..FakeConfig::devices(2) };
            let driver = FakeDriver::new(config).unwrap();
            // By the device that does not own it.
            let region = driver.gpu(0).unwrap().open(&hear_handle(&wire)).unwrap();
            assert_eq!(region.kind(), MemKind::Device(driver.gpu(1).unwrap().info().uuid));
            assert_eq!(region.whole().to_vec().unwrap(), payload(region.len(), seed));
            region.whole().write(&payload(region.len(), seed + 1)).unwrap();
            say(&wire, b"as expected");
        }
        ["rounds"] => say(&wire, handles::rounds().as_bytes()),
        _ => panic!("no such role: {role:?}"),
    }
}

// ---- helpers ------------------------------------------------------------------------------------

fn driver(devices: usize) -> FakeDriver {
    FakeDriver::new(FakeConfig::devices(devices)).unwrap()
}

fn flavour(form: HandleForm) -> Flavour {
    match form {
        HandleForm::Bytes => Flavour::Plain,
        HandleForm::Fd => Flavour::Shareable,
        HandleForm::Pool => Flavour::Pooled,
        HandleForm::Fabric => panic!("simulated devices are in no fabric"),
    }
}

fn nonsense(byte: u8) -> Handle {
    let key = HandleKey::Bytes([byte; 64]);
    Handle { gpu: GpuUuid([byte; 16]), id: AllocId(0), len: 1000, offset: 0, key }
}

fn payload(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

fn start_copy(gpu: &FakeGpu, dst: &Region, src: &Region, len: usize) -> Result<GpuEvent, GpuError> {
    let (to, from) = (dst.addr() as *mut u8, src.addr() as *const u8);
    // SAFETY: the callers keep both regions until the event has fired, or free them on purpose,
    // which the simulated driver allows.
    unsafe { gpu.copy((to, dst.kind()), (from, src.kind()), len) }
}

/// Returns the driver's code of a copy that failed.
fn code(outcome: Result<(), CopyError>) -> i32 {
    match outcome.unwrap_err() {
        CopyError::Engine { cause, .. } => cause.code,
        other => panic!("not the engine's: {other}"),
    }
}
