//! Puts everything that a comparison needs into a folder, for a machine without Cargo, compiler and
//! network.
//!
//! The folder is laid out as the one of the peers is, so that both are found in the same way. UCX's
//! modules for CUDA are in a folder of their own: in rows between buffers of the host UCX is
//! fastest when it has no others to look for.

use std::io;
use std::path::{Path, PathBuf};

use fs_err::{self as fs, DirEntry};

use super::kit::Kit;
use crate::error::TaskError;
use crate::slim;

/// Files of the peers' folder to pack: a folder, and names in it with one `*` at most.
const PARTS: &[(&str, &str)] = &[
    ("", "mpi_bench"),
    ("", "copy_bench"),
    ("ucx/libucx/bin", "ucx_perftest"),
    ("ucx/libucx/bin", "ucx_info"),
    ("ucx/libucx/lib", "*.so.0"),
    ("ucx/libucx/lib/ucx", "libuct_cma.so.0"),
    ("ucx/libucx_cu13.libs", "lib*"),
    ("mpich/bin", "mpiexec"),
    ("mpich/bin", "hydra_pmi_proxy"),
    ("mpich/lib", "libmpi.so.*"),
    ("mpich/lib/mpich", "lib*"),
    ("mpich/lib/mpich/ucx", "libuct_cma.so.0"),
];

/// Files that are packed into another folder than their own.
const MOVED: &[(&str, &str, &str)] = &[("ucx/libucx/lib/ucx", "*.so.0", "ucx/libucx/lib/ucx_cuda")];

/// More is too much to be carried: 60 MiB.
const MOST: u64 = 60 << 20;

/// Puts the kit and this program itself into `folder`, stripped, and gives the bytes of it all.
pub(super) fn pack(kit: &Kit, folder: &Path) -> Result<u64, TaskError> {
    let own = std::env::current_exe()?;
    let mut files =
        vec![(own, PathBuf::from("xtask")), (kit.carrack.clone(), PathBuf::from("carrack"))];
    for (part, pattern) in PARTS {
        let names = names(&kit.peers.join(part), pattern)?;
        files.extend(names.iter().map(|name| {
            let below = Path::new(part).join(name);
            (kit.peers.join(&below), below)
        }));
    }
    for (part, pattern, to) in MOVED {
        let names = names(&kit.peers.join(part), pattern)?;
        files.extend(
            names.iter().map(|name| (kit.peers.join(part).join(name), Path::new(to).join(name))),
        );
    }
    let mut bytes = 0;
    for (from, below) in files {
        bytes += slim::strip(&from, &folder.join(below))?;
    }
    if bytes > MOST {
        eprintln!(
            "warning: {} is larger than the {} MiB that are easily carried",
            folder.display(),
            MOST >> 20
        );
    }
    Ok(bytes)
}

/// The names of files in a folder that fit; it is an error if none does.
fn names(folder: &Path, pattern: &str) -> Result<Vec<String>, TaskError> {
    let entries: io::Result<Vec<DirEntry>> = fs::read_dir(folder).and_then(Iterator::collect);
    let entries = entries?;
    let files = entries.into_iter().filter(|entry| entry.path().is_file());
    let of_files = files.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = of_files.filter(|name| fits(name, pattern)).collect();
    names.sort();
    if names.is_empty() {
        return Err(TaskError::Missing {
            what: format!("{pattern} in {}", folder.display()),
            remedy: "remove the folder of that peer, so that it is installed anew",
        });
    }
    Ok(names)
}

fn fits(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((begin, end)) => {
            name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_fits_whole_names_only() {
        assert!(fits("libucp.so.0", "*.so.0") && !fits("libucp.so.0.0.0", "*.so.0"));
        assert!(fits("libgomp-855c.so.1", "libgomp*") && !fits("libgom", "libgomp*"));
        assert!(fits("mpiexec", "mpiexec") && !fits("mpiexec.hydra", "mpiexec"));
        assert!(!fits("ab", "ab*b"));
    }
}
