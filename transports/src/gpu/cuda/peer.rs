//! Access of a device to the memory of another.

use super::calls::Calls;
use super::error::{PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_UNSUPPORTED, because};
use super::home::Home;
use super::sys::{CuDevice, p2p};
use crate::gpu::{GpuError, PeerInfo};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// Flags by device: set if the context has access to that device's primary context.
#[derive(Debug)]
pub(super) struct Peers(Box<[AtomicBool]>);

impl Peers {
    pub(super) fn new(devices: usize) -> Self {
        Self((0..devices).map(|_| AtomicBool::new(false)).collect())
    }
}

/// Checks that a device can access another's memory, as the driver says.
pub(super) fn can_access(calls: &Calls, device: CuDevice, peer: CuDevice) -> Result<(), GpuError> {
    let mut can: c_int = 0;
    // SAFETY: the place for the answer is ours; the driver checks the numbers.
    unsafe { calls.device_can_access_peer(&raw mut can, device, peer) }?;
    if can != 0 {
        return Ok(());
    }
    let hint = format!(
        "device {device} has no peer access to device {peer} (no NVLink, and PCIe between them is \
        not allowed to be \
         used: IOMMU, ACS, or two sockets); copies go through host memory"
    );
    Err(because("cuDeviceCanAccessPeer", PEER_ACCESS_UNSUPPORTED, hint))
}

/// Gives the context of `home` access to all ordinary memory of the peer's primary context, whose
/// home is `other`.
pub(super) fn enable(home: &Home, other: &Home) -> Result<(), GpuError> {
    let known = usize::try_from(other.context.device).ok().and_then(|at| home.peers.0.get(at));
    if known.is_some_and(|enabled| enabled.load(Ordering::Acquire)) {
        return Ok(());
    }
    can_access(home.calls(), home.context.device, other.context.device)?;
    let _current = home.context.enter()?;
    // SAFETY: two contexts that are held; access is only added.
    match unsafe { home.calls().ctx_enable_peer_access(other.context.raw, 0) } {
        Ok(()) => {}
        // The user has enabled it already.
        Err(error) if error.code == PEER_ACCESS_ALREADY_ENABLED => {}
        Err(error) => return Err(error),
    }
    if let Some(enabled) = known {
        enabled.store(true, Ordering::Release);
    }
    Ok(())
}

/// Returns `true` if access was enabled before.
#[inline]
pub(super) fn is_enabled(home: &Home, peer: usize) -> bool {
    home.peers.0.get(peer).is_some_and(|enabled| enabled.load(Ordering::Acquire))
}

/// Describes the connection of two devices, as the driver says. The caller fills in `link`.
pub(super) fn describe(
    calls: &Calls,
    device: CuDevice,
    peer: CuDevice,
) -> Result<PeerInfo, GpuError> {
    let ask = |attribute| {
        let mut value: c_int = 0;
        // SAFETY: the place for the answer is ours; the driver checks the numbers.
        unsafe { calls.device_get_p2p_attribute(&raw mut value, attribute, device, peer) }?;
        Ok::<_, GpuError>(value)
    };
    Ok(PeerInfo {
        access: ask(p2p::ACCESS_SUPPORTED)? != 0,
        performance_rank: ask(p2p::PERFORMANCE_RANK)?,
        native_atomics: ask(p2p::NATIVE_ATOMIC_SUPPORTED)? != 0,
        link: String::new(),
    })
}
