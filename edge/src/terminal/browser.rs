//! One user's connection, from its upgrade to its close.
//!
//! Output goes to the user as fast as the user takes it: what is not acknowledged bounds what is sent, down to the program itself.
//! Acknowledged is what was written to the socket, or, once the client says `ack`, what the client says; a page that is slow to draw
//! holds its program by that, and not its own memory. Input is bounded likewise.

use super::gateway::ask;
use super::{Ending, Link, until_over};
use crate::correlation::Scope;
use crate::services::Services;
use crate::websocket::{CLOSES_WITHIN, Close, Controls, MISUSED, TOO_BIG, frame, is_too_big};
use axum::extract::ws::{Message, WebSocket};
use domain::policy::Key;
use domain::recording::Mode;
use domain::terminal_session::{CloseReason, Command, Exit, TerminalSession};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use serde::{Deserialize, Serialize};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use uuid::Uuid;
use wire::terminal::{CHUNK, Down, INPUT_WINDOW, OUTPUT_WINDOW, Up};

/// How often the user's end is asked whether it is there, and after how long a silence it counts as gone.
const ASKS_EVERY: Duration = Duration::from_secs(15);
const SILENT_AFTER: Duration = Duration::from_secs(45);
/// How long the node's stream is looked for before the user is told to come again, and how often; one that comes here says so.
const LOOKS_FOR: Duration = Duration::from_secs(60);
const LOOKS_EVERY: Duration = Duration::from_millis(100);
/// How long a session that has ended may take to say the rest.
const REST: Duration = Duration::from_secs(3);
/// Output is acknowledged in steps of so many bytes, and what is less after this long: an acknowledgement of each keystroke's echo would be
/// as much work as the echo.
const ACKNOWLEDGES_EVERY: u64 = OUTPUT_WINDOW / 4;
const ACKNOWLEDGES_WITHIN: Duration = Duration::from_millis(100);

/// What a client says in a text frame.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum FromUser {
    Resize {
        #[serde(alias = "cols")]
        columns: u16,
        rows: u16,
    },
    // With braces: without them serde lets fields pass that it does not have.
    Ping {},
    /// It has the output up to this position, drawn and done with.
    Ack {
        position: u64,
    },
    /// It wants the session to end.
    Exit {},
}

/// What a client is told in a text frame.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ToUser {
    /// Output follows from `position` on. `lost_bytes` before it were wanted and are gone.
    Attached {
        session_id: Uuid,
        attachment: u32,
        position: u64,
        lost_bytes: u64,
        expires_at: String,
        /// Whether what is shown is recorded: `off`, `best-effort` or `strict`. What is typed never is.
        recording: &'static str,
    },
    /// From here on it is recorded so.
    Recording {
        mode: &'static str,
    },
    Pong,
    /// The program ended.
    Exit {
        code: Option<i32>,
        signal: Option<i32>,
    },
}

/// Close codes (decisions 5), each with a word for people.
pub(super) mod close {
    use super::CloseReason;
    use crate::websocket::Close;
    pub(in crate::terminal) use crate::websocket::{REVOKED, TOKEN};

    pub(super) const LIFETIME: Close = (4408, "lifetime");
    pub(super) const REPLACED: Close = (4409, "replaced");
    pub(super) const EXITED: Close = (1000, "exited");
    const FAILED: Close = (1011, "the node could not run the session, or lost it; open another");
    pub(super) const RESTARTS: Close = (1012, "connect again with a new token");
    pub(super) const AWAY: Close = (1013, "the node cannot be reached; connect again later");

    pub(super) const fn of(reason: &CloseReason) -> Close {
        match reason {
            CloseReason::Exited { .. } => EXITED,
            CloseReason::Failed { .. } => FAILED,
            CloseReason::NeverAttached => TOKEN,
            CloseReason::Killed | CloseReason::AllocationEnded => REVOKED,
            CloseReason::Lifetime => LIFETIME,
        }
    }

