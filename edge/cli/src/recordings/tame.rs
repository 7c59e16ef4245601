//! What may be done to a terminal by what is shown in it again: draw. The program that was recorded is a stranger's; played back it sets no
//! title, reads and fills no clipboard, opens no link, moves no window, and asks the terminal nothing, whose answers would be typed.
//! What a user's own shell has said is shown to them as little tamed as keeps it from asking: they go on with it.

/// A sequence that is longer is none.
const LONGEST: usize = 256;
const ESCAPE: u8 = 0x1b;

/// Lets text, colours, modes of drawing and moves of the cursor through, piece by piece (ECMA-48).
#[derive(Debug, Default)]
pub(crate) struct Tame {
    /// It is the user's own, who goes on with it.
    own: bool,
    within: Within,
    /// The sequence so far.
    held: Vec<u8>,
    /// The beginning of a sign whose rest has not come.
    cut: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Within {
    #[default]
    Text,
    Escape,
    /// `ESC [ … letter`
    Control,
    /// `ESC ]`, `ESC P` and their like, up to BEL or `ESC \`.
    Words,
    WordsEscape,
}

impl Tame {
    /// Lets through also what says how keys, pasted text and the mouse are told to the program from here on.
    pub(crate) fn own() -> Self {
        Self { own: true, ..Self::default() }
    }

    /// Whether nothing is held back whose rest is to come.
    pub(crate) fn is_whole(&self) -> bool {
        self.within == Within::Text && self.cut.is_empty()
    }

    /// Of bytes as they come, cut anywhere. What is no UTF-8 is drawn as such.
    pub(crate) fn let_bytes_through(&mut self, said: &[u8]) -> Vec<u8> {
        let bytes = [std::mem::take(&mut self.cut).as_slice(), said].concat();
        let mut through = Vec::with_capacity(bytes.len());
        for part in bytes.utf8_chunks() {
            part.valid().chars().for_each(|sign| self.take(sign, &mut through));
            match str::from_utf8(part.invalid()) {
                Ok(_) => {}
                // The end of what has come: the rest of the sign is on its way.
                Err(error) if error.error_len().is_none() && bytes.ends_with(part.invalid()) => {
                    self.cut = part.invalid().to_vec();
                }
                Err(_) => self.take(char::REPLACEMENT_CHARACTER, &mut through),
            }
        }
        through
    }

    pub(crate) fn let_through(&mut self, said: &str) -> Vec<u8> {
        let mut through = Vec::with_capacity(said.len());
        for sign in said.chars() {
            self.take(sign, &mut through);
        }
        through
    }

    fn take(&mut self, sign: char, through: &mut Vec<u8>) {
        match self.within {
            Within::Text => match sign {
                '\x1b' => self.begin(Within::Escape),
                // The same beginnings as one sign each.
                '\u{9b}' => self.begin(Within::Control),
                '\u{90}' | '\u{98}' | '\u{9d}'..='\u{9f}' => self.begin(Within::Words),
                // ENQ asks for an answer; the other C1 signs are sequences that nobody needs.
                '\u{5}' | '\u{80}'..='\u{9f}' => {}
                _ => through.extend(sign.encode_utf8(&mut [0; 4]).bytes()),
            },
            // Character sets and the like: what follows the first sign is one more.
            Within::Escape if !self.held.is_empty() => {
                if sign.is_ascii_alphanumeric() {
                    through.push(ESCAPE);
                    through.append(&mut self.held);
                    through.push(sign as u8);
                }
                self.end();
            }
            Within::Escape => match sign {
                '[' => self.within = Within::Control,
                ']' | 'P' | 'X' | '^' | '_' => self.within = Within::Words,
                '(' | ')' | '*' | '+' | '#' => self.held.push(sign as u8),
                // Save and restore the cursor, index, next line, tab stops, the keypad, reset.
                '7' | '8' | 'D' | 'E' | 'H' | 'M' | '=' | '>' | 'c' => {
                    through.extend([ESCAPE, sign as u8]);
                    self.end();
                }
                '\x1b' => self.begin(Within::Escape),
                _ => self.end(),
            },
            Within::Control => match sign {
                ' '..='?' if self.held.len() < LONGEST => self.held.push(sign as u8),
                '@'..='~' => {
                    if draws(&self.held, sign) || (self.own && steers(&self.held, sign)) {
                        through.extend([ESCAPE, b'[']);
                        through.extend_from_slice(&self.held);
                        through.push(sign as u8);
                    }
                    self.end();
                }
                '\x1b' => self.begin(Within::Escape),
                _ => self.end(),
            },
            Within::Words => match sign {
                '\x07' | '\u{9c}' => self.end(),
                '\x1b' => self.within = Within::WordsEscape,
                _ => {}
            },
            Within::WordsEscape => match sign {
                '\\' => self.end(),
                _ => {
                    self.begin(Within::Escape);
                    self.take(sign, through);
                }
            },
        }
    }

