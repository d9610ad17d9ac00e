//! A trial that shows whether a copy may cross from the memory of one GPU into that of another.
//! No documentation of the driver says that it may.

use super::Region;
use carrack_transports::gpu::{Access, Gpu};
use carrack_transports::mem::copy::copy_and_wait;
use std::sync::Arc;

/// Bytes that are copied, half of them on each side of a border: a multiple of no granularity.
const BYTES: usize = 2 * 4099;

/// Allocates memory of these GPUs in turn. Each GPU copies across every border that a region
/// beginning on it can have: from the host, to the host, and within the region. The trial runs in
/// this process, since every GPU has access to all of the memory: a failed copy here fails like any
/// other.
///
/// # Errors
/// The reason: a copy was refused or copied wrong bytes, or no memory could be allocated for the
/// trial.
pub(super) fn copies_go_across(
    gpus: &[Arc<dyn Gpu>],
    access: &[Access],
    unit: usize,
) -> Result<(), String> {
    let all = gpus.len();
    let Some(first) = gpus.first() else { return Ok(()) };
    // Each GPU has a first stripe, followed by those of all others and by another of its own.
    let count = 2 * all;
    let refused = |why: &dyn std::fmt::Display| format!("it could not be tried: {why}");
    let reservation = first.reserve(count * unit).map_err(|why| refused(&why))?;
    let turns = gpus.iter().cycle().zip(0..count);
    let allocate =
        |(gpu, at): (&Arc<dyn Gpu>, usize)| gpu.allocate_at(&reservation, at * unit, unit, access);
    let stripes: Vec<Region> =
        turns.map(allocate).collect::<Result<_, _>>().map_err(|why| refused(&why))?;
    for (gpu, parts) in gpus.iter().zip(stripes.windows(all + 1)) {
        let whole = Region::joined(parts.to_vec())
            .ok_or("it could not be tried: stripes do not follow each other")?;
        for border in 1..=all {
            over_one(&whole, border * unit).map_err(|why| {
                format!("over a border by the engines of {}: {why}", gpu.info().uuid)
            })?;
        }
    }
    Ok(())
}

/// Copies across one border in both directions.
fn over_one(whole: &Region, border: usize) -> Result<(), String> {
    let outside = || "no such range".to_owned();
    let across = whole.slice(border - BYTES / 2, BYTES).ok_or_else(outside)?;
    let near = whole.slice(0, BYTES).ok_or_else(outside)?;
    for (turn, [from, to]) in [[&across, &near], [&near, &across]].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at % 251 + turn) as u8).collect();
        let copied = from
            .write(&bytes)
            .and_then(|()| copy_and_wait(to.view_mut(), from.view()))
            .and_then(|()| to.to_vec())
            .map_err(|why| why.to_string())?;
        if copied != bytes {
            return Err("other bytes arrived than were sent".into());
        }
    }
    Ok(())
}
