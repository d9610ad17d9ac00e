//! Trial of read-only access: an attempt to write, in a process of its own.
//!
//! Every driver takes the flags of `cuMemSetAccess`. The result of a write by a device that may
//! only read is documented nowhere. On two H200s (driver 580) the copy's call refuses it, and a
//! kernel faults, which ends its context. So each way of writing is tried in a throwaway process
//! ([`trial`]). If one of the ways succeeds, the pair of devices is not offered read-only access.

use super::calls::Calls;
use super::device::CudaGpu;
use super::driver::CudaDriver;
use super::error::{
    ILLEGAL_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_VALUE, LAUNCH_FAILED, NOT_SUPPORTED, because,
};
use super::home::Home;
use super::sys::{AccessDesc, FunctionHandle, ModuleHandle, StreamHandle};
use super::vmm;
use crate::gpu::{Flavour, Gpu, GpuError, Rights};
use crate::mem::{CopyError, GpuUuid, Region};
use crate::trial;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

const CALL: &str = "cuMemSetAccess";

/// The kernel, for the driver to compile, with the zero that the driver looks for.
const KERNEL: &str = concat!(include_str!("attempt.ptx"), "\0");

/// Value of the word before the attempt.
const BEFORE: u64 = 0x1111_2222_3333_4444;

/// Value that the attempt writes.
const AFTER: u64 = !BEFORE;

/// Environment of the attempt. Under MPS a kernel's fault would hit all processes on the device,
/// so the attempt bypasses the MPS server, or has no context. It writes no core dump of the
/// device's memory.
const ENVIRONMENT: [(&str, &str); 2] =
    [("CUDA_MPS_PIPE_DIRECTORY", "/dev/null"), ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "0")];

/// Results of past attempts, by the device that would read and the device that owns the memory.
pub(super) type Verdicts = Mutex<HashMap<(GpuUuid, GpuUuid), Result<(), GpuError>>>;

/// Engine with which a device writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteEngine {
    Copy,
    Kernel,
}

impl WriteEngine {
    const ALL: [Self; 2] = [Self::Copy, Self::Kernel];

    fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Kernel => "kernel",
        }
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|engine| engine.name() == name)
    }
}

/// Checks that a device cannot write to memory that it may only read: see
/// [`Gpu::keeps_from_writing`].
pub(super) fn keeps_from_writing(reader: &CudaGpu, owner: GpuUuid) -> Result<(), GpuError> {
    reader.reaches(owner)?;
    let both = (reader.info().uuid, owner);
    if let Some(verdict) = reader.shared.verdicts.lock().get(&both) {
        return verdict.clone();
    }
    let mut verdict = Ok(());
    for engine in WriteEngine::ALL {
        let question =
            format!("writing {} {} {owner} {}", engine.name(), both.0, reader.shared.calls.path);
        // Only what an attempt has shown is remembered.
        let failed = |why| because(CALL, NOT_SUPPORTED, why);
        match &*trial::ask(&question, &ENVIRONMENT).map_err(failed)? {
            "kept" => {}
            "written" => {
                let why = format!(
                    "a {} of its writes there all the same: tried in a process of its own",
                    engine.name()
                );
                verdict = Err(because(CALL, NOT_SUPPORTED, why));
                break;
            }
            other => return Err(failed(format!("the attempt by a {} {other}", engine.name()))),
        }
    }
    reader.shared.verdicts.lock().insert(both, verdict.clone());
    verdict
}

/// Makes the attempt that a question asks for, and returns its outcome in a word. `None`: the
/// question is of another kind.
pub(crate) fn answer(question: &str) -> Option<String> {
    let mut words = question.splitn(5, ' ');
    if words.next() != Some("writing") {
        return None;
    }
    let (engine, reader, owner, library) =
        (words.next()?, words.next()?, words.next()?, words.next()?);
    Some(match attempt(WriteEngine::named(engine)?, reader, owner, library) {
        Ok(true) => "written".into(),
        Ok(false) => "kept".into(),
        Err(why) => format!("failed: {why}"),
    })
}