    fn begin(&mut self, within: Within) {
        self.held.clear();
        self.within = within;
    }

    fn end(&mut self) {
        self.begin(Within::Text);
    }
}

/// Whether a control sequence draws, and neither asks (`c`, `n`, `x`, `q` with `>`, `p` with `$`), moves windows (`t`) nor turns on reports of
/// the mouse, the focus or pasting.
fn draws(parameters: &[u8], letter: char) -> bool {
    let private = matches!(parameters.first(), Some(b'<'..=b'?'));
    match letter {
        '@' | 'A'..='M' | 'P' | 'S' | 'T' | 'X' | 'Z' | '`' | 'a'..='b' | 'd'..='g' | 'm' | 'r' | 's' | 'u' => !private,
        'h' | 'l' if private => modes(parameters, is_of_drawing),
        'h' | 'l' => parameters == b"4" || parameters == b"20",
        // The cursor's form.
        'q' => parameters.last() == Some(&b' ') && !private,
        _ => false,
    }
}

/// Whether a control sequence says how keys, pasted text and the mouse are told to the program, and asks nothing (`m` and `u` with `?`). Of
/// the focus some terminals tell at once, so that it counts as asking.
fn steers(parameters: &[u8], letter: char) -> bool {
    let is_of_keys = |mode: &[u8]| {
        // The arrow keys, the keypad, reports of the mouse, bracketed pasting.
        matches!(mode, b"1" | b"66" | b"1000" | b"1002" | b"1003" | b"1005" | b"1006" | b"1015" | b"2004")
    };
    match letter {
        'h' | 'l' => modes(parameters, |mode| is_of_drawing(mode) || is_of_keys(mode)),
        'm' => parameters.first() == Some(&b'>'),
        'u' => matches!(parameters.first(), Some(b'<'..=b'>')),
        // All of it as it was.
        'p' => parameters == b"!",
        _ => false,
    }
}

/// Whether the parameters are private modes (DEC), each of which is one of those.
fn modes(parameters: &[u8], is_one: impl Fn(&[u8]) -> bool) -> bool {
    parameters.strip_prefix(b"?").is_some_and(|modes| modes.split(|byte| *byte == b';').all(is_one))
}

/// Autowrap, origin, reverse video, the cursor, the other screen.
fn is_of_drawing(mode: &[u8]) -> bool {
    matches!(mode, b"5" | b"6" | b"7" | b"12" | b"25" | b"47" | b"1047" | b"1048" | b"1049")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn through(said: &[&str]) -> String {
        let mut tame = Tame::default();
        let through = said.iter().flat_map(|piece| tame.let_through(piece)).collect();
        String::from_utf8(through).unwrap_or_default()
    }

    #[test]
    fn what_draws_comes_through_however_it_is_cut() {
        let drawn =
            "a€\r\n\x1b[31;1mred\x1b[0m\x1b[2J\x1b[3;4H\x1b[?25l\x1b[?1049h\x1b(0x\x1b(B\x1b7\x1b8\x1bM\x1b[4 q";
        assert_eq!(through(&[drawn]), drawn);
        let pieces: Vec<String> = drawn.chars().map(String::from).collect();
        assert_eq!(through(&pieces.iter().map(String::as_str).collect::<Vec<_>>()), drawn);
    }

    #[test]
    fn what_does_more_than_drawing_goes() {
        for (said, expected) in [
            ("a\x1b]0;owned\x07b", "ab"),
            ("a\x1b]52;c;b3duZWQ=\x1b\\b", "ab"),
            ("a\x1b]8;;https://evil.example/\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
            ("a\u{9d}0;owned\u{9c}b", "ab"),
            ("a\x1bP$q\"p\x1b\\b\x1b_x\x1b\\\x1b^y\x1b\\\x1bXz\x1b\\c", "abc"),
            ("a\x1b[c\x1b[>c\x1b[5n\x1b[6n\x1b[?6n\x1b[x\x1b[>q\x1b[?1$p\x1bZb", "ab"),
            ("a\x1b[8;5;5t\x1b[21t\x1b[3;0;0tb", "ab"),
            ("a\x1b[?1000h\x1b[?1003;1006h\x1b[?1004h\x1b[?2004hb", "ab"),
            ("a\x05\u{84}b", "ab"),
            ("a\x1b]never ended", "a"),
            ("a\x1b]0;x\x1b[31mb", "a\x1b[31mb"),
        ] {
            assert_eq!(through(&[said]), expected, "{said:?}");
        }
        let endless = through(&[&format!("\x1b[{}m.", "1;".repeat(1000))]);
        assert!(!endless.contains('\x1b') && endless.ends_with("m."), "{endless:?}");
    }

    #[test]
    fn whoever_goes_on_with_their_own_shell_types_as_it_wants_and_their_terminal_answers_nothing_old() {
        let own = |said: &[u8], at_once: usize| {
            let mut tame = Tame::own();
            let through = said.chunks(at_once).flat_map(|piece| tame.let_bytes_through(piece)).collect();
            String::from_utf8(through).unwrap_or_default()
        };
        let kept = "€\x1b[?1049h\x1b[?1h\x1b=\x1b[?2004h\x1b[?1000;1006h\x1b[>4;2m\x1b[>1u\x1b[<u\x1b[!p\x1b[1mtext";
        for at_once in [1, 2, 100] {
            assert_eq!(own(kept.as_bytes(), at_once), kept, "by {at_once}");
            let asks = b"a\x1b[6n\x1b[c\x1b[>c\x1b[=c\x1b]11;?\x07\x1b[?4m\x1b[?u\x1b[14t\x1b[?1$p\x1b[?1004h\x1bP+q\x1b\\\x05b";
            assert_eq!(own(asks, at_once), "ab", "by {at_once}");
            assert_eq!(own(b"a\xff\xe2\x82b", at_once), "a\u{fffd}\u{fffd}b", "by {at_once}");
        }
        let mut tame = Tame::own();
        assert_eq!(tame.let_bytes_through(b"\xe2\x82"), b"");
        assert!(!tame.is_whole());
        assert_eq!(tame.let_bytes_through(b"\xac"), "€".as_bytes());
        assert!(tame.is_whole());
        tame.let_bytes_through(b"\x1b[");
        assert!(!tame.is_whole());
    }

    proptest! {
        #[test]
        fn nothing_that_is_said_makes_the_terminal_answer(
            said in "[\\x1b\\[\\]PX^_?;$>0-9a-zA-Z \\x07\\\\]{0,60}", own in any::<bool>(),
        ) {
            let mut tame = if own { Tame::own() } else { Tame::default() };
            let through = String::from_utf8(tame.let_bytes_through(said.as_bytes())).unwrap_or_default();
            for asked in through.split('\x1b').skip(1) {
                prop_assert!(!asked.starts_with([']', 'P', 'X', '^', '_', 'Z']), "{through:?}");
                if let Some(control) = asked.strip_prefix('[') {
                    let letter = control.find(|sign: char| ('@'..='~').contains(&sign)).map(|at| &control[at..=at]);
                    prop_assert!(!matches!(letter, Some("c" | "n" | "t" | "x" | "i")), "{through:?}");
                    let is_private = control.starts_with('?');
                    prop_assert!(!(is_private && matches!(letter, Some("m" | "u" | "p"))), "{through:?}");
                }
            }
        }
    }
}
