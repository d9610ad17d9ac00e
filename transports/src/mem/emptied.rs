//! Boxes that outlive their values.

use std::mem::MaybeUninit;
use std::ptr;

/// Drops the value of a box, and returns the box for another one.
pub fn emptied<T>(full: Box<T>) -> Box<MaybeUninit<T>> {
    let value = Box::into_raw(full);
    // SAFETY: the value is the box's own, and is dropped once. A value and its absence have the
    // same layout.
    unsafe {
        ptr::drop_in_place(value);
        Box::from_raw(value.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_value_is_dropped_once_and_its_box_takes_another() {
        let value = Arc::new(());
        let full = Box::new((value.clone(), [7_u64; 9]));
        let at = &raw const *full;
        let empty = emptied(full);
        assert_eq!(Arc::strong_count(&value), 1);
        let full = Box::write(empty, (value.clone(), [8; 9]));
        assert_eq!((&raw const *full, full.1), (at, [8; 9]));
        drop(full);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
