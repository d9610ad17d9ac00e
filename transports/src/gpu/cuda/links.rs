//! Links between two devices, as the management library (NVML) reports them. They are for reports
//! only: without the library the answer is empty.

use crate::dynamic;
use crate::mem::GpuUuid;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

type NvmlDevice = *mut c_void;

/// The calls in use, of a library that is never closed.
#[derive(Debug)]
pub(super) struct Links {
    _library: ManuallyDrop<Library>,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut NvmlDevice) -> c_int,
    p2p_status: unsafe extern "C" fn(NvmlDevice, NvmlDevice, c_int, *mut c_int) -> c_int,
    link_state: unsafe extern "C" fn(NvmlDevice, c_uint, *mut c_int) -> c_int,
    ancestor: unsafe extern "C" fn(NvmlDevice, NvmlDevice, *mut c_int) -> c_int,
}

/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const BY_NVLINK: c_int = 2;
/// `NVML_NVLINK_MAX_LINKS`.
const MOST_LINKS: c_uint = 18;

impl Links {
    /// Opens and initialises the library, if it is there.
    pub(super) fn open() -> Option<Self> {
        // SAFETY: the management library's initialisers are meant to run in any program.
        let library = unsafe { dynamic::open("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL) }.ok()?;
        // SAFETY: symbols of these names are functions of these signatures, in all versions of the
        // library. The library stays open while the pointers are used.
        unsafe {
            let init = *library.get::<unsafe extern "C" fn() -> c_int>("nvmlInit_v2").ok()?;
            let by_uuid = *library.get("nvmlDeviceGetHandleByUUID").ok()?;
            let p2p_status = *library.get("nvmlDeviceGetP2PStatus").ok()?;
            let link_state = *library.get("nvmlDeviceGetNvLinkState").ok()?;
            let ancestor = *library.get("nvmlDeviceGetTopologyCommonAncestor").ok()?;
            let library = ManuallyDrop::new(library);
            (init() == 0).then_some(Self {
                _library: library,
                by_uuid,
                p2p_status,
                link_state,
                ancestor,
            })
        }
    }

    /// Describes the link between two devices, in words.
    pub(super) fn between(&self, one: GpuUuid, other: GpuUuid) -> Option<String> {
        let (one, other) = (self.device(one)?, self.device(other)?);
        let (mut status, mut level) = (-1, -1);
        // SAFETY: handles that the library gave, and places for the answers that are ours.
        if unsafe { (self.p2p_status)(one, other, BY_NVLINK, &raw mut status) } == 0 && status == 0
        {
            return Some(format!("NVLink ({} links active)", self.active_links(one)));
        }
        // SAFETY: as above.
        let known = unsafe { (self.ancestor)(one, other, &raw mut level) } == 0;
        let way = match level {
            _ if !known => return None,
            0 => "the same board",
            10 => "PCIe, one switch",
            20 => "PCIe, several switches",
            30 => "PCIe, one host bridge",
            40 => "PCIe, one socket",
            50 => "PCIe, across sockets",
            _ => return None,
        };
        Some(way.to_owned())
    }

    fn device(&self, uuid: GpuUuid) -> Option<NvmlDevice> {
        let (name, mut handle) = (CString::new(uuid.to_string()).ok()?, std::ptr::null_mut());
        // SAFETY: a string that ends in a zero, and a place for the answer.
        (unsafe { (self.by_uuid)(name.as_ptr(), &raw mut handle) } == 0).then_some(handle)
    }

    fn active_links(&self, device: NvmlDevice) -> usize {
        let active = |link: &c_uint| {
            let mut state = 0;
            // SAFETY: a handle that the library gave, and a place for the answer.
            let known = unsafe { (self.link_state)(device, *link, &raw mut state) } == 0;
            known && state == 1
        };
        (0..MOST_LINKS).filter(active).count()
    }
}
