//! Recordings on this machine's disk: a folder for each session, a file for each chunk that is not uploaded yet.
//!
//! Files are written without sync: what is in a file survives the agent, and a power failure ends the machine's shells anyway. The
//! folders are accessible to the agent only.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::terminal::session_handover::{CommitPoint, RecordingState};
use tokio::sync::Notify;
use tracing::warn;
use uuid::Uuid;
use wire::recording::{CHUNK_COST, CHUNK_FULL, CHUNK_MAX, Frame, FrameContent, Frames, RecordingEnd};

/// One session gets at most this fraction of the spool, so that it does not take the room of the others.
const SESSION_SHARE: u64 = 8;

/// After a write that takes longer, writes are moved to another thread for this time.
const INLINE_WRITE_LIMIT: Duration = Duration::from_millis(5);
const SLOW_DISK_PENALTY: Duration = Duration::from_secs(1);

/// Reserved for the frames that end a recording.
const END_RESERVE: u64 = 4096;

/// The spool of this machine; cheap to clone.
#[derive(Clone, Debug)]
pub struct Spools {
    folder: PathBuf,
    most: u64,
    used: Arc<AtomicU64>,
    inline_gate: Arc<InlineWriteGate>,
}

/// Serializes writes on the session's own thread; the value is until when they are not allowed, because the disk was slow.
type InlineWriteGate = Mutex<Option<Instant>>;

/// Why frames are not stored.
#[derive(Debug, thiserror::Error)]
pub(in crate::terminal) enum SpoolError {
    /// There will be room when the control plane has accepted some chunks.
    #[error("there is no room in the spool")]
    NoRoom,
    #[error("it cannot be written to the disk: {0}")]
    Disk(#[source] io::Error),
    #[error("the recording is as long as it may be")]
    Over,
    /// Permanently.
    #[error("the control plane does not want it")]
    Refused,
}

impl Spools {
    /// In the agent's own folder, with a limit in bytes.
    #[must_use]
    pub fn new(state_dir: &Path, most: u64) -> Self {
        Self { folder: state_dir.join("recordings"), most, used: Arc::default(), inline_gate: Arc::default() }
    }

    /// The spool of a session that starts.
    pub(in crate::terminal) fn begin(&self, session_id: Uuid) -> Arc<Spool> {
        Arc::new(Spool::new(self.clone(), session_id, SpoolState::default()))
    }

    /// The sessions whose recordings an earlier agent left.
    pub fn leftover_sessions(&self) -> Vec<Uuid> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| Uuid::try_parse(entry.file_name().to_str()?).ok()).collect()
    }

    /// Continues the spool of a session that an earlier process left, with the write of `after` if that is complete, otherwise as it was
    /// `before`. Returns which of both it is.
    ///
    /// # Errors
    /// The spool cannot be read or repaired.
    pub(in crate::terminal) fn adopt(
        &self,
        session_id: Uuid,
        before: CommitPoint,
        after: CommitPoint,
    ) -> io::Result<(Arc<Spool>, CommitPoint)> {
        let folder = self.folder.join(session_id.to_string());
        let (mut waiting, sent) = match chunks_in(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (Vec::new(), None),
            found => found?,
        };
        let path = |seq: u32| folder.join(format!("{seq:08}.{PENDING}"));
        let newest = if waiting.contains(&after.chunk) { fs::metadata(path(after.chunk))?.len() } else { 0 };
        // Where the folder is gone, everything was sent or refused.
        let is_sent = sent >= Some(after.chunk) || (after.state == RecordingState::Ended && waiting.is_empty());
        let is_complete = is_sent || newest >= after.length;
        let point = if is_complete { after } else { before };
        let next = point.chunk + u32::from(point.length > 0);
        waiting.retain(|seq| *seq < next);
        if !is_complete && newest > 0 {
            // A part of the write is in the file.
            let whole = if after.chunk == before.chunk { before.length } else { 0 };
            OpenOptions::new().write(true).open(path(after.chunk))?.set_len(whole)?;
        }
        let taken = waiting.first().copied().unwrap_or(next);
        let state =
            SpoolState { closed: next, taken, ended: point.state == RecordingState::Ended, ..SpoolState::default() };
        let spool = Arc::new(Spool::new(self.clone(), session_id, state));
        for seq in waiting {
            spool.reserve(fs::metadata(path(seq))?.len(), true);
        }
        Ok((spool, point))
    }

    /// Recovers what an earlier agent left of this session: truncated to whole frames, and ended.
    pub(super) fn recover(&self, session_id: Uuid) -> io::Result<Arc<Spool>> {
        let folder = self.folder.join(session_id.to_string());
        let (waiting, sent) = chunks_in(&folder)?;
        let taken = waiting.first().copied().or_else(|| sent.map(|seq| seq + 1)).unwrap_or(0);
        let state = SpoolState { closed: taken, taken, ..SpoolState::default() };
        let spool = Arc::new(Spool::new(self.clone(), session_id, state));
        spool.repair(&waiting)?;
        Ok(spool)
    }
}

