//! What a session says to its spool: frames first, and only then the output itself to whoever is connected.
//!
//! In mode `best-effort` what cannot be written is shown all the same, and counted as missing. In mode `strict` it waits, and the program with
//! it; where there is nothing to wait for, the session ends.
//!
//! What waits for the disk waits in batches that each fit into a chunk, so that a batch is written whole or not at all.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::warn;
use wire::recording::{CHUNK_FULL, Ended, Frame, Mode, Terms, What};
use wire::terminal::CHUNK;

use super::spool::{NotKept, Spool, Tape};

/// A chunk is sent when it is full, or this long after its first frame.
const CHUNK_LASTS: Duration = Duration::from_secs(2);
/// Output that waits to be written. Past it the program is not read.
const MOST_WAITING: usize = 32 * 1024;
/// Words that come so soon after the last ones become one frame with them: a program that says single bytes is not all heads of frames.
const AS_ONE_WITHIN: Duration = Duration::from_millis(10);
/// How soon what could not be written is tried again, where nobody says that there is room.
const TRIES_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// See the module.
pub(in crate::terminal) struct Recorder {
    spool: Arc<Spool>,
    terms: Terms,
    /// `None` while it is being written to.
    tape: Option<Tape>,
    writing: Option<JoinHandle<(Tape, Result<(), NotKept>)>>,
    /// What is being written, or was tried in vain and is written again.
    under_way: Batch,
    /// What is written next.
    next: Batch,
    /// Output that could not be recorded, and of which that was not said yet.
    lost: u64,
    /// Output since it was as long as it may be: lost where it goes on after all.
    past_its_end: u64,
    /// The time of the last frame that was written; `None`: there is none.
    last: Option<u64>,
    /// The terminal's size, for the first frame.
    size: (u16, u16),
    most: u64,
    begun: Instant,
    /// When the chunk that is begun is to be sent.
    due: Option<Instant>,
    try_again: Option<Instant>,
    going: Going,
    said_over: bool,
}

/// Whether the recording goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Going {
    On,
    /// It is as long as it may be. It goes on where that is raised.
    Full,
    /// Nobody wants it, or its writer is gone.
    Over,
}

/// Frames, and the output that is shown once they are written.
#[derive(Debug, Default)]
struct Batch {
    frames: Vec<u8>,
    /// The newest frame. What comes next may become a part of it.
    last: Option<Frame>,
    output: Vec<u8>,
}

impl Batch {
    const fn is_empty(&self) -> bool {
        !self.has_frames() && self.output.is_empty()
    }

    const fn has_frames(&self) -> bool {
        self.last.is_some()
    }

    /// With one read more, and what little comes beside output, it still fits into a chunk.
    const fn has_room(&self) -> bool {
        self.frames.len() < CHUNK_FULL && self.output.len() < MOST_WAITING
    }

    fn add(&mut self, frame: Frame) {
        if let Some(last) = &mut self.last
            && joined(last, &frame)
        {
            return;
        }
        if let Some(last) = self.last.replace(frame) {
            last.write(&mut self.frames);
        }
    }

    fn forget_frames(&mut self) {
        self.frames.clear();
        self.last = None;
    }
}

/// Whether `last` has become both.
fn joined(last: &mut Frame, next: &Frame) -> bool {
    let soon = Duration::from_micros(next.micros.saturating_sub(last.micros)) <= AS_ONE_WITHIN;
    match (&mut last.what, &next.what) {
        (What::Output(said), What::Output(more)) if soon && said.len() + more.len() <= CHUNK => {
            said.extend_from_slice(more);
            true
        }
        // Nothing was shown at the size before.
        (What::Resize { .. }, What::Resize { .. }) => {
            last.clone_from(next);
            true
        }
        _ => false,
    }
}

/// What comes of recording.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::terminal) enum Came {
    /// This is to be shown.
    Show(Vec<u8>),
    /// From here on nothing is recorded, and the session goes on.
    Ended,
    /// Nothing can be recorded any more, and so nothing may be shown.
    MustEnd,
}

