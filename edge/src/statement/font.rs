//! The fonts of printed documents (`edge/fonts`): one for the scripts that it supports, and one for nearly all others, so that no name
//! becomes a row of boxes. A character that neither has is printed by its number.

use krilla::text::Font;
use miniz_oxide::inflate::decompress_to_vec_zlib_with_limit;
use rustybuzz::{Face, UnicodeBuffer};
use std::sync::LazyLock;

/// A face, to draw with and to measure with.
pub(super) struct Letters {
    pub(super) font: Font,
    face: Face<'static>,
}

/// The faces of a page.
pub(super) struct Faces {
    pub(super) regular: Letters,
    /// For the service's own texts: it has Latin letters alone.
    pub(super) bold: Letters,
    /// For characters that the others lack.
    pub(super) wide: Letters,
}

/// How a text is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    Regular,
    Bold,
}

/// A piece of a text that one face has, in one direction.
pub(super) struct Run<'a> {
    pub(super) letters: &'a Letters,
    pub(super) text: String,
}

/// The largest font has 4 MB.
const FONT_BYTES: usize = 8 << 20;

/// Decompressed with the first document. `None` where a file is not a font, which a test would show.
pub(super) static FACES: LazyLock<Option<Faces>> = LazyLock::new(|| {
    Some(Faces {
        regular: Letters::of(include_bytes!("../../fonts/DejaVuSans.ttf.zlib"))?,
        bold: Letters::of(include_bytes!("../../fonts/DejaVuSans-Bold.ttf.zlib"))?,
        wide: Letters::of(include_bytes!("../../fonts/unifont.otf.zlib"))?,
    })
});

impl Letters {
    /// From a file of `edge/fonts`, for the life of the process.
    fn of(compressed: &[u8]) -> Option<Self> {
        let file: &'static [u8] = decompress_to_vec_zlib_with_limit(compressed, FONT_BYTES).ok()?.leak();
        Some(Self { font: Font::new(file.into(), 0)?, face: Face::from_slice(file, 0)? })
    }

    fn has(&self, letter: char) -> bool {
        self.face.glyph_index(letter).is_some()
    }
}

impl Run<'_> {
    /// As it will be drawn.
    pub(super) fn width(&self, size: f32) -> f32 {
        let mut buffer = UnicodeBuffer::new();
        buffer.push_str(&self.text);
        buffer.guess_segment_properties();
        let shaped = rustybuzz::shape(&self.letters.face, &[], buffer);
        let units: i32 = shaped.glyph_positions().iter().map(|position| position.x_advance).sum();
        #[allow(clippy::cast_precision_loss)]
        let units = units as f32;
        units * size / self.letters.font.units_per_em()
    }
}

impl Faces {
    /// The text in pieces that can be drawn one after the other.
    pub(super) fn runs(&self, text: &str, weight: Weight) -> Vec<Run<'_>> {
        let mut runs: Vec<(Run<'_>, Direction)> = Vec::new();
        for letter in text.chars() {
            let Some(letters) = self.face_of(letter, weight) else {
                let spelled = format!("[U+{:04X}]", u32::from(letter));
                runs.push((Run { letters: self.plain(weight), text: spelled }, Direction::LeftToRight));
                continue;
            };
            let direction = Direction::of(letter);
            match runs.last_mut() {
                Some((run, running)) if std::ptr::eq(run.letters, letters) && running.goes_on_with(direction) => {
                    *running = running.and(direction);
                    run.text.push(letter);
                }
                _ => runs.push((Run { letters, text: letter.to_string() }, direction)),
            }
        }
        runs.into_iter().map(|(run, _)| run).collect()
    }

    const fn plain(&self, weight: Weight) -> &Letters {
        match weight {
            Weight::Regular => &self.regular,
            Weight::Bold => &self.bold,
        }
    }

    fn face_of(&self, letter: char, weight: Weight) -> Option<&Letters> {
        let seen = !letter.is_control() && !is_unseen(letter);
        [self.plain(weight), &self.regular, &self.wide].into_iter().find(|letters| seen && letters.has(letter))
    }
}

/// Characters that show nothing but change how others look: with them one name could pass for another.
const fn is_unseen(letter: char) -> bool {
    matches!(letter, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// The direction of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    LeftToRight,
    RightToLeft,
    /// As those around it.
    Either,
}

impl Direction {
    fn of(letter: char) -> Self {
        match letter {
            '\u{590}'..='\u{8ff}' | '\u{fb1d}'..='\u{fdff}' | '\u{fe70}'..='\u{fefe}' => Self::RightToLeft,
            letter if letter.is_alphanumeric() => Self::LeftToRight,
            _ => Self::Either,
        }
    }

    fn goes_on_with(self, next: Self) -> bool {
        self == next || self == Self::Either || next == Self::Either
    }

    fn and(self, next: Self) -> Self {
        if self == Self::Either { next } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<String> {
        FACES.as_ref().unwrap().runs(text, Weight::Regular).into_iter().map(|run| run.text).collect()
    }

    #[test]
    fn every_script_has_glyphs_and_a_missing_one_is_numbered() {
        for whole in
            ["Müller & Søn", "Ελένη", "Дарья", "שלום עולם", "مرحبا بالعالم", "山田太郎", "김철수", "สมชาย", "नमस्ते"]
        {
            assert_eq!(pieces(whole).concat(), whole);
        }
        assert_eq!(pieces("ann 山田"), ["ann ", "山田"]);
        assert_eq!(pieces("ann مرحبا بالعالم bob"), ["ann ", "مرحبا بالعالم ", "bob"]);
        for alphabet in
            ["ÀẞƏŊȘ", "ΆΩᾳ", "ЁЖҚӨ", "ԱՖ", "აჰ", "አማርኛ", "ကမြန်မာ", "ខ្មែរ", "ᠮᠣᠩ", "བོད", "தமிழ்", "₿€₴", "ｶﾅ「」々〆"]
        {
            assert_eq!(pieces(alphabet).concat(), alphabet);
        }
        assert_eq!(pieces("㐀"), ["[U+3400]"]);
        assert_eq!(pieces("a\u{10ffff}b\u{202e}c\u{7}"), ["a", "[U+10FFFF]b", "[U+202E]c", "[U+0007]"]);
    }

    #[test]
    fn bold_falls_back_to_regular() {
        let faces = FACES.as_ref().unwrap();
        let runs = faces.runs("Amount Ж 山", Weight::Bold);
        let of = |letters: &Letters| runs.iter().position(|run| std::ptr::eq(run.letters, letters));
        assert_eq!([of(&faces.bold), of(&faces.regular), of(&faces.wide)], [Some(0), Some(1), Some(3)]);
    }

    #[test]
    fn digits_are_all_as_wide_as_each_other() {
        let faces = FACES.as_ref().unwrap();
        let width = |text: &str| faces.runs(text, Weight::Regular).iter().map(|run| run.width(10.0)).sum::<f32>();
        assert!((width("0.12345678") - width("1.77777777")).abs() < 0.01);
        assert!(width("WWW") > width("iii") * 2.0 && width("") == 0.0);
    }
}
