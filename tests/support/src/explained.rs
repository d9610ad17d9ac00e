//! Output of `carrack explain` about resident copiers, in jobs of real processes.

use crate::built;
use crate::children::unset;
use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// A rank's view of a GPU's copier, for one peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Told {
    pub rank: u64,
    pub peer: u64,
    /// This rank's number of the GPU.
    pub gpu: usize,
    /// Nothing, `on`, `refused` or `wanted`; why it is refused.
    pub state: Option<String>,
    pub refused: Option<String>,
    /// Path of the messages, and the reason why no other is taken.
    pub way: String,
    pub why: String,
}

/// Runs `carrack` with these arguments. Of its variables it gets these, and none that this test may
/// have been started with.
pub fn carrack(args: &[&str], vars: &[(&str, &str)]) -> Output {
    let mut command = Command::new(built::carrack());
    unset(&mut command, &[]);
    command.args(args).envs(vars.iter().copied()).stdin(Stdio::null()).output().unwrap()
}

/// Runs `ranks` ranks of `carrack explain`, each in a shell that executes `first` before.
pub fn explain(ranks: u32, first: &str, args: &[&str], vars: &[(&str, &str)]) -> Output {
    let (program, ranks) = (built::carrack().to_str().unwrap(), ranks.to_string());
    let script = format!("{first} exec \"$0\" explain \"$@\"");
    // A job that hangs is a failure, and no test that hangs.
    carrack(
        &[&["run", "--timeout", "200", "-n", &ranks, "--", "sh", "-c", &script, program], args]
            .concat(),
        vars,
    )
}

/// Returns the output as text: each rank's views in order, as rank 0 prints them.
#[track_caller]
pub fn text(output: &Output) -> String {
    let said = String::from_utf8(output.stdout.clone()).unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{said}\n{complaints}", output.status);
    // `carrack run` says whose line each is.
    said.lines().map(|line| line.strip_prefix("[0] ").unwrap_or(line).to_owned() + "\n").collect()
}

/// Returns the ranks' views of each other's GPUs, from the output of `--json`.
#[track_caller]
pub fn told(output: &Output) -> Vec<Told> {
    let views = text(output);
    let views = views.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
    views.flat_map(|view| told_in(&view)).collect()
}

fn told_in(view: &Value) -> Vec<Told> {
    let word = |value: &Value| value.as_str().map(str::to_owned);
    let (rank, peer) = (view["rank"].as_u64().unwrap(), view["peer"].as_u64().unwrap());
    let kinds = view["kinds"].as_array().unwrap().iter().filter(|_| rank != peer);
    let of_gpu = |kind: &Value| {
        let gpu =
            kind["memory"].as_str()?.strip_prefix("device ")?.split(' ').next()?.parse().ok()?;
        let (state, refused) = (word(&kind["copier"]["state"]), word(&kind["copier"]["why"]));
        let (way, why) = (word(&kind["way"])?, word(&kind["why"]).unwrap_or_default());
        Some(Told { rank, peer, gpu, state, refused, way, why })
    };
    kinds.filter_map(of_gpu).collect()
}

/// Fails unless each of these ranks says that it has no copier on its GPU since another process
/// wants one there. No rank may name itself as that process.
#[track_caller]
pub fn assert_shared(told: &[Told], ranks: u64) {
    assert_eq!(told.len() as u64, ranks * (ranks - 1), "{told:#?}");
    let mut who = Vec::new();
    for Told { state, refused, way, why, .. } in told {
        assert_eq!(state.as_deref(), Some("refused"), "{told:#?}");
        let refused = refused.as_ref().unwrap();
        assert!(way.contains(&format!("; no resident copier: {refused}")), "{way}");
        let pid = refused.strip_prefix("process ").and_then(|rest| {
            rest.split_once(" wants a copier on this GPU, too")
                .and_then(|(pid, _)| pid.parse::<u32>().ok())
        });
        who.push(pid.unwrap_or_else(|| panic!("no process in: {refused}")));
        assert!(
            refused.contains("CUDA_VISIBLE_DEVICES") && !why.contains("trying the copier"),
            "{told:#?}"
        );
    }
    // All other ranks name the first one, which names one of the others. No rank names itself.
    let of = |rank: u64| {
        told.iter().zip(&who).filter(move |(told, _)| told.rank == rank).map(|(_, pid)| *pid)
    };
    let mut named: Vec<u32> = (0..ranks).map(|rank| of(rank).next().unwrap()).collect();
    assert!((0..ranks).all(|rank| of(rank).all(|pid| pid == named[rank as usize])), "{told:#?}");
    named.sort_unstable();
    named.dedup();
    assert_eq!(named.len(), 2, "{told:#?}");
}
