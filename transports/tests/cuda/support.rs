//! Devices, payloads, and regions with guards.

use carrack_transports::gpu::cuda::CudaDriver;
use carrack_transports::gpu::{Driver, Flavour, Gpu, GpuError, GpuEvent};
use carrack_transports::mem::{CopyError, Region};
use std::sync::Arc;

pub const MIB: usize = 1 << 20;

/// Returns the driver and at least `count` devices; `None`, with the reason printed, where there
/// are fewer.
pub fn need(count: usize) -> Option<(CudaDriver, Vec<Arc<dyn Gpu>>)> {
    let found = CudaDriver::initialise().and_then(|driver| Ok((driver, driver.devices()?)));
    let reason = match found {
        Ok((driver, gpus)) if gpus.len() >= count => return Some((driver, gpus)),
        // Two devices are not demanded of a machine that has one.
        Ok((_, gpus)) if !gpus.is_empty() => {
            println!("skipped: needs {count} devices, {} found", gpus.len());
            return None;
        }
        Ok(_) => "no device".into(),
        Err(why) => why.to_string(),
    };
    let required = std::env::var_os("TEST_REQUIRE_GPU").is_some_and(|set| set == "1");
    assert!(!required, "TEST_REQUIRE_GPU=1: {reason}");
    println!("skipped: {reason}");
    None
}

/// Returns bytes that follow from a seed, each different from its neighbours.
pub fn payload(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(next());
    }
    bytes.truncate(len);
    bytes
}

/// Allocates memory by a name of its kind: `host`, or a flavour, on a device.
pub fn make(gpu: &Arc<dyn Gpu>, kind: &str, len: usize) -> Region {
    match flavour(kind) {
        Some(flavour) => gpu.allocate(len, flavour).unwrap_or_else(|why| panic!("{kind}: {why}")),
        None => Region::host(len),
    }
}

pub fn flavour(kind: &str) -> Option<Flavour> {
    Some(match kind {
        "host" => return None,
        "plain" => Flavour::Plain,
        "shareable" => Flavour::Shareable,
        "pooled" => Flavour::Pooled,
        "pinned" => Flavour::Pinned,
        "managed" => Flavour::Managed,
        other => panic!("no such kind: {other}"),
    })
}

/// Starts a copy by an engine, whatever the kinds.
pub fn start(
    gpu: &dyn Gpu,
    (dst, dst_at): (&Region, usize),
    (src, src_at): (&Region, usize),
    len: usize,
) -> Result<GpuEvent, GpuError> {
    let (to, from) = ((dst.addr() + dst_at) as *mut u8, (src.addr() + src_at) as *const u8);
    // SAFETY: the callers keep both regions until the event has fired, or free one on purpose
    // before they start, which the driver refuses.
    unsafe { gpu.copy((to, dst.kind()), (from, src.kind()), len) }
}

/// Copies between two regions at odd places, and checks every byte of the target: what came, and
/// the guards around it.
pub fn copy_and_check(
    gpu: &dyn Gpu,
    (dst, dst_at): (&Region, usize),
    (src, src_at): (&Region, usize),
    len: usize,
    seed: u64,
) {
    let (poison, sent) = (payload(dst.len(), seed + 1), payload(src.len(), seed));
    dst.whole().write(&poison).unwrap();
    src.whole().write(&sent).unwrap();
    start(gpu, (dst, dst_at), (src, src_at), len).unwrap().wait().unwrap();
    let got = dst.whole().to_vec().unwrap();
    assert!(got[..dst_at] == poison[..dst_at], "the guard before it: {dst:?} {src:?} {len}");
    assert!(got[dst_at..][..len] == sent[src_at..][..len], "what was sent: {dst:?} {src:?} {len}");
    assert!(
        got[dst_at + len..] == poison[dst_at + len..],
        "the guard behind it: {dst:?} {src:?} {len}"
    );
}

/// Returns the driver's error of a copy that failed.
pub fn cause(outcome: Result<(), CopyError>) -> GpuError {
    match outcome.unwrap_err() {
        CopyError::Engine { cause, .. } => cause,
        other => panic!("not the engine's: {other}"),
    }
}
