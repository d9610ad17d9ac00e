//! Reserved addresses of GPUs, without memory.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A range of addresses that a driver has reserved, for memory that is mapped there piece by piece
/// ([`Gpu::allocate_at`](super::Gpu::allocate_at)). It takes no memory.
///
/// Clones are the same range, which is released when the last of them is dropped. Each piece of
/// memory there holds a clone.
#[derive(Clone)]
pub struct Reservation {
    base: usize,
    len: usize,
    /// The driver's own object, whose drop releases the addresses.
    own: Arc<dyn Any + Send + Sync>,
}

impl Reservation {
    /// Creates a reservation of `len` addresses from `base` on, released when `own` is dropped.
    /// For drivers.
    pub fn new(base: usize, len: usize, own: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, own }
    }

    /// Returns the first address.
    pub fn addr(&self) -> usize {
        self.base
    }

    /// Returns the number of addresses.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it has no addresses.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of a piece, or `None` if the piece is not inside.
    pub fn place(&self, offset: usize, len: usize) -> Option<usize> {
        let end = offset.checked_add(len)?;
        if end <= self.len { self.base.checked_add(offset) } else { None }
    }

    /// Returns the driver's own object, if it has the type `T`.
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
