//! Assignment of blocks to ranks.

use carrack::{Rank, Runtime};

/// Sides of a block, in the order of all arrays here. The number of the opposite side differs in
/// the last bit.
pub(crate) const SIDES: [Side; 4] = [Side::Up, Side::Down, Side::Left, Side::Right];

/// A side of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Up,
    Down,
    Left,
    Right,
}

/// Ranks in rows and columns, as square as their number allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) me: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Grid {
    pub(crate) fn of(runtime: &Runtime) -> Self {
        let ranks = runtime.size() as usize;
        let rows = (1..=ranks)
            .filter(|&rows| rows * rows <= ranks && ranks.is_multiple_of(rows))
            .max()
            .unwrap_or(1);
        Self { me: runtime.rank().0 as usize, rows, columns: ranks / rows }
    }

    /// Returns the row and the column of a rank.
    pub(crate) fn place(&self, rank: usize) -> [usize; 2] {
        [rank / self.columns, rank % self.columns]
    }

    /// Returns the rank on that side of this one; `None` at the end of the field.
    pub(crate) fn neighbour(&self, side: Side) -> Option<Rank> {
        let [row, column] = self.place(self.me);
        let [row, column] = match side {
            Side::Up => [row.checked_sub(1)?, column],
            Side::Down => [row + 1, column],
            Side::Left => [row, column.checked_sub(1)?],
            Side::Right => [row, column + 1],
        };
        let is_there = row < self.rows && column < self.columns;
        is_there.then(|| Rank((row * self.columns + column) as u32))
    }
}
