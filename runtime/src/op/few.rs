//! A queue that is nearly always short.

use std::collections::VecDeque;

/// A queue whose first value needs no allocation.
#[derive(Debug)]
pub(crate) struct Few<T> {
    first: Option<T>,
    #[allow(clippy::box_collection, reason = "a queue without values takes longer to drop")]
    others: Option<Box<VecDeque<T>>>,
}

impl<T> Few<T> {
    pub(crate) const fn new() -> Self {
        Self { first: None, others: None }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none() && self.others.as_ref().is_none_or(|others| others.is_empty())
    }

    #[inline]
    pub(crate) fn push_back(&mut self, value: T) {
        if self.is_empty() {
            self.first = Some(value);
        } else {
            self.others.get_or_insert_default().push_back(value);
        }
    }

    #[inline]
    pub(crate) fn pop_front(&mut self) -> Option<T> {
        self.first.take().or_else(|| self.others.as_mut()?.pop_front())
    }
}

impl<T> Extend<T> for Few<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, values: I) {
        values.into_iter().for_each(|value| self.push_back(value));
    }
}

impl<T> Iterator for Few<T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        self.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_out_in_the_order_in_which_they_went_in() {
        let mut few = Few::new();
        few.extend([1, 2, 3]);
        assert_eq!((few.pop_front(), few.pop_front()), (Some(1), Some(2)));
        few.extend([4, 5]);
        assert_eq!(few.collect::<Vec<_>>(), [3, 4, 5]);
    }
}
