//! The links between members: wakes for parked polls, heartbeats, events, notifications and terminals. Commands for shards are in
//! [`super::requests`]. Everything that a member sends is authenticated ([`super::authentication`]); terminals' messages are sealed.

use super::View;
use super::authentication::{Believed, HEADER, MemberAuthenticator, Message, Purpose};
use super::nats::inbox_of;
use super::requests::Requests;
use async_nats::{Client, HeaderMap, Request, Subject};
use domain::{MemberId, NodeId, TerminalSessionId};
use edge::notifications;
use edge::terminal::relay;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

const NODE_WAKE: &str = "gpuaas.node.wake";
const NODE_CLOSE: &str = "gpuaas.node.close";
const TERMINAL_WAKE: &str = "gpuaas.terminal.wake";
const PROVIDER_KEYS: &str = "gpuaas.identity.keys";

/// How long a replica that has a terminal's stream may take to say so.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// A look at the books that is no older is not repeated for an owner that did not answer.
const READ_JUST_NOW: Duration = Duration::from_millis(50);

/// How long a notice may take to leave.
const SENT_WITHIN: Duration = Duration::from_millis(100);

/// What a member sends to the others.
#[derive(Clone)]
pub struct Bus {
    client: Client,
    /// What the subjects of this member's own begin with.
    inbox: String,
    pub(super) members: Arc<MemberAuthenticator>,
    pub(super) view: Arc<View>,
    pub(super) requests: Arc<Requests>,
    /// Notified when the books should be read now.
    look: Arc<Notify>,
}

/// A message to all members, with its sender where it carries one.
pub type Notice = (Option<MemberId>, async_nats::Message);

/// Something is to be done about a node or a terminal session on every replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nudge {
    Wake(NodeId),
    Close(NodeId),
    Terminal(TerminalSessionId),
}

impl Bus {
    /// Over the connection of the member `name`.
    #[must_use]
    pub fn new(
        client: Client,
        name: &str,
        members: Arc<MemberAuthenticator>,
        view: Arc<View>,
        look: Arc<Notify>,
    ) -> Self {
        let inbox = inbox_of(name);
        let prefix = format!("{inbox}.answers.{}", view.me.id.0.simple());
        Self { client, inbox, members, view, requests: Arc::new(Requests::new(prefix)), look }
    }

    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    /// A subject for answers that only this process's credentials admit.
    pub(super) fn new_inbox(&self) -> String {
        self.client.new_inbox()
    }

    /// Adds this member's stamp. The answer is bound to what is returned; `None` where there is no key.
    pub(super) fn stamp(
        &self,
        message: &Message<'_>,
        recipient: Option<MemberId>,
        headers: &mut HeaderMap,
    ) -> Option<[u8; 32]> {
        let (stamp, tag) = self.members.stamp(message, recipient)?;
        headers.insert(HEADER, stamp);
        Some(tag)
    }

    /// The sender of a message; `None` where it is not believed to be a member's.
    pub(super) fn believed(&self, purpose: Purpose, message: &async_nats::Message) -> Option<Believed> {
        let reply = match purpose {
            Purpose::Request => message.reply.as_deref(),
            // JetStream puts a subject for the acknowledgement there.
            Purpose::Answer { .. } | Purpose::Notice | Purpose::Event => None,
        };
        let checked = Message { purpose, subject: &message.subject, reply, payload: &message.payload };
        let header = message.headers.as_ref().and_then(|headers| headers.get(HEADER)).map(|value| value.as_str());
        self.members.check(&checked, header).ok()
    }

    pub(super) fn is_believed(&self, purpose: Purpose, message: &async_nats::Message) -> bool {
        self.believed(purpose, message).is_some()
    }

    /// Adds this member's stamp to an event that is to be published on `subject`.
    pub fn stamp_event(&self, subject: &str, payload: &str, headers: &mut HeaderMap) {
        let event = Message { purpose: Purpose::Event, subject, reply: None, payload: payload.as_bytes() };
        self.stamp(&event, None, headers);
    }

    /// Whether a member published the event.
    #[must_use]
    pub fn is_members_event(&self, message: &async_nats::Message) -> bool {
        self.is_believed(Purpose::Event, message)
    }

