//! Environment files that a POSIX shell can source: `NAME=value` lines, values quoted so that none of them is code.

use std::fmt::Write as _;

/// Ordered name and value pairs of an environment file. A later line of the same name wins.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Variables(Vec<(String, String)>);

/// Why a text is no environment file, or a value does not fit one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvFileError {
    #[error("line {line} of the environment file is not NAME=value")]
    NotAnAssignment { line: usize },
    #[error("the value that begins on line {line} of the environment file has no closing quote")]
    OpenQuote { line: usize },
    #[error("line {line} of the environment file asks the shell to compute something; only plain values are read")]
    NotPlain { line: usize },
    #[error("{name} holds a NUL character")]
    Nul { name: String },
    #[error("{name:?} is not a name of an environment variable")]
    Name { name: String },
    #[error("{name} is missing from the environment file; install the bootstrap bundle again")]
    Missing { name: &'static str },
    #[error("{name} in the environment file is not {expected}")]
    Value { name: &'static str, expected: &'static str },
}

impl Variables {
    /// The value of `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The value of `name`, which has to be there.
    ///
    /// # Errors
    /// [`EnvFileError::Missing`].
    pub fn require(&self, name: &'static str) -> Result<&str, EnvFileError> {
        self.get(name).ok_or(EnvFileError::Missing { name })
    }

    /// All pairs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// One `NAME='value'` line for each pair. A single-quoted value may span lines.
    ///
    /// # Errors
    /// [`EnvFileError`] when a name is no identifier or a value holds a NUL.
    pub fn render(&self) -> Result<String, EnvFileError> {
        let mut text = String::new();
        for (name, value) in &self.0 {
            if !is_name(name) {
                return Err(EnvFileError::Name { name: name.clone() });
            }
            if value.contains('\0') {
                return Err(EnvFileError::Nul { name: name.clone() });
            }
            let _ = writeln!(text, "{name}={}", quote(value));
        }
        Ok(text)
    }

    /// Reads what [`Variables::render`] writes, and a careful person's handwritten file: blank lines, `#` comments, `export`, bare words,
    /// single and double quotes. Nothing is expanded: `$` and back-quotes outside single quotes are refused.
    ///
    /// # Errors
    /// [`EnvFileError`] with the line.
    pub fn parse(text: &str) -> Result<Self, EnvFileError> {
        let mut reader = Reader { rest: text, line: 1 };
        let mut variables = Vec::new();
        while let Some(pair) = reader.assignment()? {
            variables.push(pair);
        }
        Ok(Self(variables))
    }
}

/// Names only: values of an environment file are secrets more often than not.
impl std::fmt::Debug for Variables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

impl<'a> FromIterator<(&'a str, &'a str)> for Variables {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a str)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }
}

