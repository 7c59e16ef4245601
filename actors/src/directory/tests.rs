#![allow(clippy::unwrap_used, clippy::expect_used)]

mod encoding;

use super::*;
use crate::host::HostConfig;
use crate::ports::World;
use crate::testing::{Clockwork, Fault, Ledger, Performed, key, panics_are_short, term, user};
use domain::allocation::{Allocation, AuthorizedKey, Command, Rejection};
use domain::authz::{Action, Role, authorize};
use domain::commit::Epoch;
use domain::money::Price;
use domain::{Kind, Principal, SkuId, SshKeyId};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::time::sleep;

const ALLOCATION: Uuid = Uuid::from_u128(0x70);
const SECOND: Duration = Duration::from_secs(1);

/// What a user asks for.
pub(crate) fn request() -> domain::allocation::Request {
    domain::allocation::Request {
        user_id: "ann".into(),
        org_id: None,
        project_id: Some("p".into()),
        plan: None,
        sku_id: SkuId(Uuid::from_u128(1)),
        sku: "h100".into(),
        region_code: None,
        node_id: None,
        gpu_count: 2,
        ssh_keys: vec![AuthorizedKey {
            id: SshKeyId(Uuid::from_u128(2)),
            public_key: "ssh-ed25519 AAAA".into(),
            fingerprint: "SHA256:x".into(),
        }],
        follows_default: false,
        logins_revision: 1,
        isolation_model: "user-revoke".into(),
        price: Price::new("EUR", 250).unwrap(),
        queue_seconds: None,
        scheduler_request_enc: None,
        metadata: domain::metadata::Metadata::default(),
    }
}

fn rent() -> Command {
    Command::Request(Box::new(request()))
}

fn ann() -> Principal {
    user("ann", &[Role::User])
}

/// What becomes of one request on the bus.
enum Fate {
    Fails(RemoteError),
    /// Delivered and carried out; the answer does not come back.
    AnswerLost,
    /// Delivered and carried out; the answer comes back mangled.
    AnswerMangled,
    /// Delivered and carried out; the owner is lost before it answers.
    OwnerLost,
}

/// A bus with one other member on it.
struct Bus {
    other: Mutex<Option<Directory>>,
    fates: Mutex<VecDeque<Fate>>,
    sent: Mutex<usize>,
    in_transit: Mutex<Duration>,
}

impl Bus {
    fn with(other: Option<Directory>) -> Arc<Self> {
        Arc::new(Self {
            other: Mutex::new(other),
            fates: Mutex::default(),
            sent: Mutex::new(0),
            in_transit: Mutex::default(),
        })
    }

    fn next_is(&self, fates: impl IntoIterator<Item = Fate>) {
        self.fates.lock().unwrap().extend(fates);
    }

    fn sent(&self) -> usize {
        *self.sent.lock().unwrap()
    }
}

impl Remote for Bus {
    fn request(&self, _: Shard, payload: Vec<u8>, timeout: Duration) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        async move {
            *self.sent.lock().unwrap() += 1;
            let fate = self.fates.lock().unwrap().pop_front();
            let other = self.other.lock().unwrap().clone();
            if let Some(Fate::Fails(error)) = fate {
                return Err(error);
            }
            let Some(other) = other else { return Err(RemoteError::NoResponders) };
            let in_transit = *self.in_transit.lock().unwrap();
            let answer = other.serve(&payload, in_transit).await;
            match fate {
                Some(Fate::OwnerLost) => Err(RemoteError::OwnerChanged),
                Some(Fate::AnswerLost) => {
                    sleep(timeout).await;
                    Err(RemoteError::TimedOut)
                }
                Some(Fate::AnswerMangled) => Ok(answer[..answer.len() / 2].to_vec()),
                Some(Fate::Fails(_)) | None => Ok(answer),
            }
        }
        .boxed()
    }
}

/// One store, two members: `here` is asked, `there` may own the shard.
struct Pair {
    here: Directory,
    there: Directory,
    bus: Arc<Bus>,
    store: Arc<Ledger>,
    world: Arc<Clockwork>,
}

impl Pair {
    fn new() -> Self {
        Self::with_clocks(Arc::new(Clockwork::new()), Arc::new(Clockwork::new()))
    }

