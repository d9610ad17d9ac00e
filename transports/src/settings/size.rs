//! Sizes in bytes, as people write them.

use thiserror::Error;

/// A text that is no size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SizeError {
    /// The text is not a whole number with a known unit.
    #[error(
        "`{text}` is not a size; write bytes as 4096, or in units of 1024 as 4K, 4KiB, 8M, 8MiB, \
        1G or 1GiB"
    )]
    Malformed {
        /// The text.
        text: String,
    },
    /// The size is one that no memory of this machine can have.
    #[error("`{text}` is more than {max} bytes, the most that this machine can address; give a \
        smaller size", max = usize::MAX)]
    TooLarge {
        /// The text.
        text: String,
    },
}

/// Reads a size in bytes: `4096`, `4K`, `4KiB`, `1M`, `8MiB`, `1G`, `1GiB`, in capitals or not.
///
/// Units are of 1024. `KB` and its like are refused, because half of their readers take them for
/// 1000.
///
/// # Errors
/// [`SizeError`], which says how a size is written.
///
/// ```
/// assert_eq!(carrack_transports::settings::parse_size("8KiB"), Ok(8192));
/// assert!(carrack_transports::settings::parse_size("8KB").is_err());
/// ```
pub fn parse_size(text: &str) -> Result<usize, SizeError> {
    let malformed = || SizeError::Malformed { text: text.to_owned() };
    let too_large = || SizeError::TooLarge { text: text.to_owned() };

    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (digits, unit) = trimmed.split_at(end);
    let shift = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(malformed()),
    };
    if digits.is_empty() {
        return Err(malformed());
    }
    // Only digits are left, so the only possible error is overflow.
    let count: usize = digits.parse().map_err(|_| too_large())?;
    count.checked_mul(1 << shift).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_size_may_be_bytes_or_have_a_unit_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("1M", 1 << 20),
            ("8MiB", 8 << 20),
            ("8 MiB", 8 << 20),
            (" 2g ", 2 << 30),
            ("1GiB", 1 << 30),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn a_size_is_refused_when_a_reader_could_take_it_in_two_ways_or_in_none() {
        for text in [
            "", " ", "K", "KiB", "-1", "+1", "1.5K", "4KB", "4 4", "4Kx", "0x10", "1e3", "four",
            "4T",
        ] {
            assert_eq!(parse_size(text), Err(SizeError::Malformed { text: text.to_owned() }));
        }
    }

    #[test]
    fn a_size_beyond_the_address_space_is_too_large_and_does_not_wrap() {
        for text in ["18446744073709551616", "18446744073709551615K", "99999999999999999999999G"] {
            assert_eq!(parse_size(text), Err(SizeError::TooLarge { text: text.to_owned() }));
        }
    }

    #[test]
    fn the_error_says_how_a_size_is_written() {
        let message = parse_size("4KB").map_err(|error| error.to_string());
        assert_eq!(
            message,
            Err("`4KB` is not a size; write bytes as 4096, or in units of 1024 as 4K, 4KiB, 8M, \
                8MiB, 1G or 1GiB"
                .to_owned())
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".*") {
            let _ = parse_size(&text);
        }

        #[test]
        fn no_text_that_looks_like_a_size_makes_the_parser_panic(text in "[0-9]{0,24} \
            ?[bkmgKMGiIB]{0,4}") {
            let _ = parse_size(&text);
        }

        #[test]
        fn a_size_is_its_count_times_its_unit(count in 0_usize..1 << 30, unit in 0_usize..4) {
            let units = [("", 1), ("K", 1 << 10), ("MiB", 1 << 20), ("g", 1_usize << 30)];
            let (suffix, bytes) = units[unit];
            prop_assert_eq!(parse_size(&format!("{count}{suffix}")), Ok(count * bytes));
        }
    }
}
