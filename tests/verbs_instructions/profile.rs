//! What callgrind writes, as far as a sum needs it.

/// The instructions of a profile, without those of functions for which `skipped` is true when others call them, nor of what these
/// call. Names and positions are not compressed in it.
pub(crate) fn instructions(profile: &str, skipped: impl Fn(&str) -> bool) -> u64 {
    let (mut total, mut taken_off) = (0, 0);
    let (mut function, mut callee) = ("", "");
    let mut is_call = false;
    for line in profile.lines() {
        if let Some(name) = line.strip_prefix("fn=") {
            function = name;
        } else if let Some(name) = line.strip_prefix("cfn=") {
            callee = name;
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit()) {
            // A position, and the instructions there; or those of a call, inclusive.
            let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok()).unwrap_or(0);
            match std::mem::take(&mut is_call) {
                false => total += cost,
                true if skipped(callee) && !skipped(function) => taken_off += cost,
                true => {}
            }
        }
    }
    total - taken_off
}

#[test]
fn what_is_skipped_is_taken_off_with_what_it_calls() {
    let profile = "events: Ir\n\nfn=send\n10 7\ncfn=abi::post\ncalls=2 30\n11 40\n12 3\n\nfn=abi::post\n30 15\ncfn=memcpy\ncalls=1 1\n31 25\n\n\
                   fn=memcpy\n1 25\n";
    assert_eq!(instructions(profile, |_| false), 50);
    assert_eq!(instructions(profile, |name| name.starts_with("abi")), 10);
}
