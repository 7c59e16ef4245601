//! One session: a shell on its pseudo-terminal, what it said, and who is connected.
//!
//! The program is read only as long as whoever is connected keeps up, so that a slow reader stops it and nothing here grows. While nobody
//! is connected it runs on, and of its output the last part is kept. A session outlives its program until its user says that all of the output
//! has come: what was sent may have been lost with a connection of which nobody knows yet that it is.

mod connected;
mod gathering;

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pty_process::{OwnedReadPty, OwnedWritePty, Pty, Size};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::debug;
use wire::recording::Mode;
use wire::terminal::{Down, Exit, INPUT_WINDOW, KEPT, OUTPUT_WINDOW, Up};

use super::output::Output;
use super::recording::{Came, Recorder};
use connected::Connected;
use gathering::Gathering;

/// How long the rest of the output is waited for after its shell's end, or after its reader has caught up: something in the background may
/// hold the terminal open.
const REST: Duration = Duration::from_millis(250);
/// More than a kernel holds of a terminal: who goes on writing in the background after so much has nothing more from before.
const HELD: u64 = 64 * 1024;
/// How long a program that ended waits for a user to say that all has come, or for one to come and hear how it ended. Longer than a gateway
/// takes to see that a user is gone.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// How long it waits for one who has not had all of the output, and is gone.
const COMES_BACK_WITHIN: Duration = Duration::from_secs(600);
/// With nobody connected and the buffer full, output is read at this pace, so that one who writes without end costs little.
const UNHEARD_PAUSE: Duration = Duration::from_millis(10);
/// How often it is said that the program ended, until that is known.
const SAID_AGAIN: Duration = Duration::from_secs(1);
/// How long an agent that is being stopped waits to be heard.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Between asking the processes to end and ending them.
const GRACE: Duration = Duration::from_secs(2);

/// How long the end of a recording may take to be written.
const RECORDS_WITHIN: Duration = Duration::from_secs(2);

/// What the stream brings.
#[derive(Debug)]
pub(super) enum Heard {
    Said(Down),
    /// The stream is cut: whoever was connected over it is not, for the time being.
    Cut,
}

pub(super) struct Session {
    reader: OwnedReadPty,
    writer: OwnedWritePty,
    child: Child,
    pid: Option<Pid>,
    output: Output,
    recorder: Recorder,
    /// How it is recorded, where that has changed and was not said yet.
    recording: Option<Mode>,
    connected: Option<Connected>,
    /// When somebody last came, went, or had more of the output.
    stirred_at: Instant,
    /// The last one's number: what comes from an earlier one is late.
    newest: u32,
    /// Up to where somebody has acknowledged the output.
    acknowledged: u64,
    /// Typed, and not taken by the program yet.
    typed: VecDeque<u8>,
    ended: Option<Ended>,
    /// Nothing more can be read.
    silent: bool,
    /// Since when its output is read; `None` while that waits for a reader.
    reads_since: Option<Instant>,
    /// Before then output that nobody hears is not read.
    read_after: Instant,
    heard: mpsc::Receiver<Heard>,
    say: mpsc::Sender<Up>,
    ends_at: Instant,
    ends: Ends,
}

/// What ends a session from outside.
pub(super) struct Ends {
    /// Whoever holds a part of the session lets go of it.
    pub(super) over: CancellationToken,
    /// The agent is being stopped.
    pub(super) stop: CancellationToken,
    /// The allocation is being given back, which ends its programs.
    pub(super) given_back: CancellationToken,
}

/// A program that is over.
#[derive(Clone, Copy)]
struct Ended {
    exit: Exit,
    at: Instant,
    /// So much was read since.
    read: u64,
}

impl Ended {
    fn now(exit: Exit) -> Self {
        Self { exit, at: Instant::now(), read: 0 }
    }
}

