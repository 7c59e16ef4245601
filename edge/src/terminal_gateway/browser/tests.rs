use super::output::{Output, undelivered};
use super::*;
use crate::http::websocket::MISUSED;
use domain::authz::ResourceOwner;
use domain::state_machine::Timestamp;
use domain::terminal_session::{Phase, RecordingState};
use domain::{AllocationId, NodeId, TerminalSessionId};
use futures::channel::mpsc as wide;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use uuid::Uuid;
use wire::terminal::{INPUT_WINDOW, TerminalCommand, TerminalEvent};

fn session() -> TerminalSession {
    let owner = ResourceOwner { user_id: "a user".into(), org_id: None, project_id: None, plan: None };
    TerminalSession {
        id: TerminalSessionId(Uuid::from_u128(1)),
        allocation_id: AllocationId(Uuid::from_u128(2)),
        node_id: NodeId(Uuid::from_u128(3)),
        owner,
        browser_session: None,
        opened_at: Timestamp::UNIX_EPOCH,
        ends_at: Timestamp::UNIX_EPOCH,
        phase: Phase::Opened { until: Timestamp::UNIX_EPOCH },
        attachments: 1,
        token: None,
        spent: Vec::new(),
        refusals: domain::audit::RefusalAudit::default(),
        recording: domain::recording::RecordingTerms::default(),
        tape: RecordingState::Blank,
    }
}

/// A user's end, over one link after another.
#[derive(Default)]
struct User {
    progress: Progress,
    commands: Option<RecordingMode>,
}

impl User {
    /// The agent sends this over a link, and then the link is gone: how the link ends, and what either side receives.
    async fn receive(&mut self, events: &[TerminalEvent]) -> (LinkEnd, Vec<Message>, Vec<TerminalCommand>) {
        let (down, mut downs) = mpsc::channel(64);
        let (mut sink, shown) = wide::unbounded();
        let (up, ups) = mpsc::channel(64);
        for events in events {
            up.try_send(events.clone()).unwrap();
        }
        drop(up);
        self.progress.begin_link();
        let session = session();
        let output = Output::new(&session, 1, &self.progress, &down, &mut self.commands);
        let link_end = output.carry(ups, &mut sink, || false).await;
        drop((sink, down));
        let commands = std::iter::from_fn(|| downs.try_recv().ok()).collect();
        // The first ping comes at any time.
        let shown = shown.filter(|it| std::future::ready(*it != Message::Ping(Vec::new().into())));
        (link_end, shown.collect().await, commands)
    }

    /// The user sends this and disconnects: how the link ends, and what the agent receives.
    async fn send(&self, events: impl IntoIterator<Item = Message>) -> (LinkEnd, Vec<TerminalCommand>) {
        let (down, mut downs) = mpsc::channel(512);
        let mut events = futures::stream::iter(events.into_iter().map(Ok));
        let link_end = input::carry(&down, 1, &self.progress, &mut events).await;
        (link_end, std::iter::from_fn(|| downs.try_recv().ok()).collect())
    }
}

const fn attached(position: u64) -> TerminalEvent {
    TerminalEvent::Attached { attachment: 1, position, lost: 0 }
}

fn output(position: u64, bytes: &[u8]) -> TerminalEvent {
    TerminalEvent::Output { attachment: 1, position, bytes: bytes.to_vec() }
}

const fn recording(mode: wire::recording::RecordMode) -> TerminalEvent {
    TerminalEvent::Recording { mode }
}

fn ack(position: u64) -> Message {
    Message::Text(json!({ "type": "ack", "position": position }).to_string().into())
}

/// The texts among them.
fn texts(shown: &[Message]) -> Vec<Value> {
    let text = |message: &Message| match message {
        Message::Text(text) => Some(serde_json::from_str(text).unwrap()),
        _ => None,
    };
    shown.iter().filter_map(text).collect()
}

#[test]
fn delivered_output_is_not_sent_again() {
    let events = |position, delivered| undelivered(position, b"said".to_vec(), delivered);
    assert_eq!(events(10, 10).unwrap(), b"said");
    assert_eq!(events(10, 13).unwrap(), b"d");
    assert_eq!(events(10, 14), None);
    assert_eq!(events(10, 99), None);
}

