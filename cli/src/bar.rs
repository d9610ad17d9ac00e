//! Progress on stderr.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Creates a bar. It has no thread and draws only when it is called, so that it disturbs no
/// measurement. It is not drawn when stderr is no terminal.
pub(crate) fn new(steps: usize, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}
