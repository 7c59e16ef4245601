//! Writes a session's output to its spool: frames first, and only then the output itself to the attached user.
//!
//! In mode `best-effort`, output that cannot be written is shown all the same, and counted as lost. In mode `strict` it waits, and the
//! program with it; if waiting cannot help, the session ends.
//!
//! Output that waits for the disk is kept in batches that each fit into a chunk, so that a batch is written completely or not at all.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::warn;
use wire::recording::{CHUNK_FULL, Frame, FrameContent, RecordMode, RecordTerms, RecordingEnd};
use wire::terminal::CHUNK;

use super::spool::{Spool, SpoolError, SpoolWriter};
use crate::terminal::handover::{CommitPoint, RecordFile, RecordingPoint, RecordingState};

/// A chunk is closed when it is full, or this long after its first frame.
const CHUNK_MAX_AGE: Duration = Duration::from_secs(2);
/// The most output that waits to be written. Above it the program is not read.
const MAX_PENDING: usize = 32 * 1024;
/// Output within this time of the last frame is merged into it: a program that writes single bytes does not produce mostly frame headers.
const MERGE_WINDOW: Duration = Duration::from_millis(10);
/// How soon a failed write is retried, unless the spool announces room before.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

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

/// Frames, and the output that is shown once they are written.
#[derive(Debug, Default)]
struct Batch {
    frames: Vec<u8>,
    /// The newest frame, into which the next one may be merged.
    last: Option<Frame>,
    output: Vec<u8>,
    /// The terms since the newest frame.
    terms: Option<RecordTerms>,
}

impl Batch {
    const fn is_empty(&self) -> bool {
        !self.has_frames() && self.output.is_empty()
    }

    const fn has_frames(&self) -> bool {
        self.last.is_some()
    }

    /// With one more read, and the few frames beside output, it still fits into a chunk.
    const fn has_room(&self) -> bool {
        self.frames.len() < CHUNK_FULL && self.output.len() < MAX_PENDING
    }

    fn add(&mut self, frame: Frame) {
        if let Some(last) = &mut self.last
            && merge(last, &frame)
        {
            return;
        }
        if let Some(last) = self.last.replace(frame) {
            last.write(&mut self.frames);
        }
    }

    fn drop_frames(&mut self) {
        self.frames.clear();
        self.last = None;
    }
}

