//! Everybody is here.

use super::board::What;
use super::call::Call;
use super::group::Group;
use crate::error::CollectiveError;
use crate::names::Rank;
use std::future::Future;

impl Group {
    /// Returns once every member has called it. Makes progress meanwhile, and does not burn a core.
    ///
    /// Dissemination (Hensgen, Finkel and Manber, 1988): in round k each member tells the one 2^k places on, so ⌈log₂ n⌉
    /// messages a member. It says nothing of messages sent before: they may still be on their way.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        let call = Call::begin(self, What::Barrier, Rank(0));
        call.block(barrier(&call))
    }

    /// As [`barrier`](Self::barrier), to be awaited. It takes its place among the group's operations when this is called.
    pub fn barrier_async(&self) -> impl Future<Output = Result<(), CollectiveError>> {
        let call = Call::begin(self, What::Barrier, Rank(0));
        async move { call.run(barrier(&call)).await }
    }
}

async fn barrier(call: &Call<'_>) -> Result<(), CollectiveError> {
    let (place, count) = (u64::from(call.place()), u64::from(call.count()));
    let mut step = 0;
    while 1 << step < count {
        let distance = 1 << step;
        // Both are below the number of members, which is a u32.
        call.tell(((place + distance) % count) as u32, step, 0);
        call.hear(((place + count - distance) % count) as u32, step).await?;
        step += 1;
    }
    Ok(())
}