    /// As [`of`], of a reason's code.
    pub(in crate::terminal) fn of_code(code: &str) -> Close {
        match code {
            "exited" => EXITED,
            "failed" => FAILED,
            "never_attached" => TOKEN,
            "lifetime" => LIFETIME,
            _ => REVOKED,
        }
    }
}

/// A user's connection that was let in. It mostly waits: what is asked now and then is in boxes, and leaves no room behind.
pub(super) struct Browser {
    pub(super) services: Services,
    pub(super) scope: Scope,
    pub(super) session: TerminalSession,
    pub(super) attachment: u32,
    pub(super) from: Option<u64>,
    pub(super) since: Instant,
}

/// Why it does not go on over this link.
enum Parted {
    /// The node's stream is cut: it is looked for again.
    Link,
    /// The user is gone, without or with a word.
    User,
    /// It ends, with this code.
    Close(Close),
}

/// How far it is, over all links.
#[derive(Default)]
struct Progress {
    /// Output is with the user up to here, as far as that is known.
    delivered: AtomicU64,
    knows: AtomicBool,
    /// Up to where the client says it has it, once it says so.
    acknowledged: AtomicU64,
    acknowledges: AtomicBool,
    /// Input that was sent and taken, on this link.
    sent: AtomicU64,
    taken: AtomicU64,
    room: Notify,
    /// The client asked whether anybody is there.
    pinged: Notify,
    /// Input waits for the program, so that nothing that the client says can be read.
    stuck: AtomicBool,
}

impl Browser {
    pub(super) async fn run(self, socket: WebSocket) {
        let figures = self.services.terminals.figures().clone();
        figures.connections.inc();
        let (mut sink, mut stream) = socket.split();
        let why = self.live(&mut sink, &mut stream).await;
        if let Some(why) = why {
            let _ = timeout(CLOSES_WITHIN, sink.send(frame(why))).await;
        }
        let detach = Command::Detach { attachment: self.attachment };
        if let Err(error) = Box::pin(ask(&self.services, &self.scope, self.session.id, detach)).await {
            tracing::debug!(%error, "nobody was told that a terminal's connection is gone");
        }
        figures.connections.dec();
    }