/// The chunks of a session that wait, in order, and the last one that was uploaded.
fn chunks_in(folder: &Path) -> io::Result<(Vec<u32>, Option<u32>)> {
    let (mut waiting, mut sent) = (Vec::new(), None);
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let Some((seq, kind)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let Ok(seq) = seq.parse::<u32>() else { continue };
        match kind {
            PENDING => waiting.push(seq),
            SENT => sent = sent.max(Some(seq)),
            _ => {}
        }
    }
    waiting.sort_unstable();
    Ok((waiting, sent))
}

/// File extensions: chunks to upload, and the marker of the last uploaded chunk.
const PENDING: &str = "frames";
const SENT: &str = "sent";

/// A session's part of the spool, shared by its writer and its uploader.
#[derive(Debug)]
pub(in crate::terminal) struct Spool {
    spools: Spools,
    folder: PathBuf,
    pub(super) session_id: Uuid,
    state: Mutex<SpoolState>,
    /// A chunk is to be uploaded, or there will be none.
    pub(super) filled: Notify,
    /// Room was freed, or there will be none.
    pub(super) emptied: Notify,
}

#[derive(Debug, Default)]
struct SpoolState {
    /// Chunks below are complete.
    closed: u32,
    /// Chunks below are with the control plane.
    taken: u32,
    bytes: u64,
    ended: bool,
    refused: bool,
    /// The next process of the agent continues.
    left: bool,
}

/// The uploader's next step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NextUpload {
    Chunk(u32),
    /// Nothing to upload at the moment.
    Nothing,
    /// Everything is uploaded, or the control plane refuses it.
    Done,
    /// The rest is the next process's.
    Left,
}

impl Spool {
    fn new(spools: Spools, session_id: Uuid, state: SpoolState) -> Self {
        let folder = spools.folder.join(session_id.to_string());
        Self { spools, folder, session_id, state: Mutex::new(state), filled: Notify::new(), emptied: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, SpoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, seq: u32, kind: &str) -> PathBuf {
        self.folder.join(format!("{seq:08}.{kind}"))
    }

    fn is_refused(&self) -> bool {
        self.state().refused
    }

    /// Reserves room. `end`: for the frames that end the recording, which have a reserve of their own.
    fn reserve(&self, bytes: u64, end: bool) -> bool {
        let mut state = self.state();
        let stored = if end { 0 } else { END_RESERVE };
        if !end && state.bytes + bytes + stored > self.spools.most / SESSION_SHARE {
            return false;
        }
        let fits = |used: u64| (end || used + bytes + stored <= self.spools.most).then_some(used + bytes);
        let reserved = self.spools.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        if reserved {
            state.bytes += bytes;
        }
        reserved
    }

    fn give_back(&self, bytes: u64) {
        let mut state = self.state();
        let bytes = bytes.min(state.bytes);
        state.bytes -= bytes;
        self.spools.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn close(&self, seq: u32) {
        self.state().closed = seq + 1;
        self.filled.notify_one();
    }

    fn end(&self) {
        self.state().ended = true;
        self.filled.notify_one();
    }

    /// The next chunk to upload.
    pub(super) fn next(&self) -> NextUpload {
        let state = self.state();
        if state.refused || (state.ended && state.taken == state.closed) {
            return NextUpload::Done;
        }
        if state.left {
            return NextUpload::Left;
        }
        if state.taken < state.closed { NextUpload::Chunk(state.taken) } else { NextUpload::Nothing }
    }

    pub(super) fn read(&self, seq: u32) -> io::Result<Vec<u8>> {
        fs::read(self.path(seq, PENDING))
    }

    /// Marks a chunk as uploaded. The empty file keeps its number for the next agent.
    pub(super) fn mark_sent(&self, seq: u32) {
        let path = self.path(seq, PENDING);
        let length = fs::metadata(&path).map(|file| file.len()).unwrap_or(0);
        let sent = self.path(seq, SENT);
        // In this order: an empty chunk that is not marked would be taken for one that was never written.
        let renamed = fs::rename(&path, &sent);
        let marked = renamed.and_then(|()| OpenOptions::new().write(true).truncate(true).open(&sent).map(drop));
        if let Some(before) = seq.checked_sub(1) {
            let _ = fs::remove_file(self.path(before, SENT));
        }
        if let Err(error) = marked {
            // It is resent, and recognized as a duplicate.
            warn!(error = %error, "a chunk of a recording that was sent stays on the disk");
        }
        self.give_back(length);
        self.state().taken = seq + 1;
        self.emptied.notify_one();
    }

    /// The control plane refuses the recording: nothing more is written, and nothing stays stored.
    pub(super) fn refuse(&self) {
        self.state().refused = true;
        self.emptied.notify_one();
    }

    /// The next process of the agent continues the recording.
    pub(super) fn leave(&self) {
        self.state().left = true;
        self.filled.notify_one();
    }

    /// To be called when everything is uploaded or refused.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(error = %error, "a recording's folder stays on the disk");
        }
        self.give_back(u64::MAX);
    }

