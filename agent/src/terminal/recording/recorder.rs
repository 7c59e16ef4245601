//! What a session says to its spool: frames first, and only then the output itself to whoever is connected.
//!
//! In mode `best-effort` what cannot be written is shown all the same, and counted as missing. In mode `strict` it waits, and the program with
//! it; where there is nothing to wait for, the session ends.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::warn;
use wire::recording::{Ended, Frame, Mode, Terms, What};

use super::spool::{NotKept, Spool, Tape};

/// A chunk is sent when it is full, or this long after its first frame.
const CHUNK_LASTS: Duration = Duration::from_secs(2);
/// Output that waits to be written. Past it the program is not read.
const MOST_WAITING: usize = 32 * 1024;
/// How soon what could not be written is tried again, where nobody says that there is room.
const TRIES_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// See the module.
pub(in crate::terminal) struct Recorder {
    spool: Arc<Spool>,
    terms: Terms,
    /// `None` while it is being written to.
    tape: Option<Tape>,
    writing: Option<JoinHandle<(Tape, Result<(), NotKept>)>>,
    /// What is being written.
    under_way: Batch,
    /// What is written next.
    next: Batch,
    /// Output that could not be recorded, and of which that was not said yet.
    lost: u64,
    /// The time of the last frame that was written; `None`: there is none.
    last: Option<u64>,
    /// The terminal's size, for the first frame.
    size: (u16, u16),
    most: u64,
    begun: Instant,
    /// When the chunk that is begun is to be sent.
    due: Option<Instant>,
    try_again: Option<Instant>,
    /// It will never go on: it is as long as it may be, or nobody wants it.
    over: bool,
    said_over: bool,
}

/// Frames, and the output that is shown once they are written.
#[derive(Debug, Default)]
struct Batch {
    frames: Vec<u8>,
    output: Vec<u8>,
    /// The time of the last frame.
    until: u64,
}

