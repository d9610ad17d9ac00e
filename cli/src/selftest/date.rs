//! The time of a report, in words.

use std::time::{SystemTime, UNIX_EPOCH};

/// Now, as `2026-11-21 13:49:35 UTC`.
pub(super) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    in_words(since)
}

/// Seconds since 1970. The calendar is the one of Howard Hinnant's `civil_from_days`: years that
/// begin in March, so that a leap day is their last.
fn in_words(since: u64) -> String {
    let (days, second) = (since / 86_400, since % 86_400);
    let day_of_eras = days + 719_468;
    let (era, day) = (day_of_eras / 146_097, day_of_eras % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year + 400 * era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_since_1970_are_a_date() {
        assert_eq!(in_words(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(in_words(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(in_words(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(in_words(1_795_268_975), "2026-11-21 13:49:35 UTC");
        assert_eq!(in_words(4_107_542_400), "2100-03-01 00:00:00 UTC");
    }
}
