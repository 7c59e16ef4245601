//! What the agent says, to a user's end.

use super::progress::Progress;
use super::said::{ToUser, exit_of, text};
use super::{Parted, close};
use crate::websocket::CLOSES_WITHIN;
use axum::extract::ws::Message;
use domain::recording::Mode;
use domain::terminal_session::{Exit, TerminalSession};
use futures::{Sink, SinkExt as _};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use wire::terminal::{Down, OUTPUT_WINDOW, Up};

/// How often the user's end is asked whether it is there.
const ASKS_EVERY: Duration = Duration::from_secs(15);
/// Output is acknowledged in steps of so many bytes, and what is less after this long: an acknowledgement of each keystroke's echo would be
/// as much work as the echo.
const ACKNOWLEDGES_EVERY: u64 = OUTPUT_WINDOW / 4;
const ACKNOWLEDGES_WITHIN: Duration = Duration::from_millis(100);
/// No session says so much, and no client counts further: the integers of JSON (RFC 8259, section 6).
const COUNTABLE: u64 = 1 << 53;

/// The output over one link.
pub(super) struct Output<'a> {
    session: &'a TerminalSession,
    attachment: u32,
    progress: &'a Progress,
    down: &'a mpsc::Sender<Down>,
    /// How the user was told last that it is recorded.
    told: &'a mut Option<Mode>,
    /// Where the next output begins, once the agent has said where the first does.
    expected: Option<u64>,
    /// Written to the socket, and acknowledged, up to here.
    flushed: u64,
    acknowledged: u64,
    acknowledge_at: Option<Instant>,
    /// The agent wants to know whether all has come up to here. Every question to the user's end says it again: who is slow may answer the
    /// last one alone (RFC 6455, section 5.5.3).
    asked: Option<u64>,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        session: &'a TerminalSession,
        attachment: u32,
        progress: &'a Progress,
        down: &'a mpsc::Sender<Down>,
        told: &'a mut Option<Mode>,
    ) -> Self {
        let flushed = progress.delivered.load(Ordering::Relaxed);
        Self {
            session,
            attachment,
            progress,
            down,
            told,
            expected: None,
            flushed,
            acknowledged: flushed,
            acknowledge_at: None,
            asked: None,
        }
    }

    /// Until the user is gone or has been here for too long, the link is gone, or the program ended.
    pub(super) async fn carry(
        mut self,
        mut up: mpsc::Receiver<Up>,
        sink: &mut (impl Sink<Message> + Unpin),
        overstays: impl Fn() -> bool,
    ) -> Parted {
        let mut asks = interval(ASKS_EVERY);
        asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if let Err(parted) = self.flush(up.is_empty(), sink).await {
                return parted;
            }
            let acknowledge_at = self.acknowledge_at;
            let gone_on = tokio::select! {
                said = up.recv() => match said {
                    Some(said) => self.pass_on(said, sink).await,
                    None => Err(Parted::Link),
                },
                () = sleep_until(acknowledge_at.unwrap_or_else(Instant::now)), if acknowledge_at.is_some() => Ok(()),
                () = self.progress.pinged.notified() => say(sink, text(&ToUser::Pong)).await,
                _ = asks.tick() => match overstays() {
                    true => Err(Parted::Close(close::RESTARTS)),
                    false => self.ask(sink).await,
                },
            };
            if let Err(parted) = gone_on {
                return parted;
            }
        }
    }

    /// What came together goes out together, and is acknowledged where the client does not do so itself.
    async fn flush(&mut self, is_all: bool, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), Parted> {
        let delivered = self.progress.delivered.load(Ordering::Relaxed);
        if delivered > self.flushed && (is_all || delivered - self.flushed >= ACKNOWLEDGES_EVERY) {
            sink.flush().await.map_err(|_| Parted::User)?;
            self.flushed = delivered;
            self.acknowledge_at = self.acknowledge_at.or(Some(Instant::now() + ACKNOWLEDGES_WITHIN));
        }
        let is_time = self.acknowledge_at.is_some_and(|at| at <= Instant::now());
        if self.flushed > self.acknowledged && (is_time || self.flushed - self.acknowledged >= ACKNOWLEDGES_EVERY) {
            (self.acknowledged, self.acknowledge_at) = (self.flushed, None);
            if !self.progress.waits_for_client() {
                self.acknowledge(self.flushed).await?;
            }
        }
        Ok(())
    }

    async fn acknowledge(&self, position: u64) -> Result<(), Parted> {
        let ack = Down::Ack { attachment: self.attachment, position };
        self.down.send(ack).await.map_err(|_| Parted::Link)
    }

    /// Asks the user's end whether it is there, and whether all has come where the agent wants to know that.
    async fn ask(&self, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), Parted> {
        let question = self.asked.map(|position| position.to_be_bytes().to_vec()).unwrap_or_default();
        say(sink, Message::Ping(question.into())).await
    }

    async fn pass_on(&mut self, said: Up, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), Parted> {
        match said {
            Up::Attached { position, lost, .. } => self.begin(position, lost, sink).await,
            Up::Output { position, bytes, .. } => self.show(position, bytes, sink).await,
            // For the session, which says so.
            Up::Lost => Ok(()),
            Up::Taken { bytes, .. } => {
                self.progress.taken.store(bytes, Ordering::Relaxed);
                self.progress.room.notify_one();
                Ok(())
            }
            Up::Recording { mode } => {
                let mode = match mode {
                    wire::recording::Mode::Off => Mode::Off,
                    wire::recording::Mode::BestEffort => Mode::BestEffort,
                    wire::recording::Mode::Strict => Mode::Strict,
                };
                // The agent says it over every link.
                if self.told.replace(mode) == Some(mode) {
                    return Ok(());
                }
                say(sink, text(&ToUser::Recording { mode: mode.name() })).await
            }
            Up::Exited { exit } => {
                let exit = match exit {
                    wire::terminal::Exit::Code(code) => Exit::Code(code),
                    wire::terminal::Exit::Signal(signal) => Exit::Signal(signal),
                };
                let _ = timeout(CLOSES_WITHIN, sink.send(text(&exit_of(exit)))).await;
                Err(Parted::Close(close::EXITED))
            }
        }
    }

    async fn begin(&mut self, position: u64, lost: u64, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), Parted> {
        if position > COUNTABLE {
            return Err(Parted::Link);
        }
        let from = self.progress.delivered.load(Ordering::Relaxed);
        tracing::info!(attachment = self.attachment, from, position, lost, "a terminal's user is attached");
        self.expected = Some(position);
        let first = !self.progress.knows.swap(true, Ordering::Relaxed);
        // A link that was made anew behind its back is news only where something is missing.
        if !first && position <= from {
            return Ok(());
        }
        self.progress.delivered.store(position, Ordering::Relaxed);
        (self.flushed, self.acknowledged, self.acknowledge_at) = (position, position, None);
        say(sink, text(&self.attached(position, lost))).await
    }

    async fn show(
        &mut self,
        position: u64,
        bytes: Vec<u8>,
        sink: &mut (impl Sink<Message> + Unpin),
    ) -> Result<(), Parted> {
        // Of an earlier link.
        let Some(expected) = self.expected else { return Ok(()) };
        let until = position.checked_add(bytes.len() as u64).filter(|until| *until <= COUNTABLE);
        // Something in between is missing: from there on once more.
        let Some(until) = until.filter(|_| position == expected) else { return Err(Parted::Link) };
        if bytes.is_empty() {
            self.asked = Some(position);
            return self.ask(sink).await;
        }
        self.expected = Some(until);
        let delivered = self.progress.delivered.load(Ordering::Relaxed);
        if position < delivered {
            // The agent counts acknowledgements anew from where it was asked last, and would wait for those that it had.
            let known = match self.progress.acknowledges.load(Ordering::Relaxed) {
                true => self.progress.acknowledged.load(Ordering::Relaxed),
                false => self.acknowledged,
            };
            self.acknowledge(known.min(until)).await?;
        }
        let Some(news) = news(position, bytes, delivered) else { return Ok(()) };
        sink.feed(Message::Binary(news.into())).await.map_err(|_| Parted::User)?;
        self.progress.delivered.store(until, Ordering::Relaxed);
        Ok(())
    }

    fn attached(&mut self, position: u64, lost_bytes: u64) -> ToUser {
        let mode = *self.told.get_or_insert(self.session.recording.mode);
        ToUser::Attached {
            session_id: self.session.id.0,
            attachment: self.attachment,
            position,
            lost_bytes,
            expires_at: self.session.ends_at.to_rfc3339_opts(chrono::SecondsFormat::Millis, true),
            recording: mode.name(),
        }
    }
}

/// What the user does not have yet. A link that was given up before it was answered may have brought some of it: who counts what comes
/// would be wrong by that from then on.
pub(super) fn news(position: u64, mut bytes: Vec<u8>, delivered: u64) -> Option<Vec<u8>> {
    let known = usize::try_from(delivered.saturating_sub(position)).unwrap_or(usize::MAX);
    if known >= bytes.len() {
        return None;
    }
    Some(bytes.split_off(known))
}

async fn say(sink: &mut (impl Sink<Message> + Unpin), message: Message) -> Result<(), Parted> {
    sink.send(message).await.map_err(|_| Parted::User)
}
