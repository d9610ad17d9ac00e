//! An open device.

use super::super::bindings::{
    ibv_context, ibv_device, ibv_device_attr, ibv_device_attr_ex, ibv_port_attr,
    ibv_query_device_ex_input,
};
use super::super::error::{self, VerbsError};
use super::super::table::{Answer, Verbs, set_errno};
use super::extended::extended;
use super::handle::VerbsPointer;
use crate::fork::Owner;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::ffi::{CStr, c_int};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

/// The name of a device, as libibverbs has it: `mlx5_0`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceName(Box<str>);

impl DeviceName {
    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for DeviceName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A device that this process has open.
pub struct Context {
    verbs: Arc<Verbs>,
    raw: VerbsPointer<ibv_context>,
    name: DeviceName,
    /// Set if it is the program's: then it is neither closed nor changed here.
    adopted: bool,
    owner: Owner,
}

impl Context {
    /// Lists the devices of this machine, in libibverbs's order.
    ///
    /// # Errors
    /// There is none, which is `ENODEV`, or the library cannot tell.
    pub fn list(verbs: &Arc<Verbs>) -> Result<Vec<DeviceName>, VerbsError> {
        let devices = Devices::of(verbs)?;
        let names: Vec<_> = devices.iter().map(|(name, _)| name).collect();
        if names.is_empty() { Err(error::no_device()) } else { Ok(names) }
    }

    /// Opens the device of that name.
    ///
    /// # Errors
    /// There is no such device (the text lists the present ones), or it cannot be opened.
    pub fn open(verbs: &Arc<Verbs>, name: &str) -> Result<Arc<Self>, VerbsError> {
        let devices = Devices::of(verbs)?;
        let Some((name, device)) = devices.iter().find(|(found, _)| found.as_str() == name) else {
            let there: Vec<_> = devices.iter().map(|(name, _)| name.to_string()).collect();
            if there.is_empty() {
                return Err(error::no_device());
            }
            let remedy =
                format!("there is no such device here; those that there are: {}", there.join(", "));
            return Err(VerbsError::because("ibv_open_device", libc::ENODEV, remedy).of(name));
        };
        verbs.survive_forks();
        // SAFETY: a device of the list, which is freed at the end of this function.
        let raw = unsafe { verbs.open_device(device) }.map_err(|error| error.of(name.as_str()))?;
        // SAFETY: a successful answer is not null.
        let raw = unsafe { VerbsPointer::new(raw) };
        let owner = Owner::this_process();
        let context = Arc::new(Self { verbs: Arc::clone(verbs), raw, name, adopted: false, owner });
        // SAFETY: it is open, and the field is the descriptor of its events.
        unsafe { make_non_blocking("ibv_open_device", (*raw.raw()).async_fd) }
            .map_err(|error| context.name_in(error))?;
        Ok(context)
    }

    /// Adopts a context of the program's, maybe from another library. Dropping this does not close
    /// it. Its events stay the program's: [`async_event`](Self::async_event) returns none. The
    /// program has to acknowledge events about objects made here.
    ///
    /// # Safety
    /// The libibverbs that `verbs` stands for has opened it. It is not closed before this and all
    /// that is made in it are gone.
    pub unsafe fn from_raw(verbs: &Arc<Verbs>, raw: *mut ibv_context) -> Arc<Self> {
        // SAFETY: an open context has a device.
        let name = unsafe { device_name(verbs, (*raw).device) };
        // SAFETY: the caller's promise.
        let raw = unsafe { VerbsPointer::new(raw) };
        let owner = Owner::this_process();
        Arc::new(Self { verbs: Arc::clone(verbs), raw, name, adopted: true, owner })
    }

    /// Returns the device's name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Returns the library that it was opened with.
    pub fn verbs(&self) -> &Arc<Verbs> {
        &self.verbs
    }

    /// Returns the library's own structure, which is open as long as this exists.
    pub fn as_raw(&self) -> *mut ibv_context {
        self.raw.raw()
    }

    /// Returns `true` if the program opened it, and has its events.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Returns the kernel's directory of the device: `/sys/class/infiniband/mlx5_0`. `None` for a
    /// simulated one.
    pub fn sysfs(&self) -> Option<PathBuf> {
        // SAFETY: an open context has a device, whose path is a string that ends.
        let path = unsafe { CStr::from_ptr((*(*self.as_raw()).device).ibdev_path.as_ptr()) };
        let path = path.to_str().ok().filter(|path| !path.is_empty())?;
        Some(PathBuf::from(path)).filter(|path| path.is_dir())
    }

    /// Returns the abilities and limits of the device.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn device_attr(&self) -> Result<ibv_device_attr, VerbsError> {
        let mut attr = ibv_device_attr::default();
        // SAFETY: the context is open, and the place for the answer ours.
        unsafe { self.verbs.query_device(self.as_raw(), &raw mut attr) }
            .map_err(|error| self.name_in(error))?;
        Ok(attr)
    }

