//! Texts for people from what is JSON for programs: templates, filled.

use minijinja::{Environment, Error, UndefinedBehavior, Value};

/// Fills a template. Values that are not there are empty.
pub(crate) fn fill(template: &str, values: Value) -> Result<String, Error> {
    let mut templates = Environment::new();
    templates.set_keep_trailing_newline(true);
    templates.set_trim_blocks(true);
    templates.set_lstrip_blocks(true);
    templates.set_undefined_behavior(UndefinedBehavior::Chainable);
    // A text within a row of a table in Markdown.
    templates.add_filter("cell", |text: &str| text.replace('|', "\\|").replace('\n', " "));
    templates.add_filter("pad", |text: &str, width: usize| format!("{text:<width$}"));
    templates.add_filter("gib", |bytes: f64| format!("{:.1}", bytes / f64::from(1 << 30)));
    // Nothing, of what there is no figure of.
    templates.add_filter("fixed", |figure: &Value, digits: usize| {
        f64::try_from(figure.clone()).map_or(String::new(), |figure| format!("{figure:.digits$}"))
    });
    templates.render_str(template, values)
}
