//! Heat equation of `examples/halo_2d` on one GPU, on two, and so on. The figures are the cost of
//! the edge exchange and the time of a step on more GPUs. A picture of the field and a plot come
//! with them.

use super::kit::Kit;
use super::machine::{Gpus, Machine};
use super::part::{Outcome, Part, Ran, Sort};
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
/// Cells each way of a GPU's block, and steps.
const ON_GPUS: [&str; 2] = ["8192", "300"];
/// A simulated GPU is a thread, and its figures say nothing.
const SIMULATED: [&str; 2] = ["48", "20"];

/// Figures of a run on `gpus` GPUs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(super) struct Halo {
    pub(super) gpus: usize,
    /// Cells each way of a GPU's block.
    pub(super) cells: usize,
    /// Microseconds that a step takes with the exchange of edges.
    pub(super) step_us: f64,
    /// Microseconds that a step takes without the exchange.
    pub(super) alone_us: f64,
}

/// The files of the picture and of the plot, in the folder of the report.
pub(super) fn drawn(suffix: Option<&str>) -> [String; 2] {
    let node = suffix.map_or_else(String::new, |node| format!("-{node}"));
    ["field", "scaling"].map(|what| format!("halo-{what}{node}.svg"))
}

/// Returns the runs on 1, 2, 4 ... GPUs and on all. The run on all draws the picture.
pub(super) fn parts(
    kit: &Kit,
    machine: &Machine,
    folder: &Path,
    suffix: Option<&str>,
) -> Vec<Part> {
    let doubled = std::iter::successors(Some(1), |count| Some(2 * count));
    let counts = doubled.take_while(|&count| count < machine.count).chain([machine.count]);
    let [picture, _] = drawn(suffix);
    let picture = folder.join(picture);
    counts.filter(|&count| count > 0).map(|count| part(kit, machine, count, &picture)).collect()
}

fn part(kit: &Kit, machine: &Machine, count: usize, picture: &Path) -> Part {
    let program = kit.examples.get("halo_2d").cloned();
    let path = program.clone().unwrap_or_else(|| PathBuf::from("halo_2d"));
    let mut args = ["run", "-n", &count.to_string(), "--no-tag", "--", &path.display().to_string()]
        .map(str::to_owned)
        .to_vec();
    let sizes = if machine.gpus == Gpus::Simulated { SIMULATED } else { ON_GPUS };
    args.extend(sizes.map(str::to_owned));
    if count == machine.count {
        args.push(picture.display().to_string());
    }
    Part {
        name: format!("halo scaling, {count} GPU(s) ({})", machine.gpus.in_words()),
        sort: Sort::Halo(count),
        gpus: Some(machine.gpus),
        program: kit.carrack.clone(),
        args,
        env: vec![("CARRACK_GPU", machine.gpus.setting().to_owned())],
        limit: LIMIT,
        skip: program.is_none().then(|| "it is not here: not built".into()),
    }
}

impl Halo {
    /// Returns the figures of the runs that passed, fewer GPUs first.
    pub(super) fn of(ran: &[Ran]) -> Vec<Self> {
        let one = |ran: &Ran| match (&ran.outcome, ran.part.sort) {
            (Outcome::Passed, Sort::Halo(gpus)) => Self::read(gpus, ran.last.as_deref()?),
            _ => None,
        };
        ran.iter().filter_map(one).collect()
    }

    /// Reads the line `rank 0: 8192² cells: 315.6 us a step, 314.2 without the exchange: 1.004`.
    pub(super) fn read(gpus: usize, line: &str) -> Option<Self> {
        let (_, rest) = line.split_once(": ")?;
        let (cells, rest) = rest.split_once("² cells: ")?;
        let (step, rest) = rest.split_once(" us a step, ")?;
        let (alone, _) = rest.split_once(" without the exchange")?;
        Some(Self {
            gpus,
            cells: cells.parse().ok()?,
            step_us: step.parse().ok()?,
            alone_us: alone.parse().ok()?,
        })
    }

    /// Returns the step time of the first run divided by that of this one: 1 if more GPUs cost
    /// nothing.
    pub(super) fn scaling(&self, first: &Self) -> f64 {
        first.step_us / self.step_us
    }
}