    /// Truncates each file to whole frames; if the recording has no end, it gets one.
    fn repair(self: &Arc<Self>, waiting: &[u32]) -> io::Result<()> {
        let (mut ended, mut micros) = (false, 0);
        for seq in waiting {
            let path = self.path(*seq, PENDING);
            let bytes = fs::read(&path)?;
            let mut frames = Frames::of(&bytes);
            for frame in frames.by_ref().map_while(Result::ok) {
                ended = matches!(frame.what, FrameContent::End(_));
                micros = frame.micros;
            }
            // Bytes after the last whole frame are from an agent that was killed while it wrote them.
            let whole = frames.whole();
            if whole == 0 {
                fs::remove_file(&path)?;
                break;
            }
            OpenOptions::new().write(true).open(&path)?.set_len(whole as u64)?;
            self.reserve(whole as u64, true);
            self.close(*seq);
        }
        if !ended {
            let seq = self.state().closed;
            let mut writer = SpoolWriter::new(Arc::clone(self), seq, u64::MAX);
            let mut end = Vec::new();
            Frame { micros, what: FrameContent::End(RecordingEnd::Agent) }.write(&mut end);
            writer.end(&end)?;
        }
        self.end();
        Ok(())
    }
}

/// The writer's end of a session's spool.
#[derive(Debug)]
pub(super) struct SpoolWriter {
    spool: Arc<Spool>,
    seq: u32,
    /// The chunk that is being written, and its length.
    file: Option<(File, usize)>,
    /// Everything that was ever written.
    recorded: u64,
    most: u64,
}

impl SpoolWriter {
    pub(super) const fn new(spool: Arc<Spool>, seq: u32, most: u64) -> Self {
        Self { spool, seq, file: None, recorded: 0, most }
    }

    /// Continues with a new chunk after `recorded` bytes.
    pub(super) const fn resume(spool: Arc<Spool>, seq: u32, recorded: u64, most: u64) -> Self {
        Self { spool, seq, file: None, recorded, most }
    }

    /// The chunk, its length, and everything that was ever written, after a write of so many bytes.
    pub(super) fn after(&self, bytes: usize) -> (u32, u64, u64) {
        let all = self.recorded + bytes as u64;
        match &self.file {
            Some((_, length)) if length + bytes <= CHUNK_MAX => (self.seq, (length + bytes) as u64, all),
            Some(_) => (self.seq + 1, bytes as u64, all + CHUNK_COST),
            None => (self.seq, bytes as u64, all + CHUNK_COST),
        }
    }

    /// Sets the limit of the recording.
    pub(super) fn set_limit(&mut self, most: u64) {
        self.most = most;
    }

    pub(super) const fn most(&self) -> u64 {
        self.most
    }

