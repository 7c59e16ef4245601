//! One terminal session over successive connections.
//!
//! Positions count the bytes of the session's output from its beginning. Received output is never requested again; drawn output is
//! acknowledged, so that a blocked terminal stops the program and no buffer grows. Reading never waits for writing: a paste that the
//! program echoes would deadlock both ends.

use super::Terminal;
use super::connection::{self, ConnectionAttempt};
use super::escape::{EscapeParser, HELP, TypedInput};
use super::io_threads::{self, Screen};
use super::raw_mode::{RawMode, size};
use super::scrollback::ScrollbackFilter;
use crate::api::Api;
use crate::failure::{ExitStatus, Failure};
use crate::websocket::Socket;
use futures::stream::SplitSink;
use futures::{SinkExt as _, StreamExt as _};
use serde::Deserialize;
use serde_json::json;
use std::io;
use std::time::{Duration, Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_tungstenite::tungstenite::Message;
use uuid::Uuid;

/// The most output that is received and not drawn.
const MAX_UNDRAWN_BYTES: u64 = 512 * 1024;
/// Drawn output is acknowledged in steps of this size, and with each ping: well within the 128 KiB that the service sends unacknowledged.
const ACK_STEP_BYTES: u64 = 16 * 1024;
/// The queue of messages to the gateway; input is not read while it is more than half full.
const OUTGOING_QUEUE: usize = 256;
/// The most input that is buffered while disconnected.
const MAX_PENDING_INPUT: usize = 64 * 1024;
/// The server sends a ping every 15 s; this end sends its own more often.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(20);
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_RETRY_PAUSE: Duration = Duration::from_secs(3);
/// A shorter gap or wait is not reported in the middle of the output.
const NOTICE_AFTER: Duration = Duration::from_secs(2);
/// Consecutive tokens that the gateway may refuse.
const MAX_REFUSED_TOKENS: u32 = 4;
const CTRL_C: u8 = 3;

/// How a session ended.
pub(super) enum SessionEnd {
    /// The program, by itself or by a signal.
    Exited { code: Option<i32>, signal: Option<i32> },
    /// The user detached; the shell runs on.
    Left,
    /// This program got a terminating signal.
    Signalled(i32),
    /// The service ended it.
    Closed(u16),
}

impl SessionEnd {
    /// Ctrl-C, where it is for this program.
    const INTERRUPTED: Self = Self::Signalled(rustix::process::Signal::INT.as_raw());

    /// Whether the shell may still run, so that the user can reconnect to it.
    pub(super) const fn may_still_run(&self) -> bool {
        match self {
            Self::Exited { .. } => false,
            Self::Left | Self::Signalled(_) => true,
            Self::Closed(code) => !matches!(code, 1011 | 4403 | 4408),
        }
    }
}

enum ConnectionEnd {
    Session(SessionEnd),
    Lost,
    /// The gateway refused the token.
    Refused,
}

/// A text message of the gateway.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ServerMessage {
    Attached {
        position: u64,
        lost_bytes: u64,
        #[serde(default)]
        recording: String,
    },
    /// The recording mode has changed.
    Recording {
        mode: String,
    },
    Exit {
        code: Option<i32>,
        signal: Option<i32>,
    },
    /// The node is not in contact; `Attached` follows once it is.
    WaitingForNode,
    #[serde(other)]
    Other,
}

/// A wait for the node on one connection, which is reported once where it is long.
struct NodeWait {
    since: Instant,
    is_reported: bool,
}

impl NodeWait {
    fn begin() -> Self {
        Self { since: Instant::now(), is_reported: false }
    }

    /// The time until it is to be reported; `None` where it was.
    fn until_report(&self) -> Option<Duration> {
        (!self.is_reported).then(|| NOTICE_AFTER.saturating_sub(self.since.elapsed()))
    }
}

