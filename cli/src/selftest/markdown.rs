//! The report for people: `report.md.jinja`, filled.

use super::report::Report;
use crate::template;
use minijinja::{Error, Value, context};

/// Returns the text of report.md.
pub(super) fn of(report: &Report) -> Result<String, Error> {
    let (summary, drawn) = (report.summary(), &report.drawn);
    let values = context! { summary, drawn, ..Value::from_serialize(report) };
    template::fill(include_str!("report.md.jinja"), values)
}
