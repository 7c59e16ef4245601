use super::output::{Output, news};
use super::*;
use crate::websocket::MISUSED;
use domain::machine::Timestamp;
use domain::terminal_session::{Owner, Phase, Tape};
use domain::{AllocationId, NodeId, TerminalSessionId};
use futures::channel::mpsc as wide;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use uuid::Uuid;
use wire::terminal::{Down, INPUT_WINDOW, Up};

fn session() -> TerminalSession {
    let owner = Owner { user_id: "a user".to_owned(), org_id: None, project_id: None, plan: None };
    TerminalSession {
        id: TerminalSessionId(Uuid::from_u128(1)),
        allocation_id: AllocationId(Uuid::from_u128(2)),
        node_id: NodeId(Uuid::from_u128(3)),
        owner,
        opened_at: Timestamp::UNIX_EPOCH,
        ends_at: Timestamp::UNIX_EPOCH,
        phase: Phase::Opened { until: Timestamp::UNIX_EPOCH },
        attachments: 1,
        token: None,
        spent: Vec::new(),
        refusals: domain::audit::Refusals::default(),
        recording: domain::recording::Terms::default(),
        tape: Tape::Blank,
    }
}

/// A user's end, over one link after another.
#[derive(Default)]
struct User {
    progress: Progress,
    told: Option<Mode>,
}

impl User {
    /// The agent says this over a link, and then the link is gone: how they part, and what either is told.
    async fn hears(&mut self, said: &[Up]) -> (Parted, Vec<Message>, Vec<Down>) {
        let (down, mut downs) = mpsc::channel(64);
        let (mut sink, shown) = wide::unbounded();
        let (up, ups) = mpsc::channel(64);
        for said in said {
            up.try_send(said.clone()).unwrap();
        }
        drop(up);
        self.progress.begin_link();
        let session = session();
        let output = Output::new(&session, 1, &self.progress, &down, &mut self.told);
        let parted = output.carry(ups, &mut sink, || false).await;
        drop((sink, down));
        let told = std::iter::from_fn(|| downs.try_recv().ok()).collect();
        // The first question of all comes whenever it likes.
        let shown = shown.filter(|it| std::future::ready(*it != Message::Ping(Vec::new().into())));
        (parted, shown.collect().await, told)
    }

    /// The user says this and goes: how they part, and what the agent is told.
    async fn says(&self, said: impl IntoIterator<Item = Message>) -> (Parted, Vec<Down>) {
        let (down, mut downs) = mpsc::channel(512);
        let mut said = futures::stream::iter(said.into_iter().map(Ok));
        let parted = input::carry(&down, 1, &self.progress, &mut said).await;
        (parted, std::iter::from_fn(|| downs.try_recv().ok()).collect())
    }
}

const fn attached(position: u64) -> Up {
    Up::Attached { attachment: 1, position, lost: 0 }
}

fn output(position: u64, bytes: &[u8]) -> Up {
    Up::Output { attachment: 1, position, bytes: bytes.to_vec() }
}

