//! The attachment of a user, and the next message to it.

use wire::recording::RecordMode;
use wire::terminal::{CHUNK, INPUT_WINDOW, TerminalEvent};

use crate::terminal::output::OutputBuffer;

pub(super) struct Attachment {
    pub(super) id: u32,
    /// The next byte to send.
    pub(super) next: u64,
    /// Input taken, and how much of that was acknowledged.
    pub(super) taken: u64,
    reported_taken: u64,
    /// The reply to its request, until it is sent.
    answer: Option<TerminalEvent>,
    /// The end of the output was announced.
    end_announced: bool,
    pub(super) has_all: bool,
}

impl Attachment {
    /// An attachment that asked for output from `wanted` on, and receives it from `next` on.
    pub(super) fn new(id: u32, wanted: u64, next: u64) -> Self {
        let answer = Some(TerminalEvent::Attached { attachment: id, position: next, lost: next - wanted });
        Self { id, next, taken: 0, reported_taken: 0, answer, end_announced: false, has_all: false }
    }

    /// Whether a message is to be sent. `is_all`: the output will not grow.
    pub(super) fn has_pending(&self, output: &OutputBuffer, is_all: bool) -> bool {
        self.answer.is_some()
            || self.next < output.end()
            || self.should_report_taken()
            || (is_all && !self.end_announced)
    }

    /// The next message.
    pub(super) fn next_message(
        &mut self,
        recording: &mut Option<RecordMode>,
        output: &OutputBuffer,
        is_all: bool,
    ) -> Option<TerminalEvent> {
        if let Some(answer) = self.answer.take() {
            return Some(answer);
        }
        if let Some(mode) = recording.take() {
            return Some(TerminalEvent::Recording { mode });
        }
        let attachment = self.id;
        if self.should_report_taken() {
            self.reported_taken = self.taken;
            return Some(TerminalEvent::Taken { attachment, bytes: self.taken });
        }
        // The position may have been dropped from the buffer; an attached user keeps the program from writing that far.
        let position = self.next.max(output.start());
        let bytes = output.from(position, CHUNK);
        self.next = position + bytes.len() as u64;
        if bytes.is_empty() {
            let asks = is_all && !self.end_announced;
            self.end_announced |= asks;
            return asks.then_some(TerminalEvent::Output { attachment, position, bytes });
        }
        Some(TerminalEvent::Output { attachment, position, bytes })
    }

    /// Enough for a message of its own; less never fills the window.
    const fn should_report_taken(&self) -> bool {
        self.taken - self.reported_taken >= INPUT_WINDOW / 4
    }
}
