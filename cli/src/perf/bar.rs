//! Progress on stderr, drawn between measurements only.

use super::plan::Point;
use super::table::size_in_words;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar with a step for each point. It has no thread and draws only when it is called, so that it
/// disturbs no measurement; it is not drawn at all when stderr is no terminal.
pub(super) struct Bar(ProgressBar);

impl Bar {
    /// Creates a bar for this number of points.
    pub(super) fn new(points: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(points as u64), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// A point begins.
    pub(super) fn begin(&self, point: Point) {
        let Point { op, test, size, threads, .. } = point;
        let size = size_in_words(size);
        self.0.set_message(format!("{} {} {size}, {threads} thread(s)", op.name(), test.name()));
        self.0.tick();
    }

    /// A point is over: `print` writes to the terminal while the bar is out of the way.
    pub(super) fn over<T>(&self, print: impl FnOnce() -> T) -> T {
        let printed = self.0.suspend(print);
        self.0.inc(1);
        printed
    }

    /// All points are over.
    pub(super) fn clear(&self) {
        self.0.finish_and_clear();
    }
}
