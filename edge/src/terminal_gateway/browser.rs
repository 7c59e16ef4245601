//! One user's connection, from its upgrade to its close.
//!
//! Output goes to the user as fast as the client reads it: the unacknowledged part bounds what is sent, down to the program itself.
//! Acknowledged is what was written to the socket, or, once the client sends `ack`, what the client acknowledges; a page that draws slowly
//! throttles its program by that, and not by its own memory. Input is bounded likewise. Only the client's own end confirms that all output
//! has arrived, which ends a session whose program ended: bytes written to a socket may never reach a client.

mod byte_positions;
pub(super) mod close;
mod control_frames;
#[cfg(test)]
mod fuzz;
mod input;
mod output;

use super::attachment::Attachment;
use super::{SessionEnd, until_session_ends};
use crate::app_state::AppState;
use crate::http::websocket::{CLOSE_TIMEOUT, Close, frame};
use crate::terminal::Link;
use axum::extract::ws::{Message, WebSocket};
use byte_positions::Progress;
use control_frames::{ToUser, exit_of, text};
use domain::policy::PolicyKey;
use domain::recording::RecordingMode;
use domain::terminal_session::{CloseCode, CloseReason, TerminalSession};
use futures::stream::{SplitSink, SplitStream};
use futures::{Sink, SinkExt as _, StreamExt as _};
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How long, and how often, the node's stream is searched for before the client is asked to reconnect. A stream that arrives at this
/// replica wakes the search.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);
const RECONNECT_INTERVAL: Duration = Duration::from_millis(100);
/// A shorter search is not reported to the client.
const NOTICE_AFTER: Duration = Duration::from_secs(1);
/// How long the remaining output of an ended session is kept for a client that reads nothing, and for one that reads very slowly.
const DRAIN_PAUSE: Duration = Duration::from_secs(5);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(120);

/// An admitted user's connection. It mostly waits: rare calls are boxed, so that they leave no room reserved.
pub(super) struct Browser {
    pub(super) app: AppState,
    pub(super) session: TerminalSession,
    pub(super) attachment: Attachment,
    pub(super) from: Option<u64>,
    pub(super) since: Instant,
}

/// Why it does not go on over this link.
#[derive(Debug, PartialEq, Eq)]
enum LinkEnd {
    /// The node's stream is cut: the search for it starts again.
    Link,
    /// The user is gone, with or without a close frame.
    User,
    /// It ends, with this code.
    Close(Close),
}

impl Browser {
    pub(super) async fn run(self, socket: WebSocket) {
        let metrics = self.app.terminals.metrics().clone();
        metrics.connections.inc();
        let (mut sink, mut stream) = socket.split();
        let why = self.serve(&mut sink, &mut stream).await;
        if let Some(why) = why {
            let _ = timeout(CLOSE_TIMEOUT, sink.send(frame(why))).await;
        }
        drop((sink, stream));
        metrics.connections.dec();
    }

