//! Blanks what is not code, so that a word in a comment or a string breaks no rule. Lines stay
//! where they are.

/// The text with comments, strings and character literals replaced by spaces.
pub(super) fn only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = if starts(&chars, at, "//") {
            find(&chars, at, |i| chars[i] == '\n')
        } else if starts(&chars, at, "/*") {
            end_of_block_comment(&chars, at)
        } else if let Some(hashes) = raw_string(&chars, at) {
            end_of_raw_string(&chars, at, hashes)
        } else if chars[at] == '"' {
            end_of_quoted(&chars, at, '"')
        } else if chars[at] == '\'' && is_character(&chars, at) {
            end_of_quoted(&chars, at, '\'')
        } else {
            code.push(chars[at]);
            at += 1;
            continue;
        };
        code.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    code
}

/// Returns the offset of `word` in a line of code. It may be a path of words, but not a part of a
/// longer word.
pub(super) fn find_word(line: &str, word: &str) -> Option<usize> {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).map(|(at, _)| at).find(|at| {
        let (before, after) = (&line[..*at], &line[at + word.len()..]);
        !before.ends_with(in_word) && !after.starts_with(in_word)
    })
}

fn starts(chars: &[char], at: usize, what: &str) -> bool {
    what.chars().enumerate().all(|(offset, c)| chars.get(at + offset) == Some(&c))
}

fn find(chars: &[char], from: usize, found: impl Fn(usize) -> bool) -> usize {
    (from..chars.len()).find(|i| found(*i)).unwrap_or(chars.len())
}

/// Block comments nest.
fn end_of_block_comment(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start + 2, 1);
    while at < chars.len() && depth > 0 {
        if starts(chars, at, "/*") {
            (at, depth) = (at + 2, depth + 1);
        } else if starts(chars, at, "*/") {
            (at, depth) = (at + 2, depth - 1);
        } else {
            at += 1;
        }
    }
    at
}

/// The number of hashes, if a raw string begins here: `r"`, `r#"`, `br##"`, `cr"`.
fn raw_string(chars: &[char], at: usize) -> Option<usize> {
    let in_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    let prefix = ["r", "br", "cr"].into_iter().find(|prefix| {
        starts(chars, at, prefix) && matches!(chars.get(at + prefix.len()), Some('"' | '#'))
    })?;
    let first = at + prefix.len();
    let quote = find(chars, first, |i| chars[i] != '#');
    // `r#match` is an identifier.
    (!in_word && chars.get(quote) == Some(&'"')).then_some(quote - first)
}

fn end_of_raw_string(chars: &[char], start: usize, hashes: usize) -> usize {
    let open = find(chars, start, |i| chars[i] == '"');
    let close = format!("\"{}", "#".repeat(hashes));
    let end = find(chars, open + 1, |i| starts(chars, i, &close));
    (end + close.len()).min(chars.len())
}

fn end_of_quoted(chars: &[char], start: usize, quote: char) -> usize {
    let mut at = start + 1;
    while at < chars.len() && chars[at] != quote {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

/// Tells `'a'` and `'\n'` from the lifetime `'a`.
fn is_character(chars: &[char], at: usize) -> bool {
    chars.get(at + 1) == Some(&'\\') || chars.get(at + 2) == Some(&'\'')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn is_blanked(text: &str) {
        let code = only(text);
        assert_eq!(find_word(&code, "unsafe"), None, "{code}");
        assert!(code.contains("kept"), "{code}");
    }

    #[test]
    fn words_in_comments_are_no_code() {
        is_blanked("kept // unsafe\n");
        is_blanked("/// unsafe\nkept");
        is_blanked("//! unsafe { }\nkept");
        is_blanked("/* unsafe /* nested */ unsafe */ kept");
    }

    #[test]
    fn words_in_strings_are_no_code() {
        is_blanked(r#"f("unsafe \" unsafe"); kept"#);
        is_blanked("r#\"unsafe \" unsafe\"# kept");
        is_blanked("br\"unsafe\" kept b\"unsafe\" c\"unsafe\"");
        is_blanked("\"// \" kept");
    }

    #[test]
    fn a_quote_in_a_character_opens_no_string_and_a_lifetime_is_no_character() {
        assert!(only("'\"'; unsafe { }").contains("unsafe"));
        assert!(only(r"'\''; unsafe { }").contains("unsafe"));
        assert!(only("fn f<'a>(x: &'a u8) { unsafe { } }").contains("unsafe"));
        assert!(only("r#unsafe").contains("unsafe"));
    }

    #[test]
    fn a_word_is_found_only_where_it_stands_alone() {
        assert_eq!(find_word("#![deny(unsafe_op_in_unsafe_fn)]", "unsafe"), None);
        assert_eq!(find_word("let x = unsafe{1}", "unsafe"), Some(8));
        assert_eq!(find_word("ptr::copy_nonoverlapping()", "ptr::copy"), None);
        assert_eq!(find_word("std::ptr::copy(a, b, 1)", "ptr::copy"), Some(5));
    }

    #[test]
    fn lines_stay_where_they_are() {
        let text = "a\n/* b\nc */ d\n\"e\nf\" g\n";
        assert_eq!(only(text).lines().count(), text.lines().count());
        assert!(only(text).lines().nth(4).is_some_and(|line| line.trim() == "g"));
    }
}
