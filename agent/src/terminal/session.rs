//! One session: a shell on its pseudo-terminal, its buffered output, and its attachment.
//!
//! The program is read only as long as the attached user keeps up, so that a slow reader stops it and nothing here grows. Without an
//! attachment it runs on, and the last part of its output is buffered. A session outlives its program until its user confirms that all of
//! the output has arrived: messages may have been lost with a connection that is not yet known to be cut.

mod attachment;
mod program;
mod read_buffer;

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::debug;
use uuid::Uuid;
use wire::recording::RecordMode;
use wire::terminal::{INPUT_WINDOW, OUTPUT_WINDOW, ProgramExit, TerminalCommand, TerminalEvent};

use super::output::OutputBuffer;
use super::pty::PtyMaster;
use super::recording::{Recorder, RecorderEvent};
use super::session_handover::{RecordFile, SessionStore};
use attachment::Attachment;
pub(super) use program::Program;
pub(super) use read_buffer::ReadBuffer;

/// How long remaining output is awaited after the shell's exit, or after its reader has caught up: a background process may hold the
/// terminal open.
const OUTPUT_IDLE_TIMEOUT: Duration = Duration::from_millis(250);
/// More than a kernel buffers for a terminal: if a background process writes more than this, no output from before the exit is left.
const PTY_BUFFER_BOUND: u64 = 64 * 1024;
/// How long a program that exited waits for a user to confirm its output, or for one to attach and see how it ended. Longer than a
/// gateway takes to detect that a user is gone.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it waits for a user who has not received all of the output, and is gone.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(600);
/// Without an attachment and with a full buffer, output is read at this interval, so that an endless writer costs little.
const DETACHED_READ_PAUSE: Duration = Duration::from_millis(10);
/// How long a program waits with a full window for a user whose stream was cut, or whose agent was restarted: such a user attaches again at
/// once, and misses no output. A user who detaches lets the program go on.
const REATTACH_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the exit is resent until it is acknowledged.
const RESEND_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent that is being stopped waits for the acknowledgement.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the end of a recording may take to be written.
const RECORDING_END_TIMEOUT: Duration = Duration::from_secs(2);

/// A message from the stream.
#[derive(Debug)]
pub(super) enum StreamMessage {
    Received(TerminalCommand),
    /// The stream is cut: its user is detached for the time being.
    Cut,
}

pub(super) struct Session {
    pty: PtyMaster,
    program: Program,
    read_buffer: ReadBuffer,
    output: OutputBuffer,
    recorder: Recorder,
    /// The recording mode, if it has changed and the user has not been notified.
    recording: Option<RecordMode>,
    attachment: Option<Attachment>,
    /// When a user last attached, detached, or acknowledged output.
    last_activity_at: Instant,
    /// The number of the last attachment: messages of an earlier one are late.
    newest_attachment: u32,
    /// The position up to which a user has acknowledged the output.
    acknowledged: u64,
    /// Input that the program has not taken yet.
    typed: VecDeque<u8>,
    ended: Option<ExitedProgram>,
    /// Nothing more can be read.
    is_eof: bool,
    /// Since when its output is read; `None` while that waits for a reader.
    reads_since: Option<Instant>,
    /// Until then output is not read, because no user is attached.
    read_after: Instant,
    /// Until then a user who is not attached is expected, and output waits for the acknowledgement.
    expects_user_until: Instant,
    inbox: mpsc::Receiver<StreamMessage>,
    outbox: mpsc::Sender<TerminalEvent>,
    ends_at: Instant,
    ends: SessionCancellation,
    /// Where the next process of the agent finds it.
    stored: Option<StoredSession>,
}

/// What a session is made of.
pub(super) struct SessionParts {
    pub(super) pty: PtyMaster,
    pub(super) program: Program,
    pub(super) recorder: Recorder,
    pub(super) read_buffer: ReadBuffer,
    pub(super) output: OutputBuffer,
    /// Its output was acknowledged up to here.
    pub(super) acknowledged: u64,
    /// Input that its program has not taken.
    pub(super) typed: VecDeque<u8>,
    pub(super) stored: Option<StoredSession>,
}

/// A session in the store.
pub(super) struct StoredSession {
    pub(super) session_id: Uuid,
    pub(super) record: RecordFile,
    pub(super) store: SessionStore,
}

/// What ends a session from outside.
pub(super) struct SessionCancellation {
    /// All parts of the session end.
    pub(super) over: CancellationToken,
    /// The agent is being stopped.
    pub(super) stop: CancellationToken,
    /// The allocation is being released, which ends its programs.
    pub(super) released: CancellationToken,
}

