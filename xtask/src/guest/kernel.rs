//! The guest's kernel, from a Debian package, with the modules that a guest may need, in a cache.
//!
//! ```text
//! CACHE/SUITE_PACKAGE/vmlinux                   the kernel proper
//! CACHE/SUITE_PACKAGE/tree/lib/modules/VERSION  its modules, unpacked and stripped: these load
//!                                               three times as fast
//! CACHE/SUITE_PACKAGE/version                   written last: without it the folder is unfinished
//! ```

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Duration;

use fs_err::{self as fs, File};
use rustix::fs::{FlockOperation, flock};
use walkdir::WalkDir;

use super::image;
use crate::apt::Suite;
use crate::error::TaskError;
use crate::files;

/// Time limit of one program that unpacks or strips, on a slow machine.
const UNPACK: Duration = Duration::from_secs(180);

/// Debian suite, and its package that has the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(super) suite: String,
    package: String,
}

/// Package that depends on the newest kernel of its suite.
const NEWEST: &str = "linux-image-amd64";

impl Default for Source {
    /// Returns the kernel that is tested most.
    fn default() -> Self {
        Self { suite: "bookworm-backports".into(), package: NEWEST.into() }
    }
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (suite, package) = text.split_once(':').unwrap_or((text, NEWEST));
        let plain = |word: &str| {
            !word.is_empty()
                && !word.starts_with(['-', '.'])
                && word.chars().all(|c| c.is_ascii_alphanumeric() || "-+.~".contains(c))
        };
        if plain(suite) && plain(package) {
            return Ok(Self { suite: suite.into(), package: package.into() });
        }
        Err("write SUITE or SUITE:PACKAGE, such as trixie-backports:linux-image-amd64".into())
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.suite, self.package)
    }
}

/// A kernel that is ready to be booted.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) folder: PathBuf,
    /// Version, as `uname -r` prints it.
    pub(super) version: String,
}

impl Kernel {
    /// Returns the kernel of `source` from the cache, and fetches it if it is not there.
    pub(super) fn get(cache: &Path, source: &Source) -> Result<Self, TaskError> {
        fs::create_dir_all(cache)?;
        let folder = cache.join(source.to_string().replace(':', "_"));
        let _lock = lock(cache)?;
        if let Ok(version) = fs::read_to_string(folder.join("version")) {
            return Ok(Self { folder, version: version.trim().to_owned() });
        }
        eprintln!("xtask: fetching the guest's kernel ({source}) into {}", cache.display());
        let work = Emptied::new(cache.join("unfinished"))?;
        let built = fetch(&work.0, source)?;
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::rename(&built.folder, &folder)?;
        Ok(Self { folder, ..built })
    }

