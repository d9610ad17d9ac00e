//! Opening of the driver's library, and checks that it is usable.

use super::calls::Calls;
use super::error::{self, NO_LIBRARY, STUB_LIBRARY, TOO_OLD};
use crate::dynamic;
use crate::gpu::GpuError;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::c_int;
use std::path::{Path, PathBuf};

/// Names under which the library is looked for. The driver installs the first; the second may be a
/// toolkit's stub.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The oldest supported driver, CUDA 11.2: it has the memory pools and all calls that are not
/// optional.
const OLDEST: c_int = 11_020;

/// Opens a driver's library. Returns its calls and the CUDA version that it speaks (13000 is
/// 13.0). Does not call `cuInit`.
pub(super) fn open(given: Option<&Path>) -> Result<(Calls, c_int), GpuError> {
    let names =
        given.map_or_else(|| NAMES.map(PathBuf::from).to_vec(), |path| vec![path.to_owned()]);
    let mut refusal: Option<GpuError> = None;
    for name in names {
        match try_open(&name) {
            Ok(found) => return Ok(found),
            // An error of a library that was found says more than the absence of another.
            Err(error) if error.code == NO_LIBRARY && refusal.is_some() => {}
            Err(error) => {
                refusal = refusal.filter(|first| first.code != NO_LIBRARY).or(Some(error))
            }
        }
    }
    Err(refusal.unwrap_or_else(|| error::error("dlopen", NO_LIBRARY)))
}

fn try_open(name: &Path) -> Result<(Calls, c_int), GpuError> {
    // SAFETY: loading runs the library's initialisers; the driver's are meant to be run in any
    // program, and touch no device before `cuInit`.
    let library = unsafe { dynamic::open(name, RTLD_LAZY | RTLD_LOCAL) }.map_err(|why| {
        let hint = format!(
            "{why}: this machine has no NVIDIA driver, or its libcuda.so.1 is not in the library \
            path (a container \
             has to be given it)"
        );
        error::because("dlopen", NO_LIBRARY, hint)
    })?;
    let path = place(&library).unwrap_or_else(|| name.display().to_string());
    let calls = Calls::of(library, path);
    let mut version = 0;
    // SAFETY: the place for the answer is ours.
    match unsafe { calls.driver_get_version(&raw mut version) } {
        Ok(()) => {}
        Err(refused) if refused.code == STUB_LIBRARY => return Err(stub(&calls.path)),
        Err(other) => return Err(other),
    }
    if version < OLDEST {
        let hint = format!(
            "{} speaks CUDA {}; CUDA {} is the oldest that Carrack can use: update the driver",
            calls.path,
            dotted(version),
            dotted(OLDEST)
        );
        return Err(error::because("cuDriverGetVersion", TOO_OLD, hint));
    }
    Ok((calls, version))
}

/// Returns the error for a toolkit's library to link against, in which every call returns 34.
pub(super) fn stub(path: &str) -> GpuError {
    let hint = format!(
        "{path} is the CUDA toolkit's stub, for linking only: take its folder (`stubs`) out of \
        LD_LIBRARY_PATH; the \
         driver's own library is libcuda.so.1"
    );
    error::because("cuDriverGetVersion", STUB_LIBRARY, hint)
}

/// Formats 13000 as 13.0.
pub(super) fn dotted(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Returns the file that a library came from.
fn place(library: &Library) -> Option<String> {
    dynamic::place(dynamic::find(library, "cuInit")?)
}
