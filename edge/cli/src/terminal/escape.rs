//! What is typed for this program and not for the shell: `~` at the beginning of a line, and a letter, as ssh has it.

/// In the order in which it was typed.
#[derive(Debug, PartialEq)]
pub(crate) enum Typed {
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
pub(crate) struct Escape {
    on: bool,
    begins_line: bool,
    /// A `~` that may be one of ours.
    held: bool,
}

impl Escape {
    pub(crate) const fn new(on: bool) -> Self {
        Self { on, begins_line: true, held: false }
    }

    pub(crate) fn take(&mut self, bytes: &[u8]) -> Vec<Typed> {
        let mut typed = Vec::new();
        let mut plain = Vec::new();
        for byte in bytes {
            let order = match (std::mem::take(&mut self.held), byte) {
                (true, b'.') => Some(Typed::Leave),
                (true, b'x') => Some(Typed::End),
                (true, 0x1a) => Some(Typed::Suspend),
                (true, b'?') => Some(Typed::Help),
                (held, byte) => {
                    if held && *byte != b'~' {
                        plain.push(b'~');
                    }
                    if !held && *byte == b'~' && self.begins_line && self.on {
                        self.held = true;
                        continue;
                    }
                    self.begins_line = matches!(byte, b'\r' | b'\n');
                    plain.push(*byte);
                    None
                }
            };
            if let Some(order) = order {
                self.begins_line = true;
                if !plain.is_empty() {
                    typed.push(Typed::Bytes(std::mem::take(&mut plain)));
                }
                typed.push(order);
            }
        }
        if !plain.is_empty() {
            typed.push(Typed::Bytes(plain));
        }
        typed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes through to the shell, with the orders in between as `<Leave>`.
    fn typed(bytes: &[u8], at_once: usize) -> String {
        let mut escape = Escape::new(true);
        let all = bytes.chunks(at_once).flat_map(|chunk| escape.take(chunk)).map(|typed| match typed {
            Typed::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            order => format!("<{order:?}>"),
        });
        all.collect()
    }

    #[test]
    fn a_tilde_is_ours_at_the_beginning_of_a_line_alone_however_the_bytes_come() {
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
        assert_eq!(Escape::new(false).take(b"~."), [Typed::Bytes(b"~.".to_vec())]);
    }
}