pub(super) struct Session<'a> {
    api: &'a Api,
    args: Terminal,
    id: Option<Uuid>,
    /// The position up to which output was received.
    position: Option<u64>,
    /// Whether this program was attached at least once.
    attached: bool,
    /// `None` while the node is attached to the connection.
    node_wait: Option<NodeWait>,
    /// Whether a connection was made, so that the session may run on without this program.
    was_connected: bool,
    /// The filter of the replayed scrollback, until it is complete.
    scrollback: Option<ScrollbackFilter>,
    exit: Option<SessionEnd>,
    /// The recording mode that was announced last.
    recording: String,
    /// The position that was acknowledged on this connection.
    acknowledged: u64,
    pending: Vec<u8>,
    escape: EscapeParser,
    input: mpsc::Receiver<Vec<u8>>,
    screen: Screen,
    signals: Signals,
    raw: RawMode,
}

impl<'a> Session<'a> {
    /// Puts the user's terminal into raw mode.
    pub(super) fn begin(args: Terminal, api: &'a Api) -> Result<Self, Failure> {
        let taken =
            |error: io::Error| Failure::new(ExitStatus::Failed, format!("the terminal cannot be used: {error}"));
        let signals = Signals::listen().map_err(taken)?;
        let raw = RawMode::begin(io::stdin()).map_err(taken)?;
        Ok(Self {
            api,
            id: args.session,
            // A reconnect begins with the scrollback.
            position: args.session.map(|_| 0),
            attached: false,
            node_wait: None,
            was_connected: args.session.is_some(),
            scrollback: args.session.map(|_| ScrollbackFilter::new()),
            exit: None,
            recording: String::new(),
            acknowledged: 0,
            pending: Vec::new(),
            escape: EscapeParser::new(!args.no_escape),
            input: io_threads::read_input(),
            screen: Screen::begin(),
            signals,
            raw,
            args,
        })
    }

    /// The id of the session, where it may run on without this program.
    pub(super) fn still_running(&self) -> Option<Uuid> {
        self.id.filter(|_| self.was_connected)
    }

    /// Draws the remaining output and restores the terminal.
    pub(super) async fn finish(mut self, unclean: bool) {
        self.screen.finish().await;
        if unclean {
            self.raw.reset_modes();
        }
        drop(self.raw);
    }

    /// Runs the session until it ends.
    pub(super) async fn run(&mut self) -> Result<SessionEnd, Failure> {
        let mut refused = 0;
        loop {
            let socket = match self.connect().await? {
                Ok(socket) => socket,
                Err(end) => return Ok(end),
            };
            match self.run_connection(socket).await {
                ConnectionEnd::Session(end) => return Ok(end),
                ConnectionEnd::Lost => refused = 0,
                ConnectionEnd::Refused if refused >= MAX_REFUSED_TOKENS => return Ok(SessionEnd::Closed(4401)),
                ConnectionEnd::Refused => refused += 1,
            }
        }
    }

    /// Connects to the session, with retries up to the limit. The user can detach meanwhile.
    async fn connect(&mut self) -> Result<Result<Socket, SessionEnd>, Failure> {
        let began = Instant::now();
        let mut noticed = false;
        let mut pause = FIRST_RETRY_PAUSE;
        loop {
            let attempt = connection::connect_session(self.api, self.args.allocation, self.id, self.position);
            let attempt = match self.while_waiting(attempt, began, &mut noticed).await {
                Ok(ConnectionAttempt { session, socket }) => {
                    self.id = session;
                    socket
                }
                Err(end) => return Ok(Err(end)),
            };
            let failure = match attempt {
                Ok(socket) => {
                    self.was_connected = true;
                    return Ok(Ok(socket));
                }
                Err(failure) => failure,
            };
            let is_transient =
                matches!(failure.exit_status, ExitStatus::Network | ExitStatus::Server | ExitStatus::RateLimited);
            // A first connection that fails is reported at once: the API client has retried already.
            if !is_transient || !self.attached || began.elapsed() > self.args.reconnect_for {
                return Err(failure);
            }
            let asked = failure.answer.and_then(|answer| answer.retry_after);
            let pause_elapsed = tokio::time::sleep(asked.unwrap_or(pause.mul_f64(rand::random_range(0.5..1.5))));
            if let Err(end) = self.while_waiting(pause_elapsed, began, &mut noticed).await {
                return Ok(Err(end));
            }
            pause = (pause * 2).min(LONGEST_RETRY_PAUSE);
        }
    }