/// Merges `next` into `last` if possible. Returns whether it did.
fn merge(last: &mut Frame, next: &Frame) -> bool {
    let soon = Duration::from_micros(next.micros.saturating_sub(last.micros)) <= MERGE_WINDOW;
    match (&mut last.what, &next.what) {
        (FrameContent::Output(said), FrameContent::Output(more)) if soon && said.len() + more.len() <= CHUNK => {
            said.extend_from_slice(more);
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

    /// Continues a recording of an earlier process at `committed`, of a session whose output is there from `start` to `end`. Returns the
    /// position from which output is to be recorded.
    pub(in crate::terminal) fn adopt(
        spool: Arc<Spool>,
        committed: CommitPoint,
        point: RecordingPoint,
        record: RecordFile,
        (start, end): (u64, u64),
    ) -> (Self, u64) {
        let CommitPoint { terms, state, .. } = committed;
        let mut it = Self::new(Arc::clone(&spool), terms, point.size);
        // Output that is not recorded may have been shown up to its end.
        let is_on = state == RecordingState::On && terms.mode != RecordMode::Off;
        let from = if is_on { committed.position.clamp(start, end) } else { end };
        let unrecorded = from.saturating_sub(committed.position);
        match (state, terms.mode) {
            (_, RecordMode::Off) => {}
            (RecordingState::On, _) => it.lost = unrecorded,
            (RecordingState::Full | RecordingState::Over | RecordingState::Ended, _) => it.past_limit = unrecorded,
        }
        let next = committed.chunk + u32::from(committed.length > 0);
        let is_ended = state == RecordingState::Ended;
        it.writer = (!is_ended).then(|| SpoolWriter::resume(spool, next, committed.recorded, point.most));
        it.last = committed.micros;
        it.most = point.most;
        it.begun = began_at(point.began_micros);
        it.state = state;
        it.end_notified = true;
        it.shown = from;
        it.committed = committed;
        it.intended = committed;
        it.record = Some(record);
        it.announce();
        (it, from)
    }

    /// What the next process of the agent must know.
    pub(in crate::terminal) fn point(&self) -> RecordingPoint {
        let began = monotonic().saturating_sub(self.begun.elapsed());
        RecordingPoint {
            began_micros: u64::try_from(began.as_micros()).unwrap_or(u64::MAX),
            size: self.size,
            most: self.most,
            before: self.committed,
            after: self.intended,
        }
    }

    /// Has each write announced in the session's record before it happens.
    pub(in crate::terminal) fn announce_in(&mut self, record: RecordFile) {
        self.record = Some(record);
        self.announce();
    }

    fn announce(&self) {
        if let Some(record) = &self.record {
            record.record(self.point());
        }
    }

    /// Announces a write of so many bytes, after which the recording is there.
    fn intend(
        &mut self,
        writer: &SpoolWriter,
        bytes: usize,
        (position, micros): (u64, Option<u64>),
        state: RecordingState,
    ) {
        let (chunk, length, recorded) = writer.after(bytes);
        let terms = self.in_flight.terms.unwrap_or(self.committed.terms);
        self.intended = CommitPoint { chunk, length, recorded, position, micros, terms, state };
        self.announce();
    }

    fn show(&mut self, output: Vec<u8>) -> RecorderEvent {
        self.shown += output.len() as u64;
        RecorderEvent::Show(output)
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
                let came = match written {
                    Ok((writer, outcome)) => self.handle_write(writer, outcome),
                    // It panicked, and the writer is gone with it.
                    Err(_) => self.handle_write_error(SpoolError::Refused),
                };
                if let Some(came) = came {
                    return came;
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
                if let Some(came) = self.write() {
                    return came;
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
    fn write(&mut self) -> Option<RecorderEvent> {
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

    /// In mode strict the output is kept and retried, or never shown; otherwise it is shown, and lost from the recording.
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

    fn stop(&mut self, state: RecordingState) {
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

    /// Leaves the recording to the next process of the agent.
    pub(in crate::terminal) fn leave(&self) {
        self.spool.leave();
    }

    /// As if the chunk had reached its age.
    #[cfg(test)]
    pub(super) fn close_chunk(&mut self) {
        self.due = None;
        self.writer.iter_mut().for_each(SpoolWriter::close);
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
        let words: Vec<Frame> = begin.into_iter().chain(gap).chain([end]).collect();
        let mut bytes = Vec::new();
        words.iter().for_each(|frame| frame.write(&mut bytes));
        let position = self.shown + lost.saturating_sub(self.lost);
        self.intend(&writer, bytes.len(), (position, Some(micros)), RecordingState::Ended);
        let ended = tokio::task::spawn_blocking(move || writer.end(&bytes));
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = %error, "a recording's end cannot be written"),
            Err(error) => warn!(error = %error, "a recording's end cannot be written"),
        }
    }
}

/// The machine's monotonic clock, by which the processes of one boot agree.
fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}

/// That time of the monotonic clock.
fn began_at(micros: u64) -> Instant {
    let ago = monotonic().saturating_sub(Duration::from_micros(micros));
    Instant::now().checked_sub(ago).unwrap_or_else(Instant::now)
}

/// The first frame of all.
const fn begin_frame((columns, rows): (u16, u16)) -> Frame {
    Frame { micros: 0, what: FrameContent::Begin { columns, rows } }
}

#[cfg(test)]
mod tests {
    use super::super::spool::{NextUpload, Spools};
    use super::*;
    use tokio::time::timeout;
    use uuid::Uuid;
    use wire::recording::{CHUNK_MAX, Frames};

    const MIB: u64 = 1 << 20;
    const SOON: Duration = Duration::from_millis(100);

    struct TestRecorder {
        _folder: tempfile::TempDir,
        folder: std::path::PathBuf,
        spool: Arc<Spool>,
        recorder: Recorder,
    }

    /// A recorder whose session has this share of the spool.
    fn stage(mode: RecordMode, most_bytes: u64, part: u64) -> TestRecorder {
        let folder = tempfile::tempdir().unwrap();
        let spools = Spools::new(folder.path(), 8 * part);
        let mut stage = with(folder, &spools, mode, most_bytes);
        stage.recorder.begin().unwrap();
        stage
    }

    /// A recorder that has not started.
    fn with(folder: tempfile::TempDir, spools: &Spools, mode: RecordMode, most_bytes: u64) -> TestRecorder {
        let spool = spools.begin(Uuid::from_u128(1));
        let recorder = Recorder::new(Arc::clone(&spool), RecordTerms { mode, most_bytes }, (80, 24));
        TestRecorder { folder: folder.path().join("recordings"), _folder: folder, spool, recorder }
    }

    /// Fills the whole spool. It is free again when these are removed.
    fn fill(spools: &Spools) -> Vec<Arc<Spool>> {
        let sessions = (2..20).map(|n| spools.begin(Uuid::from_u128(n)));
        let filled = sessions.inspect(|spool| {
            let mut writer = SpoolWriter::new(Arc::clone(spool), 0, u64::MAX);
            while writer.write(&[0; 16]).is_ok() {}
        });
        filled.collect()
    }

    impl TestRecorder {
        async fn record(&mut self, text: &str) -> Option<RecorderEvent> {
            self.recorder.output(text.as_bytes());
            timeout(SOON, self.recorder.next_event()).await.ok()
        }

        /// Takes what can be uploaded, as chunks that the control plane would accept, and returns its frames.
        fn send(&self) -> Vec<FrameContent> {
            let mut sent = Vec::new();
            while let NextUpload::Chunk(seq) = self.spool.next() {
                let chunk = self.spool.read(seq).unwrap();
                assert!(chunk.len() <= CHUNK_MAX, "{} bytes are one chunk", chunk.len());
                let frames: Vec<Frame> = Frames::of(&chunk).map(Result::unwrap).collect();
                assert!(frames.is_sorted_by_key(|frame| frame.micros), "they are in the order of their times");
                sent.extend(frames.into_iter().map(|frame| frame.what));
                self.spool.mark_sent(seq);
            }
            sent
        }

        /// Single bytes and sizes in turn, so that every byte is a frame of its own, as long as there is room. Returns their number.
        fn fill_with_single_bytes(&mut self) -> usize {
            let mut bytes = 0;
            while self.recorder.has_room() {
                self.recorder.output(b"x");
                self.recorder.resize(81 + u16::try_from(bytes % 2).unwrap(), 24);
                bytes += 1;
            }
            bytes
        }

        /// Simulates a disk that hangs: the batch in flight is being written, without an outcome.
        fn hang_disk(&mut self) {
            self.recorder.writer.as_mut().unwrap().close();
            assert_eq!(self.recorder.write(), None);
        }

        fn said(&self) -> String {
            let output = self.send().into_iter().filter_map(|what| match what {
                FrameContent::Output(bytes) => Some(String::from_utf8(bytes).unwrap()),
                _ => None,
            });
            output.collect()
        }
    }

    fn shown(text: &str) -> Option<RecorderEvent> {
        Some(RecorderEvent::Show(text.as_bytes().to_vec()))
    }

    fn output(text: &str) -> FrameContent {
        FrameContent::Output(text.as_bytes().to_vec())
    }

    #[tokio::test]
    async fn shown_output_is_recorded_with_sizes_and_end() {
        let mut stage = stage(RecordMode::BestEffort, MIB, MIB);
        assert_eq!(stage.record("one").await, shown("one"));
        stage.recorder.resize(100, 30);
        assert_eq!(stage.record("two").await, shown("two"));
        assert!(stage.recorder.is_flushed());
        stage.recorder.finish().await;
        let resize = FrameContent::Resize { columns: 100, rows: 30 };
        let begin = FrameContent::Begin { columns: 80, rows: 24 };
        assert_eq!(
            stage.send(),
            [begin, output("one"), resize, output("two"), FrameContent::End(RecordingEnd::Session)]
        );
    }

    #[tokio::test]
    async fn chunk_is_closed_after_its_maximum_age() {
        let mut stage = stage(RecordMode::BestEffort, MIB, MIB);
        stage.record("one").await.unwrap();
        assert!(stage.recorder.is_busy() && stage.send().is_empty());
        let _ = timeout(CHUNK_MAX_AGE + SOON, stage.recorder.next_event()).await;
        assert_eq!(stage.send().len(), 2);
        assert!(!stage.recorder.is_busy());
    }

    #[tokio::test]
    async fn strict_without_room_shows_nothing_and_resumes_without_loss() {
        let mut stage = stage(RecordMode::Strict, MIB, 8 * 1024);
        let long = "x".repeat(3000);
        assert_eq!(stage.record(&long).await, shown(&long));
        assert_eq!(stage.record(&long).await, None, "there is no room");
        assert!(!stage.recorder.has_room() && !stage.recorder.is_flushed());
        assert_eq!(stage.send().len(), 2);
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(long.clone().into_bytes()));
        stage.recorder.finish().await;
        assert_eq!(stage.send(), [output(&long), FrameContent::End(RecordingEnd::Session)]);
    }

    #[tokio::test]
    async fn best_effort_shows_all_output_and_records_the_gap() {
        let mut stage = stage(RecordMode::BestEffort, MIB, 8 * 1024);
        let long = "x".repeat(3000);
        for _ in 0..3 {
            assert_eq!(stage.record(&long).await, shown(&long));
        }
        stage.send();
        assert_eq!(stage.record("after").await, shown("after"));
        stage.recorder.finish().await;
        let sent = stage.send();
        assert_eq!(
            sent,
            [FrameContent::Gap { bytes: 6000 }, output("after"), FrameContent::End(RecordingEnd::Session)]
        );
    }

    #[tokio::test]
    async fn full_or_refused_recording_ends_and_ends_a_strict_session() {
        for (mode, refused) in [
            (RecordMode::BestEffort, false),
            (RecordMode::Strict, false),
            (RecordMode::BestEffort, true),
            (RecordMode::Strict, true),
        ] {
            let mut stage = stage(mode, 8 * 1024, MIB);
            if refused {
                stage.spool.refuse();
            }
            let long = "x".repeat(5000);
            let first = stage.record(&long).await;
            if mode == RecordMode::Strict {
                assert_eq!(first, Some(RecorderEvent::MustEnd), "and {long:.3} is not shown");
            } else {
                assert_eq!(first, shown(&long));
                assert_eq!(stage.recorder.next_event().await, RecorderEvent::Ended);
                assert_eq!(stage.record("more").await, shown("more"));
            }
            assert_eq!(stage.recorder.mode(), RecordMode::Off);
            timeout(RECORDING_ENDS, stage.recorder.finish()).await.unwrap();
            let lost = if mode == RecordMode::Strict { None } else { Some(FrameContent::Gap { bytes: 5000 }) };
            let end = [
                Some(FrameContent::Begin { columns: 80, rows: 24 }),
                lost,
                Some(FrameContent::End(RecordingEnd::Full)),
            ];
            let expected: Vec<FrameContent> = if refused { Vec::new() } else { end.into_iter().flatten().collect() };
            assert_eq!(stage.send(), expected, "{mode:?}");
        }
    }

    const RECORDING_ENDS: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn single_bytes_during_a_disk_hang_become_valid_chunks() {
        let mut stage = stage(RecordMode::BestEffort, 64 * MIB, 8 * MIB);
        stage.recorder.output(b"begun ");
        stage.hang_disk();
        let bytes = stage.fill_with_single_bytes();
        (0..10_000).for_each(|n| stage.recorder.resize(80 + n % 2, 24));
        stage.recorder.finish().await;
        assert_eq!(stage.said(), format!("begun {}", "x".repeat(bytes)));
    }

    #[tokio::test]
    async fn strict_retries_failed_output_in_order_as_valid_chunks() {
        let mut stage = stage(RecordMode::Strict, 64 * MIB, 80 * 1024);
        let first = stage.fill_with_single_bytes();
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(vec![b'x'; first]));
        let second = stage.fill_with_single_bytes();
        stage.hang_disk();
        let third = stage.fill_with_single_bytes();
        assert_eq!(timeout(SOON, stage.recorder.next_event()).await.ok(), None, "there is no room");
        assert!(!stage.recorder.has_room() && !stage.recorder.is_flushed() && stage.recorder.is_busy());
        let mut said = stage.said();
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(vec![b'x'; second]));
        said += &stage.said();
        stage.recorder.writer.as_mut().unwrap().close();
        said += &stage.said();
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(vec![b'x'; third]));
        stage.recorder.finish().await;
        said += &stage.said();
        assert_eq!(said, "x".repeat(first + second + third), "each once");
    }

    #[tokio::test]
    async fn adjacent_output_is_merged_into_one_frame() {
        let mut stage = stage(RecordMode::BestEffort, MIB, MIB);
        for word in ["a", "b", "c"] {
            stage.recorder.output(word.as_bytes());
        }
        std::thread::sleep(2 * MERGE_WINDOW);
        stage.recorder.output(b"later");
        stage.recorder.finish().await;
        let begin = FrameContent::Begin { columns: 80, rows: 24 };
        assert_eq!(stage.send(), [begin, output("abc"), output("later"), FrameContent::End(RecordingEnd::Session)]);
    }

    #[tokio::test]
    async fn best_effort_recording_on_a_full_spool_starts_later_with_a_gap() {
        for room_comes in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let spools = Spools::new(folder.path(), 8 * 8 * 1024);
            let others = fill(&spools);
            let mut stage = with(folder, &spools, RecordMode::BestEffort, MIB);
            assert!(matches!(stage.recorder.begin(), Err(SpoolError::NoRoom)));
            assert_eq!(stage.recorder.mode(), RecordMode::BestEffort, "it is tried again");
            assert_eq!(stage.record("unseen").await, shown("unseen"));
            let mut expected = vec![FrameContent::Begin { columns: 80, rows: 24 }, FrameContent::Gap { bytes: 6 }];
            if room_comes {
                others.iter().for_each(|spool| spool.remove());
                assert_eq!(stage.record("seen").await, shown("seen"));
                expected.push(output("seen"));
            }
            stage.recorder.finish().await;
            expected.push(FrameContent::End(RecordingEnd::Session));
            assert_eq!(stage.send(), expected);
        }
    }

    /// A best-effort recording that has reached its limit, and has reported it.
    async fn full() -> TestRecorder {
        let mut stage = stage(RecordMode::BestEffort, 8 * 1024, MIB);
        let long = "x".repeat(5000);
        assert_eq!(stage.record(&long).await, shown(&long));
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Ended);
        assert_eq!(stage.record("more").await, shown("more"));
        stage
    }

    #[tokio::test]
    async fn session_switched_to_strict_without_a_recording_ends() {
        let mut stage = full().await;
        assert!(!stage.recorder.change(RecordTerms { mode: RecordMode::Strict, most_bytes: 8 * 1024 }));
        assert!(stage.recorder.is_busy());
        assert_eq!(stage.record("unrecorded").await, Some(RecorderEvent::MustEnd), "and that is not shown");
        let mut unwanted = refused().await;
        unwanted.recorder.change(RecordTerms { mode: RecordMode::Strict, most_bytes: MIB });
        assert_eq!(
            unwanted.recorder.next_event().await,
            RecorderEvent::MustEnd,
            "an unwanted recording does not continue"
        );
    }

    async fn refused() -> TestRecorder {
        let mut stage = stage(RecordMode::BestEffort, 8 * 1024, MIB);
        stage.spool.refuse();
        assert_eq!(stage.record("unwanted").await, shown("unwanted"));
        assert_eq!(stage.recorder.next_event().await, RecorderEvent::Ended);
        stage
    }

    #[tokio::test]
    async fn full_recording_resumes_after_the_limit_is_raised_with_a_gap() {
        for mode in [RecordMode::BestEffort, RecordMode::Strict] {
            let mut stage = full().await;
            assert_eq!(stage.recorder.mode(), RecordMode::Off);
            assert!(stage.recorder.change(RecordTerms { mode, most_bytes: MIB }));
            assert_eq!(stage.recorder.mode(), mode);
            assert_eq!(stage.record("after").await, shown("after"));
            stage.recorder.finish().await;
            let begin = FrameContent::Begin { columns: 80, rows: 24 };
            assert_eq!(
                stage.send(),
                [begin, FrameContent::Gap { bytes: 5004 }, output("after"), FrameContent::End(RecordingEnd::Session)]
            );
        }
    }

    #[tokio::test]
    async fn limit_raised_during_a_write_does_not_end_the_recording() {
        for mode in [RecordMode::BestEffort, RecordMode::Strict] {
            let mut stage = stage(mode, 8 * 1024, MIB);
            let long = "x".repeat(5000);
            stage.recorder.output(long.as_bytes());
            stage.hang_disk();
            assert!(!stage.recorder.change(RecordTerms { mode, most_bytes: MIB }));
            assert_eq!(stage.recorder.next_event().await, RecorderEvent::Show(long.into_bytes()));
            assert_eq!(stage.record("after").await, shown("after"));
            stage.recorder.finish().await;
            let is_strict = mode == RecordMode::Strict;
            assert_eq!(stage.said(), if is_strict { "x".repeat(5000) + "after" } else { "after".to_owned() });
        }
    }

    #[tokio::test]
    async fn recording_off_writes_nothing_and_may_be_enabled_later() {
        let mut silent = stage(RecordMode::Off, 0, MIB);
        assert_eq!(silent.record("unseen").await, shown("unseen"));
        silent.recorder.finish().await;
        assert!(!silent.folder.exists() && silent.spool.next() == NextUpload::Done);

        let mut later = stage(RecordMode::Off, 0, MIB);
        later.recorder.resize(90, 20);
        assert!(later.recorder.change(RecordTerms { mode: RecordMode::Strict, most_bytes: MIB }));
        assert_eq!(later.record("seen").await, shown("seen"));
        assert!(later.recorder.change(RecordTerms::default()));
        assert_eq!(later.record("unseen").await, shown("unseen"));
        later.recorder.finish().await;
        let begin = FrameContent::Begin { columns: 90, rows: 20 };
        assert_eq!(
            later.send(),
            [
                begin,
                FrameContent::Resumed,
                output("seen"),
                FrameContent::Paused,
                FrameContent::End(RecordingEnd::Session)
            ]
        );
    }
}
