//! Recordings on this machine's disk: a folder for each session, a file for each chunk that the control plane does not have.
//!
//! Files are written without waiting for the disk: what is in a file survives the agent, and a machine that loses its power ends its
//! shells anyway. The folders are the agent's alone.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::warn;
use uuid::Uuid;
use wire::recording::{CHUNK_COST, CHUNK_FULL, CHUNK_MOST, Ended, Frame, Frames, What};

/// One session gets at most this part of the spool, so that it does not take the room of the others.
const SESSIONS_PART: u64 = 8;

/// A write that takes longer is waited for elsewhere, from then on and for so long.
const QUICK: Duration = Duration::from_millis(5);
const SLOW_FOR: Duration = Duration::from_secs(1);

/// What is kept free for the words that end a recording.
const FOR_THE_END: u64 = 4096;

/// The spool of this machine; cheap to clone.
#[derive(Clone, Debug)]
pub struct Spools {
    folder: PathBuf,
    most: u64,
    used: Arc<AtomicU64>,
    quick: Arc<Quick>,
}

/// Whose turn it is to write in the middle of everything else, and before when nobody may: the disk was slow.
type Quick = Mutex<Option<Instant>>;

/// Why frames are not kept.
#[derive(Debug, thiserror::Error)]
pub(in crate::terminal) enum NotKept {
    /// There will be room when the control plane has taken some.
    #[error("there is no room in the spool")]
    NoRoom,
    #[error("the disk does not take it: {0}")]
    Disk(#[source] io::Error),
    #[error("the recording is as long as it may be")]
    Over,
    /// Now or ever.
    #[error("the control plane does not want it")]
    Refused,
}

impl Spools {
    /// In the agent's own folder, of at most so many bytes.
    #[must_use]
    pub fn new(state_dir: &Path, most: u64) -> Self {
        Self { folder: state_dir.join("recordings"), most, used: Arc::default(), quick: Arc::default() }
    }

    /// The place of a session that begins.
    pub(in crate::terminal) fn begin(&self, session_id: Uuid) -> Arc<Spool> {
        Arc::new(Spool::new(self.clone(), session_id, State::default()))
    }

    /// What an earlier agent left, mended as far as it was cut off, and ended.
    pub fn left(&self) -> Vec<Uuid> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| Uuid::try_parse(entry.file_name().to_str()?).ok()).collect()
    }

    /// Takes up what an earlier agent left of this session.
    pub(super) fn take_up(&self, session_id: Uuid) -> io::Result<Arc<Spool>> {
        let folder = self.folder.join(session_id.to_string());
        let (mut waiting, mut sent) = (Vec::new(), None);
        for entry in fs::read_dir(&folder)? {
            let name = entry?.file_name();
            let Some((seq, kind)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
            let Ok(seq) = seq.parse::<u32>() else { continue };
            match kind {
                WAITS => waiting.push(seq),
                SENT => sent = sent.max(Some(seq)),
                _ => {}
            }
        }
        waiting.sort_unstable();
        let taken = waiting.first().copied().or_else(|| sent.map(|seq| seq + 1)).unwrap_or(0);
        let state = State { closed: taken, taken, ..State::default() };
        let spool = Arc::new(Spool::new(self.clone(), session_id, state));
        spool.mend(&waiting)?;
        Ok(spool)
    }
}

/// Chunks that wait, and the mark of the last one that was sent.
const WAITS: &str = "frames";
const SENT: &str = "sent";

/// A session's part of the spool, shared by who writes it and who sends it.
#[derive(Debug)]
pub(in crate::terminal) struct Spool {
    spools: Spools,
    folder: PathBuf,
    pub(super) session_id: Uuid,
    state: Mutex<State>,
    /// Something is to be sent, or never will be.
    pub(super) filled: Notify,
    /// There is more room, or there will never be.
    pub(super) emptied: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Chunks below are complete.
    closed: u32,
    /// Chunks below are with the control plane.
    taken: u32,
    bytes: u64,
    ended: bool,
    refused: bool,
}

/// What the sender finds.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Chunk(u32),
    /// Nothing, for the time being.
    Nothing,
    /// It is all sent, or nobody wants it.
    Done,
}

