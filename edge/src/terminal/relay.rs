//! Joins a user's connection at one replica with the agent's stream at another, over the bus.
//!
//! All replicas subscribe to one subject. The replica that has the user publishes a hello there, with the session, a name for the link and
//! a reply address; the replica that has the session's stream answers; without an answer there is no stream. A new stream is announced
//! there, so that waiting replicas search again. From then on both send what an agent and a user exchange, sealed ([`super::seal`]), each
//! on a subject of the link's own, and periodic keep-alives. The sender of a hello must confirm the answer before it is joined: a replayed
//! hello cannot. The session, both replicas and the link are part of every seal: a hello or a message that is redirected to another session
//! does not open there.

use super::relay_encryption::{ClusterSecret, LinkScope, MessageOpener, MessageSealer};
use super::{AgentEnd, Link, Parts, QUEUE, Terminals};
use domain::TerminalSessionId;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use secrecy::SecretSlice;
use serde::{Deserialize, Serialize};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use uuid::Uuid;
use wire::terminal::{KEEPALIVE_SECONDS, SILENCE_TIMEOUT_SECONDS, TerminalCommand, TerminalEvent};

/// A message from the bus.
pub struct BusMessage {
    pub payload: Vec<u8>,
    /// Where an answer is waited for.
    pub reply: Option<String>,
}

