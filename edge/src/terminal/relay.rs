//! Joins a user's connection at one replica with the agent's stream at another, over the bus.
//!
//! All replicas hear each other on one subject. Whoever has the user says hello there, with the session, a name for the link and where to
//! answer; whoever has the session's stream answers; no answer, no stream. A stream that comes is announced there, so that who looks for
//! it looks again. From then on both say what an agent and a user say to each other, sealed ([`super::seal`]), each on a subject of the
//! link's own, and now and then that they are there. Whoever says hello goes on with that, and only then is joined: who repeats a hello
//! that was overheard cannot. The session, both replicas and the link are part of every seal: a hello or a message that is redirected to
//! another session does not open there.

use super::seal::{Opening, Scope, Sealing, Shared};
use super::{End, Link, Parts, QUEUE, Terminals};
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
use wire::terminal::{Down, SAYS_EVERY_SECONDS, SILENT_AFTER_SECONDS, Up};

/// A message from the bus.
pub struct Heard {
    pub payload: Vec<u8>,
    /// Where an answer is waited for.
    pub reply: Option<String>,
}

/// What is needed of the bus: core subjects, where nothing is kept.
pub trait Bus: Send + Sync + 'static {
    /// Whether it left.
    fn publish(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, bool>;
    /// What somebody answered; `None` where nobody did.
    fn request(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, Option<Vec<u8>>>;
    /// Heard from when this returns. `None`: there is no connection.
    fn subscribe(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Heard>>>;
    /// A subject that this member alone may listen to.
    fn inbox(&self, name: &str) -> String;
}

/// Where replicas hear of each other's streams. One subscription a process: one a session would cost each of them a queue.
const STREAMS: &str = "gpuaas.terminal.streams";

/// A message on [`STREAMS`] begins with the session, the replica that sent it, and its kind. After [`ANNOUNCEMENT`] a sealed
/// announcement follows; after [`HELLO`] the link's name and this, sealed.
#[derive(Serialize, Deserialize)]
struct Hello {
    answer_to: String,
    attachment: u32,
    from: Option<u64>,
}

/// The first byte of everything that is said on a link.
const ALIVE: u8 = 0;
const MESSAGE: u8 = 1;
const PARTED: u8 = 2;

/// What a message on [`STREAMS`] is.
const ANNOUNCEMENT: u8 = 1;
const HELLO: u8 = 2;

const NAME: usize = 16;
/// Hellos that are being answered at once. A hello over it is dropped, and its sender looks again.
const WELCOMES: usize = 1024;
/// How long whoever was answered may take to go on.
const GOES_ON_WITHIN: Duration = Duration::from_secs(5);
/// How long a link whose stream is gone may take to say the rest.
const PARTS_WITHIN: Duration = Duration::from_secs(2);
const SUBSCRIBES_AGAIN_AFTER: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(super) struct Relay {
    bus: Arc<dyn Bus>,
    shared: Shared,
    /// This process's, by which it knows its own words when it hears them.
    name: u128,
    welcomes: Arc<Semaphore>,
}

fn link_subject(link: u128) -> String {
    format!("gpuaas.terminal.link.{link:032x}")
}

impl Relay {
    pub(super) fn new(bus: Arc<dyn Bus>, secret: SecretSlice<u8>) -> Self {
        Self { bus, shared: Shared::new(secret), name: rand::random(), welcomes: Arc::new(Semaphore::new(WELCOMES)) }
    }

    // ---- Where the stream is ----

    /// Lets users of other replicas reach the streams that are here, and hears of those that come there, for as long as there are any.
    pub(super) fn listen(&self, terminals: Weak<Parts>) {
        let relay = self.clone();
        tokio::spawn(async move {
            loop {
                if let Some(mut all) = relay.bus.subscribe(STREAMS.to_owned()).await {
                    while let Some(heard) = all.next().await {
                        let Some(parts) = terminals.upgrade() else { return };
                        relay.hear(&Terminals(parts), heard);
                    }
                }
                sleep(SUBSCRIBES_AGAIN_AFTER).await;
            }
        });
    }

    /// Tells the other replicas that the session's stream is here.
    pub(super) fn announce(&self, session: TerminalSessionId) {
        let Some(announcement) = self.shared.announcement(self.scope(session, 0)) else { return };
        let message = [self.beginning(session, ANNOUNCEMENT), announcement].concat();
        let bus = Arc::clone(&self.bus);
        tokio::spawn(async move { bus.publish(STREAMS.to_owned(), message).await });
    }

    fn hear(&self, terminals: &Terminals, heard: Heard) {
        let Some((session, rest)) = heard.payload.split_first_chunk::<NAME>() else { return };
        let Some((member, rest)) = rest.split_first_chunk::<NAME>() else { return };
        let Some((kind, rest)) = rest.split_first() else { return };
        let (session, member) = (Uuid::from_bytes(*session), u128::from_be_bytes(*member));
        if member == self.name {
            return;
        }
        match *kind {
            ANNOUNCEMENT if self.shared.is_announcement(Scope { session, member, link: 0 }, rest) => {
                terminals.wake(TerminalSessionId(session));
            }
            HELLO => {
                let Some(end) = terminals.end(TerminalSessionId(session)) else { return };
                let Some((link, sealed)) = rest.split_first_chunk::<NAME>() else { return };
                let scope = Scope { session, member, link: u128::from_be_bytes(*link) };
                let Ok(place) = Arc::clone(&self.welcomes).try_acquire_owned() else { return };
                let (relay, sealed) = (self.clone(), sealed.to_vec());
                // An agent that takes nothing holds nobody else up.
                tokio::spawn(async move {
                    relay.welcome(scope, &sealed, heard.reply, &end).await;
                    drop(place);
                });
            }
            _ => {}
        }
    }

    /// How a message on [`STREAMS`] begins.
    fn beginning(&self, session: TerminalSessionId, kind: u8) -> Vec<u8> {
        [session.0.as_bytes().as_slice(), &self.name.to_be_bytes(), &[kind]].concat()
    }

    const fn scope(&self, session: TerminalSessionId, link: u128) -> Scope {
        Scope { session: session.0, member: self.name, link }
    }

    async fn welcome(&self, scope: Scope, sealed: &[u8], reply: Option<String>, end: &Arc<End>) {
        let link = scope.link;
        let (Some((words, asked)), Some(reply)) = (self.shared.hear_hello(scope, sealed), reply) else { return };
        let Ok(hello) = serde_json::from_slice::<Hello>(&words) else { return };
        if !end.admits(hello.attachment) {
            return;
        }
        let Some(mut messages) = self.bus.subscribe(link_subject(link)).await else { return };
        let Some((answer, sealing, mut opening)) = asked.answer(self.name) else { return };
        if !self.bus.publish(reply, answer).await || !goes_on(&mut messages, &mut opening).await {
            return;
        }
        let mut mouth = Mouth { bus: Arc::clone(&self.bus), subject: hello.answer_to, sealing };
        let Some(joined) = end.join(hello.attachment, hello.from).await else {
            mouth.say(&[PARTED]).await;
            return;
        };
        let Link { up, down, _held: held, .. } = joined;
        let talk = Talk { mouth, opening };
        let gone = end.gone.clone();
        tokio::spawn(async move {
            let mut talk = pin!(talk.run(messages, up, |up| up.encode(), down, |bytes| Down::decode(bytes).ok()));
            tokio::select! {
                () = &mut talk => {}
                // What was said last still goes out, and that it was the last.
                () = gone.cancelled() => drop(timeout(PARTS_WITHIN, talk).await),
            }
            drop(held);
        });
    }

    // ---- Where the user is ----

    /// Looks for the session's agent at the other replicas. `None` where none has it.
    pub(super) async fn reach(&self, session: TerminalSessionId, attachment: u32, from: Option<u64>) -> Option<Link> {
        let link: u128 = rand::random();
        let answer_to = self.bus.inbox(&format!("terminal.{link:032x}"));
        let messages = self.bus.subscribe(answer_to.clone()).await?;
        let hello = serde_json::to_vec(&Hello { answer_to, attachment, from }).ok()?;
        let (asking, hello) = self.shared.hello(self.scope(session, link), &hello)?;
        let mut payload = self.beginning(session, HELLO);
        payload.extend(link.to_be_bytes());
        payload.extend(hello);
        let answer = self.bus.request(STREAMS.to_owned(), payload).await?;
        let (sealing, opening) = asking.answered(&answer)?;
        let mut mouth = Mouth { bus: Arc::clone(&self.bus), subject: link_subject(link), sealing };
        if !mouth.say(&[ALIVE]).await {
            return None;
        }
        let (up, receiver) = mpsc::channel(QUEUE);
        let (sender, down) = mpsc::channel(QUEUE);
        let talk = Talk { mouth, opening };
        tokio::spawn(talk.run(messages, down, |down: &Down| down.encode(), up, |bytes| Up::decode(bytes).ok()).boxed());
        Some(Link { attachment, up: receiver, down: sender, _held: None })
    }
}

/// Whether the one who was answered says something under the keys that came of it.
async fn goes_on(messages: &mut BoxStream<'static, Heard>, opening: &mut Opening) -> bool {
    let first = timeout(GOES_ON_WITHIN, messages.next()).await.ok().flatten();
    first.and_then(|heard| opening.open(&heard.payload)).is_some_and(|plain| plain == [ALIVE])
}

/// What says something on a link.
struct Mouth {
    bus: Arc<dyn Bus>,
    /// Where the other side listens.
    subject: String,
    sealing: Sealing,
}

impl Mouth {
    /// Whether it left.
    async fn say(&mut self, words: &[u8]) -> bool {
        let Some(sealed) = self.sealing.seal(words) else { return false };
        self.bus.publish(self.subject.clone(), sealed).await
    }
}

/// One side of a link.
struct Talk {
    mouth: Mouth,
    opening: Opening,
}

impl Talk {
    /// Carries messages until either side parts, says nothing for too long, or says something that was not to come next.
    async fn run<Said: Send, Told: Send>(
        self,
        mut messages: BoxStream<'static, Heard>,
        mut say: mpsc::Receiver<Said>,
        encode: impl Fn(&Said) -> Vec<u8> + Send,
        tell: mpsc::Sender<Told>,
        decode: impl Fn(&[u8]) -> Option<Told> + Send,
    ) {
        let Self { mut mouth, mut opening } = self;
        let hear = async {
            let silent_after = Duration::from_secs(SILENT_AFTER_SECONDS);
            let mut silent_at = Instant::now() + silent_after;
            loop {
                let heard = tokio::select! {
                    heard = messages.next() => heard,
                    () = sleep_until(silent_at) => return,
                };
                silent_at = Instant::now() + silent_after;
                let Some(plain) = heard.and_then(|heard| opening.open(&heard.payload)) else { return };
                match plain.split_first() {
                    Some((&ALIVE, _)) => {}
                    Some((&MESSAGE, message)) => {
                        let Some(told) = decode(message) else { return };
                        if tell.send(told).await.is_err() {
                            return;
                        }
                        silent_at = Instant::now() + silent_after;
                    }
                    Some(_) | None => return,
                }
            }
        };
        let speak = async {
            let mut beat = interval(Duration::from_secs(SAYS_EVERY_SECONDS));
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let words = tokio::select! {
                    said = say.recv() => match said {
                        Some(said) => joined(MESSAGE, &encode(&said)),
                        None => return,
                    },
                    _ = beat.tick() => vec![ALIVE],
                };
                if !mouth.say(&words).await {
                    return;
                }
            }
        };
        tokio::select! {
            () = hear => {}
            () = speak => {}
        }
        mouth.say(&[PARTED]).await;
    }
}

fn joined(kind: u8, message: &[u8]) -> Vec<u8> {
    let mut words = Vec::with_capacity(1 + message.len());
    words.push(kind);
    words.extend_from_slice(message);
    words
}