impl Spool {
    fn new(spools: Spools, session_id: Uuid, state: State) -> Self {
        let folder = spools.folder.join(session_id.to_string());
        Self { spools, folder, session_id, state: Mutex::new(state), filled: Notify::new(), emptied: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, seq: u32, kind: &str) -> PathBuf {
        self.folder.join(format!("{seq:08}.{kind}"))
    }

    fn is_refused(&self) -> bool {
        self.state().refused
    }

    /// Sets room aside. `end`: the words that end it, for which some is kept.
    fn reserve(&self, bytes: u64, end: bool) -> bool {
        let mut state = self.state();
        let kept = if end { 0 } else { FOR_THE_END };
        if !end && state.bytes + bytes + kept > self.spools.most / SESSIONS_PART {
            return false;
        }
        let fits = |used: u64| (end || used + bytes + kept <= self.spools.most).then_some(used + bytes);
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

    /// What is to be sent next.
    pub(super) fn next(&self) -> Next {
        let state = self.state();
        if state.refused || (state.ended && state.taken == state.closed) {
            return Next::Done;
        }
        if state.taken < state.closed { Next::Chunk(state.taken) } else { Next::Nothing }
    }

    pub(super) fn read(&self, seq: u32) -> io::Result<Vec<u8>> {
        fs::read(self.path(seq, WAITS))
    }

    /// The control plane has it. An empty file keeps its number for the next agent.
    pub(super) fn sent(&self, seq: u32) {
        let path = self.path(seq, WAITS);
        let length = fs::metadata(&path).map(|file| file.len()).unwrap_or(0);
        let emptied = OpenOptions::new().write(true).truncate(true).open(&path).map(drop);
        let marked = emptied.and_then(|()| fs::rename(&path, self.path(seq, SENT)));
        if let Some(before) = seq.checked_sub(1) {
            let _ = fs::remove_file(self.path(before, SENT));
        }
        if let Err(error) = marked {
            // It is sent again, and taken for what it is.
            warn!(error = %error, "a chunk of a recording that was sent stays on the disk");
        }
        self.give_back(length);
        self.state().taken = seq + 1;
        self.emptied.notify_one();
    }

    /// Nobody wants it: nothing more is written, and nothing stays.
    pub(super) fn refuse(&self) {
        self.state().refused = true;
        self.emptied.notify_one();
    }

    /// To be called when all is sent or nobody wants it.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(error = %error, "a recording's folder stays on the disk");
        }
        self.give_back(u64::MAX);
    }

    /// Of each file what is no whole frame goes; where the recording has no end, it gets one.
    fn mend(self: &Arc<Self>, waiting: &[u32]) -> io::Result<()> {
        let (mut ended, mut micros) = (false, 0);
        for seq in waiting {
            let path = self.path(*seq, WAITS);
            let bytes = fs::read(&path)?;
            let mut frames = Frames::of(&bytes);
            for frame in frames.by_ref().map_while(Result::ok) {
                ended = matches!(frame.what, What::End(_));
                micros = frame.micros;
            }
            // The words after the last whole frame are those of an agent that was killed in the middle of them.
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
            let mut tape = Tape::new(Arc::clone(self), seq, u64::MAX);
            tape.end(&[Frame { micros, what: What::End(Ended::Agent) }])?;
        }
        self.end();
        Ok(())
    }
}

/// The writer's end of a session's spool.
#[derive(Debug)]
pub(super) struct Tape {
    spool: Arc<Spool>,
    seq: u32,
    /// The chunk that is being written, and its length.
    file: Option<(File, usize)>,
    /// All that was ever written.
    recorded: u64,
    most: u64,
}

impl Tape {
    pub(super) const fn new(spool: Arc<Spool>, seq: u32, most: u64) -> Self {
        Self { spool, seq, file: None, recorded: 0, most }
    }

    /// The longest that the recording may become.
    pub(super) fn may_be(&mut self, most: u64) {
        self.most = most;
    }

    pub(super) const fn most(&self) -> u64 {
        self.most
    }

