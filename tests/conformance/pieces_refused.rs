//! Batches of many pieces, one of which is wrong.

use super::pieces::{Memory, PieceFixture};
use crate::support::*;
use carrack::{Piece, PostError, Rank};

crate::support::over_each_transport_and!(
    copiers,
    WithCopiers;
    one_of_many_that_is_wrong_is_named_wherever_it_stands_and_none_is_moved,
);

/// They are looked at in blocks, in which nothing is decided for one.
fn one_of_many_that_is_wrong_is_named_wherever_it_stands_and_none_is_moved<J: Job>() {
    const COUNT: usize = 200;
    const ROOM: usize = COUNT * 16;
    let fixture = PieceFixture::new::<J>();
    let zero = &fixture.ranks[0];
    for (memory, mapped) in [(Memory::Host, true), (Memory::Host, false), (Memory::Gpu, true)] {
        let (local, remote) = (fixture.local(memory, ROOM), fixture.remote(memory, mapped, ROOM));
        local.whole().write(&[1; ROOM]).unwrap();
        remote.region.whole().write(&[0; ROOM]).unwrap();
        let piece = |at: usize| Piece {
            local: &local,
            range: 16 * at..16 * at + 8,
            rmr: &remote.rmr,
            offset: 16 * at as u64,
        };
        // In the order of their targets, against it, and in none.
        for order in [|at| at, |at| COUNT - 1 - at, |at| at * 77 % COUNT] {
            let pieces: Vec<_> = (0..COUNT).map(|at| piece(order(at))).collect();
            for wrong in [0, 1, 63, 64, 65, 127, 128, 191, 192, COUNT - 1] {
                let refused = |bad: Piece<'_>| {
                    let mut pieces = pieces.clone();
                    pieces[wrong] = bad;
                    zero.post_put_batch(Rank(1), &pieces).try_submit().unwrap_err()
                };
                let good = pieces[wrong].clone();
                let room = ROOM as u64;
                for offset in [room - 7, room + 1, u64::MAX, u64::MAX - 7, 1 << 63] {
                    let why = refused(Piece { offset, ..good.clone() });
                    let PostError::Piece { at, cause } = why else { panic!("{why}") };
                    let is_named = matches!(
                        *cause,
                        PostError::Outside { offset: named, .. } if named == offset
                    );
                    assert!(
                        at == wrong && is_named,
                        "{memory:?}, {wrong}, {offset}: {at}, {cause}"
                    );
                }
                #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
                for range in
                    [ROOM - 7..ROOM + 1, 9..8, usize::MAX - 7..1, 0..usize::MAX, 1 << 63..ROOM]
                {
                    let why = refused(Piece { range: range.clone(), ..good.clone() });
                    let PostError::Piece { at, cause } = why else { panic!("{why}") };
                    let is_named = matches!(
                        &*cause,
                        PostError::OutsideLocal { range: named, .. } if *named == range
                    );
                    assert!(
                        at == wrong && is_named,
                        "{memory:?}, {wrong}, {range:?}: {at}, {cause}"
                    );
                }
                for other in [(wrong + 1) % COUNT, (wrong + 64) % COUNT] {
                    let offset = pieces[other].offset + 7;
                    let why = refused(Piece { offset, ..good.clone() });
                    let pair = (wrong.min(other), wrong.max(other));
                    assert!(
                        matches!(
                            why,
                            PostError::Overlap { first, second } if (first, second) == pair
                        ),
                        "{memory:?}, {pair:?}: {why}"
                    );
                }
            }
        }
        settle(&fixture.ranks);
        assert_eq!(
            remote.region.whole().to_vec().unwrap(),
            [0; ROOM],
            "{memory:?}: nothing was moved"
        );
    }
}