/// Quotes a value as one word of a POSIX shell.
#[must_use]
pub fn quote(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

fn is_name(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        if c == '\n' {
            self.line += 1;
        }
        Some(c)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn skip_blank_and_comments(&mut self) {
        while let Some(c) = self.peek() {
            if c == '#' {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.next();
                }
            } else if c.is_ascii_whitespace() {
                self.next();
            } else {
                return;
            }
        }
    }

    fn assignment(&mut self) -> Result<Option<(String, String)>, EnvFileError> {
        self.skip_blank_and_comments();
        if self.rest.is_empty() {
            return Ok(None);
        }
        let line = self.line;
        if let Some(rest) = self.rest.strip_prefix("export ") {
            self.rest = rest.trim_start_matches([' ', '\t']);
        }
        let (name, rest) = self.rest.split_once('=').ok_or(EnvFileError::NotAnAssignment { line })?;
        if !is_name(name) {
            return Err(EnvFileError::NotAnAssignment { line });
        }
        let name = name.to_owned();
        self.rest = rest;
        Ok(Some((name, self.word(line)?)))
    }

    /// One shell word, up to the end of its line.
    fn word(&mut self, line: usize) -> Result<String, EnvFileError> {
        let mut value = String::new();
        while let Some(c) = self.peek() {
            match c {
                '\n' => break,
                ' ' | '\t' | '\r' => return self.only_comment_follows(line).map(|()| value),
                '\'' => {
                    self.next();
                    self.single_quoted(line, &mut value)?;
                }
                '"' => {
                    self.next();
                    self.double_quoted(line, &mut value)?;
                }
                '\\' => {
                    self.next();
                    value.push(self.next().ok_or(EnvFileError::OpenQuote { line })?);
                }
                '$' | '`' | ';' | '&' | '|' | '<' | '>' | '(' | ')' => {
                    return Err(EnvFileError::NotPlain { line });
                }
                plain => {
                    self.next();
                    value.push(plain);
                }
            }
        }
        Ok(value)
    }

    fn only_comment_follows(&mut self, line: usize) -> Result<(), EnvFileError> {
        while let Some(c) = self.peek() {
            match c {
                '\n' | '#' => return Ok(()),
                ' ' | '\t' | '\r' => {
                    self.next();
                }
                _ => return Err(EnvFileError::NotPlain { line }),
            }
        }
        Ok(())
    }

    fn single_quoted(&mut self, line: usize, value: &mut String) -> Result<(), EnvFileError> {
        loop {
            match self.next().ok_or(EnvFileError::OpenQuote { line })? {
                '\'' => return Ok(()),
                c => value.push(c),
            }
        }
    }

    fn double_quoted(&mut self, line: usize, value: &mut String) -> Result<(), EnvFileError> {
        loop {
            match self.next().ok_or(EnvFileError::OpenQuote { line })? {
                '"' => return Ok(()),
                '$' | '`' => return Err(EnvFileError::NotPlain { line }),
                '\\' => match self.next().ok_or(EnvFileError::OpenQuote { line })? {
                    escaped @ ('"' | '\\' | '$' | '`') => value.push(escaped),
                    '\n' => {}
                    other => value.extend(['\\', other]),
                },
                c => value.push(c),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    const HOSTILE: [&str; 12] = [
        "",
        "plain",
        "'; touch /tmp/pwned; '",
        "$(id)",
        "`id`",
        "a\nB=c",
        "\"double\" and 'single'",
        "back\\slash\\",
        "#no comment",
        " leading and trailing ",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        "ünïcode \u{1F680} \u{7}",
    ];

    #[test]
    fn hostile_values_come_back_unharmed_through_a_real_shell() {
        for value in HOSTILE {
            let file = Variables::from_iter([("V", value), ("AFTER", "intact")]).render().unwrap();
            let shell =
                Command::new("sh").args(["-c", &format!("{file}\nprintf '%s|%s' \"$V\" \"$AFTER\"")]).output().unwrap();
            assert_eq!(String::from_utf8(shell.stdout).unwrap(), format!("{value}|intact"));
        }
    }

    #[test]
    fn handwritten_environment_file_is_read() {
        let text = "# comment\n\nexport A=plain\nB = no\n";
        assert_eq!(Variables::parse(text), Err(EnvFileError::NotAnAssignment { line: 4 }));
        let text = "A=bare # why\nB=\"with \\\"quotes\\\" and \\\\\"\nC='a'\\''b'\nD=\nA=later\r\n";
        let variables = Variables::parse(text).unwrap();
        assert_eq!(variables.get("A"), Some("later"));
        assert_eq!(variables.get("B"), Some("with \"quotes\" and \\"));
        assert_eq!(variables.get("C"), Some("a'b"));
        assert_eq!(variables.get("D"), Some(""));
    }

    #[test]
    fn shell_expansions_are_refused_with_their_line() {
        for text in ["A=ok\nB=$HOME", "A=ok\nB=\"`id`\"", "A=ok\nB=x; rm", "A=ok\nB=two words"] {
            assert_eq!(Variables::parse(text), Err(EnvFileError::NotPlain { line: 2 }), "{text}");
        }
        assert_eq!(Variables::parse("A='open"), Err(EnvFileError::OpenQuote { line: 1 }));
    }

    #[test]
    fn invalid_names_and_nul_are_refused_before_they_reach_a_file() {
        assert!(matches!(Variables::from_iter([("A B", "x")]).render(), Err(EnvFileError::Name { .. })));
        assert!(matches!(Variables::from_iter([("A", "x\0y")]).render(), Err(EnvFileError::Nul { .. })));
    }

    #[test]
    fn debugging_variables_shows_names_and_no_values() {
        let shown = format!("{:?}", Variables::from_iter([("SVC_ENROLLMENT_TOKEN", "hunter2")]));
        assert!(shown.contains("SVC_ENROLLMENT_TOKEN") && !shown.contains("hunter2"));
    }

    proptest! {
        #[test]
        fn any_value_without_nul_survives_the_file(values in prop::collection::vec("[^\u{0}]*", 0..4)) {
            let names = ["A", "B", "C", "D"];
            let variables: Variables = names.into_iter().zip(values.iter().map(String::as_str)).collect();
            prop_assert_eq!(Variables::parse(&variables.render().unwrap()).unwrap(), variables);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in any::<String>()) {
            let _ = Variables::parse(&text);
        }
    }
}