    /// Returns them with the attributes of newer libraries (on-demand paging, atomics over PCIe).
    /// An older library leaves those 0.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn extended_attr(&self) -> Result<ibv_device_attr_ex, VerbsError> {
        let mut attr = ibv_device_attr_ex::default();
        // SAFETY: the context is open.
        let Some(call) = (unsafe { extended!(self.as_raw(), query_device_ex) }) else {
            return Ok(ibv_device_attr_ex { orig_attr: self.device_attr()?, ..attr });
        };
        let input = ibv_query_device_ex_input::default();
        set_errno(0);
        // SAFETY: the context is open, and the place for the answer is ours and has the stated
        // length.
        let answer =
            unsafe { call(self.as_raw(), &raw const input, &raw mut attr, size_of_val(&attr)) };
        answer
            .good()
            .map_err(|errno| self.name_in(VerbsError::new("ibv_query_device_ex", errno)))
            .map(|()| attr)
    }

    /// Returns the state of a port; ports count from 1. Fields that the library is too old for are
    /// 0.
    ///
    /// # Errors
    /// There is no such port, or the device does not answer.
    pub fn port_attr(&self, port: u8) -> Result<ibv_port_attr, VerbsError> {
        let mut attr = ibv_port_attr::default();
        // SAFETY: the context is open.
        let answer = match unsafe { extended!(self.as_raw(), query_port) } {
            Some(call) => {
                set_errno(0);
                // SAFETY: the context is open, and the place for the answer is ours and has the
                // stated length.
                let answer =
                    unsafe { call(self.as_raw(), port, &raw mut attr, size_of_val(&attr)) };
                answer.good().map_err(|errno| VerbsError::new("ibv_query_port", errno))
            }
            // SAFETY: the exported function writes only the beginning of it, the structure's first
            // version.
            None => unsafe { self.verbs.query_port(self.as_raw(), port, &raw mut attr) },
        };
        answer.map_err(|error| self.name_in(error).at_port(port)).map(|()| attr)
    }

    /// Adds this device to an error.
    #[cold]
    pub(super) fn name_in(&self, error: VerbsError) -> VerbsError {
        error.of(self.name())
    }

    /// Destroys an object that was made in it; not in a forked child.
    pub(super) fn release(
        &self,
        what: &'static str,
        destroy: impl FnOnce(&Verbs) -> Result<(), VerbsError>,
    ) {
        if self.owner.is_here() {
            error::released(what, destroy(&self.verbs).map_err(|error| self.name_in(error)));
        }
    }

    /// Refuses objects of another context: a device's library would confuse the memory of the two.
    pub(super) fn check_same(
        &self,
        other: &Self,
        call: &'static str,
        what: &'static str,
    ) -> Result<(), VerbsError> {
        if ptr::eq(self.as_raw(), other.as_raw()) {
            return Ok(());
        }
        let remedy =
            format!("the {what} is of another context ({}): make both in one", other.name());
        Err(self.name_in(VerbsError::because(call, libc::EINVAL, remedy)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.adopted {
            // SAFETY: opened here, and all objects made in it held it.
            self.release("context", |verbs| unsafe { verbs.close_device(self.as_raw()) });
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.name)
    }
}

/// The list of devices, while it is in use.
struct Devices<'a> {
    verbs: &'a Verbs,
    list: *mut *mut ibv_device,
    count: usize,
}

impl<'a> Devices<'a> {
    /// Gets the list. A kernel without RDMA counts as a machine without devices.
    fn of(verbs: &'a Verbs) -> Result<Self, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the place for the answer is ours.
        match unsafe { verbs.get_device_list(&raw mut count) } {
            Ok(list) => Ok(Self { verbs, list, count: count.try_into().unwrap_or_default() }),
            Err(error)
                if verbs.functions().get_device_list.is_some() && error.errno == libc::ENOSYS =>
            {
                Err(error::no_device())
            }
            Err(error) => Err(error),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (DeviceName, *mut ibv_device)> {
        // SAFETY: the list has that many devices.
        (0..self.count).map(|index| unsafe { *self.list.add(index) }).map(|device| {
            // SAFETY: a device of the list, which is not freed yet.
            (unsafe { device_name(self.verbs, device) }, device)
        })
    }
}

impl Drop for Devices<'_> {
    fn drop(&mut self) {
        // SAFETY: an open context keeps its device, and the names are copies. A library without
        // the function keeps its list.
        let _ = unsafe { self.verbs.free_device_list(self.list) };
    }
}

/// Returns the name of a device.
///
/// # Safety
/// It is a device of a list that is not freed, or of a context that is open.
unsafe fn device_name(verbs: &Verbs, device: *mut ibv_device) -> DeviceName {
    // SAFETY: the caller's promise; without the function, the structure has the name.
    let name = unsafe { verbs.get_device_name(device).unwrap_or((*device).name.as_ptr()) };
    // SAFETY: a string of the device's.
    let name = unsafe { CStr::from_ptr(name) };
    DeviceName(name.to_string_lossy().into())
}

/// Makes a descriptor of libibverbs's non-blocking.
///
/// # Safety
/// It is open, if it is a descriptor at all.
pub(super) unsafe fn make_non_blocking(call: &'static str, fd: c_int) -> Result<(), VerbsError> {
    if fd < 0 {
        return Err(VerbsError::because(
            call,
            libc::EBADF,
            "what it has made has no descriptor for its events",
        ));
    }
    // SAFETY: open, by the caller's promise, and no negative number.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let set = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
    set.map_err(|errno| VerbsError::new("fcntl", errno.raw_os_error()))
}