impl Recorder {
    pub(in crate::terminal) fn new(spool: Arc<Spool>, terms: Terms, (columns, rows): (u16, u16)) -> Self {
        Self {
            tape: Some(Tape::new(Arc::clone(&spool), 0, terms.most_bytes)),
            spool,
            terms,
            writing: None,
            under_way: Batch::default(),
            next: Batch::default(),
            lost: 0,
            past_its_end: 0,
            last: None,
            size: (columns, rows),
            most: terms.most_bytes,
            begun: Instant::now(),
            due: None,
            try_again: None,
            going: Going::On,
            said_over: false,
        }
    }

    /// Begins the recording, where there is to be one. Where it does not begin, a session that must be recorded must not begin either;
    /// of another one it begins as soon as it can, with what is missing until then.
    ///
    /// # Errors
    /// Why it does not begin.
    pub(in crate::terminal) fn begin(&mut self) -> Result<(), NotKept> {
        let Some(tape) = self.tape.as_mut().filter(|_| self.terms.mode != Mode::Off) else { return Ok(()) };
        let mut begin = Vec::new();
        begins(self.size).write(&mut begin);
        let begun = tape.write(&begin);
        match &begun {
            Ok(()) => {
                self.last = Some(0);
                self.due = Some(self.begun + CHUNK_LASTS);
            }
            Err(NotKept::Over) => self.give_up(Going::Full),
            Err(NotKept::Refused) => self.give_up(Going::Over),
            Err(NotKept::NoRoom | NotKept::Disk(_)) => {}
        }
        begun
    }

    /// How what is shown from here on is recorded.
    pub(in crate::terminal) const fn mode(&self) -> Mode {
        match self.going {
            Going::On => self.terms.mode,
            Going::Full | Going::Over => Mode::Off,
        }
    }

    /// Changes the terms. Whether that changes what is recorded.
    pub(in crate::terminal) fn change(&mut self, terms: Terms) -> bool {
        let (before, was_on) = (self.mode(), self.terms.mode != Mode::Off);
        let is_on = terms.mode != Mode::Off;
        self.terms = terms;
        if is_on {
            if self.going == Going::Full && terms.most_bytes > self.most {
                self.go_on();
            }
            self.most = terms.most_bytes;
        }
        match (was_on, is_on) {
            (true, false) => self.frame(What::Paused),
            (false, true) => self.frame(What::Resumed),
            (true, true) | (false, false) => {}
        }
        self.mode() != before
    }

    fn go_on(&mut self) {
        self.going = Going::On;
        self.said_over = false;
        self.lost += take(&mut self.past_its_end);
    }

    /// Whether more output may be handed over, [`CHUNK`] of it at most.
    pub(in crate::terminal) fn has_room(&self) -> bool {
        self.next.has_room() && (self.try_again.is_none() || self.mode() != Mode::Strict)
    }

    /// What the program said.
    pub(in crate::terminal) fn output(&mut self, bytes: &[u8]) {
        if self.mode() != Mode::Off {
            self.frame(What::Output(bytes.to_vec()));
        } else if self.terms.mode != Mode::Off {
            self.past_its_end += bytes.len() as u64;
        }
        self.next.output.extend_from_slice(bytes);
    }

    pub(in crate::terminal) fn resize(&mut self, columns: u16, rows: u16) {
        if self.last.is_none() {
            self.size = (columns, rows);
        }
        if self.mode() != Mode::Off {
            self.frame(What::Resize { columns, rows });
        }
    }

    fn frame(&mut self, what: What) {
        if self.going == Going::On {
            let micros = self.micros();
            self.next.add(Frame { micros, what });
        }
    }

