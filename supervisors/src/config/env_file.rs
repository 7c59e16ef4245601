//! Files of settings, as systemd reads them (`EnvironmentFile=` of `systemd.exec(5)`). A line that systemd would ignore is refused here, since
//! it is a mistake.

use super::variables::{BYTE_ORDER_MARK, ConfigError, Problem};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

/// Settings take a few kilobytes.
const MAX_BYTES: u64 = 1 << 20;

/// The text of a file.
///
/// # Errors
/// [`ConfigError`] where it cannot be read as text, or is too long.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    let at = path.display();
    let mut text = String::new();
    let length = std::fs::File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(|error| ConfigError::of(format!("{at} cannot be read as text: {error}")))?;
    if length as u64 > MAX_BYTES {
        return Err(ConfigError::of(format!("{at} has more than {MAX_BYTES} bytes; it is no environment file")));
    }
    Ok(text)
}

/// The assignments of a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EnvFile {
    /// By name, in order; of two with one name the last one holds.
    pub values: BTreeMap<String, String>,
    pub problems: Vec<Problem>,
}

impl EnvFile {
    /// Reads a text. Problems name their line and quote no value, which may be a secret.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut file = Self::default();
        let (mut line, mut first_lines) = (1, BTreeMap::new());
        let mut rest = text;
        while !rest.is_empty() {
            let number = line;
            let (read, after) = assignment(rest);
            line += rest[..rest.len() - after.len()].matches('\n').count();
            rest = after;
            match read {
                Line::Blank => {}
                Line::Wrong(why) => file.problems.push(Problem::of(format!("line {number} {why}"))),
                Line::Assignment(name, value) => {
                    if let Some(first) = first_lines.insert(name.clone(), number) {
                        let problem = format!("line {number} sets {name}, as line {first} does; remove one of them");
                        file.problems.push(Problem::of(problem));
                    }
                    file.values.insert(name, value);
                }
            }
        }
        file
    }

    /// The problems, with those of the configuration that is read from it.
    pub(super) fn with_problems_of(self, read: Result<(), ConfigError>) -> Result<(), ConfigError> {
        let mut problems = self.problems;
        problems.extend(read.err().into_iter().flat_map(|error| error.problems));
        if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
    }
}

enum Line {
    Blank,
    Wrong(&'static str),
    Assignment(String, String),
}

/// The first line with those that continue it, and what follows.
fn assignment(text: &str) -> (Line, &str) {
    let end = text.find('\n').unwrap_or(text.len());
    let after_line = text.get(end + 1..).unwrap_or_default();
    let line = text[..end].trim();
    if line.starts_with(BYTE_ORDER_MARK) {
        let why = "begins with a byte-order mark, which no editor shows, and which systemd takes for a part of the line: save the file as UTF-8 without it";
        return (Line::Wrong(why), after_line);
    }
    if line.is_empty() || line.starts_with(['#', ';']) {
        return (Line::Blank, after_line);
    }
    let Some((name, _)) = text[..end].split_once('=') else {
        return (Line::Wrong("is no assignment NAME=value; systemd would ignore it"), after_line);
    };
    let value = &text[name.len() + 1..];
    let name = name.trim();
    if name.starts_with("export ") {
        return (Line::Wrong("begins with `export`; systemd would ignore it: remove `export`"), after_line);
    }
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    if !is_name(name) {
        return (Line::Wrong("has no name of letters, digits and underscores before `=`"), after_line);
    }
    match value_of(value) {
        Some((value, after)) => (Line::Assignment(name.to_owned(), value), after),
        None => (Line::Wrong("opens a quote that is never closed"), ""),
    }
}

/// The value at the beginning, and what follows its line. `None`: a quote is not closed.
fn value_of(text: &str) -> Option<(String, &str)> {
    let text = text.trim_start_matches([' ', '\t']);
    let (mut value, mut quote, mut signs) = (String::new(), None, text.char_indices());
    // White space at the end does not count, but for quoted and escaped one.
    let mut counted = 0;
    while let Some((at, sign)) = signs.next() {
        match (quote, sign) {
            (None, '\n') => {
                value.truncate(counted);
                return Some((value, &text[at + 1..]));
            }
            (None, '\'' | '"') => quote = Some(sign),
            (Some(open), closing) if open == closing => quote = None,
            (None | Some('"'), '\\') => match (quote, signs.next().map(|(_, escaped)| escaped)) {
                (_, Some('\n')) => {}
                (Some(_), Some(escaped)) if !"\"\\`$".contains(escaped) => value.extend(['\\', escaped]),
                (_, escaped) => value.extend(escaped),
            },
            (None, ' ' | '\t' | '\r') => {
                value.push(sign);
                continue;
            }
            (_, other) => value.push(other),
        }
        counted = value.len();
    }
    value.truncate(counted);
    quote.is_none().then_some((value, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_systemd_reads_them() {
        let text = "# a comment\n; another\n\nA=plain\nB = with spaces inside  \nC='single \\ $x'\nD=\"double \\\" \\$x \\n\"\n\
            E=one\\\n two\nF=\nG=postgres:///x?host=/run&user=y\nH='a\nb'\nI=a'b'\"c\"\nJ=last";
        let file = EnvFile::parse(text);
        assert!(file.problems.is_empty(), "{file:?}");
        let values: Vec<(&str, &str)> =
            file.values.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let expected = [
            ("A", "plain"),
            ("B", "with spaces inside"),
            ("C", "single \\ $x"),
            ("D", "double \" $x \\n"),
            ("E", "one two"),
            ("F", ""),
            ("G", "postgres:///x?host=/run&user=y"),
            ("H", "a\nb"),
            ("I", "abc"),
            ("J", "last"),
        ];
        assert_eq!(values, expected);
    }

    #[test]
    fn byte_order_mark_is_named_where_it_spoils_the_first_line() {
        for text in ["\u{feff}A=1\nB=2\n", "\u{feff}# settings\r\nB=2\r\n"] {
            let file = EnvFile::parse(text);
            let problems: Vec<String> = file.problems.iter().map(ToString::to_string).collect();
            assert!(
                matches!(problems.as_slice(), [one] if one.starts_with("line 1 begins with a byte-order mark")),
                "{problems:?}"
            );
            assert_eq!(file.values.into_keys().collect::<Vec<_>>(), ["B"]);
        }
    }

    #[test]
    fn lines_that_systemd_would_ignore_are_named_without_their_values() {
        let file = EnvFile::parse("A=1\nexport B=hunter2\nhunter2\n1C=hunter2\nA=hunter2\nD='hunter2\n");
        let problems: Vec<String> = file.problems.iter().map(ToString::to_string).collect();
        assert_eq!(problems.len(), 5, "{problems:#?}");
        for (problem, line) in
            problems.iter().zip(["line 2 ", "line 3 ", "line 4 ", "line 5 sets A, as line 1", "line 6 "])
        {
            assert!(problem.starts_with(line) && !problem.contains("hunter2"), "{problem}");
        }
    }
}
