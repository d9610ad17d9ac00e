//! Packages of another suite from the machine's Debian archive. Lists and packages go to a folder
//! of the cache. Only [`see_to`] and [`install`] change the machine's own setup.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fs_err as fs;

use crate::error::TaskError;
use crate::files;

/// The keys of Debian's archive.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Time limit of a download of 170 MB at most, on a slow line.
const DOWNLOAD: Duration = Duration::from_secs(400);

/// Time for packages of some 30 MB, on a slow line, and for another installation to end before.
const INSTALL: Duration = Duration::from_secs(300);
const LOOK: Duration = Duration::from_secs(60);

/// The packages of a suite.
pub(crate) struct Suite {
    folder: PathBuf,
}

impl Suite {
    /// Fetches the list of the packages of `suite` into a folder below `folder`.
    pub(crate) fn open(folder: &Path, suite: &str) -> Result<Self, TaskError> {
        let folder = folder.join("apt");
        for below in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(below))?;
        }
        let line = format!("deb [signed-by={KEYRING}] {} {suite} main\n", main_archive()?);
        fs::write(folder.join("sources.list"), line)?;
        let suite = Self { folder };
        suite.ask("apt-get", &["update"], DOWNLOAD)?;
        Ok(suite)
    }

    /// Returns a package and all that it needs, directly and indirectly, as apt-cache lists them.
    pub(crate) fn needed(&self, package: &str) -> Result<String, TaskError> {
        self.ask("apt-cache", &["depends", "--recurse", "--important", package], LOOK)
    }

    /// Returns the version of a package that `unpack` would take, if the suite has it.
    pub(crate) fn version(&self, package: &str) -> Option<String> {
        let shown = self.ask("apt-cache", &["show", "--no-all-versions", package], LOOK).ok()?;
        shown.lines().find_map(|line| line.strip_prefix("Version: ")).map(str::to_owned)
    }

    /// Downloads packages, and unpacks them below `root`.
    pub(crate) fn unpack(&self, packages: &[String], root: &Path) -> Result<(), TaskError> {
        let to = self.folder.join("packages");
        fs::create_dir_all(&to)?;
        let mut command = self.command("apt-get");
        command.arg("download").args(packages).current_dir(&to);
        children::read(&mut command, DOWNLOAD)?;
        for package in files::matching(&to, "*.deb") {
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("-x").arg(&package).arg(root);
            children::read(&mut unpack, INSTALL)?;
            fs::remove_file(&package)?;
        }
        Ok(())
    }

    fn ask(&self, program: &str, arguments: &[&str], limit: Duration) -> Result<String, TaskError> {
        let mut command = self.command(program);
        command.args(arguments);
        Ok(children::read(&mut command, limit)?)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").arg("-qq");
        let folder = self.folder.display();
        for option in [
            format!("Dir::State::Lists={folder}/lists"),
            format!("Dir::Cache={folder}/cache"),
            format!("Dir::Etc::SourceList={folder}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".into(),
            "Dir::Etc::Preferences=/dev/null".into(),
            "Dir::Etc::PreferencesParts=/dev/null".into(),
            "Acquire::Languages=none".into(),
            // apt's own user cannot write to this folder.
            "APT::Sandbox::User=root".into(),
        ] {
            command.args(["-o", &option]);
        }
        command
    }
}

/// Returns the archive of the machine's own packages. Security updates have another label.
fn main_archive() -> Result<String, TaskError> {
    let known = || {
        let mut command = Command::new("apt-get");
        command.args(["indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]);
        let said = children::read(command.args(["Label: Debian", "Component: main"]), LOOK);
        said.map(|said| said.lines().next().map(str::to_owned))
    };
    let updated = match known()? {
        Some(address) => return Ok(address),
        // On a machine whose lists were thrown away, as in most images, apt knows no labels.
        None => update(),
    };
    known()?.ok_or_else(|| TaskError::Missing {
        what: match updated {
            Ok(()) => "an archive of Debian's among apt's sources".into(),
            Err(error) => format!("an archive of Debian's (updating apt's lists failed: {error})"),
        },
        remedy: "run this on Debian",
    })
}

/// Installs those of these packages, named with spaces between, that are missing on this machine.
///
/// # Errors
/// When they cannot be installed; they are named.
pub(crate) fn see_to(packages: &str) -> Result<(), TaskError> {
    let packages: Vec<_> = packages.split(' ').collect();
    let mut ask = Command::new("dpkg-query");
    ask.args(["--show", "--showformat=${Package} ${db:Status-Status}\n"]).args(&packages);
    // dpkg-query fails for an unknown package, and systems other than Debian's do not have it.
    let known = children::hear(&mut ask, LOOK).map_or_else(|_| String::new(), |heard| heard.stdout);
    let missing = missing(&packages, &known);
    if missing.is_empty() {
        return Ok(());
    }
    let cannot = |why: String| TaskError::Packages { packages: missing.join(" "), why };
    if !children::answers(Command::new("apt-get").arg("--version")) {
        return Err(cannot("there is no apt-get, which could install them".into()));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(cannot("only root can install them".into()));
    }
    eprintln!("xtask: installing {}", missing.join(" "));
    // The lists of packages may be outdated or missing.
    let installed = install(&missing).or_else(|_| update().and_then(|()| install(&missing)));
    installed.map_err(|error| cannot(error.to_string()))
}

/// Returns the packages that dpkg-query does not list as installed.
fn missing<'a>(packages: &[&'a str], known: &str) -> Vec<&'a str> {
    let is_known = |package: &str| known.lines().any(|line| line == format!("{package} installed"));
    packages.iter().copied().filter(|package| !is_known(package)).collect()
}

/// Installs packages on this machine.
pub(crate) fn install(packages: &[&str]) -> Result<(), TaskError> {
    apt_get(&[&["install", "--no-install-recommends"], packages].concat())
}

/// Brings the machine's lists of packages up to date.
fn update() -> Result<(), TaskError> {
    apt_get(&["update"])
}

/// Runs apt-get, without questions.
fn apt_get(arguments: &[&str]) -> Result<(), TaskError> {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.args(["-qq", "-y", "-o", "DPkg::Lock::Timeout=200"]).args(arguments);
    children::read(&mut command, INSTALL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_missing_unless_it_is_installed() {
        let known = "kmod installed\nzstd config-files\nlibibverbs1 installed\n";
        assert_eq!(missing(&["kmod", "zstd", "perftest"], known), ["zstd", "perftest"]);
    }
}
