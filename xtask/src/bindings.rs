//! `cargo xtask bindings`: makes `transports/src/verbs/sys/bindings.rs` from rdma-core's headers.
//!
//! The result is checked in, so that a build of Carrack needs neither libclang nor rdma-core. All
//! inputs are fixed here: bindgen's version and options, the lists of types, and the Debian suite
//! of the headers. The suite is a stable one, which does not change. `--check` makes the file again
//! and compares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use fs_err as fs;
use walkdir::{DirEntry, WalkDir};

use crate::apt::{self, Suite};
use crate::error::TaskError;
use crate::workspace::Workspace;

/// The file that is made.
const RESULT: &str = "transports/src/verbs/sys/bindings.rs";

/// The version of bindgen. Another may write the same types in other words.
const BINDGEN: &str = "0.73.2";

/// Building bindgen on a slow machine.
const LIMIT: Duration = Duration::from_secs(900);

/// The headers that items are taken from.
const HEADERS: &str = "#include <infiniband/verbs.h>\n";

/// Files that count as no user: the result, and the test that compares it.
const NO_USERS: [&str; 2] = [RESULT, "transports/layout/src/lib.rs"];

/// Prefixes of the headers' names.
const PREFIXES: [&str; 5] = ["ibv_", "IBV_", "verbs_", "ib_uverbs_", "IB_UVERBS_"];

/// Types of the C library, whose locks differ by machine: they come from the `libc` crate.
const LIBC: &str = "pthread_.*|__pthread.*|__atomic_wide.*";

/// Text at the top of the result, before the notice of the headers.
const PREFACE: &str = "\
//! Types and numbers of rdma-core's `verbs.h`, made by `cargo xtask bindings`: not to be edited.
//!
//! Only items that Carrack's sources name are here, with the types that they hold.
//! Others are opaque.
//! Enumerations are integers: a number which only a newer library knows is no undefined behaviour.
//! `table` looks functions up by name.
//! `transports/layout` compares sizes and offsets with those of other crates.
";

/// Beginning of the line that names versions.
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
    reason = \"written by bindgen, in the words of C\"
)]

use libc::{pthread_cond_t, pthread_mutex_t};
";

const OPAQUE: &str = "
impl core::fmt::Debug for ibv_wc {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (id, status, opcode) = (self.wr_id, self.status, self.opcode);
        write!(f, \"ibv_wc {{ wr_id: {id}, status: {status}, opcode: {opcode}, .. }}\")
    }
}

