//! A log whose reader may not read: journald on a disk that does not answer, or a pipe that nothing reads. A process waits for it once, for a
//! moment, and goes on.
//!
//! ```text
//! write ──▶ queue ──▶ thread ──▶ standard error
//!   └─ waits until its line is written, unless the line before is not ──▶ counted where the queue is full
//! ```

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// How long the first line waits that is not taken.
const WAIT: Duration = Duration::from_secs(1);
/// The lines that wait to be written. What is over them is dropped.
const QUEUE: usize = 1000;

/// One line, and who waits for it.
struct PendingLine {
    text: Vec<u8>,
    written: SyncSender<()>,
}

/// The writer of lines. Its clones are one.
#[derive(Clone)]
pub(super) struct BoundedLines {
    queue: SyncSender<PendingLine>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// A line is being written and has been for longer than a moment.
    is_stuck: AtomicBool,
    dropped: AtomicU64,
}

impl BoundedLines {
    /// Writes to `sink`, in a thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub(super) fn to(sink: impl Write + Send + 'static) -> io::Result<Self> {
        let (queue, lines) = sync_channel(QUEUE);
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::Builder::new().name("log".to_owned()).spawn(move || write_all(sink, &lines, &shared))?;
        Ok(Self { queue, state })
    }

    /// How many lines were dropped since the last call. None are shown while lines are still not taken.
    #[must_use]
    pub(super) fn take_dropped(&self) -> u64 {
        if self.state.is_stuck.load(Ordering::Relaxed) { 0 } else { self.state.dropped.swap(0, Ordering::Relaxed) }
    }
}

/// Ends with its last writer.
fn write_all(mut sink: impl Write, lines: &Receiver<PendingLine>, state: &State) {
    for PendingLine { text, written } in lines {
        // A failure to write the log cannot be logged.
        let _ = sink.write_all(&text);
        state.is_stuck.store(false, Ordering::Relaxed);
        // Its caller has gone on where it took longer than a moment.
        let _ = written.try_send(());
    }
}

impl Write for BoundedLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let (written, waits) = sync_channel(1);
        let was_stuck = self.state.is_stuck.load(Ordering::Relaxed);
        if self.queue.try_send(PendingLine { text: line.to_owned(), written }).is_err() {
            self.state.dropped.fetch_add(1, Ordering::Relaxed);
        } else if !was_stuck && waits.recv_timeout(WAIT).is_err() {
            self.state.is_stuck.store(true, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::TrySendError;
    use std::time::Instant;

    use super::*;

    const LINES: usize = 5 * QUEUE;

    fn line(number: usize) -> String {
        format!("{number} {}\n", "x".repeat(1000))
    }

    #[test]
    fn dropped_lines_are_shown_once_and_not_while_lines_are_not_taken() {
        let log = BoundedLines::to(io::sink()).unwrap();
        log.state.dropped.store(3, Ordering::Relaxed);
        log.state.is_stuck.store(true, Ordering::Relaxed);
        assert_eq!(log.take_dropped(), 0);
        log.state.is_stuck.store(false, Ordering::Relaxed);
        assert_eq!([log.take_dropped(), log.take_dropped()], [3, 0]);
    }

    #[test]
    fn log_that_is_not_read_is_waited_for_once_and_what_it_lacks_is_counted() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut log = BoundedLines::to(ours).unwrap();
        let begun = Instant::now();
        (0..LINES).for_each(|number| log.write_all(line(number).as_bytes()).unwrap());
        assert!(begun.elapsed() < WAIT * 20, "each line has waited: {:?}", begun.elapsed());
        assert_eq!(log.take_dropped(), 0, "its reader could not read it");
        let mut read = BufReader::new(theirs).lines().map(Result::unwrap);
        let mut numbers = vec![read.next().unwrap()];
        // What was queued is there, and then what is written from here on.
        while log.state.is_stuck.load(Ordering::Relaxed) {
            numbers.push(read.next().unwrap());
        }
        let rest = std::thread::spawn(move || read.collect::<Vec<_>>());
        let (written, drained) = sync_channel(1);
        let mut last = PendingLine { text: Vec::new(), written };
        while let Err(TrySendError::Full(again)) = log.queue.try_send(last) {
            last = again;
            std::thread::sleep(Duration::from_millis(1));
        }
        drained.recv().unwrap();
        log.write_all(line(LINES).as_bytes()).unwrap();
        // The last line may have waited for longer than a moment, on a busy machine, and then none are shown.
        let dropped = usize::try_from(log.state.dropped.load(Ordering::Relaxed)).unwrap();
        drop(log);
        numbers.extend(rest.join().unwrap());
        assert_eq!(numbers.len() + dropped, LINES + 1);
        assert!(dropped > 0);
        let number = |line: &String| line.split(' ').next().unwrap().parse::<usize>().unwrap();
        assert!(numbers.iter().map(number).is_sorted(), "in their order");
        assert_eq!(numbers.iter().map(number).next_back(), Some(LINES));
        assert!(numbers.iter().all(|text| text.len() + 1 == line(number(text)).len()), "whole");
    }
}
