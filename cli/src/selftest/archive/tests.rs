use super::*;
use lzma_rust2::{XzOptions, XzWriter};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};

#[path = "../../../../xtask/src/bundle/pack.rs"]
mod pack;

use pack::Packing;

/// Small, so that it is quick.
const DICTIONARY: u32 = 1 << 16;

pub(in crate::selftest) const NEVER: &dyn Fn() -> bool = &|| false;

/// The folder of a bundle; removed in the end.
pub(in crate::selftest) struct Bundle(pub(in crate::selftest) PathBuf);

impl Bundle {
    /// Without an archive.
    pub(in crate::selftest) fn empty() -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "carrack-bundle-{}-{}",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        );
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("carrack"), "the command").unwrap();
        Self(folder)
    }

    /// Packs programs into a bundle, as xtask does.
    pub(in crate::selftest) fn of(programs: &[(&str, &[u8])]) -> Self {
        let bundle = Self::empty();
        let mut packing = Packing::begin(&bundle.archive(), DICTIONARY).unwrap();
        let program = bundle.0.join("program");
        for (name, bytes) in programs {
            fs::write(&program, bytes).unwrap();
            assert_eq!(packing.add(Path::new(name), &program).unwrap(), bytes.len() as u64);
        }
        let size = packing.finish().unwrap();
        assert_eq!(size, fs::metadata(bundle.archive()).unwrap().len());
        fs::remove_file(program).unwrap();
        bundle
    }

    pub(in crate::selftest) fn archive(&self) -> PathBuf {
        self.0.join(pack::ARCHIVE)
    }

    /// Puts bytes in the place of the archive.
    fn replace(&self, bytes: &[u8]) {
        fs::write(self.archive(), bytes).unwrap();
    }

    /// Unpacks into a new folder.
    fn unpack(&self) -> Result<Files, UnpackError> {
        let into = self.0.join("into");
        let _ = fs::remove_dir_all(&into);
        fs::create_dir(&into).unwrap();
        Archive::open(self.archive())?.unpack(&into, NEVER)
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes that cannot be packed, and others that can.
pub(in crate::selftest) fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = |place: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if place % 4096 < 2048 { (state >> 56) as u8 } else { seed as u8 }
    };
    (0..length).map(&mut next).collect()
}

/// An archive of one entry, which need not be such as xtask would make.
fn one(name: &str, sort: tar::EntryType, size: u64, bytes: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.as_mut_bytes()[..name.len()].clone_from_slice(name.as_bytes());
    header.set_entry_type(sort);
    header.set_mode(0o755);
    header.set_size(size);
    if matches!(sort, tar::EntryType::Symlink | tar::EntryType::Link) {
        header.set_link_name("/etc/passwd").unwrap();
    }
    header.set_cksum();
    let mut xz = XzWriter::new(Vec::new(), XzOptions::with_preset(0)).unwrap();
    xz.write_all(header.as_bytes()).unwrap();
    xz.write_all(bytes).unwrap();
    xz.finish().unwrap()
}

#[test]
fn what_xtask_packs_is_unpacked_to_the_last_byte_and_can_be_run() {
    let (large, small) = (content(1, 300_001), content(2, 1));
    // Longer than the name field of a header.
    let long = format!("tests/{}", "n".repeat(120));
    let programs: [(&str, &[u8]); 4] = [
        ("tests/large", &large),
        ("tests/empty", &[]),
        (&long, &small),
        ("examples/large", &large),
    ];
    let bundle = Bundle::of(&programs);
    let files = bundle.unpack().unwrap();
    assert_eq!(files.len(), programs.len());
    for (name, bytes) in programs {
        let path = bundle.0.join("into").join(name);
        assert_eq!(fs::read(&path).unwrap(), bytes, "{name}");
        assert_eq!(files[name], bytes.len() as u64);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o500, 0o500, "{name} {mode:o}");
    }
    assert!(Archive::open(bundle.archive()).unwrap().unpacked > 600_002);
}

#[test]
fn tar_and_xz_unpack_it_too() {
    let large = content(3, 300_001);
    let bundle = Bundle::of(&[("tests/large", &large), ("examples/large", &large)]);
    let mut command = std::process::Command::new("tar");
    match command.arg("xJf").arg(bundle.archive()).current_dir(&bundle.0).output() {
        Ok(output) if output.status.success() => {}
        // Where there is no xz, this says nothing of our archives.
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("xz: Cannot exec") => return,
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(_) => return,
    }
    for name in ["tests/large", "examples/large"] {
        assert_eq!(fs::read(bundle.0.join(name)).unwrap(), large);
    }
}

#[test]
fn an_archive_that_was_cut_off_anywhere_is_an_error_that_says_so() {
    let bundle = Bundle::of(&[("tests/a", &content(4, 20_000)), ("tests/b", &content(5, 20_000))]);
    let whole = fs::read(bundle.archive()).unwrap();
    assert!(bundle.unpack().is_ok());
    let near_the_end = whole.len() - 200..whole.len();
    for length in (0..whole.len()).step_by(97).chain(near_the_end) {
        bundle.replace(&whole[..length]);
        let error = bundle.unpack().expect_err("not all of it is there");
        assert!(matches!(error, UnpackError::Broken { .. }), "{length}: {error}");
        assert!(error.to_string().contains("carry the bundle here again"), "{error}");
    }
}

