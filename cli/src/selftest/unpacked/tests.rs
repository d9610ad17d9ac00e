use super::*;
use std::cell::{Cell, RefCell};

#[path = "../../../../xtask/src/bundle/pack.rs"]
mod pack;

use pack::ArchiveWriter;

const NEVER: &dyn Fn() -> bool = &|| false;

/// Place that no user can write to, not even root.
const UNWRITABLE: &str = "/proc";

/// Packs programs into the folder of a bundle, as xtask does.
fn bundle(programs: &[(&str, &[u8])]) -> TempDir {
    let bundle = tempfile::tempdir().unwrap();
    let path = |name: &str| bundle.path().join(name);
    fs::write(path(COMMAND), "the command").unwrap();
    let mut writer = ArchiveWriter::begin(&path(pack::ARCHIVE), 1 << 16).unwrap();
    for (name, bytes) in programs {
        fs::write(path("program"), bytes).unwrap();
        assert_eq!(writer.add(Path::new(name), &path("program")).unwrap(), bytes.len() as u64);
    }
    assert_eq!(writer.finish().unwrap(), fs::metadata(path(ARCHIVE)).unwrap().len());
    bundle
}

/// Returns bytes that cannot be packed, and others that can.
fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = |place: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if place % 4096 < 2048 { (state >> 56) as u8 } else { seed as u8 }
    };
    (0..length).map(&mut next).collect()
}

/// Unpacks in the folder `temporary` of a bundle, or in its folder `report`.
fn folder(bundle: &TempDir, stop: &dyn Fn() -> bool) -> Result<TempDir, UnpackError> {
    let path = |name: &str| bundle.path().join(name);
    fs::create_dir_all(path("temporary")).unwrap();
    Programs { archive: &path(ARCHIVE), carrack: &path(COMMAND), stop, tell: &|_| {} }
        .folder(&path("temporary"), &path("report"))
}

fn is_empty(place: &Path) -> bool {
    fs::read_dir(place).unwrap().next().is_none()
}

#[test]
fn packed_programs_are_unpacked_to_the_last_byte_below_the_command_until_the_run_ends() {
    use std::os::unix::fs::PermissionsExt;
    let large = content(1, 300_001);
    // Longer than the name field of a header.
    let long = format!("tests/{}", "n".repeat(120));
    let programs: [(&str, &[u8]); 4] =
        [("tests/large", &large), ("tests/empty", &[]), (&long, b"1"), ("examples/large", &large)];
    let bundle = bundle(&programs);
    let (one, other) = (folder(&bundle, NEVER).unwrap(), folder(&bundle, NEVER).unwrap());
    assert_ne!(one.path(), other.path());
    drop(other);
    for (name, bytes) in programs {
        let path = one.path().join(name);
        assert_eq!(fs::read(&path).unwrap(), bytes, "{name}");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o500, 0o500, "{name} {mode:o}");
    }
    assert_eq!(fs::read_to_string(one.path().join(COMMAND)).unwrap(), "the command");
    drop(one);
    assert!(is_empty(&bundle.path().join("temporary")));
}

#[test]
fn tar_and_xz_unpack_an_archive_too() {
    let large = content(3, 300_001);
    let bundle = bundle(&[("tests/large", &large), ("examples/large", &large)]);
    let mut command = std::process::Command::new("tar");
    match command.args(["xJf", ARCHIVE]).current_dir(bundle.path()).output() {
        Ok(output) if output.status.success() => {}
        // Where there is no xz, this says nothing of our archives.
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("xz: Cannot exec") => return,
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(_) => return,
    }
    for name in ["tests/large", "examples/large"] {
        assert_eq!(fs::read(bundle.path().join(name)).unwrap(), large);
    }
}

#[test]
fn an_archive_that_was_cut_off_or_has_a_wrong_byte_is_an_error_and_leaves_nothing() {
    let bundle = bundle(&[("tests/a", &content(4, 6000)), ("tests/b", &content(5, 6000))]);
    let archive = bundle.path().join(ARCHIVE);
    let whole = fs::read(&archive).unwrap();
    let cut = (0..whole.len()).step_by(97).chain(whole.len() - 200..whole.len());
    let cut = cut.map(|length| whole[..length].to_vec());
    let wrong = (0..whole.len()).step_by(7).map(|place| {
        let mut spoiled = whole.clone();
        spoiled[place] ^= 0x10;
        spoiled
    });
    let longer = [&whole[..], b"more"].concat();
    for (number, bytes) in cut.chain(wrong).chain([longer]).enumerate() {
        fs::write(&archive, bytes).unwrap();
        let error = folder(&bundle, NEVER).expect_err("it is not the archive");
        assert!(matches!(error, UnpackError::Broken { .. }), "{number}: {error}");
        assert!(error.to_string().contains("carry the bundle here again"), "{error}");
    }
    assert!(is_empty(&bundle.path().join("temporary")));
    assert!(!bundle.path().join("report").exists(), "and it is not tried elsewhere");
}

#[test]
fn a_signal_leaves_nothing() {
    let bundle = bundle(&[("tests/a", &content(1, 50_000)), ("tests/b", &content(2, 50_000))]);
    let asked = Cell::new(0);
    let later = || asked.replace(asked.get() + 1) > 2;
    assert!(matches!(folder(&bundle, &later), Err(UnpackError::Interrupted)));
    assert!(is_empty(&bundle.path().join("temporary")));
}

#[test]
fn where_the_temporary_folder_is_unfit_the_report_takes_the_programs() {
    let bundle = bundle(&[("tests/a", b"a")]);
    let (archive, carrack) = (bundle.path().join(ARCHIVE), bundle.path().join(COMMAND));
    let told = RefCell::new(Vec::new());
    let tell = |what: &str| told.borrow_mut().push(what.to_owned());
    let programs = Programs { archive: &archive, carrack: &carrack, stop: NEVER, tell: &tell };
    let report = bundle.path().join("deep/report");
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
