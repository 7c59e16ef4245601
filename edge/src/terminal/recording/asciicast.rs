//! A recording as asciicast v2 (the format of asciinema's recorder, version 2): a line with the header, then a line for each event, as JSON
//! in UTF-8. A marker stands for missing output.

use chrono::{DateTime, Utc};
use serde_json::json;
use std::fmt::Write as _;
use wire::recording::{FrameContent, Frames, RecordingEnd};

/// The media type of a file that asciinema plays.
pub(crate) const MEDIA_TYPE: &str = "application/x-asciicast";

/// Writes one recording, chunk by chunk.
#[derive(Debug)]
pub(crate) struct Cast {
    began_at: DateTime<Utc>,
    title: String,
    began: bool,
    /// The time of the last line: players want them in order, and clocks of chunks may disagree.
    micros: u64,
    /// The first bytes of a character whose rest is in a later frame.
    cut: Vec<u8>,
    ended: bool,
}

impl Cast {
    pub(crate) fn new(began_at: DateTime<Utc>, title: String) -> Self {
        Self { began_at, title, began: false, micros: 0, cut: Vec::new(), ended: false }
    }

    /// The lines of one chunk's frames.
    pub(crate) fn write(&mut self, frames: &[u8]) -> String {
        let mut lines = String::with_capacity(frames.len() + frames.len() / 4);
        for frame in Frames::of(frames).map_while(Result::ok) {
            self.micros = self.micros.max(frame.micros);
            match frame.what {
                FrameContent::Begin { columns, rows } => self.header(&mut lines, columns, rows),
                FrameContent::Output(bytes) => self.output(&mut lines, &bytes),
                FrameContent::Resize { columns, rows } => self.event(&mut lines, 'r', &format!("{columns}x{rows}")),
                FrameContent::Gap { bytes } => {
                    self.cut.clear();
                    self.event(&mut lines, 'm', &format!("{bytes} bytes are missing: they could not be recorded"));
                }
                FrameContent::Paused => self.event(&mut lines, 'm', "recording is off from here"),
                FrameContent::Resumed => self.event(&mut lines, 'm', "recording goes on from here"),
                FrameContent::End(how) => self.end(&mut lines, how),
            }
        }
        lines
    }

    /// The final marker of a recording without an end.
    pub(crate) fn finish(&mut self) -> String {
        let mut lines = String::new();
        if !self.began {
            self.header(&mut lines, 80, 24);
        }
        if !self.ended {
            self.event(&mut lines, 'm', "the rest has not come from the node");
        }
        lines
    }

    fn header(&mut self, lines: &mut String, columns: u16, rows: u16) {
        if std::mem::replace(&mut self.began, true) {
            return;
        }
        let header = json!({
            "version": 2,
            "width": columns.max(1),
            "height": rows.max(1),
            "timestamp": self.began_at.timestamp(),
            "title": self.title,
            "env": { "TERM": "xterm-256color" },
        });
        let _ = writeln!(lines, "{header}");
    }

    fn end(&mut self, lines: &mut String, how: RecordingEnd) {
        self.ended = true;
        match how {
            RecordingEnd::Session => {}
            RecordingEnd::Agent => self.event(lines, 'm', "the node's agent ended here, and the session with it"),
            RecordingEnd::Full => self.event(lines, 'm', "the recording is as long as it may be; the rest is missing"),
        }
    }

    /// Programs write bytes, JSON contains characters: a character that is split between two frames is joined, and an invalid one is shown
    /// as such.
    fn output(&mut self, lines: &mut String, bytes: &[u8]) {
        self.cut.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.cut);
        let mut text = String::with_capacity(bytes.len());
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let may_go_on = chunks.peek().is_none() && is_a_beginning(invalid);
            if may_go_on {
                self.cut = invalid.to_vec();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        if !text.is_empty() {
            self.event(lines, 'o', &text);
        }
    }

    fn event(&self, lines: &mut String, code: char, data: &str) {
        let (seconds, micros) = (self.micros / 1_000_000, self.micros % 1_000_000);
        let data = serde_json::Value::from(data);
        let _ = writeln!(lines, "[{seconds}.{micros:06}, \"{code}\", {data}]");
    }
}

/// True where a character may begin so.
fn is_a_beginning(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;
    use wire::recording::Frame;

    fn cast() -> Cast {
        Cast::new(DateTime::from_timestamp(1_800_000_000, 0).unwrap(), "session 1".to_owned())
    }

    fn chunk(frames: Vec<(u64, FrameContent)>) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.into_iter().for_each(|(micros, what)| Frame { micros, what }.write(&mut bytes));
        bytes
    }

    fn begin() -> (u64, FrameContent) {
        (0, FrameContent::Begin { columns: 80, rows: 24 })
    }

    #[test]
    fn the_lines_are_as_reviewed() {
        let mut cast = cast();
        let mut lines = cast.write(&chunk(vec![
            begin(),
            (1_500_000, FrameContent::Output(b"\x1b[31mred\r\n".to_vec())),
            (2_000_000, FrameContent::Resize { columns: 132, rows: 43 }),
            (2_000_001, FrameContent::Gap { bytes: 9 }),
        ]));
        lines += &cast.write(&chunk(vec![
            (1, FrameContent::Output(b"\"late\"".to_vec())),
            (3_000_000, FrameContent::Paused),
            (4_000_000, FrameContent::Resumed),
            (5_000_000, FrameContent::End(RecordingEnd::Session)),
        ]));
        lines += &cast.finish();
        insta::assert_snapshot!(lines);
    }

    #[test]
    fn missing_end_is_marked() {
        assert!(cast().finish().contains("the rest has not come"));
        let mut lost = cast();
        let lines = lost.write(&chunk(vec![begin(), (1, FrameContent::End(RecordingEnd::Agent))])) + &lost.finish();
        assert!(lines.contains("agent ended here") && !lines.contains("the rest has not come"), "{lines}");
    }

    fn shown(lines: &str) -> String {
        let events = lines.lines().skip(1).map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.filter(|event| event[1] == "o").map(|event| event[2].as_str().unwrap().to_owned()).collect()
    }

    proptest! {
        #[test]
        fn split_characters_are_joined(text in "\\PC{0,40}", cuts in prop::collection::vec(0..160_usize, 0..6)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.sort_unstable();
            cuts.push(text.len());
            let (mut cast, mut from) = (cast(), 0);
            let mut lines = cast.write(&chunk(vec![begin()]));
            for to in cuts {
                if to > from {
                    lines += &cast.write(&chunk(vec![(1, FrameContent::Output(text.as_bytes()[from..to].to_vec()))]));
                    from = to;
                }
            }
            prop_assert_eq!(shown(&lines), text);
        }

        #[test]
        fn any_program_output_becomes_json_lines_with_monotonic_times(
            parts in prop::collection::vec((0..9_u64, prop::collection::vec(any::<u8>(), 1..40)), 0..20),
        ) {
            let mut cast = cast();
            let mut lines = cast.write(&chunk(vec![begin()]));
            let printed: usize = parts.iter().map(|(_, bytes)| bytes.len()).sum();
            for (micros, bytes) in parts {
                lines += &cast.write(&chunk(vec![(micros, FrameContent::Output(bytes))]));
            }
            let times: Vec<f64> = lines.lines().skip(1).map(|line| serde_json::from_str::<Value>(line).unwrap()[0].as_f64().unwrap()).collect();
            prop_assert!(times.is_sorted());
            prop_assert!(shown(&lines).chars().count() <= printed);
        }
    }
}
