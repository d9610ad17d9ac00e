//! The equation: one step of a cell, the initial field, and any part of the field computed by one
//! CPU. Places are depth, row and column across all blocks.

use std::ops::Range;

/// Factor of a step: a cell changes by this times the sum of its differences from its six
/// neighbours. Below a sixth the scheme is stable.
pub(crate) const RATE: f64 = 0.1;

/// Computes a step of one cell, from the sums of its neighbours along each axis, columns first. The
/// kernel does the same in the same order (`heat.ptx`).
pub(crate) fn next(own: f64, [columns, rows, depths]: [f64; 3]) -> f64 {
    let sum = columns + rows + depths;
    RATE.mul_add((-6.0_f64).mul_add(own, sum), own)
}

/// Returns a cell of the initial field.
pub(crate) fn begin([depth, row, column]: [usize; 3]) -> f64 {
    ((7 * row + 3 * column + 5 * depth) % 17) as f64
}

/// Computes a part of a field of `all` cells after `steps` steps with this CPU alone. The outermost
/// cells never change. Each step computes only those cells around the part that can still affect
/// it.
pub(crate) fn alone(part: &[Range<usize>; 3], all: [usize; 3], steps: usize) -> Vec<f64> {
    let around = |far: usize, least: usize| -> [Range<usize>; 3] {
        std::array::from_fn(|axis| {
            let Range { start, end } = part[axis];
            start.saturating_sub(far).max(least)..(end + far).min(all[axis] - least)
        })
    };
    let known = around(steps, 0);
    let [_, high, wide] = known.each_ref().map(Range::len);
    let at = |[depth, row, column]: [usize; 3]| {
        let [depth, row, column] =
            [depth - known[0].start, row - known[1].start, column - known[2].start];
        (depth * high + row) * wide + column
    };
    let mut field: Vec<f64> = places(&known).map(begin).collect();
    let mut after = field.clone();
    for left in (0..steps).rev() {
        for place in places(&around(left, 1)) {
            let here = at(place);
            let around = [1, wide, wide * high].map(|far| field[here - far] + field[here + far]);
            after[here] = next(field[here], around);
        }
        std::mem::swap(&mut field, &mut after);
    }
    places(part).map(|place| field[at(place)]).collect()
}

/// Returns the places of a part, one row after another.
fn places([depths, rows, columns]: &[Range<usize>; 3]) -> impl Iterator<Item = [usize; 3]> {
    depths.clone().flat_map(move |depth| {
        rows.clone().flat_map(move |row| columns.clone().map(move |column| [depth, row, column]))
    })
}
