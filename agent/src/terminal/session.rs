//! One session: a shell on its pseudo-terminal, what it said, and who is connected.
//!
//! The program is read only as long as whoever is connected keeps up, so that a slow reader stops it and nothing here grows. While nobody
//! is connected it runs on, and of its output the last part is kept.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use futures::FutureExt as _;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use pty_process::{OwnedReadPty, OwnedWritePty, Pty, Size};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::time::{Instant, interval, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::debug;
use wire::recording::Mode;
use wire::terminal::{CHUNK, Down, Exit, INPUT_WINDOW, KEPT, OUTPUT_WINDOW, Up};

use super::output::Output;
use super::recording::{Came, Recorder};

/// How long after its shell's end the rest of the output is waited for: something in the background may hold the terminal open.
const REST: Duration = Duration::from_millis(250);
/// How long a program that ended while nobody was connected waits for somebody to hear of it.
const LINGER: Duration = Duration::from_secs(60);
/// As much as the kernel hands out at once, nearly.
const A_FLOOD: usize = 3840;
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
    /// The last one's number: what comes from an earlier one is late.
    newest: u32,
    /// Up to where somebody has acknowledged the output.
    acknowledged: u64,
    /// Typed, and not taken by the program yet.
    typed: VecDeque<u8>,
    exit: Option<Exit>,
    exited_at: Option<Instant>,
    /// Nothing more can be read.
    silent: bool,
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

struct Connected {
    attachment: u32,
    /// The next byte to send.
    next: u64,
    /// Input taken, and how much of that was said.
    taken: u64,
    said_taken: u64,
    /// What it asked for, until it is answered.
    answer: Option<Up>,
}

impl Connected {
    /// So much that it is worth a message; less never fills the window.
    const fn has_taken_much(&self) -> bool {
        self.taken - self.said_taken >= INPUT_WINDOW / 4
    }
}