    /// Writes frames, completely or not at all: they go into one chunk, and so are [`CHUNK_MAX`] bytes at most. Where there is no room, the
    /// caller closes the chunk: unless what is there is uploaded, there will never be any.
    pub(super) fn write(&mut self, frames: &[u8]) -> Result<(), SpoolError> {
        let length = frames.len() as u64;
        if self.spool.is_refused() {
            return Err(SpoolError::Refused);
        }
        if self.recorded + length + CHUNK_COST + END_RESERVE > self.most {
            return Err(SpoolError::Over);
        }
        if !self.spool.reserve(length, false) {
            return Err(SpoolError::NoRoom);
        }
        self.put(frames).map_err(|error| {
            self.spool.give_back(length);
            SpoolError::Disk(error)
        })
    }

    /// Writes frames inline, if that is fast: into an open chunk, on a disk that was fast lately, and by no other session at that moment.
    /// So a disk that suddenly hangs blocks one thread of the agent only. `None`: the write has to go to another thread, which may wait.
    pub(super) fn write_at_once(&mut self, frames: &[u8]) -> Option<Result<(), SpoolError>> {
        let inline_gate = Arc::clone(&self.spool.spools.inline_gate);
        let mut slow_until = inline_gate.try_lock().ok()?;
        let began = Instant::now();
        if !self.is_open() || slow_until.is_some_and(|until| began < until) {
            return None;
        }
        let written = self.write(frames);
        if began.elapsed() > INLINE_WRITE_LIMIT {
            *slow_until = Some(Instant::now() + SLOW_DISK_PENALTY);
        }
        Some(written)
    }

    /// Writes the last frames: there is room for them, however full the spool is.
    pub(super) fn end(&mut self, frames: &[u8]) -> io::Result<()> {
        self.spool.reserve(frames.len() as u64, true);
        let put = self.put(frames);
        self.close();
        self.spool.end();
        put
    }