/// Why the loop is left.
enum End {
    /// The program ended and its output has come, or nobody comes for it.
    Exited(Exit),
    /// The control plane says so, for itself or for the user.
    Told,
    /// The agent is being stopped.
    Stopped,
    /// The lifetime, or nobody to speak to.
    Over,
}

impl Session {
    pub(super) fn new(
        pty: Pty,
        child: Child,
        recorder: Recorder,
        heard: mpsc::Receiver<Heard>,
        say: mpsc::Sender<Up>,
        left: Duration,
        ends: Ends,
    ) -> Self {
        let (reader, writer) = pty.into_split();
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
        let now = Instant::now();
        Self {
            reader,
            writer,
            child,
            pid,
            output: Output::keeping(KEPT),
            recorder,
            recording: None,
            connected: None,
            stirred_at: now,
            newest: 0,
            acknowledged: 0,
            typed: VecDeque::new(),
            ended: None,
            silent: false,
            reads_since: None,
            read_after: now,
            heard,
            say,
            ends_at: now + left,
            ends,
        }
    }

    pub(super) async fn run(mut self) {
        let end = self.live().await;
        // A disk that hangs keeps nobody waiting.
        let _ = timeout(RECORDS_WITHIN, self.recorder.finish()).await;
        match end {
            // The control plane knows why, and says that it is over.
            End::Exited(_) if self.ends.given_back.is_cancelled() => self.until_told().await,
            End::Exited(exit) => self.say_until_heard(&Up::Exited { exit }).await,
            End::Told => {
                let exit = self.end_processes().await;
                self.say_until_heard(&Up::Exited { exit }).await;
            }
            End::Stopped => {
                let ended = self.ended.filter(|_| !self.ends.given_back.is_cancelled());
                let how = ended.map_or(Up::Lost, |it| Up::Exited { exit: it.exit });
                self.end_processes().await;
                let _ = timeout(LAST_WORDS, self.say_until_heard(&how)).await;
            }
            End::Over => {}
        }
        self.ends.over.cancel();
        self.end_processes().await;
    }

    /// The control plane says that the session is over once it knows how it ended. What is said may be cut off.
    async fn say_until_heard(&mut self, how: &Up) {
        let mut again = interval(SAID_AGAIN);
        let say = self.say.clone();
        loop {
            tokio::select! {
                heard = self.heard.recv() => match heard {
                    Some(Heard::Said(Down::Close)) | None => return,
                    // Whoever comes back hears what they lack, and the end after it.
                    Some(Heard::Said(said)) => self.hear(said),
                    Some(Heard::Cut) => self.part(),
                },
                permit = say.reserve(), if self.has_to_say() => {
                    let Ok(permit) = permit else { return };
                    self.say_next(permit);
                }
                _ = again.tick(), if !self.has_to_say() => drop(self.say.try_send(how.clone())),
                () = self.ends.over.cancelled() => return,
                () = sleep_until(self.ends_at) => return,
            }
        }
    }

    async fn until_told(&mut self) {
        let told = async { while !matches!(self.heard.recv().await, Some(Heard::Said(Down::Close)) | None) {} };
        tokio::select! {
            () = told => {}
            () = self.ends.over.cancelled() => {}
            () = sleep_until(self.ends_at) => {}
        }
    }

