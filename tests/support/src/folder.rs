//! A bootstrap over a folder, for real processes whose life and death a test decides by itself. A
//! launcher would end the other ranks when one dies.

use carrack::bootstrap::{Bootstrap, BootstrapError, JobId};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub struct Folder {
    path: PathBuf,
    rank: u32,
    size: u32,
    job: JobId,
    fences: AtomicU32,
}

impl Folder {
    pub fn new(path: PathBuf, rank: u32, size: u32) -> Self {
        let mut secret = [7; 16];
        let text = path.file_name().unwrap().as_encoded_bytes().to_vec();
        let len = text.len().min(16);
        secret[..len].copy_from_slice(&text[text.len() - len..]);
        Self { path, rank, size, job: JobId::from_bytes(secret), fences: AtomicU32::new(0) }
    }

    fn file(&self, key: &str) -> PathBuf {
        self.path.join(key.replace('/', "~"))
    }
}

impl Bootstrap for Folder {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn job(&self) -> &JobId {
        &self.job
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        let half = self.file(&format!("{key}.{}", self.rank));
        std::fs::write(&half, value).unwrap();
        std::fs::rename(half, self.file(key)).unwrap();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        Ok(std::fs::read(self.file(key)).ok())
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        let number = self.fences.fetch_add(1, Ordering::SeqCst);
        self.put(&format!("fence/{number}/{}", self.rank), b"")?;
        for rank in 0..self.size {
            while self.get(&format!("fence/{number}/{rank}"))?.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}
