//! The options of an operation, apart from its kind.

use crate::comp::Completion;
use crate::datapath::Device;
use crate::deadline::Deadline;
use crate::names::{Rank, Tag, UserContext};
use crate::op::OpContext;
use std::sync::Arc;

/// The options that all kinds of operations share.
#[derive(Clone, Copy)]
pub(super) struct OpDesc<'a> {
    pub(super) rank: Rank,
    pub(super) tag: Tag,
    /// `None`: the runtime's default device.
    pub(super) device: Option<&'a Device>,
    pub(super) comp: Option<&'a Arc<dyn Completion>>,
    pub(super) user_context: UserContext,
    pub(super) mode: Mode,
    pub(super) required: Option<&'static str>,
    pub(super) deadline: Deadline,
}

impl<'a> OpDesc<'a> {
    #[inline(always)]
    pub(super) fn new(rank: Rank, tag: Tag) -> Self {
        Self {
            rank,
            tag,
            device: None,
            comp: None,
            user_context: UserContext::default(),
            mode: Mode::TRY,
            required: None,
            deadline: Deadline::NEVER,
        }
    }

    /// Returns the options of an operation that tells `comp` of its end, and may be retried.
    pub(super) fn telling<'b>(self, comp: &'b Arc<dyn Completion>) -> OpDesc<'b>
    where
        'a: 'b,
    {
        OpDesc { comp: Some(comp), mode: Mode::TRY, ..self }
    }

    /// Returns the context of the operation.
    #[inline]
    pub(super) fn context(&self, size: usize, comp: Option<Arc<dyn Completion>>) -> OpContext {
        let Self { rank, tag, user_context, deadline, .. } = *self;
        OpContext { rank, tag, size, user_context, comp, deadline }
    }
}

/// The verb that posts the operation, and marks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Mode(u8);

impl Mode {
    /// The mode of `try_submit`.
    pub(super) const TRY: Self = Self(0);
    /// `submit`.
    pub(super) const SUBMIT: u8 = 1;
    /// `wait`.
    pub(super) const WAIT: u8 = 2;
    /// Mark: other operations follow at once.
    pub(super) const MORE: u8 = 8;
    /// Mark: the post came to `Done` or `Posted`.
    pub(super) const SPENT: u8 = 16;
    /// Mark: the device is another runtime's.
    pub(super) const FOREIGN_DEVICE: u8 = 32;
    /// Mark: the matching engine is another runtime's.
    pub(super) const FOREIGN_ENGINE: u8 = 64;

    #[inline(always)]
    fn has(self, mark: u8) -> bool {
        self.0 & mark != 0
    }

    #[inline(always)]
    pub(super) fn set(&mut self, mark: u8, is_set: bool) {
        self.0 = self.0 & !mark | if is_set { mark } else { 0 };
    }

    /// Returns `true` for `try_submit` of an operation that is not spent.
    #[inline(always)]
    pub(super) fn is_ordinary(self) -> bool {
        self.0 & !Self::MORE == 0
    }

    /// Returns `true` if the completion object is told even of an end within the call, and an
    /// operation that cannot go now is queued.
    #[inline(always)]
    pub(super) fn submits(self) -> bool {
        self.has(Self::SUBMIT)
    }

    /// Returns `true` if the call ends when the operation has.
    #[inline(always)]
    pub(super) fn waits(self) -> bool {
        self.has(Self::WAIT)
    }

    /// Returns `true` if the outcome may be `Retry`.
    #[inline(always)]
    pub(super) fn may_retry(self) -> bool {
        !self.has(Self::SUBMIT | Self::WAIT)
    }

    #[inline(always)]
    pub(super) fn has_more(self) -> bool {
        self.has(Self::MORE)
    }

    #[inline(always)]
    pub(super) fn is_foreign(self) -> bool {
        self.has(Self::FOREIGN_DEVICE | Self::FOREIGN_ENGINE)
    }

    #[inline(always)]
    pub(super) fn is_spent(self) -> bool {
        self.has(Self::SPENT)
    }

    #[inline(always)]
    pub(super) fn spend(&mut self) {
        self.set(Self::SPENT, true);
    }
}
