//! The messages between members: wake-ups for long polls, heartbeats, events, notifications and terminals. Commands for shards are in
//! [`super::command_forwarding`]. Every message of a member is authenticated ([`super::authentication`]); terminals' messages are sealed.

use super::ClusterView;
use super::authentication::{HEADER, MacInput, MemberAuthenticator, MessageOrigin, MessagePurpose};
use super::command_forwarding::PendingRequests;
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

/// How long the replica with a terminal's stream may take to answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// A read of the ownership table that is no older is not repeated for an owner that did not answer.
const VIEW_REUSE: Duration = Duration::from_millis(50);

/// How long a broadcast may take to leave.
const PUBLISH_TIMEOUT: Duration = Duration::from_millis(100);

/// This member's connection to the others.
#[derive(Clone)]
pub struct Bus {
    client: Client,
    /// The prefix of this member's own subjects.
    inbox: String,
    pub(super) members: Arc<MemberAuthenticator>,
    pub(super) view: Arc<ClusterView>,
    pub(super) requests: Arc<PendingRequests>,
    /// Notified when the ownership table is to be read at once.
    read_ownership: Arc<Notify>,
    stream_copies: usize,
}

/// A message to all members, with its sender where it carries one.
pub type BroadcastMessage = (Option<MemberId>, async_nats::Message);

/// What every replica is to do about a node or a terminal session: wake its poll, or close its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerSignal {
    Wake(NodeId),
    Close(NodeId),
    Terminal(TerminalSessionId),
}

impl Bus {
    /// Over the connection of a member with this inbox.
    #[must_use]
    pub fn new(
        client: Client,
        inbox: String,
        members: Arc<MemberAuthenticator>,
        view: Arc<ClusterView>,
        read_ownership: Arc<Notify>,
    ) -> Self {
        let prefix = format!("{inbox}.answers.{}", view.me.id.0.simple());
        Self {
            client,
            inbox,
            members,
            view,
            requests: Arc::new(PendingRequests::new(prefix)),
            read_ownership,
            stream_copies: 1,
        }
    }

    /// Streams have so many copies; without this, one.
    #[must_use]
    pub fn with_stream_copies(self, stream_copies: usize) -> Self {
        Self { stream_copies, ..self }
    }

    /// The copies of each stream.
    #[must_use]
    pub const fn stream_copies(&self) -> usize {
        self.stream_copies
    }

    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    /// A subject for answers that only this process's credentials may subscribe to.
    pub(super) fn new_inbox(&self) -> String {
        self.client.new_inbox()
    }

    /// Adds this member's stamp. The answer is bound to the returned tag; `None` where there is no key.
    pub(super) fn stamp(
        &self,
        message: &MacInput<'_>,
        recipient: Option<MemberId>,
        headers: &mut HeaderMap,
    ) -> Option<[u8; 32]> {
        let (stamp, tag) = self.members.stamp(message, recipient)?;
        headers.insert(HEADER, stamp);
        Some(tag)
    }

    /// The origin of a message; `None` where it is not authentic.
    pub(super) fn authenticate(&self, purpose: MessagePurpose, message: &async_nats::Message) -> Option<MessageOrigin> {
        let reply = match purpose {
            MessagePurpose::Request => message.reply.as_deref(),
            // JetStream puts the subject of the acknowledgement there.
            MessagePurpose::Answer { .. } | MessagePurpose::Notice | MessagePurpose::Event => None,
        };
        let checked = MacInput { purpose, subject: &message.subject, reply, payload: &message.payload };
        let header = message.headers.as_ref().and_then(|headers| headers.get(HEADER)).map(|value| value.as_str());
        self.members.check(&checked, header).ok()
    }

    pub(super) fn is_authentic(&self, purpose: MessagePurpose, message: &async_nats::Message) -> bool {
        self.authenticate(purpose, message).is_some()
    }

