//! One shell, over one connection after another.
//!
//! Positions count the session's output from its beginning. What came in is never asked for again; what was drawn is acknowledged, so that a
//! terminal that stands still stops the program and nothing grows. Reading never waits for writing: a paste that the program echoes would
//! hold both ends up for ever.

use super::Terminal;
use super::again::Again;
use super::connection::{self, Attempt};
use super::escape::{Escape, HELP, Typed};
use super::raw::{Raw, size};
use super::screen::{self, Screen};
use crate::api::Api;
use crate::failure::{Ended, Failure};
use crate::socket::Socket;
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

/// Output that is taken in and not drawn, at most.
const UNDRAWN: u64 = 512 * 1024;
/// What was drawn is acknowledged in steps of so many bytes, and each time that a sign of life is asked for: well inside of the 128 KiB that
/// come without.
const ACKNOWLEDGES_EVERY: u64 = 16 * 1024;
/// Messages to the gateway that wait for the network; what is typed waits from the half on.
const OUTGOING: usize = 256;
/// What is typed while there is no connection.
const PENDING: usize = 64 * 1024;
/// The server asks for a sign of life every 15 s; so does this end, a little sooner.
const ASKS_EVERY: Duration = Duration::from_secs(5);
const SILENT_AFTER: Duration = Duration::from_secs(20);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LAST: Duration = Duration::from_secs(3);
/// A shorter gap, or wait, is not worth a word in the middle of what the user sees.
const WORTH_A_WORD: Duration = Duration::from_secs(2);
/// Tokens in a row that were refused at the gateway.
const REFUSED_TOKENS: u32 = 4;
const CTRL_C: u8 = 3;

/// How it ended.
pub(super) enum Over {
    /// The program, by itself or by a signal.
    Exited { code: Option<i32>, signal: Option<i32> },
    /// The user left; the shell runs on.
    Left,
    /// This program was told to end.
    Signalled(i32),
    /// The service ended it.
    Closed(u16),
}

impl Over {
    /// Ctrl-C, where it was for this program.
    const INTERRUPTED: Self = Self::Signalled(rustix::process::Signal::INT.as_raw());

    /// Whether the shell may run on: what is known to be gone is not to be gone back to.
    pub(super) const fn may_run_on(&self) -> bool {
        match self {
            Self::Exited { .. } => false,
            Self::Left | Self::Signalled(_) => true,
            Self::Closed(code) => !matches!(code, 1011 | 4403 | 4408),
        }
    }
}

enum Carried {
    Over(Over),
    Lost,
    /// The gateway did not take the token.
    Refused,
}

/// What the gateway says in text frames.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Told {
    Attached {
        position: u64,
        lost_bytes: u64,
        #[serde(default)]
        recording: String,
    },
    /// From here on it is recorded so.
    Recording {
        mode: String,
    },
    Exit {
        code: Option<i32>,
        signal: Option<i32>,
    },
    #[serde(other)]
    Other,
}

pub(super) struct Session<'a> {
    api: &'a Api,
    args: Terminal,
    id: Option<Uuid>,
    /// Up to where the output is here.
    position: Option<u64>,
    /// It was attached at least once by this program.
    attached: bool,
    /// Somebody was let in to it, so that it may run on without this program.
    let_in: bool,
    /// What is shown again to whoever comes back.
    again: Option<Again>,
    exit: Option<Over>,
    /// How it is recorded, as was told last.
    recording: String,
    /// Acknowledged up to here on this connection.
    acknowledged: u64,
    pending: Vec<u8>,
    escape: Escape,
    keys: mpsc::Receiver<Vec<u8>>,
    screen: Screen,
    signals: Signals,
    raw: Raw,
}

impl<'a> Session<'a> {
    /// Takes the user's terminal.
    pub(super) fn begin(args: Terminal, api: &'a Api) -> Result<Self, Failure> {
        let taken = |error: io::Error| Failure::new(Ended::Failed, format!("the terminal cannot be used: {error}"));
        let signals = Signals::listen().map_err(taken)?;
        let raw = Raw::begin(io::stdin()).map_err(taken)?;
        Ok(Self {
            api,
            id: args.session,
            // Who comes back sees what is kept of what was shown before.
            position: args.session.map(|_| 0),
            attached: false,
            let_in: args.session.is_some(),
            again: args.session.map(|_| Again::new()),
            exit: None,
            recording: String::new(),
            acknowledged: 0,
            pending: Vec::new(),
            escape: Escape::new(!args.no_escape),
            keys: screen::keys(),
            screen: Screen::begin(),
            signals,
            raw,
            args,
        })
    }

