//! Many copies in one call, and strided blocks.

use crate::roles::Other;
use crate::support::{MIB, make, need, payload};
use crate::user;
use carrack_transports::gpu::Stream;
use carrack_transports::gpu::cuda::CudaStream;
use carrack_transports::mem::{Region, Strided, Together, Transfer, start_strided};
use std::sync::atomic::{AtomicU32, Ordering};

const ROOM: usize = 2 * MIB;

fn ended(transfer: Transfer) {
    let mut transfer = transfer;
    while transfer.poll().is_none() {
        std::thread::yield_now();
    }
    assert!(transfer.failure().is_none(), "{:?}", transfer.failure());
}

/// Every pair of kinds that an engine reaches by itself. They are of one device and of two, on the
/// library's stream and on one of the program's.
#[test]
fn pieces_and_strided_blocks_arrive_whole_between_all_kinds_and_leave_the_guards_alone() {
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
            Some(gpu) if name != "pinned" => {
                make(gpu, name.trim_end_matches(char::is_numeric), ROOM)
            }
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
                    let (there, here, len) =
                        (at * 512 + 3, (999 - at) * 700 + 1, 1 + at * 13 % 500);
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
                for (count, pitch) in [
                    ([8, 900, 1], [64, 0]),
                    ([24, 30, 20], [128, 128 * 40]),
                    ([24, 30, 20], [128, 4001]),
                ] {
                    let (theirs, ours) = (
                        Strided { offset: 600_000, count, pitch },
                        Strided { offset: 5, count, pitch },
                    );
                    let begun = start_strided((dst, &theirs), (src, &ours), stream.as_deref());
                    ended(begun.unwrap_or_else(|why| panic!("{what}: {why}")).unwrap());
                    for (there, here) in Strided::grid(&theirs, &ours).unwrap().rows() {
                        let (there, here) = (theirs.offset + there, ours.offset + here);
                        wanted[there..there + count[0]]
                            .copy_from_slice(&content[here..here + count[0]]);
                    }
                    assert!(dst.whole().to_vec().unwrap() == wanted, "{what}: {count:?} {pitch:?}");
                }
            }
        }
    }
}

/// A batch reads the results of earlier work on the program's stream, and later work reads the
/// batch's results. The same holds for default streams. The legacy one takes no batch, so a stream
/// next to it takes the batch.
#[test]
fn a_batch_on_a_default_stream_is_behind_what_came_before_it_and_in_front_of_what_comes_after() {
    let Some(_) = need(1) else { return };
    // Alone: waiting streams there delay other tests.
    Other::alone("default streams");
}

/// Gives default streams batches, in the process that the test above starts.
pub fn on_default_streams() {
    const COUNT: usize = 1000;
    let (driver, gpus) = need(1).unwrap();
    let gpu = &gpus[0];
    let [first, second, third, last] = [0; 4].map(|_| make(gpu, "plain", ROOM));
    let flag = make(gpu, "pinned", 8);
    // SAFETY: an aligned word of pinned memory, which the kernel reads and this function writes,
    // as an atomic only.
    let word = unsafe { AtomicU32::from_ptr(flag.addr() as *mut u32) };
    user::set_current(user::primary(0));
    let theirs = user::stream(0);
    // The legacy stream by either name, the thread's default stream, a stream that waits for the
    // legacy one, and one that does not.
    for (turn, raw) in [0, 1, 2, theirs, user::stream(1)].into_iter().enumerate() {
        for is_strided in [false, true] {
            let what = format!("stream {raw:#x}, strided: {is_strided}");
            // SAFETY: a stream that lives to the end of the program, or a default one.
            let stream = unsafe { CudaStream::from_raw(&driver, raw) }.unwrap();
            let content = payload(ROOM, 2 * turn as u64 + u64::from(is_strided));
            first.whole().write(&content).unwrap();
            for region in [&second, &third, &last] {
                region.whole().write(&vec![0; ROOM]).unwrap();
            }
            word.store(0, Ordering::Release);
            user::spin(raw, flag.addr());
            user::copy_async(second.addr(), first.addr(), ROOM, raw);
            let mut wanted = vec![0; ROOM];
            let mut batch = if is_strided {
                let block = Strided { offset: 3, count: [700, COUNT, 1], pitch: [1100, 0] };
                for (to, from) in Strided::grid(&block, &block).unwrap().rows() {
                    wanted[3 + to..3 + to + 700]
                        .copy_from_slice(&content[3 + from..3 + from + 700]);
                }
                start_strided((&third, &block), (&second, &block), Some(&stream)).unwrap().unwrap()
            } else {
                let mut together = Together::between(&third, &second, COUNT).unwrap();
                for at in 0..COUNT {
                    let (there, here, len) =
                        (at * 1024 + 3, (COUNT - 1 - at) * 1300 + 1, 1 + at * 13 % 900);
                    assert!(together.push((&third, there), (&second, here), len));
                    wanted[there..there + len].copy_from_slice(&content[here..here + len]);
                }
                together.start_on(&stream).unwrap()
            };
            user::copy_async(last.addr(), third.addr(), ROOM, raw);
            for _ in 0..1000 {
                assert!(batch.poll().is_none(), "{what}: it did not wait for what came before it");
            }
            word.store(1, Ordering::Release);
            user::synchronize(raw);
            ended(batch);
            assert!(third.whole().to_vec().unwrap() == wanted, "{what}: the batch");
            assert!(last.whole().to_vec().unwrap() == wanted, "{what}: what came after it");
            stream.synchronize().unwrap();
        }
    }
}
