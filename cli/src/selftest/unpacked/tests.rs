use super::*;
use crate::selftest::archive::tests::{Bundle, NEVER, content};
use std::cell::{Cell, RefCell};

/// Place that no user can write to, not even root.
const UNWRITABLE: &str = "/proc";

fn bundle() -> Bundle {
    Bundle::of(&[("tests/a", &content(1, 50_000)), ("examples/b", &content(2, 50_000))])
}

/// Unpacks in the folder `temporary` of a bundle, or in its folder `report`.
fn folder(bundle: &Bundle, stop: &dyn Fn() -> bool) -> Result<TempDir, UnpackError> {
    let temporary = bundle.0.join("temporary");
    fs::create_dir_all(&temporary).unwrap();
    let archive = Archive::open(bundle.archive())?;
    Programs { archive, carrack: &bundle.0.join(COMMAND), stop, tell: &|_| {} }
        .folder(&temporary, &bundle.0.join("report"))
}

fn is_empty(place: &Path) -> bool {
    fs::read_dir(place).unwrap().next().is_none()
}

#[test]
fn programs_lie_below_the_command_until_the_run_ends() {
    let bundle = bundle();
    let (one, other) = (folder(&bundle, NEVER).unwrap(), folder(&bundle, NEVER).unwrap());
    assert_ne!(one.path(), other.path());
    drop(other);
    assert_eq!(fs::read(one.path().join("tests/a")).unwrap(), content(1, 50_000));
    assert_eq!(fs::read_to_string(one.path().join(COMMAND)).unwrap(), "the command");
    drop(one);
    assert!(is_empty(&bundle.0.join("temporary")));
}

#[test]
fn a_signal_or_a_broken_archive_leaves_nothing() {
    let bundle = bundle();
    let asked = Cell::new(0);
    let later = || asked.replace(asked.get() + 1) == 1;
    assert!(matches!(folder(&bundle, &later), Err(UnpackError::Interrupted)));
    assert_eq!(asked.get(), 2, "in the midst of the first program");

    let mut bytes = fs::read(bundle.archive()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(bundle.archive(), bytes).unwrap();
    assert!(matches!(folder(&bundle, NEVER), Err(UnpackError::Broken { .. })));
    assert!(is_empty(&bundle.0.join("temporary")));
    assert!(!bundle.0.join("report").exists(), "and it is not tried elsewhere");
}

#[test]
fn where_the_temporary_folder_is_unfit_the_report_takes_the_programs() {
    let bundle = bundle();
    let (carrack, told) = (bundle.0.join(COMMAND), RefCell::new(Vec::new()));
    let tell = |what: &str| told.borrow_mut().push(what.to_owned());
    let archive = Archive::open(bundle.archive()).unwrap();
    let programs = Programs { archive, carrack: &carrack, stop: NEVER, tell: &tell };
    let report = bundle.0.join("deep/report");
    let folder = programs.folder(Path::new(UNWRITABLE), &report).unwrap();
    assert_eq!(folder.path().parent(), Some(report.canonicalize().unwrap().as_path()));
    let path = folder.path().to_str().unwrap();
    let told = told.borrow();
    assert!(told.len() == 1 && !told[0].contains('\n'), "{told:?}");
    assert!(told[0].contains(path) && told[0].contains(UNWRITABLE), "{told:?}");

    let nowhere = Path::new(UNWRITABLE).join("report");
    let error = programs.folder(Path::new(UNWRITABLE), &nowhere).unwrap_err();
    assert!(matches!(error, UnpackError::Nowhere { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("--report") && error.contains("/proc: "), "{error}");
    assert!(error.contains("/proc/report: "), "{error}");
}

#[test]
fn a_place_without_room_or_that_starts_no_programs_is_unfit() {
    let bundle = bundle();
    let (carrack, place) = (bundle.0.join(COMMAND), &bundle.0);
    let archive = Archive::open(bundle.archive()).unwrap();
    let mut programs = Programs { archive, carrack: &carrack, stop: NEVER, tell: &|_| {} };
    let here = || statvfs(place).unwrap();
    programs.fits(place, &here()).unwrap();
    let noexec =
        StatVfs { f_flag: StatVfsMountFlags::NOEXEC | StatVfsMountFlags::NOSUID, ..here() };
    assert!(matches!(programs.fits(place, &noexec), Err(Unfit::NoExec(_))));

    programs.archive.unpacked = u64::MAX;
    let error = programs.in_place(place, None).unwrap_err();
    assert!(matches!(error, UnpackError::Unfit(Unfit::NoRoom { .. })), "{error}");
    programs.fits(place, &StatVfs { f_blocks: 0, f_bavail: 0, ..here() }).expect("blocks unknown");
}
