//! The links between members: commands for shards, wakes for parked polls, beats, and questions to all.

use actors::Directory;
use actors::ports::{Remote, RemoteError};
use anyhow::Context;
use async_nats::client::RequestErrorKind;
use async_nats::{Client, ConnectOptions, Request, Subject};
use domain::{MemberId, NodeId, Shard, TerminalSessionId};
use edge::notifications;
use edge::terminal::relay;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use secrecy::{ExposeSecret, SecretString};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Commands from other members that are served at once, in one shard. More wait in the subscription, and above its bound NATS drops
/// them, which the asker sees as silence.
const AT_ONCE: usize = 256;

/// The header that names the sender.
const FROM: &str = "gpuaas-member";

const NODE_WAKE: &str = "gpuaas.node.wake";
const NODE_CLOSE: &str = "gpuaas.node.close";
const TERMINAL_WAKE: &str = "gpuaas.terminal.wake";

/// How long a replica that has a terminal's stream may take to say so.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// How long a word may take to leave.
const SAID_WITHIN: Duration = Duration::from_millis(100);

/// Whether [`Bus::connect`] can use this URL.
///
/// # Errors
/// Says what is wrong with it, without quoting it: it may hold a password.
pub fn check_url(url: &str) -> anyhow::Result<()> {
    url::Parts::parse(url).map(|_| ())
}

/// What a member says to the others.
#[derive(Clone)]
pub struct Bus {
    client: Client,
    name: String,
}

/// Something is to be done about a node or a terminal session on every replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nudge {
    Wake(NodeId),
    Close(NodeId),
    Terminal(TerminalSessionId),
}

impl Bus {
    /// Connects in the background: the control plane serves without NATS what it can.
    ///
    /// # Errors
    /// Where the URL or the CA file is unusable.
    pub async fn connect(url: &SecretString, ca: Option<&Path>, name: &str) -> anyhow::Result<Self> {
        let url = url::Parts::parse(url.expose_secret())?;
        let mut options = ConnectOptions::new()
            .name(name)
            // Answers come to inboxes of this member's own: its credentials admit no others.
            .custom_inbox_prefix(format!("_INBOX.{name}"))
            .retry_on_initial_connect()
            .ping_interval(Duration::from_secs(2))
            .connection_timeout(Duration::from_secs(3))
            .request_timeout(Some(Duration::from_secs(10)))
            .reconnect_delay_callback(|attempt| Duration::from_millis((50 << attempt.min(5)).min(1000)))
            .event_callback(|event| async move {
                match event {
                    async_nats::Event::Connected => tracing::info!("connected to NATS"),
                    async_nats::Event::Disconnected => tracing::warn!("lost the connection to NATS"),
                    other => tracing::warn!(event = %other, "NATS: {other}"),
                }
            });
        if let (Some(user), Some(password)) = (url.user, url.password) {
            options = options.user_and_password(user, password);
        }
        if let Some(ca) = ca {
            options = options.add_root_certificates(ca.to_owned()).require_tls(true);
        }
        let client = options.connect(url.server).await.context("NATS: the options are unusable")?;
        Ok(Self { client, name: name.to_owned() })
    }

    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Tells the other replicas.
    pub async fn nudge(&self, nudge: Nudge) {
        let (subject, id) = match nudge {
            Nudge::Wake(node) => (NODE_WAKE, node.0),
            Nudge::Close(node) => (NODE_CLOSE, node.0),
            Nudge::Terminal(session) => (TERMINAL_WAKE, session.0),
        };
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(FROM, self.name.as_str());
        self.say_with(subject, headers, id.as_bytes().to_vec()).await;
    }

