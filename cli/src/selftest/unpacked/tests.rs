use super::*;
use crate::selftest::archive::tests::{Bundle, NEVER, content};
use std::cell::{Cell, RefCell};
use std::os::unix::fs::{PermissionsExt, chown};
use std::sync::Barrier;
use std::thread;

fn bundle() -> Bundle {
    Bundle::of(&[("tests/a", &content(1, 50_000)), ("examples/b", &content(2, 50_000))])
}

const TO_NOBODY: &dyn Fn(&str) = &|_| {};

/// The programs of a bundle, to be unpacked unless `stop` says so.
fn programs<'a>(bundle: &Bundle, carrack: &'a Path, stop: &'a dyn Fn() -> bool) -> Programs<'a> {
    let archive = Archive::open(bundle.archive()).unwrap();
    Programs { archive, carrack, stop, tell: TO_NOBODY }
}

/// Unpacks in the bundle, or in the folder `report` of it.
fn folder(bundle: &Bundle, stop: &dyn Fn() -> bool) -> Result<PathBuf, UnpackError> {
    programs(bundle, &bundle.0.join(COMMAND), stop).folder(&bundle.0, &bundle.0.join("report"))
}

/// Unpacks into the bundle only.
fn beside(bundle: &Bundle, stop: &dyn Fn() -> bool) -> Result<PathBuf, UnpackError> {
    programs(bundle, &bundle.0.join(COMMAND), stop).in_place(&bundle.0, None)
}

/// The folders of programs in a place, whole or not.
fn folders(place: &Path) -> Vec<String> {
    let names =
        fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("programs-")).collect();
    names.sort();
    names
}

fn age(of: &Path) -> (u64, u64) {
    let about = fs::metadata(of).unwrap();
    (about.dev(), about.ino())
}

#[test]
fn what_was_unpacked_is_used_again_and_not_that_of_another_archive() {
    let ours = bundle();
    let first = folder(&ours, NEVER).unwrap();
    assert_eq!(first.parent(), Some(ours.0.as_path()));
    assert_eq!(fs::read(first.join("tests/a")).unwrap(), content(1, 50_000));
    assert_eq!(fs::read_to_string(first.join(COMMAND)).unwrap(), "the command");
    let before = age(&first.join("tests/a"));
    assert_eq!(folder(&ours, NEVER).unwrap(), first);
    assert_eq!((age(&first.join("tests/a")), folders(&ours.0).len()), (before, 1), "unpacked once");

    let other = Bundle::of(&[("tests/a", &content(3, 50_000))]);
    fs::rename(other.archive(), ours.archive()).unwrap();
    let second = folder(&ours, NEVER).unwrap();
    assert_ne!(second, first);
    assert_eq!(fs::read(second.join("tests/a")).unwrap(), content(3, 50_000));
    assert_eq!(age(&first.join("tests/a")), before, "others may still run from it");
}

#[test]
fn a_bundle_that_is_moved_keeps_what_was_unpacked() {
    let mut bundle = bundle();
    let first = folder(&bundle, NEVER).unwrap();
    let moved = bundle.0.with_extension("moved");
    fs::rename(&bundle.0, &moved).unwrap();
    bundle.0 = moved;
    assert_eq!(folder(&bundle, NEVER).unwrap(), bundle.0.join(first.file_name().unwrap()));
    assert_eq!(folders(&bundle.0).len(), 1);
}