/// Why the loop is left.
enum End {
    /// The program ended and its output is sent.
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
            newest: 0,
            acknowledged: 0,
            typed: VecDeque::new(),
            exit: None,
            exited_at: None,
            silent: false,
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
                self.end_processes().await;
                let _ = tokio::time::timeout(LAST_WORDS, self.say_until_heard(&Up::Lost)).await;
            }
            End::Over => {}
        }
        self.ends.over.cancel();
        self.end_processes().await;
    }

    /// The control plane says that the session is over once it knows how it ended. What is said may be cut off.
    async fn say_until_heard(&mut self, how: &Up) {
        let mut again = interval(SAID_AGAIN);
        loop {
            tokio::select! {
                heard = self.heard.recv() => {
                    if matches!(heard, Some(Heard::Said(Down::Close)) | None) {
                        return;
                    }
                }
                _ = again.tick() => drop(self.say.try_send(how.clone())),
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
            if let Some(exit) = self.is_over() {
                return End::Exited(exit);
            }
            let may_read = self.may_read();
            let (read_after, rest_until) = (self.read_after, self.rest_until());
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
                    Some(Heard::Cut) => self.connected = None,
                },
                permit = say.reserve(), if self.has_to_say() => {
                    let Ok(permit) = permit else { return End::Over };
                    if let Some(up) = next_words(&mut self.connected, &mut self.recording, &self.output) {
                        permit.send(up);
                    }
                }
                read = gathering.read(&mut self.reader, read_after), if may_read => match read {
                    Ok(1..) => self.recorder.output(gathering.take()),
                    // EIO: every process of the terminal has closed it.
                    Ok(0) | Err(_) => self.silent = true,
                },
                came = self.recorder.comes(), if self.recorder.is_busy() => match came {
                    Came::Show(bytes) => self.said(&bytes),
                    Came::Ended => self.recording = Some(Mode::Off),
                    Came::MustEnd => return End::Told,
                },
                written = self.writer.write(self.typed.as_slices().0), if !self.typed.is_empty() => self.took(written.ok()),
                status = self.child.wait(), if self.exit.is_none() => self.exited(status.ok()),
                () = sleep_until(rest_until.unwrap_or_else(Instant::now)), if rest_until.is_some() => self.silent = true,
                () = sleep(Duration::from_secs(1)), if self.exit.is_some() => {}
            }
        }
    }

    fn may_read(&self) -> bool {
        !self.silent
            && self.recorder.has_room()
            && (self.connected.is_none() || self.output.end() - self.acknowledged < OUTPUT_WINDOW)
    }

    fn has_to_say(&self) -> bool {
        let is_new = self.recording.is_some();
        self.connected
            .as_ref()
            .is_some_and(|it| is_new || it.answer.is_some() || it.next < self.output.end() || it.has_taken_much())
    }

    /// The end of the wait for what the terminal still has to say after its shell's end.
    fn rest_until(&self) -> Option<Instant> {
        // A reader who does not keep up hears the rest as well.
        self.exited_at.filter(|_| !self.silent && self.may_read()).map(|at| at + REST)
    }

    fn is_over(&self) -> Option<Exit> {
        let heard_out = match &self.connected {
            Some(_) => !self.has_to_say(),
            None => self.exited_at.is_some_and(|at| at.elapsed() >= LINGER),
        };
        self.exit.filter(|_| self.silent && self.recorder.is_settled() && heard_out)
    }

    fn hear(&mut self, said: Down) {
        match said {
            Down::Attach { attachment, from } if attachment >= self.newest => self.attach(attachment, from),
            Down::Detach { attachment } if self.is_connected(attachment) => self.connected = None,
            Down::Input { attachment, bytes } if self.is_connected(attachment) => {
                // Who sends more than its window has not kept to the protocol.
                if (self.typed.len() + bytes.len()) as u64 <= 2 * INPUT_WINDOW {
                    self.typed.extend(bytes);
                }
            }
            Down::Ack { attachment, position } if self.is_connected(attachment) => {
                let sent = self.connected.as_ref().map_or(0, |it| it.next);
                self.acknowledged = self.acknowledged.max(position.min(sent));
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
        let answer = Some(Up::Attached { attachment, position: next, lost: next - wanted });
        self.connected = Some(Connected { attachment, next, taken: 0, said_taken: 0, answer });
    }

    fn said(&mut self, bytes: &[u8]) {
        self.output.push(bytes);
        if self.connected.is_none() && self.output.start() > self.acknowledged {
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
        self.exit = Some(exit_of(status));
        self.exited_at = Some(Instant::now());
    }

    /// The session's own processes: the shell and what has not left its group. What a user has put into the background of the machine
    /// goes with the allocation.
    async fn end_processes(&mut self) -> Exit {
        if let Some(exit) = self.exit {
            return exit;
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
        self.exit = Some(exit);
        exit
    }
}

/// Reads the terminal. The kernel hands out 4 KiB at once, and there is often more.
struct Gathering {
    buffer: Box<[u8]>,
    filled: usize,
    /// So much was there when it was last waited for more.
    waited_at: usize,
}

impl Gathering {
    fn new() -> Self {
        Self { buffer: vec![0; CHUNK].into(), filled: 0, waited_at: 0 }
    }

    /// How much there is, read not before that time. What was read stays where this is dropped.
    async fn read(&mut self, reader: &mut OwnedReadPty, not_before: Instant) -> std::io::Result<usize> {
        if self.filled == 0 {
            if Instant::now() < not_before {
                sleep_until(not_before).await;
            }
            self.filled = reader.read(&mut self.buffer).await?;
        }
        while self.filled < self.buffer.len() {
            // Whatever ends it is said again by the next read.
            if let Some(Ok(more @ 1..)) = reader.read(&mut self.buffer[self.filled..]).now_or_never() {
                self.filled += more;
            } else if self.filled - self.waited_at >= A_FLOOD {
                // Who said so much says more in a moment; the echo of a keystroke does not wait for it.
                self.waited_at = self.filled;
                tokio::task::yield_now().await;
            } else {
                break;
            }
        }
        Ok(self.filled)
    }

    fn take(&mut self) -> &[u8] {
        let filled = std::mem::take(&mut self.filled);
        self.waited_at = 0;
        &self.buffer[..filled]
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

/// What is to be said next to the one who is connected.
fn next_words(connected: &mut Option<Connected>, recording: &mut Option<Mode>, output: &Output) -> Option<Up> {
    let connected = connected.as_mut()?;
    if let Some(answer) = connected.answer.take() {
        return Some(answer);
    }
    if let Some(mode) = recording.take() {
        return Some(Up::Recording { mode });
    }
    let attachment = connected.attachment;
    if connected.has_taken_much() {
        connected.said_taken = connected.taken;
        return Some(Up::Taken { attachment, bytes: connected.taken });
    }
    // It may have been overtaken by what is kept; whoever is connected keeps the program from going on so far.
    let position = connected.next.max(output.start());
    let bytes = output.from(position, CHUNK);
    connected.next = position + bytes.len() as u64;
    (!bytes.is_empty()).then_some(Up::Output { attachment, position, bytes })
}