    async fn live(
        &self,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> Option<Close> {
        let progress = Progress::default();
        let over = until_over(&self.services, self.session.id, Some(self.attachment));
        let stopping = self.services.stopping.cancelled();
        let ending = {
            let carry = self.carry(&progress, sink, stream);
            tokio::pin!(carry);
            tokio::select! {
                why = &mut carry => return why.or_else(|| self.has_outlived_itself()),
                () = stopping => return Some(close::RESTARTS),
                ending = over => match ending {
                    // What its program said last may still be on its way.
                    Ending::Closed(CloseReason::Exited { exit }) => {
                        if let Ok(why) = timeout(REST, &mut carry).await {
                            return why;
                        }
                        Ending::Closed(CloseReason::Exited { exit })
                    }
                    other => other,
                },
            }
        };
        match ending {
            Ending::Replaced => Some(close::REPLACED),
            Ending::Closed(reason) => {
                if let CloseReason::Exited { exit } = reason {
                    let _ = timeout(CLOSES_WITHIN, sink.send(text(&exit_of(exit)))).await;
                }
                Some(close::of(&reason))
            }
        }
    }

    /// Where this process slept past the session's end, its user's silence is none.
    fn has_outlived_itself(&self) -> Option<Close> {
        (self.services.world.now() >= self.session.ends_at).then_some(close::LIFETIME)
    }

    /// Over one link after another, as long as there is one.
    async fn carry(
        &self,
        progress: &Progress,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> Option<Close> {
        loop {
            let Some(link) = Box::pin(self.link(progress)).await else { return Some(close::AWAY) };
            match self.talk(link, progress, sink, stream).await {
                Parted::Link => tracing::info!("a terminal's node is out of reach; looking for it"),
                Parted::User => return None,
                Parted::Close(why) => return Some(why),
            }
        }
    }

    /// Joined with the session's agent, once that is somewhere.
    async fn link(&self, progress: &Progress) -> Option<Link> {
        let until = Instant::now() + LOOKS_FOR;
        let from = if progress.knows.load(Ordering::Relaxed) {
            Some(progress.delivered.load(Ordering::Relaxed))
        } else {
            self.from
        };
        let wait = self.services.terminals.waits().park(self.session.id);
        loop {
            // Before the look: a stream that comes meanwhile is not missed, and while other replicas are asked, none is waited for in vain.
            let mut woken = pin!(wait.woken());
            let linked = tokio::select! {
                linked = self.services.terminals.link(self.session.id, self.attachment, from) => linked,
                () = &mut woken => continue,
            };
            if linked.is_some() {
                return linked;
            }
            if Instant::now() >= until {
                return None;
            }
            let _ = timeout(LOOKS_EVERY, woken).await;
        }
    }

    async fn talk(
        &self,
        link: Link,
        progress: &Progress,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> Parted {
        progress.sent.store(0, Ordering::Relaxed);
        progress.taken.store(0, Ordering::Relaxed);
        let Link { up, down, attachment, _held: held } = link;
        let parted = tokio::select! {
            parted = self.to_user(up, &down, attachment, progress, sink) => parted,
            parted = from_user(&down, attachment, progress, stream) => parted,
        };
        // The agent is told that the user is gone.
        drop(held);
        parted
    }

    async fn to_user(
        &self,
        mut up: mpsc::Receiver<Up>,
        down: &mpsc::Sender<Down>,
        attachment: u32,
        progress: &Progress,
        sink: &mut SplitSink<WebSocket, Message>,
    ) -> Parted {
        let mut asks = interval(ASKS_EVERY);
        asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut expected = None;
        let mut flushed = progress.delivered.load(Ordering::Relaxed);
        let mut acknowledged = flushed;
        let mut acknowledge_at: Option<Instant> = None;
        loop {
            // What came together goes out together.
            let delivered = progress.delivered.load(Ordering::Relaxed);
            if delivered > flushed && (up.is_empty() || delivered - flushed >= ACKNOWLEDGES_EVERY) {
                if sink.flush().await.is_err() {
                    return Parted::User;
                }
                flushed = delivered;
                acknowledge_at = acknowledge_at.or(Some(Instant::now() + ACKNOWLEDGES_WITHIN));
            }
            let is_time = acknowledge_at.is_some_and(|at| at <= Instant::now());
            if flushed > acknowledged && (is_time || flushed - acknowledged >= ACKNOWLEDGES_EVERY) {
                (acknowledged, acknowledge_at) = (flushed, None);
                let waits_for_client =
                    progress.acknowledges.load(Ordering::Relaxed) && !progress.stuck.load(Ordering::Relaxed);
                let ack = Down::Ack { attachment, position: flushed };
                if !waits_for_client && down.send(ack).await.is_err() {
                    return Parted::Link;
                }
            }
            let said = tokio::select! {
                said = up.recv() => said,
                () = sleep_until(acknowledge_at.unwrap_or_else(Instant::now)), if acknowledge_at.is_some() => continue,
                () = progress.pinged.notified() => {
                    if sink.send(text(&ToUser::Pong)).await.is_err() {
                        return Parted::User;
                    }
                    continue;
                }
                _ = asks.tick() => {
                    if self.overstays() {
                        return Parted::Close(close::RESTARTS);
                    }
                    if sink.send(Message::Ping(Vec::new().into())).await.is_err() {
                        return Parted::User;
                    }
                    continue;
                }
            };
            match (said, expected) {
                (None, _) => return Parted::Link,
                (Some(Up::Attached { position, lost, .. }), _) => {
                    tracing::info!(attachment, from = self.from, position, lost, "a terminal's user is attached");
                    expected = Some(position);
                    let first = !progress.knows.swap(true, Ordering::Relaxed);
                    // A link that was made anew behind its back is news only where something is missing.
                    if first || position > delivered {
                        progress.delivered.store(position, Ordering::Relaxed);
                        (flushed, acknowledged, acknowledge_at) = (position, position, None);
                        if sink.send(text(&self.attached(position, lost))).await.is_err() {
                            return Parted::User;
                        }
                    }
                }
                (Some(Up::Output { position, bytes, .. }), Some(at)) if position == at => {
                    let until = at + bytes.len() as u64;
                    expected = Some(until);
                    if position < delivered {
                        // The agent counts acknowledgements anew from where it was asked last, and would wait for those that it had.
                        let known = match progress.acknowledges.load(Ordering::Relaxed) {
                            true => progress.acknowledged.load(Ordering::Relaxed),
                            false => acknowledged,
                        };
                        if down.send(Down::Ack { attachment, position: known.min(until) }).await.is_err() {
                            return Parted::Link;
                        }
                    }
                    let Some(news) = news(position, bytes, delivered) else { continue };
                    if sink.feed(Message::Binary(news.into())).await.is_err() {
                        return Parted::User;
                    }
                    progress.delivered.store(until, Ordering::Relaxed);
                }
                // Something in between is missing: from there on once more.
                (Some(Up::Output { .. }), Some(_)) => return Parted::Link,
                // Of an earlier link; or for the session, which says so.
                (Some(Up::Output { .. }), None) | (Some(Up::Lost), _) => {}
                (Some(Up::Taken { bytes, .. }), _) => {
                    progress.taken.store(bytes, Ordering::Relaxed);
                    progress.room.notify_one();
                }
                (Some(Up::Recording { mode }), _) => {
                    let mode = match mode {
                        wire::recording::Mode::Off => Mode::Off,
                        wire::recording::Mode::BestEffort => Mode::BestEffort,
                        wire::recording::Mode::Strict => Mode::Strict,
                    };
                    if sink.send(text(&ToUser::Recording { mode: mode.name() })).await.is_err() {
                        return Parted::User;
                    }
                }
                (Some(Up::Exited { exit }), _) => {
                    let exit = match exit {
                        wire::terminal::Exit::Code(code) => Exit::Code(code),
                        wire::terminal::Exit::Signal(signal) => Exit::Signal(signal),
                    };
                    let _ = timeout(CLOSES_WITHIN, sink.send(text(&exit_of(exit)))).await;
                    return Parted::Close(close::EXITED);
                }
            }
        }
    }

    /// Whether its user is to show anew that they are let in: a new token takes an access token that holds, which whoever was put out at the
    /// identity provider has not for long.
    fn overstays(&self) -> bool {
        let world = &self.services.world;
        let after = world.policy().int(Key::TerminalReauthorize, &self.session.scopes(), world.now());
        u64::try_from(after).is_ok_and(|after| after > 0 && self.since.elapsed() >= Duration::from_secs(after))
    }

    fn attached(&self, position: u64, lost_bytes: u64) -> ToUser {
        ToUser::Attached {
            session_id: self.session.id.0,
            attachment: self.attachment,
            position,
            lost_bytes,
            expires_at: self.session.ends_at.to_rfc3339_opts(chrono::SecondsFormat::Millis, true),
            recording: self.session.recording.mode.name(),
        }
    }
}

async fn from_user(
    down: &mpsc::Sender<Down>,
    attachment: u32,
    progress: &Progress,
    stream: &mut SplitStream<WebSocket>,
) -> Parted {
    let mut controls = Controls::default();
    let mut silent_at = Instant::now() + SILENT_AFTER;
    loop {
        let message = tokio::select! {
            message = stream.next() => message,
            () = sleep_until(silent_at) => return Parted::User,
        };
        silent_at = Instant::now() + SILENT_AFTER;
        let said = match message {
            None => return Parted::User,
            Some(Err(error)) => {
                return if is_too_big(&error) { Parted::Close(TOO_BIG) } else { Parted::User };
            }
            Some(Ok(Message::Close(_))) => return Parted::User,
            Some(Ok(Message::Binary(bytes))) => {
                for chunk in bytes.chunks(CHUNK) {
                    make_room(down, attachment, chunk.len() as u64, progress).await;
                    let input = Down::Input { attachment, bytes: chunk.to_vec() };
                    if down.send(input).await.is_err() {
                        return Parted::Link;
                    }
                }
                silent_at = Instant::now() + SILENT_AFTER;
                continue;
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {
                if controls.take() {
                    continue;
                }
                return Parted::Close(MISUSED);
            }
            Some(Ok(Message::Text(said))) => said,
        };
        // Acknowledgements come with the output, and are no more than that.
        let understood = serde_json::from_str::<FromUser>(&said);
        let counts = !matches!(understood, Ok(FromUser::Ack { .. }));
        if counts && !controls.take() {
            return Parted::Close(MISUSED);
        }
        let sent = match understood {
            Ok(FromUser::Resize { columns, rows }) => down.send(Down::Resize { columns, rows }).await.is_ok(),
            Ok(FromUser::Ack { position }) => {
                progress.acknowledges.store(true, Ordering::Relaxed);
                let position = progress.acknowledged.fetch_max(position, Ordering::Relaxed).max(position);
                let position = position.min(progress.delivered.load(Ordering::Relaxed));
                down.send(Down::Ack { attachment, position }).await.is_ok()
            }
            Ok(FromUser::Exit {}) => down.send(Down::Close).await.is_ok(),
            Ok(FromUser::Ping {}) => {
                // Who asks faster than it listens is answered once.
                progress.pinged.notify_one();
                true
            }
            Err(_) => return Parted::Close(MISUSED),
        };
        if !sent {
            return Parted::Link;
        }
    }
}

/// What the user does not have yet. A link that was given up before it was answered may have brought some of it: who counts what comes
/// would be wrong by that from then on.
fn news(position: u64, mut bytes: Vec<u8>, delivered: u64) -> Option<Vec<u8>> {
    let known = usize::try_from(delivered.saturating_sub(position)).unwrap_or(usize::MAX);
    if known >= bytes.len() {
        return None;
    }
    Some(bytes.split_off(known))
}

/// Waits until the program has taken enough of what was typed before.
async fn make_room(down: &mpsc::Sender<Down>, attachment: u32, bytes: u64, progress: &Progress) {
    loop {
        let (sent, taken) = (progress.sent.load(Ordering::Relaxed), progress.taken.load(Ordering::Relaxed));
        let on_the_way = sent.saturating_sub(taken);
        if on_the_way + bytes <= INPUT_WINDOW {
            break;
        }
        // Its acknowledgements lie behind its input: until that is taken, what is written counts, or the two wait for each other.
        progress.stuck.store(true, Ordering::Relaxed);
        let position = progress.delivered.load(Ordering::Relaxed);
        let _ = down.send(Down::Ack { attachment, position }).await;
        progress.room.notified().await;
    }
    progress.stuck.store(false, Ordering::Relaxed);
    progress.sent.fetch_add(bytes, Ordering::Relaxed);
}

fn exit_of(exit: Exit) -> ToUser {
    match exit {
        Exit::Code(code) => ToUser::Exit { code: Some(code), signal: None },
        Exit::Signal(signal) => ToUser::Exit { code: None, signal: Some(signal) },
    }
}

fn text(message: &ToUser) -> Message {
    Message::Text(serde_json::to_string(message).unwrap_or_default().into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_has_is_not_said_again() {
        let said = |position, delivered| news(position, b"said".to_vec(), delivered);
        assert_eq!(said(10, 10).unwrap(), b"said");
        assert_eq!(said(10, 13).unwrap(), b"d");
        assert_eq!(said(10, 14), None);
        assert_eq!(said(10, 99), None);
    }
}
