//! Replaced soon.
fn main() {}