/// A plot of a step's time over the number of GPUs, as SVG. Nothing is in proportion across: each
/// run has a place of its own.
pub(super) fn draw(runs: &[Halo], simulated: bool) -> Option<String> {
    const WIDE: f64 = 420.0;
    const HIGH: f64 = 240.0;
    const LEFT: f64 = 56.0;
    const TOP: f64 = 30.0;
    const GROUND: f64 = 200.0;
    let (first, last) = (runs.first()?, runs.last()?);
    let most = runs.iter().map(|run| run.step_us.max(run.alone_us)).fold(0.0, f64::max);
    // Lines at round numbers, four to nine apart.
    let tenth = 10_f64.powf((most / 4.0).log10().floor());
    let apart =
        [1.0, 2.0, 5.0].map(|by| by * tenth).into_iter().rfind(|apart| most / apart >= 4.0)?;
    let height = |micros: f64| GROUND - micros / (most * 1.05) * (GROUND - TOP);
    let place = |at: usize| LEFT + (WIDE - LEFT - 20.0) * (at as f64 + 0.5) / runs.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDE} {HIGH}\" width=\"{WIDE}\" \
        height=\"{HIGH}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDE}\" \
        height=\"{HIGH}\" fill=\"#fff\"/>\n"
    );
    let mut line = |text: String| svg.push_str(&(text + "\n"));
    for at in 0..=(most / apart) as usize {
        let (micros, y) = (at as f64 * apart, height(at as f64 * apart));
        line(format!("<path d=\"M{LEFT} {y:.1}H{}\" stroke=\"#ddd\"/>", WIDE - 20.0));
        line(format!(
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{micros}</text>",
            LEFT - 6.0,
            y + 4.0
        ));
    }
    let simulated = if simulated { "; simulated: says nothing" } else { "" };
    line(format!(
        "<text x=\"{LEFT}\" y=\"14\">µs a step, {}² cells a GPU (f64){simulated}</text>",
        first.cells
    ));
    let curve = |of: fn(&Halo) -> f64| {
        let points = runs
            .iter()
            .enumerate()
            .map(|(at, run)| format!("{:.1},{:.1}", place(at), height(of(run))));
        points.collect::<Vec<_>>().join(" ")
    };
    line(format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#999\" stroke-dasharray=\"4 3\"/>",
        curve(|run| run.alone_us)
    ));
    line(format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#05c\"/>",
        curve(|run| run.step_us)
    ));
    for (at, run) in runs.iter().enumerate() {
        let (x, y) = (place(at), height(run.step_us));
        line(format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#05c\"/>"));
        line(format!(
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.1}</text>",
            y - 9.0,
            run.step_us
        ));
        let s = if run.gpus == 1 { "" } else { "s" };
        line(format!(
            "<text x=\"{x:.1}\" y=\"218\" text-anchor=\"middle\">{} GPU{s}</text>",
            run.gpus
        ));
    }
    let mut foot = "dashed: without the exchange".to_owned();
    if runs.len() > 1 {
        // Writing to a string cannot fail.
        let _ = write!(foot, "; weak scaling {:.3} at {} GPUs", last.scaling(first), last.gpus);
    }
    line(format!(
        "<text x=\"{}\" y=\"236\" text-anchor=\"middle\" fill=\"#555\">{foot}</text></svg>",
        (LEFT + WIDE) / 2.0
    ));
    Some(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_from_what_the_example_prints_and_from_nothing_else() {
        let line = "rank 3: 8192² cells: 315.6 us a step, 314.2 without the exchange: 1.004";
        let run = Halo { gpus: 4, cells: 8192, step_us: 315.6, alone_us: 314.2 };
        assert_eq!(Halo::read(4, line), Some(run));
        assert_eq!(Halo::read(4, &format!("{line} (simulated: says nothing)")), Some(run));
        for other in [
            "",
            "rank 3 of 2 x 2: 60 steps as one CPU computes them",
            "rank 3: many² cells: 1 us a step, 1 without the exchange: 1",
        ] {
            assert_eq!(Halo::read(4, other), None, "{other}");
        }
    }

    #[test]
    fn a_plot_has_a_point_for_each_run_within_its_frame_and_lines_at_round_numbers() {
        let run = |gpus: usize, step_us: f64| Halo {
            gpus,
            cells: 8192,
            step_us,
            alone_us: 0.9 * step_us,
        };
        assert_eq!(draw(&[], false), None);
        for (runs, words) in [
            (vec![run(1, 314.3), run(2, 315.4), run(4, 331.0)], "weak scaling 0.950 at 4 GPUs"),
            (vec![run(1, 0.07)], "without the exchange</text>"),
            (vec![run(1, 90_000.0), run(2, 1.0)], "weak scaling 90000.000"),
        ] {
            let svg = draw(&runs, false).unwrap();
            assert!(svg.contains(words) && svg.ends_with("</svg>\n"), "{svg}");
            let heights = svg
                .split("cy=\"")
                .skip(1)
                .map(|rest| rest.split('"').next().unwrap().parse::<f64>().unwrap());
            let heights: Vec<_> = heights.collect();
            assert_eq!(heights.len(), runs.len());
            assert!(heights.iter().all(|height| (30.0..=200.0).contains(height)), "{heights:?}");
            let lines = svg.matches("stroke=\"#ddd\"").count();
            assert!((5..=10).contains(&lines), "{lines} lines: {svg}");
            assert!(!svg.contains("simulated"));
        }
        assert!(draw(&[run(1, 5.0)], true).unwrap().contains("simulated: says nothing"));
    }
}
