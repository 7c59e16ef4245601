//! Reads the journal by `journalctl`, which knows its format, and spools what it prints.
//!
//! The journal is read from the entry at the cursor, which is passed over, and not from the one after it: where the entry is gone, journalctl
//! goes on at the nearest one, and with `--after-cursor` it would pass over that instead.

use super::entry::{CollectedUnits, Entry, FIELDS};
use super::spool::Batch;
use super::{CollectorConfig, Shared};
use crate::chain;
use crate::full_jitter::Backoff;
use std::convert::Infallible;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{info, warn};

/// A batch has at most so many lines, and about so many bytes; JSON makes six of a byte at most, and the gateway takes 2 MiB.
const BATCH_LINES: usize = 1000;
const BATCH_BYTES: usize = 256 * 1024;
/// How long the first line of a batch waits for others.
const BATCH_AGE: Duration = Duration::from_secs(1);
/// The longest line that journalctl may print. A longer one is passed over.
const PRINTED_MAX: usize = 8 << 20;
/// Where reading begins on a machine whose journal was never read.
const FIRST_READ: &str = "-24h";
const MACHINE_ID: &str = "/etc/machine-id";
/// What is shown of an error of journalctl.
const ERROR_BYTES: u64 = 1024;
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Why journalctl is started again.
enum ReadEnd {
    /// It ended.
    Ended,
    /// It cannot read on at the cursor.
    CursorRefused,
}

/// Reads and spools without an end.
pub(super) async fn read(config: &CollectorConfig, shared: &Shared) -> Infallible {
    let mut backoff = Backoff::new(RETRY.0, RETRY.1);
    let mut cursor = loop {
        match shared.spool().cursor() {
            Ok(cursor) => break cursor,
            Err(error) => warn!(error_code = "node_storage", error = chain(&error), "the cursor cannot be read"),
        }
        sleep(RETRY.1).await;
    };
    info!(from = cursor.as_deref().unwrap_or(FIRST_READ), "the journal is read");
    let units = CollectedUnits::new(&config.agent_unit);
    loop {
        let mut reader =
            JournalReader { config, units: &units, shared, cursor: cursor.clone(), lines_read: 0, of_no_unit: 0 };
        match reader.read().await {
            Ok(ReadEnd::Ended) => {}
            Ok(ReadEnd::CursorRefused) => {
                warn!(error_code = "journal_gap", "the journal does not take the cursor; its last day is read again");
                reader.cursor = None;
            }
            Err(error) => {
                warn!(error_code = "journal", error = chain(&error), "journalctl cannot be run; it is tried again");
            }
        }
        if reader.lines_read > 0 {
            backoff.reset();
        }
        cursor = reader.cursor;
        sleep(backoff.next(rand::random(), None)).await;
    }
}

struct JournalReader<'a> {
    config: &'a CollectorConfig,
    units: &'a CollectedUnits,
    shared: &'a Shared,
    /// Of the last entry that is in the spool, or was there.
    cursor: Option<String>,
    lines_read: u64,
    /// Entries since the last batch that no collected unit has written, and that are not of systemd about one.
    of_no_unit: u64,
}

