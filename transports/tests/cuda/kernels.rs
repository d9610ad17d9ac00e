//! A program's kernels, as PTX, which the driver compiles for the device.

use crate::user::{ok, stream, synchronize};
use cudarc::driver::sys as cu;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// A kernel whose blocks wait for each other. Each adds one to a word and goes on when the word has
/// reached the number of blocks. It ends only if all of them are on the device at one time, which a
/// cooperative launch promises. After five seconds it gives up, and counts in the second word.
/// Written by hand for this test, after the PTX manual (atom, ld.volatile, %globaltimer).
const GATHER: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .entry gather(.param .u64 words, .param .u32 blocks)
{
    .reg .u64 %words, %start, %now, %gone;
    .reg .u32 %blocks, %seen, %thread;
    .reg .pred %go;
    ld.param.u64 %words, [words];
    ld.param.u32 %blocks, [blocks];
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %go, %thread, 0;
    @%go bra DONE;
    mov.u64 %start, %globaltimer;
    atom.add.u32 %seen, [%words], 1;
LOOP:
    ld.volatile.u32 %seen, [%words];
    setp.ge.u32 %go, %seen, %blocks;
    @%go bra DONE;
    mov.u64 %now, %globaltimer;
    sub.u64 %gone, %now, %start;
    setp.gt.u64 %go, %gone, 5000000000;
    @%go bra LATE;
    bra LOOP;
LATE:
    atom.add.u32 %seen, [%words+4], 1;
DONE:
    ret;
}
\0";

const THREADS: u32 = 128;

/// The kernel, loaded in the current context; unloaded when this is dropped.
pub struct Module {
    module: cu::CUmodule,
    function: cu::CUfunction,
}

impl Module {
    pub fn load() -> Self {
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: the text ends with a zero, and has a kernel of that name; the places for the
        // answers are local.
        unsafe {
            ok(cu::cuModuleLoadData(&raw mut module, GATHER.as_ptr().cast()));
            ok(cu::cuModuleGetFunction(&raw mut function, module, c"gather".as_ptr()));
        }
        Self { module, function }
    }

    /// Launches it on all of a device, waits for it, and returns its number of blocks.
    pub fn gather(&self, device: i32, words: usize) -> u32 {
        let (mut blocks, mut processors): (c_int, c_int) = (0, 0);
        let count = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let threads = c_int::try_from(THREADS).unwrap();
        let stream = stream(1);
        // SAFETY: the places for the answers are local. The kernel has these two arguments, which
        // are read before the call returns, and its words stay until it has ended.
        let grid = unsafe {
            ok(cu::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.function,
                threads,
                0,
            ));
            ok(cu::cuDeviceGetAttribute(&raw mut processors, count, device));
            let (mut words, mut grid) = (words as u64, u32::try_from(blocks * processors).unwrap());
            let mut arguments: [*mut c_void; 2] = [(&raw mut words).cast(), (&raw mut grid).cast()];
            ok(cu::cuMemsetD32_v2(words, 0, 2));
            ok(cu::cuCtxSynchronize());
            ok(cu::cuLaunchCooperativeKernel(
                self.function,
                grid,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream as cu::CUstream,
                arguments.as_mut_ptr(),
            ));
            grid
        };
        synchronize(stream);
        // SAFETY: made above, and idle.
        unsafe { ok(cu::cuStreamDestroy_v2(stream as cu::CUstream)) };
        grid
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`; its kernel has been waited for.
        unsafe { ok(cu::cuModuleUnload(self.module)) };
    }
}

/// Reads the two words of the kernel.
pub fn words(at: usize) -> [u32; 2] {
    let mut words = [0; 2];
    // SAFETY: eight bytes at both ends.
    unsafe { ok(cu::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), at as u64, 8)) };
    words
}
