//! The driver's codes, with their names and what to do about them.

use crate::gpu::GpuError;

/// Code of this crate: there is no library to ask.
pub(super) const NO_LIBRARY: i32 = -1;
/// Code of this crate: the driver's library lacks the call.
pub(super) const MISSING_CALL: i32 = -2;
/// Code of this crate: the driver is older than the oldest that this code knows.
pub(super) const TOO_OLD: i32 = -3;

pub(super) const INVALID_VALUE: i32 = 1;
pub(super) const OUT_OF_MEMORY: i32 = 2;
pub(super) const NOT_INITIALIZED: i32 = 3;
pub(super) const DEINITIALIZED: i32 = 4;
pub(super) const STUB_LIBRARY: i32 = 34;
pub(super) const NO_DEVICE: i32 = 100;
pub(super) const INVALID_DEVICE: i32 = 101;
pub(super) const INVALID_CONTEXT: i32 = 201;
pub(super) const ALREADY_MAPPED: i32 = 208;
pub(super) const PEER_ACCESS_UNSUPPORTED: i32 = 217;
pub(super) const OPERATING_SYSTEM: i32 = 304;
pub(super) const INVALID_HANDLE: i32 = 400;
pub(super) const NOT_READY: i32 = 600;
pub(super) const ILLEGAL_ADDRESS: i32 = 700;
pub(super) const PEER_ACCESS_ALREADY_ENABLED: i32 = 704;
pub(super) const CONTEXT_IS_DESTROYED: i32 = 709;
pub(super) const INVALID_ADDRESS_SPACE: i32 = 717;
pub(super) const LAUNCH_FAILED: i32 = 719;
pub(super) const NOT_SUPPORTED: i32 = 801;
pub(super) const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;

/// Returns an error with the code's name, and the standing hint if there is one.
pub(super) fn error(call: &'static str, code: i32) -> GpuError {
    let (name, hint) = describe(code).unwrap_or(("UNKNOWN", ""));
    GpuError { call, code, name, hint: hint.to_owned() }
}

/// Returns an error with a hint of its own.
pub(super) fn because(call: &'static str, code: i32, hint: impl Into<String>) -> GpuError {
    let (name, _) = describe(code).unwrap_or(("UNKNOWN", ""));
    GpuError { call, code, name, hint: hint.into() }
}

/// Returns `true` if the driver or the context is gone, which has released everything already
/// (gpu.md, life and death rule 2). A forked child finds its driver uninitialised.
pub(super) fn is_gone(error: &GpuError) -> bool {
    let gone = [NOT_INITIALIZED, DEINITIALIZED, INVALID_CONTEXT, CONTEXT_IS_DESTROYED];
    gone.contains(&error.code)
}

/// Logs a failed release in `Drop`, unless there was nothing left to release.
pub(super) fn released(what: &str, outcome: Result<(), GpuError>) {
    if let Err(error) = outcome
        && !is_gone(&error)
    {
        tracing::warn!(%error, what, "the driver did not release it");
    }
}

/// Returns the names and hints of the codes that this layer may meet.
pub(super) fn describe(code: i32) -> Option<(&'static str, &'static str)> {
    Some(match code {
        NO_LIBRARY => ("NO_LIBRARY", ""),
        MISSING_CALL => ("MISSING_CALL", ""),
        TOO_OLD => ("TOO_OLD", ""),
        INVALID_VALUE => ("INVALID_VALUE", ""),
        OUT_OF_MEMORY => ("OUT_OF_MEMORY", "the device's memory is used up"),
        NOT_INITIALIZED => {
            ("NOT_INITIALIZED", "CUDA was not initialised in this process, or it is a fork")
        }
        DEINITIALIZED => ("DEINITIALIZED", "the process is ending: the driver is gone"),
        STUB_LIBRARY => ("STUB_LIBRARY", ""),
        46 => (
            "DEVICE_UNAVAILABLE",
            "another process has the device to itself (nvidia-smi -q: Compute Mode)",
        ),
        NO_DEVICE => (
            "NO_DEVICE",
            "the driver shows no device: look at CUDA_VISIBLE_DEVICES, nvidia-smi, and what the \
            container was given",
        ),
        INVALID_DEVICE => ("INVALID_DEVICE", ""),
        200 => ("INVALID_IMAGE", ""),
        INVALID_CONTEXT => ("INVALID_CONTEXT", ""),
        205 => ("MAP_FAILED", ""),
        ALREADY_MAPPED => ("ALREADY_MAPPED", ""),
        209 => ("NO_BINARY_FOR_GPU", ""),
        214 => ("ECC_UNCORRECTABLE", "the device has a memory fault: nvidia-smi -q -d ECC"),
        PEER_ACCESS_UNSUPPORTED => {
            ("PEER_ACCESS_UNSUPPORTED", "the two devices have no peer access")
        }
        218 => ("INVALID_PTX", "the driver's compiler refuses the kernel"),
        221 => (
            "JIT_COMPILER_NOT_FOUND",
            "libnvidia-ptxjitcompiler.so is not there: it belongs to the driver",
        ),
        222 => (
            "UNSUPPORTED_PTX_VERSION",
            "the driver is older than the kernel: a newer driver compiles it",
        ),
        223 => (
            "JIT_COMPILATION_DISABLED",
            "CUDA_DISABLE_PTX_JIT or CUDA_DISABLE_JIT is set: unset it",
        ),
        226 => (
            "CONTAINED",
            "memory of another process went away under an access, with its owner: the context is \
            lost",
        ),
        OPERATING_SYSTEM => (
            "OPERATING_SYSTEM",
            "the operating system refused: limits of descriptors or locked memory?",
        ),
        INVALID_HANDLE => ("INVALID_HANDLE", ""),
        401 => ("ILLEGAL_STATE", ""),
        500 => ("NOT_FOUND", ""),
        NOT_READY => ("NOT_READY", ""),
        700 => (
            "ILLEGAL_ADDRESS",
            "a kernel or copy of this context touched memory that is not there; the context is \
            lost",
        ),
        PEER_ACCESS_ALREADY_ENABLED => ("PEER_ACCESS_ALREADY_ENABLED", ""),
        705 => ("PEER_ACCESS_NOT_ENABLED", ""),
        CONTEXT_IS_DESTROYED => {
            ("CONTEXT_IS_DESTROYED", "the context of the memory or stream was destroyed")
        }
        711 => ("TOO_MANY_PEERS", "the device has peer access to as many others as it can"),
        712 => ("HOST_MEMORY_ALREADY_REGISTERED", "a part of the range is locked already"),
        713 => ("HOST_MEMORY_NOT_REGISTERED", ""),
        717 => ("INVALID_ADDRESS_SPACE", ""),
        719 => ("LAUNCH_FAILED", "a kernel of this context failed; the context is lost"),
        800 => ("NOT_PERMITTED", ""),
        NOT_SUPPORTED => ("NOT_SUPPORTED", ""),
        802 => ("SYSTEM_NOT_READY", "the system is not ready: is nvidia-fabricmanager running?"),
        803 => (
            "SYSTEM_DRIVER_MISMATCH",
            "libcuda and the kernel's module are of different versions: reload the module",
        ),
        804 => (
            "COMPAT_NOT_SUPPORTED_ON_DEVICE",
            "the cuda-compat package in the library path does not suit the device",
        ),
        STREAM_CAPTURE_UNSUPPORTED => (
            "STREAM_CAPTURE_UNSUPPORTED",
            "the stream is being captured into a graph, to which none of the library's work \
            belongs: post before the capture, or after it",
        ),
        999 => ("UNKNOWN", ""),
        _ => return None,
    })
}
