//! Memory that silent peers cost a rank, as a table, and as a curve if a file is named:
//! `cargo bench --bench growth -- docs/growth.svg`.

use carrack::settings::TransportChoice;
use carrack_test_support::counting::Counting;
use carrack_test_support::growth::{Held, SIZES, each, held, print};
use plotters::prelude::*;
use std::error::Error;

#[global_allocator]
static GLOBAL: Counting = Counting;

fn main() -> Result<(), Box<dyn Error>> {
    let transports = [("loopback", TransportChoice::Loopback), ("shm", TransportChoice::Shm)];
    let curves = transports.map(|(name, transport)| {
        // What is allocated once for the whole process is not counted.
        held(transport, SIZES[0]);
        let rows = SIZES.map(|size| held(transport, size));
        print(name, &rows);
        (name, rows)
    });
    // Cargo's own words to benchmarks begin with a dash.
    match std::env::args().skip(1).find(|word| !word.starts_with('-')) {
        Some(path) => draw(&path, &curves),
        None => Ok(()),
    }
}

/// Draws the growth compared with the smallest job, and the line that it must stay below.
fn draw(path: &str, curves: &[(&str, [Held; SIZES.len()])]) -> Result<(), Box<dyn Error>> {
    let most = f64::from(SIZES[SIZES.len() - 1]);
    let area = SVGBackend::new(path, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("What silent peers cost a rank", ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..most, 0.0..most * 100.0 / 1024.0)?;
    chart
        .configure_mesh()
        .x_desc("ranks of the job")
        .y_desc("KiB more than in a job of 64")
        .draw()?;
    let limit = LineSeries::new([(0.0, 0.0), (most, most * 100.0 / 1024.0)], BLACK.mix(0.5));
    chart
        .draw_series(limit)?
        .label("100 bytes for each")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 20, y)], BLACK.mix(0.5)));
    for (colour, (name, rows)) in [BLUE, RED].into_iter().zip(curves) {
        let bytes = |row: &Held| (row.heap + row.shared) as f64;
        let points =
            rows.iter().map(|row| (f64::from(row.size), (bytes(row) - bytes(&rows[0])) / 1024.0));
        let label = format!("{name}: {:.1} bytes for each", each(rows));
        let series = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
        chart
            .draw_series(series)?
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}
