//! The buffered output of a session's program. Positions are bytes from the session's beginning.

use std::collections::VecDeque;

/// The last bytes, up to a limit.
#[derive(Debug)]
pub(super) struct OutputBuffer {
    kept: VecDeque<u8>,
    most: usize,
    end: u64,
}

impl OutputBuffer {
    pub(super) fn with_capacity(most: usize) -> Self {
        Self { kept: VecDeque::new(), most, end: 0 }
    }

    /// The position after the last byte.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// The position of the first byte that is still buffered.
    pub(super) fn start(&self) -> u64 {
        self.end - self.kept.len() as u64
    }

    /// Appends output; the oldest bytes are dropped over the limit.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.end += bytes.len() as u64;
        self.kept.extend(bytes);
        let over = self.kept.len().saturating_sub(self.most);
        self.kept.drain(..over);
    }

    /// At most `most` bytes from `position` on; empty if they are dropped or not there yet.
    pub(super) fn from(&self, position: u64, most: usize) -> Vec<u8> {
        let Some(skip) = position.checked_sub(self.start()).and_then(|skip| usize::try_from(skip).ok()) else {
            return Vec::new();
        };
        let (first, second) = self.kept.as_slices();
        let of_first = first.get(skip..).unwrap_or_default();
        let of_first = of_first.get(..most).unwrap_or(of_first);
        let of_second = second.get(skip.saturating_sub(first.len())..).unwrap_or_default();
        let of_second = of_second.get(..most - of_first.len()).unwrap_or(of_second);
        [of_first, of_second].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn buffer_returns_pushed_output_within_its_capacity(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            most in 1..100_usize, at in 0..900_u64, length in 0..100_usize,
        ) {
            let mut output = OutputBuffer::with_capacity(most);
            let pushed: Vec<u8> = parts.concat();
            parts.iter().for_each(|part| output.push(part));
            prop_assert_eq!(output.end(), pushed.len() as u64);
            prop_assert_eq!(output.start(), pushed.len().saturating_sub(most) as u64);
            let expected = if at < output.start() { &[][..] } else { pushed.get(at as usize..).unwrap_or_default() };
            let expected = &expected[..expected.len().min(length)];
            prop_assert_eq!(output.from(at, length), expected);
        }
    }
}