#[test]
fn an_archive_with_a_wrong_byte_is_an_error() {
    let bundle = Bundle::of(&[("tests/a", &content(6, 3000)), ("tests/b", &content(7, 3000))]);
    let whole = fs::read(bundle.archive()).unwrap();
    for place in (0..whole.len()).step_by(7) {
        let mut spoiled = whole.clone();
        spoiled[place] ^= 0x10;
        bundle.replace(&spoiled);
        let done = bundle.unpack();
        assert!(done.is_err(), "byte {place} of {}", whole.len());
    }
    bundle.replace(&[&whole[..], b"more"].concat());
    assert!(matches!(bundle.unpack(), Err(UnpackError::Broken { .. })), "bytes behind its end");
}

#[test]
fn what_is_no_program_of_a_bundle_is_refused_by_name() {
    use tar::EntryType as Sort;
    let bundle = Bundle::empty();
    for (name, sort) in [
        ("../evil", Sort::Regular),
        ("tests/../evil", Sort::Regular),
        ("tests/../../evil", Sort::Regular),
        ("/tmp/evil", Sort::Regular),
        ("/tests/evil", Sort::Regular),
        ("evil", Sort::Regular),
        ("other/evil", Sort::Regular),
        ("tests/deep/evil", Sort::Regular),
        ("tests/evil", Sort::Symlink),
        ("tests/evil", Sort::Link),
        ("tests/evil", Sort::Directory),
        ("tests/evil", Sort::Fifo),
        ("tests/evil", Sort::Char),
        ("tests", Sort::Symlink),
    ] {
        bundle.replace(&one(name, sort, 0, &[]));
        let error = bundle.unpack().expect_err(name);
        assert!(matches!(error, UnpackError::Foreign { .. }), "{name} {sort:?}: {error}");
        assert!(error.to_string().contains("evil") || name == "tests", "{error}");
        let left = fs::read_dir(bundle.0.join("into/tests")).unwrap().count();
        assert_eq!(left, 0, "{name} {sort:?}");
        assert!(!bundle.0.join("evil").exists() && !bundle.0.join("into/evil").exists());
    }
    bundle.replace(&one("tests/good", Sort::Regular, 0, &[]));
    assert_eq!(bundle.unpack().unwrap().len(), 1, "the refused ones differ by nothing else");
}

#[test]
fn an_archive_in_two_streams_is_unpacked_to_its_end() {
    let bundle = Bundle::empty();
    let streams = ["tests/a", "tests/b"].map(|name| one(name, tar::EntryType::Regular, 0, &[]));
    bundle.replace(&streams.concat());
    assert_eq!(bundle.unpack().unwrap().len(), 2);
}

#[test]
fn one_name_twice_is_refused() {
    let bundle = Bundle::of(&[("tests/a", b"first"), ("tests/a", b"second")]);
    assert!(matches!(bundle.unpack(), Err(UnpackError::Foreign { .. })));
}

#[test]
fn an_entry_shorter_than_it_says_is_an_error() {
    let bundle = Bundle::empty();
    bundle.replace(&one("tests/short", tar::EntryType::Regular, 2000, &[7; 1024]));
    assert!(matches!(bundle.unpack(), Err(UnpackError::Broken { .. })));
}

#[test]
fn an_archive_that_asks_for_gigabytes_of_memory_is_refused() {
    let bundle = Bundle::empty();
    let mut options = XzOptions::with_preset(0);
    options.lzma_options.dict_size = 1 << 16;
    let mut xz = XzWriter::new(Vec::new(), options).unwrap();
    xz.write_all(b"something").unwrap();
    let mut bytes = xz.finish().unwrap();
    // The block's header behind the stream's (12 bytes): its size, flags, the filter, its size, the
    // dictionary, and at the end a checksum.
    let size = (usize::from(bytes[12]) + 1) * 4;
    assert_eq!(bytes[16], 0x08, "the dictionary is 64 KiB");
    // 3 GiB.
    bytes[16] = 39;
    let sum = crc32(&bytes[12..12 + size - 4]);
    bytes[12 + size - 4..12 + size].clone_from_slice(&sum.to_le_bytes());
    bundle.replace(&bytes);
    let error = bundle.unpack().unwrap_err().to_string();
    assert!(error.contains("mem"), "{error}");
}

/// Returns the CRC-32 of xz and Ethernet.
fn crc32(bytes: &[u8]) -> u32 {
    let bit = |sum: u32| (sum >> 1) ^ (0xedb8_8320 * (sum & 1));
    let byte = |sum: u32, byte: &u8| (0..8).fold(sum ^ u32::from(*byte), |sum, _| bit(sum));
    !bytes.iter().fold(u32::MAX, byte)
}