    /// Writes frames, whole or not at all: they go into one chunk, and so are [`CHUNK_MOST`] bytes at most.
    pub(super) fn write(&mut self, frames: &[u8]) -> Result<(), NotKept> {
        let length = frames.len() as u64;
        if self.spool.is_refused() {
            return Err(NotKept::Refused);
        }
        if self.recorded + length + CHUNK_COST + FOR_THE_END > self.most {
            return Err(NotKept::Over);
        }
        if !self.spool.reserve(length, false) {
            // What there is goes first, or there will never be room.
            self.close();
            return Err(NotKept::NoRoom);
        }
        self.put(frames).map_err(|error| {
            self.spool.give_back(length);
            NotKept::Disk(error)
        })
    }

    /// Writes frames at once, where that takes no time: into a chunk that is begun, on a disk that was quick lately, and nobody else at that
    /// moment. So a disk that hangs all of a sudden has one thread of the agent and no more. `None`: somebody else has to, who may wait.
    pub(super) fn write_at_once(&mut self, frames: &[u8]) -> Option<Result<(), NotKept>> {
        let quick = Arc::clone(&self.spool.spools.quick);
        let mut slow_until = quick.try_lock().ok()?;
        let began = Instant::now();
        if !self.is_open() || slow_until.is_some_and(|until| began < until) {
            return None;
        }
        let written = self.write(frames);
        if began.elapsed() > QUICK {
            *slow_until = Some(Instant::now() + SLOW_FOR);
        }
        Some(written)
    }

    /// The last words, a few frames: there is room for them, however little there is otherwise.
    pub(super) fn end(&mut self, words: &[Frame]) -> io::Result<()> {
        let mut bytes = Vec::new();
        words.iter().for_each(|frame| frame.write(&mut bytes));
        self.spool.reserve(bytes.len() as u64, true);
        let put = self.put(&bytes);
        self.close();
        self.spool.end();
        put
    }

