//! Who is connected, and what they are told next.

use wire::recording::Mode;
use wire::terminal::{CHUNK, INPUT_WINDOW, Up};

use crate::terminal::output::Output;

pub(super) struct Connected {
    pub(super) attachment: u32,
    /// The next byte to send.
    pub(super) next: u64,
    /// Input taken, and how much of that was said.
    pub(super) taken: u64,
    said_taken: u64,
    /// What it asked for, until it is answered.
    answer: Option<Up>,
    /// It was asked whether all has come, and said so.
    asked: bool,
    pub(super) has_all: bool,
}

impl Connected {
    /// Wanted from there on, and hears from here on.
    pub(super) fn new(attachment: u32, wanted: u64, next: u64) -> Self {
        let answer = Some(Up::Attached { attachment, position: next, lost: next - wanted });
        Self { attachment, next, taken: 0, said_taken: 0, answer, asked: false, has_all: false }
    }

    /// `is_all`: the output will not grow.
    pub(super) fn is_owed_words(&self, output: &Output, is_all: bool) -> bool {
        self.answer.is_some() || self.next < output.end() || self.has_taken_much() || (is_all && !self.asked)
    }

    /// What is to be said next.
    pub(super) fn next_words(&mut self, recording: &mut Option<Mode>, output: &Output, is_all: bool) -> Option<Up> {
        if let Some(answer) = self.answer.take() {
            return Some(answer);
        }
        if let Some(mode) = recording.take() {
            return Some(Up::Recording { mode });
        }
        let attachment = self.attachment;
        if self.has_taken_much() {
            self.said_taken = self.taken;
            return Some(Up::Taken { attachment, bytes: self.taken });
        }
        // It may have been overtaken by what is kept; whoever is connected keeps the program from going on so far.
        let position = self.next.max(output.start());
        let bytes = output.from(position, CHUNK);
        self.next = position + bytes.len() as u64;
        if bytes.is_empty() {
            let asks = is_all && !self.asked;
            self.asked |= asks;
            return asks.then_some(Up::Output { attachment, position, bytes });
        }
        Some(Up::Output { attachment, position, bytes })
    }

    /// So much that it is worth a message; less never fills the window.
    const fn has_taken_much(&self) -> bool {
        self.taken - self.said_taken >= INPUT_WINDOW / 4
    }
}
