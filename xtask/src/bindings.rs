//! `cargo xtask bindings`: makes `transports/src/verbs/sys/bindings.rs` from rdma-core's headers.
//!
//! The result is checked in, so that a build of Carrack needs neither libclang nor rdma-core. All
//! inputs are fixed here: bindgen's version and options, the Debian suite of the headers (a stable
//! one, which does not change), and the lists of types. `--check` makes the file again and
//! compares.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::child;
use crate::error::TaskError;
use crate::workspace::Workspace;

/// What is made.
const RESULT: &str = "transports/src/verbs/sys/bindings.rs";

/// Another version may write the same types in other words.
const BINDGEN: &str = "0.73.2";

/// Building bindgen on a slow machine.
const LIMIT: Duration = Duration::from_secs(900);

/// What is taken from. Of libmlx5 only a flag: its functions are looked up by name.
const HEADERS: &str = "#include <infiniband/verbs.h>\n#include <infiniband/mlx5dv.h>\n";

/// The types that Carrack uses, with all that they are made of. Each begins with `ibv_`.
const TYPES: &[&str] = &[
    // Devices and what they can do.
    "device",
    "device_attr",
    "device_attr_ex",
    "device_cap_flags",
    "atomic_cap",
    "node_type",
    "transport_type",
    "odp_general_caps",
    "odp_transport_cap_bits",
    "context",
    "context_ops",
    "async_event",
    "event_type",
    "fork_status",
    // Ports and addresses.
    "port_attr",
    "port_cap_flags",
    "port_cap_flags2",
    "port_state",
    "mtu",
    "rate",
    "gid",
    "gid_entry",
    "gid_type",
    "global_route",
    "grh",
    "ah",
    "ah_attr",
    // Memory.
    "pd",
    "td",
    "td_init_attr",
    "parent_domain_init_attr",
    "parent_domain_init_attr_mask",
    "mr",
    "access_flags",
    // Queues.
    "comp_channel",
    "cq",
    "cq_ex",
    "cq_init_attr_ex",
    "cq_init_attr_mask",
    "create_cq_attr_flags",
    "create_cq_wc_flags",
    "poll_cq_attr",
    "srq",
    "srq_attr",
    "srq_attr_mask",
    "srq_init_attr",
    "qp",
    "qp_ex",
    "qp_attr",
    "qp_attr_mask",
    "qp_init_attr",
    "qp_init_attr_ex",
    "qp_init_attr_mask",
    "qp_create_send_ops_flags",
    "qp_create_flags",
    "qp_state",
    "qp_type",
    "mig_state",
    "query_qp_data_in_order_flags",
    "query_qp_data_in_order_caps",
    // Work and its completion.
    "sge",
    "send_wr",
    "send_flags",
    "recv_wr",
    "wr_opcode",
    "wc",
    "wc_flags",
    "wc_opcode",
    "wc_status",
];

/// Others by their whole names.
const OTHER_TYPES: &[&str] = &[
    "verbs_context",
    "_compat_ibv_port_attr",
    "ib_uverbs_access_flags",
    "mlx5_ib_uapi_reg_dmabuf_flags",
];

/// What the tables of functions point to, and Carrack never looks into.
const OPAQUE: &[&str] = &[
    "ibv_alloc_dm_attr",
    "ibv_counter_attach_attr",
    "ibv_counters",
    "ibv_counters_init_attr",
    "ibv_dm",
    "ibv_flow",
    "ibv_flow_action",
    "ibv_flow_action_esp_attr",
    "ibv_flow_attr",
    "ibv_modify_cq_attr",
    "ibv_mw",
    "ibv_mw_bind",
    "ibv_ops_wr",
    "ibv_qp_open_attr",
    "ibv_qp_rate_limit_attr",
    "ibv_rwq_ind_table",
    "ibv_rwq_ind_table_init_attr",
    "ibv_srq_init_attr_ex",
    "ibv_values_ex",
    "ibv_wq",
    "ibv_wq_attr",
    "ibv_wq_init_attr",
    "ibv_xrcd",
    "ibv_xrcd_init_attr",
    "verbs_ex_private",
];

