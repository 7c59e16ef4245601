//! Text in which there is nothing to see.

use icu_properties::CodePointSetData;
use icu_properties::props::DefaultIgnorableCodePoint;

/// U+2800, a Braille cell without dots: neither white space nor ignorable, and drawn as nothing.
const BRAILLE_BLANK: char = '\u{2800}';

/// Characters that show nothing, as the inside of a class in a pattern of the API's description: [`shows_nothing`], without controls and
/// without the characters beyond U+FFFF, for which the dialects of patterns have no common form.
macro_rules! shows_nothing_pattern {
    () => {
        r"\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    };
}
pub(crate) use shows_nothing_pattern;

/// Whether a reader of the text sees nothing. The empty text is blank.
#[must_use]
pub(crate) fn is_blank(text: &str) -> bool {
    text.chars().all(shows_nothing)
}

/// White space, controls, and what is not drawn where a font has nothing for it: `White_Space` and `Default_Ignorable_Code_Point` of the
/// Unicode Character Database (`PropList.txt`, `DerivedCoreProperties.txt`).
fn shows_nothing(character: char) -> bool {
    character.is_whitespace()
        || character.is_control()
        || character == BRAILLE_BLANK
        || CodePointSetData::new::<DefaultIgnorableCodePoint>().contains(character)
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;

    /// `Default_Ignorable_Code_Point` in `DerivedCoreProperties.txt`.
    const IGNORABLE: [(u32, u32); 17] = [
        (0xad, 0xad),
        (0x34f, 0x34f),
        (0x61c, 0x61c),
        (0x115f, 0x1160),
        (0x17b4, 0x17b5),
        (0x180b, 0x180f),
        (0x200b, 0x200f),
        (0x202a, 0x202e),
        (0x2060, 0x206f),
        (0x3164, 0x3164),
        (0xfe00, 0xfe0f),
        (0xfeff, 0xfeff),
        (0xffa0, 0xffa0),
        (0xfff0, 0xfff8),
        (0x1_bca0, 0x1_bca3),
        (0x1_d173, 0x1_d17a),
        (0xe_0000, 0xe_0fff),
    ];

    fn every_character() -> impl Iterator<Item = char> {
        ('\0'..=char::MAX).filter(|character| *character != BRAILLE_BLANK)
    }

    #[test]
    fn text_of_characters_that_show_nothing_is_blank() {
        for (first, last) in IGNORABLE {
            let text: String = (first..=last).filter_map(char::from_u32).collect();
            assert!(is_blank(&text), "{first:x} to {last:x}");
        }
        for text in ["", " ", "\u{a0}", "\u{3000}\u{2028}", "\t\n", "\u{2800}", "\u{200b} \u{feff}", "\u{85}"] {
            assert!(is_blank(text), "{text:?}");
        }
    }

    #[test]
    fn all_other_characters_show_something() {
        let is_listed = |character: char| {
            character.is_whitespace()
                || character.is_control()
                || IGNORABLE.iter().any(|(first, last)| (*first..=*last).contains(&u32::from(character)))
        };
        let other: Vec<_> = every_character().filter(|it| shows_nothing(*it) != is_listed(*it)).collect();
        assert!(other.is_empty(), "{other:?}");
        for text in ["x", " x ", "\u{200b}ü", "👩\u{200d}🔧", "ᅠa", "क\u{200d}", "."] {
            assert!(!is_blank(text), "{text:?}");
        }
    }

    #[test]
    fn pattern_of_the_description_is_the_check_up_to_ffff() {
        let class = Regex::new(concat!("^[", shows_nothing_pattern!(), "]$")).unwrap();
        for character in every_character().filter(|it| *it <= '\u{ffff}' && !it.is_control()) {
            assert_eq!(class.is_match(&character.to_string()), shows_nothing(character), "{:x}", u32::from(character));
        }
    }
}