    async fn live(&mut self) -> End {
        let mut gathering = Gathering::new();
        let say = self.say.clone();
        loop {
            self.take_stock(&gathering);
            if let Some(exit) = self.is_over() {
                return End::Exited(exit);
            }
            let may_read = self.may_read();
            let (read_after, read_until) = (self.read_after, self.read_until());
            tokio::select! {
                () = self.ends.over.cancelled() => return End::Over,
                () = self.ends.stop.cancelled() => return End::Stopped,
                () = sleep_until(self.ends_at) => {
                    debug!("the session's lifetime is over");
                    return End::Over;
                }
                heard = self.heard.recv() => match heard {
                    Some(Heard::Said(Down::Close)) => return End::Told,
                    None => return End::Over,
                    Some(Heard::Said(said)) => self.hear(said),
                    Some(Heard::Cut) => self.part(),
                },
                permit = say.reserve(), if self.has_to_say() => {
                    let Ok(permit) = permit else { return End::Over };
                    self.say_next(permit);
                }
                read = timeout_at(read_until, gathering.read(&mut self.reader, read_after)), if may_read => match read {
                    Ok(Ok(1..)) => self.came(gathering.take()),
                    // EIO: every process of the terminal has closed it.
                    Ok(Ok(0) | Err(_)) => self.silent = true,
                    Err(_) if gathering.is_empty() => self.silent = true,
                    Err(_) => self.came(gathering.take()),
                },
                came = self.recorder.comes(), if self.recorder.is_busy() => match came {
                    Came::Show(bytes) => self.said(&bytes),
                    Came::Ended => self.recording = Some(Mode::Off),
                    Came::MustEnd => return End::Told,
                },
                written = self.writer.write(self.typed.as_slices().0), if !self.typed.is_empty() => self.took(written.ok()),
                status = self.child.wait(), if self.ended.is_none() => self.exited(status.ok()),
                () = sleep(Duration::from_secs(1)), if self.ended.is_some() => {}
            }
        }
    }

    /// What has come about by itself.
    fn take_stock(&mut self, gathering: &Gathering) {
        self.reads_since = self.may_read().then(|| self.reads_since.unwrap_or_else(Instant::now));
        let is_past_the_rest = self.ended.is_some_and(|it| it.read >= HELD && it.at.elapsed() >= REST);
        if is_past_the_rest && gathering.is_empty() {
            self.silent = true;
        }
        if self.has_said_all() && !self.typed.is_empty() {
            self.took(None);
        }
    }

    fn may_read(&self) -> bool {
        !self.silent
            && self.recorder.has_room()
            && (self.connected.is_none() || self.output.end() - self.acknowledged < OUTPUT_WINDOW)
    }

    /// When reading that brings nothing ends.
    fn read_until(&self) -> Instant {
        let rest = self.ended.zip(self.reads_since).map(|(ended, since)| ended.at.max(since) + REST);
        rest.unwrap_or(self.ends_at)
    }

    /// The output will not grow.
    fn has_said_all(&self) -> bool {
        self.ended.is_some() && self.silent && self.recorder.is_settled()
    }

    fn has_to_say(&self) -> bool {
        let owes = |it: &Connected| it.is_owed_words(&self.output, self.has_said_all());
        self.connected.as_ref().is_some_and(|it| self.recording.is_some() || owes(it))
    }

    fn say_next(&mut self, permit: mpsc::Permit<'_, Up>) {
        let is_all = self.has_said_all();
        let Some(connected) = &mut self.connected else { return };
        if let Some(up) = connected.next_words(&mut self.recording, &self.output, is_all) {
            permit.send(up);
        }
    }

    fn is_over(&self) -> Option<Exit> {
        let ended = self.ended.filter(|_| self.has_said_all())?;
        let waited = ended.at.max(self.stirred_at).elapsed();
        let is_heard_out = match &self.connected {
            Some(it) => !self.has_to_say() && (it.has_all || waited >= ANSWERS_WITHIN),
            None if self.acknowledged < self.output.end() => waited >= COMES_BACK_WITHIN,
            None => waited >= ANSWERS_WITHIN,
        };
        (is_heard_out || self.ends.given_back.is_cancelled()).then_some(ended.exit)
    }

