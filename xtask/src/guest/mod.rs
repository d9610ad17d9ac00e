//! `cargo xtask rdma-guest -- COMMAND`: runs a program of this machine in a small virtual machine.
//! The guest's kernel simulates two RDMA devices (Soft-RoCE). See docs/testing.md.
//!
//! | module | idea |
//! |---|---|
//! | `plan` | command and wiring of a run, and the guest's shell scripts |
//! | `kernel`, `image` | the guest's kernel and its modules, fetched once |
//! | `initramfs` | the guest's first file system, with `xtask/guest/init` in it |
//! | `dmabuf` | a driver for the guest that takes dma-bufs |
//! | `qemu` | QEMU's command line |
//! | `session`, `tail` | the guests of a run, their output, and their ends |

mod dmabuf;
mod image;
mod initramfs;
mod kernel;
mod plan;
mod qemu;
mod session;
mod tail;

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::value_parser;
use fs_err as fs;

use crate::apt;
use crate::error::TaskError;
use crate::files;
use crate::workspace::Workspace;
use children::Stream;
use kernel::{Kernel, Source};

pub(crate) use plan::{Node, Plan, Wiring};
pub(crate) use session::{GUEST_FAILED, Said};

/// Packages that every guest needs on this machine, next to Debian's essential ones.
const PACKAGES: &str = "qemu-system-x86 busybox-static kmod xz-utils zstd binutils iproute2 \
    debian-archive-keyring libibverbs1 ibverbs-providers";

/// Options of `cargo xtask rdma-guest`.
#[derive(clap::Args)]
pub(crate) struct GuestOptions {
    /// Guests in which the command runs: one with both devices, or two with one each
    #[arg(long, default_value_t = 1, value_name = "1|2")]
    #[arg(value_parser = value_parser!(u8).range(1..=2))]
    nodes: u8,
    /// Each device in a network namespace of its own, n0 and n1; needs a kernel from 7.2 on
    #[arg(long, conflicts_with = "nodes")]
    namespaces: bool,
    /// Virtual processors of each guest; two are quicker where two sides poll, and less stable
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u8).range(1..=16))]
    cpus: u8,
    /// Memory of each guest
    #[arg(long, default_value_t = 1024, value_name = "MB")]
    #[arg(value_parser = value_parser!(u32).range(256..))]
    memory: u32,
    /// Limit of the whole run, the boot included; beyond it the status is 124
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    timeout: u32,
    /// An environment variable for the command; without a value, the one it has here
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,
    /// A folder of this machine that the guest may write to
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Debian kernel that the guest boots [default: bookworm-backports]
    #[arg(long, value_name = "SUITE[:PACKAGE]")]
    kernel: Option<Source>,
    /// A module that is loaded in addition, or instead of the kernel's own of the same name
    #[arg(long, value_name = "FILE.ko")]
    module: Vec<PathBuf>,
    /// A driver that takes dma-bufs, built for the default kernel, and its library, preloaded
    #[arg(long, conflicts_with = "kernel")]
    dmabuf: bool,
    /// Show all that the guest's kernel says, at the end
    #[arg(long)]
    console: bool,
    /// Build this test program of the workspace and run it; the words after -- are its arguments
    #[arg(long, value_name = "NAME")]
    test: Option<String>,
    /// Build this C program, which uses verbs, and run it; the words after -- are its arguments
    #[arg(long, value_name = "FILE.c", conflicts_with = "test")]
    program: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, required_unless_present_any = ["test", "program"], value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command, and returns its status: 124 at the limit, 125 if the guest failed.
pub(crate) fn run(options: &GuestOptions) -> ExitCode {
    ExitCode::from(carry_out(options).unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        GUEST_FAILED
    }))
}

fn carry_out(options: &GuestOptions) -> Result<u8, TaskError> {
    let workspace = Workspace::load()?;
    let mut plan = match &options.test {
        None => Plan::new(options.command.clone(), env::current_dir()?),
        Some(name) => Plan::of_test(&workspace, name, &options.command)?,
    };
    plan.environment.extend(handed_on(env::vars_os()));
    plan.environment.extend(options.env.iter().map(variable));
    plan.wiring = match (options.nodes, options.namespaces) {
        (2, _) => Wiring::TwoGuests,
        (_, true) => Wiring::Namespaces,
        _ => Wiring::OneGuest,
    };
    (plan.processors, plan.memory) = (options.cpus, options.memory);
    plan.limit = Duration::from_secs(options.timeout.into());
    plan.writable = absolute(&options.writable)?;
    plan.modules = absolute(&options.module)?;
    let source = options.kernel.clone().unwrap_or_default();
    let host = Host::prepare(&workspace, &source)?;
    if let Some(file) = &options.program {
        plan.command.insert(0, host.compile(file)?.into());
    }
    if options.dmabuf {
        host.take_dmabufs(&mut plan)?;
    }
    host.run(&plan, options.console, |said| pass_on(said, plan.wiring))
}