/// Items that bindgen would write in addition. The locks come from the `libc` crate, since they
/// differ by machine.
const LEFT_OUT: &[&str] = &[
    "pthread_.*",
    "__pthread.*",
    "__atomic_wide.*",
    "timespec",
    "__time_t",
    "__syscall_slong_t",
    "ib_uverbs_flow_.*",
    "ibv_flow_.*",
    "ibv_ops_.*",
    "ibv_wq_.*",
    "ibv_tm_cap",
    "ibv_ops_wr__.*",
];

/// What stands at the top of the result, before the notice of the headers.
const PREFACE: &str = "\
//! The types and numbers of rdma-core's `verbs.h`, made by `cargo xtask bindings`: not to be edited.
//!
//! Enumerations are integers, so that a number which only a newer library knows is no undefined behaviour. Functions
//! are not here: `table` looks them up by name. Asserted sizes and offsets are those of the machine on which this was
//! made; they differ elsewhere only where a lock of the C library is part of a structure.
";

/// How the line begins that names versions.
const MADE_OF: &str = "// Made of libibverbs-dev";

const ALLOWED: &str = "\
#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    clippy::pedantic,
    clippy::use_self,
    clippy::unnecessary_operation,
    clippy::identity_op,
    clippy::undocumented_unsafe_blocks,
    reason = \"written by bindgen, in the words of C\"
)]

use libc::{pthread_cond_t, pthread_mutex_t};
";

/// Options of `cargo xtask bindings`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Compare with what is checked in, and write nothing
    #[arg(long)]
    check: bool,
    /// The suite of Debian whose libibverbs-dev is taken
    #[arg(long, default_value = "trixie")]
    suite: String,
}

/// Makes the bindings, and writes or compares them.
pub(crate) fn run(options: &Options) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let tools = workspace.target.join("tools");
    let bindgen = bindgen(&workspace, &tools)?;
    let headers = Headers::fetch(&tools, &options.suite)?;
    let made = make(&bindgen, &headers, &workspace)?;
    let path = workspace.root.join(RESULT);
    if !options.check {
        fs::write(&path, made).map_err(TaskError::file(&path))?;
        println!("{RESULT}: made of libibverbs-dev {}", headers.version);
        return Ok(ExitCode::SUCCESS);
    }
    let there = fs::read_to_string(&path).map_err(TaskError::file(&path))?;
    let Some(difference) = first_difference(&there, &made) else {
        println!("{RESULT} is what libibverbs-dev {} gives", headers.version);
        return Ok(ExitCode::SUCCESS);
    };
    println!("{RESULT} is not what libibverbs-dev {} gives:\n{difference}", headers.version);
    println!("make it again by `cargo xtask bindings`, and look at what has changed");
    Ok(ExitCode::FAILURE)
}

/// bindgen of the right version: what an earlier run built, or built now.
fn bindgen(workspace: &Workspace, tools: &Path) -> Result<PathBuf, TaskError> {
    let program = tools.join("bin/bindgen");
    let right = || {
        let said = child::read(Command::new(&program).arg("--version"), LIMIT);
        said.is_ok_and(|said| said.trim().ends_with(BINDGEN))
    };
    if !right() {
        eprintln!("building bindgen {BINDGEN}");
        let mut cargo = workspace.cargo();
        cargo
            .args(["install", "--locked", "--debug", "bindgen-cli", "--version", BINDGEN, "--root"])
            .arg(tools)
            .env("CARGO_TARGET_DIR", tools.join("build"));
        child::hear(&mut cargo, LIMIT)?.unless_failed(&cargo)?;
    }
    Ok(program)
}

/// rdma-core's headers, unpacked.
struct Headers {
    include: PathBuf,
    version: String,
}

