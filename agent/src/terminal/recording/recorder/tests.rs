mod limit;
mod no_room;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use uuid::Uuid;
use wire::recording::{CHUNK_MAX, Frame, FrameContent, Frames, RecordMode, RecordTerms, RecordingEnd};

use super::batch::MERGE_WINDOW;
use super::{CHUNK_MAX_AGE, Recorder, RecorderEvent};
use crate::terminal::recording::spool::{NextUpload, Spool, SpoolError, SpoolWriter, Spools};

const MIB: u64 = 1 << 20;
/// Long enough for what must not happen.
const SOON: Duration = Duration::from_millis(100);
/// Longer than any write takes, also on another thread.
const TIMEOUT: Duration = Duration::from_secs(60);

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
        timeout(TIMEOUT, self.recorder.next_event()).await.ok()
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

    fn recorded_text(&self) -> String {
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
    assert_eq!(stage.send(), [begin, output("one"), resize, output("two"), FrameContent::End(RecordingEnd::Session)]);
}

#[tokio::test]
async fn chunk_is_closed_after_its_maximum_age() {
    let mut stage = stage(RecordMode::BestEffort, MIB, MIB);
    stage.record("one").await.unwrap();
    assert!(stage.recorder.is_busy() && stage.send().is_empty());
    let closed = async {
        loop {
            let _ = timeout(SOON, stage.recorder.next_event()).await;
            let sent = stage.send();
            if !sent.is_empty() {
                return sent;
            }
        }
    };
    let sent = timeout(CHUNK_MAX_AGE + TIMEOUT, closed).await.expect("the chunk is closed");
    assert_eq!(sent.len(), 2);
    assert!(!stage.recorder.is_busy());
}

#[tokio::test]
async fn adjacent_output_is_merged_into_one_frame() {
    // One in which the words came within the window: this test may be interrupted between them.
    let mut stage = loop {
        let mut stage = stage(RecordMode::BestEffort, MIB, MIB);
        let begun = std::time::Instant::now();
        for word in ["a", "b", "c"] {
            stage.recorder.output(word.as_bytes());
        }
        if begun.elapsed() < MERGE_WINDOW {
            break stage;
        }
    };
    std::thread::sleep(2 * MERGE_WINDOW);
    stage.recorder.output(b"later");
    stage.recorder.finish().await;
    let begin = FrameContent::Begin { columns: 80, rows: 24 };
    assert_eq!(stage.send(), [begin, output("abc"), output("later"), FrameContent::End(RecordingEnd::Session)]);
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
        [begin, FrameContent::Resumed, output("seen"), FrameContent::Paused, FrameContent::End(RecordingEnd::Session)]
    );
}
