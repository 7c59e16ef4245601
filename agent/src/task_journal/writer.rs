//! The file of the journal, and the thread that writes it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tokio::sync::oneshot;

use super::{JournalEntry, JournalError, Phase, Records, ReportOutcome, TaskRecord, apply, forget, lock};
use crate::atomic_file::{self, FileError};
use crate::server_clock::ServerClock;

/// Superfluous lines before the file is compacted.
pub(super) const SLACK_LINES: usize = 4096;
/// The most lines that share one sync.
const BATCH: usize = 256;
/// How often a file that could not be written is tried again.
const REWRITE_INTERVAL: Duration = Duration::from_secs(10);

/// A line that is to be written.
#[derive(Debug)]
pub(super) struct PendingEntry {
    line: JournalEntry,
    written: oneshot::Sender<Result<(), JournalError>>,
    /// Its caller has not waited for the disk: it counts in memory, or not at all. Changed under the lock of the records.
    pub(super) is_over: Arc<AtomicBool>,
}

impl PendingEntry {
    pub(super) fn new(line: JournalEntry, written: oneshot::Sender<Result<(), JournalError>>) -> Self {
        Self { line, written, is_over: Arc::default() }
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

/// Notes why the file lacks what counts in memory, which is logged once.
pub(super) fn note_unwritten(unwritten: &Mutex<Option<String>>, why: String) {
    if lock(unwritten).replace(why.clone()).is_none() {
        tracing::warn!(
            error_code = "node_storage",
            error = why,
            "the journal cannot be written; tenants are released all the same, and no other task begins until it can be"
        );
    }
}

/// The thread that writes the file.
pub(super) struct JournalWriter {
    path: PathBuf,
    /// `None` while the file lacks what counts in memory.
    file: Option<WriterFile>,
    records: Arc<Mutex<Records>>,
    /// Why the file lacks it.
    unwritten: Arc<Mutex<Option<String>>>,
    clock: ServerClock,
}

impl JournalWriter {
    /// The writer of a file that has these records, if the disk takes them.
    pub(super) fn open(
        path: &Path,
        (records, unwritten): (Arc<Mutex<Records>>, Arc<Mutex<Option<String>>>),
        clock: &ServerClock,
    ) -> Self {
        let mut writer = Self { path: path.to_owned(), file: None, records, unwritten, clock: clock.clone() };
        let _ = writer.rewrite();
        writer
    }

    pub(super) fn write_until_closed(mut self, lines: &mpsc::Receiver<PendingEntry>) {
        while let Some(first) = self.next(lines) {
            let mut batch = vec![first];
            batch.extend(lines.try_iter().take(BATCH - 1));
            let wrote = self.append(&batch);
            let mut records = lock(&self.records);
            for entry in batch.into_iter().filter(|entry| !entry.is_over()) {
                let taken = match &wrote {
                    Err(error) if !entry.line.may_wait(&records) => Err(JournalError::Write(Arc::clone(error))),
                    Ok(()) | Err(_) => {
                        apply(&mut records, entry.line);
                        Ok(())
                    }
                };
                // The caller may have stopped waiting; the line counts all the same.
                let _ = entry.written.send(taken);
            }
            // A caller that has just given up may have noted it.
            if wrote.is_ok() {
                self.note_written();
            }
            drop(records);
            self.compact_if_long();
        }
        if self.file.is_none() {
            let _ = self.rewrite();
        }
    }

    /// The next line; `None` where there will be none. A file that could not be written is tried again meanwhile.
    fn next(&mut self, lines: &mpsc::Receiver<PendingEntry>) -> Option<PendingEntry> {
        while self.file.is_none() {
            match lines.recv_timeout(REWRITE_INTERVAL) {
                Ok(line) => return Some(line),
                Err(mpsc::RecvTimeoutError::Timeout) => drop(self.rewrite()),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
            }
        }
        lines.recv().ok()
    }

    fn append(&mut self, batch: &[PendingEntry]) -> Result<(), Arc<io::Error>> {
        let lines: Vec<&JournalEntry> =
            batch.iter().filter(|entry| !entry.is_over()).map(|entry| &entry.line).collect();
        // What a caller has not waited for is in memory, with what came after it.
        if self.file.is_none() || lines.len() < batch.len() {
            self.rewrite()?;
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        file.append(&lines).map_err(|error| {
            self.file = None;
            let error = FileError::at("write", &self.path)(error);
            self.note_unwritten(error)
        })
    }

    /// Writes all that counts.
    fn rewrite(&mut self) -> Result<(), Arc<io::Error>> {
        self.file = None;
        // A disk that does not answer must not block those who ask for a record.
        let records = lock(&self.records).clone();
        match WriterFile::rewrite(&self.path, &records) {
            Ok(file) => {
                self.file = Some(file);
                self.note_written();
                Ok(())
            }
            Err(error) => Err(self.note_unwritten(error)),
        }
    }

    fn note_written(&self) {
        if lock(&self.unwritten).take().is_some() {
            tracing::info!("the journal has everything again");
        }
    }

    fn note_unwritten(&self, error: FileError) -> Arc<io::Error> {
        note_unwritten(&self.unwritten, crate::chain(&error));
        Arc::new(io::Error::other(error))
    }

    fn compact_if_long(&mut self) {
        let records = {
            let mut records = lock(&self.records);
            if self.file.as_ref().is_none_or(|file| file.lines < records.len() * 3 + SLACK_LINES) {
                return;
            }
            forget(&mut records, &self.clock);
            // As for a rewrite.
            records.clone()
        };
        match WriterFile::rewrite(&self.path, &records) {
            Ok(shorter) => self.file = Some(shorter),
            Err(error) => {
                tracing::warn!(error = crate::chain(&error), "the journal could not be compacted");
                // The uncompacted file is equivalent, unless the error came after the new one took its name.
                self.file = self.file.take().filter(|file| file.is_at(&self.path));
            }
        }
    }
}

/// The file, as far as it has all that counts.
struct WriterFile {
    file: File,
    /// Bytes that are known to be whole lines.
    length: u64,
    lines: usize,
}

impl WriterFile {
    fn rewrite(path: &Path, records: &Records) -> Result<Self, FileError> {
        let mut bytes = Vec::new();
        let mut lines = 0;
        for line in records.values().flat_map(lines_of) {
            encode(&line, &mut bytes).map_err(FileError::at("encode", path))?;
            lines += 1;
        }
        atomic_file::write_atomically(path, &bytes, atomic_file::PRIVATE)?;
        let file = OpenOptions::new()
            .append(true)
            .mode(atomic_file::PRIVATE)
            .open(path)
            .map_err(FileError::at("open", path))?;
        Ok(Self { file, length: bytes.len() as u64, lines })
    }

    fn is_at(&self, path: &Path) -> bool {
        let place = |metadata: &Metadata| (metadata.dev(), metadata.ino());
        matches!((self.file.metadata(), std::fs::metadata(path)), (Ok(this), Ok(named)) if place(&this) == place(&named))
    }

    fn append(&mut self, lines: &[&JournalEntry]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for line in lines {
            encode(line, &mut bytes)?;
        }
        let durable = lines.iter().any(|line| line.needs_sync());
        let wrote = self.file.write_all(&bytes).and_then(|()| if durable { self.file.sync_data() } else { Ok(()) });
        match wrote {
            Ok(()) => {
                self.length += bytes.len() as u64;
                self.lines += lines.len();
                Ok(())
            }
            Err(error) => {
                // Half a line must not become the beginning of the next one.
                self.file.set_len(self.length)?;
                Err(error)
            }
        }
    }
}

fn lines_of(record: &TaskRecord) -> Vec<JournalEntry> {
    let (task_id, attempt) = (record.payload.task_id, record.attempt);
    let mut lines = vec![JournalEntry::Accepted { payload: record.payload.clone() }];
    match &record.phase {
        Phase::Accepted => {}
        Phase::Started => lines.push(JournalEntry::Started { task_id, attempt, at: record.payload.issued_at }),
        Phase::Done(result) => lines.push(JournalEntry::Done { task_id, result: result.clone() }),
        Phase::Reported(result) => {
            let at = result.finished_at;
            lines.push(JournalEntry::Done { task_id, result: result.clone() });
            lines.push(JournalEntry::Reported { task_id, attempt, ended: ReportOutcome::Recorded, at });
        }
    }
    lines
}

fn encode(line: &JournalEntry, into: &mut Vec<u8>) -> io::Result<()> {
    serde_json::to_writer(&mut *into, line)?;
    into.push(b'\n');
    Ok(())
}
