use super::*;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use relay::BusMessage;
use std::time::Duration;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use wire::terminal::ProgramExit;

const SESSION: TerminalSessionId = TerminalSessionId(Uuid::from_u128(5));

/// A bus in this process that records every message.
#[derive(Clone)]
struct FakeBus {
    messages: broadcast::Sender<(String, Vec<u8>, Option<String>)>,
    member: &'static str,
    cut: CancellationToken,
    /// Hellos for the first session arrive as hellos for the second: an attacker on the bus redirects them.
    redirect: Option<(TerminalSessionId, TerminalSessionId)>,
}

impl FakeBus {
    fn new() -> Self {
        Self { messages: broadcast::Sender::new(1024), member: "a", cut: CancellationToken::new(), redirect: None }
    }

    fn redirected(&self, payload: Vec<u8>) -> Vec<u8> {
        match self.redirect {
            Some((from, to)) if payload.starts_with(from.0.as_bytes()) => {
                [to.0.as_bytes().as_slice(), payload.get(16..).unwrap_or_default()].concat()
            }
            Some(_) | None => payload,
        }
    }
}

impl TerminalBus for FakeBus {
    fn publish(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, bool> {
        async move { !self.cut.is_cancelled() && self.messages.send((subject, payload, None)).is_ok() }.boxed()
    }

    fn request(&self, subject: String, payload: Vec<u8>) -> BoxFuture<'_, Option<Vec<u8>>> {
        async move {
            let reply = format!("reply.{}", Uuid::new_v4());
            let mut answers = self.subscribe(reply.clone()).await?;
            let _ = self.messages.send((subject, self.redirected(payload), Some(reply)));
            let answer = tokio::time::timeout(Duration::from_millis(300), answers.next()).await.ok()??;
            Some(answer.payload)
        }
        .boxed()
    }

    fn subscribe(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, BusMessage>>> {
        let messages = tokio_stream(self.messages.subscribe());
        let of_subject = messages.filter_map(move |(on, payload, reply)| {
            let renewed = (on == subject).then_some(BusMessage { payload, reply });
            async move { renewed }
        });
        async move { Some(of_subject.boxed()) }.boxed()
    }

    fn inbox(&self, name: &str) -> String {
        format!("inbox.{}.{name}", self.member)
    }
}

type RecordedMessage = (String, Vec<u8>, Option<String>);

fn tokio_stream(receiver: broadcast::Receiver<RecordedMessage>) -> BoxStream<'static, RecordedMessage> {
    futures::stream::unfold(receiver, |mut receiver| async move {
        let output = receiver.recv().await.ok()?;
        Some((output, receiver))
    })
    .boxed()
}

fn replica(room: &FakeBus, secret: u8) -> Terminals {
    Terminals::register(&Registry::new(), Some(Arc::new(room.clone())), vec![secret; 32].into()).unwrap()
}

/// An agent's stream at a replica.
fn stream_at(replica: &Terminals) -> (AgentStream, mpsc::Receiver<TerminalCommand>) {
    let (down, downs) = mpsc::channel(16);
    (replica.register_stream(SESSION, down), downs)
}

