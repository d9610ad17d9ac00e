//! A picture of the whole field, as SVG: 64 by 64 squares at the most, each as warm as the cell in
//! its middle.

use crate::gpus::Result;
use crate::grid::Grid;
use carrack::{Rank, Runtime, Synchronizer, Tag};
use std::fmt::Write as _;
use std::path::Path;

const SQUARES: usize = 64;
const TAG: Tag = Tag(0x9170);

/// Sends this rank's block to rank 0, which draws the blocks of all ranks.
pub(crate) fn draw(
    runtime: &Runtime,
    grid: &Grid,
    block: &[f64],
    [rows, columns]: [usize; 2],
    path: &Path,
) -> Result<()> {
    let bytes: Vec<u8> = block.iter().flat_map(|cell| cell.to_le_bytes()).collect();
    if grid.me > 0 {
        runtime.post_send(Rank(0), bytes, TAG).wait()?;
        return Ok(());
    }
    let mut blocks = vec![bytes];
    for rank in 1..runtime.size() {
        let received = Synchronizer::new(1);
        let room = vec![0; rows * columns * 8];
        let mut receive = runtime.post_recv(Rank(rank), room, TAG).comp(&received);
        receive.submit()?;
        let status = received.wait(runtime)?.pop().ok_or("a receive without an end")?.ok()?;
        blocks.push(status.buffer.to_vec()?);
    }
    let cell = |row: usize, column: usize| {
        let block = &blocks[row / rows * grid.columns + column / columns];
        let at = 8 * (row % rows * columns + column % columns);
        block[at..].first_chunk().map_or(0.0, |cell| f64::from_le_bytes(*cell))
    };
    let (all_rows, all_columns) = (grid.rows * rows, grid.columns * columns);
    let (high, wide) = (SQUARES.min(all_rows), SQUARES.min(all_columns));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {wide} {high}\" width=\"{}\" \
        height=\"{}\" shape-rendering=\"crispEdges\">\n",
        8 * wide,
        8 * high
    );
    for y in 0..high {
        let warm_at = |x: usize| {
            let heat =
                cell((2 * y + 1) * all_rows / (2 * high), (2 * x + 1) * all_columns / (2 * wide));
            (heat.clamp(0.0, 1.0) * 255.0) as u8
        };
        let mut x = 0;
        while x < wide {
            let warm = warm_at(x);
            let alike = (x..wide).take_while(|&x| warm_at(x) == warm).count();
            writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{alike}\" height=\"1\" \
                fill=\"#{warm:02x}20{:02x}\"/>",
                255 - warm
            )?;
            x += alike;
        }
    }
    // Where one rank's block ends.
    for row in 1..grid.rows {
        let y = row as f64 * high as f64 / grid.rows as f64;
        writeln!(svg, "<path d=\"M0 {y}H{wide}\" stroke=\"#fff\" stroke-width=\".2\"/>")?;
    }
    for column in 1..grid.columns {
        let x = column as f64 * wide as f64 / grid.columns as f64;
        writeln!(svg, "<path d=\"M{x} 0V{high}\" stroke=\"#fff\" stroke-width=\".2\"/>")?;
    }
    svg.push_str("</svg>\n");
    std::fs::write(path, svg).map_err(|why| format!("{}: {why}", path.display()).into())
}
