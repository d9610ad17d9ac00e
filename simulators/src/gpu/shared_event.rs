//! Events that processes share: counts of records in memory that is mapped in both.
//!
//! An event's name leads to that memory as a byte handle leads to an allocation, with the same
//! rules. It is invalid in the process that made it, and once its maker has dropped it or is gone.

use super::error::{
    INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, OPERATING_SYSTEM, error,
};
use super::ipc::start_time;
use super::stream::FakeStream;
use carrack_transports::fork::Owner;
use carrack_transports::gpu::{EventState, GpuError, GpuEvent, SharedEvent, Stream};
use carrack_transports::mem::Region;
use rustix::fs::{Mode, OFlags};
use std::any::Any;
use std::fmt;
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const MAGIC: &[u8; 8] = b"CFGEVT01";

/// The bytes by which another process opens an event.
#[derive(FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct EventName {
    magic: [u8; 8],
    pid: U64,
    started: U64,
    /// Number of the maker's descriptor. Device and inode tell the file that it must be.
    fd: U64,
    dev: U64,
    ino: U64,
    rest: [u8; 16],
}

/// Offsets of the words: the records that were ordered, the last that was reached, and the flag of
/// a failure.
const RECORDED: usize = 0;
const REACHED: usize = 8;
const FAILED: usize = 16;
const BYTES: usize = 24;

/// Identity of the process that made it: a pid is reused, the pair is not.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Maker {
    pid: u32,
    started: u64,
}

impl Maker {
    fn this_process() -> Option<Self> {
        let pid = std::process::id();
        start_time(pid).map(|started| Self { pid, started })
    }

    fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.started)
    }
}

/// An event of this process, or of another one.
pub(super) struct FakeSharedEvent {
    words: Region,
    maker: Maker,
}

impl FakeSharedEvent {
    /// Creates an event, which has fired until it is recorded.
    pub(super) fn new() -> Result<Self, GpuError> {
        let refused = |why: String| error("shared_event", OPERATING_SYSTEM, why);
        let maker = Maker::this_process()
            .ok_or_else(|| refused("/proc/self/stat cannot be read".into()))?;
        let words = Region::shared(BYTES).map_err(|why| refused(why.to_string()))?;
        Ok(Self { words, maker })
    }

    /// Opens another process's event. The bytes may be arbitrary.
    pub(super) fn open(name: &[u8; 64]) -> Result<Self, GpuError> {
        let bad = |why: String| error("open_event", INVALID_HANDLE, why);
        let EventName { magic, pid, started, fd, dev, ino, .. } = zerocopy::transmute!(*name);
        let (started, fd) = (started.get(), fd.get());
        let pid = u32::try_from(pid.get()).ok().filter(|_| magic == *MAGIC);
        let pid =
            pid.ok_or_else(|| bad("these are not the bytes of an event of this driver".into()))?;
        let maker = Maker { pid, started };
        if Some(maker) == Maker::this_process() {
            let hint = "the process that made an event cannot open it: use the event itself";
            return Err(error("open_event", INVALID_CONTEXT, hint));
        }
        let path = format!("/proc/{pid}/fd/{fd}");
        let gone = |what: String| {
            bad(format!(
                "{what}: process {pid} has dropped the event, has ended, or is in another pid \
                namespace"
            ))
        };
        // Opening a descriptor that means another file by now could block, or have effects: look
        // first.
        let target = std::fs::read_link(&path).map_err(|why| gone(format!("{path}: {why}")))?;
        if !target.to_string_lossy().starts_with("/memfd:carrack-region") || !maker.is_alive() {
            return Err(gone(format!("{path} is {}", target.display())));
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(&path, flags, Mode::empty())
            .map_err(|why| gone(format!("{path}: {why}")))?;
        let stat = rustix::fs::fstat(&file).map_err(|why| gone(format!("{path}: {why}")))?;
        if (stat.st_dev, stat.st_ino) != (dev.get(), ino.get()) {
            return Err(gone(format!("{path} is another event")));
        }
        let words = Region::map_shared(&file, BYTES as u64).map_err(|why| gone(why.to_string()))?;
        Ok(Self { words, maker })
    }
}

/// Loads a word of the event's. It exists and is aligned, so this does not fail.
fn load(words: &Region, at: usize) -> u64 {
    words.fetch_add(at, 0).unwrap_or(0)
}

/// A record that a stream has not reached yet. If it is dropped before, since the stream failed,
/// it fails the event, so that its waiters do not wait for ever.
struct PendingRecord {
    words: Region,
    number: u64,
    reached: bool,
    owner: Owner,
}

impl PendingRecord {
    fn reach(mut self) {
        self.reached = true;
        let mut held = load(&self.words, REACHED);
        while held < self.number {
            match self.words.compare_swap(REACHED, held, self.number) {
                Ok(found) if found != held => held = found,
                _ => break,
            }
        }
    }
}

impl Drop for PendingRecord {
    fn drop(&mut self) {
        if !self.reached && self.owner.is_here() {
            let _ = self.words.compare_swap(FAILED, 0, 1);
        }
    }
}

impl SharedEvent for FakeSharedEvent {
    fn handle(&self) -> Result<[u8; 64], GpuError> {
        let found = self.words.share().and_then(|share| share.whereabouts());
        let hint = "only the process that made an event can name it";
        let found = found.ok_or_else(|| error("handle", INVALID_VALUE, hint))?;
        let Maker { pid, started } = self.maker;
        Ok(zerocopy::transmute!(EventName {
            magic: *MAGIC,
            pid: u64::from(pid).into(),
            started: started.into(),
            fd: u64::from(found.fd).into(),
            dev: found.dev.into(),
            ino: found.ino.into(),
            rest: [0; 16],
        }))
    }

