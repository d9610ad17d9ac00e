//! Allgather: the bytes of each member, at every member.

use super::call::CollectiveCall;
use super::group::Group;
use crate::boards::CollectiveKind;
use crate::error::CollectiveError;
use crate::names::Rank;
use std::future::Future;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

impl Group {
    /// Returns each member's bytes, in the group's order. All must contribute the same number of
    /// bytes.
    ///
    /// Bruck's algorithm (1997), ⌈log₂ n⌉ rounds: in round k each member passes all it has, up to
    /// 2^k contributions, to the one 2^k places back.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn allgather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let call = CollectiveCall::begin_blocking(self, CollectiveKind::Allgather, Rank(0))?;
        call.block(allgather(&call, mine.to_vec()))
    }

    /// Returns each member's bytes, in the group's order. The numbers of bytes may differ.
    ///
    /// A first [`allgather`](Self::allgather) carries the lengths, a second one the bytes, padded
    /// with zeros to the longest.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn allgatherv(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let lengths = self.allgather(U64::new(mine.len() as u64).as_bytes())?;
        let length = |bytes: &Vec<u8>| U64::read_from_bytes(bytes).map_or(0, U64::get);
        let lengths: Vec<_> =
            lengths.iter().map(|len| usize::try_from(length(len)).unwrap_or(usize::MAX)).collect();
        let ranked = lengths.iter().copied().zip(self.ranks());
        let (len, rank) = ranked.max_by_key(|(len, _)| *len).unwrap_or((0, Rank(0)));
        let mut padded = Vec::new();
        if padded.try_reserve_exact(len).is_err() {
            let error = CollectiveError::TooLong { rank, len };
            self.abandon(&error);
            return Err(error);
        }
        padded.extend_from_slice(mine);
        padded.resize(len, 0);
        let mut all = self.allgather(&padded)?;
        all.iter_mut().zip(lengths).for_each(|(bytes, len)| bytes.truncate(len));
        Ok(all)
    }

    /// Returns the future of an [`allgather`](Self::allgather). It takes its place among the
    /// group's operations when this is called.
    pub fn allgather_async<'g>(
        &'g self,
        mine: &[u8],
    ) -> impl Future<Output = Result<Vec<Vec<u8>>, CollectiveError>> + use<'g> {
        let call = CollectiveCall::begin(self, CollectiveKind::Allgather, Rank(0));
        let mine = mine.to_vec();
        async move {
            let call = call?;
            call.run(allgather(&call, mine)).await
        }
    }
}

async fn allgather(
    call: &CollectiveCall<'_>,
    mine: Vec<u8>,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let (place, count) = (u64::from(call.place()), u64::from(call.count()));
    let each = mine.len();
    call.contributes(each);
    call.revoked().await?;
    // Contributions from this place on, round the ring: the i-th is that of the member i places on.
    let mut have = mine;
    let (mut step, mut distance) = (0, 1_u64);
    while distance < count {
        let passed = distance.min(count - distance) as usize;
        let (from, to) = ((place + distance) % count, (place + count - distance) % count);
        let (from, to) = (from as u32, to as u32);
        call.tell(to, step, each as u64);
        let theirs = usize::try_from(call.hear(from, step).await?).unwrap_or(usize::MAX);
        if theirs != each {
            return Err(CollectiveError::Uneven { rank: call.rank(from), theirs, ours: each });
        }
        if each > 0 {
            let bytes = have[..each * passed].to_vec();
            let expected = call.receive(from, step, each * passed);
            let got = both(call.send(to, step, bytes.into()), expected).await?;
            have.extend(got);
        }
        step += 1;
        distance *= 2;
    }
    let count = count as usize;
    Ok((0..count)
        .map(|of| {
            let at = (of + count - place as usize) % count;
            have[at * each..(at + 1) * each].to_vec()
        })
        .collect())
}

/// Sends and receives at the same time: a ring of members that each sent first would wait for each
/// other.
async fn both<T>(
    send: impl Future<Output = Result<(), CollectiveError>>,
    receive: impl Future<Output = Result<T, CollectiveError>>,
) -> Result<T, CollectiveError> {
    use std::task::Poll;
    let (mut send, mut receive) = (std::pin::pin!(send), std::pin::pin!(receive));
    let (mut sent, mut received) = (false, None);
    std::future::poll_fn(|context| {
        if !sent && let Poll::Ready(ended) = send.as_mut().poll(context) {
            if let Err(error) = ended {
                return Poll::Ready(Err(error));
            }
            sent = true;
        }
        if received.is_none()
            && let Poll::Ready(ended) = receive.as_mut().poll(context)
        {
            match ended {
                Ok(bytes) => received = Some(bytes),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        match received.take() {
            Some(bytes) if sent => Poll::Ready(Ok(bytes)),
            other => {
                received = other;
                Poll::Pending
            }
        }
    })
    .await
}