    fn hear(&mut self, said: Down) {
        match said {
            Down::Attach { attachment, from } if attachment >= self.newest => self.attach(attachment, from),
            Down::Detach { attachment } if self.is_connected(attachment) => self.part(),
            Down::Input { attachment, bytes } if self.is_connected(attachment) => {
                // Who sends more than its window has not kept to the protocol.
                if (self.typed.len() + bytes.len()) as u64 <= 2 * INPUT_WINDOW {
                    self.typed.extend(bytes);
                }
            }
            Down::Ack { attachment, position } if self.is_connected(attachment) => {
                let sent = self.connected.as_ref().map_or(0, |it| it.next);
                let position = position.min(sent);
                if position > self.acknowledged {
                    self.acknowledged = position;
                    self.stirred_at = Instant::now();
                }
            }
            Down::Received { attachment, position } => {
                let end = self.output.end();
                if let Some(it) = self.connected.as_mut().filter(|it| it.attachment == attachment) {
                    it.has_all |= position >= end;
                }
            }
            Down::Resize { columns, rows } => {
                let (columns, rows) = (columns.max(1), rows.max(1));
                let _ = self.writer.resize(Size::new(rows, columns));
                self.recorder.resize(columns, rows);
            }
            Down::Record { terms } => {
                if self.recorder.change(terms) {
                    self.recording = Some(self.recorder.mode());
                }
            }
            Down::Attach { .. } | Down::Detach { .. } | Down::Input { .. } | Down::Ack { .. } | Down::Close => {}
        }
    }

    fn is_connected(&self, attachment: u32) -> bool {
        self.connected.as_ref().is_some_and(|it| it.attachment == attachment)
    }

    fn attach(&mut self, attachment: u32, from: Option<u64>) {
        let wanted = from.unwrap_or(self.acknowledged).min(self.output.end());
        let next = wanted.max(self.output.start());
        self.newest = attachment;
        self.acknowledged = next;
        self.stirred_at = Instant::now();
        self.connected = Some(Connected::new(attachment, wanted, next));
        // A change may have been said to one whose connection was cut just then.
        self.recording = Some(self.recorder.mode());
    }

    fn part(&mut self) {
        self.connected = None;
        self.stirred_at = Instant::now();
    }

    /// The program said it; it is shown once it is recorded.
    fn came(&mut self, bytes: &[u8]) {
        if let Some(ended) = &mut self.ended {
            ended.read += bytes.len() as u64;
        }
        self.recorder.output(bytes);
    }

    fn said(&mut self, bytes: &[u8]) {
        self.output.push(bytes);
        if self.connected.is_none() && self.ended.is_none() && self.output.start() > self.acknowledged {
            self.read_after = Instant::now() + UNHEARD_PAUSE;
        }
    }

    fn took(&mut self, written: Option<usize>) {
        // Nobody reads any more: what was typed is for nobody.
        let taken = written.unwrap_or(self.typed.len());
        self.typed.drain(..taken);
        if let Some(connected) = &mut self.connected {
            connected.taken += taken as u64;
        }
    }

    fn exited(&mut self, status: Option<ExitStatus>) {
        self.ended = Some(Ended::now(exit_of(status)));
        // What is left is little, and not to be missed.
        self.read_after = Instant::now();
    }

    /// The session's own processes: the shell and what has not left its group. What a user has put into the background of the machine
    /// goes with the allocation.
    async fn end_processes(&mut self) -> Exit {
        if let Some(ended) = self.ended {
            return ended.exit;
        }
        let signal = |signal| self.pid.map(|pid| killpg(pid, signal));
        signal(Signal::SIGHUP);
        let status = match tokio::time::timeout(GRACE, self.child.wait()).await {
            Ok(status) => status,
            Err(_) => {
                signal(Signal::SIGKILL);
                self.child.wait().await
            }
        };
        let exit = exit_of(status.ok());
        self.ended = Some(Ended::now(exit));
        exit
    }
}

fn exit_of(status: Option<ExitStatus>) -> Exit {
    let how = status.map(|status| (status.code(), status.signal()));
    match how {
        Some((Some(code), _)) => Exit::Code(code),
        Some((None, Some(signal))) => Exit::Signal(signal),
        // Nobody knows.
        Some((None, None)) | None => Exit::Code(-1),
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::unwrap_used)]
mod tests;
