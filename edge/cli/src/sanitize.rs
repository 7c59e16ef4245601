//! Sanitizing of control sequences in terminal output that is replayed: only drawing is allowed. A recording may come from an untrusted
//! program; played back it must not set titles, access the clipboard, open links, move windows or query the terminal, whose replies would
//! become input. The scrollback of a user's own session may also change input modes, since the session goes on; queries are removed there
//! too.

/// The longest sequence; a longer one is dropped.
const MAX_SEQUENCE_LEN: usize = 256;
const ESCAPE: u8 = 0x1b;

/// A streaming filter that passes text, colours, drawing modes and cursor movements (ECMA-48).
#[derive(Debug, Default)]
pub(crate) struct Sanitizer {
    /// The output is of the user's own session, which goes on.
    own: bool,
    state: ParserState,
    /// The sequence that is being parsed.
    pending: Vec<u8>,
    /// The first bytes of a UTF-8 character whose rest has not arrived.
    partial: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ParserState {
    #[default]
    Text,
    Escape,
    /// `ESC [ … letter`
    ControlSequence,
    /// `ESC ]`, `ESC P` and their like, up to BEL or `ESC \`.
    ControlString,
    ControlStringEscape,
}

impl Sanitizer {
    /// Passes input modes too: how keys, pasted text and the mouse are reported to the program.
    pub(crate) fn for_own_session() -> Self {
        Self { own: true, ..Self::default() }
    }

    /// Whether no incomplete sequence or character is buffered.
    pub(crate) fn is_idle(&self) -> bool {
        self.state == ParserState::Text && self.partial.is_empty()
    }

    /// Sanitizes bytes that are split anywhere. Invalid UTF-8 becomes a replacement character.
    pub(crate) fn sanitize_bytes(&mut self, input: &[u8]) -> Vec<u8> {
        let bytes = [std::mem::take(&mut self.partial).as_slice(), input].concat();
        let mut through = Vec::with_capacity(bytes.len());
        let mut parts = bytes.utf8_chunks().peekable();
        while let Some(part) = parts.next() {
            part.valid().chars().for_each(|ch| self.take(ch, &mut through));
            match str::from_utf8(part.invalid()) {
                Ok(_) => {}
                // The input ends inside a character: its rest follows.
                Err(error) if error.error_len().is_none() && parts.peek().is_none() => {
                    self.partial = part.invalid().to_vec();
                }
                Err(_) => self.take(char::REPLACEMENT_CHARACTER, &mut through),
            }
        }
        through
    }

    pub(crate) fn sanitize(&mut self, input: &str) -> Vec<u8> {
        let mut through = Vec::with_capacity(input.len());
        for ch in input.chars() {
            self.take(ch, &mut through);
        }
        through
    }

    fn take(&mut self, ch: char, through: &mut Vec<u8>) {
        match self.state {
            ParserState::Text => match ch {
                '\x1b' => self.begin(ParserState::Escape),
                // The C1 forms of the same introducers.
                '\u{9b}' => self.begin(ParserState::ControlSequence),
                '\u{90}' | '\u{98}' | '\u{9d}'..='\u{9f}' => self.begin(ParserState::ControlString),
                // ENQ requests a reply; the other C1 characters are not needed.
                '\u{5}' | '\u{80}'..='\u{9f}' => {}
                _ => through.extend(ch.encode_utf8(&mut [0; 4]).bytes()),
            },
            // Character sets and similar: one more character follows.
            ParserState::Escape if !self.pending.is_empty() => {
                if ch.is_ascii_alphanumeric() {
                    through.push(ESCAPE);
                    through.append(&mut self.pending);
                    through.push(ch as u8);
                }
                self.end();
            }
            ParserState::Escape => match ch {
                '[' => self.state = ParserState::ControlSequence,
                ']' | 'P' | 'X' | '^' | '_' => self.state = ParserState::ControlString,
                '(' | ')' | '*' | '+' | '#' => self.pending.push(ch as u8),
                // Save and restore the cursor, index, next line, tab stops, the keypad, reset.
                '7' | '8' | 'D' | 'E' | 'H' | 'M' | '=' | '>' | 'c' => {
                    through.extend([ESCAPE, ch as u8]);
                    self.end();
                }
                '\x1b' => self.begin(ParserState::Escape),
                _ => self.end(),
            },
            ParserState::ControlSequence => match ch {
                ' '..='?' if self.pending.len() < MAX_SEQUENCE_LEN => self.pending.push(ch as u8),
                '@'..='~' => {
                    if is_drawing_sequence(&self.pending, ch) || (self.own && is_input_mode_sequence(&self.pending, ch))
                    {
                        through.extend([ESCAPE, b'[']);
                        through.extend_from_slice(&self.pending);
                        through.push(ch as u8);
                    }
                    self.end();
                }
                '\x1b' => self.begin(ParserState::Escape),
                _ => self.end(),
            },
            ParserState::ControlString => match ch {
                '\x07' | '\u{9c}' => self.end(),
                '\x1b' => self.state = ParserState::ControlStringEscape,
                _ => {}
            },
            ParserState::ControlStringEscape => match ch {
                '\\' => self.end(),
                _ => {
                    self.begin(ParserState::Escape);
                    self.take(ch, through);
                }
            },
        }
    }

