//! Results as charts: latency over size and bandwidth over size in one SVG, and in [`percentiles`]
//! how latencies are distributed.

pub(super) mod percentiles;

use super::error::PerfError;
use super::record::{Record, size_in_words};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{
    AsRangedCoord, KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter,
};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

const SIZE: (u32, u32) = (1100, 480);

/// A curve: bytes, and the figure.
type Curve = Vec<(f64, f64)>;

/// Looks whether the file can be written, before anything is measured. Leaves what is in it.
pub(super) fn check(path: &Path) -> Result<(), PerfError> {
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).map_err(|error| failed(path, &error))
}

/// Draws the results. A size of 0 has no place on a logarithmic axis, and is left out.
pub(super) fn draw(path: &Path, records: &[Record]) -> Result<(), PerfError> {
    let latency = curves(records, "latency", |record| Some(record.latency_us?.p50));
    let bandwidth = curves(records, "bandwidth", |record| record.bandwidth_gbps);
    let about = about(records);
    write(path, |area| both(area, &about, &latency, &bandwidth))
}

/// Draws on an area and writes it into the file.
fn write(
    path: &Path,
    draw: impl for<'a> FnOnce(&Area<'a>) -> Result<(), Error<'a>>,
) -> Result<(), PerfError> {
    let svg = to_svg(draw).map_err(|why| PerfError::Plot { path: path.to_owned(), why })?;
    std::fs::write(path, svg).map_err(|error| failed(path, &error))
}

/// Returns the drawing as SVG, or the reason why there is none.
pub(crate) fn to_svg(
    draw: impl for<'a> FnOnce(&Area<'a>) -> Result<(), Error<'a>>,
) -> Result<String, String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw(&area).and_then(|()| area.present()).map_err(|error| error.to_string())?;
    }
    Ok(svg)
}

/// Returns the conditions that all results share.
fn about(records: &[Record]) -> String {
    let conditions = records.first().map(|record| &record.conditions);
    conditions.map(|all| format!("{}, {}", all.transport, all.memory())).unwrap_or_default()
}

fn failed(path: &Path, why: &impl ToString) -> PerfError {
    PerfError::Plot { path: path.to_owned(), why: why.to_string() }
}

/// Returns the curves of one test, by name.
fn curves(
    records: &[Record],
    test: &str,
    figure: impl Fn(&Record) -> Option<f64>,
) -> BTreeMap<String, Curve> {
    let mut curves = BTreeMap::<String, Curve>::new();
    for record in records.iter().filter(|record| record.test == test && record.size > 0) {
        let Some(figure) = figure(record).filter(|figure| *figure > 0.0) else { continue };
        curves.entry(name(record)).or_default().push((record.size as f64, figure));
    }
    for curve in curves.values_mut() {
        curve.sort_by(|one, other| one.0.total_cmp(&other.0));
    }
    curves
}

/// Returns the name of a curve: the operation, and its threads where there are several.
fn name(record: &Record) -> String {
    match record.threads {
        1 => record.op.to_owned(),
        threads => format!("{}, {threads} threads", record.op),
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Error<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

fn both<'a>(
    area: &Area<'a>,
    about: &str,
    latency: &BTreeMap<String, Curve>,
    bandwidth: &BTreeMap<String, Curve>,
) -> Result<(), Error<'a>> {
    area.fill(&WHITE)?;
    let halves = area.split_evenly((1, 2));
    let [left, right] = halves.as_slice() else { return Ok(()) };
    let (x, y) = ranges(latency);
    let caption = format!("One-way latency, p50 ({about})");
    let bytes =
        Axis { unit: "message size (bytes)", label: &|size| size_in_words(size.round() as usize) };
    chart(
        left,
        &caption,
        &bytes,
        "latency (µs)",
        (x.log_scale().base(2.0), y.log_scale()),
        latency,
    )?;
    let (x, y) = ranges(bandwidth);
    let caption = format!("Bandwidth ({about})");
    chart(
        right,
        &caption,
        &bytes,
        "bandwidth (GB/s)",
        (x.log_scale().base(2.0), 0.0..y.end),
        bandwidth,
    )
}

/// The horizontal axis.
pub(crate) struct Axis<'a> {
    pub(crate) unit: &'a str,
    pub(crate) label: &'a dyn Fn(&f64) -> String,
}

/// A range with marks at these places; [`Axis`] names them.
pub(crate) struct Marks(pub(crate) Range<f64>, pub(crate) Vec<f64>);

impl Ranged for Marks {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.0.clone()).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.1.clone()
    }

    fn range(&self) -> Range<f64> {
        self.0.clone()
    }
}

impl ValueFormatter<f64> for Marks {}

/// Draws curves with a point at each figure.
pub(crate) fn chart<'a, Y>(
    area: &Area<'a>,
    caption: &str,
    across: &Axis<'_>,
    unit: &str,
    (x, y): (impl AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>, Y),
    curves: &BTreeMap<String, Curve>,
) -> Result<(), Error<'a>>
where
    Y: AsRangedCoord<Value = f64, CoordDescType: ValueFormatter<f64>>,
{
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(x, y)?;
    chart
        .configure_mesh()
        .x_desc(across.unit)
        .y_desc(unit)
        .x_label_formatter(across.label)
        .y_label_formatter(&|figure| short(*figure))
        .draw()?;
    for (number, (name, curve)) in curves.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        chart
            .draw_series(LineSeries::new(curve.iter().copied(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(curve.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
    }
    if curves.is_empty() {
        return area.draw_text(
            "not measured",
            &("sans-serif", 14).into_text_style(area),
            (area.dim_in_pixel().0 as i32 / 2 - 40, SIZE.1 as i32 / 2),
        );
    }
    // Everything grows to the right: the upper left corner is free.
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.4))
        .draw()
}

/// Returns ranges that hold all points, with some room; the axes of an empty chart where there are
/// none.
fn ranges(curves: &BTreeMap<String, Curve>) -> (Range<f64>, Range<f64>) {
    let points = || curves.values().flatten();
    let around = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values
            .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        if high > 0.0 { low / 1.5..high * 1.5 } else { 1.0..10.0 }
    };
    (around(&mut points().map(|point| point.0)), around(&mut points().map(|point| point.1)))
}

/// Formats a figure with as many decimals as make three digits.
fn short(figure: f64) -> String {
    match figure {
        ..1.0 => format!("{figure:.3}"),
        1.0..10.0 => format!("{figure:.2}"),
        10.0..100.0 => format!("{figure:.1}"),
        _ => format!("{figure:.0}"),
    }
}