    /// Waits for a future, and handles input and signals meanwhile.
    async fn while_waiting<T>(
        &mut self,
        future: impl Future<Output = T>,
        began: Instant,
        noticed: &mut bool,
    ) -> Result<T, SessionEnd> {
        tokio::pin!(future);
        loop {
            let silent = NOTICE_AFTER.saturating_sub(began.elapsed());
            tokio::select! {
                it = &mut future => return Ok(it),
                () = tokio::time::sleep(silent), if !*noticed => {
                    *noticed = true;
                    self.notice(match self.attached {
                        true => "the connection is lost; looking for another (~. leaves)",
                        false => "waiting for the service (Ctrl-C leaves)",
                    });
                }
                typed = self.input.recv() => match typed {
                    None => return Err(SessionEnd::Left),
                    Some(typed) => for typed in self.escape.take(&typed) {
                        match typed {
                            TypedInput::Bytes(bytes) if self.is_interrupt(&bytes) => return Err(SessionEnd::INTERRUPTED),
                            TypedInput::Bytes(bytes) => self.buffer_input(&bytes),
                            TypedInput::Leave | TypedInput::End => return Err(SessionEnd::Left),
                            TypedInput::Suspend => self.suspend(),
                            TypedInput::Help => self.help(),
                        }
                    },
                },
                signal_event = self.signals.next() => match signal_event {
                    SignalEvent::Resized => {}
                    SignalEvent::Continued => self.resume(),
                    SignalEvent::Ends(signal) => return Err(SessionEnd::Signalled(signal)),
                },
            }
        }
    }

    /// Whether the input is a Ctrl-C for this program: it is until a session is attached.
    fn is_interrupt(&self, typed: &[u8]) -> bool {
        !self.attached && typed.contains(&CTRL_C)
    }

