//! Terminals: the gateway that users connect to, and the two ends of a session in this process.
//!
//! A session's agent holds a stream to some replica, and its user is connected to some gateway. In one process the two are joined here;
//! in two they are joined over the bus ([`relay`]), sealed. Nothing of a session is kept here but who is connected at this moment: its
//! state is its machine's, its output the agent's.

mod browser;
mod gateway;
pub mod relay;
mod seal;
mod watch;

use crate::polls::Polls;
use crate::recording::Shelf;
use crate::token::{self, Purpose, TokenHash};
use dashmap::DashMap;
use domain::TerminalSessionId;
use prometheus::{IntCounter, IntGauge, Registry};
use relay::Bus;
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use wire::terminal::{Down, Up};

pub use gateway::{PATH, beside, router};
pub(crate) use watch::{Ending, until_over};

/// The subprotocol that a connection speaks (decisions 5, *Terminal*).
pub const PROTOCOL: &str = "gpu.terminal.v1";

/// Messages from one end to the other that are on their way.
const QUEUE: usize = 16;

/// The ends of sessions that are here; cheap to clone.
#[derive(Clone)]
pub struct Terminals(Arc<Parts>);

struct Parts {
    /// The sessions whose agents hold their stream to this process.
    ends: DashMap<Uuid, Arc<End>>,
    waits: Polls<TerminalSessionId>,
    relay: Option<relay::Relay>,
    figures: Figures,
    shelf: Shelf,
}

#[derive(Clone)]
pub(crate) struct Figures {
    /// Tokens that let a connection in.
    pub(crate) consumed: IntCounter,
    /// Tokens that were used before, and shown again.
    pub(crate) replayed: IntCounter,
    /// Connections of users, now.
    pub(crate) connections: IntGauge,
    /// Streams of agents, now.
    pub(crate) streams: IntGauge,
}

impl Figures {
    fn register(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name, help| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone())).map(|()| counter)
        };
        let gauge = |name, help| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone())).map(|()| gauge)
        };
        Ok(Self {
            consumed: counter("terminal_token_consumed_ok_total", "Terminal tokens that let a connection in.")?,
            replayed: counter(
                "terminal_token_replay_rejected_total",
                "Terminal tokens that had been used before, and were refused.",
            )?,
            connections: gauge("terminal_connections", "Users' terminal connections to this process.")?,
            streams: gauge("terminal_streams", "Agents' terminal streams to this process.")?,
        })
    }
}

impl Terminals {
    /// Reaches other replicas over `bus`, under keys that are made of `secret`, which all replicas share.
    ///
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(
        registry: &Registry,
        bus: Option<Arc<dyn Bus>>,
        secret: SecretSlice<u8>,
    ) -> prometheus::Result<Self> {
        let parts = Arc::new(Parts {
            ends: DashMap::new(),
            waits: Polls::default(),
            relay: bus.map(|bus| relay::Relay::new(bus, secret)),
            figures: Figures::register(registry)?,
            shelf: Shelf::register(registry)?,
        });
        if let Some(relay) = &parts.relay {
            relay.listen(Arc::downgrade(&parts));
        }
        Ok(Self(parts))
    }

    pub(crate) fn figures(&self) -> &Figures {
        &self.0.figures
    }

    /// Where recordings are taken in.
    pub(crate) fn shelf(&self) -> &Shelf {
        &self.0.shelf
    }

    /// Something happened to the session: whoever holds an end of it looks.
    pub fn wake(&self, session: TerminalSessionId) {
        self.0.waits.wake(session);
    }

    pub(crate) fn waits(&self) -> &Polls<TerminalSessionId> {
        &self.0.waits
    }

    /// Takes in an agent's stream. A later one of the same session takes its place.
    pub(crate) fn take_in(&self, session: TerminalSessionId, down: mpsc::Sender<Down>) -> Stream {
        let end = Arc::new(End { down, user: Mutex::default(), gone: CancellationToken::new() });
        if let Some(before) = self.0.ends.insert(session.0, Arc::clone(&end)) {
            before.gone.cancel();
        }
        self.0.figures.streams.inc();
        // A user may be waiting for it.
        self.wake(session);
        if let Some(relay) = &self.0.relay {
            relay.announce(session);
        }
        Stream { session, end, terminals: self.clone() }
    }

    /// Joins a user's connection with the session's agent, wherever its stream ends. `None`: nowhere, for the time being.
    pub(crate) async fn link(&self, session: TerminalSessionId, attachment: u32, from: Option<u64>) -> Option<Link> {
        match self.end(session) {
            Some(end) => end.join(attachment, from).await,
            None => self.0.relay.as_ref()?.reach(session, attachment, from).await,
        }
    }

    /// The session's stream, where it is here.
    fn end(&self, session: TerminalSessionId) -> Option<Arc<End>> {
        self.0.ends.get(&session.0).map(|end| Arc::clone(&end))
    }
}

/// An agent's stream that is here; it leaves when it is dropped.
pub(crate) struct Stream {
    session: TerminalSessionId,
    end: Arc<End>,
    terminals: Terminals,
}