macro_rules! opaque {
    ($($name:ident)*) => {
        $(#[repr(C)]
        pub struct $name {
            _opaque: [u8; 0],
        })*
    };
}
opaque! {
";

const ZEROED: &str = "
macro_rules! zeroed {
    ($($name:ident)*) => {
        $(impl Default for $name {
            fn default() -> Self {
                // SAFETY: they hold numbers, pointers and optional functions.
                unsafe { core::mem::zeroed() }
            }
        })*
    };
}
zeroed! {
";

/// Options of `cargo xtask bindings`.
#[derive(clap::Args)]
pub(crate) struct BindingsOptions {
    /// Compare with what is checked in, and write nothing
    #[arg(long)]
    check: bool,
    /// The suite of Debian whose libibverbs-dev is taken
    #[arg(long, default_value = "trixie")]
    suite: String,
}

/// Makes the bindings, and writes or compares them.
pub(crate) fn run(options: &BindingsOptions) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let tools = workspace.tools();
    let bindgen = bindgen(&workspace, &tools)?;
    let headers = Headers::fetch(&tools, &options.suite)?;
    let made = make(&bindgen, &headers, &workspace)?;
    let path = workspace.root.join(RESULT);
    if !options.check {
        fs::write(&path, made)?;
        say!("{RESULT}: made of libibverbs-dev {}", headers.version);
        return Ok(ExitCode::SUCCESS);
    }
    let again = tools.join("bindings.rs");
    fs::write(&again, made)?;
    // The version of the headers does not count.
    let mut diff = Command::new("diff");
    diff.args(["-u", "-I", &format!("^{MADE_OF}")]).args([&path, &again]);
    let heard = children::hear(&mut diff, LIMIT)?;
    if heard.status.success() {
        say!("{RESULT} is what libibverbs-dev {} gives", headers.version);
        return Ok(ExitCode::SUCCESS);
    }
    let difference = heard.stdout + &heard.stderr;
    say!("{RESULT} is not what libibverbs-dev {} gives:\n{difference}", headers.version);
    say!("make it again by `cargo xtask bindings`, and look at what has changed");
    Ok(ExitCode::FAILURE)
}

/// Returns bindgen of the right version: what an earlier run built, or built now.
fn bindgen(workspace: &Workspace, tools: &Path) -> Result<PathBuf, TaskError> {
    let program = tools.join("bin/bindgen");
    let right = || {
        let said = children::read(Command::new(&program).arg("--version"), LIMIT);
        said.is_ok_and(|said| said.trim().ends_with(BINDGEN))
    };
    if !right() {
        eprintln!("building bindgen {BINDGEN}");
        children::read(&mut workspace.install(&format!("bindgen-cli@{BINDGEN}")), LIMIT)?;
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
            fs::remove_dir_all(&home)?;
        }
        let (suite, package) = (Suite::open(&home, suite)?, "libibverbs-dev");
        let version = suite.version(package).ok_or_else(|| TaskError::Missing {
            what: format!("a package {package}"),
            remedy: "name another suite by --suite",
        })?;
        suite.unpack(&[package.into()], &home.join("root"))?;
        Ok(Self { include: home.join("root/usr/include"), version })
    }

    /// Returns the first comment of a header, which says whose it is, and under which terms.
    fn notice(&self) -> Result<String, TaskError> {
        let text = fs::read_to_string(self.include.join("infiniband/verbs.h"))?;
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

/// Runs bindgen; once more with libclang installed, where it misses that.
fn make(bindgen: &Path, headers: &Headers, workspace: &Workspace) -> Result<String, TaskError> {
    let input = workspace.target.join("tools/verbs.h");
    fs::write(&input, HEADERS)?;
    let mut command = Command::new(bindgen);
    // Here its rustfmt finds our settings.
    command.current_dir(&workspace.root).arg(&input).args([
        "--ignore-functions",
        "--default-enum-style=consts",
        "--no-prepend-enum-name",
        "--no-doc-comments",
        "--disable-header-comment",
        "--with-derive-default",
        "--no-layout-tests",
        "--use-core",
        "--ctypes-prefix=core::ffi",
        "--anon-fields-prefix=anon_",
        "--rust-target=1.88",
        "--rust-edition=2024",
        "--blocklist-type",
        LIBC,
        "--allowlist-var=IBV_.*",
        "--allowlist-type=(ib_uverbs|ibv|verbs)_.*",
    ]);
    command.args(["--", "-isystem"]).arg(&headers.include);
    let mut heard = children::hear(&mut command, LIMIT)?;
    if !heard.status.success() && heard.stderr.contains("libclang") {
        apt::install(&["libclang-dev"])?;
        heard = children::hear(&mut command, LIMIT)?;
    }
    let made = narrowed(&heard.unless_failed(&command)?, &used(workspace)?);
    let source = format!("\n{MADE_OF} {} by bindgen {BINDGEN}.\n", headers.version);
    let notice = headers.notice()?;
    let terms =
        "// The headers are taken under the second of their two licences. Their notice:\n//\n";
    Ok(format!("{PREFACE}{source}{terms}{notice}\n{ALLOWED}\n{made}"))
}

/// Names of the headers' items in the Rust sources of the workspace, comments left out.
fn used(workspace: &Workspace) -> Result<BTreeSet<String>, TaskError> {
    let is_user = |entry: &DirEntry| {
        let name = entry.file_name().to_string_lossy();
        let is_none = NO_USERS.iter().any(|no| entry.path().ends_with(no));
        !name.starts_with('.') && name != "target" && !is_none
    };
    let mut used = BTreeSet::new();
    // The root may have any name.
    for entry in WalkDir::new(&workspace.root).min_depth(1).into_iter().filter_entry(is_user) {
        let entry = entry?;
        if entry.file_type().is_file() && entry.path().extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(entry.path())?;
            let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            let names = code.flat_map(words).map(|(_, word)| word);
            let ours = names.filter(|name| PREFIXES.iter().any(|it| name.starts_with(it)));
            used.extend(ours.map(str::to_owned));
        }
    }
    Ok(used)
}

/// Returns the words of a text, each with what stands before it.
fn words(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut at = 0;
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').map(move |word| {
        let before = &text[..at];
        at += word.len() + text[at + word.len()..].chars().next().map_or(0, char::len_utf8);
        (before, word)
    })
}