impl Headers {
    /// Downloads the package of another suite, with lists of its own. The system's lists stay as
    /// they are.
    fn fetch(tools: &Path, suite: &str) -> Result<Self, TaskError> {
        let home = tools.join(format!("headers-{suite}"));
        if home.exists() {
            fs::remove_dir_all(&home).map_err(TaskError::file(&home))?;
        }
        for folder in ["lists/partial", "cache/archives/partial", "root"] {
            fs::create_dir_all(home.join(folder)).map_err(TaskError::file(&home))?;
        }
        let sources = home.join("sources.list");
        let key = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let line = format!("deb [signed-by={key}] {} {suite} main\n", archive()?);
        fs::write(&sources, line).map_err(TaskError::file(&sources))?;
        apt(&home, &["update"])?;
        apt(&home, &["download", "libibverbs-dev"])?;
        let package = fs::read_dir(&home)
            .map_err(TaskError::file(&home))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .ok_or_else(|| TaskError::Missing {
                what: format!("libibverbs-dev of {suite}"),
                remedy: "name another suite by --suite",
            })?;
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("-x").arg(&package).arg(home.join("root"));
        child::hear(&mut unpack, LIMIT)?.unless_failed(&unpack)?;
        let mut ask = Command::new("dpkg-deb");
        ask.arg("-f").arg(&package).arg("Version");
        let version = child::hear(&mut ask, LIMIT)?.unless_failed(&ask)?.trim().to_owned();
        Ok(Self { include: home.join("root/usr/include"), version })
    }

    /// The first comment of a header: whose it is, and under which terms.
    fn notice(&self) -> Result<String, TaskError> {
        let path = self.include.join("infiniband/verbs.h");
        let text = fs::read_to_string(&path).map_err(TaskError::file(&path))?;
        let end = text.find("*/").unwrap_or_default();
        let lines =
            text[..end].lines().map(|line| line.trim().trim_start_matches(['/', '*']).trim_end());
        let lines = lines.skip_while(|line| line.is_empty());
        Ok(lines
            .map(|line| format!("//{line}\n"))
            .collect::<String>()
            .trim_end_matches("//\n")
            .to_owned())
    }
}

/// Where this machine's apt has its main Debian archive.
fn archive() -> Result<String, TaskError> {
    let mut ask = Command::new("apt-get");
    ask.args(["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"]);
    let targets = child::hear(&mut ask, LIMIT)?.unless_failed(&ask)?;
    let uri = targets.lines().find_map(|line| line.strip_prefix("Debian "));
    uri.map(str::to_owned).ok_or_else(|| TaskError::Missing {
        what: "a Debian archive among apt's sources".into(),
        remedy: "run this on Debian, once after `apt-get update`",
    })
}

/// Runs apt-get in `home` and with its lists.
fn apt(home: &Path, arguments: &[&str]) -> Result<(), TaskError> {
    let mut command = Command::new("apt-get");
    let ours = [
        ("Dir::State::Lists", home.join("lists")),
        ("Dir::Cache", home.join("cache")),
        ("Dir::Etc::SourceList", home.join("sources.list")),
        ("Dir::Etc::SourceParts", "/dev/null".into()),
        ("Dir::Etc::PreferencesParts", "/dev/null".into()),
        ("Dir::Etc::Preferences", "/dev/null".into()),
    ];
    command.current_dir(home).args([
        "-qq",
        "-o",
        "Acquire::Languages=none",
        "-o",
        "APT::Sandbox::User=root",
    ]);
    for (name, path) in ours {
        command.arg("-o").arg(format!("{name}={}", path.display()));
    }
    command.args(arguments);
    child::hear(&mut command, LIMIT)?.unless_failed(&command)?;
    Ok(())
}

