//! No dependency may ask for a newer Rust than we promise; dev-dependencies neither, since tests
//! are to run there too.

use super::step::{Context, Outcome, Stopped};
use crate::workspace::Package;

pub(super) fn step(context: &mut Context) -> Outcome {
    let packages = &context.workspace.packages;
    let Some(ours) = packages.iter().filter(|p| p.source.is_none()).filter_map(rust_version).min()
    else {
        return Err(Stopped::Failed("no package of the workspace says its rust-version".into()));
    };
    let offenders: Vec<&Package> = offenders(packages, ours).collect();
    for package in &offenders {
        let asked = package.rust_version.as_deref().unwrap_or_default();
        say!("error: {} {} needs Rust {asked}", package.name, package.version);
    }
    let ours = ours.map(|number| number.to_string()).join(".");
    say!("{} packages checked against Rust {ours}", packages.len());
    match offenders.len() {
        0 => Ok(()),
        count => Err(Stopped::Failed(format!(
            "{count} packages need a newer Rust than our rust-version; pin an older one with \
             `cargo update -p NAME --precise VERSION`, or raise rust-version in Cargo.toml"
        ))),
    }
}

fn offenders(packages: &[Package], ours: [u64; 3]) -> impl Iterator<Item = &Package> {
    packages.iter().filter(move |package| rust_version(package).is_some_and(|asked| asked > ours))
}

/// Returns a package's rust-version, with zeros for what it leaves out.
fn rust_version(package: &Package) -> Option<[u64; 3]> {
    let mut numbers = package.rust_version.as_ref()?.split('.').map(|number| number.parse().ok());
    let mut next = || numbers.next().unwrap_or(Some(0));
    Some([next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, rust_version: Option<&str>) -> Package {
        let (name, version) = (name.to_owned(), "1.0.0".to_owned());
        let rust_version = rust_version.map(str::to_owned);
        Package { name, version, rust_version, source: None, targets: Vec::new() }
    }

    #[test]
    fn a_package_offends_when_its_rust_is_newer_than_ours() {
        let packages = [
            package("older", Some("1.9")),
            package("equal", Some("1.88")),
            package("silent", None),
            package("patch", Some("1.88.1")),
            package("newer", Some("1.100.0")),
        ];
        let names: Vec<_> =
            offenders(&packages, [1, 88, 0]).map(|package| package.name.as_str()).collect();
        assert_eq!(names, ["patch", "newer"]);
    }
}