    /// Events on a subject as they are published, by members alone.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn events(&self, subject: &'static str) -> anyhow::Result<BoxStream<'static, ()>> {
        let (bus, events) = (self.clone(), self.client.subscribe(subject).await?);
        Ok(events.filter_map(move |message| std::future::ready(bus.is_members_event(&message).then_some(()))).boxed())
    }

    /// What members send to all on a subject, with the sender where the message carries it.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn notices(&self, subject: impl Into<Subject>) -> anyhow::Result<BoxStream<'static, Notice>> {
        let (bus, messages) = (self.clone(), self.client.subscribe(subject.into()).await?);
        let believed = move |message: async_nats::Message| {
            let sender = bus.believed(Purpose::Notice, &message).map(|believed| match believed {
                Believed::Stamped(stamp) => Some(stamp.sender),
                Believed::OfEarlierRelease => None,
            });
            std::future::ready(sender.map(|sender| (sender, message)))
        };
        Ok(messages.filter_map(believed).boxed())
    }

    /// Keeps of members that are gone only what is needed to refuse what they sent. To be called now and then.
    pub fn shrink(&self) {
        self.members.shrink();
    }

    /// Another process than the one that was asked owns the shard, or none: the books say which, unless they were read just now.
    pub(super) fn look(&self) {
        if self.view.is_older_than(READ_JUST_NOW) {
            self.look.notify_one();
        }
    }

    /// Notifies the other replicas.
    pub async fn nudge(&self, nudge: Nudge) {
        let (subject, id) = match nudge {
            Nudge::Wake(node) => (NODE_WAKE, node.0),
            Nudge::Close(node) => (NODE_CLOSE, node.0),
            Nudge::Terminal(session) => (TERMINAL_WAKE, session.0),
        };
        self.notify(subject, None, HeaderMap::new(), id.as_bytes().to_vec()).await;
    }

    /// What the other replicas nudge.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn on_nudges(&self, act: impl Fn(Nudge)) -> anyhow::Result<()> {
        let of_nodes = self.notices("gpuaas.node.*").await?;
        let of_terminals = self.notices(TERMINAL_WAKE).await?;
        let mut messages = futures::stream::select(of_nodes, of_terminals);
        while let Some((sender, message)) = messages.next().await {
            let Ok(id) = uuid::Uuid::from_slice(&message.payload) else { continue };
            // What this one sent itself it has done already.
            if sender == Some(self.view.me.id) {
                continue;
            }
            match message.subject.as_str() {
                NODE_WAKE => act(Nudge::Wake(NodeId(id))),
                NODE_CLOSE => act(Nudge::Close(NodeId(id))),
                TERMINAL_WAKE => act(Nudge::Terminal(TerminalSessionId(id))),
                _ => {}
            }
        }
        anyhow::bail!("the subscription ended")
    }

    /// Notifies all members to fetch the identity provider's keys.
    pub async fn provider_keys_changed(&self) {
        self.notify(PROVIDER_KEYS, None, HeaderMap::new(), Vec::new()).await;
    }

    /// Acts on that. This member receives its own notice, too.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn on_provider_keys_changed(&self, act: impl Fn()) -> anyhow::Result<()> {
        let mut messages = self.notices(PROVIDER_KEYS).await?;
        while messages.next().await.is_some() {
            act();
        }
        anyhow::bail!("the subscription ended")
    }

    /// Whether it left. Best effort by nature: a member that must know reads Postgres.
    pub async fn notify(
        &self,
        subject: impl Into<Subject>,
        recipient: Option<MemberId>,
        mut headers: HeaderMap,
        payload: Vec<u8>,
    ) -> bool {
        let subject = subject.into();
        // While there is no connection the client would store the message, and at last make the caller wait.
        if !self.is_connected() {
            return false;
        }
        let message = Message { purpose: Purpose::Notice, subject: &subject, reply: None, payload: &payload };
        self.stamp(&message, recipient, &mut headers);
        let sent = tokio::time::timeout(
            SENT_WITHIN,
            self.client.publish_with_headers(subject.clone(), headers, payload.into()),
        );
        let left = matches!(sent.await, Ok(Ok(())));
        if !left {
            tracing::debug!(%subject, "could not publish");
        }
        left
    }

    /// Says over NATS that `member` lives.
    pub async fn beat(&self, member: MemberId) {
        self.notify("gpuaas.cluster.beat", None, HeaderMap::new(), member.0.as_bytes().to_vec()).await;
    }

    /// Notifies the others to read the shard table now instead of at their next turn.
    pub async fn ownership_changed(&self) {
        self.notify("gpuaas.cluster.changed", None, HeaderMap::new(), Vec::new()).await;
    }

    /// Hands to `heir` what the rate limits of its coming shards have counted.
    pub async fn hand_cells(&self, heir: MemberId, cells: Vec<u8>) {
        self.notify(cells_of(heir), Some(heir), HeaderMap::new(), cells).await;
    }

    /// What others hand to this member so.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn cells_for(&self, me: MemberId) -> anyhow::Result<BoxStream<'static, Notice>> {
        self.notices(cells_of(me)).await
    }
}

/// What the terminals' two ends at two replicas say to each other. Nothing of it is kept: where something is lost, the link ends.
impl relay::Bus for Bus {
    fn publish(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, bool> {
        async move { self.is_connected() && self.client.publish(subject, payload.into()).await.is_ok() }.boxed()
    }

    fn request(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, Option<Vec<u8>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let request = Request::new().payload(payload.into()).timeout(Some(ANSWERS_WITHIN));
            self.client.send_request(subject, request).await.ok().map(|answer| answer.payload.to_vec())
        }
        .boxed()
    }

    fn subscribe(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, relay::Heard>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let messages = self.client.subscribe(subject).await.ok()?;
            let heard = |message: async_nats::Message| relay::Heard {
                payload: message.payload.to_vec(),
                reply: message.reply.map(|reply| reply.to_string()),
            };
            Some(messages.map(heard).boxed())
        }
        .boxed()
    }

    fn inbox(&self, name: &str) -> String {
        format!("{}.{name}", self.inbox)
    }
}

/// What is said to those who listen here. Nothing of it is kept.
impl notifications::Bus for Bus {
    fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let messages = self.notices(subject).await.ok()?;
            // Whoever is told that they listen does so: the server knows of it.
            self.client.flush().await.ok()?;
            Some(messages.map(|(_, message)| message.payload.to_vec()).boxed())
        }
        .boxed()
    }
}

fn cells_of(member: MemberId) -> String {
    format!("gpuaas.cells.{member}")
}
