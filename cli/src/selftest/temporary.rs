//! Temporary folders of a run. Where a run was killed, a later one of this machine removes them.

use super::node::host;
use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use rustix::process::getuid;
use std::fs::{self, DirEntry, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use tempfile::TempDir;

/// Creates a folder that is removed in the end, after it has removed those that were left.
pub(super) fn folder(place: &Path, content: &str) -> io::Result<TempDir> {
    // Locks of some file systems hold on one machine only.
    let prefix = format!("carrack-{content}-{}-", host());
    // Of another host whose name begins alike, more follows than these six letters.
    let is_name = |name: &[u8]| {
        let random = name.strip_prefix(prefix.as_bytes());
        random.is_some_and(|it| it.len() == 6 && it.iter().all(u8::is_ascii_alphanumeric))
    };
    let is_ours = |entry: &DirEntry| {
        is_name(entry.file_name().as_encoded_bytes())
            && entry.metadata().is_ok_and(|it| it.is_dir() && it.uid() == getuid().as_raw())
    };
    for entry in fs::read_dir(place).into_iter().flatten().flatten().filter(is_ours) {
        if let Ok(lock) = File::open(entry.path())
            && flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    loop {
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(place)?;
        let lock = File::open(folder.path());
        // Without locks none can be taken, and no folder is removed.
        let locked = |lock| retry_on_intr(|| flock(lock, FlockOperation::LockExclusive));
        let _ = lock.as_ref().map(locked);
        // Another run may have removed it before it was locked.
        if folder.path().exists() {
            // Open to the end of this process.
            std::mem::forget(lock?);
            return Ok(folder);
        }
    }
}
