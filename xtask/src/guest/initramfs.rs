//! The guest's first file system: a shell, /init, and the modules that /init needs before it can
//! mount the machine's files.

use std::collections::BTreeSet;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use cpio::{NewcBuilder, write_cpio};
use fs_err as fs;

use super::kernel::Kernel;
use crate::error::TaskError;

const INIT: &str = include_str!("../../guest/init");

/// Modes of the archive's entries: every user may enter a folder and execute a file.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// Mount points of /init, and folders of its programs.
const FOLDERS: &str = "bin sbin proc sys dev root job over new modules";

/// Modules, by the list that /init loads them from. Soft-RoCE asks for `crc32_generic` by name, so
/// it is in no list of dependencies.
const LISTS: &[(&str, &str)] = &[
    ("boot", "virtio_pci virtio_console 9p 9pnet_virtio overlay"),
    ("rdma", "rdma_rxe rdma_ucm ib_umad veth dummy virtio_net crc32_generic crc32_pclmul"),
];

/// Module that makes the devices.
const DEVICE: &str = "rdma_rxe.ko";

/// Writes the file system to `to`. Modules of `ours` replace the kernel's modules of the same
/// name. Returns the other modules of `ours`, which are loaded later.
pub(super) fn write(
    to: &Path,
    kernel: &Kernel,
    ours: &[PathBuf],
) -> Result<Vec<PathBuf>, TaskError> {
    let lists = LISTS.iter().map(|(name, modules)| Ok((*name, kernel.files_of(modules)?)));
    let lists = lists.collect::<Result<Vec<_>, TaskError>>()?;
    let (lists, others) = arrange(&lists, ours);
    if !lists.iter().any(|(_, files)| files.iter().any(|file| file.ends_with(DEVICE))) {
        return Err(TaskError::Missing {
            what: format!("the module {DEVICE} in {}", kernel.version),
            remedy: "kernels for clouds lack it: name another kernel with --kernel",
        });
    }
    let entry =
        |name: &str, mode, contents| (NewcBuilder::new(name).mode(mode), Cursor::new(contents));
    let file = |name: &str, contents| entry(name, PROGRAM, contents);
    let folders = FOLDERS.split(' ').map(|name| entry(name, FOLDER, Vec::new()));
    let mut entries: Vec<_> = folders.collect();
    entries.push(file("init", INIT.into()));
    entries.push(file("bin/busybox", fs::read("/bin/busybox")?));
    for (name, modules) in &lists {
        let list: String = modules.iter().map(|module| name_of(module) + "\n").collect();
        entries.push(file(&format!("modules/{name}"), list.into()));
        for module in modules {
            entries.push(file(&format!("modules/{}", name_of(module)), fs::read(module)?));
        }
    }
    write_cpio(entries.into_iter(), fs::File::create(to)?)?;
    Ok(others)
}

type Lists<'a> = Vec<(&'a str, Vec<PathBuf>)>;

/// Returns the lists without repeated modules and with those of `ours` in their places, and the
/// modules of `ours` that are in no list.
fn arrange<'a>(lists: &[(&'a str, Vec<PathBuf>)], ours: &[PathBuf]) -> (Lists<'a>, Vec<PathBuf>) {
    let mut loaded = BTreeSet::new();
    let mut arranged = Lists::new();
    for (name, files) in lists {
        let new = files.iter().filter(|file| loaded.insert(name_of(file)));
        let instead = |file: &PathBuf| {
            ours.iter().find(|our| name_of(our) == name_of(file)).unwrap_or(file).clone()
        };
        arranged.push((*name, new.map(instead).collect()));
    }
    let others = ours.iter().filter(|our| !loaded.contains(&name_of(our))).cloned().collect();
    (arranged, others)
}

fn name_of(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(paths: &[&str]) -> Vec<PathBuf> {
        paths.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn a_module_is_loaded_once_and_ours_instead_of_the_kernels() {
        let lists = [
            ("boot", paths(&["/k/a.ko", "/k/b.ko"])),
            ("rdma", paths(&["/k/a.ko", "/k/rdma_rxe.ko"])),
        ];
        let (lists, others) = arrange(&lists, &paths(&["/our/rdma_rxe.ko", "/our/siw.ko"]));
        assert_eq!(
            lists,
            [("boot", paths(&["/k/a.ko", "/k/b.ko"])), ("rdma", paths(&["/our/rdma_rxe.ko"]))]
        );
        assert_eq!(others, paths(&["/our/siw.ko"]));
    }
}