/// A machine that can run guests.
pub(crate) struct Host {
    kernel: Kernel,
    /// Folder of the runs, each of which has a subfolder while it lasts.
    runs: PathBuf,
    /// Folder of the programs that are built for guests.
    programs: PathBuf,
}

impl Host {
    /// Installs missing packages, if possible, and fetches the kernel, if it is not cached.
    ///
    /// # Errors
    /// The reason why this machine can run no guest.
    pub(crate) fn prepare(workspace: &Workspace, source: &Source) -> Result<Self, TaskError> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return Err(TaskError::Missing {
                what: "Linux on x86-64".into(),
                remedy: "the guest is such a machine, and emulating it on another kind has not \
                    been tried",
            });
        }
        apt::see_to(PACKAGES)?;
        let cache = workspace.target.join("guest");
        let kernel = Kernel::get(&cache, source)?;
        Ok(Self { kernel, runs: cache.join("runs"), programs: cache.join("programs") })
    }

    /// Runs a plan, hands over the command's output, and returns its status. Of two guests that is
    /// the higher one. It is 124 at the limit, and 125 if the guest failed.
    pub(crate) fn run(
        &self,
        plan: &Plan,
        console: bool,
        on_line: impl FnMut(&Said),
    ) -> Result<u8, TaskError> {
        session::run(&self.kernel, &self.runs, plan, console, on_line)
    }

    /// Adds a driver that takes dma-bufs, built for the default kernel, to a plan's guests.
    ///
    /// # Errors
    /// When packages or files for the build are missing, or the driver does not compile.
    pub(crate) fn take_dmabufs(&self, plan: &mut Plan) -> Result<(), TaskError> {
        let built = dmabuf::get(&self.kernel, &Source::default())?;
        plan.modules.push(built.module);
        plan.environment.push(("LD_PRELOAD".into(), built.shim.into()));
        Ok(())
    }

    /// Builds a C program that uses verbs, here, and gives its path.
    ///
    /// # Errors
    /// When the headers are not there and cannot be installed, or it does not compile.
    pub(crate) fn compile(&self, source: &Path) -> Result<PathBuf, TaskError> {
        apt::see_to("libibverbs-dev")?;
        files::compile("cc", source, &self.programs, &["-libverbs"])
    }
}

/// Selects the variables of this machine's environment that a command also has in the guest.
fn handed_on(
    all: impl Iterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (OsString, OsString)> {
    const NAMES: &str = "PATH HOME USER LANG LC_ALL TERM LD_LIBRARY_PATH RUST_BACKTRACE RUST_LOG";
    const FAMILIES: &[&str] = &["CARRACK_", "CARGO_", "RUST_TEST_", "TEST_"];
    all.filter(|(name, _)| {
        let name = name.to_string_lossy();
        NAMES.split(' ').any(|it| it == name) || FAMILIES.iter().any(|it| name.starts_with(it))
    })
}

/// Returns the name and the value of a variable of `--env`. Without a value there, it is that of
/// this process.
fn variable(text: &OsString) -> (OsString, OsString) {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut parts = text.as_bytes().splitn(2, |byte| *byte == b'=');
    let name = OsString::from_vec(parts.next().unwrap_or_default().to_vec());
    let value = parts.next().map(|value| OsString::from_vec(value.to_vec()));
    let value = value.or_else(|| env::var_os(&name)).unwrap_or_default();
    (name, value)
}

fn absolute(paths: &[PathBuf]) -> Result<Vec<PathBuf>, TaskError> {
    Ok(paths.iter().map(fs::canonicalize).collect::<Result<_, _>>()?)
}

/// Prints a line of the command. A closed terminal is no reason to stop.
pub(crate) fn pass_on(said: &Said, wiring: Wiring) {
    let line = said.marked(wiring);
    let _ = match said.stream {
        Stream::Out => io::stdout().lock().write_all(&line),
        Stream::Err => io::stderr().lock().write_all(&line),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_the_value_it_is_given_or_the_one_it_has_here() {
        let pair = |name: &str, value: &str| (OsString::from(name), OsString::from(value));
        assert_eq!(variable(&"A=b=c".into()), pair("A", "b=c"));
        assert_eq!(variable(&"A=".into()), pair("A", ""));
        assert_eq!(
            variable(&"PATH".into()),
            (OsString::from("PATH"), env::var_os("PATH").unwrap())
        );
    }

    #[test]
    fn settings_of_carrack_are_handed_on_and_what_is_this_machines_own_is_not() {
        let all = ["CARRACK_GPU", "SECRET", "PATH", "TEST_SOAK", children::MARK];
        let names = handed_on(all.iter().map(|name| (OsString::from(name), OsString::new())));
        assert_eq!(
            names.map(|(name, _)| name).collect::<Vec<_>>(),
            ["CARRACK_GPU", "PATH", "TEST_SOAK"]
        );
    }
}
