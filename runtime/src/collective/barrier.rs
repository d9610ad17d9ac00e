//! The barrier: it ends when all members have called it.

use super::call::CollectiveCall;
use super::group::Group;
use crate::boards::CollectiveKind;
use crate::error::CollectiveError;
use crate::names::Rank;
use std::future::Future;

impl Group {
    /// Returns once every member has called it. Makes progress meanwhile, and does not burn a core.
    ///
    /// Dissemination (Hensgen, Finkel and Manber, 1988): in round k each member tells the one 2^k
    /// places on, so ⌈log₂ n⌉ messages a member. It does not order earlier messages, which may
    /// still be in flight.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        let call = CollectiveCall::begin_blocking(self, CollectiveKind::Barrier, Rank(0))?;
        let mut steps = (0..).map_while(|step| Some((step, partners(&call, step)?)));
        let here = call.revoke().and_then(|()| {
            steps.try_for_each(|(step, (to, from))| {
                call.tell(to, step, 0);
                call.hear_tick(from, step)
            })
        });
        call.conclude(here)
    }

    /// Returns the future of a [`barrier`](Self::barrier). It takes its place among the group's
    /// operations when this is called.
    pub fn barrier_async(&self) -> impl Future<Output = Result<(), CollectiveError>> {
        let call = CollectiveCall::begin(self, CollectiveKind::Barrier, Rank(0));
        async move {
            let call = call?;
            call.run(barrier(&call)).await
        }
    }
}

/// Returns the member to notify in a step, and the one to wait for. `None`: there is no such step.
fn partners(call: &CollectiveCall<'_>, step: u32) -> Option<(u32, u32)> {
    let (place, count) = (u64::from(call.place()), u64::from(call.count()));
    let distance = 1_u64.checked_shl(step).filter(|&distance| distance < count)?;
    // Both are below the number of members, which is a u32.
    Some((((place + distance) % count) as u32, ((place + count - distance) % count) as u32))
}

async fn barrier(call: &CollectiveCall<'_>) -> Result<(), CollectiveError> {
    let mut step = 0;
    call.revoked().await?;
    while let Some((to, from)) = partners(call, step) {
        call.tell(to, step, 0);
        call.hear(from, step).await?;
        step += 1;
    }
    Ok(())
}
