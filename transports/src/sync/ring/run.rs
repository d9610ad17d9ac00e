//! Records of one slot that lie behind each other and have all but their payloads in common.

#![expect(unsafe_code, reason = "a structure without locks shares cells between threads")]
#![allow(clippy::cast_possible_truncation, reason = "as the ring")]

use super::{AHEAD, Consumer, HEADER, Record, Slots, control_word};
use crate::sync::primitives::Ordering;
use std::ptr::NonNull;

/// Kind, length and header of records of one slot.
#[derive(Clone, Copy, Debug)]
pub struct RunShape {
    /// The upper half of the control words.
    control: u32,
    header: [u64; 2],
    len: usize,
}

impl RunShape {
    /// Returns the header.
    #[inline(always)]
    pub fn header(&self) -> [u64; 2] {
        self.header
    }

    /// Returns the number of payload bytes, at most [`FIRST`](super::FIRST).
    #[inline(always)]
    #[allow(clippy::len_without_is_empty, reason = "of each record")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl<S: Slots> Record<'_, S> {
    /// Returns its shape. `None`: it has several slots.
    #[inline(always)]
    pub fn shape(&self) -> Option<RunShape> {
        let control = (control_word(0, 1, self.kind, self.len) >> 32) as u32;
        let shape = RunShape { control, header: self.header(), len: self.len };
        (self.count == 1).then_some(shape)
    }
}

impl<S: Slots> Consumer<S> {
    /// Returns the place of the payload of the record `further` slots behind the next one, if it
    /// has this shape. Prefetches a slot behind it.
    #[inline(always)]
    pub fn alike(&self, shape: &RunShape, further: usize) -> Option<NonNull<u8>> {
        let position = self.taken + further as u64;
        let at = (position & self.mask) as usize;
        let control = self.slots.control(at).load(Ordering::Acquire);
        let is_next = control as u32 == position.wrapping_add(1) as u32;
        if !is_next || (control >> 32) as u32 != shape.control {
            return None;
        }
        self.slots.will_read(((position + AHEAD) & self.mask) as usize);
        let mut place = None;
        // SAFETY: the sequence number said that the producer has handed this slot over.
        unsafe {
            self.slots.read(at, |body| {
                if body.cast::<[u64; 2]>().read_unaligned() == shape.header {
                    place = NonNull::new(body.add(HEADER).cast_mut());
                }
            });
        }
        place
    }
}