    fn with_clocks(here: Arc<Clockwork>, there: Arc<Clockwork>) -> Self {
        panics_are_short();
        let store = Arc::<Ledger>::default();
        let member = |bus: &Arc<Bus>, world: &Arc<Clockwork>| {
            let host = Host::new(HostConfig::default(), store.clone(), Arc::<Performed>::default(), world.clone());
            Directory::new(host, bus.clone())
        };
        let other = member(&Bus::with(None), &there);
        let bus = Bus::with(Some(other.clone()));
        Self { here: member(&bus, &here), there: other, bus, store, world: here }
    }

    async fn owned_here() -> Self {
        let pair = Self::new();
        pair.here.host.open(term(shard_of(ALLOCATION), 1), None).await.unwrap();
        pair
    }

    async fn owned_there() -> Self {
        let pair = Self::new();
        pair.there.host.open(term(shard_of(ALLOCATION), 1), None).await.unwrap();
        pair
    }

    async fn ask(&self, by: &Principal, command: Command, key: Option<CommandKey>) -> Answer<Allocation> {
        let permit = authorize(by, command.action()).unwrap();
        let asked = Asked::new(&permit, "c", self.world.now() + SECOND);
        self.here.ask::<Allocation>(&permit, ALLOCATION, command, Asked { command: key, ..asked }).await
    }

    fn commits(&self) -> usize {
        self.store.books.lock().unwrap().commits.len()
    }
}