impl JournalReader<'_> {
    async fn read(&mut self) -> std::io::Result<ReadEnd> {
        let mut child = self.spawn()?;
        let (Some(printed), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(std::io::Error::other("journalctl has no output"));
        };
        // It is not waited for: journalctl would block on a full pipe.
        let complaint = tokio::spawn(async move {
            let mut text = Vec::new();
            let _ = (&mut errors).take(ERROR_BYTES).read_to_end(&mut text).await;
            let _ = tokio::io::copy(&mut errors, &mut tokio::io::sink()).await;
            String::from_utf8_lossy(&text).trim().to_owned()
        });
        let outcome = self.spool_all(BufReader::new(printed)).await;
        let _ = child.kill().await;
        outcome?;
        let complaint = complaint.await.unwrap_or_default();
        if self.lines_read == 0 && self.cursor.is_some() && complaint.contains("cursor") {
            return Ok(ReadEnd::CursorRefused);
        }
        warn!(error_code = "journal", complaint, "journalctl ended; it is started again");
        Ok(ReadEnd::Ended)
    }

    /// `--follow` alone shows the current boot only, and would pass over what was not read of the last one. `--merge` shows all, also what
    /// other machines have sent to this one: the machine's id excludes that.
    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.config.journalctl);
        command.args(["--output=json", "--all", "--quiet", "--no-pager", "--follow", "--no-tail", "--merge"]);
        command.arg(format!("--output-fields={FIELDS}"));
        command.args(self.units.names().map(|name| format!("--unit={name}")));
        match &self.cursor {
            Some(cursor) => command.arg(format!("--cursor={cursor}")),
            None => command.arg(format!("--since={FIRST_READ}")),
        };
        if let Ok(machine_id) = std::fs::read_to_string(MACHINE_ID) {
            command.arg(format!("_MACHINE_ID={}", machine_id.trim()));
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn()
    }

    /// Spools what journalctl prints, until it ends.
    async fn spool_all(&mut self, mut printed: BufReader<ChildStdout>) -> std::io::Result<()> {
        let (mut pending, mut bytes) = (Batch { cursor: String::new(), lines: Vec::new() }, 0);
        let mut line = PrintedLine::default();
        // Where nothing is pending there is no deadline.
        let never = Duration::from_secs(3600);
        let mut deadline = Instant::now() + never;
        loop {
            let is_full = pending.lines.len() >= BATCH_LINES || bytes >= BATCH_BYTES;
            let next = if is_full { None } else { timeout_at(deadline, line.read(&mut printed)).await.ok() };
            let more = match next {
                Some(more) => more?,
                None => {
                    self.spool(&mut pending).await;
                    (bytes, deadline) = (0, Instant::now() + never);
                    continue;
                }
            };
            if !more {
                self.spool(&mut pending).await;
                return Ok(());
            }
            let Some(text) = line.take(self.shared) else { continue };
            let Some(entry) = Entry::parse(&text, self.units) else {
                self.shared.count_lost(1, "journalctl printed a line that is no entry of the journal");
                continue;
            };
            let is_first = self.lines_read == 0;
            self.lines_read += 1;
            if is_first && self.cursor.is_some() {
                if self.cursor.as_deref() == Some(&entry.cursor) {
                    continue;
                }
                warn!(
                    error_code = "journal_gap",
                    "the journal no longer has the last line that was read: lines after it may be lost"
                );
            }
            if pending.cursor.is_empty() {
                deadline = Instant::now() + BATCH_AGE;
            }
            pending.cursor = entry.cursor;
            match entry.line {
                Some(line) => {
                    bytes += line.text.len();
                    pending.lines.push(line);
                }
                // journalctl shows more for a unit than its lines: programs in it that dumped core, which may be tenants'.
                None => self.of_no_unit += 1,
            }
        }
    }

    /// Spools the pending lines, and waits while the disk is full: the journal holds what follows.
    async fn spool(&mut self, pending: &mut Batch) {
        if pending.cursor.is_empty() {
            return;
        }
        self.shared.count_lost(std::mem::take(&mut self.of_no_unit), "they are of no unit that is collected");
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        if !pending.lines.is_empty() {
            loop {
                let pushed = self.shared.spool().push(pending);
                match pushed {
                    Ok(dropped) => {
                        self.shared.count_lost(dropped, "the spool is full, and the oldest lines go first");
                        break;
                    }
                    Err(error) => {
                        warn!(error_code = "node_storage", error = chain(&error), "lines cannot be spooled yet");
                    }
                }
                sleep(backoff.next(rand::random(), None)).await;
            }
            self.shared.filled.notify_one();
        }
        self.cursor = Some(std::mem::take(&mut pending.cursor));
        pending.lines.clear();
    }
}

/// A line that is read in pieces: reading it can be cancelled, and goes on where it was.
#[derive(Default)]
struct PrintedLine {
    text: Vec<u8>,
    is_complete: bool,
    /// It is longer than the bound, and its end is not reached.
    is_skipped: bool,
}

impl PrintedLine {
    /// Reads to the end of the line. `false` at the end of the output.
    async fn read(&mut self, printed: &mut BufReader<ChildStdout>) -> std::io::Result<bool> {
        self.is_complete = false;
        loop {
            let available = printed.fill_buf().await?;
            if available.is_empty() {
                return Ok(false);
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(available.len(), |end| end + 1);
            if self.text.len() + taken > PRINTED_MAX {
                self.is_skipped = true;
                self.text.clear();
            }
            if !self.is_skipped {
                self.text.extend_from_slice(&available[..taken]);
            }
            printed.consume(taken);
            if end.is_some() {
                self.is_complete = true;
                return Ok(true);
            }
        }
    }

    /// The line, once; `None` where it was too long.
    fn take(&mut self, shared: &Shared) -> Option<Vec<u8>> {
        let text = std::mem::take(&mut self.text);
        if std::mem::take(&mut self.is_skipped) {
            shared.count_lost(1, &format!("a line of the journal is over {PRINTED_MAX} bytes"));
            return None;
        }
        self.is_complete.then_some(text)
    }
}
