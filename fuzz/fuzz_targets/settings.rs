//! The environment's variables.
#![no_main]

use carrack::settings::{RESERVED, Settings, parse_size};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, String, Vec<(String, String)>)| {
    let (which, value, others) = input;
    let _ = parse_size(&value);
    let known: Vec<&str> =
        Settings::defaults().describe().iter().map(|line| line.variable).collect();
    let known = known[usize::from(which) % known.len()].to_owned();
    match Settings::from_vars([(known, value.clone())]) {
        // The printed form of a setting can be read again.
        Ok(settings) => drop(settings.describe()),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let others = others.into_iter().map(|(name, value)| (format!("CARRACK_{name}"), value));
    let is_reserved = |name: &str| RESERVED.iter().any(|reserved| reserved.variable == name);
    for (name, value) in others.filter(|(name, _)| !is_reserved(name)) {
        let _ = Settings::from_vars([(name, value)]).map_err(|error| error.to_string());
    }
});