/// A replica listens from a moment after its beginning on.
async fn linked(replica: &Terminals, attachment: u32, from: Option<u64>) -> Link {
    for _ in 0..20 {
        if let Some(link) = replica.link(SESSION, attachment, from).await {
            return link;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no link");
}

fn output(attachment: u32, bytes: &[u8]) -> TerminalEvent {
    TerminalEvent::Output { attachment, position: 0, bytes: bytes.to_vec() }
}

#[tokio::test]
async fn two_ends_in_one_process_are_joined_without_a_bus() {
    let alone = Terminals::register(&Registry::new(), None, vec![1; 32].into()).unwrap();
    assert!(alone.link(SESSION, 1, None).await.is_none(), "there is no stream");
    let (stream, mut downs) = stream_at(&alone);
    let mut link = alone.link(SESSION, 1, Some(7)).await.unwrap();
    assert_eq!(downs.recv().await.unwrap(), TerminalCommand::Attach { attachment: 1, from: Some(7) });
    stream.deliver(output(1, b"hello")).await;
    assert_eq!(link.up.recv().await.unwrap(), output(1, b"hello"));
    drop(link);
    assert_eq!(downs.recv().await.unwrap(), TerminalCommand::Detach { attachment: 1 });
    drop(stream);
    assert!(alone.link(SESSION, 1, None).await.is_none(), "the stream is gone");
}

#[tokio::test]
async fn later_connection_replaces_an_earlier_one_and_never_the_reverse() {
    let alone = Terminals::register(&Registry::new(), None, vec![1; 32].into()).unwrap();
    let (stream, mut downs) = stream_at(&alone);
    let mut first = alone.link(SESSION, 1, None).await.unwrap();
    let mut second = alone.link(SESSION, 2, None).await.unwrap();
    assert!(first.up.recv().await.is_none(), "it is parted");
    assert!(alone.link(SESSION, 1, None).await.is_none());
    drop(first);
    stream.deliver(output(1, b"late")).await;
    stream.deliver(output(2, b"new")).await;
    assert_eq!(second.up.recv().await.unwrap(), output(2, b"new"));
    // A replaced user does not detach its successor.
    drop(second);
    let mut output = Vec::new();
    while let Ok(Some(down)) = tokio::time::timeout(Duration::from_millis(50), downs.recv()).await {
        output.push(down);
    }
    let attach = |attachment| TerminalCommand::Attach { attachment, from: None };
    assert_eq!(output, [attach(1), attach(2), TerminalCommand::Detach { attachment: 2 }]);
}

#[tokio::test]
async fn rejoined_connection_is_not_detached_by_its_own_delayed_detach() {
    let alone = Terminals::register(&Registry::new(), None, vec![1; 32].into()).unwrap();
    let (_stream, mut downs) = stream_at(&alone);
    drop(alone.link(SESSION, 1, None).await.unwrap());
    let _again = alone.link(SESSION, 1, Some(7)).await.unwrap();
    let mut output = Vec::new();
    while let Ok(Some(down)) = tokio::time::timeout(Duration::from_millis(50), downs.recv()).await {
        output.push(down);
    }
    assert_eq!(output.last(), Some(&TerminalCommand::Attach { attachment: 1, from: Some(7) }), "{output:?}");
}

#[tokio::test]
async fn user_and_agent_on_two_replicas_exchange_messages_that_the_bus_cannot_read() {
    let room = FakeBus::new();
    let mut received = room.messages.subscribe();
    let (here, there) = (replica(&room, 1), replica(&room, 1));
    let (stream, mut downs) = stream_at(&there);
    let mut link = linked(&here, 3, Some(9)).await;
    assert_eq!(downs.recv().await.unwrap(), TerminalCommand::Attach { attachment: 3, from: Some(9) });
    link.down.send(TerminalCommand::Input { attachment: 3, bytes: b"a secret that is typed".to_vec() }).await.unwrap();
    assert_eq!(
        downs.recv().await.unwrap(),
        TerminalCommand::Input { attachment: 3, bytes: b"a secret that is typed".to_vec() }
    );
    for n in 0..200_u32 {
        stream.deliver(output(3, format!("a secret that is shown {n}").as_bytes())).await;
        assert_eq!(link.up.recv().await.unwrap(), output(3, format!("a secret that is shown {n}").as_bytes()));
    }
    stream.deliver(TerminalEvent::Exited { exit: ProgramExit::Code(0) }).await;
    assert_eq!(link.up.recv().await.unwrap(), TerminalEvent::Exited { exit: ProgramExit::Code(0) });
    drop(link);
    assert_eq!(downs.recv().await.unwrap(), TerminalCommand::Detach { attachment: 3 });
    while let Ok((_, payload, _)) = received.try_recv() {
        assert!(!payload.windows(6).any(|part| part == b"secret"), "it can be read on the bus");
    }
}

/// The commands that an agent receives within a while.
async fn received_commands(downs: &mut mpsc::Receiver<TerminalCommand>) -> Vec<TerminalCommand> {
    let mut notified = Vec::new();
    while let Ok(Some(down)) = tokio::time::timeout(Duration::from_millis(200), downs.recv()).await {
        notified.push(down);
    }
    notified
}

#[tokio::test]
async fn replayed_hello_and_input_reach_no_program() {
    let room = FakeBus::new();
    let mut received = room.messages.subscribe();
    let (here, there) = (replica(&room, 1), replica(&room, 1));
    let (stream, mut downs) = stream_at(&there);
    let mut link = linked(&here, 3, None).await;
    link.down.send(TerminalCommand::Input { attachment: 3, bytes: b"rm -r work\n".to_vec() }).await.unwrap();
    assert_eq!(received_commands(&mut downs).await.len(), 2, "it is joined, and types");
    let mut recorded = Vec::new();
    while let Ok(message) = received.try_recv() {
        recorded.push(message);
    }
    let (hellos, rest): (Vec<RecordedMessage>, Vec<RecordedMessage>) =
        recorded.into_iter().partition(|(_, _, reply)| reply.is_some());
    let (streams, hello, _) = hellos.last().unwrap().clone();

    // The current user stays.
    let answer = room.request(streams.clone(), hello.clone()).await;
    assert!(answer.is_some(), "whose hello it is cannot be seen before it is answered");
    stream.deliver(output(3, b"still here")).await;
    assert_eq!(link.up.recv().await.unwrap(), output(3, b"still here"));
    assert_eq!(received_commands(&mut downs).await, []);

    // And when the user is gone, no other input reaches the program.
    drop(link);
    assert_eq!(received_commands(&mut downs).await, [TerminalCommand::Detach { attachment: 3 }]);
    assert!(room.request(streams, hello).await.is_some());
    for (subject, payload, _) in rest {
        room.publish(subject, payload).await;
    }
    assert_eq!(received_commands(&mut downs).await, []);
}

#[tokio::test]
async fn hello_redirected_to_another_session_joins_no_user() {
    const OTHERS: TerminalSessionId = TerminalSessionId(Uuid::from_u128(6));
    let room = FakeBus::new();
    let there = replica(&room, 1);
    let (down, mut downs) = mpsc::channel(16);
    let _others = there.register_stream(OTHERS, down);
    let here = replica(&FakeBus { redirect: Some((SESSION, OTHERS)), ..room.clone() }, 1);
    let elsewhere = replica(&room, 1);
    // Its own user reaches the session: the replicas listen.
    let mut own = None;
    for _ in 0..20 {
        own = elsewhere.link(OTHERS, 1, None).await;
        if own.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(own.is_some() && received_commands(&mut downs).await.len() == 1);
    assert!(here.link(SESSION, 2, None).await.is_none(), "the user is attached to a session of another user");
    assert_eq!(received_commands(&mut downs).await, []);
}

#[tokio::test]
async fn messages_redirected_to_another_session_reach_no_program() {
    const OTHERS: TerminalSessionId = TerminalSessionId(Uuid::from_u128(6));
    let room = FakeBus::new();
    let mut received = room.messages.subscribe();
    let (here, there) = (replica(&room, 1), replica(&room, 1));
    let (_stream, mut downs) = stream_at(&there);
    let (down, mut others) = mpsc::channel(16);
    let _others = there.register_stream(OTHERS, down);
    let link = linked(&here, 1, None).await;
    link.down.send(TerminalCommand::Input { attachment: 1, bytes: b"rm -r work\n".to_vec() }).await.unwrap();
    assert_eq!(received_commands(&mut downs).await.len(), 2);
    let typed: Vec<RecordedMessage> = std::iter::from_fn(|| received.try_recv().ok()).collect();
    let on_link = |(subject, ..): &&RecordedMessage| subject.starts_with("gpuaas.terminal.link.");

    let mut users = None;
    for _ in 0..20 {
        users = here.link(OTHERS, 1, None).await;
        if users.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut users = users.unwrap();
    assert_eq!(received_commands(&mut others).await.len(), 1);
    let fresh: Vec<RecordedMessage> = std::iter::from_fn(|| received.try_recv().ok()).collect();
    let (subject, ..) = fresh.iter().find(on_link).unwrap().clone();
    for (_, payload, _) in typed.into_iter().filter(|message| on_link(&message)) {
        room.publish(subject.clone(), payload).await;
    }
    assert!(users.up.recv().await.is_none(), "the link ends");
    assert_eq!(received_commands(&mut others).await, [TerminalCommand::Detach { attachment: 1 }]);
}

#[tokio::test]
async fn closed_stream_and_stream_of_another_cluster_do_not_answer() {
    let room = FakeBus::new();
    let (here, stranger) = (replica(&room, 1), replica(&room, 2));
    let (_stream, _downs) = stream_at(&stranger);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(here.link(SESSION, 1, None).await.is_none(), "another secret");
    let there = replica(&room, 1);
    let (stream, mut downs) = stream_at(&there);
    let mut link = linked(&here, 1, None).await;
    assert!(downs.recv().await.is_some());
    drop(stream);
    assert!(link.up.recv().await.is_none(), "the user's connection is closed");
    assert!(here.link(SESSION, 1, None).await.is_none());
}

#[tokio::test]
async fn bus_failure_ends_the_link() {
    let room = FakeBus::new();
    let (here, there) = (replica(&room, 1), replica(&room, 1));
    let (_stream, _downs) = stream_at(&there);
    let mut link = linked(&here, 1, None).await;
    room.cut.cancel();
    link.down.send(TerminalCommand::Resize { columns: 1, rows: 1 }).await.unwrap();
    assert!(link.up.recv().await.is_none());
}

#[test]
fn token_names_its_session_and_has_one_valid_form() {
    let (token, hash) = mint(SESSION.0);
    let (session, read) = read_token(&token).unwrap();
    assert_eq!(session, SESSION);
    assert!(read.matches(&hash));
    let text = token.expose_secret();
    let (secret, id) = text.rsplit_once('.').unwrap();
    for bad in [
        String::new(),
        secret.to_owned(),
        format!("{secret}."),
        format!("{secret}.{}", SESSION.0),
        format!("{secret}.{}", id.to_uppercase().replace('0', "A")),
        format!("{secret}x.{id}"),
        format!(".{id}"),
        format!("{text}.{id}"),
    ] {
        assert!(read_token(&bad.clone().into()).is_none(), "{bad}");
    }
}
