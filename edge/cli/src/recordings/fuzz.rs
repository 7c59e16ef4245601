//! Fuzz targets for terminal output that a stranger's program wrote, and for foreign texts in tables
//! (`deploy/docs/src/contribute/testing.md`).

use crate::printable::plain;
use crate::sanitize::Sanitizer;
use std::time::Duration;

/// The time of a target in an ordinary run; `BOLERO_RANDOM_TEST_TIME_MS` sets another.
const BUDGET: Duration = Duration::from_millis(400);

/// Output of pieces of control sequences, and of single bytes.
fn output_of(input: &[u8]) -> Vec<u8> {
    const PIECES: [&[u8]; 32] = [
        b"\x1b",
        b"\x1b[",
        b"\x1b]",
        b"\x1bP",
        b"\x1b_",
        b"\x1b\\",
        b"\x07",
        b"\xc2\x9b",
        b"\xc2\x9d",
        b"\xc2\x9c",
        b"?",
        b">",
        b"<",
        b"=",
        b";",
        b"1",
        b"6",
        b"25",
        b"1049",
        b"2004",
        b" ",
        b"!",
        b"#",
        b"$",
        b"&",
        b"\"",
        b"h",
        b"m",
        b"u",
        b"S",
        b"\xe2\x82",
        b"(",
    ];
    let pieces = input.iter().take(40).map(|byte| match *byte {
        0..=191 => PIECES[usize::from(*byte) % PIECES.len()].to_vec(),
        192..=255 => vec![byte.wrapping_mul(3)],
    });
    pieces.collect::<Vec<_>>().concat()
}

/// Asserts that every control sequence of a terminal's output is one that draws, or with `own` one that sets how input is reported.
fn expect_harmless(output: &str, own: bool) {
    assert!(!output.contains(|ch| matches!(ch, '\u{80}'..='\u{9f}' | '\u{5}')), "{output:?}");
    for sequence in output.split('\x1b').skip(1) {
        let Some(control) = sequence.strip_prefix('[') else {
            let kind = sequence.chars().next();
            assert!(kind.is_some_and(|kind| "78DEHM=>c()*+#".contains(kind)), "{sequence:?} in {output:?}");
            continue;
        };
        let end = control.find(|ch: char| ('@'..='~').contains(&ch)).unwrap_or_else(|| panic!("no end in {output:?}"));
        let (parameters, letter) = (&control[..end], &control[end..=end]);
        // Intermediate bytes make another function of a letter: `& u` and `# S` are queries.
        let numbers = parameters.trim_start_matches(['?', '>', '<', '=']);
        let is_numbers = numbers.bytes().all(|byte| matches!(byte, b'0'..=b';'));
        let marker = &parameters[..parameters.len() - numbers.len()];
        match (marker, letter) {
            ("", "q") => assert!(numbers.ends_with(' '), "{control:?}"),
            ("", "p") => assert!(own && numbers == "!", "{control:?}"),
            ("", "c" | "n" | "t" | "x" | "i" | "y" | "v" | "w" | "R") => panic!("{control:?} is a query"),
            ("", _) | ("?", "h" | "l") => assert!(is_numbers, "{control:?}"),
            (">", "m") | ("<" | "=" | ">", "u") => assert!(own && is_numbers, "{control:?}"),
            _ => panic!("{control:?} in {output:?}"),
        }
    }
}

#[test]
fn fuzz_sanitized_output_is_harmless_and_stays_as_it_is() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        for bytes in [output_of(input), input.to_vec()] {
            for own in [false, true] {
                let new = || if own { Sanitizer::for_own_session() } else { Sanitizer::default() };
                let once = new().sanitize_bytes(&bytes);
                expect_harmless(str::from_utf8(&once).unwrap(), own);
                assert_eq!(new().sanitize_bytes(&once), once, "{bytes:?}");
                assert!(once.len() <= 3 * bytes.len(), "a byte becomes a replacement character at most");
                // However the stream is cut into messages.
                let (mut pieces, mut sanitizer) = (Vec::new(), new());
                let at_once = 1 + usize::from(*input.first().unwrap_or(&0)) % 5;
                bytes.chunks(at_once).for_each(|piece| pieces.extend(sanitizer.sanitize_bytes(piece)));
                assert_eq!(pieces, once, "{bytes:?} by {at_once}");
            }
        }
    });
}

#[test]
fn fuzz_plain_text_has_no_control_characters() {
    bolero::check!().with_test_time(BUDGET).for_each(|input: &[u8]| {
        let text = String::from_utf8_lossy(&output_of(input)).into_owned() + &String::from_utf8_lossy(input);
        let shown = plain(&text);
        assert!(!shown.contains(|ch: char| ch.is_control() || matches!(ch, '\u{202a}'..='\u{202e}')), "{shown:?}");
        assert_eq!(shown.chars().count(), text.chars().count());
        assert_eq!(plain(&shown), shown);
    });
}