    fn begin(&mut self, state: ParserState) {
        self.pending.clear();
        self.state = state;
    }

    fn end(&mut self) {
        self.begin(ParserState::Text);
    }
}

/// Whether a control sequence draws, and neither queries (`c`, `n`, `x`, `q` with `>`, `p` with `$`, `u` with `&`, `S` with `#`), moves
/// windows (`t`) nor turns on reports of the mouse, the focus or pasting.
fn is_drawing_sequence(parameters: &[u8], letter: char) -> bool {
    let private = matches!(parameters.first(), Some(b'<'..=b'?'));
    match letter {
        '@' | 'A'..='M' | 'P' | 'S' | 'T' | 'X' | 'Z' | '`' | 'a'..='b' | 'd'..='g' | 'm' | 'r' | 's' | 'u' => {
            are_numbers(parameters)
        }
        'h' | 'l' if private => all_private_modes(parameters, is_drawing_mode),
        'h' | 'l' => parameters == b"4" || parameters == b"20",
        // The shape of the cursor.
        'q' => parameters.last() == Some(&b' ') && !private,
        _ => false,
    }
}

/// Whether a control sequence sets how keys, pasted text and the mouse are reported, and queries nothing (`m` and `u` with `?`). Focus
/// reports count as a query, since some terminals send one at once.
fn is_input_mode_sequence(parameters: &[u8], letter: char) -> bool {
    let is_input_mode = |mode: &[u8]| {
        // The arrow keys, the keypad, reports of the mouse, bracketed pasting.
        matches!(mode, b"1" | b"66" | b"1000" | b"1002" | b"1003" | b"1005" | b"1006" | b"1015" | b"2004")
    };
    match letter {
        'h' | 'l' => all_private_modes(parameters, |mode| is_drawing_mode(mode) || is_input_mode(mode)),
        'm' => parameters.strip_prefix(b">").is_some_and(are_numbers),
        'u' => matches!(parameters, [b'<'..=b'>', numbers @ ..] if are_numbers(numbers)),
        // A soft reset.
        'p' => parameters == b"!",
        _ => false,
    }
}

/// Whether the parameters have no private marker and no intermediate byte, which make another function of the letter.
fn are_numbers(parameters: &[u8]) -> bool {
    parameters.iter().all(|byte| matches!(byte, b'0'..=b';'))
}

/// Whether the parameters are private modes (DEC) that all satisfy `is_one`.
fn all_private_modes(parameters: &[u8], is_one: impl Fn(&[u8]) -> bool) -> bool {
    parameters.strip_prefix(b"?").is_some_and(|modes| modes.split(|byte| *byte == b';').all(is_one))
}

/// Autowrap, origin, reverse video, the cursor, the other screen.
fn is_drawing_mode(mode: &[u8]) -> bool {
    matches!(mode, b"5" | b"6" | b"7" | b"12" | b"25" | b"47" | b"1047" | b"1048" | b"1049")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through(input: &[&str]) -> String {
        let mut sanitizer = Sanitizer::default();
        let through = input.iter().flat_map(|piece| sanitizer.sanitize(piece)).collect();
        String::from_utf8(through).unwrap_or_default()
    }

    #[test]
    fn drawing_sequences_pass_regardless_of_chunk_boundaries() {
        let drawn =
            "a€\r\n\x1b[31;1mred\x1b[0m\x1b[2J\x1b[3;4H\x1b[?25l\x1b[?1049h\x1b(0x\x1b(B\x1b7\x1b8\x1bM\x1b[4 q";
        assert_eq!(through(&[drawn]), drawn);
        let pieces: Vec<String> = drawn.chars().map(String::from).collect();
        assert_eq!(through(&pieces.iter().map(String::as_str).collect::<Vec<_>>()), drawn);
    }

    #[test]
    fn sequences_beyond_drawing_are_removed() {
        for (input, expected) in [
            ("a\x1b]0;owned\x07b", "ab"),
            ("a\x1b]52;c;b3duZWQ=\x1b\\b", "ab"),
            ("a\x1b]8;;https://evil.example/\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
            ("a\u{9d}0;owned\u{9c}b", "ab"),
            ("a\x1bP$q\"p\x1b\\b\x1b_x\x1b\\\x1b^y\x1b\\\x1bXz\x1b\\c", "abc"),
            ("a\x1b[c\x1b[>c\x1b[5n\x1b[6n\x1b[?6n\x1b[x\x1b[>q\x1b[?1$p\x1bZb", "ab"),
            ("a\x1b[8;5;5t\x1b[21t\x1b[3;0;0tb", "ab"),
            // The user's character set, and the position in the stack of titles.
            ("a\x1b[&u\x1b[#Sb", "ab"),
            ("a\x1b[?1000h\x1b[?1003;1006h\x1b[?1004h\x1b[?2004hb", "ab"),
            ("a\x05\u{84}b", "ab"),
            ("a\x1b]never ended", "a"),
            ("a\x1b]0;x\x1b[31mb", "a\x1b[31mb"),
        ] {
            assert_eq!(through(&[input]), expected, "{input:?}");
        }
        let endless = through(&[&format!("\x1b[{}m.", "1;".repeat(1000))]);
        assert!(!endless.contains('\x1b') && endless.ends_with("m."), "{endless:?}");
    }

    #[test]
    fn own_session_keeps_input_modes_and_loses_queries() {
        let own = |input: &[u8], at_once: usize| {
            let mut sanitizer = Sanitizer::for_own_session();
            let through = input.chunks(at_once).flat_map(|piece| sanitizer.sanitize_bytes(piece)).collect();
            String::from_utf8(through).unwrap_or_default()
        };
        let stored = "€\x1b[?1049h\x1b[?1h\x1b=\x1b[?2004h\x1b[?1000;1006h\x1b[>4;2m\x1b[>1u\x1b[<u\x1b[!p\x1b[1mtext";
        for at_once in [1, 2, 100] {
            assert_eq!(own(stored.as_bytes(), at_once), stored, "by {at_once}");
            let asks = b"a\x1b[6n\x1b[c\x1b[>c\x1b[=c\x1b]11;?\x07\x1b[?4m\x1b[?u\x1b[14t\x1b[?1$p\x1b[?1004h\x1bP+q\x1b\\\x05b";
            assert_eq!(own(asks, at_once), "ab", "by {at_once}");
            assert_eq!(own(b"a\xff\xe2\x82b", at_once), "a\u{fffd}\u{fffd}b", "by {at_once}");
            assert_eq!(own(b"\xe2\x82b\xe2\x82", at_once), "\u{fffd}b", "by {at_once}");
            assert_eq!(own(b"a\x1b[>1&u\x1b[&u\x1b[>4$mb", at_once), "ab", "by {at_once}");
        }
        let mut sanitizer = Sanitizer::for_own_session();
        assert_eq!(sanitizer.sanitize_bytes(b"\xe2\x82"), b"");
        assert!(!sanitizer.is_idle());
        assert_eq!(sanitizer.sanitize_bytes(b"\xac"), "€".as_bytes());
        assert!(sanitizer.is_idle());
        sanitizer.sanitize_bytes(b"\x1b[");
        assert!(!sanitizer.is_idle());
    }

    proptest! {
        #[test]
        fn sanitized_output_never_queries_the_terminal(
            input in "[\\x1b\\[\\]PX^_?;$>0-9a-zA-Z \\x07\\\\]{0,60}", own in any::<bool>(),
        ) {
            let mut sanitizer = if own { Sanitizer::for_own_session() } else { Sanitizer::default() };
            let through = String::from_utf8(sanitizer.sanitize_bytes(input.as_bytes())).unwrap_or_default();
            for asked in through.split('\x1b').skip(1) {
                prop_assert!(!asked.starts_with([']', 'P', 'X', '^', '_', 'Z']), "{through:?}");
                if let Some(control) = asked.strip_prefix('[') {
                    let letter = control.find(|ch: char| ('@'..='~').contains(&ch)).map(|at| &control[at..=at]);
                    prop_assert!(!matches!(letter, Some("c" | "n" | "t" | "x" | "i")), "{through:?}");
                    let is_private = control.starts_with('?');
                    prop_assert!(!(is_private && matches!(letter, Some("m" | "u" | "p"))), "{through:?}");
                }
            }
        }
    }
}
