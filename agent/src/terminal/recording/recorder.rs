//! Writes a session's output to its spool: frames first, and only then the output itself to the attached user.
//!
//! In mode `best-effort`, output that cannot be written is shown all the same, and counted as lost. In mode `strict` it waits, and the
//! program with it; if waiting cannot help, the session ends.
//!
//! Output that waits for the disk is held in batches ([`batch`]) that each fit into a chunk, so that a batch is written completely or not at
//! all ([`writing`]). A restart of the agent ends no recording ([`handover`]).

mod announced_writes;
mod batch;
#[cfg(test)]
mod tests;
mod writing;

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use batch::Batch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use wire::recording::{Frame, FrameContent, RecordMode, RecordTerms};

use super::spool::{Spool, SpoolError, SpoolWriter};
use crate::terminal::session_handover::{CommitPoint, RecordFile, RecordingState};

/// A chunk is closed when it is full, or this long after its first frame.
const CHUNK_MAX_AGE: Duration = Duration::from_secs(2);

/// See the module's documentation.
pub(in crate::terminal) struct Recorder {
    spool: Arc<Spool>,
    terms: RecordTerms,
    /// `None` while it is being written to.
    writer: Option<SpoolWriter>,
    writing: Option<JoinHandle<(SpoolWriter, Result<(), SpoolError>)>>,
    /// The batch that is being written, or that failed and is written again.
    in_flight: Batch,
    /// The batch that is written next.
    next: Batch,
    /// Output that could not be recorded and has no gap frame yet.
    lost: u64,
    /// Output since the recording reached its limit: lost if the limit is raised.
    past_limit: u64,
    /// The time of the last written frame; `None`: there is none.
    last: Option<u64>,
    /// The terminal's size, for the first frame.
    size: (u16, u16),
    most: u64,
    begun: Instant,
    /// When the open chunk is to be closed.
    due: Option<Instant>,
    try_again: Option<Instant>,
    state: RecordingState,
    end_notified: bool,
    /// The position of the next output that is shown.
    shown: u64,
    /// The last write that succeeded.
    committed: CommitPoint,
    /// The write in progress, if it succeeds.
    intended: CommitPoint,
    /// Where the next process of the agent finds both.
    record: Option<RecordFile>,
}

/// An outcome of recording.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::terminal) enum RecorderEvent {
    /// Output to be shown.
    Show(Vec<u8>),
    /// Nothing is recorded from here on, and the session continues.
    Ended,
    /// Nothing can be recorded any more, and so nothing may be shown.
    MustEnd,
}

impl Recorder {
    pub(in crate::terminal) fn new(spool: Arc<Spool>, terms: RecordTerms, (columns, rows): (u16, u16)) -> Self {
        let state = RecordingState::On;
        let committed = CommitPoint { chunk: 0, length: 0, recorded: 0, position: 0, micros: None, terms, state };
        Self {
            writer: Some(SpoolWriter::new(Arc::clone(&spool), 0, terms.most_bytes)),
            spool,
            terms,
            writing: None,
            in_flight: Batch::default(),
            next: Batch::default(),
            lost: 0,
            past_limit: 0,
            last: None,
            size: (columns, rows),
            most: terms.most_bytes,
            begun: Instant::now(),
            due: None,
            try_again: None,
            state,
            end_notified: false,
            shown: 0,
            committed,
            intended: committed,
            record: None,
        }
    }

    /// Starts the recording, if there is to be one. If it cannot start, a session that must be recorded must not start either; another
    /// session is recorded as soon as possible, with a gap until then.
    ///
    /// # Errors
    /// Why it cannot start.
    pub(in crate::terminal) fn begin(&mut self) -> Result<(), SpoolError> {
        let Some(writer) = self.writer.as_mut().filter(|_| self.terms.mode != RecordMode::Off) else { return Ok(()) };
        let mut begin = Vec::new();
        begin_frame(self.size).write(&mut begin);
        let (chunk, length, recorded) = writer.after(begin.len());
        let begun = writer.write(&begin);
        match &begun {
            Ok(()) => {
                self.committed = CommitPoint { chunk, length, recorded, micros: Some(0), ..self.committed };
                self.intended = self.committed;
                self.last = Some(0);
                self.due = Some(self.begun + CHUNK_MAX_AGE);
            }
            Err(SpoolError::Over) => self.stop(RecordingState::Full),
            Err(SpoolError::Refused) => self.stop(RecordingState::Over),
            Err(SpoolError::NoRoom | SpoolError::Disk(_)) => {}
        }
        begun
    }

    /// The mode in which output is recorded from here on.
    pub(in crate::terminal) const fn mode(&self) -> RecordMode {
        match self.state {
            RecordingState::On => self.terms.mode,
            RecordingState::Full | RecordingState::Over | RecordingState::Ended => RecordMode::Off,
        }
    }

    /// Changes the terms. Returns whether that changes what is recorded.
    pub(in crate::terminal) fn change(&mut self, terms: RecordTerms) -> bool {
        let (before, was_on) = (self.mode(), self.terms.mode != RecordMode::Off);
        let is_on = terms.mode != RecordMode::Off;
        self.terms = terms;
        if is_on {
            if self.state == RecordingState::Full && terms.most_bytes > self.most {
                self.resume();
            }
            self.most = terms.most_bytes;
        }
        match (was_on, is_on) {
            (true, false) => self.frame(FrameContent::Paused),
            (false, true) => self.frame(FrameContent::Resumed),
            (true, true) | (false, false) => {}
        }
        self.mode() != before
    }

    fn resume(&mut self) {
        self.state = RecordingState::On;
        self.committed.state = RecordingState::On;
        self.end_notified = false;
        self.lost += take(&mut self.past_limit);
    }

    /// Whether more output is accepted, [`CHUNK`] of it at most.
    pub(in crate::terminal) fn has_room(&self) -> bool {
        self.next.has_room() && (self.try_again.is_none() || self.mode() != RecordMode::Strict)
    }

    /// Accepts output of the program.
    pub(in crate::terminal) fn output(&mut self, bytes: &[u8]) {
        if self.mode() != RecordMode::Off {
            self.frame(FrameContent::Output(bytes.to_vec()));
        } else if self.terms.mode != RecordMode::Off {
            self.past_limit += bytes.len() as u64;
        }
        self.next.output.extend_from_slice(bytes);
    }

    pub(in crate::terminal) fn resize(&mut self, columns: u16, rows: u16) {
        if self.last.is_none() {
            self.size = (columns, rows);
        }
        if self.mode() != RecordMode::Off {
            self.frame(FrameContent::Resize { columns, rows });
        }
    }

    fn frame(&mut self, what: FrameContent) {
        if self.state == RecordingState::On {
            let micros = self.micros();
            self.next.add(Frame { micros, what });
            self.next.terms = Some(self.terms);
        }
    }

    fn micros(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// As if the chunk had reached its age.
    #[cfg(test)]
    pub(super) fn close_chunk(&mut self) {
        self.due = None;
        self.writer.iter_mut().for_each(SpoolWriter::close);
    }
}

/// The first frame of all.
const fn begin_frame((columns, rows): (u16, u16)) -> Frame {
    Frame { micros: 0, what: FrameContent::Begin { columns, rows } }
}