    /// Adds this member's stamp to an event for `subject`.
    pub fn stamp_event(&self, subject: &str, payload: &str, headers: &mut HeaderMap) {
        let event = MacInput { purpose: MessagePurpose::Event, subject, reply: None, payload: payload.as_bytes() };
        self.stamp(&event, None, headers);
    }

    /// Waits for this process's first heartbeat. Before it the age of an event is unknown, and [`Bus::is_members_event`] refuses every one.
    pub async fn first_heartbeat(&self) {
        self.view.clock.first_measurement().await;
    }

    /// Whether a member has published the event.
    #[must_use]
    pub fn is_members_event(&self, message: &async_nats::Message) -> bool {
        self.is_authentic(MessagePurpose::Event, message)
    }

    /// The events that members publish on a subject.
    ///
    /// # Errors
    /// Where the connection is closed for good.
    pub async fn events(&self, subject: &'static str) -> anyhow::Result<BoxStream<'static, ()>> {
        let (bus, events) = (self.clone(), self.client.subscribe(subject).await?);
        Ok(events.filter_map(move |message| std::future::ready(bus.is_members_event(&message).then_some(()))).boxed())
    }

    /// The broadcasts of members on a subject, with the sender where the message carries it.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn broadcasts(
        &self,
        subject: impl Into<Subject>,
    ) -> anyhow::Result<BoxStream<'static, BroadcastMessage>> {
        let (bus, messages) = (self.clone(), self.client.subscribe(subject.into()).await?);
        let origin = move |message: async_nats::Message| {
            let sender = bus.authenticate(MessagePurpose::Notice, &message).map(|origin| match origin {
                MessageOrigin::Stamped(stamp) => Some(stamp.sender),
                MessageOrigin::OfEarlierRelease => None,
            });
            std::future::ready(sender.map(|sender| (sender, message)))
        };
        Ok(messages.filter_map(origin).boxed())
    }

    /// Reduces what is stored of members that are gone to what refuses their old messages. To be called periodically.
    pub fn compact(&self) {
        self.members.compact();
    }

    /// Requests a read of the ownership table, since another process than the addressed one owns the shard, or none; not where the last
    /// read is recent.
    pub(super) fn request_ownership_read(&self) {
        if self.view.is_older_than(VIEW_REUSE) {
            self.read_ownership.notify_one();
        }
    }

    /// Sends a signal to the other replicas.
    pub async fn send_signal(&self, signal: PeerSignal) {
        let (subject, id) = match signal {
            PeerSignal::Wake(node) => (NODE_WAKE, node.0),
            PeerSignal::Close(node) => (NODE_CLOSE, node.0),
            PeerSignal::Terminal(session) => (TERMINAL_WAKE, session.0),
        };
        self.notify(subject, None, HeaderMap::new(), id.as_bytes().to_vec()).await;
    }

    /// Acts on the signals of the other replicas.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn on_signals(&self, act: impl Fn(PeerSignal)) -> anyhow::Result<()> {
        let of_nodes = self.broadcasts("gpuaas.node.*").await?;
        let of_terminals = self.broadcasts(TERMINAL_WAKE).await?;
        let mut messages = futures::stream::select(of_nodes, of_terminals);
        while let Some((sender, message)) = messages.next().await {
            let Ok(id) = uuid::Uuid::from_slice(&message.payload) else { continue };
            // This member has acted on its own signals already.
            if sender == Some(self.view.me.id) {
                continue;
            }
            match message.subject.as_str() {
                NODE_WAKE => act(PeerSignal::Wake(NodeId(id))),
                NODE_CLOSE => act(PeerSignal::Close(NodeId(id))),
                TERMINAL_WAKE => act(PeerSignal::Terminal(TerminalSessionId(id))),
                _ => {}
            }
        }
        anyhow::bail!("the subscription ended")
    }

    /// Notifies all members to fetch the identity provider's keys.
    pub async fn provider_keys_changed(&self) {
        self.notify(PROVIDER_KEYS, None, HeaderMap::new(), Vec::new()).await;
    }

    /// Acts on [`Self::provider_keys_changed`]. This member receives its own message, too.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn on_provider_keys_changed(&self, act: impl Fn()) -> anyhow::Result<()> {
        let mut messages = self.broadcasts(PROVIDER_KEYS).await?;
        while messages.next().await.is_some() {
            act();
        }
        anyhow::bail!("the subscription ended")
    }

    /// Publishes a message; returns whether it was sent. Delivery is best effort: a member that must know reads Postgres.
    pub async fn notify(
        &self,
        subject: impl Into<Subject>,
        recipient: Option<MemberId>,
        mut headers: HeaderMap,
        payload: Vec<u8>,
    ) -> bool {
        let subject = subject.into();
        // Without a connection the client would buffer the message, and block the caller once its buffer is full.
        if !self.is_connected() {
            return false;
        }
        let message = MacInput { purpose: MessagePurpose::Notice, subject: &subject, reply: None, payload: &payload };
        self.stamp(&message, recipient, &mut headers);
        let sent = tokio::time::timeout(
            PUBLISH_TIMEOUT,
            self.client.publish_with_headers(subject.clone(), headers, payload.into()),
        );
        let left = matches!(sent.await, Ok(Ok(())));
        if !left {
            tracing::debug!(%subject, "could not publish");
        }
        left
    }

    /// Sends the heartbeat of `member` over NATS.
    pub async fn send_heartbeat(&self, member: MemberId) {
        self.notify("gpuaas.cluster.beat", None, HeaderMap::new(), member.0.as_bytes().to_vec()).await;
    }

    /// Notifies the others to read the ownership table and the marks of parked entities now, before their next round.
    pub async fn ownership_changed(&self) {
        self.notify("gpuaas.cluster.changed", None, HeaderMap::new(), Vec::new()).await;
    }

    /// Sends the rate cells of handed-over shards to their new owner `heir`.
    pub async fn send_rate_cells(&self, heir: MemberId, cells: Vec<u8>) {
        self.notify(rate_cells_subject(heir), Some(heir), HeaderMap::new(), cells).await;
    }

    /// The rate cells that others send to the member `me`.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn rate_cells_for(&self, me: MemberId) -> anyhow::Result<BoxStream<'static, BroadcastMessage>> {
        self.broadcasts(rate_cells_subject(me)).await
    }
}

