//! A simulated device's memory, for NICs. To simulated NICs its memfd stands for a dma-buf, and a
//! flush calls the functions that release writes held back.

use super::error::{INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, error};
use super::faults::count;
use super::shared::Shared;
use super::table::Origin;
use super::udmabuf;
use carrack_transports::gpu::{DmaBuf, GpuError};
use parking_lot::Mutex;
use std::fmt;

/// Function that a flush calls.
type Flushed = Box<dyn Fn() + Send + Sync>;

/// Functions that flushes of a driver's devices call.
#[derive(Default)]
pub(super) struct Flushes(Mutex<Vec<Flushed>>);

impl Flushes {
    pub(super) fn add(&self, flushed: Flushed) {
        self.0.lock().push(flushed);
    }

    fn pass_on(&self) {
        self.0.lock().iter().for_each(|flushed| flushed());
    }
}

impl fmt::Debug for Flushes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flushes({})", self.0.lock().len())
    }
}

impl Shared {
    /// Exports a range of a device's memory.
    pub(super) fn export_dmabuf(
        &self,
        ordinal: usize,
        addr: usize,
        len: usize,
    ) -> Result<DmaBuf, GpuError> {
        const CALL: &str = "export_dmabuf";
        if self.faults.refuses_dmabufs() {
            return Err(error(CALL, NOT_SUPPORTED, "ordered by a test"));
        }
        let wrong = |what: &str| error(CALL, INVALID_VALUE, format!("{addr:#x}+{len} {what}"));
        let table = self.table.lock();
        let (base, entry) =
            table.find(addr).ok_or_else(|| wrong("is no memory of this driver, or freed"))?;
        let offset = addr - base;
        if len == 0 || len > entry.len - offset {
            return Err(wrong("is no range of one allocation"));
        }
        if entry.ordinal != ordinal {
            return Err(wrong("is another device's: ask the one that owns it"));
        }
        let (Origin::Plain(fd) | Origin::Shareable(fd) | Origin::Pooled(fd)) = &entry.origin else {
            return Err(error(
                CALL,
                NOT_SUPPORTED,
                "managed memory, and another process's, is lent to no NIC",
            ));
        };
        let fd = match self.faults.lends_udmabufs() {
            true => udmabuf::of(fd)?,
            false => {
                fd.try_clone().map_err(|why| error(CALL, OPERATING_SYSTEM, why.to_string()))?
            }
        };
        count(&self.faults.counts.dmabufs);
        Ok(DmaBuf { fd, offset: offset as u64 })
    }

    /// Calls all functions, which release the writes that they hold back.
    pub(super) fn flush_remote_writes(&self) {
        count(&self.faults.counts.flushes);
        self.flushes.pass_on();
    }
}
