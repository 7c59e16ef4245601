//! Batches on disk that the gateway has not accepted yet, oldest first, within a bound: over it the oldest batch is dropped, and its lines
//! are counted.

use super::entry::{Line, is_cursor};
use crate::atomic_file::{self, FileError};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};

/// Lines, and how far the journal was read with them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Batch {
    /// Of the last entry that was read, whether it is a line of the batch or not.
    pub(super) cursor: String,
    pub(super) lines: Vec<Line>,
}

/// A batch's file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SpooledFile {
    number: u64,
    lines: u64,
    bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Spool {
    folder: PathBuf,
    cursor: PathBuf,
    files: VecDeque<SpooledFile>,
    bytes: u64,
    bound: u64,
    next: u64,
    /// The batch that is being sent.
    in_flight: Option<u64>,
}

impl Spool {
    pub(super) fn open(state_dir: &Path, bound: u64) -> Result<Self, FileError> {
        let folder = state_dir.join("spool");
        atomic_file::private_folder(&folder)?;
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(FileError::at("read", &folder))? {
            let entry = entry.map_err(FileError::at("read", &folder))?;
            let (path, bytes) = (entry.path(), entry.metadata().map_or(0, |metadata| metadata.len()));
            match path.file_name().and_then(|name| SpooledFile::named(name.to_str()?, bytes)) {
                Some(file) => files.push(file),
                // A crash left it half written.
                None => atomic_file::remove(&path)?,
            }
        }
        files.sort_by_key(|file| file.number);
        let next = files.last().map_or(0, |file| file.number + 1);
        let bytes = files.iter().map(|file| file.bytes).sum();
        Ok(Self { folder, cursor: state_dir.join("cursor"), files: files.into(), bytes, bound, next, in_flight: None })
    }

    /// How far the journal was read; `None` where it never was, or where that is lost.
    pub(super) fn cursor(&self) -> Result<Option<String>, FileError> {
        let newest = self.files.back().map(|file| self.read(file)).transpose()?.flatten();
        let cursor = match newest {
            Some(batch) => Some(batch.cursor),
            None => atomic_file::read_if_there(&self.cursor)?,
        };
        Ok(cursor.map(|cursor| cursor.trim().to_owned()).filter(|cursor| is_cursor(cursor)))
    }

    /// Stores a batch durably. Returns how many lines of older batches were dropped for it.
    pub(super) fn push(&mut self, batch: &Batch) -> Result<u64, FileError> {
        let text = serde_json::to_vec(batch)
            .map_err(|error| FileError::at("write", &self.folder)(std::io::Error::other(error)))?;
        let file = SpooledFile { number: self.next, lines: batch.lines.len() as u64, bytes: text.len() as u64 };
        atomic_file::write_atomically(&self.path(&file), &text, atomic_file::PRIVATE)?;
        self.next += 1;
        self.bytes += file.bytes;
        self.files.push_back(file);
        let mut dropped = 0;
        // The one that is being sent stays, so that no line is both counted as lost and accepted; and the newest one, which has the cursor.
        let first =
            usize::from(self.in_flight.is_some() && self.files.front().map(|file| file.number) == self.in_flight);
        while self.bytes > self.bound && self.files.len() > first + 1 {
            dropped += self.drop_at(first)?;
        }
        Ok(dropped)
    }

    /// The oldest batch with its number. A file that cannot be read as one is dropped, and its lines are in the second value.
    pub(super) fn oldest(&mut self) -> Result<(Option<(u64, Batch)>, u64), FileError> {
        let mut lost = 0;
        while let Some(file) = self.files.front() {
            if let Some(batch) = self.read(file)? {
                self.in_flight = Some(file.number);
                return Ok((Some((file.number, batch)), lost));
            }
            lost += self.drop_at(0)?;
        }
        Ok((None, lost))
    }

    /// Records that the gateway has answered for this batch, and removes it.
    pub(super) fn settle(&mut self, number: u64, batch: &Batch) -> Result<(), FileError> {
        // In this order: a crash in between repeats the batch, the other order would begin the journal again.
        atomic_file::write_atomically(&self.cursor, batch.cursor.as_bytes(), atomic_file::PRIVATE)?;
        if self.files.front().is_some_and(|file| file.number == number) {
            self.drop_at(0)?;
        }
        self.in_flight = None;
        Ok(())
    }

    fn drop_at(&mut self, index: usize) -> Result<u64, FileError> {
        let Some(file) = self.files.get(index).cloned() else { return Ok(0) };
        atomic_file::remove(&self.path(&file))?;
        self.files.remove(index);
        self.bytes = self.bytes.saturating_sub(file.bytes);
        Ok(file.lines)
    }