    fn put(&mut self, frames: &[u8]) -> io::Result<()> {
        if self.file.as_ref().is_some_and(|(_, length)| length + frames.len() > CHUNK_MAX) {
            self.close();
        }
        let (file, length) = match &mut self.file {
            Some(open) => open,
            None => {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.spool.folder)?;
                let path = self.spool.path(self.seq, PENDING);
                let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
                self.recorded += CHUNK_COST;
                self.file.insert((file, 0))
            }
        };
        if let Err(error) = file.write_all(frames) {
            // A partial frame in the file is truncated.
            let _ = file.set_len(*length as u64);
            let _ = file.seek(SeekFrom::Start(*length as u64));
            return Err(error);
        }
        *length += frames.len();
        self.recorded += frames.len() as u64;
        if *length >= CHUNK_FULL {
            self.close();
        }
        Ok(())
    }

    /// Completes the chunk; the next frame starts another one.
    pub(super) fn close(&mut self) {
        match self.file.take() {
            Some((_, 0)) | None => {}
            Some(_) => {
                self.spool.close(self.seq);
                self.seq += 1;
            }
        }
    }

    /// Whether a chunk is open.
    pub(super) const fn is_open(&self) -> bool {
        self.file.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn frame(micros: u64, what: FrameContent) -> Vec<u8> {
        let mut bytes = Vec::new();
        Frame { micros, what }.write(&mut bytes);
        bytes
    }

    fn output(length: usize) -> Vec<u8> {
        frame(1, FrameContent::Output(vec![b'x'; length]))
    }

    fn begun(most: u64) -> (tempfile::TempDir, Spools, Arc<Spool>, SpoolWriter) {
        let folder = tempfile::tempdir().unwrap();
        let spools = Spools::new(folder.path(), most);
        let spool = spools.begin(Uuid::from_u128(1));
        let writer = SpoolWriter::new(Arc::clone(&spool), 0, MIB);
        (folder, spools, spool, writer)
    }

    /// Uploads everything that is there, and returns it.
    fn send(spool: &Spool) -> Vec<Vec<u8>> {
        let mut sent = Vec::new();
        while let NextUpload::Chunk(seq) = spool.next() {
            sent.push(spool.read(seq).unwrap());
            spool.mark_sent(seq);
        }
        sent
    }

    fn last(chunk: &[u8]) -> FrameContent {
        Frames::of(chunk).map(Result::unwrap).last().unwrap().what
    }

    #[test]
    fn recording_is_split_into_chunks_and_removed_after_upload() {
        let (_folder, spools, spool, mut writer) = begun(64 * MIB);
        for _ in 0..10 {
            writer.write(&output(16 * 1024)).unwrap();
        }
        writer.end(&frame(9, FrameContent::End(RecordingEnd::Session))).unwrap();
        let sent = send(&spool);
        assert!(sent.len() >= 3 && sent.iter().all(|chunk| chunk.len() <= CHUNK_MAX));
        assert_eq!(last(sent.last().unwrap()), FrameContent::End(RecordingEnd::Session));
        assert_eq!(spool.next(), NextUpload::Done);
        spool.remove();
        assert_eq!((spools.leftover_sessions(), spools.used.load(Ordering::Relaxed)), (vec![], 0));
    }

    #[test]
    fn full_spool_refuses_writes_until_upload_but_accepts_the_end() {
        let (_folder, spools, spool, mut writer) = begun(SESSION_SHARE * 200 * 1024);
        let mut written = 0;
        while writer.write(&output(16 * 1024)).is_ok() {
            written += 1;
        }
        assert!((8..=12).contains(&written), "{written}");
        assert!(matches!(writer.write(&output(16 * 1024)), Err(SpoolError::NoRoom)));
        writer.close();
        assert!(!send(&spool).is_empty());
        writer.write(&output(16 * 1024)).unwrap();
        // Another session has its own share, and all of them together no more than there is.
        let mut all = 0;
        for n in 2..20 {
            let mut other = SpoolWriter::new(spools.begin(Uuid::from_u128(n)), 0, MIB);
            while other.write(&output(16 * 1024)).is_ok() {
                all += 1;
            }
        }
        assert!(all <= 8 * 200 / 16, "{all}");
        writer.end(&frame(1, FrameContent::End(RecordingEnd::Session))).unwrap();
    }

    #[test]
    fn recording_respects_its_limit_and_refused_frames_are_not_written() {
        let (_folder, _spools, spool, mut writer) = begun(64 * MIB);
        writer.set_limit(64 * 1024);
        while writer.write(&output(1024)).is_ok() {}
        assert!(matches!(writer.write(&output(1024)), Err(SpoolError::Over)));
        writer.set_limit(MIB);
        writer.write(&output(1024)).unwrap();
        spool.refuse();
        assert!(matches!(writer.write(&output(1)), Err(SpoolError::Refused)));
        assert_eq!(spool.next(), NextUpload::Done);
    }

    #[test]
    fn next_agent_recovers_a_leftover_recording_truncates_and_ends_it() {
        let (folder, spools, spool, mut writer) = begun(64 * MIB);
        writer.write(&frame(0, FrameContent::Begin { columns: 80, rows: 24 })).unwrap();
        writer.close();
        assert_eq!(send(&spool).len(), 1);
        writer.write(&frame(7, FrameContent::Output(b"whole".to_vec()))).unwrap();
        let torn = frame(8, FrameContent::Output(b"torn".to_vec()));
        writer.write(&torn).unwrap();
        let path = spool.path(1, PENDING);
        let length = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 2).unwrap();
        drop((writer, spool));

        let next = Spools::new(folder.path(), 64 * MIB);
        assert_eq!(next.leftover_sessions(), [Uuid::from_u128(1)]);
        let spool = next.recover(Uuid::from_u128(1)).unwrap();
        let sent = send(&spool);
        assert_eq!(
            sent,
            [frame(7, FrameContent::Output(b"whole".to_vec())), frame(7, FrameContent::End(RecordingEnd::Agent))]
        );
        assert_eq!(spool.next(), NextUpload::Done);
        assert_eq!(spool.state().taken, 3);
        drop(spools);
    }

    #[test]
    fn next_agent_continues_numbering_when_only_the_end_was_unsent() {
        let (folder, _spools, spool, mut writer) = begun(64 * MIB);
        for seq in 0..3 {
            writer.write(&output(1)).unwrap();
            writer.close();
            assert_eq!(spool.next(), NextUpload::Chunk(seq));
            spool.mark_sent(seq);
        }
        let spool = Spools::new(folder.path(), 64 * MIB).recover(Uuid::from_u128(1)).unwrap();
        assert_eq!(spool.next(), NextUpload::Chunk(3));
        assert_eq!(last(&spool.read(3).unwrap()), FrameContent::End(RecordingEnd::Agent));
    }
}