#[tokio::test(start_paused = true)]
async fn what_lives_here_is_asked_without_the_bus() {
    let pair = Pair::owned_here().await;
    let answered = pair.ask(&ann(), rent(), None).await.unwrap();
    assert_eq!((answered.reply.asked.clone(), answered.written, answered.version), (request(), true, 1));
    assert_eq!(pair.bus.sent(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_lives_elsewhere_is_asked_over_the_bus_with_the_same_answers() {
    let pair = Pair::owned_there().await;
    let first = pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap();
    assert_eq!((first.reply.asked.clone(), first.replayed, first.version), (request(), false, 1));
    let again = pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap();
    assert_eq!((again.reply, again.replayed, again.written), (first.reply, true, false));
    let other = CommandKey { digest: [9; 32], ..key("k") };
    assert_eq!(pair.ask(&ann(), rent(), Some(other)).await, Err(AskError::Reused));
    assert_eq!(pair.ask(&ann(), rent(), None).await, Err(AskError::Rejected(Rejection::Exists)));
    pair.store.meets([Fault::Forbidden]);
    let taken = pair.ask(&ann(), Command::Release { issue: None }, None).await;
    assert_eq!(taken, Err(AskError::Taken { constraint: "unique_name".to_owned() }));
    assert_eq!((pair.bus.sent(), pair.commits()), (5, 1));
}

#[tokio::test(start_paused = true)]
async fn a_permit_for_another_action_or_another_asker_is_no_permit() {
    let pair = Pair::owned_here().await;
    let permit = authorize(&ann(), Action::Release).unwrap();
    let asked = Asked::new(&permit, "c", pair.world.now() + SECOND);
    let answer = pair.here.ask::<Allocation>(&permit, ALLOCATION, rent(), asked.clone()).await;
    assert_eq!(answer, Err(AskError::Denied));
    let stolen = authorize(&user("bob", &[Role::User]), Action::Rent).unwrap();
    assert_eq!(pair.here.ask::<Allocation>(&stolen, ALLOCATION, rent(), asked).await, Err(AskError::Denied));
    assert_eq!((pair.commits(), pair.bus.sent()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_owner_checks_again_what_came_over_the_bus() {
    let pair = Pair::owned_there().await;
    let permit = authorize(&ann(), Action::Rent).unwrap();
    let asked = Asked::new(&permit, "c", pair.world.now() + SECOND);
    let entity = EntityRef { kind: Kind::Allocation, id: ALLOCATION };
    let command = serde_json::to_value(Command::ForceRelease { reason: "mine".into() }).unwrap();
    let forged = serde_json::to_vec(&Request { v: VERSION, entity, asked, remaining_ms: None, command }).unwrap();
    let response: Response = serde_json::from_slice(&pair.there.serve(&forged, Duration::ZERO).await).unwrap();
    assert_eq!(response.answer, Err(AskError::Denied));
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_changes_hands_is_asked_until_somebody_has_it() {
    let pair = Pair::new();
    pair.bus.next_is([Fate::Fails(RemoteError::NoResponders)]);
    let there = Arc::clone(&pair.there.host);
    let taking = tokio::spawn(async move {
        sleep(SECOND / 2).await;
        there.open(term(shard_of(ALLOCATION), 1), None).await.unwrap();
    });
    assert!(pair.ask(&ann(), rent(), None).await.unwrap().written);
    assert!(pair.bus.sent() > 10, "nobody answered, then the other was not the owner, then it was");
    taking.await.unwrap();
    assert_eq!(pair.commits(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_was_fenced_here_finds_the_new_one_there() {
    let pair = Pair::owned_here().await;
    let shard = shard_of(ALLOCATION);
    pair.store.books.lock().unwrap().epochs.insert(shard, Epoch(2));
    let (here, there) = (Arc::clone(&pair.here.host), Arc::clone(&pair.there.host));
    let moving = tokio::spawn(async move {
        sleep(SECOND / 10).await;
        here.lose(shard);
        there.open(term(shard, 2), None).await.unwrap();
    });
    let mut answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
    // What was under way in the very moment is for the asker to ask again.
    while let Err(AskError::Unknown { .. }) = answer {
        answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
    }
    assert!(answer.unwrap().written);
    moving.await.unwrap();
    assert_eq!(pair.store.books.lock().unwrap().commits[0].epoch, Epoch(2));
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_nobody_holds_is_unavailable_at_the_deadline() {
    let pair = Pair::new();
    let began = pair.world.now();
    let answer = pair.ask(&ann(), rent(), None).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    let waited = pair.world.now() - began;
    assert!(waited <= chrono::TimeDelta::seconds(1) && waited > chrono::TimeDelta::milliseconds(900), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn what_was_sent_and_not_answered_is_unknown_and_safe_to_ask_again() {
    let pair = Pair::owned_there().await;
    for fate in [Fate::AnswerLost, Fate::AnswerMangled] {
        pair.bus.next_is([fate]);
        let answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
        assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
    }
    assert_eq!(pair.bus.sent(), 2, "the directory does not send again what may have been carried out");
    assert!(pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap().replayed);
    assert_eq!(pair.commits(), 1);
}

#[tokio::test(start_paused = true)]
async fn command_whose_owner_is_lost_is_sent_to_the_next_one_and_carried_out_once() {
    for (fate, replayed) in [(Fate::Fails(RemoteError::OwnerChanged), false), (Fate::OwnerLost, true)] {
        let pair = Pair::owned_there().await;
        pair.bus.next_is([fate]);
        let answered = pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap();
        assert_eq!((answered.replayed, answered.reply.asked.clone()), (replayed, request()));
        assert_eq!((pair.bus.sent(), pair.commits()), (2, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn command_without_an_id_is_carried_out_once_though_its_owner_is_lost() {
    let pair = Pair::owned_there().await;
    pair.bus.next_is([Fate::Fails(RemoteError::OwnerChanged)]);
    assert!(pair.ask(&ann(), rent(), None).await.unwrap().written);
    assert_eq!((pair.bus.sent(), pair.commits()), (2, 1));

    let pair = Pair::owned_there().await;
    pair.bus.next_is([Fate::OwnerLost]);
    let answer = pair.ask(&ann(), rent(), None).await;
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "its answer is lost, and it is there: {answer:?}");
    assert_eq!((pair.bus.sent(), pair.commits()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn command_whose_owner_is_lost_and_that_no_other_takes_is_unknown_at_the_deadline() {
    let pair = Pair::owned_there().await;
    pair.bus.next_is([Fate::OwnerLost]);
    pair.bus.next_is((0..100).map(|_| Fate::Fails(RemoteError::NoResponders)));
    let answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "it was carried out: {answer:?}");
}

#[tokio::test(start_paused = true)]
async fn owner_whose_clock_is_off_counts_the_time_that_remains() {
    for off in [-30, 30] {
        let there = Clockwork::new();
        there.step(TimeDelta::seconds(off));
        let pair = Pair::with_clocks(Arc::new(Clockwork::new()), Arc::new(there));
        pair.there.host.open(term(shard_of(ALLOCATION), 1), None).await.unwrap();
        assert!(pair.ask(&ann(), rent(), None).await.unwrap().written, "{off} s");
        assert_eq!(pair.bus.sent(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn command_that_was_in_transit_longer_than_its_asker_waits_is_not_carried_out() {
    let pair = Pair::owned_there().await;
    *pair.bus.in_transit.lock().unwrap() = SECOND + SECOND / 10;
    let answer = pair.ask(&ann(), rent(), None).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(pair.commits(), 0);
}

#[tokio::test(start_paused = true)]
async fn places_are_kept_by_the_owner_of_their_shard_alone() {
    use crate::places::Word;
    let pair = Pair::owned_there().await;
    let take = async |n: u128| {
        let place = Uuid::from_u128(n);
        pair.here.place(ALLOCATION, place, Word::Take { most: 2 }, SECOND).await.unwrap()
    };
    assert_eq!([take(1).await, take(2).await, take(3).await], [true, true, false]);
    let left = pair.there.place(ALLOCATION, Uuid::from_u128(1), Word::Leave, SECOND).await;
    assert_eq!((left.unwrap(), take(3).await), (false, true));
    let elsewhere = Uuid::from_u128(0x71);
    assert_ne!(shard_of(ALLOCATION), shard_of(elsewhere));
    let nobodys = pair.here.place(elsewhere, Uuid::from_u128(1), Word::Keep, SECOND).await;
    assert_eq!(nobodys, Err(Unlimited::NotKept), "who does not own the shard keeps nothing of it");
    *pair.bus.other.lock().unwrap() = None;
    let unheard = pair.here.place(ALLOCATION, Uuid::from_u128(4), Word::Keep, SECOND).await;
    assert_eq!(unheard, Err(Unlimited::Away(RemoteError::NoResponders)));
}

#[tokio::test(start_paused = true)]
async fn a_bus_that_cannot_be_reached_is_unavailable() {
    let pair = Pair::owned_there().await;
    pair.bus.next_is([Fate::Fails(RemoteError::Unreachable("no route".to_owned()))]);
    let answer = pair.ask(&ann(), rent(), None).await;
    assert_eq!(answer, Err(AskError::Unavailable { reason: "no route".to_owned() }));
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_after_its_deadline_is_not_sent() {
    let pair = Pair::owned_there().await;
    let permit = authorize(&ann(), Action::Rent).unwrap();
    let asked = Asked::new(&permit, "c", pair.world.now() - SECOND);
    let answer = pair.here.ask::<Allocation>(&permit, ALLOCATION, rent(), asked).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(pair.bus.sent(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_understood_is_answered_and_not_carried_out() {
    let pair = Pair::owned_there().await;
    let permit = authorize(&ann(), Action::Rent).unwrap();
    let asked = Asked::new(&permit, "c", pair.world.now() + SECOND);
    let entity = EntityRef { kind: Kind::Allocation, id: ALLOCATION };
    let newer = Request {
        v: VERSION + 1,
        entity,
        asked: asked.clone(),
        remaining_ms: None,
        command: serde_json::to_value(rent()).unwrap(),
    };
    let foreign = Request {
        v: VERSION,
        entity,
        asked,
        remaining_ms: None,
        command: serde_json::json!({ "command": "levitate" }),
    };
    let payloads =
        [serde_json::to_vec(&newer).unwrap(), serde_json::to_vec(&foreign).unwrap(), b"not json".to_vec(), Vec::new()];
    for payload in payloads {
        let response: Response = serde_json::from_slice(&pair.there.serve(&payload, Duration::ZERO).await).unwrap();
        let answer = response.answer;
        assert!(matches!(answer, Err(AskError::Unavailable { .. } | AskError::Broken { .. })), "{answer:?}");
    }
    assert_eq!(pair.commits(), 0);
}