/// Returns `true` if a device has written to another's memory that it may only read.
fn attempt(
    engine: WriteEngine,
    reader: &str,
    owner: &str,
    library: &str,
) -> Result<bool, GpuError> {
    // SAFETY: the library that the asking process has opened.
    let shared = unsafe { CudaDriver::at(Path::new(library)) }.usable()?;
    let named = |name: &str| {
        let found = shared.gpus()?.iter().find(|gpu| gpu.info().uuid.to_string() == name);
        found.ok_or_else(|| {
            because(CALL, INVALID_VALUE, format!("{name} is not seen by this process"))
        })
    };
    let (reader, owner) = (named(reader)?, named(owner)?);
    let unit = vmm::unit(owner)?;
    let memory = owner.allocate_at(&owner.reserve(unit)?, 0, unit, &[])?;
    memory.whole().write(&BEFORE.to_ne_bytes()).map_err(unlikely)?;
    let only_reads = AccessDesc::of(reader.device, Rights::Read);
    // SAFETY: mapped as one piece, and no work is in flight there.
    unsafe { shared.calls.mem_set_access(memory.addr(), unit, &raw const only_reads, 1) }?;

    let own = reader.allocate(2 * size_of::<u64>(), Flavour::Plain)?;
    let hand = Hand::of(reader)?;
    // The device reads, and writes its own memory by the same calls, so that a refusal below is
    // due to the memory.
    hand.write(WriteEngine::Copy, own.addr(), memory.addr(), 0)?;
    if word(&own)? != BEFORE {
        return Err(because(CALL, NOT_SUPPORTED, "it does not read what is there"));
    }
    hand.write(WriteEngine::Kernel, own.addr(), own.addr(), AFTER)?;
    if word(&own)? != AFTER {
        return Err(because(
            "cuLaunchKernel",
            NOT_SUPPORTED,
            "a kernel has not written to memory of its own",
        ));
    }
    let refused = hand.write(engine, memory.addr(), own.addr(), AFTER).err();
    match (refused, word(&memory)) {
        // The word has changed, whatever the calls returned.
        (_, Ok(found)) if found != BEFORE => Ok(true),
        (None, found) => found.map(|_| false),
        (Some(why), _) if keeps_out(&why) => Ok(false),
        (Some(why), _) => Err(why),
    }
}

/// Returns `true` if the error means that there is no access: a refused call, or a fault, which
/// the context does not survive.
fn keeps_out(why: &GpuError) -> bool {
    matches!(why.code, INVALID_VALUE | ILLEGAL_ADDRESS | INVALID_ADDRESS_SPACE | LAUNCH_FAILED)
}

/// Reads the first word of memory.
fn word(memory: &Region) -> Result<u64, GpuError> {
    let mut bytes = [0; 8];
    let Some(first) = memory.slice(0, bytes.len()) else {
        return Err(because("cuMemcpy", INVALID_VALUE, "memory without a word"));
    };
    first.read(&mut bytes).map_err(unlikely)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn unlikely(why: CopyError) -> GpuError {
    match why {
        CopyError::Engine { cause, .. } => cause,
        other => because("cuMemcpy", INVALID_VALUE, other.to_string()),
    }
}

/// A device that writes one word at a time and waits for it.
struct Hand {
    home: Arc<Home>,
    stream: StreamHandle,
    function: FunctionHandle,
}

impl Hand {
    fn of(gpu: &CudaGpu) -> Result<Self, GpuError> {
        let home = Arc::clone(gpu.home()?);
        let (mut module, mut function) = (ModuleHandle::NULL, FunctionHandle::NULL);
        let current = home.context.enter()?;
        let stream = home.new_stream()?;
        let calls: &Calls = home.calls();
        // SAFETY: the places for the answers are ours; the text of the kernel and its name end with
        // a zero. The process ends with them.
        unsafe {
            calls.module_load_data(&raw mut module, KERNEL.as_ptr().cast())?;
            calls.module_get_function(&raw mut function, module, c"carrack_attempt".as_ptr())?;
        }
        drop(current);
        Ok(Self { home, stream, function })
    }

    /// Writes a word: a copy takes it from `from`, a kernel writes `value`.
    fn write(
        &self,
        engine: WriteEngine,
        to: usize,
        from: usize,
        value: u64,
    ) -> Result<(), GpuError> {
        let calls = self.home.calls();
        let _current = self.home.context.enter()?;
        let mut values = [to as u64, value];
        let mut arguments =
            values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: memory of this process, which is kept until the stream is waited for. The kernel
        // has these two arguments of 8 bytes, which are read before the call returns. The driver
        // may refuse the write and end the context: the attempt tests for that.
        unsafe {
            match engine {
                WriteEngine::Copy => {
                    calls.memcpy_dtod_async(to, from, size_of::<u64>(), self.stream)?
                }
                WriteEngine::Kernel => {
                    let arguments = arguments.as_mut_ptr();
                    calls.launch_kernel(
                        self.function,
                        1,
                        1,
                        1,
                        1,
                        1,
                        1,
                        0,
                        self.stream,
                        arguments,
                        null_mut(),
                    )?;
                }
            }
            calls.stream_synchronize(self.stream)
        }
    }
}
