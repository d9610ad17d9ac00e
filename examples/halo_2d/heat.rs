//! The equation: what a step makes of a cell, how the field begins, and all of it by one CPU.

use crate::grid::Grid;

/// Of a cell's difference from the mean of its four neighbours, so much goes in a step; below a quarter the scheme is stable.
pub(crate) const RATE: f64 = 0.2;

/// A step, for one cell. The kernels do the same in the same order (`heat.ptx`).
pub(crate) fn next(own: f64, [up, down, left, right]: [f64; 4]) -> f64 {
    let sum = (left + right) + (up + down);
    RATE.mul_add((-4.0_f64).mul_add(own, sum), own)
}

/// How the field begins: two hot discs, and nothing but zero beyond its ends, at any time. Rows and columns of all blocks, from 0 on.
pub(crate) fn begin(row: isize, column: isize, [rows, columns]: [usize; 2]) -> f64 {
    if row < 0 || column < 0 || row >= rows as isize || column >= columns as isize {
        return 0.0;
    }
    let (y, x) = ((row as f64 + 0.5) / rows as f64, (column as f64 + 0.5) / columns as f64);
    let is_in = |cy: f64, cx: f64, radius: f64| (y - cy).powi(2) + (x - cx).powi(2) < radius * radius;
    if is_in(0.4, 0.45, 0.25) {
        1.0
    } else if is_in(0.8, 0.8, 0.1) {
        0.5
    } else {
        0.0
    }
}

/// This rank's block after so many steps, all blocks computed one after another by this CPU.
pub(crate) fn alone(grid: &Grid, [rows, columns]: [usize; 2], steps: u64) -> Vec<f64> {
    let all = [grid.rows * rows, grid.columns * columns];
    let wide = all[1] + 2;
    let at = |row: usize, column: usize| (row + 1) * wide + column + 1;
    let mut field = vec![0.0; (all[0] + 2) * wide];
    for row in 0..all[0] {
        for column in 0..all[1] {
            field[at(row, column)] = begin(row as isize, column as isize, all);
        }
    }
    let mut after = field.clone();
    for _ in 0..steps {
        for row in 0..all[0] {
            for column in 0..all[1] {
                let here = at(row, column);
                let around = [field[here - wide], field[here + wide], field[here - 1], field[here + 1]];
                after[here] = next(field[here], around);
            }
        }
        std::mem::swap(&mut field, &mut after);
    }
    let [first_row, first_column] = grid.place(grid.me);
    let block = (0..rows).flat_map(|row| {
        let start = at(first_row * rows + row, first_column * columns);
        field[start..start + columns].iter().copied()
    });
    block.collect()
}
