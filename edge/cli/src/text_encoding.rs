//! Text of files and streams as other systems write it: UTF-8 with or without a mark of its encoding, or UTF-16 with one.

/// The text, without its mark; `None` where it is neither.
pub(crate) fn decoded(bytes: Vec<u8>) -> Option<String> {
    match bytes.get(..2) {
        Some([0xFF, 0xFE]) => utf_16(&bytes[2..], u16::from_le_bytes),
        Some([0xFE, 0xFF]) => utf_16(&bytes[2..], u16::from_be_bytes),
        _ => String::from_utf8(without_mark(&bytes).to_vec()).ok(),
    }
}

/// UTF-8 without the mark of its encoding.
pub(crate) fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes)
}

fn utf_16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Option<String> {
    let (pairs, rest) = bytes.as_chunks();
    let units: Vec<u16> = pairs.iter().map(|pair| unit(*pair)).collect();
    rest.is_empty().then(|| String::from_utf16(&units).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_in_each_encoding_that_names_itself() {
        let marked = |unit: fn(u16) -> [u8; 2]| "\u{feff}ä🔑\r\n".encode_utf16().flat_map(unit).collect::<Vec<u8>>();
        for bytes in [
            "ä🔑\r\n".as_bytes().to_vec(),
            "\u{feff}ä🔑\r\n".as_bytes().to_vec(),
            marked(u16::to_le_bytes),
            marked(u16::to_be_bytes),
        ] {
            assert_eq!(decoded(bytes).as_deref(), Some("ä🔑\r\n"));
        }
        assert_eq!(decoded(Vec::new()).as_deref(), Some(""));
        // An odd byte at the end, half of a pair, Latin-1.
        for bytes in [&[0xFF, 0xFE, 0x61][..], &[0xFE, 0xFF, 0xD8, 0x00], &[0xE4]] {
            assert_eq!(decoded(bytes.to_vec()), None, "{bytes:?}");
        }
    }
}
