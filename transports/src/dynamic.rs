//! Libraries that are opened at run time, and the files that they came from.

#![expect(unsafe_code, reason = "libraries are opened, and symbols looked up")]

use libloading::AsFilename;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_int, c_void};

/// Opens a library.
///
/// # Errors
/// The loader's reason.
///
/// # Safety
/// The library's initialisers may run in any program.
pub unsafe fn open(name: impl AsFilename, flags: c_int) -> Result<Library, String> {
    // SAFETY: passed on from the caller.
    unsafe { Library::open(Some(name), flags) }.map_err(reason)
}

/// Returns the loader's own words, which name the file or the symbol.
pub fn reason(error: libloading::Error) -> String {
    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the address of a symbol.
pub(crate) fn find(library: &Library, symbol: &str) -> Option<*mut c_void> {
    // SAFETY: only the address is taken; its type is given where it is used.
    let found = unsafe { library.get::<*mut c_void>(symbol.as_bytes()) }.ok()?;
    Some(found.as_raw_ptr()).filter(|found| !found.is_null())
}

/// Returns the file of the library that has this symbol.
pub(crate) fn place(symbol: *mut c_void) -> Option<String> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address is only compared, and the place for the answer is ours.
    if unsafe { libc::dladdr(symbol, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a string of the loader's that lives as long as the library, which is open.
    let file = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(file.to_string_lossy().into_owned())
}