/// A program that exited.
#[derive(Clone, Copy)]
struct ExitedProgram {
    exit: ProgramExit,
    at: Instant,
    /// Bytes that were read since.
    read: u64,
}

impl ExitedProgram {
    fn now(exit: ProgramExit) -> Self {
        Self { exit, at: Instant::now(), read: 0 }
    }
}

/// Why the loop ended.
enum SessionEnd {
    /// The program exited and its output has arrived, or no user attaches for it.
    Exited(ProgramExit),
    /// The control plane requests it, for itself or for the user.
    Closed,
    /// The agent is being stopped.
    Stopped,
    /// The lifetime is over, or the stream is gone.
    Over,
}

impl Session {
    pub(super) fn new(
        parts: SessionParts,
        inbox: mpsc::Receiver<StreamMessage>,
        outbox: mpsc::Sender<TerminalEvent>,
        left: Duration,
        ends: SessionCancellation,
    ) -> Self {
        let SessionParts { pty, program, recorder, read_buffer, output, acknowledged, typed, stored } = parts;
        let now = Instant::now();
        Self {
            pty,
            program,
            read_buffer,
            output,
            recorder,
            recording: None,
            attachment: None,
            last_activity_at: now,
            newest_attachment: 0,
            acknowledged,
            typed,
            ended: None,
            is_eof: false,
            reads_since: None,
            read_after: now,
            expects_user_until: now + REATTACH_TIMEOUT,
            inbox,
            outbox,
            ends_at: now + left,
            ends,
            stored,
        }
    }

    pub(super) async fn run(mut self) {
        let end = self.run_until_end().await;
        if matches!(end, SessionEnd::Stopped) && self.leaves().await {
            return;
        }
        // A disk that hangs does not block the end.
        let _ = timeout(RECORDING_END_TIMEOUT, self.recorder.finish()).await;
        match end {
            // The control plane knows the reason, and sends that the session is over.
            SessionEnd::Exited(_) if self.ends.released.is_cancelled() => self.wait_for_close().await,
            SessionEnd::Exited(exit) => self.resend_until_closed(&TerminalEvent::Exited { exit }).await,
            SessionEnd::Closed => {
                let exit = self.end_processes().await;
                self.resend_until_closed(&TerminalEvent::Exited { exit }).await;
            }
            SessionEnd::Stopped => {
                let ended = self.ended.filter(|_| !self.ends.released.is_cancelled());
                let how = ended.map_or(TerminalEvent::Lost, |it| TerminalEvent::Exited { exit: it.exit });
                self.end_processes().await;
                let _ = timeout(STOP_TIMEOUT, self.resend_until_closed(&how)).await;
            }
            SessionEnd::Over => {}
        }
        self.ends.over.cancel();
        self.end_processes().await;
        if let Some(stored) = &self.stored {
            stored.store.remove(stored.session_id);
        }
    }

    /// Whether the session is left to the next process of the agent, which continues it.
    async fn leaves(&mut self) -> bool {
        let Some(stored) = &self.stored else { return false };
        if self.ends.released.is_cancelled() || !stored.store.outlives_stop().await {
            return false;
        }
        self.typed.make_contiguous();
        stored.record.leave_input(self.typed.as_slices().0);
        self.recorder.leave();
        true
    }

