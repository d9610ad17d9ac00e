//! Numbers on the command line, within bounds.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// Parses a whole number in this range, or says what such a number is.
pub(crate) fn number<T: FromStr + PartialOrd>(
    text: &str,
    range: RangeInclusive<T>,
    what: &str,
) -> Result<T, String> {
    text.trim().parse().ok().filter(|number| range.contains(number)).ok_or_else(|| what.to_owned())
}

/// Parses a number of seconds above 0, up to `most`, or says what such a number is.
pub(crate) fn seconds(text: &str, most: f64, what: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= most => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(what.to_owned()),
    }
}

/// Parses the length of time of a measurement.
pub(crate) fn of_measurement(text: &str) -> Result<Duration, String> {
    seconds(text, 3600.0, "give a number of seconds above 0 and up to 3600, such as 0.5")
}
