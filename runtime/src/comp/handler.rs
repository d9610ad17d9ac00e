//! A function that is called.

use super::{AsCompletion, Completion, Status};
use std::sync::Arc;

/// Calls a function with each status, on the thread that makes progress.
#[derive(Clone)]
pub struct Handler(Arc<dyn Completion>);

struct Function<F>(F);

impl<F: Fn(Status) + Send + Sync> Completion for Function<F> {
    fn signal(&self, status: Status) -> Result<(), Status> {
        (self.0)(status);
        Ok(())
    }

    fn describe(&self) -> String {
        "a handler".into()
    }
}

impl Handler {
    /// Around `function`.
    pub fn new(function: impl Fn(Status) + Send + Sync + 'static) -> Self {
        Self(Arc::new(Function(function)))
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