#[test]
fn what_is_not_as_it_was_unpacked_is_not_used_and_left_as_it_is() {
    let spoil: [&dyn Fn(&Path); 8] = [
        &|folder| fs::remove_file(folder.join("tests/a")).unwrap(),
        &|folder| fs::write(folder.join("tests/a"), "short").unwrap(),
        &|folder| {
            fs::set_permissions(folder.join("examples/b"), fs::Permissions::from_mode(0o644))
                .unwrap();
        },
        &|folder| fs::remove_file(folder.join(MARK)).unwrap(),
        &|folder| fs::write(folder.join(MARK), "{}").unwrap(),
        &|folder| {
            let text = fs::read_to_string(folder.join(MARK)).unwrap();
            let mark = Mark { archive: "another".into(), ..serde_json::from_str(&text).unwrap() };
            fs::write(folder.join(MARK), serde_json::to_string(&mark).unwrap()).unwrap();
        },
        &|folder| fs::remove_file(folder.join(COMMAND)).unwrap(),
        &|folder| {
            fs::remove_file(folder.join(COMMAND)).unwrap();
            fs::write(folder.join(COMMAND), "another command").unwrap();
        },
    ];
    for (number, spoil) in spoil.iter().enumerate() {
        let bundle = bundle();
        let first = folder(&bundle, NEVER).unwrap();
        spoil(&first);
        let second = folder(&bundle, NEVER).unwrap();
        assert_ne!(second, first, "{number}");
        assert_eq!(fs::read(second.join("tests/a")).unwrap(), content(1, 50_000));
        assert!(first.exists());
        assert_eq!(folder(&bundle, NEVER).unwrap(), second, "{number}: and this one is used again");
    }
}

#[test]
fn places_full_of_spoiled_folders_are_an_error_that_says_what_to_remove() {
    let bundle = bundle();
    for _ in 0..TRIES {
        fs::remove_file(beside(&bundle, NEVER).unwrap().join(MARK)).unwrap();
    }
    let error = beside(&bundle, NEVER).unwrap_err().to_string();
    assert!(error.contains("remove them"), "{error}");
    assert!(
        folder(&bundle, NEVER).unwrap().starts_with(bundle.0.join("report")),
        "there is another place"
    );
}

