//! The mock of the driver's library, compiled by the machine's C compiler.

#![expect(unsafe_code, reason = "the mock's functions are looked up by name")]

use carrack::transports::gpu::cuda::CudaDriver;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the path of a test's mock. Its folder is its own: two tests never write one file.
pub fn path(test: &str) -> PathBuf {
    crate::built::folder().join("mocks").join(test).join("libcuda.so")
}

/// Compiles the mock.
pub fn library(test: &str, define: &str) -> PathBuf {
    let library = path(test);
    let (folder, source) = (library.parent().unwrap(), library.with_extension("c"));
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(&source, include_str!("libcuda.c")).unwrap();
    let parts = [
        ("alone.h", include_str!("alone.h")),
        ("copier.h", include_str!("copier.h")),
        ("readers.h", include_str!("readers.h")),
    ];
    for (name, text) in parts {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-w", define, "-o"]).arg(&library).arg(&source);
    assert!(compiler.status().unwrap().success(), "{compiler:?}");
    library
}

/// Opens the driver of a mock's library, or of a file that is no driver.
pub fn open(library: &Path) -> CudaDriver {
    // SAFETY: the mock's calls are such as the driver's; other libraries lack the first of them.
    unsafe { CudaDriver::at(library) }
}

/// Returns one of the mock's own words.
pub fn word(library: &Path, name: &str) -> i32 {
    // SAFETY: the mock's functions take nothing and return an int; opening it a second time is
    // opening it again.
    unsafe {
        let library = libloading::Library::new(library).unwrap();
        library.get::<unsafe extern "C" fn() -> i32>(name).unwrap()()
    }
}