    async fn serve(
        &self,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> Option<Close> {
        let progress = Progress::default();
        let over = until_session_ends(&self.app, self.session.id, self.session.ends_at, Some(self.attachment.number));
        let stopping = self.app.stopping.cancelled();
        let ending = {
            let relaying = self.relay_links(&progress, sink, stream);
            tokio::pin!(relaying);
            tokio::select! {
                why = &mut relaying => return why.or_else(|| self.is_past_lifetime()),
                () = stopping => return Some(close::RESTARTS),
                ending = over => match ending {
                    // The program's last output may still be in flight.
                    SessionEnd::Closed(CloseReason::Exited { exit }) => {
                        if let Some(why) = drain(relaying, &progress, DRAIN_PAUSE).await {
                            return why;
                        }
                        SessionEnd::Closed(CloseReason::Exited { exit })
                    }
                    other => other,
                },
            }
        };
        match ending {
            SessionEnd::Replaced => Some(close::REPLACED),
            SessionEnd::Detached => Some(close::RESTARTS),
            SessionEnd::Closed(reason) => {
                if let CloseReason::Exited { exit } = reason {
                    let _ = timeout(CLOSE_TIMEOUT, sink.send(text(&exit_of(exit)))).await;
                }
                Some(close::of(CloseCode::from(&reason)))
            }
        }
    }

    /// Where this process slept past the session's end, a silent user is not a lost one.
    fn is_past_lifetime(&self) -> Option<Close> {
        (self.app.environment.now() >= self.session.ends_at).then_some(close::LIFETIME)
    }

    /// Over one link after another, as long as there is one.
    async fn relay_links(
        &self,
        progress: &Progress,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> Option<Close> {
        let mut recording_mode = None;
        loop {
            let searching = Box::pin(with_notice(self.link(progress), sink));
            let Some(link) = searching.await else { return Some(close::AWAY) };
            let began = Instant::now();
            match self.relay_link(link, progress, &mut recording_mode, sink, stream).await {
                LinkEnd::Link => {
                    tracing::info!("a terminal's node is out of reach; looking for it");
                    // A node whose links break at once is not retried without a pause.
                    if began.elapsed() < RECONNECT_INTERVAL {
                        sleep(RECONNECT_INTERVAL).await;
                    }
                }
                LinkEnd::User => return None,
                LinkEnd::Close(why) => return Some(why),
            }
        }
    }

    /// Joined with the session's agent, once that is somewhere.
    async fn link(&self, progress: &Progress) -> Option<Link> {
        let until = Instant::now() + RECONNECT_TIMEOUT;
        let from = if progress.is_attached.load(Ordering::Relaxed) {
            Some(progress.delivered.load(Ordering::Relaxed))
        } else {
            self.from
        };
        let wait = self.app.terminals.waits().park(self.session.id);
        loop {
            // Registered before the search: a stream that arrives meanwhile is not missed, and a slow query of other replicas does not
            // delay it.
            let mut woken = pin!(wait.woken());
            let linked = tokio::select! {
                linked = self.app.terminals.link(self.session.id, self.attachment.number, from) => linked,
                () = &mut woken => continue,
            };
            if linked.is_some() {
                return linked;
            }
            if Instant::now() >= until {
                return None;
            }
            let _ = timeout(RECONNECT_INTERVAL, woken).await;
        }
    }

    async fn relay_link(
        &self,
        link: Link,
        progress: &Progress,
        recording_mode: &mut Option<RecordingMode>,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> LinkEnd {
        progress.begin_link();
        let Link { up, down, attachment, _held: held } = link;
        let output = output::Output::new(&self.session, attachment, progress, &down, recording_mode);
        let link_end = tokio::select! {
            link_end = output.carry(up, sink, || self.must_reauthorize()) => link_end,
            link_end = input::carry(&down, attachment, progress, stream) => link_end,
        };
        // Dropping it notifies the agent that the user is gone.
        drop(held);
        link_end
    }

    /// Whether the user must authenticate again: a new token needs a valid access token, which a user who was disabled at the identity
    /// provider does not get for long.
    fn must_reauthorize(&self) -> bool {
        let environment = &self.app.environment;
        let after = environment.policy().int(PolicyKey::TerminalReauthorize, &self.session.scopes(), environment.now());
        u64::try_from(after).is_ok_and(|after| after > 0 && self.since.elapsed() >= Duration::from_secs(after))
    }
}

/// The result of the search for the node's stream. A client waits for it, and is informed of that where it takes long.
async fn with_notice<T>(search: impl Future<Output = T>, sink: &mut (impl Sink<Message> + Unpin)) -> T {
    let mut search = pin!(search);
    if let Ok(found) = timeout(NOTICE_AFTER, &mut search).await {
        return found;
    }
    // A client that is gone is noticed by the link.
    let _ = timeout(CLOSE_TIMEOUT, sink.send(text(&ToUser::WaitingForNode))).await;
    search.await
}

/// Continues for as long as the client reads any of what is left. `None` where it does not.
async fn drain<T>(mut carry: Pin<&mut impl Future<Output = T>>, progress: &Progress, pause: Duration) -> Option<T> {
    let until = Instant::now() + DRAIN_TIMEOUT;
    loop {
        let delivered = progress.delivered.load(Ordering::Relaxed);
        if let Ok(done) = timeout(pause, &mut carry).await {
            return Some(done);
        }
        if progress.delivered.load(Ordering::Relaxed) == delivered || Instant::now() >= until {
            return None;
        }
    }
}

#[cfg(test)]
mod tests;
