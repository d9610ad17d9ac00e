//! Heat equation of `examples/halo_2d` on one GPU, on two, and so on. The figures are the cost of
//! the edge exchange and the time of a step on more GPUs. A picture of the field and a plot come
//! with them.

use super::kit::Kit;
use super::machine::{Gpus, Machine};
use super::part::{Part, Sort};
use crate::perf::plot::{Axis, Marks, chart, to_svg};
use plotters::prelude::*;
use serde::Serialize;
use std::path::Path;

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

/// Returns the names of the files of the picture and of the plot, in the folder of the report.
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
    let name = format!("halo scaling, {count} GPU(s)");
    let part = Part::new(&name, Sort::Halo(count), Some(machine.gpus), kit);
    let mut part = part.of_example("halo_2d", u32::try_from(count).unwrap_or(u32::MAX), kit);
    let sizes = if machine.gpus == Gpus::Simulated { SIMULATED } else { ON_GPUS };
    part.args.extend(sizes.map(str::to_owned));
    if count == machine.count {
        part.args.push(picture.display().to_string());
    }
    part
}

impl Halo {
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

/// Plots a step's time against the number of GPUs, as SVG. Nothing is in proportion across: each
/// run has a place of its own.
pub(super) fn draw(runs: &[Halo], simulated: bool) -> Option<String> {
    let (first, last) = (runs.first()?, runs.last()?);
    let most = runs.iter().map(|run| run.step_us.max(run.alone_us)).fold(0.0, f64::max);
    let places = || (0..).map(|at: i32| f64::from(at));
    let curve = |of: fn(&Halo) -> f64| places().zip(runs.iter().map(of)).collect();
    let curves = [
        ("a step".to_owned(), curve(|run| run.step_us)),
        ("without the exchange".to_owned(), curve(|run| run.alone_us)),
    ];
    let mut caption = format!("A step, {}² cells a GPU (f64)", first.cells);
    if runs.len() > 1 {
        caption += &format!("; weak scaling {:.3} at {} GPUs", last.scaling(first), last.gpus);
    }
    if simulated {
        caption += "; simulated: says nothing";
    }
    let label = |place: &f64| {
        let run = places().zip(runs).find(|(at, _)| at == place);
        run.map(|(_, run)| format!("{} GPU(s): {:.1} µs", run.gpus, run.step_us))
            .unwrap_or_default()
    };
    let marks: Vec<f64> = places().take(runs.len()).collect();
    let across = Marks(-0.5..runs.len() as f64 - 0.5, marks);
    let axis = Axis { unit: "", label: &label };
    let up = 0.0..1.3 * most;
    to_svg(|area| {
        area.fill(&WHITE)?;
        chart(area, &caption, &axis, "µs", (across, up), &curves.into())
    })
    .ok()
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
            (vec![run(1, 0.07)], "without the exchange"),
            (vec![run(1, 90_000.0), run(2, 1.0)], "weak scaling 90000.000"),
        ] {
            let svg = draw(&runs, false).unwrap();
            assert!(svg.contains(words) && svg.ends_with("</svg>\n"), "{svg}");
            let heights = svg
                .split("cy=\"")
                .skip(1)
                .map(|rest| rest.split('"').next().unwrap().parse::<f64>().unwrap());
            let heights: Vec<_> = heights.collect();
            assert_eq!(heights.len(), 2 * runs.len(), "with and without the exchange");
            assert!(heights.iter().all(|height| (12.0..=468.0).contains(height)), "{heights:?}");
            for run in &runs {
                assert!(svg.contains(&format!("{} GPU(s): {:.1} µs", run.gpus, run.step_us)));
            }
            assert!(!svg.contains("simulated"));
        }
        assert!(draw(&[run(1, 5.0)], true).unwrap().contains("simulated: says nothing"));
    }
}
