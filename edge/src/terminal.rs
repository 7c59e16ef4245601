//! Terminals: the two ends of a session in this process. Users connect to [`crate::terminal_gateway`].
//!
//! A session's agent holds a stream to some replica, and its user is connected to some gateway. Within one process the two are joined here;
//! across two processes they are joined over the bus ([`relay`]), sealed. Only the current connections are stored here: the session's state
//! belongs to its state machine, its output to the agent.

pub(crate) mod recording;
pub mod relay;
mod relay_encryption;

use crate::auth::opaque_token::{self, TokenHash, TokenPurpose};
use crate::http::long_poll::LongPolls;
use crate::terminal::recording::RecordingIntake;
use dashmap::DashMap;
use domain::TerminalSessionId;
use persistence::metrics::registered;
use prometheus::{IntCounter, IntGauge, Registry};
use relay::TerminalBus;
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;
use wire::terminal::{TerminalCommand, TerminalEvent};

/// The subprotocol of a connection (decisions 5, *Terminal*).
pub const PROTOCOL: &str = "gpu.terminal.v1";

/// Messages in flight from one end to the other.
const QUEUE: usize = 16;

/// The ends of sessions that are here; cheap to clone.
#[derive(Clone)]
pub struct Terminals(Arc<Parts>);

struct Parts {
    /// The sessions whose agents stream to this process.
    ends: DashMap<Uuid, Arc<AgentEnd>>,
    waits: LongPolls<TerminalSessionId>,
    relay: Option<relay::Relay>,
    metrics: TerminalMetrics,
    recording_intake: RecordingIntake,
}

#[derive(Clone)]
pub(crate) struct TerminalMetrics {
    /// Tokens that were accepted.
    pub(crate) consumed: IntCounter,
    /// Tokens that were presented again after they were spent.
    pub(crate) replayed: IntCounter,
    /// Connections of users, now.
    pub(crate) connections: IntGauge,
    /// Streams of agents, now.
    pub(crate) streams: IntGauge,
}

