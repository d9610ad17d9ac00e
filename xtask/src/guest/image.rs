//! Extraction of the kernel from a package's boot image: a boot loader's stub with the compressed
//! kernel in it. QEMU boots the extracted kernel directly, which saves the slow decompression
//! under emulation.

use std::ops::Range;

/// Compression of a kernel, which also decides the file name that the decompressor expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    Zstd,
    Xz,
    Gzip,
}

impl Packing {
    const ALL: [(Self, &[u8]); 3] =
        [(Self::Zstd, b"\x28\xb5\x2f\xfd"), (Self::Xz, b"\xfd7zXZ\0"), (Self::Gzip, b"\x1f\x8b")];

    /// Returns the decompressor, and the ending of its files.
    pub(super) const fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Zstd => ("zstd", "zst"),
            Self::Xz => ("xz", "xz"),
            Self::Gzip => ("gzip", "gz"),
        }
    }
}

/// Returns the place of the compressed kernel in `image`, and its compression. `None` if this is
/// no such file.
///
/// Offsets are those of the Linux x86 boot protocol: the number of the stub's sectors, then the
/// kernel's offset behind them, and its length. The length counts four bytes with the unpacked
/// size, which zstd and xz would reject.
pub(super) fn packed(image: &[u8]) -> Option<(Range<usize>, Packing)> {
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
    let sectors = match image.get(SECTORS)? {
        0 => 4,
        some => usize::from(*some),
    };
    let start = (sectors + 1) * 512 + number(OFFSET)?;
    let end = start.checked_add(number(LENGTH)?)?;
    let payload = image.get(start..end)?;
    let (packing, _) = Packing::ALL.into_iter().find(|(_, magic)| payload.starts_with(magic))?;
    let size = if packing == Packing::Gzip { 0 } else { 4 };
    Some((start..end.checked_sub(size)?, packing))
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
        assert_eq!(packed(&image(b"\xfd7zXZ\0....")), Some((1040..1046, Packing::Xz)));
        assert_eq!(packed(&image(b"\x28\xb5\x2f\xfd......")), Some((1040..1046, Packing::Zstd)));
        assert_eq!(packed(&image(b"\x1f\x8b........")), Some((1040..1050, Packing::Gzip)));
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
