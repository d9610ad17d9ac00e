//! The CUDA driver's codes, for the errors that the simulated one gives.

use carrack_transports::gpu::GpuError;

/// `CUDA_ERROR_INVALID_VALUE`.
pub(super) const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_DEINITIALIZED`.
pub(super) const DEINITIALIZED: i32 = 4;
/// `CUDA_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: i32 = 100;
/// `CUDA_ERROR_INVALID_DEVICE`.
pub(super) const INVALID_DEVICE: i32 = 101;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub(super) const INVALID_CONTEXT: i32 = 201;
/// `CUDA_ERROR_MAP_FAILED`.
pub(super) const MAP_FAILED: i32 = 205;
/// `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED`.
pub(super) const PEER_ACCESS_UNSUPPORTED: i32 = 217;
/// `CUDA_ERROR_OPERATING_SYSTEM`.
pub(super) const OPERATING_SYSTEM: i32 = 304;
/// `CUDA_ERROR_INVALID_HANDLE`.
pub(super) const INVALID_HANDLE: i32 = 400;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
pub(super) const ILLEGAL_ADDRESS: i32 = 700;
/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
pub(super) const ALREADY_REGISTERED: i32 = 712;
/// `CUDA_ERROR_LAUNCH_FAILED`.
pub(super) const LAUNCH_FAILED: i32 = 719;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(super) const NOT_SUPPORTED: i32 = 801;

/// Returns an error with the code's name filled in.
pub(super) fn error(call: &'static str, code: i32, hint: impl Into<String>) -> GpuError {
    GpuError { call, code, name: name(code), hint: hint.into() }
}

fn name(code: i32) -> &'static str {
    match code {
        INVALID_VALUE => "INVALID_VALUE",
        OUT_OF_MEMORY => "OUT_OF_MEMORY",
        DEINITIALIZED => "DEINITIALIZED",
        NO_DEVICE => "NO_DEVICE",
        INVALID_DEVICE => "INVALID_DEVICE",
        INVALID_CONTEXT => "INVALID_CONTEXT",
        MAP_FAILED => "MAP_FAILED",
        PEER_ACCESS_UNSUPPORTED => "PEER_ACCESS_UNSUPPORTED",
        OPERATING_SYSTEM => "OPERATING_SYSTEM",
        INVALID_HANDLE => "INVALID_HANDLE",
        ILLEGAL_ADDRESS => "ILLEGAL_ADDRESS",
        ALREADY_REGISTERED => "HOST_MEMORY_ALREADY_REGISTERED",
        LAUNCH_FAILED => "LAUNCH_FAILED",
        NOT_SUPPORTED => "NOT_SUPPORTED",
        _ => "UNKNOWN",
    }
}
