//! Frames that wait to be written, with their output.

use std::time::Duration;

use wire::recording::{CHUNK_FULL, Frame, FrameContent, RecordTerms};
use wire::terminal::CHUNK;

/// The most output that waits to be written. Above it the program is not read.
const MAX_PENDING: usize = 32 * 1024;
/// Output within this time of the last frame is merged into it: a program that writes single bytes does not produce mostly frame headers.
pub(super) const MERGE_WINDOW: Duration = Duration::from_millis(10);

/// Frames, and the output that is shown once they are written.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) frames: Vec<u8>,
    /// The newest frame, into which the next one may be merged.
    pub(super) last: Option<Frame>,
    pub(super) output: Vec<u8>,
    /// The terms since the newest frame.
    pub(super) terms: Option<RecordTerms>,
}

impl Batch {
    pub(super) const fn is_empty(&self) -> bool {
        !self.has_frames() && self.output.is_empty()
    }

    pub(super) const fn has_frames(&self) -> bool {
        self.last.is_some()
    }

    /// With one more read, and the few frames beside output, it still fits into a chunk.
    pub(super) const fn has_room(&self) -> bool {
        self.frames.len() < CHUNK_FULL && self.output.len() < MAX_PENDING
    }

    pub(super) fn add(&mut self, frame: Frame) {
        if let Some(last) = &mut self.last
            && merge(last, &frame)
        {
            return;
        }
        if let Some(last) = self.last.replace(frame) {
            last.write(&mut self.frames);
        }
    }

    pub(super) fn drop_frames(&mut self) {
        self.frames.clear();
        self.last = None;
    }
}

/// Merges `next` into `last` if possible. Returns whether it did.
fn merge(last: &mut Frame, next: &Frame) -> bool {
    let soon = Duration::from_micros(next.micros.saturating_sub(last.micros)) <= MERGE_WINDOW;
    match (&mut last.what, &next.what) {
        (FrameContent::Output(output), FrameContent::Output(more)) if soon && output.len() + more.len() <= CHUNK => {
            output.extend_from_slice(more);
            true
        }
        // No output was shown at the size before.
        (FrameContent::Resize { .. }, FrameContent::Resize { .. }) => {
            last.clone_from(next);
            true
        }
        _ => false,
    }
}
