//! Look at the disk's free space: a run that fills the disk fails where nothing is wrong.

use rustix::fs::statvfs;

use super::step::{Context, Outcome, Stopped};

/// Bytes that a whole run builds, from nothing, rounded up (measured: `du target` after `.ci/run`
/// in a fresh clone).
const NEEDED: u64 = 12 << 30;

/// Warns if the free space may be too small, here and at the run's end: whether it is shows when a
/// step fails. Files of an earlier build count as free, since they are overwritten.
pub(super) fn step(context: &mut Context) -> Outcome {
    let target = &context.workspace.target;
    let there = target.ancestors().find(|folder| folder.exists()).unwrap_or(target);
    let disk = statvfs(there).or_else(|error| {
        Stopped::skipped(format!("{} cannot be asked: {error}", there.display()))
    })?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let left = format!("{} has {:.1} GB left", there.display(), free as f64 / 1e9);
    say!("{left}");
    // A folder in which an earlier run was: most of it is there.
    let needed = if target.join("release").exists() { NEEDED / 4 } else { NEEDED };
    if free >= needed {
        return Ok(());
    }
    let needed = needed as f64 / 1e9;
    let warning = format!(
        "warning: {left}, and the run builds about {needed:.0} GB: if a step fails for lack of \
        room, make room, or name another folder with CARGO_TARGET_DIR"
    );
    say!("{warning}");
    context.repeated.lines.push(warning);
    Ok(())
}