impl Batch {
    const fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.output.is_empty()
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
            last: None,
            size: (columns, rows),
            most: terms.most_bytes,
            begun: Instant::now(),
            due: None,
            try_again: None,
            over: false,
            said_over: false,
        }
    }

    /// Begins the recording, where there is to be one. Where there cannot be, a session that must be recorded must not begin.
    ///
    /// # Errors
    /// Why there cannot be a recording.
    pub(in crate::terminal) fn begin(&mut self) -> Result<(), NotKept> {
        let Some(tape) = self.tape.as_mut().filter(|_| self.terms.mode != Mode::Off) else { return Ok(()) };
        let begin = begins(self.size);
        let begun = tape.write(&begin);
        match &begun {
            Ok(()) => {
                self.last = Some(0);
                self.due = Some(self.begun + CHUNK_LASTS);
            }
            Err(_) => self.over = true,
        }
        begun
    }

    /// How what is shown from here on is recorded.
    pub(in crate::terminal) const fn mode(&self) -> Mode {
        if self.over { Mode::Off } else { self.terms.mode }
    }

    /// Changes the terms. Whether that changes what is recorded.
    pub(in crate::terminal) fn change(&mut self, terms: Terms) -> bool {
        let (before, was_on) = (self.mode(), self.terms.mode != Mode::Off);
        let is_on = terms.mode != Mode::Off;
        self.terms = terms;
        if is_on {
            self.most = terms.most_bytes;
        }
        match (was_on, is_on) {
            (true, false) => self.frame(What::Paused),
            (false, true) => self.frame(What::Resumed),
            (true, true) | (false, false) => {}
        }
        self.mode() != before
    }

    /// Whether more output may be handed over.
    pub(in crate::terminal) fn has_room(&self) -> bool {
        self.next.output.len() < MOST_WAITING && (self.try_again.is_none() || self.mode() != Mode::Strict)
    }

    /// What the program said.
    pub(in crate::terminal) fn output(&mut self, bytes: &[u8]) {
        if self.mode() != Mode::Off {
            self.frame(What::Output(bytes.to_vec()));
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
        if !self.over {
            self.next.until = self.micros();
            Frame { micros: self.next.until, what }.write(&mut self.next.frames);
        }
    }

    fn micros(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// True where all that was handed over came out again.
    pub(in crate::terminal) fn is_settled(&self) -> bool {
        self.writing.is_none() && self.next.output.is_empty()
    }

    /// True where [`Recorder::comes`] is worth waiting for.
    pub(in crate::terminal) fn is_busy(&self) -> bool {
        self.writing.is_some() || !self.next.is_empty() || self.due.is_some() || (self.over && !self.said_over)
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
                    Err(_) => {
                        self.give_up();
                        None
                    }
                };
                if let Some(came) = came {
                    return came;
                }
            } else if self.over {
                if !self.said_over {
                    self.said_over = true;
                    return if self.terms.mode == Mode::Strict { Came::MustEnd } else { Came::Ended };
                }
                if self.next.output.is_empty() {
                    std::future::pending::<()>().await;
                }
                return Came::Show(take(&mut self.next.output));
            } else if self.next.frames.is_empty() && !self.next.output.is_empty() {
                return Came::Show(take(&mut self.next.output));
            } else if let Some(at) = self.try_again {
                tokio::select! {
                    () = sleep_until(at) => {}
                    () = self.spool.emptied.notified() => {}
                }
                self.try_again = None;
            } else if !self.next.frames.is_empty() {
                if let Some(came) = self.write() {
                    return came;
                }
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
        self.under_way = take(&mut self.next);
        let mut frames = if self.last.is_none() { begins(self.size) } else { Vec::new() };
        if self.lost > 0 {
            // At the time of what was recorded before: the frames that follow are older than this moment.
            let micros = self.last.unwrap_or(0);
            Frame { micros, what: What::Gap { bytes: self.lost } }.write(&mut frames);
        }
        frames.extend_from_slice(&self.under_way.frames);
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
        self.tape = Some(tape);
        let Batch { frames, output, until } = take(&mut self.under_way);
        let is_strict = self.terms.mode == Mode::Strict;
        match outcome {
            Ok(()) => {
                (self.lost, self.last) = (0, Some(until));
                return (!output.is_empty()).then_some(Came::Show(output));
            }
            Err(NotKept::Over | NotKept::Refused) => {
                self.give_up();
                if let Some(tape) = &mut self.tape {
                    tape.close();
                }
                if is_strict {
                    return None;
                }
            }
            Err(why @ (NotKept::NoRoom | NotKept::Disk(_))) => {
                if let NotKept::Disk(error) = &why {
                    warn!(error = %error, "a recording cannot be written to the disk");
                }
                if is_strict {
                    self.put_back(frames, output);
                    self.try_again = Some(Instant::now() + TRIES_AGAIN_AFTER);
                    return None;
                }
            }
        }
        self.lost += output.len() as u64;
        (!output.is_empty()).then_some(Came::Show(output))
    }

    fn give_up(&mut self) {
        self.over = true;
        self.next.frames.clear();
    }

    fn put_back(&mut self, mut frames: Vec<u8>, mut output: Vec<u8>) {
        frames.append(&mut self.next.frames);
        output.append(&mut self.next.output);
        self.next = Batch { frames, output, until: self.next.until };
    }

    /// The session is over. What waits for room was not shown, and is not recorded either.
    pub(in crate::terminal) async fn finish(&mut self) {
        while self.try_again.is_none() && (self.writing.is_some() || !self.next.is_empty()) {
            if matches!(self.comes().await, Came::MustEnd | Came::Ended) {
                break;
            }
        }
        let Some(mut tape) = self.tape.take() else { return };
        if self.last.is_none() {
            // Nothing was recorded: there is no recording.
            self.spool.refuse();
            return;
        }
        let how = if self.over { Ended::Full } else { Ended::Session };
        let (micros, lost) = (self.micros(), self.lost + self.next.output.len() as u64);
        let ended = tokio::task::spawn_blocking(move || {
            if lost > 0 {
                let mut gap = Vec::new();
                Frame { micros, what: What::Gap { bytes: lost } }.write(&mut gap);
                // Without room for it the end alone has to do.
                let _ = tape.write(&gap);
            }
            tape.end(&Frame { micros, what: What::End(how) })
        });
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(error = %error, "a recording's end cannot be written"),
            Err(error) => warn!(error = %error, "a recording's end cannot be written"),
        }
    }
}

/// The first frame of all.
fn begins((columns, rows): (u16, u16)) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame { micros: 0, what: What::Begin { columns, rows } }.write(&mut bytes);
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::spool::{Next, Spools};
    use super::*;
    use tokio::time::timeout;
    use uuid::Uuid;
    use wire::recording::Frames;

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
        let spool = Spools::new(folder.path(), 8 * part).begin(Uuid::from_u128(1));
        let mut recorder = Recorder::new(Arc::clone(&spool), Terms { mode, most_bytes }, (80, 24));
        recorder.begin().unwrap();
        Stage { folder: folder.path().join("recordings"), _folder: folder, spool, recorder }
    }

    impl Stage {
        async fn says(&mut self, text: &str) -> Option<Came> {
            self.recorder.output(text.as_bytes());
            timeout(SOON, self.recorder.comes()).await.ok()
        }

        /// Takes what can be sent, and answers with its frames.
        fn send(&self) -> Vec<What> {
            let mut sent = Vec::new();
            while let Next::Chunk(seq) = self.spool.next() {
                sent.extend(Frames::of(&self.spool.read(seq).unwrap()).map(|frame| frame.unwrap().what));
                self.spool.sent(seq);
            }
            sent
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