    /// The session, where it may run on without this program.
    pub(super) fn left_behind(&self) -> Option<Uuid> {
        self.id.filter(|_| self.let_in)
    }

    /// Draws the rest and gives the terminal back.
    pub(super) async fn finish(mut self, unclean: bool) {
        self.screen.finish().await;
        if unclean {
            self.raw.sober();
        }
        drop(self.raw);
    }

    /// Until it is over.
    pub(super) async fn live(&mut self) -> Result<Over, Failure> {
        let mut refused = 0;
        loop {
            let socket = match self.find().await? {
                Ok(socket) => socket,
                Err(over) => return Ok(over),
            };
            match self.carry(socket).await {
                Carried::Over(over) => return Ok(over),
                Carried::Lost => refused = 0,
                Carried::Refused if refused >= REFUSED_TOKENS => return Ok(Over::Closed(4401)),
                Carried::Refused => refused += 1,
            }
        }
    }

    /// Looks for a way to the session, as long as that is worth it. The user can leave meanwhile.
    async fn find(&mut self) -> Result<Result<Socket, Over>, Failure> {
        let began = Instant::now();
        let mut told = false;
        let mut pause = PAUSE_FIRST;
        loop {
            let attempt = connection::attempt(self.api, self.args.allocation, self.id, self.position);
            let attempt = match self.meanwhile(attempt, began, &mut told).await {
                Ok(Attempt { session, socket }) => {
                    self.id = session;
                    socket
                }
                Err(over) => return Ok(Err(over)),
            };
            let failure = match attempt {
                Ok(socket) => {
                    self.let_in = true;
                    return Ok(Ok(socket));
                }
                Err(failure) => failure,
            };
            let momentary = matches!(failure.ended, Ended::Network | Ended::Server | Ended::RateLimited);
            // A first connection that cannot be made is told of at once: the API was asked for long enough.
            if !momentary || !self.attached || began.elapsed() > self.args.reconnect_for {
                return Err(failure);
            }
            let asked = failure.answer.and_then(|answer| answer.retry_after);
            let rest = tokio::time::sleep(asked.unwrap_or(pause.mul_f64(rand::random_range(0.5..1.5))));
            if let Err(over) = self.meanwhile(rest, began, &mut told).await {
                return Ok(Err(over));
            }
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    /// Waits for something, and listens to the user while that takes its time.
    async fn meanwhile<T>(
        &mut self,
        something: impl Future<Output = T>,
        began: Instant,
        told: &mut bool,
    ) -> Result<T, Over> {
        tokio::pin!(something);
        loop {
            let silent = WORTH_A_WORD.saturating_sub(began.elapsed());
            tokio::select! {
                it = &mut something => return Ok(it),
                () = tokio::time::sleep(silent), if !*told => {
                    *told = true;
                    self.notice(match self.attached {
                        true => "the connection is lost; looking for another (~. leaves)",
                        false => "waiting for the service (Ctrl-C leaves)",
                    });
                }
                typed = self.keys.recv() => match typed {
                    None => return Err(Over::Left),
                    Some(typed) => for typed in self.escape.take(&typed) {
                        match typed {
                            Typed::Bytes(bytes) if self.gives_up(&bytes) => return Err(Over::INTERRUPTED),
                            Typed::Bytes(bytes) => self.keep(&bytes),
                            Typed::Leave | Typed::End => return Err(Over::Left),
                            Typed::Suspend => self.suspend(),
                            Typed::Help => self.help(),
                        }
                    },
                },
                caught = self.signals.next() => match caught {
                    Caught::Resized => {}
                    Caught::Continued => self.resume(),
                    Caught::Ends(signal) => return Err(Over::Signalled(signal)),
                },
            }
        }
    }

    /// Whether Ctrl-C is for this program: as long as there is no other that it could be for.
    fn gives_up(&self, typed: &[u8]) -> bool {
        !self.attached && typed.contains(&CTRL_C)
    }

    /// What does not fit is not typed.
    fn keep(&mut self, bytes: &[u8]) {
        let room = PENDING - self.pending.len();
        self.pending.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// Over one connection, as long as it holds.
    async fn carry(&mut self, socket: Socket) -> Carried {
        let (sink, mut stream) = socket.split();
        let (outgoing, to_send) = mpsc::channel(OUTGOING);
        let sending = send(sink, to_send);
        tokio::pin!(sending);
        let began = Instant::now();
        let mut heard_at = began;
        let mut told = false;
        if let Some(again) = &mut self.again {
            again.interrupted();
        }
        let mut asks = interval(ASKS_EVERY);
        asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut sends = true;
        let _ = outgoing.try_send(resize());
        if !self.pending.is_empty() {
            let _ = outgoing.try_send(Message::Binary(std::mem::take(&mut self.pending).into()));
        }
        loop {
            let silent = WORTH_A_WORD.saturating_sub(began.elapsed());
            let shown_again_for = self.again.as_ref().and_then(Again::patience);
            tokio::select! {
                // What the other end said last may still be unread: how the program ended, for one.
                () = &mut sending, if sends => sends = false,
                message = stream.next(), if self.screen.behind() < UNDRAWN => {
                    heard_at = Instant::now();
                    match message {
                        Some(Ok(message)) => if let Some(carried) = self.hear(message, &outgoing) {
                            return carried;
                        },
                        Some(Err(_)) | None => return self.cut(),
                    }
                }
                drew = self.screen.drew() => {
                    if !drew {
                        return Carried::Over(Over::Left);
                    }
                    if let Some(again) = &mut self.again {
                        again.drew();
                    }
                    self.acknowledge(&outgoing, ACKNOWLEDGES_EVERY);
                }
                () = tokio::time::sleep(shown_again_for.unwrap_or_default()),
                    if shown_again_for.is_some() && self.screen.behind() < UNDRAWN => self.again = None,
                () = tokio::time::sleep(silent), if !self.attached && !told => {
                    told = true;
                    self.notice("waiting for the node (Ctrl-C leaves)");
                }
                typed = self.keys.recv(), if sends && outgoing.capacity() > OUTGOING / 2 => {
                    let Some(typed) = typed else { return Carried::Over(Over::Left) };
                    if let Some(over) = self.type_in(&typed, &outgoing) {
                        return Carried::Over(over);
                    }
                }
                caught = self.signals.next() => match caught {
                    Caught::Resized => {
                        let _ = outgoing.try_send(resize());
                    }
                    Caught::Continued => {
                        self.resume();
                        let _ = outgoing.try_send(resize());
                    }
                    Caught::Ends(signal) => return Carried::Over(Over::Signalled(signal)),
                },
                _ = asks.tick() => {
                    // While the terminal stands still nothing is read, and silence says nothing.
                    if self.screen.behind() >= UNDRAWN {
                        heard_at = Instant::now();
                    }
                    if heard_at.elapsed() > SILENT_AFTER {
                        return Carried::Lost;
                    }
                    let _ = outgoing.try_send(Message::Text(json!({ "type": "ping" }).to_string().into()));
                    self.acknowledge(&outgoing, 1);
                }
            }
        }
    }

    fn hear(&mut self, message: Message, outgoing: &mpsc::Sender<Message>) -> Option<Carried> {
        match message {
            Message::Binary(bytes) => {
                self.show(&bytes);
                None
            }
            Message::Text(text) => match serde_json::from_str(&text).unwrap_or(Told::Other) {
                Told::Recording { mode } => {
                    self.tell_recording(mode);
                    None
                }
                Told::Attached { position, lost_bytes, recording } => {
                    self.tell_recording(recording);
                    if lost_bytes > 0 && self.attached {
                        self.notice(&format!("{lost_bytes} bytes of output were too many to be kept, and are lost"));
                    }
                    if let Some(again) = &mut self.again {
                        again.attached(position);
                    }
                    self.position = Some(position);
                    self.attached = true;
                    self.acknowledged = 0;
                    self.acknowledge(outgoing, 0);
                    None
                }
                Told::Exit { code, signal } => {
                    self.exit = Some(Over::Exited { code, signal });
                    None
                }
                Told::Other => None,
            },
            Message::Close(frame) => Some(match frame.map(|frame| u16::from(frame.code)) {
                Some(1000) => self.cut(),
                Some(4401) => Carried::Refused,
                Some(code @ (1002..=1011 | 4402..)) => Carried::Over(Over::Closed(code)),
                // The server restarts, or has no way to the node at this moment: come again.
                Some(_) | None => self.cut(),
            }),
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => None,
        }
    }

    fn show(&mut self, bytes: &[u8]) {
        let position = self.position.unwrap_or_default() + bytes.len() as u64;
        self.position = Some(position);
        let Some(again) = &mut self.again else { return self.screen.show(bytes.to_vec()) };
        self.screen.show(again.let_through(bytes));
        if again.is_over(position) {
            self.again = None;
        }
    }

    /// Nobody is recorded without being told, and not told again while that does not change.
    fn tell_recording(&mut self, mode: String) {
        if mode.is_empty() || mode == self.recording {
            return;
        }
        let was_told = !self.recording.is_empty();
        match (mode.as_str(), self.id) {
            ("off", _) if was_told => self.notice("from here on this terminal is not recorded"),
            ("off", _) | (_, None) => {}
            (mode, Some(id)) => self.notice(&format!(
                "what this terminal shows is recorded by the service (policy terminal.recording_enabled, mode {mode}); you and its \
                 administrators can play it back: gpuctl recordings play {id}"
            )),
        }
        self.recording = mode;
    }

    /// The connection is gone, with or without a word on how the program ended.
    fn cut(&mut self) -> Carried {
        self.exit.take().map_or(Carried::Lost, Carried::Over)
    }

    fn type_in(&mut self, bytes: &[u8], outgoing: &mpsc::Sender<Message>) -> Option<Over> {
        for typed in self.escape.take(bytes) {
            match typed {
                Typed::Bytes(bytes) if self.gives_up(&bytes) => return Some(Over::INTERRUPTED),
                Typed::Bytes(bytes) => {
                    let _ = outgoing.try_send(Message::Binary(bytes.into()));
                }
                Typed::End => {
                    let _ = outgoing.try_send(Message::Text(json!({ "type": "exit" }).to_string().into()));
                }
                Typed::Leave => return Some(Over::Left),
                Typed::Suspend => self.suspend(),
                Typed::Help => self.help(),
            }
        }
        None
    }

    /// Up to where the output is drawn; unless that is hardly more than it was.
    fn acknowledge(&mut self, outgoing: &mpsc::Sender<Message>, at_least: u64) {
        let Some(position) = self.position.filter(|_| self.attached) else { return };
        let drawn = position.saturating_sub(self.screen.behind());
        if drawn < self.acknowledged + at_least {
            return;
        }
        self.acknowledged = drawn;
        let _ = outgoing.try_send(Message::Text(json!({ "type": "ack", "position": drawn }).to_string().into()));
    }

    fn notice(&self, text: &str) {
        crate::out::say_raw(&format!("\r\n[gpuctl: {text}]\r\n"));
    }

    fn help(&self) {
        crate::out::say_raw(&format!("\r\n{HELP}"));
    }

    fn suspend(&self) {
        self.raw.rest();
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TSTP);
    }

    fn resume(&self) {
        let _ = self.raw.again();
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

enum Caught {
    Resized,
    /// After a stop.
    Continued,
    Ends(i32),
}

/// What this program is told by signals.
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

    async fn next(&mut self) -> Caught {
        let [hangup, interrupt, quit, terminate] = &mut self.ends;
        tokio::select! {
            _ = self.resized.recv() => Caught::Resized,
            _ = self.continued.recv() => Caught::Continued,
            _ = hangup.0.recv() => Caught::Ends(hangup.1),
            _ = interrupt.0.recv() => Caught::Ends(interrupt.1),
            _ = quit.0.recv() => Caught::Ends(quit.1),
            _ = terminate.0.recv() => Caught::Ends(terminate.1),
        }
    }
}