    /// What the other replicas nudge.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn on_nudges(&self, act: impl Fn(Nudge)) -> anyhow::Result<()> {
        let of_nodes = self.client.subscribe("gpuaas.node.*").await?;
        let of_terminals = self.client.subscribe(TERMINAL_WAKE).await?;
        let mut messages = futures::stream::select(of_nodes, of_terminals);
        while let Some(message) = messages.next().await {
            let Ok(id) = uuid::Uuid::from_slice(&message.payload) else { continue };
            // What this one said itself it has done already.
            if message.headers.as_ref().and_then(|it| it.get(FROM)).is_some_and(|from| from.as_str() == self.name) {
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

    /// Tells all members to fetch the identity provider's keys.
    pub async fn provider_keys_changed(&self) {
        self.say("gpuaas.identity.keys", Vec::new()).await;
    }

    /// Hears that. This member hears itself, too.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn on_provider_keys_changed(&self, act: impl Fn()) -> anyhow::Result<()> {
        let mut messages = self.client.subscribe("gpuaas.identity.keys").await?;
        while messages.next().await.is_some() {
            act();
        }
        anyhow::bail!("the subscription ended")
    }

    pub(super) async fn say(&self, subject: &'static str, payload: Vec<u8>) {
        self.say_with(subject, async_nats::HeaderMap::new(), payload).await;
    }

    async fn say_with(&self, subject: impl Into<Subject>, headers: async_nats::HeaderMap, payload: Vec<u8>) {
        let subject = subject.into();
        // Best effort by nature: who must know reads Postgres. While there is no connection the client would keep what is said, and
        // at last keep us waiting.
        if !self.is_connected() {
            return;
        }
        let said = tokio::time::timeout(
            SAID_WITHIN,
            self.client.publish_with_headers(subject.clone(), headers, payload.into()),
        );
        if !matches!(said.await, Ok(Ok(()))) {
            tracing::debug!(%subject, "could not publish");
        }
    }

    /// Says over NATS that `member` lives.
    pub async fn beat(&self, member: MemberId) {
        self.say("gpuaas.cluster.beat", member.0.as_bytes().to_vec()).await;
    }

    /// Tells the others to read the shard table now instead of at their next turn.
    pub async fn ownership_changed(&self) {
        self.say("gpuaas.cluster.changed", Vec::new()).await;
    }

    /// Tells `heir` what the rate limits of its coming shards have counted.
    pub async fn hand_cells(&self, heir: MemberId, cells: Vec<u8>) {
        self.say_with(cells_of(heir), async_nats::HeaderMap::new(), cells).await;
    }

    /// What others tell this member so.
    ///
    /// # Errors
    /// Where the connection is gone for good.
    pub async fn cells_for(&self, me: MemberId) -> anyhow::Result<async_nats::Subscriber> {
        Ok(self.client.subscribe(cells_of(me)).await?)
    }

    /// Serves commands for `shard` until `until`, and then those that were sent before that was known. Where it ends before, `until` is
    /// cancelled.
    pub fn serve_shard(&self, shard: Shard, directory: Directory, until: CancellationToken) {
        let client = self.client.clone();
        let places = Arc::new(Semaphore::new(AT_ONCE));
        // Subscribed in a task of its own: without a connection this waits, and nothing else must.
        tokio::spawn(async move {
            // However it ends: it is seen by that token, and begun again.
            let _over = until.clone().drop_guard();
            let subscribed = tokio::select! {
                () = until.cancelled() => return,
                subscribed = client.subscribe(subject_of(shard)) => subscribed,
            };
            let mut commands = match subscribed {
                Ok(commands) => commands,
                Err(error) => {
                    return tracing::warn!(%error, %shard, "commands for the shard cannot be heard; trying again");
                }
            };
            let mut draining = false;
            loop {
                let message = tokio::select! {
                    () = until.cancelled(), if !draining => {
                        draining = true;
                        if commands.drain().await.is_err() {
                            break;
                        }
                        continue;
                    }
                    message = commands.next() => message,
                };
                let (Some(message), Ok(place)) = (message, Arc::clone(&places).acquire_owned().await) else { break };
                let Some(reply) = message.reply else { continue };
                let (client, directory) = (client.clone(), directory.clone());
                tokio::spawn(async move {
                    let answer = directory.serve(&message.payload).await;
                    if let Err(error) = client.publish(reply, answer.into()).await {
                        tracing::warn!(%error, "an answer could not be sent; the asker will ask again");
                    }
                    drop(place);
                });
            }
        });
    }
}

impl Remote for Bus {
    fn request(
        &self,
        shard: Shard,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        async move {
            if !self.is_connected() {
                return Err(RemoteError::Unreachable("there is no connection to NATS".to_owned()));
            }
            let request = Request::new().payload(payload.into()).timeout(Some(timeout));
            match self.client.send_request(subject_of(shard), request).await {
                Ok(message) => Ok(message.payload.to_vec()),
                Err(error) => Err(match error.kind() {
                    RequestErrorKind::NoResponders => RemoteError::NoResponders,
                    RequestErrorKind::TimedOut => RemoteError::TimedOut,
                    RequestErrorKind::InvalidSubject
                    | RequestErrorKind::MaxPayloadExceeded
                    | RequestErrorKind::Other => RemoteError::Unreachable(error.to_string()),
                }),
            }
        }
        .boxed()
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
        format!("_INBOX.{}.{name}", self.name)
    }
}

/// What is said to those who listen here. Nothing of it is kept.
impl notifications::Bus for Bus {
    fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>> {
        async move {
            if !self.is_connected() {
                return None;
            }
            let messages = self.client.subscribe(subject).await.ok()?;
            // Whoever is told that they listen does so: the server knows of it.
            self.client.flush().await.ok()?;
            Some(messages.map(|message| message.payload.to_vec()).boxed())
        }
        .boxed()
    }
}

fn cells_of(member: MemberId) -> String {
    format!("gpuaas.cells.{member}")
}

fn subject_of(shard: Shard) -> String {
    format!("gpuaas.shard.{shard}")
}

/// A NATS URL, apart: the client takes credentials by themselves, and they must not end in its log.
mod url {
    use anyhow::Context;

    pub(super) struct Parts {
        pub(super) server: String,
        pub(super) user: Option<String>,
        pub(super) password: Option<String>,
    }

    impl Parts {
        pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
            let mut url = reqwest::Url::parse(text)
                .context("SVC_NATS_URL is no URL; it must look like tls://user:password@nats.example:4222")?;
            if !["tls", "nats"].contains(&url.scheme()) || !url.has_host() {
                anyhow::bail!("SVC_NATS_URL must begin with tls:// or nats:// and name a host");
            }
            let user = Some(url.username()).filter(|user| !user.is_empty()).map(decoded).transpose()?;
            let password = url.password().map(decoded).transpose()?;
            if url.set_username("").is_err() || url.set_password(None).is_err() {
                anyhow::bail!("SVC_NATS_URL must begin with tls:// or nats:// and name a host");
            }
            Ok(Self { server: url.to_string(), user, password })
        }
    }

    /// A URL carries what it must not hold by itself as `%XX`.
    fn decoded(part: &str) -> anyhow::Result<String> {
        let text = percent_encoding::percent_decode_str(part).decode_utf8();
        Ok(text.context("SVC_NATS_URL holds credentials that are no UTF-8")?.into_owned())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn credentials_are_taken_out_of_the_url_as_they_were_meant() -> anyhow::Result<()> {
            let parts = Parts::parse("tls://replica%2D1:a%40b%3A%2Fc@nats.example:4222")?;
            assert_eq!(parts.server, "tls://nats.example:4222");
            assert_eq!((parts.user.as_deref(), parts.password.as_deref()), (Some("replica-1"), Some("a@b:/c")));
            assert!(Parts::parse("tls://a:%FF@nats.example").is_err());
            Ok(())
        }
    }
}