#[test]
fn many_at_once_use_one_folder_and_leave_nothing_else() {
    let bundle = bundle();
    let together = Barrier::new(8);
    let all: Vec<PathBuf> = thread::scope(|scope| {
        let one = || {
            together.wait();
            let folder = beside(&bundle, NEVER).unwrap();
            assert_eq!(fs::read(folder.join("tests/a")).unwrap(), content(1, 50_000));
            folder
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|folder| *folder == all[0]), "{all:?}");
    assert_eq!(folders(&bundle.0).len(), 1, "{:?}", folders(&bundle.0));
}

#[test]
fn who_comes_second_uses_what_is_there() {
    let bundle = bundle();
    // The first comes while the second unpacks.
    let asked = Cell::new(false);
    let first = || {
        if !asked.replace(true) {
            beside(&bundle, NEVER).unwrap();
        }
        false
    };
    let folder = beside(&bundle, &first).unwrap();
    assert!(asked.get() && folder.join("tests/a").exists());
    assert_eq!(folders(&bundle.0), [folder.file_name().unwrap().to_str().unwrap()]);
}

#[test]
fn a_loser_that_cannot_use_what_is_there_takes_the_next_name() {
    let bundle = bundle();
    let asked = Cell::new(false);
    let spoiler = || {
        if !asked.replace(true) {
            fs::remove_file(beside(&bundle, NEVER).unwrap().join(MARK)).unwrap();
        }
        false
    };
    let folder = beside(&bundle, &spoiler).unwrap();
    assert!(folder.to_str().unwrap().ends_with("-2"), "{}", folder.display());
    assert_eq!(folders(&bundle.0).len(), 2);
}

#[test]
fn a_signal_in_the_midst_leaves_nothing() {
    let bundle = bundle();
    let asked = Cell::new(0);
    let later = || asked.replace(asked.get() + 1) == 1;
    assert!(matches!(folder(&bundle, &later), Err(UnpackError::Interrupted)));
    assert_eq!(asked.get(), 2, "in the midst of the first program");
    assert_eq!(folders(&bundle.0), [""; 0]);
    assert!(!bundle.0.join("report").exists(), "and it is not tried elsewhere");
}

#[test]
fn a_broken_archive_leaves_nothing() {
    let bundle = bundle();
    let mut bytes = fs::read(bundle.archive()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(bundle.archive(), bytes).unwrap();
    assert!(matches!(folder(&bundle, NEVER), Err(UnpackError::Broken { .. })));
    assert_eq!(folders(&bundle.0), [""; 0]);
    assert!(!bundle.0.join("report").exists(), "and it is not tried elsewhere");
}

/// Place that no user can write to, not even root.
const UNWRITABLE: &str = "/proc";

#[test]
fn where_a_bundle_cannot_be_written_to_the_report_takes_the_programs() {
    let bundle = bundle();
    let (carrack, told) = (bundle.0.join(COMMAND), RefCell::new(Vec::new()));
    let tell = |what: &str| told.borrow_mut().push(what.to_owned());
    let programs = |report: &Path| {
        Programs { tell: &tell, ..programs(&bundle, &carrack, NEVER) }
            .folder(Path::new(UNWRITABLE), report)
    };
    let report = bundle.0.join("deep/report");
    let folder = programs(&report).unwrap();
    assert_eq!(folder.parent(), Some(report.canonicalize().unwrap().as_path()));
    assert_eq!(fs::read_to_string(folder.join(COMMAND)).unwrap(), "the command");
    assert_eq!(programs(&report).unwrap(), folder, "and are used again");
    let told = told.borrow();
    assert!(told.len() == 1 && !told[0].contains('\n'), "{told:?}");
    assert!(told[0].contains(folder.to_str().unwrap()) && told[0].contains(UNWRITABLE), "{told:?}");

    let error = programs(&Path::new(UNWRITABLE).join("report")).unwrap_err();
    assert!(matches!(error, UnpackError::Nowhere { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("--report") && error.matches(UNWRITABLE).count() == 2, "{error}");
}

#[test]
fn a_place_without_room_or_that_starts_no_programs_is_told() {
    let bundle = bundle();
    let (carrack, place) = (bundle.0.join(COMMAND), &bundle.0);
    let mut programs = programs(&bundle, &carrack, NEVER);
    let here = || statvfs(place).unwrap();
    programs.fits(place, &here()).unwrap();
    let noexec =
        StatVfs { f_flag: StatVfsMountFlags::NOEXEC | StatVfsMountFlags::NOSUID, ..here() };
    assert!(matches!(programs.fits(place, &noexec), Err(Unfit::NoExec(_))));

    programs.archive.unpacked = u64::MAX;
    let error = programs.in_place(place, None).unwrap_err();
    assert!(matches!(error, UnpackError::Unfit(Unfit::NoRoom { .. })), "{error}");
    assert_eq!(folders(place), [""; 0]);
    programs.fits(place, &StatVfs { f_blocks: 0, f_bavail: 0, ..here() }).expect("nobody knows");
}

#[test]
fn what_a_stranger_has_put_there_is_not_used() {
    let bundle = bundle();
    let (carrack, stranger) = (bundle.0.join(COMMAND), rustix::process::geteuid().as_raw() + 1);
    let mut programs = programs(&bundle, &carrack, NEVER);
    assert!(!programs.is_trusted(stranger));
    programs.archive.owner = stranger;
    assert!(programs.is_trusted(stranger), "whose archive it is may have unpacked it, too");
    let folder = programs.in_place(&bundle.0, None).unwrap();
    if rustix::process::geteuid().is_root() {
        programs.archive.owner = 0;
        chown(&folder, Some(stranger), None).unwrap();
        assert_eq!(programs.look(&folder), Found::Spoiled);
        chown(&folder, Some(0), None).unwrap();
        assert_eq!(programs.look(&folder), Found::Whole);
    }
    // A link to a folder of another user is not accepted.
    let moved = bundle.0.join("moved");
    fs::rename(&folder, &moved).unwrap();
    symlink(&moved, &folder).unwrap();
    assert_eq!(programs.look(&folder), Found::Spoiled);
}