    fn micros(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// True where all that was handed over came out again.
    pub(in crate::terminal) fn is_settled(&self) -> bool {
        self.writing.is_none() && self.under_way.output.is_empty() && self.next.output.is_empty()
    }

    /// True where something is to be written or shown.
    const fn waits(&self) -> bool {
        !self.under_way.is_empty() || !self.next.is_empty()
    }

    fn must_end(&self) -> bool {
        self.going != Going::On && self.terms.mode == Mode::Strict
    }

    /// True where [`Recorder::comes`] is worth waiting for.
    pub(in crate::terminal) fn is_busy(&self) -> bool {
        let has_ended = self.going != Going::On && !self.said_over;
        self.writing.is_some() || self.waits() || self.due.is_some() || has_ended || self.must_end()
    }

    /// Writes, and waits for what comes of it. It may be dropped at any point.
    pub(in crate::terminal) async fn comes(&mut self) -> Came {
        loop {
            if let Some(writing) = &mut self.writing {
                let written = writing.await;
                self.writing = None;
                let came = match written {
                    Ok((tape, outcome)) => self.written(tape, outcome),
                    // It panicked, and the tape is gone with it.
                    Err(_) => self.not_written(NotKept::Refused),
                };
                if let Some(came) = came {
                    return came;
                }
            } else if self.must_end() {
                return Came::MustEnd;
            } else if self.going != Going::On {
                if !self.said_over {
                    self.said_over = true;
                    return Came::Ended;
                }
                if self.next.output.is_empty() {
                    std::future::pending::<()>().await;
                }
                return Came::Show(take(&mut self.next.output));
            } else if let Some(at) = self.try_again {
                tokio::select! {
                    () = sleep_until(at) => {}
                    () = self.spool.emptied.notified() => {}
                }
                self.try_again = None;
            } else if self.under_way.has_frames() || self.next.has_frames() {
                if let Some(came) = self.write() {
                    return came;
                }
            } else if !self.next.output.is_empty() {
                return Came::Show(take(&mut self.next.output));
            } else if let Some(due) = self.due {
                sleep_until(due).await;
                self.due = None;
                if let Some(tape) = &mut self.tape {
                    tape.close();
                }
            } else {
                std::future::pending::<()>().await;
            }
        }
    }

    /// What comes of it, where that is known at once.
    fn write(&mut self) -> Option<Came> {
        let mut tape = self.tape.take()?;
        tape.may_be(self.most);
        if !self.under_way.has_frames() {
            self.under_way = take(&mut self.next);
        }
        let mut frames = Vec::new();
        if self.last.is_none() {
            begins(self.size).write(&mut frames);
        }
        if self.lost > 0 {
            // At the time of what was recorded before: the frames that follow are older than this moment.
            let micros = self.last.unwrap_or(0);
            Frame { micros, what: What::Gap { bytes: self.lost } }.write(&mut frames);
        }
        frames.extend_from_slice(&self.under_way.frames);
        if let Some(last) = &self.under_way.last {
            last.write(&mut frames);
        }
        if let Some(outcome) = tape.write_at_once(&frames) {
            return self.written(tape, outcome);
        }
        // Writing may have to wait for a disk that tenants keep busy.
        self.writing = Some(tokio::task::spawn_blocking(move || {
            let outcome = tape.write(&frames);
            (tape, outcome)
        }));
        None
    }

    fn written(&mut self, tape: Tape, outcome: Result<(), NotKept>) -> Option<Came> {
        self.due = if tape.is_open() { self.due.or(Some(Instant::now() + CHUNK_LASTS)) } else { None };
        let was_raised = tape.most() < self.most;
        self.tape = Some(tape);
        match outcome {
            Ok(()) => {}
            // By now it may be longer.
            Err(NotKept::Over) if was_raised => return self.not_written(NotKept::NoRoom),
            Err(why) => return self.not_written(why),
        }
        let Batch { last, output, .. } = take(&mut self.under_way);
        (self.lost, self.last) = (0, last.map(|frame| frame.micros));
        (!output.is_empty()).then_some(Came::Show(output))
    }

    /// Strict, it is kept and tried again, or never shown; otherwise it is shown, and missing.
    fn not_written(&mut self, why: NotKept) -> Option<Came> {
        let is_strict = self.terms.mode == Mode::Strict;
        match why {
            NotKept::Over => self.give_up(Going::Full),
            NotKept::Refused => self.give_up(Going::Over),
            NotKept::NoRoom | NotKept::Disk(_) => {
                if let NotKept::Disk(error) = &why {
                    warn!(error = %error, "a recording cannot be written to the disk");
                }
                if is_strict {
                    self.try_again = Some(Instant::now() + TRIES_AGAIN_AFTER);
                    return None;
                }
            }
        }
        let Batch { output, .. } = take(&mut self.under_way);
        if is_strict {
            return None;
        }
        self.lost += output.len() as u64;
        (!output.is_empty()).then_some(Came::Show(output))
    }

    fn give_up(&mut self, going: Going) {
        self.going = going;
        self.next.forget_frames();
        self.past_its_end += self.next.output.len() as u64;
        if let Some(tape) = &mut self.tape {
            tape.close();
        }
    }

    /// The session is over. What waits for room was not shown, and is not recorded either.
    pub(in crate::terminal) async fn finish(&mut self) {
        while self.try_again.is_none() && (self.writing.is_some() || self.waits()) {
            if matches!(self.comes().await, Came::MustEnd | Came::Ended) {
                break;
            }
        }
        let Some(mut tape) = self.tape.take() else { return };
        let lost = self.lost + (self.under_way.output.len() + self.next.output.len()) as u64;
        if self.last.is_none() && (lost == 0 || self.going != Going::On) {
            // Nothing was recorded: there is no recording.
            self.spool.refuse();
            return;
        }
        let how = if self.going == Going::On { Ended::Session } else { Ended::Full };
        let micros = self.micros();
        let begin = self.last.is_none().then(|| begins(self.size));
        let gap = (lost > 0).then_some(Frame { micros, what: What::Gap { bytes: lost } });
        let end = Frame { micros, what: What::End(how) };
        let words: Vec<Frame> = begin.into_iter().chain(gap).chain([end]).collect();
        let ended = tokio::task::spawn_blocking(move || tape.end(&words));
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = %error, "a recording's end cannot be written"),
            Err(error) => warn!(error = %error, "a recording's end cannot be written"),
        }
    }
}

