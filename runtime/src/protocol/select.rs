//! The choice of a path to a peer, and the reasons against the others.

use carrack_transports::contract::{Cost, Reach};

/// A transport's verdict on a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathVerdict {
    /// The transport.
    pub transport: &'static str,
    /// The verdict.
    pub verdict: Verdict,
}

/// The result of the choice for a transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The transport is the path.
    Chosen,
    /// The transport could be the path, and another is better.
    Passed(String),
    /// The transport cannot be the path.
    Refused(String),
}

/// Chooses among the transports, listed in the order of preference of the settings. The cheapest
/// wins; between equals the one listed first. Transports that this rank does not have, or the peer
/// does not, are listed with the reason.
///
/// Returns the index of the chosen one and a verdict on each.
pub(crate) fn choose(candidates: &[(&'static str, Reach)]) -> (Option<usize>, Vec<PathVerdict>) {
    let cost = |reach: &Reach| match reach {
        Reach::Yes(cost) => Some(*cost),
        Reach::No(_) => None,
    };
    let best: Option<(usize, Cost)> = candidates
        .iter()
        .enumerate()
        .filter_map(|(at, (_, reach))| cost(reach).map(|cost| (at, cost)))
        // `min_by_key` keeps the first of equals.
        .min_by_key(|&(_, cost)| cost);
    let chosen = best.map(|(at, _)| at);
    let name = chosen.map_or("", |at| candidates[at].0);
    let verdicts = candidates
        .iter()
        .enumerate()
        .map(|(at, (transport, reach))| {
            let verdict = match reach {
                _ if Some(at) == chosen => Verdict::Chosen,
                Reach::Yes(cost) => Verdict::Passed(format!(
                    "{name} is quicker (this takes about {} ns)",
                    cost.latency_ns
                )),
                Reach::No(reason) => Verdict::Refused(reason.clone()),
            };
            PathVerdict { transport, verdict }
        })
        .collect();
    (chosen, verdicts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yes(latency_ns: u32) -> Reach {
        Reach::Yes(Cost { latency_ns })
    }

    #[test]
    fn the_cheapest_path_wins_and_each_other_has_its_reason() {
        let (chosen, verdicts) = choose(&[
            ("tcp", yes(9000)),
            ("shm", yes(150)),
            ("loopback", Reach::No("elsewhere".into())),
        ]);
        assert_eq!(chosen, Some(1));
        assert_eq!(verdicts[1].verdict, Verdict::Chosen);
        assert!(matches!(&verdicts[0].verdict, Verdict::Passed(why) if why.contains("shm")));
        assert_eq!(verdicts[2].verdict, Verdict::Refused("elsewhere".into()));
    }

    #[test]
    fn between_equals_the_preferred_one_wins_and_nothing_is_an_answer_too() {
        assert_eq!(choose(&[("a", yes(1)), ("b", yes(1))]).0, Some(0));
        assert_eq!(choose(&[("a", Reach::No(String::new()))]).0, None);
        assert_eq!(choose(&[]), (None, vec![]));
    }
}