    fn read(&self, file: &SpooledFile) -> Result<Option<Batch>, FileError> {
        let bytes = atomic_file::read_bytes_if_there(&self.path(file))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    fn path(&self, file: &SpooledFile) -> PathBuf {
        self.folder.join(format!("{:020}-{}.json", file.number, file.lines))
    }
}

impl SpooledFile {
    fn named(name: &str, bytes: u64) -> Option<Self> {
        let (number, lines) = name.strip_suffix(".json")?.split_once('-')?;
        Some(Self { number: number.parse().ok()?, lines: lines.parse().ok()?, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u64, lines: usize) -> Batch {
        let line = |at| Line { unit: "gpuaas-agent.service".into(), at, text: "x".repeat(100) };
        Batch { cursor: format!("s={number}"), lines: (0..lines as u64).map(line).collect() }
    }

    fn oldest(spool: &mut Spool) -> Option<Batch> {
        spool.oldest().unwrap().0.map(|(_, batch)| batch)
    }

    #[test]
    fn batches_survive_a_restart_in_order_and_the_newest_has_the_cursor() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(folder.path(), 1 << 20).unwrap();
        assert_eq!(spool.cursor().unwrap(), None);
        for number in 0..12 {
            assert_eq!(spool.push(&batch(number, 3)).unwrap(), 0);
        }
        // A write that a crash interrupted.
        std::fs::write(folder.path().join("spool/.00000000000000000012-3.json.new"), b"{").unwrap();
        let mut spool = Spool::open(folder.path(), 1 << 20).unwrap();
        assert_eq!(spool.cursor().unwrap().as_deref(), Some("s=11"));
        for number in 0..12 {
            let (Some((at, oldest)), 0) = spool.oldest().unwrap() else { panic!("{number} is lost") };
            assert_eq!(oldest, batch(number, 3));
            spool.settle(at, &oldest).unwrap();
        }
        assert_eq!(oldest(&mut spool), None);
        let spool = Spool::open(folder.path(), 1 << 20).unwrap();
        assert_eq!(spool.cursor().unwrap().as_deref(), Some("s=11"), "saved with the last answer");
    }

    #[test]
    fn oldest_lines_over_the_bound_are_dropped_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(folder.path(), 2000).unwrap();
        let dropped: u64 = (0..10).map(|number| spool.push(&batch(number, 5)).unwrap()).sum();
        let left = spool.files.len() as u64;
        assert!(left >= 1 && spool.bytes <= 2000, "{spool:?}");
        assert_eq!(dropped, (10 - left) * 5);
        assert_eq!(oldest(&mut spool).unwrap(), batch(10 - left, 5));
        // One that is larger than the bound stays until the next comes, and so does the one that is being sent.
        assert_eq!(spool.push(&batch(10, 100)).unwrap(), (left - 1) * 5);
        assert_eq!(spool.cursor().unwrap().as_deref(), Some("s=10"));
    }

    #[test]
    fn batch_that_is_being_sent_is_not_dropped_and_the_next_oldest_is() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(folder.path(), 2000).unwrap();
        spool.push(&batch(0, 5)).unwrap();
        let (Some((number, first)), _) = spool.oldest().unwrap() else { panic!("there is one") };
        let dropped: u64 = (1..10).map(|number| spool.push(&batch(number, 5)).unwrap()).sum();
        assert_eq!(spool.oldest().unwrap().0.unwrap(), (number, first.clone()));
        spool.settle(number, &first).unwrap();
        let (Some((_, next)), _) = spool.oldest().unwrap() else { panic!("there is another") };
        assert_eq!(dropped, next.cursor.trim_start_matches("s=").parse::<u64>().unwrap() * 5 - 5, "all between them");
    }

    #[test]
    fn unreadable_file_is_dropped_and_counted_and_a_foreign_cursor_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(folder.path(), 1 << 20).unwrap();
        spool.push(&batch(0, 7)).unwrap();
        spool.push(&batch(1, 1)).unwrap();
        std::fs::write(folder.path().join("spool/00000000000000000000-7.json"), b"{\"cursor\":").unwrap();
        let (found, lost) = spool.oldest().unwrap();
        assert_eq!((found.unwrap().1, lost), (batch(1, 1), 7));
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("cursor"), b"--vacuum-time=1s").unwrap();
        assert_eq!(Spool::open(folder.path(), 1).unwrap().cursor().unwrap(), None);
    }
}
