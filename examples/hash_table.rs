//! A hash table spread over all ranks: keys are claimed by compare-and-swap, values follow by a put
//! with notification.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- hash_table
//! ```

use carrack::{Counter, Rank, RemoteComp, RemoteKey, Runtime};

/// Places of each rank: a key and a value, two words.
const PLACES: u64 = 8192;
/// Keys that each rank inserts: the table gets half full.
const KEYS: u64 = PLACES / 2;

fn hash(key: u64) -> u64 {
    (key ^ key >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

/// The table, as one rank sees it.
struct Table<'a> {
    runtime: &'a Runtime,
    parts: Vec<RemoteKey>,
    arrived: RemoteComp,
}

impl Table<'_> {
    /// Returns the places where a key may be, the best first.
    fn places(&self, key: u64) -> impl Iterator<Item = (Rank, &RemoteKey, u64)> {
        let places = PLACES * self.parts.len() as u64;
        (0..places).map(move |step| {
            let at = (hash(key) + step) % places;
            let owner = (at / PLACES) as usize;
            (Rank(owner as u32), &self.parts[owner], 16 * (at % PLACES))
        })
    }

    fn insert(&self, key: u64, value: u64) -> Result<(), carrack::Error> {
        for (owner, part, at) in self.places(key) {
            let held = self.runtime.post_compare_swap(owner, part, at, 0, key).wait()?.value();
            if held == Some(0) {
                let bytes = value.to_le_bytes();
                let mut put =
                    self.runtime.post_put(owner, &bytes, part, at + 8).remote_comp(self.arrived);
                put.wait()?;
                return Ok(());
            }
        }
        Err("the table is full".into())
    }

    fn find(&self, key: u64) -> Result<Option<u64>, carrack::Error> {
        for (owner, part, at) in self.places(key) {
            let bytes =
                self.runtime.post_get(owner, vec![0; 16], part, at).wait()?.buffer.to_vec()?;
            let ([found, value], []) = bytes.as_chunks::<8>() else {
                return Err("a get of two words".into());
            };
            match u64::from_le_bytes(*found) {
                0 => return Ok(None),
                found if found == key => return Ok(Some(u64::from_le_bytes(*value))),
                _ => {}
            }
        }
        Ok(None)
    }
}

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    let (me, size) = (u64::from(runtime.rank().0), u64::from(runtime.size()));
    let values = Counter::new();
    let arrived = runtime.register_comp(&values)?;
    let part = runtime.allocate(16 * PLACES as usize)?;
    let registered = runtime.register_memory(&part)?;
    let parts = runtime.allgather(&registered.remote_key().to_bytes())?;
    let parts = parts.iter().map(|bytes| RemoteKey::from_bytes(bytes)).collect::<Result<_, _>>()?;
    let table = Table { runtime: &runtime, parts, arrived };

    for number in 0..KEYS {
        let key = 1 + me + size * number;
        table.insert(key, key * key)?;
    }
    runtime.barrier()?;
    for key in 1..=size * KEYS {
        if table.find(key)? != Some(key * key) {
            return Err(format!("rank {me}: key {key} is not there").into());
        }
    }
    // Each value was announced to the rank that holds it.
    let held = part
        .whole()
        .to_vec()?
        .chunks(16)
        .filter(|place| place.iter().any(|&byte| byte != 0))
        .count();
    runtime.wait(|| values.get() == held as u64)?;
    println!("rank {me}: {} keys found, {held} of them here, all announced", size * KEYS);
    runtime.barrier()?;
    Ok(())
}
