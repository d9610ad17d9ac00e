//! A function that is called.

use super::{AsCompletion, Completion, Status};
use std::sync::Arc;

/// Calls a function with each status, on the thread that makes progress.
#[derive(Clone)]
pub struct Handler(Arc<dyn Completion>);

struct Function<F, const LOANS: bool>(F);

impl<F: Fn(Status) + Send + Sync, const LOANS: bool> Completion for Function<F, LOANS> {
    fn signal(&self, status: Status) -> Result<(), Status> {
        (self.0)(status);
        Ok(())
    }

    fn takes_loans(&self) -> bool {
        LOANS
    }

    fn describe(&self) -> String {
        "a handler".into()
    }
}

impl Handler {
    /// Returns a handler that calls `function`.
    pub fn new(function: impl Fn(Status) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Function::<_, false>(function)))
    }

    /// Returns a handler as `new` does, for a function that also takes loans: see
    /// [`Completion::takes_loans`].
    pub fn of_loans(function: impl Fn(Status) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Function::<_, true>(function)))
    }
}

impl AsCompletion for Handler {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.0
    }
}

impl std::fmt::Debug for Handler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handler")
    }
}