impl Stream {
    /// Hands on what the agent says.
    pub(crate) async fn deliver(&self, said: Up) {
        self.end.deliver(said).await;
    }

    /// Until another stream has taken its place.
    pub(crate) async fn gone(&self) {
        self.end.gone.cancelled().await;
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.end.gone.cancel();
        lock(&self.end.user).take();
        self.terminals.0.ends.remove_if(&self.session.0, |_, end| Arc::ptr_eq(end, &self.end));
        self.terminals.0.figures.streams.dec();
    }
}

/// The agent's end of a session, and who is joined to it.
pub(crate) struct End {
    down: mpsc::Sender<Down>,
    user: Mutex<Option<User>>,
    gone: CancellationToken,
}

struct User {
    attachment: u32,
    up: mpsc::Sender<Up>,
    /// Another has come in its place, or it went.
    parted: CancellationToken,
}

impl End {
    /// Whether a connection of that number could be joined at this moment.
    fn admits(&self, attachment: u32) -> bool {
        self.may_follow(lock(&self.user).as_ref(), attachment)
    }

    fn may_follow(&self, user: Option<&User>, attachment: u32) -> bool {
        !self.gone.is_cancelled() && user.is_none_or(|user| user.attachment <= attachment)
    }

    /// `None` where a later connection is joined, or the stream is gone.
    async fn join(self: &Arc<Self>, attachment: u32, from: Option<u64>) -> Option<Link> {
        let (up, receiver) = mpsc::channel(QUEUE);
        let parted = CancellationToken::new();
        {
            let mut user = lock(&self.user);
            if !self.may_follow(user.as_ref(), attachment) {
                return None;
            }
            if let Some(before) = user.replace(User { attachment, up, parted: parted.clone() }) {
                before.parted.cancel();
            }
        }
        let held = Held { end: Arc::clone(self), attachment, parted };
        self.down.send(Down::Attach { attachment, from }).await.ok()?;
        Some(Link { attachment, up: receiver, down: self.down.clone(), _held: Some(held) })
    }

    async fn deliver(&self, said: Up) {
        let Some((said, up, parted)) = self.hand_over(said) else { return };
        tokio::select! {
            _ = up.send(said) => {}
            () = parted.cancelled() => {}
        }
    }

    /// Hands it to whom it is for; what is for an earlier connection is for nobody. It comes back with them where they have to be waited for.
    fn hand_over(&self, said: Up) -> Option<(Up, mpsc::Sender<Up>, CancellationToken)> {
        let user = lock(&self.user);
        let user = user.as_ref()?;
        let is_for = match &said {
            Up::Attached { attachment, .. } | Up::Output { attachment, .. } | Up::Taken { attachment, .. } => {
                *attachment == user.attachment
            }
            Up::Exited { .. } | Up::Recording { .. } => true,
            // The session's own machine says it, with the reason.
            Up::Lost => false,
        };
        if !is_for {
            return None;
        }
        match user.up.try_send(said) {
            Ok(()) | Err(TrySendError::Closed(_)) => None,
            Err(TrySendError::Full(said)) => Some((said, user.up.clone(), user.parted.clone())),
        }
    }
}

/// A user's place at an agent's end; given back when it is dropped.
struct Held {
    end: Arc<End>,
    attachment: u32,
    parted: CancellationToken,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.parted.is_cancelled() {
            return;
        }
        self.parted.cancel();
        lock(&self.end.user).take_if(|user| user.parted.is_cancelled());
        let (end, attachment) = (Arc::clone(&self.end), self.attachment);
        tokio::spawn(async move {
            let Ok(permit) = end.down.reserve().await else { return };
            // The same connection may be joined again by now: after its `Attach` this would put it out.
            let user = lock(&end.user);
            if user.as_ref().is_none_or(|user| user.attachment != attachment) {
                permit.send(Down::Detach { attachment });
            }
        });
    }
}

/// A user's connection, joined with the session's agent. It parts when it is dropped; `up` ends where the agent is gone.
pub(crate) struct Link {
    attachment: u32,
    up: mpsc::Receiver<Up>,
    down: mpsc::Sender<Down>,
    _held: Option<Held>,
}

/// A token as it is handed out: the secret, and which session it is for.
pub(crate) fn mint(session: Uuid) -> (SecretString, TokenHash) {
    let minted = token::mint(Purpose::Terminal);
    (format!("{}.{}", minted.token.expose_secret(), session.simple()).into(), minted.hash)
}

/// The session that a token is for, and its hash; `None` where it has not even the form of one.
pub(crate) fn read_token(presented: &SecretString) -> Option<(TerminalSessionId, TokenHash)> {
    let (secret, session) = presented.expose_secret().rsplit_once('.')?;
    let well_formed = session.len() == 32 && session.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let session = Uuid::try_parse(session).ok().filter(|_| well_formed)?;
    Some((TerminalSessionId(session), token::read(Purpose::Terminal, &secret.to_owned().into())?))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
