//! The statements in the sources of this crate: every string that begins as SQL does. A statement that is put together has several.

use super::recorded_plans::one_line;
use std::path::{Path, PathBuf};

/// A string of the sources that is a statement, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceText {
    /// Relative to `src`.
    pub(super) file: PathBuf,
    /// Without what is in braces, as `format!` puts it in: the pieces between, in their order.
    pub(super) pieces: Vec<String>,
}

impl SourceText {
    fn new(file: &Path, text: &str) -> Self {
        let (mut pieces, mut piece, mut depth) = (Vec::new(), String::new(), 0_u32);
        for at in text.chars() {
            match at {
                '{' => depth += 1,
                '}' => {
                    depth = depth.saturating_sub(1);
                    pieces.push(std::mem::take(&mut piece));
                }
                at if depth == 0 => piece.push(at),
                _ => {}
            }
        }
        pieces.push(piece);
        let pieces = pieces.iter().map(|piece| one_line(piece)).filter(|piece| !piece.is_empty()).collect();
        Self { file: file.to_owned(), pieces }
    }

    /// Whether the executed statement has all pieces in their order.
    pub(super) fn is_in(&self, statement: &str) -> bool {
        let mut rest = statement;
        self.pieces.iter().all(|piece| {
            let found = rest.find(piece.as_str());
            rest = found.map_or(rest, |at| &rest[at + piece.len()..]);
            found.is_some()
        })
    }
}

/// How a string begins that is SQL, or is added to SQL.
const BEGINNINGS: [&str; 9] =
    ["SELECT ", "INSERT ", "UPDATE ", "DELETE ", "WITH ", "FROM ", "WHERE ", "AND ", "ORDER BY "];

/// All of them.
pub(super) fn statements() -> Vec<SourceText> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut found, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let file = path.strip_prefix(&root).unwrap();
            match path.extension().and_then(|it| it.to_str()) {
                _ if path.is_dir() => folders.push(path.clone()),
                Some("rs") => found.extend(in_source(file, &std::fs::read_to_string(&path).unwrap())),
                Some("sql") => found.push(SourceText::new(file, &std::fs::read_to_string(&path).unwrap())),
                _ => {}
            }
        }
    }
    found
}

fn in_source(file: &Path, source: &str) -> Vec<SourceText> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let texts = strings(code);
    let is_sql = |text: &&String| BEGINNINGS.iter().any(|beginning| one_line(text).starts_with(beginning));
    texts.iter().filter(is_sql).map(|text| SourceText::new(file, text)).collect()
}

/// The string literals of Rust code, without comments and character literals.
fn strings(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut chars = code.chars().peekable();
    while let Some(at) = chars.next() {
        match at {
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|it| *it != '\n').is_some() {},
            // A lifetime has no closing quote: one that is two characters away is a character's.
            '\'' => {
                let first = chars.next();
                if first == Some('\\') {
                    chars.next();
                }
                chars.next_if_eq(&'\'');
            }
            '"' => {
                let mut text = String::new();
                while let Some(at) = chars.next() {
                    match at {
                        '"' => break,
                        '\\' => match chars.next() {
                            Some('\n') => while chars.next_if(|it| it.is_whitespace()).is_some() {},
                            Some('n' | 't') => text.push(' '),
                            Some(escaped) => text.push(escaped),
                            None => break,
                        },
                        at => text.push(at),
                    }
                }
                found.push(text);
            }
            _ => {}
        }
    }
    found
}

#[test]
fn statements_of_a_source_are_found_with_their_pieces() {
    let source = r#"
        // "SELECT in a comment"
        fn f<'a>(x: &'a str) -> char { '"' }
        let one = "SELECT id
                   FROM entity \
                   WHERE true";
        let two = format!("DELETE FROM {table} WHERE at < $1");
        query.push(" AND owner = ");
        let error = "a month of the log";
        #[cfg(test)]
mod tests { const NO: &str = "SELECT 1"; }
    "#;
    let found = in_source(Path::new("a.rs"), source);
    let pieces: Vec<Vec<&str>> = found.iter().map(|it| it.pieces.iter().map(String::as_str).collect()).collect();
    assert_eq!(
        pieces,
        [vec!["SELECT id FROM entity WHERE true"], vec!["DELETE FROM", "WHERE at < $1"], vec!["AND owner ="]]
    );
    assert!(found[1].is_in("DELETE FROM history_default WHERE at < $1"));
    assert!(!found[1].is_in("DELETE FROM history_default"));
}
