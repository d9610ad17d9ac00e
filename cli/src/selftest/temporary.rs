//! Temporary folders of a run. Where a run was killed, a later one of this machine removes them.

use super::node::host;
use rustix::fs::{FlockOperation, flock};
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
    let is_ours = |entry: &DirEntry| {
        entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes())
            && entry.metadata().is_ok_and(|it| it.is_dir() && it.uid() == getuid().as_raw())
    };
    for entry in fs::read_dir(place)?.flatten().filter(is_ours) {
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
        let _ = lock.as_ref().map(|lock| flock(lock, FlockOperation::LockExclusive));
        // Another run may have removed it before it was locked.
        if folder.path().exists() {
            // Open to the end of this process.
            std::mem::forget(lock?);
            return Ok(folder);
        }
    }
}
