//! Programs and files that a guest needs on this machine, and their installation.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::apt::{self, INSTALL};
use crate::child;
use crate::guest::GuestError;

/// Something that a package of Debian's brings.
pub(super) struct Need {
    what: What,
    package: &'static str,
}

#[derive(Clone, Copy)]
enum What {
    /// A program in PATH, or in the folders for administrators.
    Program(&'static str),
    /// A program without shared libraries, which runs before any other file is there.
    Static(&'static str),
    /// A file in a folder of libraries whose name begins with this.
    Library(&'static str),
    /// A file at this path.
    File(&'static str),
}

const fn program(name: &'static str, package: &'static str) -> Need {
    Need { what: What::Program(name), package }
}

/// Needs of every guest.
pub(super) const GUEST: &[Need] = &[
    program("qemu-system-x86_64", "qemu-system-x86"),
    Need { what: What::Static("busybox"), package: "busybox-static" },
    program("modprobe", "kmod"),
    program("depmod", "kmod"),
    program("xz", "xz-utils"),
    program("zstd", "zstd"),
    program("strip", "binutils"),
    program("ip", "iproute2"),
    program("rdma", "iproute2"),
    // It ends QEMU when xtask ends.
    program("setpriv", "util-linux"),
    program("dpkg-deb", "dpkg"),
    Need { what: What::File(apt::KEYRING), package: "debian-archive-keyring" },
    Need { what: What::Library("libibverbs.so.1"), package: "libibverbs1" },
    Need { what: What::Library("libibverbs/librxe-rdmav"), package: "ibverbs-providers" },
];

/// Programs that Carrack is compared with.
pub(super) const PEERS: &[Need] =
    &[program("ib_send_lat", "perftest"), program("ucx_perftest", "ucx-utils")];

/// Needs of C programs that use verbs.
pub(super) const HEADERS: &[Need] =
    &[Need { what: What::File("/usr/include/infiniband/verbs.h"), package: "libibverbs-dev" }];

/// Needs of modules for the guest's kernel, which was built with this compiler.
pub(super) const MODULES: &[Need] =
    &[program("make", "make"), program("x86_64-linux-gnu-gcc-12", "gcc-12")];

/// Installs those of `needs` that are missing.
///
/// # Errors
/// When something is missing and cannot be installed; the packages are named.
pub(super) fn see_to(needs: &[Need]) -> Result<(), GuestError> {
    let packages = missing(needs);
    if packages.is_empty() {
        return Ok(());
    }
    let cannot = |why: String| GuestError::Missing { packages: packages.join(" "), why };
    if find("apt-get").is_none() {
        return Err(cannot("there is no apt-get, which could install them".into()));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(cannot("only root can install them".into()));
    }
    eprintln!("xtask: installing {}", packages.join(" "));
    let install = || {
        let mut command = apt::apt_get();
        command.args(["install", "--no-install-recommends"]).args(&packages);
        child::read(&mut command, INSTALL)
    };
    let installed = install().or_else(|_| {
        // The lists of packages may be outdated or missing.
        apt::update()?;
        install()
    });
    installed.map_err(|error| cannot(error.to_string()))?;
    match missing(needs) {
        still if still.is_empty() => Ok(()),
        _ => Err(cannot("installing them did not bring what is looked for".into())),
    }
}

/// The packages of what is not there, each once.
fn missing(needs: &[Need]) -> Vec<&'static str> {
    let mut packages: Vec<_> =
        needs.iter().filter(|need| !need.what.is_there()).map(|need| need.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

impl What {
    fn is_there(self) -> bool {
        match self {
            Self::Program(name) => find(name).is_some(),
            Self::Static(name) => find(name).is_some_and(|path| is_static(&path).unwrap_or(false)),
            Self::Library(name) => libraries().any(|folder| holds(&folder, name)),
            Self::File(path) => Path::new(path).exists(),
        }
    }
}

/// Returns a program's path.
pub(super) fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let others = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(others)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// Returns `true` if a program names no loader of shared libraries.
fn is_static(program: &Path) -> io::Result<bool> {
    let loader = b"/ld-linux";
    Ok(!fs::read(program)?.windows(loader.len()).any(|window| window == loader))
}

fn libraries() -> impl Iterator<Item = PathBuf> {
    [
        "/usr/lib/x86_64-linux-gnu",
        "/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
    ]
    .into_iter()
    .map(PathBuf::from)
}

fn holds(folder: &Path, name: &str) -> bool {
    let path = folder.join(name);
    let (Some(parent), Some(start)) = (path.parent(), path.file_name()) else {
        return false;
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name())
        .any(|file| file.to_string_lossy().starts_with(&*start.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_by_its_package_once() {
        let needs = [
            program("sh", "shell"),
            program("no-such-program", "some"),
            program("nor-such-a-one", "some"),
            Need { what: What::File("/no/such/file"), package: "files" },
        ];
        assert_eq!(missing(&needs), ["files", "some"]);
    }

    #[test]
    fn a_program_with_libraries_is_not_static() {
        // Test programs have shared libraries.
        let this = env::current_exe().unwrap();
        assert!(!is_static(&this).unwrap());
        assert!(is_static(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/guest/init"))).unwrap());
    }
}
