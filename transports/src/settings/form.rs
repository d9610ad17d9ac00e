//! Forms: notation, range and display of a setting's values.

use std::time::Duration;

use super::choice::Choice;
use super::size::parse_size;

/// The reason why a form refuses a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The value cannot be read as one of this form.
    Malformed,
    /// The value can be read, but is not allowed.
    OutOfRange,
}

/// The form of the values of one setting: their notation and their range.
pub trait Form<T> {
    /// Returns a description of allowed values, range included, to follow the word "expected".
    fn expected(&self) -> String;
    /// Returns a value that is accepted.
    fn example(&self) -> String;
    /// Reads a value, without checking its range.
    fn parse(&self, text: &str) -> Result<T, Refusal>;
    /// Checks the range; for values of the program as well as those read.
    fn check(&self, value: &T) -> Result<(), Refusal>;
    /// Writes a value such that `parse` reads it back.
    fn show(&self, value: &T) -> String;
}

/// A whole number of something, counted.
pub struct Count {
    unit: &'static str,
    least: usize,
    most: usize,
    power_of_two: bool,
}

impl Count {
    /// Makes the form of numbers of `unit` in a range, both ends included.
    pub const fn of(unit: &'static str, least: usize, most: usize) -> Self {
        Self { unit, least, most, power_of_two: false }
    }

    /// Demands a power of two.
    pub const fn power_of_two(mut self) -> Self {
        self.power_of_two = true;
        self
    }
}

impl Form<usize> for Count {
    fn expected(&self) -> String {
        let power = if self.power_of_two { ", a power of two" } else { "" };
        format!("a number of {}{power}, from {} to {}", self.unit, self.least, self.most)
    }

    fn example(&self) -> String {
        // Halfway on a logarithmic scale: neither of the extremes is advice.
        let bits = (self.least.max(1).ilog2() + self.most.max(1).ilog2()).div_ceil(2);
        (1_usize << bits).clamp(self.least, self.most).to_string()
    }

    fn parse(&self, text: &str) -> Result<usize, Refusal> {
        parse_digits(text)
    }

    fn check(&self, value: &usize) -> Result<(), Refusal> {
        let fits = (self.least..=self.most).contains(value)
            && (!self.power_of_two || value.is_power_of_two());
        if fits { Ok(()) } else { Err(Refusal::OutOfRange) }
    }

    fn show(&self, value: &usize) -> String {
        value.to_string()
    }
}

/// A number, or `auto`, which lets the library choose.
pub struct Auto(Count);

impl Auto {
    /// Makes the form of `auto` and numbers of `unit` in a range, both ends included.
    pub const fn or(unit: &'static str, least: usize, most: usize) -> Self {
        Self(Count::of(unit, least, most))
    }
}

impl Form<Option<usize>> for Auto {
    fn expected(&self) -> String {
        format!("auto, or {}", self.0.expected())
    }

    fn example(&self) -> String {
        self.0.example()
    }

    fn parse(&self, text: &str) -> Result<Option<usize>, Refusal> {
        if text.trim().eq_ignore_ascii_case("auto") {
            Ok(None)
        } else {
            self.0.parse(text).map(Some)
        }
    }

    fn check(&self, value: &Option<usize>) -> Result<(), Refusal> {
        value.as_ref().map_or(Ok(()), |value| self.0.check(value))
    }

    fn show(&self, value: &Option<usize>) -> String {
        value.as_ref().map_or_else(|| "auto".to_owned(), |value| self.0.show(value))
    }
}

/// The number of a port; 0 leaves it open.
pub struct Port;

impl Form<usize> for Port {
    fn expected(&self) -> String {
        "the number of a port, from 1 to 65535, or 0".into()
    }

    fn example(&self) -> String {
        "30500".into()
    }

    fn parse(&self, text: &str) -> Result<usize, Refusal> {
        parse_digits(text)
    }

    fn check(&self, value: &usize) -> Result<(), Refusal> {
        if u16::try_from(*value).is_ok() { Ok(()) } else { Err(Refusal::OutOfRange) }
    }

    fn show(&self, value: &usize) -> String {
        value.to_string()
    }
}

/// A number of bytes, which may be written with a unit.
pub struct Bytes(Count);

impl Bytes {
    /// Makes the form of sizes in a range, both ends included.
    pub const fn between(least: usize, most: usize) -> Self {
        Self(Count::of("bytes", least, most))
    }

    /// Demands a power of two.
    pub const fn power_of_two(self) -> Self {
        Self(self.0.power_of_two())
    }
}

impl Form<usize> for Bytes {
    fn expected(&self) -> String {
        format!("{}; K, M and G are units of 1024", self.0.expected())
    }

    fn example(&self) -> String {
        self.0.example()
    }

    fn parse(&self, text: &str) -> Result<usize, Refusal> {
        parse_size(text).map_err(|_| Refusal::Malformed)
    }

    fn check(&self, value: &usize) -> Result<(), Refusal> {
        self.0.check(value)
    }

    fn show(&self, value: &usize) -> String {
        self.0.show(value)
    }
}

/// A time, written as a whole number of microseconds.
pub struct Micros {
    least: u64,
    most: u64,
}