/// The messages between the two ends of a terminal at two replicas. They are not stored: where one is lost, the link ends.
impl relay::TerminalBus for Bus {
    fn publish(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, bool> {
        async move { self.is_connected() && self.client.publish(subject, payload.into()).await.is_ok() }.boxed()
    }

    fn request(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, Option<Vec<u8>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let request = Request::new().payload(payload.into()).timeout(Some(REPLY_TIMEOUT));
            self.client.send_request(subject, request).await.ok().map(|answer| answer.payload.to_vec())
        }
        .boxed()
    }

    fn subscribe(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, relay::BusMessage>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let messages = self.client.subscribe(subject).await.ok()?;
            let received = |message: async_nats::Message| relay::BusMessage {
                payload: message.payload.to_vec(),
                reply: message.reply.map(|reply| reply.to_string()),
            };
            Some(messages.map(received).boxed())
        }
        .boxed()
    }

    fn inbox(&self, name: &str) -> String {
        format!("{}.{name}", self.inbox)
    }
}

/// The notifications for the subscribers of this replica. They are not stored.
impl notifications::NotificationBus for Bus {
    fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let messages = self.broadcasts(subject).await.ok()?;
            // The subscription is confirmed only after the server has it.
            self.client.flush().await.ok()?;
            Some(messages.map(|(_, message)| message.payload.to_vec()).boxed())
        }
        .boxed()
    }
}

fn rate_cells_subject(member: MemberId) -> String {
    format!("gpuaas.cells.{member}")
}
