//! Handlers that get the runtime.

use super::Runtime;
use crate::comp::{Handler, Status};
use std::sync::Arc;

impl Runtime {
    /// Returns a handler that calls `function` with this runtime, to post from it. The handler does
    /// not keep the runtime alive; after its end `function` is not called.
    ///
    /// A reply, too, goes over the default device, whichever device its message came over. `device`
    /// names another. Sender and receiver of the reply need progress on that device.
    ///
    /// ```
    /// # use carrack::{Counter, Rank, RemoteComp, Runtime};
    /// # fn main() -> Result<(), carrack::Error> {
    /// const ECHO: RemoteComp = RemoteComp::named("echo");
    /// let runtime = Runtime::builder().start()?;
    /// let echoed = Counter::new();
    /// runtime.register_comp_named("echoed", &echoed)?;
    /// let echo = runtime.handler(|runtime, status| {
    ///     let reply = runtime.post_am(status.rank, status.buffer, RemoteComp::named("echoed"));
    ///     _ = reply.tag(status.tag).submit();
    /// });
    /// runtime.register_comp_named("echo", &echo)?;
    /// runtime.post_am(runtime.rank(), b"hello", ECHO).submit()?;
    /// while echoed.get() == 0 {
    ///     runtime.progress()?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn handler(&self, function: impl Fn(&Self, Status) + Send + Sync + 'static) -> Handler {
        let runtime = Arc::downgrade(&self.0);
        Handler::new(move |status| {
            if let Some(runtime) = runtime.upgrade() {
                function(&Self::of(runtime), status);
            }
        })
    }
}