/// The first frame of all.
const fn begins((columns, rows): (u16, u16)) -> Frame {
    Frame { micros: 0, what: What::Begin { columns, rows } }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::spool::{Next, Spools};
    use super::*;
    use tokio::time::timeout;
    use uuid::Uuid;
    use wire::recording::{CHUNK_MOST, Frames};

    const MIB: u64 = 1 << 20;
    const SOON: Duration = Duration::from_millis(100);

    struct Stage {
        _folder: tempfile::TempDir,
        folder: std::path::PathBuf,
        spool: Arc<Spool>,
        recorder: Recorder,
    }

    /// A recorder whose session has so much of the spool.
    fn stage(mode: Mode, most_bytes: u64, part: u64) -> Stage {
        let folder = tempfile::tempdir().unwrap();
        let spools = Spools::new(folder.path(), 8 * part);
        let mut stage = with(folder, &spools, mode, most_bytes);
        stage.recorder.begin().unwrap();
        stage
    }

    /// One that has not begun.
    fn with(folder: tempfile::TempDir, spools: &Spools, mode: Mode, most_bytes: u64) -> Stage {
        let spool = spools.begin(Uuid::from_u128(1));
        let recorder = Recorder::new(Arc::clone(&spool), Terms { mode, most_bytes }, (80, 24));
        Stage { folder: folder.path().join("recordings"), _folder: folder, spool, recorder }
    }

    /// Takes the whole spool. It is free again when these are removed.
    fn fill(spools: &Spools) -> Vec<Arc<Spool>> {
        let sessions = (2..20).map(|n| spools.begin(Uuid::from_u128(n)));
        let filled = sessions.inspect(|spool| {
            let mut tape = Tape::new(Arc::clone(spool), 0, u64::MAX);
            while tape.write(&[0; 16]).is_ok() {}
        });
        filled.collect()
    }

    impl Stage {
        async fn says(&mut self, text: &str) -> Option<Came> {
            self.recorder.output(text.as_bytes());
            timeout(SOON, self.recorder.comes()).await.ok()
        }

        /// Takes what can be sent, as chunks that the control plane would take, and answers with its frames.
        fn send(&self) -> Vec<What> {
            let mut sent = Vec::new();
            while let Next::Chunk(seq) = self.spool.next() {
                let chunk = self.spool.read(seq).unwrap();
                assert!(chunk.len() <= CHUNK_MOST, "{} bytes are one chunk", chunk.len());
                let frames: Vec<Frame> = Frames::of(&chunk).map(Result::unwrap).collect();
                assert!(frames.is_sorted_by_key(|frame| frame.micros), "they are in the order of their times");
                sent.extend(frames.into_iter().map(|frame| frame.what));
                self.spool.sent(seq);
            }
            sent
        }

        /// Single bytes and sizes by turns, so that every byte is a frame of its own, as long as there is room. Answers with their number.
        fn fills(&mut self) -> usize {
            let mut bytes = 0;
            while self.recorder.has_room() {
                self.recorder.output(b"x");
                self.recorder.resize(81 + u16::try_from(bytes % 2).unwrap(), 24);
                bytes += 1;
            }
            bytes
        }

        /// As long as the disk hangs: what is waiting is being written, and nobody has heard how that went.
        fn hangs(&mut self) {
            self.recorder.tape.as_mut().unwrap().close();
            assert_eq!(self.recorder.write(), None);
        }

        fn said(&self) -> String {
            let output = self.send().into_iter().filter_map(|what| match what {
                What::Output(bytes) => Some(String::from_utf8(bytes).unwrap()),
                _ => None,
            });
            output.collect()
        }
    }

    fn shown(text: &str) -> Option<Came> {
        Some(Came::Show(text.as_bytes().to_vec()))
    }

    fn output(text: &str) -> What {
        What::Output(text.as_bytes().to_vec())
    }

    #[tokio::test]
    async fn what_is_shown_is_recorded_with_its_sizes_and_the_end() {
        let mut stage = stage(Mode::BestEffort, MIB, MIB);
        assert_eq!(stage.says("one").await, shown("one"));
        stage.recorder.resize(100, 30);
        assert_eq!(stage.says("two").await, shown("two"));
        assert!(stage.recorder.is_settled());
        stage.recorder.finish().await;
        let resize = What::Resize { columns: 100, rows: 30 };
        let begin = What::Begin { columns: 80, rows: 24 };
        assert_eq!(stage.send(), [begin, output("one"), resize, output("two"), What::End(Ended::Session)]);
    }

    #[tokio::test]
    async fn a_chunk_is_sent_after_a_while_though_it_is_not_full() {
        let mut stage = stage(Mode::BestEffort, MIB, MIB);
        stage.says("one").await.unwrap();
        assert!(stage.recorder.is_busy() && stage.send().is_empty());
        let _ = timeout(CHUNK_LASTS + SOON, stage.recorder.comes()).await;
        assert_eq!(stage.send().len(), 2);
        assert!(!stage.recorder.is_busy());
    }

    #[tokio::test]
    async fn strict_shows_nothing_without_room_and_goes_on_where_it_stopped() {
        let mut stage = stage(Mode::Strict, MIB, 8 * 1024);
        let long = "x".repeat(3000);
        assert_eq!(stage.says(&long).await, shown(&long));
        assert_eq!(stage.says(&long).await, None, "there is no room");
        assert!(!stage.recorder.has_room() && !stage.recorder.is_settled());
        assert_eq!(stage.send().len(), 2);
        assert_eq!(stage.recorder.comes().await, Came::Show(long.clone().into_bytes()));
        stage.recorder.finish().await;
        assert_eq!(stage.send(), [output(&long), What::End(Ended::Session)]);
    }

    #[tokio::test]
    async fn best_effort_shows_all_and_says_how_much_is_missing() {
        let mut stage = stage(Mode::BestEffort, MIB, 8 * 1024);
        let long = "x".repeat(3000);
        for _ in 0..3 {
            assert_eq!(stage.says(&long).await, shown(&long));
        }
        stage.send();
        assert_eq!(stage.says("after").await, shown("after"));
        stage.recorder.finish().await;
        let sent = stage.send();
        assert_eq!(sent, [What::Gap { bytes: 6000 }, output("after"), What::End(Ended::Session)]);
    }

    #[tokio::test]
    async fn a_recording_that_is_full_or_refused_ends_and_a_strict_session_with_it() {
        for (mode, refused) in
            [(Mode::BestEffort, false), (Mode::Strict, false), (Mode::BestEffort, true), (Mode::Strict, true)]
        {
            let mut stage = stage(mode, 8 * 1024, MIB);
            if refused {
                stage.spool.refuse();
            }
            let long = "x".repeat(5000);
            let first = stage.says(&long).await;
            if mode == Mode::Strict {
                assert_eq!(first, Some(Came::MustEnd), "and {long:.3} is not shown");
            } else {
                assert_eq!(first, shown(&long));
                assert_eq!(stage.recorder.comes().await, Came::Ended);
                assert_eq!(stage.says("more").await, shown("more"));
            }
            assert_eq!(stage.recorder.mode(), Mode::Off);
            timeout(RECORDING_ENDS, stage.recorder.finish()).await.unwrap();
            let lost = if mode == Mode::Strict { None } else { Some(What::Gap { bytes: 5000 }) };
            let end = [Some(What::Begin { columns: 80, rows: 24 }), lost, Some(What::End(Ended::Full))];
            let expected: Vec<What> = if refused { Vec::new() } else { end.into_iter().flatten().collect() };
            assert_eq!(stage.send(), expected, "{mode:?}");
        }
    }

    const RECORDING_ENDS: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn single_bytes_that_are_said_while_the_disk_hangs_become_chunks_that_are_taken() {
        let mut stage = stage(Mode::BestEffort, 64 * MIB, 8 * MIB);
        stage.recorder.output(b"begun ");
        stage.hangs();
        let bytes = stage.fills();
        (0..10_000).for_each(|n| stage.recorder.resize(80 + n % 2, 24));
        stage.recorder.finish().await;
        assert_eq!(stage.said(), format!("begun {}", "x".repeat(bytes)));
    }

    #[tokio::test]
    async fn strict_writes_again_what_had_no_room_and_the_rest_after_it_in_chunks_that_are_taken() {
        let mut stage = stage(Mode::Strict, 64 * MIB, 80 * 1024);
        let first = stage.fills();
        assert_eq!(stage.recorder.comes().await, Came::Show(vec![b'x'; first]));
        let second = stage.fills();
        stage.hangs();
        let third = stage.fills();
        assert_eq!(timeout(SOON, stage.recorder.comes()).await.ok(), None, "there is no room");
        assert!(!stage.recorder.has_room() && !stage.recorder.is_settled() && stage.recorder.is_busy());
        let mut said = stage.said();
        assert_eq!(stage.recorder.comes().await, Came::Show(vec![b'x'; second]));
        said += &stage.said();
        stage.recorder.tape.as_mut().unwrap().close();
        said += &stage.said();
        assert_eq!(stage.recorder.comes().await, Came::Show(vec![b'x'; third]));
        stage.recorder.finish().await;
        said += &stage.said();
        assert_eq!(said, "x".repeat(first + second + third), "each once");
    }

    #[tokio::test]
    async fn what_is_said_in_one_breath_is_one_frame() {
        let mut stage = stage(Mode::BestEffort, MIB, MIB);
        for word in ["a", "b", "c"] {
            stage.recorder.output(word.as_bytes());
        }
        std::thread::sleep(2 * AS_ONE_WITHIN);
        stage.recorder.output(b"later");
        stage.recorder.finish().await;
        let begin = What::Begin { columns: 80, rows: 24 };
        assert_eq!(stage.send(), [begin, output("abc"), output("later"), What::End(Ended::Session)]);
    }

    #[tokio::test]
    async fn with_a_full_spool_a_best_effort_recording_begins_once_there_is_room_and_says_what_is_missing() {
        for room_comes in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let spools = Spools::new(folder.path(), 8 * 8 * 1024);
            let others = fill(&spools);
            let mut stage = with(folder, &spools, Mode::BestEffort, MIB);
            assert!(matches!(stage.recorder.begin(), Err(NotKept::NoRoom)));
            assert_eq!(stage.recorder.mode(), Mode::BestEffort, "it is tried again");
            assert_eq!(stage.says("unseen").await, shown("unseen"));
            let mut expected = vec![What::Begin { columns: 80, rows: 24 }, What::Gap { bytes: 6 }];
            if room_comes {
                others.iter().for_each(|spool| spool.remove());
                assert_eq!(stage.says("seen").await, shown("seen"));
                expected.push(output("seen"));
            }
            stage.recorder.finish().await;
            expected.push(What::End(Ended::Session));
            assert_eq!(stage.send(), expected);
        }
    }

    /// A best-effort recording that is as long as it may be, and has said so.
    async fn full() -> Stage {
        let mut stage = stage(Mode::BestEffort, 8 * 1024, MIB);
        let long = "x".repeat(5000);
        assert_eq!(stage.says(&long).await, shown(&long));
        assert_eq!(stage.recorder.comes().await, Came::Ended);
        assert_eq!(stage.says("more").await, shown("more"));
        stage
    }

    #[tokio::test]
    async fn a_session_that_is_to_be_strict_from_here_on_and_cannot_be_recorded_any_more_ends() {
        let mut stage = full().await;
        assert!(!stage.recorder.change(Terms { mode: Mode::Strict, most_bytes: 8 * 1024 }));
        assert!(stage.recorder.is_busy());
        assert_eq!(stage.says("unrecorded").await, Some(Came::MustEnd), "and that is not shown");
        let mut unwanted = refused().await;
        unwanted.recorder.change(Terms { mode: Mode::Strict, most_bytes: MIB });
        assert_eq!(unwanted.recorder.comes().await, Came::MustEnd, "what nobody wants does not go on");
    }

    async fn refused() -> Stage {
        let mut stage = stage(Mode::BestEffort, 8 * 1024, MIB);
        stage.spool.refuse();
        assert_eq!(stage.says("unwanted").await, shown("unwanted"));
        assert_eq!(stage.recorder.comes().await, Came::Ended);
        stage
    }

    #[tokio::test]
    async fn a_full_recording_goes_on_where_it_may_be_longer_by_now_and_says_what_is_missing() {
        for mode in [Mode::BestEffort, Mode::Strict] {
            let mut stage = full().await;
            assert_eq!(stage.recorder.mode(), Mode::Off);
            assert!(stage.recorder.change(Terms { mode, most_bytes: MIB }));
            assert_eq!(stage.recorder.mode(), mode);
            assert_eq!(stage.says("after").await, shown("after"));
            stage.recorder.finish().await;
            let begin = What::Begin { columns: 80, rows: 24 };
            assert_eq!(stage.send(), [begin, What::Gap { bytes: 5004 }, output("after"), What::End(Ended::Session)]);
        }
    }

    #[tokio::test]
    async fn what_was_too_long_when_its_writing_began_and_is_not_by_now_ends_nothing() {
        for mode in [Mode::BestEffort, Mode::Strict] {
            let mut stage = stage(mode, 8 * 1024, MIB);
            let long = "x".repeat(5000);
            stage.recorder.output(long.as_bytes());
            stage.hangs();
            assert!(!stage.recorder.change(Terms { mode, most_bytes: MIB }));
            assert_eq!(stage.recorder.comes().await, Came::Show(long.into_bytes()));
            assert_eq!(stage.says("after").await, shown("after"));
            stage.recorder.finish().await;
            let is_strict = mode == Mode::Strict;
            assert_eq!(stage.said(), if is_strict { "x".repeat(5000) + "after" } else { "after".to_owned() });
        }
    }

    #[tokio::test]
    async fn without_a_recording_nothing_is_on_the_disk_and_one_may_begin_later() {
        let mut silent = stage(Mode::Off, 0, MIB);
        assert_eq!(silent.says("unseen").await, shown("unseen"));
        silent.recorder.finish().await;
        assert!(!silent.folder.exists() && silent.spool.next() == Next::Done);

        let mut later = stage(Mode::Off, 0, MIB);
        later.recorder.resize(90, 20);
        assert!(later.recorder.change(Terms { mode: Mode::Strict, most_bytes: MIB }));
        assert_eq!(later.says("seen").await, shown("seen"));
        assert!(later.recorder.change(Terms::default()));
        assert_eq!(later.says("unseen").await, shown("unseen"));
        later.recorder.finish().await;
        let begin = What::Begin { columns: 90, rows: 20 };
        assert_eq!(later.send(), [begin, What::Resumed, output("seen"), What::Paused, What::End(Ended::Session)]);
    }
}
