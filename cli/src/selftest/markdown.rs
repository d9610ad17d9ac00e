//! The report for people: `report.md.jinja`, filled.

use super::report::Report;
use minijinja::{Environment, Error, UndefinedBehavior, Value, context};

/// The text of report.md.
pub(super) fn of(report: &Report) -> Result<String, Error> {
    let mut template = Environment::new();
    template.set_keep_trailing_newline(true);
    // A point without a latency has no percentiles.
    template.set_undefined_behavior(UndefinedBehavior::Chainable);
    template.add_filter("cell", |text: &str| text.replace('|', "\\|").replace('\n', " "));
    template.add_filter("gib", |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 30)));
    // Nothing, of what there is no figure of.
    template.add_filter("fixed", |figure: &Value, digits: usize| {
        f64::try_from(figure.clone()).map_or(String::new(), |figure| format!("{figure:.digits$}"))
    });
    let (summary, drawn) = (report.summary(), &report.drawn);
    template.render_str(
        include_str!("report.md.jinja"),
        context! { summary, drawn, ..Value::from_serialize(report) },
    )
}
