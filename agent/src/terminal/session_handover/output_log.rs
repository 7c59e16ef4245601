//! A session's output in a file in memory, from the moment when it is read from the terminal.
//!
//! The kernel moves the output from the terminal to the staging pipe, and from there to the end of the file, each in one step: wherever the
//! agent is killed, a byte is in exactly one of the three. A byte's place in the file is its position, and the file's length the position of
//! the output's end. Dropped output is a hole.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek};
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};

use super::record::RECORD_AREA;
use crate::terminal::pty::PtyMaster;

/// Output is dropped in steps of this many bytes.
const DROP_STEP: u64 = 64 * 1024;
/// Holes consist of whole pages of any machine.
const PAGE: u64 = 64 * 1024;
/// The most that one step moves: what a pipe holds at least.
const STEP: usize = 16 * 1024;

/// The writer's end.
#[derive(Debug)]
pub(in crate::terminal) struct OutputLog {
    file: Arc<File>,
    /// Both ends of the pipe.
    staging: OwnedFd,
    end: u64,
    /// How far it was read.
    read: u64,
}

impl OutputLog {
    /// # Errors
    /// The process has no descriptor left, or the machine no memory.
    pub(in crate::terminal) fn create() -> io::Result<Self> {
        let file = File::from(memfd_create("gpuaas-terminal", MemfdFlags::CLOEXEC)?);
        file.set_len(RECORD_AREA)?;
        Ok(Self { file: Arc::new(file), staging: pipe()?, end: 0, read: 0 })
    }

    /// Continues a log of an earlier process, from what it had staged.
    ///
    /// # Errors
    /// The file is none of a session, or the pipe none.
    pub(super) fn adopt(file: File, staging: OwnedFd) -> io::Result<Self> {
        let end = file.metadata()?.len().checked_sub(RECORD_AREA).ok_or(io::ErrorKind::InvalidData)?;
        let mut log = Self { file: Arc::new(file), staging, end, read: end };
        while log.collect(STEP)? > 0 {}
        Ok(log)
    }

    pub(in crate::terminal) fn file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    pub(super) fn staging(&self) -> BorrowedFd<'_> {
        self.staging.as_fd()
    }

    /// The position after the last byte that was read from the terminal.
    pub(in crate::terminal) const fn end(&self) -> u64 {
        self.end
    }

    /// Continues to read at a position, or where the output begins that is not dropped. Returns that.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(in crate::terminal) fn read_from(&mut self, position: u64) -> io::Result<u64> {
        self.read = position.max(first_byte(&self.file, self.end)?).min(self.end);
        Ok(self.read)
    }

    /// The reader's end.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(in crate::terminal) fn tail(&self) -> io::Result<OutputTail> {
        Ok(OutputTail { start: first_byte(&self.file, self.end)?, file: Arc::clone(&self.file) })
    }

    /// Reads the next output into `into`: what is in the log, and otherwise what the terminal has. Cancel-safe.
    ///
    /// # Errors
    /// EIO when every program has closed the terminal; the machine has no memory.
    pub(in crate::terminal) async fn read_next(&mut self, pty: &PtyMaster, into: &mut [u8]) -> io::Result<usize> {
        if self.read == self.end {
            let moved = pty.splice(self.staging.as_fd(), into.len().min(STEP)).await?;
            let mut left = moved;
            while left > 0 {
                left -= self.collect(left)?;
            }
        }
        let length = usize::try_from(self.end - self.read).unwrap_or(usize::MAX).min(into.len());
        self.file.read_exact_at(&mut into[..length], RECORD_AREA + self.read)?;
        self.read += length as u64;
        Ok(length)
    }

    /// Moves what is staged to the end of the file. Returns how much that was.
    fn collect(&mut self, most: usize) -> io::Result<usize> {
        let mut at = RECORD_AREA + self.end;
        match splice(&self.staging, None, &*self.file, Some(&mut at), most, SpliceFlags::NONBLOCK) {
            Ok(moved) => {
                self.end += moved as u64;
                Ok(moved)
            }
            Err(Errno::AGAIN) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Appends output as if it came from a terminal.
    #[cfg(test)]
    pub(in crate::terminal) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        assert_eq!(rustix::io::write(&self.staging, bytes)?, bytes.len());
        while self.collect(STEP)? > 0 {}
        Ok(())
    }
}

/// The reader's end: the output that a user may still request.
#[derive(Debug)]
pub(in crate::terminal) struct OutputTail {
    file: Arc<File>,
    /// The position of the first byte that is not dropped.
    start: u64,
}

impl OutputTail {
    pub(in crate::terminal) const fn start(&self) -> u64 {
        self.start
    }

    /// Drops output before `position`, now or a little later.
    pub(in crate::terminal) fn drop_before(&mut self, position: u64) {
        if position < self.start + DROP_STEP {
            return;
        }
        let whole = (position / PAGE) * PAGE;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Without the hole the output stays in memory, and nothing else changes.
        if fallocate(&*self.file, hole, RECORD_AREA, whole).is_ok() {
            self.start = whole;
        }
    }

    /// The bytes at a position, which are all there.
    pub(in crate::terminal) fn read(&self, position: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        match self.file.read_exact_at(&mut bytes, RECORD_AREA + position) {
            Ok(()) => bytes,
            Err(_) => Vec::new(),
        }
    }
}

/// The position of the first byte that is not dropped.
fn first_byte(file: &File, end: u64) -> io::Result<u64> {
    match seek(file, SeekFrom::Data(RECORD_AREA)) {
        Ok(at) => Ok(at.saturating_sub(RECORD_AREA)),
        // There is no output, or all of it is dropped.
        Err(Errno::NXIO) => Ok(end),
        Err(error) => Err(error.into()),
    }
}

/// A pipe as one descriptor that reads and writes, since each descriptor in the store counts.
fn pipe() -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let (reader, _writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let both =
        std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", reader.as_raw_fd()))?;
    Ok(both.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at % 251) as u8).collect()
    }

    #[test]
    fn staged_output_and_holes_survive_the_process() {
        let mut log = OutputLog::create().unwrap();
        let output = pattern(300_000);
        output.chunks(4096).for_each(|part| log.append(part).unwrap());
        let mut tail = log.tail().unwrap();
        tail.drop_before(200_000);
        assert!((130_000..=200_000).contains(&tail.start()), "{}", tail.start());
        // The earlier process was killed between the two steps.
        rustix::io::write(log.staging(), b"staged").unwrap();
        let (file, staging) = (log.file.try_clone().unwrap(), log.staging.try_clone().unwrap());
        let mut next = OutputLog::adopt(file, staging).unwrap();
        assert_eq!(next.end(), 300_006);
        let tail = next.tail().unwrap();
        assert_eq!(tail.read(200_000, 100_006), [&output[200_000..], b"staged"].concat());
        assert_eq!(next.read_from(0).unwrap(), tail.start(), "dropped output is not read as zeros");
        assert_eq!(next.read_from(250_000).unwrap(), 250_000);
    }

    #[test]
    fn memory_of_a_log_is_bounded() {
        let mut log = OutputLog::create().unwrap();
        let mut tail = log.tail().unwrap();
        for _ in 0..200 {
            log.append(&pattern(16 * 1024)).unwrap();
            tail.drop_before(log.end().saturating_sub(256 * 1024));
        }
        let blocks = std::os::unix::fs::MetadataExt::blocks(&log.file.metadata().unwrap());
        assert!(blocks * 512 <= (256 + 128 + 16 + 64) * 1024, "{blocks} blocks of {} bytes of output", log.end());
    }
}
