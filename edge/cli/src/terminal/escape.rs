//! Escape sequences in the input for this program and not for the shell: `~` at the beginning of a line, and a letter, as in ssh.

/// A part of the input, in the order of typing.
#[derive(Debug, PartialEq)]
pub(crate) enum TypedInput {
    /// For the shell.
    Bytes(Vec<u8>),
    Leave,
    End,
    Suspend,
    Help,
}

pub(crate) const HELP: &str = "At the beginning of a line:\r\n  ~.   leave; the shell runs on\r\n  ~x   end the shell and everything in it\r\n  \
     ~^Z  suspend this program\r\n  ~~   one ~\r\n";

#[derive(Debug)]
pub(crate) struct EscapeParser {
    on: bool,
    begins_line: bool,
    /// A `~` that may begin an escape.
    tilde_pending: bool,
}

impl EscapeParser {
    pub(crate) const fn new(on: bool) -> Self {
        Self { on, begins_line: true, tilde_pending: false }
    }

    pub(crate) fn take(&mut self, bytes: &[u8]) -> Vec<TypedInput> {
        let mut typed = Vec::new();
        let mut plain = Vec::new();
        for byte in bytes {
            let action = match (std::mem::take(&mut self.tilde_pending), byte) {
                (true, b'.') => Some(TypedInput::Leave),
                (true, b'x') => Some(TypedInput::End),
                (true, 0x1a) => Some(TypedInput::Suspend),
                (true, b'?') => Some(TypedInput::Help),
                (tilde_pending, byte) => {
                    if tilde_pending && *byte != b'~' {
                        plain.push(b'~');
                    }
                    if !tilde_pending && *byte == b'~' && self.begins_line && self.on {
                        self.tilde_pending = true;
                        continue;
                    }
                    self.begins_line = matches!(byte, b'\r' | b'\n');
                    plain.push(*byte);
                    None
                }
            };
            if let Some(action) = action {
                self.begins_line = true;
                if !plain.is_empty() {
                    typed.push(TypedInput::Bytes(std::mem::take(&mut plain)));
                }
                typed.push(action);
            }
        }
        if !plain.is_empty() {
            typed.push(TypedInput::Bytes(plain));
        }
        typed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes for the shell, with the escapes between them as `<Leave>`.
    fn typed(bytes: &[u8], at_once: usize) -> String {
        let mut escape = EscapeParser::new(true);
        let all = bytes.chunks(at_once).flat_map(|chunk| escape.take(chunk)).map(|typed| match typed {
            TypedInput::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            action => format!("<{action:?}>"),
        });
        all.collect()
    }

    #[test]
    fn tilde_is_an_escape_at_the_beginning_of_a_line_alone() {
        for (bytes, through) in [
            ("~.", "<Leave>"),
            ("ls\r~.", "ls\r<Leave>"),
            ("ls ~.\r", "ls ~.\r"),
            ("~/bin\r", "~/bin\r"),
            ("~~.\r", "~.\r"),
            ("~?x\r~x", "<Help>x\r<End>"),
            ("a\r~\u{1a}b", "a\r<Suspend>b"),
            ("~\r~.", "~\r<Leave>"),
        ] {
            for at_once in [1, 2, 100] {
                assert_eq!(typed(bytes.as_bytes(), at_once), through, "{bytes:?} by {at_once}");
            }
        }
        assert_eq!(EscapeParser::new(false).take(b"~."), [TypedInput::Bytes(b"~.".to_vec())]);
    }
}