    fn record(&self, stream: &dyn Stream) -> Result<(), GpuError> {
        let any: &dyn Any = stream;
        let stream = any.downcast_ref::<FakeStream>();
        let stream = stream
            .ok_or_else(|| error("record", INVALID_HANDLE, "the stream is another driver's"))?;
        let number = self.words.fetch_add(RECORDED, 1).unwrap_or(0) + 1;
        let (words, owner) = (self.words.clone(), Owner::this_process());
        let ordered = PendingRecord { words, number, reached: false, owner };
        stream.launch(move |_| {
            ordered.reach();
            Ok(())
        })
    }

    fn event(&self) -> GpuEvent {
        let number = load(&self.words, RECORDED);
        GpuEvent::new(std::sync::Arc::new(Record {
            words: self.words.clone(),
            maker: self.maker,
            number,
        }))
    }
}

impl fmt::Debug for FakeSharedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FakeSharedEvent(of process {}, simulated)", self.maker.pid)
    }
}

/// One record of an event.
struct Record {
    words: Region,
    maker: Maker,
    number: u64,
}

impl EventState for Record {
    fn query(&self) -> Result<bool, GpuError> {
        let reached = || load(&self.words, REACHED) >= self.number;
        if reached() {
            return Ok(true);
        }
        if load(&self.words, FAILED) != 0 {
            return Err(error(
                "event",
                LAUNCH_FAILED,
                "the stream that was to record the event has failed",
            ));
        }
        // A dead process's streams do no more work; records that they reached before count.
        if !self.maker.is_alive() && !reached() {
            let hint = format!("process {}, which made the event, is gone", self.maker.pid);
            return Err(error("event", INVALID_HANDLE, hint));
        }
        Ok(false)
    }

    fn wait(&self) -> Result<(), GpuError> {
        while !self.query()? {
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{FakeConfig, FakeDriver};

    #[test]
    fn an_event_fires_when_its_stream_comes_to_the_record_and_each_record_is_one_of_its_own() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let stream = driver.gpu(0).unwrap().fake_stream().unwrap();
        let event = FakeSharedEvent::new().unwrap();
        assert_eq!(event.event().query(), Ok(true), "never recorded");
        let (go, gate) = std::sync::mpsc::channel::<()>();
        stream.launch(move |_| gate.recv().map_err(|_| error("test", 1, "no word"))).unwrap();
        event.record(&*stream).unwrap();
        let first = event.event();
        assert_eq!(first.query(), Ok(false));
        go.send(()).unwrap();
        first.wait().unwrap();
        let (go, gate) = std::sync::mpsc::channel::<()>();
        stream.launch(move |_| gate.recv().map_err(|_| error("test", 1, "no word"))).unwrap();
        event.record(&*stream).unwrap();
        assert_eq!((first.query(), event.event().query()), (Ok(true), Ok(false)));
        drop(go);
        assert_eq!(
            event.event().wait().unwrap_err().code,
            LAUNCH_FAILED,
            "the stream failed before it"
        );
    }

    #[test]
    fn its_maker_cannot_open_it_and_nonsense_names_nothing() {
        let name = FakeSharedEvent::new().unwrap().handle().unwrap();
        let own = FakeSharedEvent::open(&name).unwrap_err();
        assert!(own.code == INVALID_CONTEXT && own.hint.contains("the event itself"), "{own}");
        assert_eq!(FakeSharedEvent::open(&[0; 64]).unwrap_err().code, INVALID_HANDLE);
        let mut of_no_process = name;
        of_no_process[8..12].fill(0xff);
        assert_eq!(FakeSharedEvent::open(&of_no_process).unwrap_err().code, INVALID_HANDLE);
    }
}
