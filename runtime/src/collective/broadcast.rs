//! Broadcast: the bytes of one member, at every member.

use super::call::CollectiveCall;
use super::group::Group;
use crate::boards::CollectiveKind;
use crate::error::CollectiveError;
use crate::names::Rank;
use bytes::Bytes;
use std::future::Future;

impl Group {
    /// Returns the bytes of `root` at every member. The bytes of other members are ignored; an
    /// empty slice suffices.
    ///
    /// A binomial tree: ⌈log₂ n⌉ rounds. In each round every member with the bytes passes them on
    /// to one without.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn broadcast(&self, root: Rank, bytes: &[u8]) -> Result<Vec<u8>, CollectiveError> {
        self.check_root(root)?;
        let call = CollectiveCall::begin_blocking(self, CollectiveKind::Broadcast, root)?;
        call.block(broadcast(&call, root, bytes.to_vec().into()))
    }

    /// Returns the future of a [`broadcast`](Self::broadcast). It takes its place among the
    /// group's operations when this is called.
    pub fn broadcast_async(
        &self,
        root: Rank,
        bytes: impl Into<Bytes>,
    ) -> impl Future<Output = Result<Vec<u8>, CollectiveError>> {
        let bytes = bytes.into();
        let call = self
            .check_root(root)
            .and_then(|()| CollectiveCall::begin(self, CollectiveKind::Broadcast, root));
        async move {
            let call = call?;
            call.run(broadcast(&call, root, bytes)).await
        }
    }

    fn check_root(&self, root: Rank) -> Result<(), CollectiveError> {
        match self.board.members().place(root) {
            Some(_) => Ok(()),
            None => Err(CollectiveError::Root { rank: root, group: self.name() }),
        }
    }
}

async fn broadcast(
    call: &CollectiveCall<'_>,
    root: Rank,
    bytes: Bytes,
) -> Result<Vec<u8>, CollectiveError> {
    let count = u64::from(call.count());
    let start = u64::from(call.place_of(root).unwrap_or(0));
    let at = |place: u64| ((start + place) % count) as u32;
    // Places counted from the root: a member's parent is its own place without its lowest bit, its
    // children's have one bit more.
    let mine = (u64::from(call.place()) + count - start) % count;
    let lowest = if mine == 0 { count.next_power_of_two() } else { mine & mine.wrapping_neg() };
    let bytes = if mine == 0 {
        bytes
    } else {
        let parent = at(mine - lowest);
        let size = call.hear(parent, 0).await?;
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        if size == 0 { Bytes::new() } else { call.receive(parent, 0, size).await?.into() }
    };
    let mut bit = lowest >> 1;
    while bit > 0 {
        if mine + bit < count {
            let child = at(mine + bit);
            call.revoked().await?;
            call.tell(child, 0, bytes.len() as u64);
            if !bytes.is_empty() {
                call.send(child, 0, bytes.clone()).await?;
            }
        }
        bit >>= 1;
    }
    // If the root's bytes have other holders, this is the only copy.
    Ok(bytes.into())
}
