//! Functions of a context that newer libraries have added.
//!
//! They lie in a structure around the context, which grows at its front. A library's own version
//! of it may be shorter than ours, and its length is a field of it.

use super::super::bindings::{ibv_context, verbs_context};
use std::mem::offset_of;

/// Value of `abi_compat` in a context with such a structure around it.
pub(super) const IS_EXTENDED: usize = usize::MAX;

/// Returns a function of the structure around a context; `None` if the library or the device has
/// none.
macro_rules! extended {
    ($context:expr, $function:ident) => {
        $crate::verbs::sys::objects::extended::function(
            $context,
            std::mem::offset_of!($crate::verbs::sys::bindings::verbs_context, $function),
            |context: &$crate::verbs::sys::bindings::verbs_context| context.$function,
        )
    };
}
pub(super) use extended;

/// Returns the field at `offset` of the structure around `context`. `_field` only names its type.
///
/// # Safety
/// libibverbs has opened `context`, and it is still open.
#[inline]
pub(super) unsafe fn function<F: Copy>(
    context: *mut ibv_context,
    offset: usize,
    _field: impl FnOnce(&verbs_context) -> Option<F>,
) -> Option<F> {
    // SAFETY: the context is open.
    if unsafe { (*context).abi_compat }.addr() != IS_EXTENDED {
        return None;
    }
    // No reference to the whole structure: memory in front of the library's own version of it is
    // not part of it.
    let start = context.cast::<u8>().wrapping_sub(offset_of!(verbs_context, context));
    let size = start.wrapping_add(offset_of!(verbs_context, sz)).cast::<usize>();
    // SAFETY: every such structure has its size right in front of the context.
    if unsafe { size.read() } < size_of::<verbs_context>() - offset {
        return None;
    }
    // SAFETY: the library's structure reaches from its end to this field, which is a nullable
    // function of this type.
    unsafe { start.wrapping_add(offset).cast::<Option<F>>().read() }
}

#[cfg(test)]
mod tests {
    use super::super::super::bindings::{ibv_device_attr_ex, ibv_query_device_ex_input, ibv_td};
    use super::*;

    unsafe extern "C" fn query(
        _: *mut ibv_context,
        _: *const ibv_query_device_ex_input,
        _: *mut ibv_device_attr_ex,
        _: usize,
    ) -> i32 {
        7
    }

    unsafe extern "C" fn dealloc(_: *mut ibv_td) -> i32 {
        8
    }

    fn context(extended: usize) -> Box<verbs_context> {
        let mut made =
            Box::new(verbs_context { sz: size_of::<verbs_context>(), ..Default::default() });
        made.query_device_ex = Some(query);
        made.dealloc_td = Some(dealloc);
        made.context.abi_compat = std::ptr::without_provenance_mut(extended);
        made
    }

    /// Tells which of two functions are found, the older one first.
    fn found(made: &mut verbs_context) -> [bool; 2] {
        let whole: *mut verbs_context = made;
        // SAFETY: the context lies within a whole structure, whose pointer may reach all of it.
        unsafe {
            let raw = &raw mut (*whole).context;
            [extended!(raw, query_device_ex).is_some(), extended!(raw, dealloc_td).is_some()]
        }
    }

    #[test]
    fn a_context_without_a_structure_around_it_has_no_such_functions() {
        assert_eq!(found(&mut context(0)), [false, false]);
        assert_eq!(found(&mut context(IS_EXTENDED)), [true, true]);
    }

    #[test]
    fn what_a_shorter_structure_does_not_reach_is_not_read() {
        let mut made = context(IS_EXTENDED);
        made.sz = size_of::<verbs_context>() - offset_of!(verbs_context, query_device_ex);
        assert_eq!(found(&mut made), [true, false]);
        made.sz -= 1;
        assert_eq!(found(&mut made), [false, false]);
    }

    #[test]
    fn a_function_that_the_device_has_not_is_none() {
        let mut made = context(IS_EXTENDED);
        made.query_device_ex = None;
        assert_eq!(found(&mut made), [false, true]);
    }
}
