//! Many copies in one call, and faces.

use crate::support::{MIB, make, need, payload};
use carrack_transports::mem::{Face, Region, Together, Transfer, start_face};

const ROOM: usize = 2 * MIB;

fn ended(transfer: Transfer) {
    let mut transfer = transfer;
    while transfer.poll().is_none() {
        std::thread::yield_now();
    }
    assert!(transfer.failure().is_none(), "{:?}", transfer.failure());
}

/// Every pair of kinds that an engine reaches by itself, of one device and of two, on the library's stream and on one of the program's.
#[test]
fn pieces_and_faces_arrive_whole_between_all_kinds_and_leave_the_guards_alone() {
    let Some((_, gpus)) = need(1) else { return };
    println!("pieces of a batch go {}", gpus[0].how_pieces_go());
    let mut places = vec![("pinned".to_owned(), make(&gpus[0], "pinned", ROOM))];
    for gpu in gpus.iter().take(2) {
        for kind in ["plain", "shareable", "pooled"] {
            places.push((format!("{kind}{}", gpu.info().ordinal), make(gpu, kind, ROOM)));
        }
    }
    let twins: Vec<Region> = places
        .iter()
        .map(|(name, region)| match region.gpu() {
            Some(gpu) if name != "pinned" => make(gpu, name.trim_end_matches(char::is_numeric), ROOM),
            _ => make(&gpus[0], "pinned", ROOM),
        })
        .collect();
    let mut seed = 1;
    for (to, dst) in &places {
        for ((from, _), src) in places.iter().zip(&twins) {
            if to == "pinned" && from == "pinned" {
                continue;
            }
            for on_stream in [false, true] {
                let what = format!("{from} to {to}, on a stream: {on_stream}");
                seed += 2;
                let (content, mut wanted) = (payload(ROOM, seed), payload(ROOM, seed + 1));
                src.whole().write(&content).unwrap();
                dst.whole().write(&wanted).unwrap();
                let mut together = Together::between(dst, src, 1000).unwrap();
                let engine = dst.gpu().filter(|_| to != "pinned").or(src.gpu()).unwrap();
                let stream = on_stream.then(|| engine.stream().unwrap());
                for at in 0..1000 {
                    let (there, here, len) = (at * 512 + 3, (999 - at) * 700 + 1, 1 + at * 13 % 500);
                    assert!(together.push((dst, there), (src, here), len));
                    wanted[there..there + len].copy_from_slice(&content[here..here + len]);
                }
                let begun = match &stream {
                    Some(stream) => together.start_on(&**stream),
                    None => together.start(),
                };
                ended(begun.unwrap_or_else(|why| panic!("{what}: {why}")));
                assert!(dst.whole().to_vec().unwrap() == wanted, "{what}: pieces");
                // Two dimensions, three, and planes that are no whole number of rows apart.
                for (count, pitch) in
                    [([8, 900, 1], [64, 0]), ([24, 30, 20], [128, 128 * 40]), ([24, 30, 20], [128, 4001])]
                {
                    let (theirs, ours) =
                        (Face { offset: 600_000, count, pitch }, Face { offset: 5, count, pitch });
                    let begun = start_face((dst, &theirs), (src, &ours), stream.as_deref());
                    ended(begun.unwrap_or_else(|why| panic!("{what}: {why}")).unwrap());
                    for (there, here) in Face::grid(&theirs, &ours).unwrap().rows() {
                        let (there, here) = (theirs.offset + there, ours.offset + here);
                        wanted[there..there + count[0]].copy_from_slice(&content[here..here + count[0]]);
                    }
                    assert!(dst.whole().to_vec().unwrap() == wanted, "{what}: {count:?} {pitch:?}");
                }
            }
        }
    }
}