const fn recording(mode: wire::recording::Mode) -> Up {
    Up::Recording { mode }
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
fn what_a_user_has_is_not_said_again() {
    let said = |position, delivered| news(position, b"said".to_vec(), delivered);
    assert_eq!(said(10, 10).unwrap(), b"said");
    assert_eq!(said(10, 13).unwrap(), b"d");
    assert_eq!(said(10, 14), None);
    assert_eq!(said(10, 99), None);
}

#[tokio::test]
async fn the_agent_learns_from_the_users_own_end_that_all_has_come() {
    let mut user = User::default();
    let (parted, shown, told) = user.hears(&[attached(0), output(0, b"made"), output(4, b"")]).await;
    assert_eq!(parted, Parted::Link);
    let question = Message::Ping(4_u64.to_be_bytes().to_vec().into());
    assert_eq!(shown[1..], [Message::Binary(b"made".to_vec().into()), question]);
    assert!(!told.iter().any(|down| matches!(down, Down::Received { .. })), "{told:?}");
    let echo = Message::Pong(4_u64.to_be_bytes().to_vec().into());
    let (_, told) = user.says([Message::Pong(Vec::new().into()), echo]).await;
    assert_eq!(told, [Down::Received { attachment: 1, position: 4 }]);
    // Nobody has what was not sent.
    let (_, told) = user.says([Message::Pong(u64::MAX.to_be_bytes().to_vec().into())]).await;
    assert_eq!(told, [Down::Received { attachment: 1, position: 4 }]);
}

#[tokio::test]
async fn positions_that_no_session_reaches_part_the_link_and_nothing_else() {
    for said in [
        vec![attached(u64::MAX), output(u64::MAX, b"x")],
        vec![attached(0), output(u64::MAX, b"x")],
        vec![attached(1 << 53), output(1 << 53, b"x")],
        vec![attached(0), output(1, b"x")],
    ] {
        let (parted, shown, _) = User::default().hears(&said).await;
        assert_eq!(parted, Parted::Link);
        assert!(!shown.contains(&Message::Binary(b"x".to_vec().into())), "{said:?}");
    }
}

#[tokio::test]
async fn a_user_is_told_of_a_recording_when_it_changes_and_not_with_every_link() {
    use wire::recording::Mode::{Off, Strict};
    let mut user = User::default();
    let (_, shown, _) = user.hears(&[attached(0), recording(Off), output(0, b"x")]).await;
    assert_eq!(texts(&shown).iter().map(|text| &text["type"]).collect::<Vec<_>>(), ["attached"]);
    // It changed while the link was cut.
    let (_, shown, _) = user.hears(&[attached(1), recording(Strict), recording(Strict)]).await;
    assert_eq!(texts(&shown), [json!({ "type": "recording", "mode": "strict" })]);
    let (_, shown, _) = user.hears(&[attached(9), recording(Strict)]).await;
    assert_eq!(texts(&shown).iter().map(|text| &text["recording"]).collect::<Vec<_>>(), ["strict"]);
}

#[tokio::test]
async fn acknowledgements_go_on_where_they_say_something_new_and_count_where_they_do_not() {
    let mut user = User::default();
    user.hears(&[attached(0), output(0, &[b'x'; 1000])]).await;
    // More than of anything that counts.
    let (parted, told) = user.says((1..=500).map(ack)).await;
    assert_eq!((parted, told.len()), (Parted::User, 500));
}

#[tokio::test]
async fn who_floods_with_words_that_say_nothing_is_put_out() {
    let user = User::default();
    user.progress.delivered.store(1000, Ordering::Relaxed);
    let nothing = [ack(1000), Message::Binary(Vec::new().into()), Message::Pong(Vec::new().into())];
    for message in nothing {
        let (parted, told) = user.says(vec![message.clone(); 1000]).await;
        assert_eq!(parted, Parted::Close(MISUSED), "{message:?}");
        assert!(told.len() <= 1, "{told:?}");
    }
}

#[tokio::test]
async fn acknowledgements_hold_again_over_a_new_link_though_input_was_stuck_on_the_old_one() {
    let user = User::default();
    user.progress.acknowledge(0);
    let (down, _downs) = mpsc::channel(64);
    let waiting = user.progress.make_room(&down, 1, INPUT_WINDOW + 1);
    assert!(timeout(Duration::from_millis(20), waiting).await.is_err());
    assert!(!user.progress.waits_for_client());
    user.progress.begin_link();
    assert!(user.progress.waits_for_client());
}

#[tokio::test]
async fn the_rest_is_waited_for_as_long_as_the_user_takes_some_of_it() {
    let pause = Duration::from_millis(500);
    let progress = Progress::default();
    let slow = async {
        for n in 1..=3 {
            sleep(pause * 3 / 5).await;
            progress.delivered.store(n, Ordering::Relaxed);
        }
    };
    assert_eq!(rest(pin!(slow), &progress, pause).await, Some(()));
    let began = Instant::now();
    assert_eq!(rest(pin!(std::future::pending::<()>()), &progress, pause).await, None);
    assert!(began.elapsed() < 3 * pause);
}