    /// Returns the file of the kernel proper.
    pub(super) fn image(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// Returns the folder that the guest has as `/lib/modules/VERSION`.
    pub(super) fn modules(&self) -> PathBuf {
        self.folder.join("tree/lib/modules").join(&self.version)
    }

    /// Returns the files of `names` and of all modules that they need, in load order. Modules that
    /// are built into the kernel have no file.
    pub(super) fn files_of(&self, names: &str) -> Result<Vec<PathBuf>, TaskError> {
        let mut command = Command::new("/sbin/modprobe");
        command.args(["-C", "/dev/null", "--dirname"]).arg(self.folder.join("tree"));
        command.args(["--set-version", &self.version, "--show-depends", "--all"]);
        command.args(names.split(' '));
        // modprobe fails for modules that this kernel lacks; callers check for what they require.
        Ok(in_order(&children::hear(&mut command, UNPACK)?.stdout))
    }
}

/// Locks a folder. A second process waits here, and then finds what the first has made.
pub(super) fn lock(folder: &Path) -> Result<File, TaskError> {
    let file = File::create(folder.join("lock"))?;
    flock(&file, FlockOperation::LockExclusive)
        .map_err(|error| TaskError::file(folder)(error.into()))?;
    Ok(file)
}

/// Returns the files that `modprobe --show-depends` names, each once.
fn in_order(said: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for file in said.lines().filter_map(|line| line.strip_prefix("insmod ")) {
        let file = PathBuf::from(file.trim_end());
        if !files.contains(&file) {
            files.push(file);
        }
    }
    files
}

/// Folder that is emptied when it is created, and removed when it is dropped.
pub(super) struct Emptied(pub(super) PathBuf);

impl Emptied {
    pub(super) fn new(folder: PathBuf) -> Result<Self, TaskError> {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Emptied {
    fn drop(&mut self) {
        // A folder that cannot be removed now is removed by the next run.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Fetches a kernel into a folder below `work`.
fn fetch(work: &Path, source: &Source) -> Result<Kernel, TaskError> {
    let suite = Suite::open(work, &source.suite)?;
    let packages = parts(&suite.needed(&source.package)?);
    let root = work.join("root");
    suite.unpack(&packages, &root)?;
    let strange = |what| TaskError::Missing {
        what: format!("{what} in {}", packages.join(" ")),
        remedy: "name another kernel with --kernel",
    };
    let from = ["lib/modules/*", "usr/lib/modules/*"];
    let from = from.iter().flat_map(|folder| files::matching(&root, folder)).next();
    let from = from.ok_or_else(|| strange("modules"))?;
    let version = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let built = Kernel { folder: work.join("built"), version };
    let to = built.modules();
    carry_modules(&from, &to)?;
    let mut depmod = Command::new("/sbin/depmod");
    depmod.arg("-b").arg(built.folder.join("tree")).arg(&built.version);
    children::read(&mut depmod, UNPACK)?;
    let vmlinuz = [root.join("boot"), from];
    let vmlinuz = vmlinuz.iter().flat_map(|folder| files::matching(folder, "vmlinuz*")).next();
    let vmlinuz = vmlinuz.ok_or_else(|| strange("a kernel"))?;
    let bytes = fs::read(&vmlinuz)?;
    let (range, compression) =
        image::packed(&bytes).ok_or_else(|| strange("a kernel that this task can unpack"))?;
    let packed = built.image().with_extension(compression.ending);
    fs::write(&packed, &bytes[range])?;
    children::read(Command::new(compression.program).args(["-q", "-d"]).arg(&packed), UNPACK)?;
    // zstd keeps its input, the other programs remove it.
    let _ = fs::remove_file(&packed);
    fs::write(built.folder.join("version"), &built.version)?;
    Ok(built)
}

/// Returns the packages of a kernel, from the output of `apt-cache depends --recurse`. That has a
/// line for each package, and indented ones for its dependencies. Packages without a version in
/// their names have no files of their own.
fn parts(listed: &str) -> Vec<String> {
    let is_part = |name: &&str| {
        let rest = ["linux-image-", "linux-binary-", "linux-modules-"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix));
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    listed.lines().filter(is_part).map(str::to_owned).collect()
}

/// Moves the modules that a guest may need, unpacked and stripped, and what `depmod` reads.
fn carry_modules(from: &Path, to: &Path) -> Result<(), TaskError> {
    for entry in WalkDir::new(from).into_iter().collect::<Result<Vec<_>, _>>()? {
        let below = entry.path().strip_prefix(from).unwrap_or(entry.path());
        if entry.file_type().is_file() && is_wanted(&below.to_string_lossy()) {
            let path = to.join(below);
            fs::create_dir_all(path.parent().unwrap_or(to))?;
            fs::rename(entry.path(), &path)?;
        }
    }
    for (name, change) in [
        ("*.ko.xz", &["xz", "-d"][..]),
        ("*.ko.zst", &["zstd", "-q", "-d", "--rm"]),
        // Stripping also removes the signature, which stands behind the signed file.
        ("*.ko", &["strip", "--strip-debug"]),
    ] {
        let mut find = Command::new("find");
        find.arg(to).args(["-name", name, "-exec"]).args(change).args(["{}", "+"]);
        children::read(&mut find, UNPACK)?;
    }
    Ok(())
}

/// Returns `true` if a guest may need a file of the modules' folder. It needs RDMA, networks,
/// fault injection, and access to the machine's files. Drivers of hardware and large unrelated
/// families are left out.
fn is_wanted(below: &str) -> bool {
    const FOLDERS: &str = "drivers/infiniband/ net/ fs/9p/ fs/netfs/ fs/fscache/ fs/overlayfs/ \
        fs/configfs/ drivers/virtio/ drivers/char/virtio crypto/ arch/x86/crypto/ lib/";
    const LEFT_OUT: &str = "drivers/infiniband/hw/ net/mac80211/ net/bluetooth/ net/wireless/ \
        net/batman-adv/ net/ceph/ net/sctp/ net/tipc/ net/rxrpc/ net/sunrpc/ net/can/ net/nfc/ \
        net/ieee802154/";
    let Some(module) = below.strip_prefix("kernel/") else {
        return below.starts_with("modules.builtin") || below == "modules.order";
    };
    let begins = |folders: &str| folders.split(' ').any(|folder| module.starts_with(folder));
    let card = module.strip_prefix("drivers/net/").is_some_and(|rest| !rest.contains('/'));
    module.contains(".ko") && (card || begins(FOLDERS)) && !begins(LEFT_OUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_named_by_its_suite_and_perhaps_its_package() {
        assert_eq!("sid".parse(), Ok(Source { suite: "sid".into(), package: NEWEST.into() }));
        let pinned: Source = "sid:linux-image-7.2.1+deb14-amd64".parse().unwrap();
        assert_eq!(pinned.to_string(), "sid:linux-image-7.2.1+deb14-amd64");
        for wrong in ["", "sid:", ":linux", "../etc", "a b", "sid:a/b", "-o"] {
            assert!(wrong.parse::<Source>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_parts_of_a_kernel_are_those_with_a_version() {
        let listed = "linux-image-amd64\n  Depends: linux-image-7.2-amd64\nlinux-image-7.2-amd64\n\
            \x20 Depends: kmod\nkmod\nlinux-binary-7.2-amd64\nlinux-modules-7.2-amd64\n\
            <linux-initramfs-tool>\n";
        let all = ["linux-image-7.2-amd64", "linux-binary-7.2-amd64", "linux-modules-7.2-amd64"];
        assert_eq!(parts(listed), all);
    }

    #[test]
    fn modules_load_in_the_order_that_modprobe_gives_each_once() {
        let said =
            "insmod /m/ib_core.ko \nbuiltin udp_tunnel\ninsmod /m/a b.ko\ninsmod /m/ib_core.ko \n";
        assert_eq!(in_order(said), [Path::new("/m/ib_core.ko"), Path::new("/m/a b.ko")]);
    }

    #[test]
    fn hardware_and_what_no_guest_wants_stay_out() {
        for wanted in [
            "modules.order",
            "modules.builtin.modinfo",
            "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz",
            "kernel/net/sched/sch_netem.ko.xz",
            "kernel/drivers/net/veth.ko",
            "kernel/drivers/char/virtio_console.ko.zst",
        ] {
            assert!(is_wanted(wanted), "{wanted}");
        }
        for not in [
            "modules.dep",
            "kernel/drivers/infiniband/hw/mlx5/mlx5_ib.ko.xz",
            "kernel/drivers/net/ethernet/intel/e1000/e1000.ko.xz",
            "kernel/net/bluetooth/bluetooth.ko.xz",
            "kernel/fs/xfs/xfs.ko.xz",
            "kernel/net/notes.txt",
        ] {
            assert!(!is_wanted(not), "{not}");
        }
    }
}
