//! The buffered output of a session's program, as far as its user may see it. Positions are bytes from the session's beginning.

use std::collections::VecDeque;

use super::session_handover::OutputTail;

/// The last bytes, up to a limit.
#[derive(Debug)]
pub(super) struct OutputBuffer {
    stored: Stored,
    most: usize,
    end: u64,
}

#[derive(Debug)]
enum Stored {
    InMemory(VecDeque<u8>),
    /// Where the output was written to when it was read from the terminal.
    InLog(OutputTail),
}

impl OutputBuffer {
    pub(super) fn with_capacity(most: usize) -> Self {
        Self { stored: Stored::InMemory(VecDeque::new()), most, end: 0 }
    }

    /// Over a log that has output at least up to `end`.
    pub(super) fn over_log(tail: OutputTail, most: usize, end: u64) -> Self {
        Self { stored: Stored::InLog(tail), most, end }
    }

    /// The position after the last byte.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// The position of the first byte that is still buffered.
    pub(super) fn start(&self) -> u64 {
        match &self.stored {
            Stored::InMemory(bytes) => self.end - bytes.len() as u64,
            Stored::InLog(tail) => self.end.saturating_sub(self.most as u64).max(tail.start().min(self.end)),
        }
    }

    /// Appends output; the oldest bytes are dropped over the limit.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.end += bytes.len() as u64;
        match &mut self.stored {
            Stored::InMemory(stored) => {
                stored.extend(bytes);
                let over = stored.len().saturating_sub(self.most);
                stored.drain(..over);
            }
            Stored::InLog(tail) => tail.drop_before(self.end.saturating_sub(self.most as u64)),
        }
    }

    /// At most `most` bytes from `position` on; empty if they are dropped or not there yet.
    pub(super) fn from(&self, position: u64, most: usize) -> Vec<u8> {
        let Some(skip) = position.checked_sub(self.start()).and_then(|skip| usize::try_from(skip).ok()) else {
            return Vec::new();
        };
        match &self.stored {
            Stored::InMemory(bytes) => {
                let (first, second) = bytes.as_slices();
                let of_first = first.get(skip..).unwrap_or_default();
                let of_first = of_first.get(..most).unwrap_or(of_first);
                let of_second = second.get(skip.saturating_sub(first.len())..).unwrap_or_default();
                let of_second = of_second.get(..most - of_first.len()).unwrap_or(of_second);
                [of_first, of_second].concat()
            }
            Stored::InLog(tail) => {
                let length = usize::try_from(self.end.saturating_sub(position)).unwrap_or(usize::MAX);
                tail.read(position, length.min(most))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::session_handover::OutputLog;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn buffer_returns_pushed_output_within_its_capacity(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            most in 1..100_usize, at in 0..900_u64, length in 0..100_usize,
        ) {
            let mut log = OutputLog::create().unwrap();
            let over_log = OutputBuffer::over_log(log.tail().unwrap(), most, 0);
            for mut output in [OutputBuffer::with_capacity(most), over_log] {
                let pushed: Vec<u8> = parts.concat();
                for part in &parts {
                    if matches!(output.stored, Stored::InLog(_)) {
                        log.append(part).unwrap();
                    }
                    output.push(part);
                }
                prop_assert_eq!(output.end(), pushed.len() as u64);
                prop_assert_eq!(output.start(), pushed.len().saturating_sub(most) as u64);
                let expected = if at < output.start() { &[][..] } else { pushed.get(at as usize..).unwrap_or_default() };
                let expected = &expected[..expected.len().min(length)];
                prop_assert_eq!(output.from(at, length), expected);
            }
        }
    }
}
