//! The write of a batch and its outcome: shown, retried or lost.

use std::mem::take;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tracing::warn;
use wire::recording::{Frame, FrameContent, RecordMode, RecordingEnd};

use super::batch::Batch;
use super::{CHUNK_MAX_AGE, Recorder, RecorderEvent, begin_frame};
use crate::terminal::recording::spool::{SpoolError, SpoolWriter};
use crate::terminal::session_handover::RecordingState;

/// How soon a failed write is retried, unless the spool announces room before.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

impl Recorder {
    /// Whether all accepted output was handed out.
    pub(in crate::terminal) fn is_flushed(&self) -> bool {
        self.writing.is_none() && self.in_flight.output.is_empty() && self.next.output.is_empty()
    }

    /// Whether anything waits to be written or shown.
    const fn has_pending(&self) -> bool {
        !self.in_flight.is_empty() || !self.next.is_empty()
    }

    fn must_end(&self) -> bool {
        self.state != RecordingState::On && self.terms.mode == RecordMode::Strict
    }

    /// Whether [`Recorder::next_event`] is worth waiting for.
    pub(in crate::terminal) fn is_busy(&self) -> bool {
        let has_ended = self.state != RecordingState::On && !self.end_notified;
        self.writing.is_some() || self.has_pending() || self.due.is_some() || has_ended || self.must_end()
    }

