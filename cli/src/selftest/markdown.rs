//! The report for people.

use super::halo::Halo;
use super::report::{Report, Row};
use serde_json::Value;
use std::fmt::{Result, Write};

/// The text of report.md.
pub(super) fn of(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_all(report, &mut text);
    text
}

fn write_all(report: &Report, text: &mut String) -> Result {
    writeln!(text, "# Carrack selftest, {}\n", report.date)?;
    writeln!(text, "{}, in {:.0} s.\n", report.summary(), report.seconds)?;
    write_machine(report, text)?;
    writeln!(text, "\n## Parts\n\n| part | outcome | | s |\n|---|---|---|---:|")?;
    for Row { name, outcome, words, seconds, .. } in &report.parts {
        let loud = if *outcome == "failed" { "**failed**" } else { outcome };
        writeln!(text, "| {name} | {loud} | {} | {seconds:.1} |", cell(words))?;
    }
    let failed = report.parts.iter().filter(|row| row.outcome == "failed");
    for (at, Row { name, command, tail, words, .. }) in failed.enumerate() {
        if at == 0 {
            writeln!(text, "\n## What failed")?;
        }
        writeln!(
            text,
            "\n### {name}\n\n{words}\n\n```\n$ {command}\n{}\n```",
            tail.replace("```", "` ` `")
        )?;
    }
    write_left_out(report, text)?;
    write_halo(report, text)?;
    write_figures(report, text)
}

fn write_machine(report: &Report, text: &mut String) -> Result {
    let Report { about, host, launcher, command, info, .. } = report;
    let machine = &info["machine"];
    let gib = |bytes: &Value| bytes.as_f64().unwrap_or(0.0) / f64::from(1 << 30);
    writeln!(text, "| | |\n|---|---|")?;
    writeln!(text, "| command | `{command}` |")?;
    writeln!(
        text,
        "| version | {}, commit {}, built {} |",
        about.version, about.commit, about.built
    )?;
    writeln!(text, "| host | {host}; launcher: {launcher} |")?;
    let cpu = machine["cpu"].as_str().unwrap_or("unknown");
    writeln!(
        text,
        "| CPU | {cpu}; {} allowed: {} |",
        machine["cpu_count"],
        words(&machine["cpus_allowed"])
    )?;
    writeln!(text, "| memory | {:.1} GiB |", gib(&machine["memory_bytes"]))?;
    writeln!(text, "| kernel | {} |", words(&machine["kernel"]))?;
    for transport in each(&info["transports"]) {
        let state = if transport["available"] == true { "" } else { "not available: " };
        writeln!(
            text,
            "| {} | {state}{} |",
            words(&transport["name"]),
            cell(words(&transport["note"]))
        )?;
    }
    if let Some(why) = &report.no_cuda {
        writeln!(text, "| NVIDIA's GPUs | not tested: {} |", cell(why))?;
    }
    for driver in each(&info["gpus"]) {
        if let Some(version) = driver["version"].as_str() {
            writeln!(text, "| {} | {} |", words(&driver["driver"]), cell(version))?;
        }
        for gpu in each(&driver["devices"]) {
            let simulated = if gpu["simulated"] == true { ", **simulated**" } else { "" };
            writeln!(
                text,
                "| GPU {} | {}, {:.1} GiB, at {}, {}{simulated} |",
                gpu["ordinal"],
                words(&gpu["name"]),
                gib(&gpu["memory_bytes"]),
                words(&gpu["pci"]),
                words(&gpu["uuid"])
            )?;
            for peer in each(&gpu["peers"]) {
                let access = if peer["access"] == true { "peer access" } else { "no peer access" };
                let atomics = if peer["native_atomics"] == true {
                    "native atomics"
                } else {
                    "no native atomics"
                };
                let (rank, link) = (&peer["performance_rank"], words(&peer["link"]));
                let link = if link.is_empty() { "link unknown" } else { link };
                let (from, to) = (&gpu["ordinal"], &peer["ordinal"]);
                writeln!(
                    text,
                    "| GPU {from} to {to} | {access}, {atomics}, performance rank {rank}, {} |",
                    cell(link)
                )?;
            }
        }
    }
    Ok(())
}

/// Writes the reasons for which tests skipped their checks.
fn write_left_out(report: &Report, text: &mut String) -> Result {
    let rows = report.parts.iter().filter_map(|row| Some((&row.name, row.tests.as_ref()?)));
    let mut reasons = rows.flat_map(|(name, tally)| {
        tally.left_out.iter().map(move |(why, count)| (name, why, count))
    });
    let Some(first) = reasons.next() else { return Ok(()) };
    writeln!(text, "\n## What tests have skipped\n\n| part | times | why |\n|---|---:|---|")?;
    for (name, why, count) in std::iter::once(first).chain(reasons) {
        writeln!(text, "| {name} | {count} | {} |", cell(why))?;
    }
    Ok(())
}

/// Writes the step times of the heat equation on more and more GPUs.
fn write_halo(report: &Report, text: &mut String) -> Result {
    let Some(first) = report.halo.first() else { return Ok(()) };
    writeln!(text, "\n## Halo exchange (`halo_2d`)\n")?;
    writeln!(
        text,
        "{0} × {0} cells a GPU; simulated GPUs are threads: their figures say nothing.\n",
        first.cells
    )?;
    writeln!(
        text,
        "| GPUs | µs a step | without the exchange | ratio | scaling from {} |",
        first.gpus
    )?;
    writeln!(text, "|---:|---:|---:|---:|---:|")?;
    for run in &report.halo {
        let Halo { gpus, step_us, alone_us, .. } = run;
        let ratio = step_us / alone_us;
        writeln!(
            text,
            "| {gpus} | {step_us:.1} | {alone_us:.1} | {ratio:.3} | {:.3} |",
            run.scaling(first)
        )?;
    }
    writeln!(text)?;
    let captions = ["the field", "a step on more and more GPUs"];
    for (caption, name) in captions
        .iter()
        .zip(&report.drawn)
        .filter_map(|(caption, name)| Some((caption, name.as_ref()?)))
    {
        writeln!(text, "![{caption}]({name})")?;
    }
    Ok(())
}

fn write_figures(report: &Report, text: &mut String) -> Result {
    if report.perf.is_empty() {
        return Ok(());
    }
    writeln!(text, "\n## Figures\n")?;
    writeln!(
        text,
        "One way for messages and puts, as `carrack perf --help` says. Simulated GPUs are threads: \
        their figures say nothing.\n"
    )?;
    writeln!(
        text,
        "| op | memory | size | test | p50 µs | p99 µs | GB/s | M/s \
        |\n|---|---|---:|---|---:|---:|---:|---:|"
    )?;
    for line in &report.perf {
        let (mine, theirs) = (words(&line["mem"]), words(&line["peer_mem"]));
        let memory = if mine == theirs { mine.to_owned() } else { format!("{mine} to {theirs}") };
        let figure =
            |value: &Value| value.as_f64().map_or_else(String::new, |value| format!("{value:.3}"));
        writeln!(
            text,
            "| {} | {memory} | {} | {} | {} | {} | {} | {} |",
            words(&line["op"]),
            line["size"],
            words(&line["test"]),
            figure(&line["latency_us"]["p50"]),
            figure(&line["latency_us"]["p99"]),
            figure(&line["bandwidth_gbps"]),
            figure(&line["rate_mps"])
        )?;
    }
    Ok(())
}

fn each(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn words(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Escapes a text for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
