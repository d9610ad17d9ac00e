//! `carrack perf`: latency, bandwidth and message rate between two ranks, and barriers of any
//! number.
//!
//! Rank 0 measures and prints; the others follow its orders. All know the same list of points from
//! the same command line, so an order is a few bytes. A point is measured in rounds: short ones
//! until it is known how many messages fill the time asked for, then the one that counts.
//!
//! In the order in which a run passes through:
//!
//! | module | idea |
//! |---|---|
//! | [`options`] | the command line |
//! | [`benchmark`] | **the table**: names, tests, sizes, round and check of each operation |
//! | [`sides`] | which memory each rank has |
//! | [`plan`] | the points to measure, checked against what the runtime can do |
//! | [`start`] | source of the two ranks: this command again, a launcher, or two threads |
//! | [`order`] | orders of rank 0 to the others |
//! | [`session`] | one rank: its seats, and the points one after another |
//! | [`memory`] | host, pinned or GPU memory, to send from and to receive into |
//! | [`place`] | CPU of each thread, and its way of waiting |
//! | [`seat`] | one thread's place: a device of its own, and its way of waiting |
//! | [`measure`] | **the measuring loop**: a thread for each seat, ping-pongs and streams |
//! | [`mod@line`] | what the loop does over and over: messages, operations of one side, copies |
//! | [`window`] | memory of both ranks that the other one reads and writes |
//! | [`barrier`] | the same of all ranks |
//! | [`tally`] | completion objects: a counter for the cost of a store, memory for large messages |
//! | [`check`] | a random payload there and back, compared to the last byte |
//! | [`figures`] | figures of a round |
//! | [`record`] | a point's result, as a line of JSON and as a row |
//! | [`osu`] | `carrack put_get_bench`: the same in the form of the OSU benchmarks |
//! | [`plot`] | charts |
//! | [`error`] | what can go wrong |

mod barrier;
mod benchmark;
mod check;
mod error;
mod figures;
mod line;
mod measure;
mod memory;
mod options;
mod order;
mod osu;
mod place;
mod plan;
pub(crate) mod plot;
mod record;
mod seat;
mod session;
mod sides;
mod start;
mod tally;
mod window;

pub(crate) use options::PerfOptions;
pub(crate) use osu::{OsuOptions, put_get_bench};
pub(crate) use start::perf;