    fn put(&mut self, frames: &[u8]) -> io::Result<()> {
        if self.file.as_ref().is_some_and(|(_, length)| length + frames.len() > CHUNK_MOST) {
            self.close();
        }
        let (file, length) = match &mut self.file {
            Some(open) => open,
            None => {
                DirBuilder::new().recursive(true).mode(0o700).create(&self.spool.folder)?;
                let path = self.spool.path(self.seq, WAITS);
                let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
                self.recorded += CHUNK_COST;
                self.file.insert((file, 0))
            }
        };
        if let Err(error) = file.write_all(frames) {
            // Whatever of it came to the file is no whole frame.
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

    /// The chunk is complete; the next frame begins another.
    pub(super) fn close(&mut self) {
        match self.file.take() {
            Some((_, 0)) | None => {}
            Some(_) => {
                self.spool.close(self.seq);
                self.seq += 1;
            }
        }
    }

    /// True where a chunk is begun.
    pub(super) const fn is_open(&self) -> bool {
        self.file.is_some()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn frame(micros: u64, what: What) -> Vec<u8> {
        let mut bytes = Vec::new();
        Frame { micros, what }.write(&mut bytes);
        bytes
    }

    fn output(length: usize) -> Vec<u8> {
        frame(1, What::Output(vec![b'x'; length]))
    }

    fn begun(most: u64) -> (tempfile::TempDir, Spools, Arc<Spool>, Tape) {
        let folder = tempfile::tempdir().unwrap();
        let spools = Spools::new(folder.path(), most);
        let spool = spools.begin(Uuid::from_u128(1));
        let tape = Tape::new(Arc::clone(&spool), 0, MIB);
        (folder, spools, spool, tape)
    }

    /// Sends all that is there, and answers with it.
    fn send(spool: &Spool) -> Vec<Vec<u8>> {
        let mut sent = Vec::new();
        while let Next::Chunk(seq) = spool.next() {
            sent.push(spool.read(seq).unwrap());
            spool.sent(seq);
        }
        sent
    }

    fn last(chunk: &[u8]) -> What {
        Frames::of(chunk).map(Result::unwrap).last().unwrap().what
    }

    #[test]
    fn a_recording_is_cut_into_chunks_and_gone_when_all_are_sent() {
        let (_folder, spools, spool, mut tape) = begun(64 * MIB);
        for _ in 0..10 {
            tape.write(&output(16 * 1024)).unwrap();
        }
        tape.end(&[Frame { micros: 9, what: What::End(Ended::Session) }]).unwrap();
        let sent = send(&spool);
        assert!(sent.len() >= 3 && sent.iter().all(|chunk| chunk.len() <= CHUNK_MOST));
        assert_eq!(last(sent.last().unwrap()), What::End(Ended::Session));
        assert_eq!(spool.next(), Next::Done);
        spool.remove();
        assert_eq!((spools.left(), spools.used.load(Ordering::Relaxed)), (vec![], 0));
    }

    #[test]
    fn without_room_nothing_is_written_until_something_is_sent_and_the_end_has_its_place() {
        let (_folder, spools, spool, mut tape) = begun(SESSIONS_PART * 200 * 1024);
        let mut written = 0;
        while tape.write(&output(16 * 1024)).is_ok() {
            written += 1;
        }
        assert!((8..=12).contains(&written), "{written}");
        assert!(matches!(tape.write(&output(16 * 1024)), Err(NotKept::NoRoom)));
        assert!(!send(&spool).is_empty());
        tape.write(&output(16 * 1024)).unwrap();
        // Another session has its own part, and all of them together no more than there is.
        let mut all = 0;
        for n in 2..20 {
            let mut other = Tape::new(spools.begin(Uuid::from_u128(n)), 0, MIB);
            while other.write(&output(16 * 1024)).is_ok() {
                all += 1;
            }
        }
        assert!(all <= 8 * 200 / 16, "{all}");
        tape.end(&[Frame { micros: 1, what: What::End(Ended::Session) }]).unwrap();
    }

    #[test]
    fn a_recording_is_no_longer_than_it_may_be_and_what_nobody_wants_is_not_written() {
        let (_folder, _spools, spool, mut tape) = begun(64 * MIB);
        tape.may_be(64 * 1024);
        while tape.write(&output(1024)).is_ok() {}
        assert!(matches!(tape.write(&output(1024)), Err(NotKept::Over)));
        tape.may_be(MIB);
        tape.write(&output(1024)).unwrap();
        spool.refuse();
        assert!(matches!(tape.write(&output(1)), Err(NotKept::Refused)));
        assert_eq!(spool.next(), Next::Done);
    }

    #[test]
    fn the_next_agent_takes_up_what_was_left_cuts_off_what_is_torn_and_ends_it() {
        let (folder, spools, spool, mut tape) = begun(64 * MIB);
        tape.write(&frame(0, What::Begin { columns: 80, rows: 24 })).unwrap();
        tape.close();
        assert_eq!(send(&spool).len(), 1);
        tape.write(&frame(7, What::Output(b"whole".to_vec()))).unwrap();
        let torn = frame(8, What::Output(b"torn".to_vec()));
        tape.write(&torn).unwrap();
        let path = spool.path(1, WAITS);
        let length = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 2).unwrap();
        drop((tape, spool));

        let next = Spools::new(folder.path(), 64 * MIB);
        assert_eq!(next.left(), [Uuid::from_u128(1)]);
        let spool = next.take_up(Uuid::from_u128(1)).unwrap();
        let sent = send(&spool);
        assert_eq!(sent, [frame(7, What::Output(b"whole".to_vec())), frame(7, What::End(Ended::Agent))]);
        assert_eq!(spool.next(), Next::Done);
        assert_eq!(spool.state().taken, 3);
        drop(spools);
    }

    #[test]
    fn where_all_was_sent_but_the_end_the_next_agent_knows_its_number() {
        let (folder, _spools, spool, mut tape) = begun(64 * MIB);
        for seq in 0..3 {
            tape.write(&output(1)).unwrap();
            tape.close();
            assert_eq!(spool.next(), Next::Chunk(seq));
            spool.sent(seq);
        }
        let spool = Spools::new(folder.path(), 64 * MIB).take_up(Uuid::from_u128(1)).unwrap();
        assert_eq!(spool.next(), Next::Chunk(3));
        assert_eq!(last(&spool.read(3).unwrap()), What::End(Ended::Agent));
    }
}