    /// The control plane sends that the session is over once it knows how it ended. Messages may be lost with a cut stream, so they are
    /// resent.
    async fn resend_until_closed(&mut self, how: &TerminalEvent) {
        let mut resend = interval(RESEND_INTERVAL);
        let outbox = self.outbox.clone();
        loop {
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(StreamMessage::Received(TerminalCommand::Close)) | None => return,
                    // A user who attaches again receives the missing output, and the exit after it.
                    Some(StreamMessage::Received(command)) => self.handle(command),
                    Some(StreamMessage::Cut) => self.lose_stream(),
                },
                permit = outbox.reserve(), if self.has_pending_message() => {
                    let Ok(permit) = permit else { return };
                    self.send_next(permit);
                }
                _ = resend.tick(), if !self.has_pending_message() => drop(self.outbox.try_send(how.clone())),
                () = self.ends.over.cancelled() => return,
                () = sleep_until(self.ends_at) => return,
            }
        }
    }

    async fn wait_for_close(&mut self) {
        let closed = async {
            while !matches!(self.inbox.recv().await, Some(StreamMessage::Received(TerminalCommand::Close)) | None) {}
        };
        tokio::select! {
            () = closed => {}
            () = self.ends.over.cancelled() => {}
            () = sleep_until(self.ends_at) => {}
        }
    }

    async fn run_until_end(&mut self) -> SessionEnd {
        let outbox = self.outbox.clone();
        loop {
            self.update_read_state();
            if let Some(exit) = self.finished_exit() {
                return SessionEnd::Exited(exit);
            }
            let may_read = self.may_read();
            let (read_after, read_until) = (self.read_after, self.read_until());
            tokio::select! {
                () = self.ends.over.cancelled() => return SessionEnd::Over,
                () = self.ends.stop.cancelled() => return SessionEnd::Stopped,
                () = sleep_until(self.ends_at) => {
                    debug!("the session's lifetime is over");
                    return SessionEnd::Over;
                }
                message = self.inbox.recv() => match message {
                    Some(StreamMessage::Received(TerminalCommand::Close)) => return SessionEnd::Closed,
                    None => return SessionEnd::Over,
                    Some(StreamMessage::Received(command)) => self.handle(command),
                    Some(StreamMessage::Cut) => self.lose_stream(),
                },
                permit = outbox.reserve(), if self.has_pending_message() => {
                    let Ok(permit) = permit else { return SessionEnd::Over };
                    self.send_next(permit);
                }
                read = timeout_at(read_until, self.read_buffer.read(&self.pty, read_after)), if may_read => match read {
                    Ok(Ok(1..)) => self.record_output(),
                    // EIO: every process of the terminal has closed it.
                    Ok(Ok(0) | Err(_)) => self.is_eof = true,
                    Err(_) if self.read_buffer.is_empty() => self.is_eof = true,
                    Err(_) => self.record_output(),
                },
                event = self.recorder.next_event(), if self.recorder.is_busy() => match event {
                    RecorderEvent::Show(bytes) => self.buffer_output(&bytes),
                    RecorderEvent::Ended => self.recording = Some(RecordMode::Off),
                    RecorderEvent::MustEnd => return SessionEnd::Closed,
                },
                written = self.pty.write(self.typed.as_slices().0), if !self.typed.is_empty() => self.consume_input(written.ok()),
                exit = self.program.wait(), if self.ended.is_none() => self.note_exit(exit),
                () = sleep(Duration::from_secs(1)), if self.ended.is_some() => {}
                () = sleep_until(self.expects_user_until), if self.expects_user() => {}
            }
        }
    }

    /// Updates what changed without a message.
    fn update_read_state(&mut self) {
        self.reads_since = self.may_read().then(|| self.reads_since.unwrap_or_else(Instant::now));
        let is_past_the_rest =
            self.ended.is_some_and(|it| it.read >= PTY_BUFFER_BOUND && it.at.elapsed() >= OUTPUT_IDLE_TIMEOUT);
        if is_past_the_rest && self.read_buffer.is_empty() {
            self.is_eof = true;
        }
        if self.is_drained() && !self.typed.is_empty() {
            self.consume_input(None);
        }
    }

    fn may_read(&self) -> bool {
        !self.is_eof
            && self.recorder.has_room()
            && (!self.waits_for_acknowledgement() || self.output.end() - self.acknowledged < OUTPUT_WINDOW)
    }

    fn waits_for_acknowledgement(&self) -> bool {
        self.attachment.is_some() || self.expects_user()
    }

    fn expects_user(&self) -> bool {
        self.attachment.is_none() && Instant::now() < self.expects_user_until
    }

    /// When a read without output ends.
    fn read_until(&self) -> Instant {
        let rest = self.ended.zip(self.reads_since).map(|(ended, since)| ended.at.max(since) + OUTPUT_IDLE_TIMEOUT);
        rest.unwrap_or(self.ends_at)
    }

    /// Whether the output is complete.
    fn is_drained(&self) -> bool {
        self.ended.is_some() && self.is_eof && self.recorder.is_flushed()
    }

    fn has_pending_message(&self) -> bool {
        let owes = |it: &Attachment| it.has_pending(&self.output, self.is_drained());
        self.attachment.as_ref().is_some_and(|it| self.recording.is_some() || owes(it))
    }

    fn send_next(&mut self, permit: mpsc::Permit<'_, TerminalEvent>) {
        let is_all = self.is_drained();
        let Some(attachment) = &mut self.attachment else { return };
        if let Some(up) = attachment.next_message(&mut self.recording, &self.output, is_all) {
            permit.send(up);
        }
    }

    fn finished_exit(&self) -> Option<ProgramExit> {
        let ended = self.ended.filter(|_| self.is_drained())?;
        let waited = ended.at.max(self.last_activity_at).elapsed();
        let is_confirmed = match &self.attachment {
            Some(it) => !self.has_pending_message() && (it.has_all || waited >= CONFIRM_TIMEOUT),
            None if self.acknowledged < self.output.end() => waited >= RECONNECT_TIMEOUT,
            None => waited >= CONFIRM_TIMEOUT,
        };
        (is_confirmed || self.ends.released.is_cancelled()).then_some(ended.exit)
    }

    fn handle(&mut self, command: TerminalCommand) {
        match command {
            TerminalCommand::Attach { attachment, from } if attachment >= self.newest_attachment => {
                self.attach(attachment, from);
            }
            TerminalCommand::Detach { attachment } if self.is_connected(attachment) => {
                self.detach();
                self.expects_user_until = self.last_activity_at;
            }
            TerminalCommand::Input { attachment, bytes } if self.is_connected(attachment) => {
                // A client that sends more than its window violates the protocol.
                if (self.typed.len() + bytes.len()) as u64 <= 2 * INPUT_WINDOW {
                    self.typed.extend(bytes);
                }
            }
            TerminalCommand::Ack { attachment, position } if self.is_connected(attachment) => {
                let sent = self.attachment.as_ref().map_or(0, |it| it.next);
                let position = position.min(sent);
                if position > self.acknowledged {
                    self.acknowledge(position);
                    self.last_activity_at = Instant::now();
                }
            }
            TerminalCommand::Received { attachment, position } => {
                let end = self.output.end();
                if let Some(it) = self.attachment.as_mut().filter(|it| it.id == attachment) {
                    it.has_all |= position >= end;
                }
            }
            TerminalCommand::Resize { columns, rows } => {
                let (columns, rows) = (columns.max(1), rows.max(1));
                let _ = self.pty.resize(columns, rows);
                self.recorder.resize(columns, rows);
            }
            TerminalCommand::Record { terms } => {
                if self.recorder.change(terms) {
                    self.recording = Some(self.recorder.mode());
                }
            }
            TerminalCommand::Attach { .. }
            | TerminalCommand::Detach { .. }
            | TerminalCommand::Input { .. }
            | TerminalCommand::Ack { .. }
            | TerminalCommand::Close => {}
        }
    }

    fn is_connected(&self, attachment: u32) -> bool {
        self.attachment.as_ref().is_some_and(|it| it.id == attachment)
    }

    fn attach(&mut self, attachment: u32, from: Option<u64>) {
        let wanted = from.unwrap_or(self.acknowledged).min(self.output.end());
        let next = wanted.max(self.output.start());
        self.newest_attachment = attachment;
        self.acknowledge(next);
        self.last_activity_at = Instant::now();
        self.attachment = Some(Attachment::new(attachment, wanted, next));
        // A change may have been sent over a connection that was cut just then.
        self.recording = Some(self.recorder.mode());
    }

    fn acknowledge(&mut self, position: u64) {
        self.acknowledged = position;
        if let Some(stored) = &self.stored {
            stored.record.acknowledge(position);
        }
    }

    /// The stream is cut: the user is still there, and attaches again over the next one.
    fn lose_stream(&mut self) {
        if self.attachment.is_some() {
            self.expects_user_until = Instant::now() + REATTACH_TIMEOUT;
        }
        self.detach();
    }

    fn detach(&mut self) {
        self.attachment = None;
        self.last_activity_at = Instant::now();
    }

    /// Records the program's output; it is shown once it is recorded.
    fn record_output(&mut self) {
        let bytes = self.read_buffer.take();
        if let Some(ended) = &mut self.ended {
            ended.read += bytes.len() as u64;
        }
        self.recorder.output(bytes);
    }

    fn buffer_output(&mut self, bytes: &[u8]) {
        self.output.push(bytes);
        if self.attachment.is_none() && self.ended.is_none() && self.output.start() > self.acknowledged {
            self.read_after = Instant::now() + DETACHED_READ_PAUSE;
        }
    }

    fn consume_input(&mut self, written: Option<usize>) {
        // If the program reads no more, the remaining input is dropped.
        let taken = written.unwrap_or(self.typed.len());
        self.typed.drain(..taken);
        if let Some(attachment) = &mut self.attachment {
            attachment.taken += taken as u64;
        }
    }

    fn note_exit(&mut self, exit: ProgramExit) {
        self.ended = Some(ExitedProgram::now(exit));
        // The remaining output is small, and is to be read without a pause.
        self.read_after = Instant::now();
    }

    async fn end_processes(&mut self) -> ProgramExit {
        if let Some(ended) = self.ended {
            return ended.exit;
        }
        let exit = self.program.end().await;
        self.ended = Some(ExitedProgram::now(exit));
        exit
    }
}

#[cfg(test)]
mod tests;
