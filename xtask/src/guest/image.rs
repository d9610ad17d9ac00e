//! Extraction of the kernel from a package's boot image: a boot loader's stub with the compressed
//! kernel in it. QEMU boots the extracted kernel directly, which saves the slow decompression
//! under emulation.

use std::ops::Range;

/// Compression of a kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Compression {
    magic: &'static [u8],
    /// The decompressor, and the ending that its files must have.
    pub(super) program: &'static str,
    pub(super) ending: &'static str,
    /// Bytes behind the kernel that the decompressor would reject: the unpacked size.
    trailer: usize,
}

const COMPRESSIONS: [Compression; 3] = [
    Compression { magic: b"\x28\xb5\x2f\xfd", program: "zstd", ending: "zst", trailer: 4 },
    Compression { magic: b"\xfd7zXZ\0", program: "xz", ending: "xz", trailer: 4 },
    Compression { magic: b"\x1f\x8b", program: "gzip", ending: "gz", trailer: 0 },
];

/// Returns the place of the compressed kernel in `image`, and its compression. `None` if this is
/// no such file.
///
/// Offsets are those of the Linux x86 boot protocol: the number of the stub's sectors, then the
/// kernel's offset behind them, and its length.
pub(super) fn packed(image: &[u8]) -> Option<(Range<usize>, &'static Compression)> {
    const SECTORS: usize = 0x1f1;
    const MAGIC: Range<usize> = 0x202..0x206;
    const OFFSET: usize = 0x248;
    const LENGTH: usize = 0x24c;
    if image.get(MAGIC)? != b"HdrS" {
        return None;
    }
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    // By the protocol, 0 means four sectors.
    let sectors = image.get(SECTORS).map(|it| if *it == 0 { 4 } else { usize::from(*it) })?;
    let start = (sectors + 1) * 512 + number(OFFSET)?;
    let end = start.checked_add(number(LENGTH)?)?;
    let payload = image.get(start..end)?;
    let compression =
        COMPRESSIONS.iter().find(|compression| payload.starts_with(compression.magic))?;
    Some((start..end.checked_sub(compression.trailer)?, compression))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an image with one sector of stub, in which the kernel begins at 16 and is 10 bytes
    /// long.
    fn image(payload: &[u8; 10]) -> Vec<u8> {
        let mut image = vec![0; 1024 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&10u32.to_le_bytes());
        image.extend(payload);
        image
    }

    #[test]
    fn the_kernel_lies_where_the_header_says_and_is_packed_as_it_begins() {
        let found = |payload| packed(&image(payload)).map(|(range, it)| (range, it.program));
        assert_eq!(found(b"\xfd7zXZ\0...."), Some((1040..1046, "xz")));
        assert_eq!(found(b"\x28\xb5\x2f\xfd......"), Some((1040..1046, "zstd")));
        assert_eq!(found(b"\x1f\x8b........"), Some((1040..1050, "gzip")));
    }

    #[test]
    fn what_is_no_kernel_or_cut_short_is_none() {
        assert_eq!(packed(b"ELF"), None);
        assert_eq!(packed(&image(b"something ")), None);
        let whole = image(b"\xfd7zXZ\0....");
        for length in 0..whole.len() {
            assert_eq!(packed(&whole[..length]), None, "{length} bytes of {}", whole.len());
        }
    }
}
