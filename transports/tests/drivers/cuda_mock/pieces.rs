//! Many copies in one call, on drivers that have such a call, have its first form, have none, or
//! refuse it.

use crate::mock::{library as mock, open, word};
use carrack_transports::gpu::cuda::CudaStream;
use carrack_transports::gpu::{Driver, Flavour, Gpu, Stream};
use carrack_transports::mem::{CopyError, Region, Strided, Together, Transfer, start_strided};
use std::path::PathBuf;
use std::sync::Arc;

struct PiecesFixture {
    library: PathBuf,
    gpu: Arc<dyn Gpu>,
    from: Region,
    to: Region,
    bytes: Vec<u8>,
}

const ROOM: usize = 2 << 20;

impl PiecesFixture {
    fn new(test: &str, define: &str) -> Self {
        let library = mock(test, define);
        let gpu = open(&library).devices().unwrap().remove(0);
        let bytes: Vec<u8> = (0..ROOM).map(|at| (at % 251) as u8).collect();
        let region = || gpu.allocate(ROOM, Flavour::Plain).unwrap();
        let (from, to) = (region(), region());
        from.whole().write(&bytes).unwrap();
        Self { library, gpu, from, to, bytes }
    }

    /// Returns the numbers of calls for many copies, for rows, and for one copy each.
    fn calls(&self) -> [i32; 3] {
        ["mock_batches", "mock_grids", "mock_copies"].map(|name| word(&self.library, name))
    }

    /// Copies pieces, as (to, from, bytes), into a target of 0xee, and returns the calls that it
    /// took.
    fn copy(
        &self,
        pieces: &[(usize, usize, usize)],
        stream: Option<&dyn Stream>,
    ) -> Result<[i32; 3], CopyError> {
        let mut wanted = vec![0xee; ROOM];
        self.to.whole().write(&wanted).unwrap();
        let before = self.calls();
        let mut together = Together::between(&self.to, &self.from, pieces.len()).unwrap();
        for &(to, from, len) in pieces {
            assert!(together.push((&self.to, to), (&self.from, from), len));
            wanted[to..to + len].copy_from_slice(&self.bytes[from..from + len]);
        }
        self.ended(match stream {
            Some(stream) => together.start_on(stream),
            None => together.start(),
        }?);
        let after = self.calls();
        assert!(self.to.whole().to_vec().unwrap() == wanted);
        Ok([0, 1, 2].map(|at| after[at] - before[at]))
    }

    /// Does the same for a strided block.
    fn block(&self, to: Strided, from: Strided) -> [i32; 3] {
        let mut wanted = vec![0xee; ROOM];
        self.to.whole().write(&wanted).unwrap();
        let before = self.calls();
        let len = to.count[0];
        for (dst, src) in Strided::grid(&to, &from).unwrap().rows() {
            let (dst, src) = (to.offset + dst, from.offset + src);
            wanted[dst..dst + len].copy_from_slice(&self.bytes[src..src + len]);
        }
        self.ended(start_strided((&self.to, &to), (&self.from, &from), None).unwrap().unwrap());
        let after = self.calls();
        assert!(self.to.whole().to_vec().unwrap() == wanted, "{to:?} {from:?}");
        [0, 1, 2].map(|at| after[at] - before[at])
    }

    fn ended(&self, mut transfer: Transfer) {
        // The mock's streams are queried several times before they report that they are done.
        let mut asked = 0;
        while transfer.poll().is_none() {
            asked += 1;
            assert!(asked < 10);
        }
        assert!(asked > 0 && transfer.failure().is_none());
        assert_eq!(
            word(&self.library, "mock_depth"),
            0,
            "every way out restores the caller's context"
        );
    }
}

/// Returns pieces of 64 bytes in no order.
fn scattered(count: usize) -> Vec<(usize, usize, usize)> {
    (0..count).map(|at| (at * 7919 % count * 128, at * 104_729 % count * 96, 64)).collect()
}

#[test]
fn a_thousand_pieces_are_one_call_of_either_form() {
    for (define, call) in
        [("-DNEW", "cuMemcpyBatchAsync_v2"), ("-DOLD_BATCH", "cuMemcpyBatchAsync")]
    {
        let fixture = PiecesFixture::new(&format!("batch{define}"), define);
        assert_eq!(fixture.copy(&scattered(1000), None).unwrap(), [1, 0, 0], "{define}");
        let stream = fixture.gpu.stream().unwrap();
        assert_eq!(fixture.copy(&scattered(1000), Some(&*stream)).unwrap(), [1, 0, 0], "{define}");
        assert_eq!(
            fixture.gpu.how_pieces_go(),
            format!("by one call of {call}, however many they are")
        );
        // A single piece needs no list, and pieces of no bytes are left out.
        assert_eq!(fixture.copy(&[(5, 7, 9), (100, 100, 0)], None).unwrap(), [0, 0, 1]);
    }
}