    /// Input beyond the buffer is dropped.
    fn buffer_input(&mut self, bytes: &[u8]) {
        let room = MAX_PENDING_INPUT - self.pending.len();
        self.pending.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Runs the session over one connection until that ends.
    async fn run_connection(&mut self, socket: Socket) -> ConnectionEnd {
        let (sink, mut stream) = socket.split();
        let (outgoing, to_send) = mpsc::channel(OUTGOING_QUEUE);
        let sending = send(sink, to_send);
        tokio::pin!(sending);
        let mut last_message_at = Instant::now();
        self.node_wait = Some(NodeWait::begin());
        if let Some(scrollback) = &mut self.scrollback {
            scrollback.on_disconnect();
        }
        let mut pings = interval(PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut can_send = true;
        let _ = outgoing.try_send(resize());
        if !self.pending.is_empty() {
            let _ = outgoing.try_send(Message::Binary(std::mem::take(&mut self.pending).into()));
        }
        loop {
            let report_in = self.node_wait.as_ref().and_then(NodeWait::until_report);
            let quiet_left = self.scrollback.as_ref().and_then(ScrollbackFilter::quiet_left);
            tokio::select! {
                // The last messages may still be unread, such as the exit of the program.
                () = &mut sending, if can_send => can_send = false,
                message = stream.next(), if self.screen.undrawn() < MAX_UNDRAWN_BYTES => {
                    last_message_at = Instant::now();
                    match message {
                        Some(Ok(message)) => if let Some(end) = self.handle_message(message, &outgoing) {
                            return end;
                        },
                        Some(Err(_)) | None => return self.disconnected(),
                    }
                }
                drawn = self.screen.wait_for_progress() => {
                    if !drawn {
                        return ConnectionEnd::Session(SessionEnd::Left);
                    }
                    if let Some(scrollback) = &mut self.scrollback {
                        scrollback.on_drawn();
                    }
                    self.acknowledge(&outgoing, ACK_STEP_BYTES);
                }
                () = tokio::time::sleep(quiet_left.unwrap_or_default()),
                    if quiet_left.is_some() && self.screen.undrawn() < MAX_UNDRAWN_BYTES => self.scrollback = None,
                () = tokio::time::sleep(report_in.unwrap_or_default()), if report_in.is_some() => self.report_node_wait(),
                typed = self.input.recv(), if can_send && outgoing.capacity() > OUTGOING_QUEUE / 2 => {
                    let Some(typed) = typed else { return ConnectionEnd::Session(SessionEnd::Left) };
                    if let Some(end) = self.handle_input(&typed, &outgoing) {
                        return ConnectionEnd::Session(end);
                    }
                }
                signal_event = self.signals.next() => match signal_event {
                    SignalEvent::Resized => {
                        let _ = outgoing.try_send(resize());
                    }
                    SignalEvent::Continued => {
                        self.resume();
                        let _ = outgoing.try_send(resize());
                    }
                    SignalEvent::Ends(signal) => return ConnectionEnd::Session(SessionEnd::Signalled(signal)),
                },
                _ = pings.tick() => {
                    // While the terminal is blocked nothing is read, so silence is no sign of a lost connection.
                    if self.screen.undrawn() >= MAX_UNDRAWN_BYTES {
                        last_message_at = Instant::now();
                    }
                    if last_message_at.elapsed() > SILENCE_TIMEOUT {
                        return ConnectionEnd::Lost;
                    }
                    let _ = outgoing.try_send(Message::Text(json!({ "type": "ping" }).to_string().into()));
                    self.acknowledge(&outgoing, 1);
                }
            }
        }
    }

    fn handle_message(&mut self, message: Message, outgoing: &mpsc::Sender<Message>) -> Option<ConnectionEnd> {
        match message {
            Message::Binary(bytes) => {
                self.show(&bytes);
                None
            }
            Message::Text(text) => match serde_json::from_str(&text).unwrap_or(ServerMessage::Other) {
                ServerMessage::Recording { mode } => {
                    self.announce_recording(mode);
                    None
                }
                ServerMessage::Attached { position, lost_bytes, recording } => {
                    self.announce_recording(recording);
                    if lost_bytes > 0 && self.attached {
                        self.notice(&format!("{lost_bytes} bytes of output were too many to be kept, and are lost"));
                    }
                    if let Some(scrollback) = &mut self.scrollback {
                        scrollback.on_attach(position);
                    }
                    self.position = Some(position);
                    if self.attached && self.node_wait.take().is_some_and(|wait| wait.is_reported) {
                        self.notice("the node is in contact again");
                    }
                    self.node_wait = None;
                    self.attached = true;
                    self.acknowledged = 0;
                    self.acknowledge(outgoing, 0);
                    None
                }
                ServerMessage::Exit { code, signal } => {
                    self.exit = Some(SessionEnd::Exited { code, signal });
                    None
                }
                ServerMessage::WaitingForNode => {
                    self.node_wait.get_or_insert_with(NodeWait::begin);
                    None
                }
                ServerMessage::Other => None,
            },
            Message::Close(frame) => Some(match frame.map(|frame| u16::from(frame.code)) {
                Some(1000) => self.disconnected(),
                Some(4401) => ConnectionEnd::Refused,
                Some(code @ (1002..=1011 | 4402..)) => ConnectionEnd::Session(SessionEnd::Closed(code)),
                // The server restarts, or cannot reach the node at the moment: reconnect.
                Some(_) | None => self.disconnected(),
            }),
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => None,
        }
    }

    fn show(&mut self, bytes: &[u8]) {
        let position = self.position.unwrap_or_default() + bytes.len() as u64;
        self.position = Some(position);
        let Some(scrollback) = &mut self.scrollback else { return self.screen.show(bytes.to_vec()) };
        self.screen.show(scrollback.sanitize(bytes));
        if scrollback.is_complete(position) {
            self.scrollback = None;
        }
    }

    /// Announces recording to the user, and repeats it only when the mode changes.
    fn announce_recording(&mut self, mode: String) {
        if mode.is_empty() || mode == self.recording {
            return;
        }
        let was_announced = !self.recording.is_empty();
        match (mode.as_str(), self.id) {
            ("off", _) if was_announced => self.notice("from here on this terminal is not recorded"),
            ("off", _) | (_, None) => {}
            (mode, Some(id)) => self.notice(&format!(
                "what this terminal shows is recorded by the service (policy terminal.recording_enabled, mode {mode}); you and its \
                 administrators can play it back: gpuctl recordings play {id}"
            )),
        }
        self.recording = mode;
    }

    /// The end of a lost connection; the session has ended where the program's exit was received.
    fn disconnected(&mut self) -> ConnectionEnd {
        self.exit.take().map_or(ConnectionEnd::Lost, ConnectionEnd::Session)
    }

    fn handle_input(&mut self, bytes: &[u8], outgoing: &mpsc::Sender<Message>) -> Option<SessionEnd> {
        for typed in self.escape.take(bytes) {
            match typed {
                TypedInput::Bytes(bytes) if self.is_interrupt(&bytes) => return Some(SessionEnd::INTERRUPTED),
                TypedInput::Bytes(bytes) => {
                    let _ = outgoing.try_send(Message::Binary(bytes.into()));
                }
                TypedInput::End => {
                    let _ = outgoing.try_send(Message::Text(json!({ "type": "exit" }).to_string().into()));
                }
                TypedInput::Leave => return Some(SessionEnd::Left),
                TypedInput::Suspend => self.suspend(),
                TypedInput::Help => self.help(),
            }
        }
        None
    }

    /// Acknowledges drawn output, where it has grown by `at_least`.
    fn acknowledge(&mut self, outgoing: &mpsc::Sender<Message>, at_least: u64) {
        let Some(position) = self.position.filter(|_| self.attached) else { return };
        let drawn = position.saturating_sub(self.screen.undrawn());
        if drawn < self.acknowledged + at_least {
            return;
        }
        self.acknowledged = drawn;
        let _ = outgoing.try_send(Message::Text(json!({ "type": "ack", "position": drawn }).to_string().into()));
    }

    fn report_node_wait(&mut self) {
        if let Some(wait) = &mut self.node_wait {
            wait.is_reported = true;
        }
        self.notice(match self.attached {
            true => "the node is not in contact; waiting for it (~. leaves)",
            false => "waiting for the node (Ctrl-C leaves)",
        });
    }

    fn notice(&self, text: &str) {
        if !self.args.out.quiet {
            crate::output::print_raw(&format!("\r\n[gpuctl: {text}]\r\n"));
        }
    }

    fn help(&self) {
        crate::output::print_raw(&format!("\r\n{HELP}"));
    }

    fn suspend(&self) {
        self.raw.suspend();
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TSTP);
    }

    fn resume(&self) {
        let _ = self.raw.enter();
    }
}

async fn send(mut sink: SplitSink<Socket, Message>, mut messages: mpsc::Receiver<Message>) {
    while let Some(message) = messages.recv().await {
        if sink.send(message).await.is_err() {
            return;
        }
    }
}

fn resize() -> Message {
    let (columns, rows) = size(io::stdin());
    Message::Text(json!({ "type": "resize", "columns": columns, "rows": rows }).to_string().into())
}

enum SignalEvent {
    Resized,
    /// After SIGTSTP and SIGCONT.
    Continued,
    Ends(i32),
}

/// The signals that this program handles.
struct Signals {
    resized: Signal,
    continued: Signal,
    ends: [(Signal, i32); 4],
}

impl Signals {
    fn listen() -> io::Result<Self> {
        let ends = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate()];
        let [hangup, interrupt, quit, terminate] = ends.map(|kind| signal(kind).map(|it| (it, kind.as_raw_value())));
        Ok(Self {
            resized: signal(SignalKind::window_change())?,
            continued: signal(SignalKind::from_raw(rustix::process::Signal::CONT.as_raw()))?,
            ends: [hangup?, interrupt?, quit?, terminate?],
        })
    }

    async fn next(&mut self) -> SignalEvent {
        let [hangup, interrupt, quit, terminate] = &mut self.ends;
        tokio::select! {
            _ = self.resized.recv() => SignalEvent::Resized,
            _ = self.continued.recv() => SignalEvent::Continued,
            _ = hangup.0.recv() => SignalEvent::Ends(hangup.1),
            _ = interrupt.0.recv() => SignalEvent::Ends(interrupt.1),
            _ = quit.0.recv() => SignalEvent::Ends(quit.1),
            _ = terminate.0.recv() => SignalEvent::Ends(terminate.1),
        }
    }
}