impl Micros {
    /// Makes the form of times in a range of microseconds, both ends included.
    pub const fn between(least: u64, most: u64) -> Self {
        Self { least, most }
    }
}

impl Form<Duration> for Micros {
    fn expected(&self) -> String {
        format!("a whole number of microseconds, from {} to {}", self.least, self.most)
    }

    fn example(&self) -> String {
        self.most.min(self.least.max(50)).to_string()
    }

    fn parse(&self, text: &str) -> Result<Duration, Refusal> {
        parse_digits(text).map(Duration::from_micros)
    }

    fn check(&self, value: &Duration) -> Result<(), Refusal> {
        let range = Duration::from_micros(self.least)..=Duration::from_micros(self.most);
        if range.contains(value) { Ok(()) } else { Err(Refusal::OutOfRange) }
    }

    fn show(&self, value: &Duration) -> String {
        value.as_micros().to_string()
    }
}

/// Parses digits only: `from_str` would also take a sign. Too many digits are a number out of
/// range rather than malformed; every range ends far below the greatest number.
fn parse_digits<N: std::str::FromStr + Saturated>(text: &str) -> Result<N, Refusal> {
    let text = text.trim();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Refusal::Malformed);
    }
    Ok(text.parse().unwrap_or(N::GREATEST))
}

/// The number that stands for one with more digits than its type can hold.
trait Saturated {
    const GREATEST: Self;
}

impl Saturated for usize {
    const GREATEST: Self = Self::MAX;
}

impl Saturated for u64 {
    const GREATEST: Self = Self::MAX;
}

/// A switch: on or off.
pub struct Flag;

impl Form<bool> for Flag {
    fn expected(&self) -> String {
        "one of off, on, 0, 1".to_owned()
    }

    fn example(&self) -> String {
        "1".to_owned()
    }

    fn parse(&self, text: &str) -> Result<bool, Refusal> {
        match text.trim().to_ascii_lowercase().as_str() {
            "1" | "on" => Ok(true),
            "0" | "off" => Ok(false),
            _ => Err(Refusal::Malformed),
        }
    }

    fn check(&self, _: &bool) -> Result<(), Refusal> {
        Ok(())
    }

    fn show(&self, value: &bool) -> String {
        if *value { "on" } else { "off" }.to_owned()
    }
}

/// One word out of a few.
pub struct Word;

impl<C: Choice> Form<C> for Word {
    fn expected(&self) -> String {
        format!("one of {}", C::words().collect::<Vec<_>>().join(", "))
    }

    fn example(&self) -> String {
        C::words().last().unwrap_or_default().to_owned()
    }

    fn parse(&self, text: &str) -> Result<C, Refusal> {
        C::from_word(text.trim()).ok_or(Refusal::Malformed)
    }

    fn check(&self, _: &C) -> Result<(), Refusal> {
        Ok(())
    }

    fn show(&self, value: &C) -> String {
        value.word().to_owned()
    }
}

/// Several words out of a few, none of them twice, in order of preference.
pub struct List;

impl<C: Choice> Form<Vec<C>> for List {
    fn expected(&self) -> String {
        let words = C::words().collect::<Vec<_>>().join(", ");
        format!("one or more of {words}, each once, separated by commas, the preferred one first")
    }

    fn example(&self) -> String {
        C::words().collect::<Vec<_>>().join(",")
    }

    fn parse(&self, text: &str) -> Result<Vec<C>, Refusal> {
        text.split(',').map(|word| C::from_word(word.trim()).ok_or(Refusal::Malformed)).collect()
    }

    fn check(&self, value: &Vec<C>) -> Result<(), Refusal> {
        let twice = value.iter().enumerate().any(|(at, choice)| value[..at].contains(choice));
        if value.is_empty() || twice { Err(Refusal::OutOfRange) } else { Ok(()) }
    }

    fn show(&self, value: &Vec<C>) -> String {
        value.iter().map(C::word).collect::<Vec<_>>().join(",")
    }
}

/// Text. What names something of the machine is checked by its user.
pub struct Text {
    example: &'static str,
    note: &'static str,
    is_one: fn(&str) -> bool,
}

impl Text {
    /// Makes the form of texts such as the example.
    pub const fn such_as(example: &'static str) -> Self {
        Self::of(example, |_| true)
    }

    /// Makes the form of those texts for which `is_one` returns `true`.
    pub const fn of(example: &'static str, is_one: fn(&str) -> bool) -> Self {
        Self { example, note: "", is_one }
    }

    /// Adds a note on them to their description.
    pub const fn noting(self, note: &'static str) -> Self {
        Self { note, ..self }
    }
}

impl Form<String> for Text {
    fn expected(&self) -> String {
        format!("text such as {}{}", self.example, self.note)
    }

    fn example(&self) -> String {
        self.example.to_owned()
    }

    fn parse(&self, text: &str) -> Result<String, Refusal> {
        if (self.is_one)(text) { Ok(text.to_owned()) } else { Err(Refusal::Malformed) }
    }

    fn check(&self, _: &String) -> Result<(), Refusal> {
        Ok(())
    }

    fn show(&self, value: &String) -> String {
        value.clone()
    }
}