#[tokio::test]
async fn agent_receives_the_clients_confirmation_of_all_output() {
    let mut user = User::default();
    let (link_end, shown, commands) = user.receive(&[attached(0), output(0, b"made"), output(4, b"")]).await;
    assert_eq!(link_end, LinkEnd::Link);
    let question = Message::Ping(4_u64.to_be_bytes().to_vec().into());
    assert_eq!(shown[1..], [Message::Binary(b"made".to_vec().into()), question]);
    assert!(!commands.iter().any(|down| matches!(down, TerminalCommand::Received { .. })), "{commands:?}");
    let echo = Message::Pong(4_u64.to_be_bytes().to_vec().into());
    let (_, commands) = user.send([Message::Pong(Vec::new().into()), echo]).await;
    assert_eq!(commands, [TerminalCommand::Received { attachment: 1, position: 4 }]);
    // Unsent output cannot be received.
    let (_, commands) = user.send([Message::Pong(u64::MAX.to_be_bytes().to_vec().into())]).await;
    assert_eq!(commands, [TerminalCommand::Received { attachment: 1, position: 4 }]);
}

#[tokio::test]
async fn out_of_range_positions_end_only_the_link() {
    for events in [
        vec![attached(u64::MAX), output(u64::MAX, b"x")],
        vec![attached(0), output(u64::MAX, b"x")],
        vec![attached(1 << 53), output(1 << 53, b"x")],
        vec![attached(0), output(1, b"x")],
    ] {
        let (link_end, shown, _) = User::default().receive(&events).await;
        assert_eq!(link_end, LinkEnd::Link);
        assert!(!shown.contains(&Message::Binary(b"x".to_vec().into())), "{events:?}");
    }
}

#[tokio::test]
async fn recording_mode_is_sent_when_it_changes_and_not_with_every_link() {
    use wire::recording::RecordMode::{Off, Strict};
    let mut user = User::default();
    let (_, shown, _) = user.receive(&[attached(0), recording(Off), output(0, b"x")]).await;
    assert_eq!(texts(&shown).iter().map(|text| &text["type"]).collect::<Vec<_>>(), ["attached"]);
    // It changed while the link was cut.
    let (_, shown, _) = user.receive(&[attached(1), recording(Strict), recording(Strict)]).await;
    assert_eq!(texts(&shown), [json!({ "type": "recording", "mode": "strict" })]);
    let (_, shown, _) = user.receive(&[attached(9), recording(Strict)]).await;
    assert_eq!(texts(&shown).iter().map(|text| &text["recording"]).collect::<Vec<_>>(), ["strict"]);
}

#[tokio::test(start_paused = true)]
async fn client_is_informed_of_a_long_search_for_its_node_and_not_of_a_short_one() {
    let search = async |lasts: Duration| {
        let (mut sink, shown) = wide::unbounded();
        with_notice(sleep(lasts), &mut sink).await;
        drop(sink);
        texts(&shown.collect::<Vec<_>>().await)
    };
    assert_eq!(search(NOTICE_AFTER / 2).await, Vec::<Value>::new());
    assert_eq!(search(NOTICE_AFTER * 9).await, [json!({ "type": "waiting_for_node" })]);
}

#[tokio::test]
async fn new_acknowledgements_are_forwarded_and_repeated_ones_count_as_control_messages() {
    let mut user = User::default();
    user.receive(&[attached(0), output(0, &[b'x'; 1000])]).await;
    // More than of anything that counts.
    let (link_end, commands) = user.send((1..=500).map(ack)).await;
    assert_eq!((link_end, commands.len()), (LinkEnd::User, 500));
}

#[tokio::test]
async fn flood_of_control_messages_closes_the_connection() {
    let user = User::default();
    user.progress.delivered.store(1000, Ordering::Relaxed);
    let nothing = [ack(1000), Message::Binary(Vec::new().into()), Message::Pong(Vec::new().into())];
    for message in nothing {
        let (link_end, commands) = user.send(vec![message.clone(); 1000]).await;
        assert_eq!(link_end, LinkEnd::Close(MISUSED), "{message:?}");
        assert!(commands.len() <= 1, "{commands:?}");
    }
}

#[tokio::test]
async fn acknowledgements_apply_on_a_new_link_after_stuck_input_on_the_old_one() {
    let user = User::default();
    user.progress.acknowledge(0);
    let (down, _downs) = mpsc::channel(64);
    let waiting = user.progress.make_room(&down, 1, INPUT_WINDOW + 1);
    assert!(timeout(Duration::from_millis(20), waiting).await.is_err());
    assert!(!user.progress.waits_for_client());
    user.progress.begin_link();
    assert!(user.progress.waits_for_client());
}

#[tokio::test(start_paused = true)]
async fn remaining_output_is_drained_while_the_client_reads() {
    let pause = Duration::from_millis(500);
    let progress = Progress::default();
    let slow = async {
        for n in 1..=3 {
            sleep(pause * 3 / 5).await;
            progress.delivered.store(n, Ordering::Relaxed);
        }
    };
    assert_eq!(drain(pin!(slow), &progress, pause).await, Some(()));
    let began = Instant::now();
    assert_eq!(drain(pin!(std::future::pending::<()>()), &progress, pause).await, None);
    assert!(began.elapsed() < 3 * pause);
}
