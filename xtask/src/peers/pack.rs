//! The pack of what a comparison needs for a machine without Cargo, compiler and network.
//!
//! The folder is laid out as the one of the peers is, so that both are found in the same way. UCX's
//! modules for CUDA are in a folder of their own. In rows between buffers of the host UCX is
//! fastest without them.

use std::path::{Path, PathBuf};

use super::kit::{Kit, PROGRAMS};
use crate::error::TaskError;
use crate::files;

/// Files of the peers' folder to pack, next to [`PROGRAMS`].
const PARTS: &[&str] = &[
    "ucx/libucx/bin/ucx_info",
    "ucx/libucx/lib/*.so.0",
    "ucx/libucx/lib/ucx/libuct_cma.so.0",
    "ucx/libucx_cu13.libs/lib*",
    "mpich/bin/hydra_pmi_proxy",
    "mpich/lib/libmpi.so.*",
    "mpich/lib/mpich/lib*",
    "mpich/lib/mpich/ucx/libuct_cma.so.0",
];

/// UCX's modules, and the folder that they are packed into.
const MODULES: &str = "ucx/libucx/lib/ucx/*.so.0";
const MODULES_TO: &str = "ucx/libucx/lib/ucx_cuda";

/// Puts the kit and this program itself into `folder`, stripped, and gives the bytes of it all.
pub(super) fn pack(kit: &Kit, folder: &Path) -> Result<u64, TaskError> {
    let own = std::env::current_exe()?;
    let mut files = vec![(own, "xtask".into()), (kit.carrack.clone(), PathBuf::from("carrack"))];
    for pattern in PROGRAMS.iter().chain(PARTS) {
        for file in found(&kit.peers, pattern)? {
            let below = file.strip_prefix(&kit.peers).unwrap_or(&file).to_owned();
            files.push((file, below));
        }
    }
    for file in found(&kit.peers, MODULES)? {
        let to = Path::new(MODULES_TO).join(file.file_name().unwrap_or_default());
        files.push((file, to));
    }
    let mut bytes = 0;
    for (from, below) in files {
        bytes += files::strip(&from, &folder.join(below))?;
    }
    Ok(bytes)
}

/// Returns the files that fit; it is an error if none does.
fn found(peers: &Path, pattern: &str) -> Result<Vec<PathBuf>, TaskError> {
    let mut found = files::matching(peers, pattern);
    found.retain(|path| path.is_file());
    if found.is_empty() {
        return Err(TaskError::Missing {
            what: format!("{pattern} in {}", peers.display()),
            remedy: "remove the folder of that peer, so that it is installed anew",
        });
    }
    Ok(found)
}