/// Keeps the items of bindgen's output that are used, and the types that these hold.
///
/// A type that the sources do not name and that is only pointed to becomes opaque.
fn narrowed(made: &str, used: &BTreeSet<String>) -> String {
    let items = items(made);
    let of: BTreeMap<&str, &str> = items.iter().copied().collect();
    let mut open: Vec<&str> = of.keys().copied().filter(|name| used.contains(*name)).collect();
    let (mut kept, mut pointed) = (BTreeSet::new(), BTreeSet::new());
    while let Some(name) = open.pop() {
        if !kept.insert(name) {
            continue;
        }
        for (before, word) in words(of[name]).filter(|(_, word)| of.contains_key(word)) {
            let pointer = before.ends_with("*mut ") || before.ends_with("*const ");
            if pointer {
                pointed.insert(word);
            } else {
                open.push(word);
            }
        }
    }
    let zeroed = made.lines().filter_map(|line| line.strip_prefix("impl Default for "));
    let zeroed = zeroed.map(|name| name.trim_end_matches(" {")).filter(|name| kept.contains(name));
    let list = |names: Vec<&str>| format!("    {}\n}}\n", names.join("\n    "));
    let kept_items = items.iter().filter(|(name, _)| kept.contains(name)).map(|(_, text)| *text);
    let opaque = list(pointed.difference(&kept).copied().collect());
    kept_items.collect::<String>() + OPAQUE + &opaque + ZEROED + &list(zeroed.collect())
}

/// Returns the constants and types of bindgen's output, by name; `impl` blocks are left out.
fn items(made: &str) -> Vec<(&str, &str)> {
    let (mut items, mut begin, mut end, mut depth) = (Vec::new(), 0, 0, 0);
    for line in made.split_inclusive('\n') {
        end += line.len();
        depth += line.matches(['{', '(', '[']).count();
        depth -= line.matches(['}', ')', ']']).count();
        if depth > 0 || !line.trim_end().ends_with([';', '}']) {
            continue;
        }
        let text = &made[begin..end];
        let kinds = ["pub const", "pub type", "pub struct", "pub union"];
        let head = text.lines().find_map(|line| kinds.iter().find_map(|k| line.strip_prefix(k)));
        items.extend(head.and_then(|head| words(head).nth(1)).map(|(_, name)| (name, text)));
        begin = end;
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_items_stay_with_what_they_hold_and_what_they_point_to_becomes_opaque() {
        let made = "pub const IBV_A: ibv_kind = 1;\npub const IBV_B: ibv_kind = 2;\n\
            pub type ibv_kind = u32;\n#[repr(C)]\npub struct ibv_gone {\n    pub a: u8,\n}\n\
            #[repr(C)]\npub struct ibv_used {\n    pub held: ibv_held,\n    \
            pub far: *mut ibv_far,\n}\nimpl Default for ibv_used {\n    fn x() {}\n}\n\
            pub union ibv_held {\n    pub a: u8,\n}\npub struct ibv_far {\n    pub a: ibv_gone,\n}\n";
        let used = ["IBV_A", "ibv_used"].map(str::to_owned).into();
        let narrow = narrowed(made, &used);
        let (kept, rest) = narrow.split_once("macro_rules! opaque").expect("opaque types");
        for name in ["IBV_A:", "type ibv_kind", "struct ibv_used", "union ibv_held"] {
            assert!(kept.contains(name), "{name} is missing: {kept}");
        }
        assert!(!kept.contains("IBV_B") && !narrow.contains("ibv_gone"), "{narrow}");
        let (opaque, zeroed) = rest.split_once("macro_rules! zeroed").expect("defaults");
        assert!(opaque.ends_with("opaque! {\n    ibv_far\n}\n\n"), "{opaque}");
        assert!(zeroed.ends_with("zeroed! {\n    ibv_used\n}\n"), "{zeroed}");
    }
}
