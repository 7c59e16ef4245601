//! From the agent to the user.

use super::byte_positions::Progress;
use super::control_frames::{ToUser, exit_of, text};
use super::{LinkEnd, close};
use crate::http::websocket::CLOSE_TIMEOUT;
use axum::extract::ws::Message;
use domain::recording::RecordingMode;
use domain::terminal_session::{ShellExit, TerminalSession};
use futures::{Sink, SinkExt as _};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use wire::terminal::{OUTPUT_WINDOW, TerminalCommand, TerminalEvent};

/// How often the client is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// Output is acknowledged in steps of this many bytes, and a smaller remainder after this delay: acknowledging the echo of each keystroke
/// would cost as much as the echo.
const ACK_BYTES: u64 = OUTPUT_WINDOW / 4;
const ACK_DELAY: Duration = Duration::from_millis(100);
/// No session has so much output, and no client counts further: the integers of JSON (RFC 8259, section 6).
const MAX_POSITION: u64 = 1 << 53;

/// The output over one link.
pub(super) struct Output<'a> {
    session: &'a TerminalSession,
    attachment: u32,
    progress: &'a Progress,
    down: &'a mpsc::Sender<TerminalCommand>,
    /// The recording mode that was last sent to the user.
    recording_mode: &'a mut Option<RecordingMode>,
    /// Where the next output begins, once the agent has sent the position of the first.
    expected: Option<u64>,
    /// Written to the socket, and acknowledged, up to here.
    flushed: u64,
    acknowledged: u64,
    acknowledge_at: Option<Instant>,
    /// The agent asks for confirmation of everything up to this position. Every ping repeats it, since a slow client may answer only the
    /// last one (RFC 6455, section 5.5.3).
    confirm_up_to: Option<u64>,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        session: &'a TerminalSession,
        attachment: u32,
        progress: &'a Progress,
        down: &'a mpsc::Sender<TerminalCommand>,
        recording_mode: &'a mut Option<RecordingMode>,
    ) -> Self {
        let flushed = progress.delivered.load(Ordering::Relaxed);
        Self {
            session,
            attachment,
            progress,
            down,
            recording_mode,
            expected: None,
            flushed,
            acknowledged: flushed,
            acknowledge_at: None,
            confirm_up_to: None,
        }
    }

    /// Runs until the user is gone or must authenticate again, the link is gone, or the program ended.
    pub(super) async fn carry(
        mut self,
        mut up: mpsc::Receiver<TerminalEvent>,
        sink: &mut (impl Sink<Message> + Unpin),
        must_reauthorize: impl Fn() -> bool,
    ) -> LinkEnd {
        let mut pings = interval(PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if let Err(link_end) = self.flush(up.is_empty(), sink).await {
                return link_end;
            }
            let acknowledge_at = self.acknowledge_at;
            let outcome = tokio::select! {
                event = up.recv() => match event {
                    Some(event) => self.forward(event, sink).await,
                    None => Err(LinkEnd::Link),
                },
                () = sleep_until(acknowledge_at.unwrap_or_else(Instant::now)), if acknowledge_at.is_some() => Ok(()),
                () = self.progress.pinged.notified() => send_message(sink, text(&ToUser::Pong)).await,
                _ = pings.tick() => match must_reauthorize() {
                    true => Err(LinkEnd::Close(close::RESTARTS)),
                    false => self.ping(sink).await,
                },
            };
            if let Err(link_end) = outcome {
                return link_end;
            }
        }
    }

    /// Messages that arrive together are flushed together, and acknowledged here where the client does not acknowledge itself.
    async fn flush(&mut self, is_all: bool, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), LinkEnd> {
        let delivered = self.progress.delivered.load(Ordering::Relaxed);
        if delivered > self.flushed && (is_all || delivered - self.flushed >= ACK_BYTES) {
            sink.flush().await.map_err(|_| LinkEnd::User)?;
            self.flushed = delivered;
            self.acknowledge_at = self.acknowledge_at.or(Some(Instant::now() + ACK_DELAY));
        }
        let is_time = self.acknowledge_at.is_some_and(|at| at <= Instant::now());
        if self.flushed > self.acknowledged && (is_time || self.flushed - self.acknowledged >= ACK_BYTES) {
            (self.acknowledged, self.acknowledge_at) = (self.flushed, None);
            if !self.progress.waits_for_client() {
                self.acknowledge(self.flushed).await?;
            }
        }
        Ok(())
    }

    async fn acknowledge(&self, position: u64) -> Result<(), LinkEnd> {
        let ack = TerminalCommand::Ack { attachment: self.attachment, position };
        self.down.send(ack).await.map_err(|_| LinkEnd::Link)
    }

    /// Pings the client, with the position where the agent asks for confirmation.
    async fn ping(&self, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), LinkEnd> {
        let question = self.confirm_up_to.map(|position| position.to_be_bytes().to_vec()).unwrap_or_default();
        send_message(sink, Message::Ping(question.into())).await
    }

    async fn forward(&mut self, event: TerminalEvent, sink: &mut (impl Sink<Message> + Unpin)) -> Result<(), LinkEnd> {
        match event {
            TerminalEvent::Attached { position, lost, .. } => self.begin(position, lost, sink).await,
            TerminalEvent::Output { position, bytes, .. } => self.forward_output(position, bytes, sink).await,
            // The session's state machine reports it.
            TerminalEvent::Lost => Ok(()),
            TerminalEvent::Taken { bytes, .. } => {
                self.progress.taken.store(bytes, Ordering::Relaxed);
                self.progress.room.notify_one();
                Ok(())
            }
            TerminalEvent::Recording { mode } => {
                let mode = match mode {
                    wire::recording::RecordMode::Off => RecordingMode::Off,
                    wire::recording::RecordMode::BestEffort => RecordingMode::BestEffort,
                    wire::recording::RecordMode::Strict => RecordingMode::Strict,
                };
                // The agent sends it over every link.
                if self.recording_mode.replace(mode) == Some(mode) {
                    return Ok(());
                }
                send_message(sink, text(&ToUser::Recording { mode: mode.name() })).await
            }
            TerminalEvent::Exited { exit } => {
                let exit = match exit {
                    wire::terminal::ProgramExit::Code(code) => ShellExit::Code(code),
                    wire::terminal::ProgramExit::Signal(signal) => ShellExit::Signal(signal),
                };
                let _ = timeout(CLOSE_TIMEOUT, sink.send(text(&exit_of(exit)))).await;
                Err(LinkEnd::Close(close::EXITED))
            }
        }
    }

    async fn begin(
        &mut self,
        position: u64,
        lost: u64,
        sink: &mut (impl Sink<Message> + Unpin),
    ) -> Result<(), LinkEnd> {
        if position > MAX_POSITION {
            return Err(LinkEnd::Link);
        }
        let from = self.progress.delivered.load(Ordering::Relaxed);
        tracing::info!(attachment = self.attachment, from, position, lost, "a terminal's user is attached");
        self.expected = Some(position);
        let first = !self.progress.is_attached.swap(true, Ordering::Relaxed);
        // A link that was reestablished is reported to the client only where output is missing.
        if !first && position <= from {
            return Ok(());
        }
        self.progress.delivered.store(position, Ordering::Relaxed);
        (self.flushed, self.acknowledged, self.acknowledge_at) = (position, position, None);
        send_message(sink, text(&self.attached(position, lost))).await
    }

    async fn forward_output(
        &mut self,
        position: u64,
        bytes: Vec<u8>,
        sink: &mut (impl Sink<Message> + Unpin),
    ) -> Result<(), LinkEnd> {
        // Of an earlier link.
        let Some(expected) = self.expected else { return Ok(()) };
        let until = position.checked_add(bytes.len() as u64).filter(|until| *until <= MAX_POSITION);
        // Something in between is missing: from there on once more.
        let Some(until) = until.filter(|_| position == expected) else { return Err(LinkEnd::Link) };
        if bytes.is_empty() {
            self.confirm_up_to = Some(position);
            return self.ping(sink).await;
        }
        self.expected = Some(until);
        let delivered = self.progress.delivered.load(Ordering::Relaxed);
        if position < delivered {
            // The agent counts acknowledgements from the position that it was asked for last, and would wait for those that it already had.
            let known = match self.progress.acknowledges.load(Ordering::Relaxed) {
                true => self.progress.acknowledged.load(Ordering::Relaxed),
                false => self.acknowledged,
            };
            self.acknowledge(known.min(until)).await?;
        }
        let Some(undelivered) = undelivered(position, bytes, delivered) else { return Ok(()) };
        sink.feed(Message::Binary(undelivered.into())).await.map_err(|_| LinkEnd::User)?;
        self.progress.delivered.store(until, Ordering::Relaxed);
        Ok(())
    }

    fn attached(&mut self, position: u64, lost_bytes: u64) -> ToUser {
        let mode = *self.recording_mode.get_or_insert(self.session.recording.mode);
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

/// The part that the user does not have yet. A link that was abandoned before its answer may have delivered some of it: without this, a
/// client that counts bytes would be off from then on.
pub(super) fn undelivered(position: u64, mut bytes: Vec<u8>, delivered: u64) -> Option<Vec<u8>> {
    let known = usize::try_from(delivered.saturating_sub(position)).unwrap_or(usize::MAX);
    if known >= bytes.len() {
        return None;
    }
    Some(bytes.split_off(known))
}

async fn send_message(sink: &mut (impl Sink<Message> + Unpin), message: Message) -> Result<(), LinkEnd> {
    sink.send(message).await.map_err(|_| LinkEnd::User)
}