    /// Writes, and waits for the outcome. Cancel-safe.
    pub(in crate::terminal) async fn next_event(&mut self) -> RecorderEvent {
        loop {
            if let Some(writing) = &mut self.writing {
                let written = writing.await;
                self.writing = None;
                let event = match written {
                    Ok((writer, outcome)) => self.handle_write(writer, outcome),
                    // It panicked, and the writer is gone with it.
                    Err(_) => self.handle_write_error(SpoolError::Refused),
                };
                if let Some(event) = event {
                    return event;
                }
            } else if self.must_end() {
                return RecorderEvent::MustEnd;
            } else if self.state != RecordingState::On {
                if !self.end_notified {
                    self.end_notified = true;
                    return RecorderEvent::Ended;
                }
                if self.next.output.is_empty() {
                    std::future::pending::<()>().await;
                }
                let output = take(&mut self.next.output);
                return self.show(output);
            } else if let Some(at) = self.try_again {
                tokio::select! {
                    () = sleep_until(at) => {}
                    () = self.spool.emptied.notified() => {}
                }
                self.try_again = None;
            } else if self.in_flight.has_frames() || self.next.has_frames() {
                if let Some(event) = self.write() {
                    return event;
                }
            } else if !self.next.output.is_empty() {
                let output = take(&mut self.next.output);
                return self.show(output);
            } else if let Some(due) = self.due {
                sleep_until(due).await;
                self.due = None;
                if let Some(writer) = &mut self.writer {
                    writer.close();
                }
            } else {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Writes the next batch. Returns the outcome if it is known at once.
    pub(super) fn write(&mut self) -> Option<RecorderEvent> {
        let mut writer = self.writer.take()?;
        writer.set_limit(self.most);
        if !self.in_flight.has_frames() {
            self.in_flight = take(&mut self.next);
        }
        let mut frames = Vec::new();
        if self.last.is_none() {
            begin_frame(self.size).write(&mut frames);
        }
        if self.lost > 0 {
            // At the time of the last recorded frame: the frames that follow are older than this moment.
            let micros = self.last.unwrap_or(0);
            Frame { micros, what: FrameContent::Gap { bytes: self.lost } }.write(&mut frames);
        }
        frames.extend_from_slice(&self.in_flight.frames);
        if let Some(last) = &self.in_flight.last {
            last.write(&mut frames);
        }
        let position = self.shown + self.in_flight.output.len() as u64;
        let micros = self.in_flight.last.as_ref().map(|frame| frame.micros);
        self.intend(&writer, frames.len(), (position, micros), RecordingState::On);
        if let Some(outcome) = writer.write_at_once(&frames) {
            return self.handle_write(writer, outcome);
        }
        // Writing may wait for a disk that tenants keep busy.
        self.writing = Some(tokio::task::spawn_blocking(move || {
            let outcome = writer.write(&frames);
            (writer, outcome)
        }));
        None
    }

    fn handle_write(&mut self, writer: SpoolWriter, outcome: Result<(), SpoolError>) -> Option<RecorderEvent> {
        self.due = if writer.is_open() { self.due.or(Some(Instant::now() + CHUNK_MAX_AGE)) } else { None };
        let was_raised = writer.most() < self.most;
        self.writer = Some(writer);
        match outcome {
            Ok(()) => {}
            // The limit was raised meanwhile.
            Err(SpoolError::Over) if was_raised => return self.handle_write_error(SpoolError::NoRoom),
            Err(why) => return self.handle_write_error(why),
        }
        self.committed = self.intended;
        let Batch { last, output, .. } = take(&mut self.in_flight);
        (self.lost, self.last) = (0, last.map(|frame| frame.micros));
        (!output.is_empty()).then(|| self.show(output))
    }

    /// In mode strict the output is stored and retried, or never shown; otherwise it is shown, and lost from the recording.
    fn handle_write_error(&mut self, why: SpoolError) -> Option<RecorderEvent> {
        // Before a chunk is closed: one that was sent would count as complete.
        self.intended = self.committed;
        self.announce();
        let is_strict = self.terms.mode == RecordMode::Strict;
        match why {
            SpoolError::Over => self.stop(RecordingState::Full),
            SpoolError::Refused => self.stop(RecordingState::Over),
            SpoolError::NoRoom | SpoolError::Disk(_) => {
                match (&why, &mut self.writer) {
                    (SpoolError::Disk(error), _) => warn!(error = %error, "a recording cannot be written to the disk"),
                    (_, Some(writer)) => writer.close(),
                    (_, None) => {}
                }
                if is_strict {
                    self.try_again = Some(Instant::now() + RETRY_PAUSE);
                    return None;
                }
            }
        }
        let Batch { output, .. } = take(&mut self.in_flight);
        if is_strict {
            return None;
        }
        self.lost += output.len() as u64;
        (!output.is_empty()).then(|| self.show(output))
    }

    pub(super) fn stop(&mut self, state: RecordingState) {
        self.state = state;
        self.next.drop_frames();
        self.past_limit += self.next.output.len() as u64;
        self.committed.state = state;
        self.intended = self.committed;
        self.announce();
        if let Some(writer) = &mut self.writer {
            writer.close();
        }
    }

    /// Ends the recording with its session. Output that waits for room was not shown, and is not recorded either.
    pub(in crate::terminal) async fn finish(&mut self) {
        while self.try_again.is_none() && (self.writing.is_some() || self.has_pending()) {
            if matches!(self.next_event().await, RecorderEvent::MustEnd | RecorderEvent::Ended) {
                break;
            }
        }
        let Some(mut writer) = self.writer.take() else { return };
        let lost = self.lost + (self.in_flight.output.len() + self.next.output.len()) as u64;
        if self.last.is_none() && (lost == 0 || self.state != RecordingState::On) {
            // Nothing was recorded: there is no recording.
            self.spool.refuse();
            return;
        }
        let how = if self.state == RecordingState::On { RecordingEnd::Session } else { RecordingEnd::Full };
        let micros = self.micros();
        let begin = self.last.is_none().then(|| begin_frame(self.size));
        let gap = (lost > 0).then_some(Frame { micros, what: FrameContent::Gap { bytes: lost } });
        let end = Frame { micros, what: FrameContent::End(how) };
        let frames: Vec<Frame> = begin.into_iter().chain(gap).chain([end]).collect();
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        let position = self.shown + lost.saturating_sub(self.lost);
        self.intend(&writer, bytes.len(), (position, Some(micros)), RecordingState::Ended);
        let ended = tokio::task::spawn_blocking(move || writer.end(&bytes));
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = %error, "a recording's end cannot be written"),
            Err(error) => warn!(error = %error, "a recording's end cannot be written"),
        }
    }

    fn show(&mut self, output: Vec<u8>) -> RecorderEvent {
        self.shown += output.len() as u64;
        RecorderEvent::Show(output)
    }
}