impl TerminalMetrics {
    fn register(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name, help| registered(registry, IntCounter::new(name, help));
        let gauge = |name, help| registered(registry, IntGauge::new(name, help));
        Ok(Self {
            consumed: counter(
                "terminal_token_consumed_ok_total",
                "Terminal tokens that were consumed by a connection.",
            )?,
            replayed: counter(
                "terminal_token_replay_rejected_total",
                "Terminal tokens that were refused because they had been consumed before.",
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
        bus: Option<Arc<dyn TerminalBus>>,
        secret: SecretSlice<u8>,
    ) -> prometheus::Result<Self> {
        let parts = Arc::new(Parts {
            ends: DashMap::new(),
            waits: LongPolls::default(),
            relay: bus.map(|bus| relay::Relay::new(bus, secret)),
            metrics: TerminalMetrics::register(registry)?,
            recording_intake: RecordingIntake::register(registry)?,
        });
        if let Some(relay) = &parts.relay {
            relay.listen(Arc::downgrade(&parts));
        }
        Ok(Self(parts))
    }

    pub(crate) fn metrics(&self) -> &TerminalMetrics {
        &self.0.metrics
    }

    /// Where recordings are received.
    pub(crate) fn recording_intake(&self) -> &RecordingIntake {
        &self.0.recording_intake
    }

    /// Wakes the connections of a session: its state has changed.
    pub fn wake(&self, session: TerminalSessionId) {
        self.0.waits.wake(session);
    }

    pub(crate) fn waits(&self) -> &LongPolls<TerminalSessionId> {
        &self.0.waits
    }

    /// Registers an agent's stream. A later stream of the same session replaces it.
    pub(crate) fn register_stream(
        &self,
        session: TerminalSessionId,
        down: mpsc::Sender<TerminalCommand>,
    ) -> AgentStream {
        let end = Arc::new(AgentEnd { down, user: Mutex::default(), gone: CancellationToken::new() });
        if let Some(before) = self.0.ends.insert(session.0, Arc::clone(&end)) {
            before.gone.cancel();
        }
        self.0.metrics.streams.inc();
        // A user may be waiting for it.
        self.wake(session);
        if let Some(relay) = &self.0.relay {
            relay.announce(session);
        }
        AgentStream { session, end, terminals: self.clone() }
    }

    /// Joins a user's connection with the session's agent, wherever its stream ends. `None`: no replica has the stream at present.
    pub(crate) async fn link(&self, session: TerminalSessionId, attachment: u32, from: Option<u64>) -> Option<Link> {
        match self.end(session) {
            Some(end) => end.join(attachment, from).await,
            None => self.0.relay.as_ref()?.connect(session, attachment, from).await,
        }
    }

    /// The session's stream, where it is here.
    fn end(&self, session: TerminalSessionId) -> Option<Arc<AgentEnd>> {
        self.0.ends.get(&session.0).map(|end| Arc::clone(&end))
    }
}

/// An agent's stream that is here; it leaves when it is dropped.
pub(crate) struct AgentStream {
    session: TerminalSessionId,
    end: Arc<AgentEnd>,
    terminals: Terminals,
}

impl AgentStream {
    /// Forwards a message of the agent.
    pub(crate) async fn deliver(&self, event: TerminalEvent) {
        self.end.deliver(event).await;
    }

    /// Completes when another stream has replaced this one.
    pub(crate) async fn replaced(&self) {
        self.end.gone.cancelled().await;
    }
}

impl Drop for AgentStream {
    fn drop(&mut self) {
        self.end.gone.cancel();
        lock(&self.end.user).take();
        self.terminals.0.ends.remove_if(&self.session.0, |_, end| Arc::ptr_eq(end, &self.end));
        self.terminals.0.metrics.streams.dec();
    }
}

/// The agent's end of a session, and the user that is joined to it.
pub(crate) struct AgentEnd {
    down: mpsc::Sender<TerminalCommand>,
    user: Mutex<Option<AttachedUser>>,
    gone: CancellationToken,
}

struct AttachedUser {
    attachment: u32,
    up: mpsc::Sender<TerminalEvent>,
    /// Cancelled when another user replaces this one, or when the user leaves.
    detached: CancellationToken,
}

impl AgentEnd {
    /// Whether a connection of that number could be joined at this moment.
    fn can_join(&self, attachment: u32) -> bool {
        self.may_replace(lock(&self.user).as_ref(), attachment)
    }

    fn may_replace(&self, user: Option<&AttachedUser>, attachment: u32) -> bool {
        !self.gone.is_cancelled() && user.is_none_or(|user| user.attachment <= attachment)
    }

    /// `None` where a later connection is joined, or the stream is gone.
    async fn join(self: &Arc<Self>, attachment: u32, from: Option<u64>) -> Option<Link> {
        let (up, receiver) = mpsc::channel(QUEUE);
        let detached = CancellationToken::new();
        {
            let mut user = lock(&self.user);
            if !self.may_replace(user.as_ref(), attachment) {
                return None;
            }
            if let Some(before) = user.replace(AttachedUser { attachment, up, detached: detached.clone() }) {
                before.detached.cancel();
            }
        }
        let held = AttachmentGuard { end: Arc::clone(self), attachment, detached };
        self.down.send(TerminalCommand::Attach { attachment, from }).await.ok()?;
        Some(Link { attachment, up: receiver, down: self.down.clone(), _held: Some(held) })
    }

    async fn deliver(&self, event: TerminalEvent) {
        let Some((event, up, detached)) = self.offer(event) else { return };
        tokio::select! {
            _ = up.send(event) => {}
            () = detached.cancelled() => {}
        }
    }

    /// Offers a message to its recipient; a message for an earlier connection is dropped. The message comes back with the recipient's queue
    /// where that is full.
    fn offer(&self, event: TerminalEvent) -> Option<(TerminalEvent, mpsc::Sender<TerminalEvent>, CancellationToken)> {
        let user = lock(&self.user);
        let user = user.as_ref()?;
        let is_for = match &event {
            TerminalEvent::Attached { attachment, .. }
            | TerminalEvent::Output { attachment, .. }
            | TerminalEvent::Taken { attachment, .. } => *attachment == user.attachment,
            TerminalEvent::Exited { .. } | TerminalEvent::Recording { .. } => true,
            // The session's own state machine reports it, with the reason.
            TerminalEvent::Lost => false,
        };
        if !is_for {
            return None;
        }
        match user.up.try_send(event) {
            Ok(()) | Err(TrySendError::Closed(_)) => None,
            Err(TrySendError::Full(event)) => Some((event, user.up.clone(), user.detached.clone())),
        }
    }
}

/// A user's attachment to an agent's end; released on drop.
pub(crate) struct AttachmentGuard {
    end: Arc<AgentEnd>,
    attachment: u32,
    detached: CancellationToken,
}

impl Drop for AttachmentGuard {
    fn drop(&mut self) {
        if self.detached.is_cancelled() {
            return;
        }
        self.detached.cancel();
        lock(&self.end.user).take_if(|user| user.detached.is_cancelled());
        let (end, attachment) = (Arc::clone(&self.end), self.attachment);
        tokio::spawn(async move {
            let Ok(permit) = end.down.reserve().await else { return };
            // The same connection may be joined again by now: a `Detach` after its `Attach` would disconnect it.
            let user = lock(&end.user);
            if user.as_ref().is_none_or(|user| user.attachment != attachment) {
                permit.send(TerminalCommand::Detach { attachment });
            }
        });
    }
}

/// A user's connection, joined with the session's agent. Dropping it detaches; `up` ends where the agent is gone.
pub(crate) struct Link {
    pub(crate) attachment: u32,
    pub(crate) up: mpsc::Receiver<TerminalEvent>,
    pub(crate) down: mpsc::Sender<TerminalCommand>,
    pub(crate) _held: Option<AttachmentGuard>,
}

/// A token as it is issued: the secret, and the session that it is for.
pub(crate) fn mint(session: Uuid) -> (SecretString, TokenHash) {
    let minted = opaque_token::mint(TokenPurpose::Terminal);
    (format!("{}.{}", minted.token.expose_secret(), session.simple()).into(), minted.hash)
}

/// The session that a token is for, and its hash; `None` where the form is not that of a token.
pub(crate) fn read_token(presented: &SecretString) -> Option<(TerminalSessionId, TokenHash)> {
    let (secret, session) = presented.expose_secret().rsplit_once('.')?;
    let well_formed = session.len() == 32 && session.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let session = Uuid::try_parse(session).ok().filter(|_| well_formed)?;
    Some((TerminalSessionId(session), opaque_token::read(TokenPurpose::Terminal, &secret.to_owned().into())?))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