/// What is needed of the bus: core subjects, which store nothing.
pub trait TerminalBus: Send + Sync + 'static {
    /// Whether it left.
    fn publish(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, bool>;
    /// The reply to a request; `None` where there is none.
    fn request(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, Option<Vec<u8>>>;
    /// Subscribed when this returns. `None`: there is no connection.
    fn subscribe(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, BusMessage>>>;
    /// A subject that this member alone may listen to.
    fn inbox(&self, name: &str) -> String;
}

/// The subject on which replicas learn of each other's streams. One subscription per process: one per session would cost a queue each.
const STREAMS: &str = "gpuaas.terminal.streams";

/// A message on [`STREAMS`] begins with the session, the replica that sent it, and its kind. After [`ANNOUNCEMENT`] a sealed
/// announcement follows; after [`HELLO`] the link's name and this, sealed.
#[derive(Serialize, Deserialize)]
struct Hello {
    answer_to: String,
    attachment: u32,
    from: Option<u64>,
}

/// The first byte of every message on a link.
const ALIVE: u8 = 0;
const MESSAGE: u8 = 1;
const CLOSED: u8 = 2;

/// The kind of a message on [`STREAMS`].
const ANNOUNCEMENT: u8 = 1;
const HELLO: u8 = 2;

const NAME_LEN: usize = 16;
/// Hellos that are answered at once. A hello over the bound is dropped, and its sender retries.
const MAX_PENDING_HELLOS: usize = 1024;
/// How long the sender of an answered hello may take to confirm.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a link whose stream is gone may take to flush the rest.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
const RESUBSCRIBE_DELAY: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(super) struct Relay {
    bus: Arc<dyn TerminalBus>,
    secret: ClusterSecret,
    /// This process's name, by which it recognizes its own messages.
    name: u128,
    pending_hellos: Arc<Semaphore>,
}

fn link_subject(link: u128) -> String {
    format!("gpuaas.terminal.link.{link:032x}")
}

impl Relay {
    pub(super) fn new(bus: Arc<dyn TerminalBus>, secret: SecretSlice<u8>) -> Self {
        Self {
            bus,
            secret: ClusterSecret::new(secret),
            name: rand::random(),
            pending_hellos: Arc::new(Semaphore::new(MAX_PENDING_HELLOS)),
        }
    }

    // ---- Where the stream is ----

    /// Lets users of other replicas reach the streams of this one, and receives announcements of theirs, for as long as the terminals
    /// exist.
    pub(super) fn listen(&self, terminals: Weak<Parts>) {
        let relay = self.clone();
        tokio::spawn(async move {
            loop {
                if let Some(mut all) = relay.bus.subscribe(STREAMS.to_owned()).await {
                    while let Some(received) = all.next().await {
                        let Some(parts) = terminals.upgrade() else { return };
                        relay.receive(&Terminals(parts), received);
                    }
                }
                sleep(RESUBSCRIBE_DELAY).await;
            }
        });
    }

    /// Announces to the other replicas that the session's stream is here.
    pub(super) fn announce(&self, session: TerminalSessionId) {
        let Some(announcement) = self.secret.announcement(self.scope(session, 0)) else { return };
        let message = [self.header(session, ANNOUNCEMENT), announcement].concat();
        let bus = Arc::clone(&self.bus);
        tokio::spawn(async move { bus.publish(STREAMS.to_owned(), message).await });
    }

    fn receive(&self, terminals: &Terminals, received: BusMessage) {
        let Some((session, rest)) = received.payload.split_first_chunk::<NAME_LEN>() else { return };
        let Some((member, rest)) = rest.split_first_chunk::<NAME_LEN>() else { return };
        let Some((kind, rest)) = rest.split_first() else { return };
        let (session, member) = (Uuid::from_bytes(*session), u128::from_be_bytes(*member));
        if member == self.name {
            return;
        }
        match *kind {
            ANNOUNCEMENT if self.secret.is_announcement(LinkScope { session, member, link: 0 }, rest) => {
                terminals.wake(TerminalSessionId(session));
            }
            HELLO => {
                let Some(end) = terminals.end(TerminalSessionId(session)) else { return };
                let Some((link, sealed)) = rest.split_first_chunk::<NAME_LEN>() else { return };
                let scope = LinkScope { session, member, link: u128::from_be_bytes(*link) };
                let Ok(permit) = Arc::clone(&self.pending_hellos).try_acquire_owned() else { return };
                let (relay, sealed) = (self.clone(), sealed.to_vec());
                // An agent that reads nothing delays no other.
                tokio::spawn(async move {
                    relay.accept_hello(scope, &sealed, received.reply, &end).await;
                    drop(permit);
                });
            }
            _ => {}
        }
    }

    /// How a message on [`STREAMS`] begins.
    fn header(&self, session: TerminalSessionId, kind: u8) -> Vec<u8> {
        [session.0.as_bytes().as_slice(), &self.name.to_be_bytes(), &[kind]].concat()
    }

    const fn scope(&self, session: TerminalSessionId, link: u128) -> LinkScope {
        LinkScope { session: session.0, member: self.name, link }
    }

    async fn accept_hello(&self, scope: LinkScope, sealed: &[u8], reply: Option<String>, end: &Arc<AgentEnd>) {
        let link = scope.link;
        let (Some((frame, received_hello)), Some(reply)) = (self.secret.open_hello(scope, sealed), reply) else {
            return;
        };
        let Ok(hello) = strict_json::from_slice::<Hello>(&frame) else { return };
        if !end.can_join(hello.attachment) {
            return;
        }
        let Some(mut messages) = self.bus.subscribe(link_subject(link)).await else { return };
        let Some((answer, sealing, mut opening)) = received_hello.seal_answer(self.name) else { return };
        if !self.bus.publish(reply, answer).await || !is_confirmed(&mut messages, &mut opening).await {
            return;
        }
        let mut link_sender = LinkSender { bus: Arc::clone(&self.bus), subject: hello.answer_to, sealing };
        let Some(joined) = end.join(hello.attachment, hello.from).await else {
            link_sender.send(&[CLOSED]).await;
            return;
        };
        let Link { up, down, _held: held, .. } = joined;
        let channel = LinkChannel { link_sender, opening };
        let gone = end.gone.clone();
        tokio::spawn(async move {
            let mut channel =
                pin!(channel.run(messages, up, |up| up.encode(), down, |bytes| TerminalCommand::decode(bytes).ok()));
            tokio::select! {
                () = &mut channel => {}
                // The last message is still sent, and that it was the last.
                () = gone.cancelled() => drop(timeout(DRAIN_TIMEOUT, channel).await),
            }
            drop(held);
        });
    }

    // ---- Where the user is ----

    /// Searches the other replicas for the session's agent. `None` where none has it.
    pub(super) async fn connect(&self, session: TerminalSessionId, attachment: u32, from: Option<u64>) -> Option<Link> {
        let link: u128 = rand::random();
        let answer_to = self.bus.inbox(&format!("terminal.{link:032x}"));
        let messages = self.bus.subscribe(answer_to.clone()).await?;
        let hello = serde_json::to_vec(&Hello { answer_to, attachment, from }).ok()?;
        let (sent_hello, hello) = self.secret.hello(self.scope(session, link), &hello)?;
        let mut payload = self.header(session, HELLO);
        payload.extend(link.to_be_bytes());
        payload.extend(hello);
        let answer = self.bus.request(STREAMS.to_owned(), payload).await?;
        let (sealing, opening) = sent_hello.open_answer(&answer)?;
        let mut link_sender = LinkSender { bus: Arc::clone(&self.bus), subject: link_subject(link), sealing };
        if !link_sender.send(&[ALIVE]).await {
            return None;
        }
        let (up, receiver) = mpsc::channel(QUEUE);
        let (sender, down) = mpsc::channel(QUEUE);
        let channel = LinkChannel { link_sender, opening };
        tokio::spawn(
            channel
                .run(
                    messages,
                    down,
                    |down: &TerminalCommand| down.encode(),
                    up,
                    |bytes| TerminalEvent::decode(bytes).ok(),
                )
                .boxed(),
        );
        Some(Link { attachment, up: receiver, down: sender, _held: None })
    }
}

/// Whether the sender of the hello confirms under the derived keys.
async fn is_confirmed(messages: &mut BoxStream<'static, BusMessage>, opening: &mut MessageOpener) -> bool {
    let first = timeout(CONFIRMATION_TIMEOUT, messages.next()).await.ok().flatten();
    first.and_then(|received| opening.open(&received.payload)).is_some_and(|plain| plain == [ALIVE])
}

/// The sending side of a link.
struct LinkSender {
    bus: Arc<dyn TerminalBus>,
    /// Where the other side listens.
    subject: String,
    sealing: MessageSealer,
}

impl LinkSender {
    /// Whether it left.
    async fn send(&mut self, frame: &[u8]) -> bool {
        let Some(sealed) = self.sealing.seal(frame) else { return false };
        self.bus.publish(self.subject.clone(), sealed).await
    }
}

/// One side of a link.
struct LinkChannel {
    link_sender: LinkSender,
    opening: MessageOpener,
}

impl LinkChannel {
    /// Carries messages until either side detaches, is silent for too long, or sends a message out of sequence.
    async fn run<Outgoing: Send, Incoming: Send>(
        self,
        mut messages: BoxStream<'static, BusMessage>,
        mut outgoing: mpsc::Receiver<Outgoing>,
        encode: impl Fn(&Outgoing) -> Vec<u8> + Send,
        incoming: mpsc::Sender<Incoming>,
        decode: impl Fn(&[u8]) -> Option<Incoming> + Send,
    ) {
        let Self { mut link_sender, mut opening } = self;
        let receiving = async {
            let silent_after = Duration::from_secs(SILENCE_TIMEOUT_SECONDS);
            let mut silent_at = Instant::now() + silent_after;
            loop {
                let received = tokio::select! {
                    received = messages.next() => received,
                    () = sleep_until(silent_at) => return,
                };
                silent_at = Instant::now() + silent_after;
                let Some(plain) = received.and_then(|received| opening.open(&received.payload)) else { return };
                match plain.split_first() {
                    Some((&ALIVE, _)) => {}
                    Some((&MESSAGE, message)) => {
                        let Some(item) = decode(message) else { return };
                        if incoming.send(item).await.is_err() {
                            return;
                        }
                        silent_at = Instant::now() + silent_after;
                    }
                    Some(_) | None => return,
                }
            }
        };
        let sending = async {
            let mut heartbeat = interval(Duration::from_secs(KEEPALIVE_SECONDS));
            heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let frame = tokio::select! {
                    item = outgoing.recv() => match item {
                        Some(item) => framed(MESSAGE, &encode(&item)),
                        None => return,
                    },
                    _ = heartbeat.tick() => vec![ALIVE],
                };
                if !link_sender.send(&frame).await {
                    return;
                }
            }
        };
        tokio::select! {
            () = receiving => {}
            () = sending => {}
        }
        link_sender.send(&[CLOSED]).await;
    }
}

fn framed(kind: u8, message: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(1 + message.len());
    frame.push(kind);
    frame.extend_from_slice(message);
    frame
}
