//! The equation: one step of a cell, the initial field, any part of the field computed by one CPU,
//! and the distance of two fields.

use std::ops::Range;

/// Factor of a step: a cell changes by this times the sum of its differences from its four
/// neighbours. Below a quarter the scheme is stable.
pub(crate) const RATE: f64 = 0.2;

/// Computes a step of one cell. The kernels do the same in the same order (`heat.ptx`).
pub(crate) fn next(own: f64, [up, down, left, right]: [f64; 4]) -> f64 {
    let sum = (left + right) + (up + down);
    RATE.mul_add((-4.0_f64).mul_add(own, sum), own)
}

/// Returns a cell of the initial field: two hot discs, the hotter one at 1. Beyond its ends the
/// field is zero at any time. Row and column count from 0 across all blocks.
pub(crate) fn begin(row: isize, column: isize, [rows, columns]: [usize; 2]) -> f64 {
    if row < 0 || column < 0 || row >= rows as isize || column >= columns as isize {
        return 0.0;
    }
    let (y, x) = ((row as f64 + 0.5) / rows as f64, (column as f64 + 0.5) / columns as f64);
    let is_in =
        |cy: f64, cx: f64, radius: f64| (y - cy).powi(2) + (x - cx).powi(2) < radius * radius;
    if is_in(0.4, 0.45, 0.25) {
        1.0
    } else if is_in(0.8, 0.8, 0.1) {
        0.5
    } else {
        0.0
    }
}

/// Computes a part of the whole field after `steps` steps with this CPU alone. Each step computes
/// only those cells around the part that can still affect it.
pub(crate) fn alone(part: [Range<usize>; 2], all: [usize; 2], steps: u64) -> Vec<f64> {
    let far = steps as isize;
    let [rows, columns] = part.map(|range| range.start as isize..range.end as isize);
    let around = columns.start - far..columns.end + far;
    let wide = around.len();
    let cells = (rows.start - far..rows.end + far)
        .flat_map(|row| around.clone().map(move |column| (row, column)));
    let mut field: Vec<f64> = cells.map(|(row, column)| begin(row, column, all)).collect();
    let mut after = field.clone();
    let at = |row: isize, column: isize| {
        (row - rows.start + far) as usize * wide + (column - columns.start + far) as usize
    };
    for left in (0..far).rev() {
        // Beyond the field's ends it is zero at any time.
        for row in (rows.start - left).max(0)..(rows.end + left).min(all[0] as isize) {
            for column in (columns.start - left).max(0)..(columns.end + left).min(all[1] as isize) {
                let here = at(row, column);
                let around =
                    [field[here - wide], field[here + wide], field[here - 1], field[here + 1]];
                after[here] = next(field[here], around);
            }
        }
        std::mem::swap(&mut field, &mut after);
    }
    rows.clone()
        .flat_map(|row| field[at(row, columns.start)..][..columns.len()].iter().copied())
        .collect()
}

/// Returns the largest difference of two fields, relative to the hottest cell of all steps, which
/// is 1. It is infinite if a value is NaN or the lengths differ.
pub(crate) fn distance(found: &[f64], wanted: &[f64]) -> f64 {
    if found.len() != wanted.len() {
        return f64::INFINITY;
    }
    let differs = found.iter().zip(wanted).map(|(one, other)| (one - other).abs());
    // `max` alone would ignore NaN.
    differs.fold(0.0, |worst, one| if one.is_nan() { f64::INFINITY } else { one.max(worst) })
}