/// Runs bindgen; once more with libclang installed, where it misses that.
fn make(bindgen: &Path, headers: &Headers, workspace: &Workspace) -> Result<String, TaskError> {
    let input = workspace.target.join("tools/verbs.h");
    fs::write(&input, HEADERS).map_err(TaskError::file(&input))?;
    let mut command = Command::new(bindgen);
    // Here its rustfmt finds our settings.
    command.current_dir(&workspace.root).arg(&input).args([
        "--ignore-functions",
        "--default-enum-style=consts",
        "--no-prepend-enum-name",
        "--no-doc-comments",
        "--disable-header-comment",
        "--with-derive-default",
        "--impl-debug",
        "--use-core",
        "--ctypes-prefix=core::ffi",
        "--anon-fields-prefix=anon_",
        "--rust-target=1.88",
        "--rust-edition=2024",
        "--allowlist-var=IBV_.*",
    ]);
    command.arg(format!("--allowlist-type=ibv_({})|{}", TYPES.join("|"), OTHER_TYPES.join("|")));
    command.arg(format!("--blocklist-type={}|{}", OPAQUE.join("|"), LEFT_OUT.join("|")));
    command.args(["--", "-isystem"]).arg(&headers.include);
    let mut heard = child::hear(&mut command, LIMIT)?;
    if !heard.status.success() && heard.complained.contains("libclang") {
        let mut install = Command::new("apt-get");
        install.args(["install", "-y", "--no-install-recommends", "libclang-dev"]);
        child::hear(&mut install, LIMIT)?.unless_failed(&install)?;
        heard = child::hear(&mut command, LIMIT)?;
    }
    let made = only_here(&heard.unless_failed(&command)?);
    let source = format!("\n{MADE_OF} {} by bindgen {BINDGEN}.\n", headers.version);
    let notice = headers.notice()?;
    let terms =
        "// The headers are taken under the second of their two licences. Their notice:\n//\n";
    let opaque: String = OPAQUE
        .iter()
        .map(|name| format!("#[repr(C)]\npub struct {name} {{\n    _opaque: [u8; 0],\n}}\n"))
        .collect();
    Ok(format!("{PREFACE}{source}{terms}{notice}\n{ALLOWED}\n{made}\n{opaque}"))
}

/// Limits the assertions of sizes and offsets to the machine that made them, since locks of the C
/// library differ by machine.
fn only_here(made: &str) -> String {
    let allowance = "#[allow(clippy::unnecessary_operation, clippy::identity_op)]\n";
    made.replace(
        allowance,
        "#[cfg(all(target_arch = \"x86_64\", target_pointer_width = \"64\"))]\n",
    )
}

/// Returns the first line in which two results differ. The version of the headers does not count.
fn first_difference(there: &str, made: &str) -> Option<String> {
    let (mut there, mut made) = (what_matters(there), what_matters(made));
    loop {
        match (there.next(), made.next()) {
            (None, None) => return None,
            (Some((_, one)), Some((_, other))) if one == other => {}
            (one, other) => {
                let number = one.or(other).map_or(0, |(number, _)| number + 1);
                let [one, other] =
                    [one, other].map(|line| line.map_or("(the end)", |(_, line)| line));
                return Some(format!("line {number}: {one}\n  should be: {other}"));
            }
        }
    }
}

fn what_matters(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().filter(|(_, line)| !line.starts_with(MADE_OF))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_differs_is_named_with_its_number() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        let found = first_difference("a\nb\n", "a\nc\n").expect("they differ");
        assert!(found.starts_with("line 2: b\n") && found.ends_with("should be: c"), "{found}");
        let found = first_difference("a\n", "a\nmore\n").expect("they differ");
        assert!(found.contains("line 2: (the end)"), "{found}");
        let [one, other] = ["55", "56"].map(|version| format!("a\n{MADE_OF} {version}\nb\n"));
        assert_eq!(first_difference(&one, &other), None);
    }

    #[test]
    fn asserted_layouts_are_bound_to_the_machine_that_they_were_made_on() {
        let made =
            "#[allow(clippy::unnecessary_operation, clippy::identity_op)]\nconst _: () = {};\n";
        assert!(only_here(made).starts_with("#[cfg("), "{}", only_here(made));
    }

    #[test]
    fn no_type_is_both_used_and_opaque() {
        for name in TYPES {
            assert!(!OPAQUE.contains(&format!("ibv_{name}").as_str()), "{name}");
        }
    }
}
