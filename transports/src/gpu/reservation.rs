//! Addresses of GPUs at which there is no memory yet.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A range of addresses that a driver has reserved, for memory that comes and goes there piece by
/// piece ([`Gpu::allocate_at`](super::Gpu::allocate_at)). It takes no memory.
///
/// Clones are the same range. It is given back when the last of them is dropped, and each piece of
/// memory there has one.
#[derive(Clone)]
pub struct Reservation {
    base: usize,
    len: usize,
    /// The driver's own: what gives the addresses back.
    own: Arc<dyn Any + Send + Sync>,
}

impl Reservation {
    /// `len` addresses from `base` on, which are given back when `own` is dropped. For drivers.
    pub fn new(base: usize, len: usize, own: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, own }
    }

    /// Where it begins.
    pub fn addr(&self) -> usize {
        self.base
    }

    /// How many addresses there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of a piece. `None` when the piece is not inside.
    pub fn place(&self, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        if end <= self.len { self.base.checked_add(offset) } else { None }
    }

    /// Returns the driver's own data, if it is of that driver.
    pub fn own<T: Any>(&self) -> Option<&T> {
        self.own.downcast_ref()
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({:#x}+{})", self.base, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_lies_inside_or_nowhere() {
        let reservation = Reservation::new(1000, 100, Arc::new(7_u8));
        assert_eq!(reservation.place(0, 100), Some(1000));
        assert_eq!(reservation.place(99, 1), Some(1099));
        assert_eq!(
            [(0, 101), (100, 1), (usize::MAX, 2), (1, usize::MAX)]
                .map(|(at, len)| reservation.place(at, len)),
            [None; 4]
        );
        assert_eq!((reservation.own::<u8>(), reservation.own::<u16>()), (Some(&7), None));
    }
}
