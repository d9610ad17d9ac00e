//! Memory regions from dma-bufs for the guest's soft device, whose driver does not support them. A
//! module is built from Debian's source of the guest's kernel and a file of this tree. A preloaded
//! library extends the driver's user-space half.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use fs_err as fs;

use super::kernel::{Emptied, Kernel, Source, lock};
use crate::apt::{self, Suite};
use crate::error::TaskError;
use crate::files;

const DRIVER: &str = include_str!("../../guest/dmabuf/rxe_dmabuf.c");
const SHIM: &str = include_str!("../../guest/dmabuf/shim.c");

/// Time limit of each step. The longest unpacks a kernel's source.
const LIMIT: Duration = Duration::from_secs(300);

/// Module and preloaded library that give a guest dma-bufs.
pub(super) struct DmaBuf {
    pub(super) module: PathBuf,
    pub(super) shim: PathBuf,
}

/// Returns the module and the library for `kernel`, built if they are missing or outdated.
pub(super) fn get(kernel: &Kernel, source: &Source) -> Result<DmaBuf, TaskError> {
    let folder = kernel.folder.join("dmabuf");
    let built = DmaBuf { module: folder.join("rdma_rxe.ko"), shim: folder.join("shim") };
    fs::create_dir_all(&folder)?;
    let _lock = lock(&folder)?;
    // Written last. It differs if one of this tree's sources has changed.
    let mark = folder.join("sources");
    let sources = [DRIVER, SHIM].concat();
    if fs::read_to_string(&mark).is_ok_and(|built_from| built_from == sources) {
        return Ok(built);
    }
    // The guest's kernel was built with this compiler.
    apt::see_to("libibverbs-dev make gcc-12")?;
    eprintln!("xtask: building the guest's driver with dma-bufs");
    let work = Emptied::new(folder.join("unfinished"))?;
    let headers = unpack(&work.0, &kernel.version, source)?;
    let driver = work.0.join("drivers/infiniband/sw/rxe");
    add_to(&driver)?;
    let jobs = thread::available_parallelism().map_or(1, NonZero::get);
    let mut make = Command::new("make");
    make.args(["-s", &format!("-j{jobs}"), "-C"]).arg(&headers);
    make.arg(format!("M={}", driver.display()));
    make.args(["CONFIG_RDMA_RXE=m", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
    children::read(&mut make, LIMIT)?;
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(driver.join("rdma_rxe.ko")).arg("-o").arg(&built.module);
    children::read(&mut strip, LIMIT)?;
    let shim = work.0.join("shim.c");
    fs::write(&shim, SHIM)?;
    files::compile("cc", &shim, &folder, &["-shared", "-fPIC", "-ldl"])?;
    fs::write(&mark, sources)?;
    Ok(built)
}

/// Unpacks the kernel's headers and the source of its soft device to `work`, and returns the
/// folder that modules are built with.
fn unpack(work: &Path, version: &str, source: &Source) -> Result<PathBuf, TaskError> {
    let suite = Suite::open(work, &source.suite)?;
    let main = format!("linux-headers-{version}");
    let gone = || TaskError::Missing {
        what: format!("the package {main}"),
        remedy: "the archive has moved on: remove target/guest, and the newer kernel is fetched",
    };
    let revision = suite.version(&main).ok_or_else(gone)?;
    let packages = packages(version).ok_or_else(gone)?;
    let root = work.join("root");
    let exact: Vec<_> = packages.iter().map(|package| format!("{package}={revision}")).collect();
    suite.unpack(&exact, &root)?;
    let archive = root.join("usr/src").join(format!("{}.tar.xz", packages[3]));
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(work).args(["--strip-components=1", "--wildcards", "-xJf"]).arg(&archive);
    children::read(tar.arg("*/drivers/infiniband/sw/rxe/*"), LIMIT)?;
    let headers = root.join("usr/src").join(main);
    // The makefile names the other packages' files at their installed paths.
    let [to_src, to_lib] = ["src", "lib"].map(|below| format!("{}/usr/{below}/", root.display()));
    edit(&headers.join("Makefile"), |text| {
        Some(text.replace("/usr/src/", &to_src).replace("/usr/lib/", &to_lib))
    })?;
    Ok(headers)
}

/// Returns the packages of the headers, their common part, the build tools, and the source.
fn packages(version: &str) -> Option<[String; 4]> {
    let base = version.strip_suffix("-amd64")?;
    let mut numbers = base.split(['.', '-', '+']);
    let (major, minor) = (numbers.next()?, numbers.next()?);
    Some([
        format!("linux-headers-{version}"),
        format!("linux-headers-{base}-common"),
        format!("linux-kbuild-{base}"),
        format!("linux-source-{major}.{minor}"),
    ])
}

/// Hooks this tree's file into the driver's source.
fn add_to(driver: &Path) -> Result<(), TaskError> {
    fs::write(driver.join("rxe_dmabuf.c"), DRIVER)?;
    for (file, line, more) in [
        ("rxe_verbs.h", "#include <linux/interrupt.h>", "#include <linux/iosys-map.h>"),
        ("rxe_verbs.h", "struct ib_umem *umem;", "struct dma_buf *dmabuf;\nstruct iosys_map dmap;"),
        ("rxe_mr.c", "ib_umem_release(mr->umem);", "rxe_mr_dmabuf_release(mr);"),
        ("rxe_verbs.c", ".reg_user_mr = rxe_reg_user_mr,", METHOD),
        ("rxe_loc.h", "#define RXE_LOC_H", DECLARATIONS),
    ] {
        edit(&driver.join(file), |text| after(text, line, more))?;
    }
    edit(&driver.join("Makefile"), |text| {
        let object = "rxe_hw_counters.o";
        text.contains(object).then(|| text.replacen(object, &format!("{object} rxe_dmabuf.o"), 1))
    })
}

const METHOD: &str = ".reg_user_mr_dmabuf = rxe_reg_user_mr_dmabuf,";
const DECLARATIONS: &str = "\
#include <linux/version.h>
struct ib_dmah;
void rxe_mr_dmabuf_release(struct rxe_mr *mr);
struct ib_mr *rxe_reg_user_mr_dmabuf(struct ib_pd *, u64, u64, u64, int, int,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0)
				     struct ib_dmah *,
#endif
				     struct uverbs_attr_bundle *);";

/// Returns the text with `more` inserted after the first line equal to `line`, white space apart.
fn after(text: &str, line: &str, more: &str) -> Option<String> {
    let plain = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut lines: Vec<_> = text.lines().collect();
    let at = lines.iter().position(|candidate| plain(candidate) == line)?;
    lines.insert(at + 1, more);
    Some(lines.join("\n") + "\n")
}

fn edit(path: &Path, change: impl FnOnce(&str) -> Option<String>) -> Result<(), TaskError> {
    let text = fs::read_to_string(path)?;
    let changed = change(&text).ok_or_else(|| TaskError::Missing {
        what: format!("the place for ours in {}", path.display()),
        remedy: "this kernel's driver is not the one that xtask/src/guest/dmabuf.rs knows: mend it \
            there",
    })?;
    Ok(fs::write(path, changed)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_built_with_four_packages() {
        let packages = packages("6.12.95+deb12-amd64").unwrap();
        assert_eq!(
            packages[1..],
            [
                "linux-headers-6.12.95+deb12-common",
                "linux-kbuild-6.12.95+deb12",
                "linux-source-6.12"
            ]
        );
        assert_eq!(super::packages("6.12.95"), None);
    }

    #[test]
    fn ours_comes_after_the_first_such_line_and_nowhere_else() {
        let text = "struct a {\n\tstruct ib_umem\t\t*umem;\n\tint b;\n};\nstruct ib_umem *umem;\n";
        let changed = after(text, "struct ib_umem *umem;", "int c;").unwrap();
        assert_eq!(
            changed,
            "struct a {\n\tstruct ib_umem\t\t*umem;\nint c;\n\tint b;\n};\nstruct ib_umem *umem;\n"
        );
        assert_eq!(after(text, "int d;", "int c;"), None);
    }
}
