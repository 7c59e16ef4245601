//! One user's connection, from its upgrade to its close.
//!
//! Output goes to the user as fast as the user takes it: what is not acknowledged bounds what is sent, down to the program itself.
//! Acknowledged is what was written to the socket, or, once the client says `ack`, what the client says; a page that is slow to draw
//! holds its program by that, and not its own memory. Input is bounded likewise. That all has come, which ends a session whose program
//! ended, nobody says but the user's own end: what was written to a socket may be on its way to nobody.

pub(super) mod close;
mod input;
mod output;
mod progress;
mod said;

use super::gateway::ask;
use super::{Ending, Link, until_over};
use crate::correlation::Scope;
use crate::services::Services;
use crate::websocket::{CLOSES_WITHIN, Close, frame};
use axum::extract::ws::{Message, WebSocket};
use domain::policy::Key;
use domain::recording::Mode;
use domain::terminal_session::{CloseReason, Command, TerminalSession};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use progress::Progress;
use said::{exit_of, text};
use std::pin::{Pin, pin};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How long the node's stream is looked for before the user is told to come again, and how often; one that comes here says so.
const LOOKS_FOR: Duration = Duration::from_secs(60);
const LOOKS_EVERY: Duration = Duration::from_millis(100);
/// A user who takes nothing for so long of what a session that has ended still says is waited for no longer; nor is one who takes ever so
/// little after the second.
const REST: Duration = Duration::from_secs(5);
const REST_AT_MOST: Duration = Duration::from_secs(120);

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
#[derive(Debug, PartialEq, Eq)]
enum Parted {
    /// The node's stream is cut: it is looked for again.
    Link,
    /// The user is gone, without or with a word.
    User,
    /// It ends, with this code.
    Close(Close),
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
        let over = until_over(&self.services, self.session.id, self.session.ends_at, Some(self.attachment));
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
                        if let Some(why) = rest(carry, &progress, REST).await {
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
        let mut told = None;
        loop {
            let Some(link) = Box::pin(self.link(progress)).await else { return Some(close::AWAY) };
            let began = Instant::now();
            match self.talk(link, progress, &mut told, sink, stream).await {
                Parted::Link => {
                    tracing::info!("a terminal's node is out of reach; looking for it");
                    // A node that breaks every link it makes is no reason to hurry.
                    if began.elapsed() < LOOKS_EVERY {
                        sleep(LOOKS_EVERY).await;
                    }
                }
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
        told: &mut Option<Mode>,
        sink: &mut SplitSink<WebSocket, Message>,
        stream: &mut SplitStream<WebSocket>,
    ) -> Parted {
        progress.begin_link();
        let Link { up, down, attachment, _held: held } = link;
        let output = output::Output::new(&self.session, attachment, progress, &down, told);
        let parted = tokio::select! {
            parted = output.carry(up, sink, || self.overstays()) => parted,
            parted = input::carry(&down, attachment, progress, stream) => parted,
        };
        // The agent is told that the user is gone.
        drop(held);
        parted
    }

    /// Whether its user is to show anew that they are let in: a new token takes an access token that holds, which whoever was put out at the
    /// identity provider has not for long.
    fn overstays(&self) -> bool {
        let world = &self.services.world;
        let after = world.policy().int(Key::TerminalReauthorize, &self.session.scopes(), world.now());
        u64::try_from(after).is_ok_and(|after| after > 0 && self.since.elapsed() >= Duration::from_secs(after))
    }
}

/// Carries on for as long as the user takes any of what is left. `None` where they do not.
async fn rest<T>(mut carry: Pin<&mut impl Future<Output = T>>, progress: &Progress, pause: Duration) -> Option<T> {
    let until = Instant::now() + REST_AT_MOST;
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
#[allow(clippy::unwrap_used)]
mod tests;
