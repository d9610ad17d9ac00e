//! The cost of silent peers: the bytes that a rank holds in a large job, most of whose ranks never
//! send. For the test and for the benchmark that draws the curve; the allocator of both is
//! [`crate::counting::Counting`].

use crate::counting::live;
use carrack::bootstrap::{Bootstrap, BootstrapError, JobId};
use carrack::settings::{GpuChoice, Settings, TransportChoice};
use carrack::{Rank, Runtime, Tag};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Ranks of the job that are there, and talk to each other. The others are silent.
pub const SPEAKERS: u32 = 4;
/// Numbers of ranks that are tried.
pub const SIZES: [u32; 7] = [64, 128, 256, 512, 1024, 2048, 4096];

/// A rank of a job whose other ranks may never start. The table is no larger for them.
struct Place {
    rank: u32,
    size: u32,
    job: JobId,
    table: Arc<Mutex<HashMap<String, Vec<u8>>>>,
}

impl Bootstrap for Place {
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
        self.table.lock().insert(key.into(), value.into());
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        Ok(self.table.lock().get(key).cloned())
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        Ok(())
    }
}

/// Bytes that a rank holds in a job of `size`, on the heap and in memory that it shares. It has
/// talked to the few others that do.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub size: u32,
    pub heap: usize,
    pub shared: usize,
}

pub fn held(transport: TransportChoice, size: u32) -> Held {
    let settings = Settings::builder().transports(vec![transport]).gpu(GpuChoice::None);
    let settings = settings.build_from_vars(std::iter::empty::<(String, String)>()).unwrap();
    let (heap, shared) = (live(), mapped());
    let table = Arc::<Mutex<HashMap<String, Vec<u8>>>>::default();
    let ranks: Vec<Runtime> = (0..SPEAKERS)
        .map(|rank| {
            let place = Place {
                rank,
                size,
                job: JobId::from_bytes([size as u8; 16]),
                table: table.clone(),
            };
            Runtime::builder()
                .settings(settings.clone())
                .bootstrap(Box::new(place))
                .start()
                .unwrap()
        })
        .collect();
    for from in &ranks {
        for to in &ranks {
            while !from.post_send(to.rank(), &[7; 100], Tag(1)).try_submit().unwrap().is_done() {
                for rank in &ranks {
                    let _ = rank.progress().unwrap();
                }
            }
        }
    }
    for to in &ranks {
        for from in 0..SPEAKERS {
            let status = to.post_recv(Rank(from), vec![0; 100], Tag(1)).wait().unwrap();
            assert_eq!(status.bytes(), Some(&[7; 100][..]));
        }
    }
    let each = SPEAKERS as usize;
    Held { size, heap: (live() - heap) / each, shared: (mapped() - shared) / each }
}

/// Returns the bytes of shared memory that this process has mapped.
fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.contains("carrack-"));
    let lens = ours.map(|line| {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        usize::from_str_radix(to, 16).unwrap() - usize::from_str_radix(from, 16).unwrap()
    });
    lens.sum()
}

/// Returns the bytes that each silent peer costs a rank, between the smallest and the largest job.
pub fn each(rows: &[Held]) -> f64 {
    let (first, last) = (rows[0], rows[rows.len() - 1]);
    let bytes = |row: Held| (row.heap + row.shared) as f64;
    (bytes(last) - bytes(first)) / f64::from(last.size - first.size)
}

pub fn print(name: &str, rows: &[Held]) {
    println!("{name}: {:>6} {:>14} {:>14}", "ranks", "heap, bytes", "shared, bytes");
    for Held { size, heap, shared } in rows {
        println!("{:>width$} {heap:>14} {shared:>14}", size, width = name.len() + 8);
    }
    println!("{name}: {:.1} bytes for each silent peer", each(rows));
}
