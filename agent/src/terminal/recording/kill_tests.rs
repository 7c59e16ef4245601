//! Recordings of an agent that is killed at any step, and of the next one that continues them.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;

use chrono::Utc;
use proptest::prelude::*;
use uuid::Uuid;
use wire::recording::{FrameContent, Frames, RecordMode, RecordTerms, RecordingEnd};
use wire::task::OpenTerminal;
use wire::terminal::CHUNK;

use super::recorder::{Recorder, RecorderEvent};
use super::spool::{NextUpload, Spool, Spools};
use crate::terminal::session_handover::{OutputLog, RecordFile};

const SESSION: Uuid = Uuid::from_u128(1);

/// What happens to the session.
#[derive(Clone, Debug)]
enum Step {
    /// The program writes, and the recorder writes as far as it gets.
    Output(usize),
    /// The open chunk becomes old.
    Close,
    /// Closed chunks are uploaded.
    Upload,
    /// The agent is killed in its last write: this part of it is not in the file.
    Kill { missing: u16 },
    /// The agent is killed before the recorder takes output that was read.
    KillBeforeTheWrite(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1..CHUNK).prop_map(Step::Output),
        1 => Just(Step::Close),
        2 => Just(Step::Upload),
        3 => any::<u16>().prop_map(|missing| Step::Kill { missing }),
        1 => (1..CHUNK).prop_map(Step::KillBeforeTheWrite),
    ];
    prop::collection::vec(step, 1..40)
}

struct Session {
    folder: tempfile::TempDir,
    log: OutputLog,
    record: RecordFile,
    spool: Arc<Spool>,
    recorder: Recorder,
    /// Everything that the program wrote.
    written: Vec<u8>,
    /// Everything that was shown, from the position on that each agent began with.
    shown: Vec<u8>,
    sent: BTreeMap<u32, Vec<u8>>,
}

impl Session {
    fn begin(mode: RecordMode) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spools::new(folder.path(), 256 << 20).begin(SESSION);
        let terms = RecordTerms { mode, most_bytes: 64 << 20 };
        let mut recorder = Recorder::new(Arc::clone(&spool), terms, (80, 24));
        recorder.begin().unwrap();
        let log = OutputLog::create().unwrap();
        let task = OpenTerminal {
            session_id: SESSION,
            allocation_id: Uuid::from_u128(2),
            user_name: "tenant".to_owned(),
            ends_at: Utc::now(),
            recording: terms,
        };
        let record = RecordFile::create(log.file(), task, recorder.point()).unwrap();
        recorder.announce_in(record.clone());
        Self { folder, log, record, spool, recorder, written: vec![], shown: vec![], sent: BTreeMap::new() }
    }

    fn append(&mut self, length: usize) {
        let from = self.written.len();
        self.written.extend((from..from + length).map(|at| (at % 253) as u8));
        self.log.append(&self.written[from..]).unwrap();
    }

    /// Everything in the log that the recorder does not have.
    async fn record(&mut self, mut from: usize) {
        while from < self.written.len() {
            let to = self.written.len().min(from + CHUNK);
            while !self.recorder.has_room() {
                self.settle().await;
            }
            self.recorder.output(&self.written[from..to]);
            from = to;
        }
        self.settle().await;
    }

    async fn settle(&mut self) {
        while !self.recorder.is_flushed() {
            match self.recorder.next_event().await {
                RecorderEvent::Show(bytes) => self.shown.extend(bytes),
                other => panic!("{other:?}"),
            }
        }
    }

    fn upload(&mut self) {
        while let NextUpload::Chunk(seq) = self.spool.next() {
            let chunk = self.spool.read(seq).unwrap();
            let known = self.sent.insert(seq, chunk.clone());
            assert!(known.is_none_or(|known| known == chunk), "chunk {seq} was sent twice and differs");
            self.spool.mark_sent(seq);
        }
    }

    async fn kill(&mut self, missing: u16) {
        let (record, found) = RecordFile::read(self.log.file()).unwrap();
        let point = found.recording;
        self.tear(self.folder.path(), missing);
        let spools = Spools::new(self.folder.path(), 256 << 20);
        let (spool, committed) = spools.adopt(SESSION, point.before, point.after).unwrap();
        let bounds = (self.log.read_from(0).unwrap(), self.log.end());
        let (recorder, from) = Recorder::adopt(Arc::clone(&spool), committed, point, record.clone(), bounds);
        (self.record, self.spool, self.recorder) = (record, spool, recorder);
        let from = usize::try_from(from).unwrap();
        // What was shown may be shown again, at its own position.
        self.shown.truncate(from);
        assert_eq!(self.shown.len(), from, "output was skipped");
        self.record(from).await;
    }

    /// Takes a part of the last write away, as if it had not reached the file.
    fn tear(&self, folder: &Path, missing: u16) {
        let (_, found) = RecordFile::read(self.log.file()).unwrap();
        let (before, after) = (found.recording.before, found.recording.after);
        let path = folder.join("recordings").join(SESSION.to_string()).join(format!("{:08}.frames", after.chunk));
        let Ok(file) = OpenOptions::new().write(true).open(path) else { return };
        let began_at = if after.chunk == before.chunk { before.length } else { 0 };
        let missing = u64::from(missing) % (after.length - began_at + 1);
        file.set_len(after.length - missing).unwrap();
    }

    async fn finish(mut self) {
        self.recorder.finish().await;
        self.upload();
        assert_eq!(self.spool.next(), NextUpload::Done);
        let (mut recorded, mut end, mut last) = (Vec::new(), None, 0);
        for (index, (seq, chunk)) in self.sent.iter().enumerate() {
            assert_eq!(index, *seq as usize);
            for frame in Frames::of(chunk) {
                let frame = frame.unwrap();
                assert!(frame.micros >= last, "time goes back from {last} to {}", frame.micros);
                last = frame.micros;
                assert_eq!(end, None, "a frame after the end");
                match frame.what {
                    FrameContent::Output(bytes) => recorded.extend(bytes),
                    FrameContent::End(how) => end = Some(how),
                    FrameContent::Begin { .. } => assert_eq!(index, 0),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(end, Some(RecordingEnd::Session));
        assert!(recorded == self.written, "{} bytes recorded of {}", recorded.len(), self.written.len());
        assert!(self.shown == self.written, "{} bytes shown of {}", self.shown.len(), self.written.len());
    }
}

async fn run(steps: Vec<Step>, mode: RecordMode) {
    let mut session = Session::begin(mode);
    for step in steps {
        match step {
            Step::Output(length) => {
                let from = session.written.len();
                session.append(length);
                session.record(from).await;
            }
            Step::Close => session.recorder.close_chunk(),
            Step::Upload => session.upload(),
            Step::Kill { missing } => session.kill(missing).await,
            Step::KillBeforeTheWrite(length) => {
                session.append(length);
                session.kill(0).await;
            }
        }
    }
    session.finish().await;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn recording_is_complete_wherever_an_agent_is_killed(steps in steps(), strict in any::<bool>()) {
        let mode = if strict { RecordMode::Strict } else { RecordMode::BestEffort };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps, mode));
    }
}