#[test]
fn the_legacy_default_stream_takes_no_batch_and_waits_for_one_on_another_stream() {
    let fixture = PiecesFixture::new("legacy", "-DNEW");
    let driver = open(&fixture.library);
    let mut streams = None;
    for raw in [0, 1] {
        word(&fixture.library, "mock_enter");
        // SAFETY: CUDA's names of a stream that every context has.
        let stream = unsafe { CudaStream::from_raw(&driver, raw) }.unwrap();
        word(&fixture.library, "mock_leave");
        for _ in 0..2 {
            assert_eq!(fixture.copy(&scattered(1000), Some(&stream)).unwrap(), [1, 0, 0]);
            // Behind the stream's earlier work and in front of its later work, with the event of
            // the end.
            assert_eq!(word(&fixture.library, "mock_course"), 12_341);
            let made = word(&fixture.library, "mock_streams");
            assert_eq!(*streams.get_or_insert(made), made, "one next to it for all of them");
        }
        assert!(fixture.gpu.how_pieces_go().contains("however many"));
    }
    // The pieces of a refused batch are copied one by one behind it, as it may have begun some.
    word(&fixture.library, "mock_refuse_batches");
    word(&fixture.library, "mock_enter");
    // SAFETY: as above.
    let stream = unsafe { CudaStream::from_raw(&driver, 0) }.unwrap();
    word(&fixture.library, "mock_leave");
    let calls = fixture.copy(&scattered(100), Some(&stream)).unwrap();
    assert!(calls[0] == 1 && calls[1] + calls[2] > 1, "{calls:?}");
    assert_eq!(word(&fixture.library, "mock_course"), 12_341);
}

#[test]
fn a_driver_without_the_call_is_given_rows_at_equal_distances_together_and_all_others_singly() {
    let fixture = PiecesFixture::new("no-batch", "-DNO_BATCH");
    let column: Vec<_> = (0..1000).map(|at| (at * 128, at * 96, 64)).collect();
    assert_eq!(fixture.copy(&column, None).unwrap(), [0, 1, 0]);
    let mixed = [&column[..500], &[(200_000, 5, 3), (150_000, 90, 8)]].concat();
    assert_eq!(fixture.copy(&mixed, None).unwrap(), [0, 1, 2]);
    // Farther apart than the driver allows.
    assert_eq!(fixture.copy(&[(0, 0, 64), (ROOM - 64, 64, 64)], None).unwrap(), [0, 1, 2]);
    let how = fixture.gpu.how_pieces_go();
    assert!(how.contains("one by one") && how.contains("CUDA 12.8"), "{how}");

    let fixture = PiecesFixture::new("no-rows", "-DNO_ROWS");
    assert_eq!(fixture.copy(&column, None).unwrap(), [0, 0, 1000]);
}

#[test]
fn a_driver_that_refuses_the_call_is_not_asked_again_and_says_so() {
    let fixture = PiecesFixture::new("refused", "-DNEW");
    word(&fixture.library, "mock_refuse_batches");
    assert_eq!(fixture.copy(&scattered(100), None).unwrap()[0], 1);
    assert_eq!(fixture.copy(&scattered(100), None).unwrap()[0], 0);
    let how = fixture.gpu.how_pieces_go();
    assert!(how.contains("one by one") && how.contains("801"), "{how}");
}

#[test]
fn an_error_of_the_copies_themselves_is_told_and_not_tried_otherwise() {
    let fixture = PiecesFixture::new("broken", "-DNEW");
    word(&fixture.library, "mock_break_batches");
    let before = fixture.calls();
    let error = fixture.copy(&scattered(100), None).unwrap_err();
    assert!(matches!(&error, CopyError::Engine { cause, .. } if cause.code == 700), "{error}");
    let after = fixture.calls();
    assert_eq!(after[2] - before[2], 1, "the test's own");
}

#[test]
fn strided_blocks_of_all_dimensions_are_one_call() {
    let fixture = PiecesFixture::new("strided", "-DNEW");
    let block = |offset, count, pitch| Strided { offset, count, pitch };
    for (to, from, calls) in [
        // One row, two dimensions either way, three dimensions.
        (block(3, [100, 1, 1], [0, 0]), block(9, [100, 1, 1], [5, 5]), [0, 0, 1]),
        (block(3, [8, 100, 1], [64, 0]), block(9, [8, 100, 1], [32, 0]), [0, 1, 0]),
        (block(3, [8, 1, 50], [0, 64]), block(9, [8, 1, 50], [9, 32]), [0, 1, 0]),
        (block(3, [8, 10, 12], [64, 6400]), block(9, [8, 10, 12], [32, 320]), [0, 1, 0]),
        // Planes that are no whole number of rows apart, and rows farther apart than the driver
        // allows, as a list of rows.
        (block(3, [8, 10, 12], [64, 6401]), block(9, [8, 10, 12], [32, 320]), [1, 0, 0]),
        (block(3, [8, 2, 1], [(1 << 20) + 1, 0]), block(9, [8, 2, 1], [32, 0]), [1, 1, 0]),
    ] {
        assert_eq!(fixture.block(to, from), calls, "{to:?} {from:?}");
    }
    let none = block(0, [0, 4, 4], [0, 0]);
    let mut nothing =
        start_strided((&fixture.to, &none), (&fixture.from, &none), None).unwrap().unwrap();
    assert!(nothing.poll().unwrap().is_ok());
}
