//! Heat spreads over a plate. Each rank has a band of its rows, and puts its outermost rows into
//! the memory of the ranks above and below before each step. The result is compared with that of
//! one rank alone.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- stencil
//! ```

use carrack::{Counter, Rank, Runtime};

const ROWS: usize = 120;
const COLUMNS: usize = 200;
const STEPS: u64 = 100;
/// Index of each halo row: that of the rank above is 0, that of the rank below 1.
const SIDES: [usize; 2] = [0, 1];

type Row = Vec<f64>;

/// Returns the initial heat of a row. Rows 0 and `ROWS + 1` are edges, which never change.
fn at_first(row: usize) -> Row {
    (0..COLUMNS).map(|column| ((row * row + 3 * column) % 17) as f64).collect()
}

/// Computes one step of a band between the rows above and below it. The first and the last column
/// are edges, too.
fn step(above: &[f64], band: &[Row], below: &[f64]) -> Vec<Row> {
    let rows: Vec<&[f64]> =
        [above].into_iter().chain(band.iter().map(Vec::as_slice)).chain([below]).collect();
    let cell = |rows: &[&[f64]], at: usize| {
        let around = rows[0][at] + rows[2][at] + rows[1][at - 1] + rows[1][at + 1];
        rows[1][at] + 0.2 * (around - 4.0 * rows[1][at])
    };
    let inner = |rows: &[&[f64]]| (1..COLUMNS - 1).map(|at| cell(rows, at)).collect::<Row>();
    rows.windows(3)
        .map(|rows| [&rows[1][..1], &inner(rows), &rows[1][COLUMNS - 1..]].concat())
        .collect()
}

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    let (me, size) = (runtime.rank().0 as usize, runtime.size() as usize);
    if size > ROWS {
        return Err(format!("{size} ranks for {ROWS} rows: start {ROWS} ranks at most").into());
    }
    let mine = 1 + me * ROWS / size..1 + (me + 1) * ROWS / size;
    let neighbours = [me.checked_sub(1), Some(me + 1).filter(|&below| below < size)];

    // A halo for each side and each parity of the step. The neighbour that is a step ahead writes
    // into the other one. It cannot be two ahead, since it needs our row for that.
    let halos = runtime.allocate(4 * 8 * COLUMNS)?;
    let place = |number: u64, side: usize| 8 * COLUMNS * (2 * (number % 2) as usize + side);
    let registered = runtime.register_memory(&halos)?;
    let arrived = [Counter::new(), Counter::new()];
    let names = [runtime.register_comp(&arrived[0])?, runtime.register_comp(&arrived[1])?];
    let rmrs = runtime.exchange_keys(&registered)?;

    let mut band: Vec<Row> = mine.clone().map(at_first).collect();
    for number in 0..STEPS {
        for (side, row) in [(0, band.first()), (1, band.last())] {
            let (Some(to), Some(row)) = (neighbours[side], row) else { continue };
            // To the rank above we are the one below. Its counter is told once the row is there.
            let bytes: Vec<u8> = row.iter().flat_map(|heat| heat.to_ne_bytes()).collect();
            let at = place(number, 1 - side) as u64;
            let mut put = runtime
                .post_put(Rank(to as u32), bytes, &rmrs[to], at)
                .remote_comp(names[1 - side]);
            let _over = put.wait()?;
        }
        let has_come = |side: usize| neighbours[side].is_none() || arrived[side].get() > number;
        // Nothing comes from a rank that is gone, and a counter alone would not say so.
        let is_gone = |side: usize| {
            neighbours[side].filter(|&rank| runtime.peer_down(Rank(rank as u32)).is_some())
        };
        runtime.wait(|| SIDES.into_iter().all(|side| has_come(side) || is_gone(side).is_some()))?;
        if let Some(lost) = SIDES.into_iter().filter(|&side| !has_come(side)).find_map(is_gone) {
            return Err(
                format!("rank {lost} went before its row for step {number} had come").into()
            );
        }
        let halo = |side: usize| -> Result<Row, carrack::Error> {
            let edge = [0, ROWS + 1][side];
            let Some(_) = neighbours[side] else { return Ok(at_first(edge)) };
            let slice = halos.slice(place(number, side), 8 * COLUMNS).ok_or("beyond the halos")?;
            Ok(slice.to_vec()?.as_chunks().0.iter().map(|heat| f64::from_ne_bytes(*heat)).collect())
        };
        band = step(&halo(0)?, &band, &halo(1)?);
    }

    let mut alone: Vec<Row> = (1..=ROWS).map(at_first).collect();
    for _ in 0..STEPS {
        alone = step(&at_first(0), &alone, &at_first(ROWS + 1));
    }
    let pairs = band.iter().flatten().zip(alone[mine.start - 1..mine.end - 1].iter().flatten());
    let farthest = pairs.map(|(one, other)| ((one - other) / other).abs()).fold(0.0, f64::max);
    // Not "if it is farther": a heat that is no number is not near.
    let is_near = farthest <= 1e-12
        && band.len() == mine.len()
        && band.iter().flatten().all(|heat| heat.is_finite());
    if !is_near {
        return Err(format!("rank {me}: rows {mine:?} are wrong by {farthest:e}").into());
    }
    println!("rank {me}: rows {mine:?} after {STEPS} steps as if computed alone");
    Ok(runtime.barrier()?)
}
