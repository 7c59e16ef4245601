mod encoding;
#[path = "../../../tests/test-host/src/node_fixture.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is written for tests of other crates, too")]
mod node_fixture;

use super::*;
use crate::entity_host::HostConfig;
use crate::shell_dependencies::Environment;
use crate::testing::{EffectLog, MemoryStore, StoreFault, TestEnvironment, key, shorten_panic_output, term, user};
use domain::allocation::{self, Allocation, AuthorizedKey, Command, Rejection};
use domain::authz::{Action, ResourceOwner, TokenRole, authorize};
use domain::commit::Epoch;
use domain::money::Price;
use domain::sku::{self, Sku};
use domain::state_machine::FIRST_ENCODING;
use domain::{EntityKind, Principal, SkuId, SshKeyId};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::time::sleep;

const ALLOCATION: Uuid = Uuid::from_u128(0x70);
const SECOND: Duration = Duration::from_secs(1);

/// The request of a user.
pub(crate) fn request() -> domain::allocation::AllocationRequest {
    domain::allocation::AllocationRequest {
        owner: ResourceOwner { user_id: "ann".into(), org_id: None, project_id: Some("p".into()), plan: None },
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
    allocation::Request::Create(Box::new(request())).into()
}

fn ann() -> Principal {
    user("ann", &[TokenRole::User])
}

/// The fate of one request on the bus.
enum Fate {
    Fails(RemoteError),
    /// Delivered and executed; the response is lost.
    AnswerLost,
    /// Delivered and executed; the response is corrupted.
    AnswerMangled,
    /// Delivered and executed; the owner is lost before it replies.
    OwnerLost,
    /// Delivered to a member of the release before, which reads the first encoding alone.
    ToEarlierRelease,
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
            if matches!(fate, Some(Fate::ToEarlierRelease)) && encoding_of(&payload) > FIRST_ENCODING {
                let answer = Err(AskError::Unavailable { reason: "encoding 2 is not understood".to_owned() });
                return Ok(serde_json::to_vec(&Response { v: FIRST_ENCODING, answer }).unwrap());
            }
            let answer = other.serve(&payload, in_transit).await;
            match fate {
                Some(Fate::OwnerLost) => Err(RemoteError::OwnerChanged),
                Some(Fate::AnswerLost) => {
                    sleep(timeout).await;
                    Err(RemoteError::TimedOut)
                }
                Some(Fate::AnswerMangled) => Ok(answer[..answer.len() / 2].to_vec()),
                Some(Fate::Fails(_) | Fate::ToEarlierRelease) | None => Ok(answer),
            }
        }
        .boxed()
    }
}

fn encoding_of(payload: &[u8]) -> u16 {
    serde_json::from_slice::<Request>(payload).unwrap().v
}

/// One store, two members: `here` receives the commands, `there` may own the shard.
struct Pair {
    here: Directory,
    there: Directory,
    bus: Arc<Bus>,
    store: Arc<MemoryStore>,
    environment: Arc<TestEnvironment>,
}

impl Pair {
    fn new() -> Self {
        Self::with_clocks(Arc::new(TestEnvironment::new()), Arc::new(TestEnvironment::new()))
    }

    fn with_clocks(here: Arc<TestEnvironment>, there: Arc<TestEnvironment>) -> Self {
        shorten_panic_output();
        let store = Arc::<MemoryStore>::default();
        let member = |bus: &Arc<Bus>, environment: &Arc<TestEnvironment>| {
            let host =
                Host::new(HostConfig::default(), store.clone(), Arc::<EffectLog>::default(), environment.clone());
            Directory::new(host, bus.clone())
        };
        let other = member(&Bus::with(None), &there);
        let bus = Bus::with(Some(other.clone()));
        Self { here: member(&bus, &here), there: other, bus, store, environment: here }
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

    async fn ask(&self, by: &Principal, command: Command, key: Option<CommandKey>) -> AskResult<Allocation> {
        let permit = authorize(by, command.action()).unwrap();
        let asked = CommandContext::new(&permit, "c", self.environment.now() + SECOND);
        self.here.ask::<Allocation>(&permit, ALLOCATION, command, CommandContext { command: key, ..asked }).await
    }

    fn commits(&self) -> usize {
        self.store.stored.lock().unwrap().commits.len()
    }
}

#[tokio::test(start_paused = true)]
async fn entity_of_this_member_is_reached_without_the_bus() {
    let pair = Pair::owned_here().await;
    let answered = pair.ask(&ann(), rent(), None).await.unwrap();
    assert_eq!((answered.reply.asked.clone(), answered.written, answered.version), (request(), true, 1));
    assert_eq!(pair.bus.sent(), 0);
}

#[tokio::test(start_paused = true)]
async fn entity_of_another_member_is_reached_over_the_bus_with_the_same_replies() {
    let pair = Pair::owned_there().await;
    let first = pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap();
    assert_eq!((first.reply.asked.clone(), first.replayed, first.version), (request(), false, 1));
    let repeated = pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap();
    assert_eq!((repeated.reply, repeated.replayed, repeated.written), (first.reply, true, false));
    let other = CommandKey { digest: [9; 32], ..key("k") };
    assert_eq!(pair.ask(&ann(), rent(), Some(other)).await, Err(AskError::Reused));
    assert_eq!(pair.ask(&ann(), rent(), None).await, Err(AskError::Rejected(Rejection::Exists)));
    pair.store.inject_faults([StoreFault::ConstraintViolated]);
    let taken = pair.ask(&ann(), allocation::Request::Release { issue: None }.into(), None).await;
    assert_eq!(taken, Err(AskError::Taken { constraint: "unique_name".to_owned() }));
    assert_eq!((pair.bus.sent(), pair.commits()), (5, 1));
}

#[tokio::test(start_paused = true)]
async fn permit_for_another_action_or_principal_is_denied() {
    let pair = Pair::owned_here().await;
    let permit = authorize(&ann(), Action::Release).unwrap();
    let asked = CommandContext::new(&permit, "c", pair.environment.now() + SECOND);
    let answer = pair.here.ask::<Allocation>(&permit, ALLOCATION, rent(), asked.clone()).await;
    assert_eq!(answer, Err(AskError::Denied));
    let stolen = authorize(&user("bob", &[TokenRole::User]), Action::Rent).unwrap();
    assert_eq!(pair.here.ask::<Allocation>(&stolen, ALLOCATION, rent(), asked).await, Err(AskError::Denied));
    assert_eq!((pair.commits(), pair.bus.sent()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn owner_checks_the_permission_of_a_forwarded_command() {
    let pair = Pair::owned_there().await;
    let permit = authorize(&ann(), Action::Rent).unwrap();
    let asked = CommandContext::new(&permit, "c", pair.environment.now() + SECOND);
    let entity = EntityRef { kind: EntityKind::Allocation, id: ALLOCATION };
    let command = serde_json::to_value(allocation::Request::ForceRelease { reason: "mine".into() }).unwrap();
    let forged = serde_json::to_vec(&Request { v: VERSION, entity, asked, remaining_ms: None, command }).unwrap();
    let response: Response = serde_json::from_slice(&pair.there.serve(&forged, Duration::ZERO).await).unwrap();
    assert_eq!(response.answer, Err(AskError::Denied));
}

#[tokio::test(start_paused = true)]
async fn command_for_a_moving_shard_is_resent_until_it_has_an_owner() {
    let pair = Pair::new();
    pair.bus.next_is([Fate::Fails(RemoteError::NoResponders)]);
    let there = Arc::clone(&pair.there.host);
    let taking = tokio::spawn(async move {
        sleep(SECOND / 2).await;
        there.open(term(shard_of(ALLOCATION), 1), None).await.unwrap();
    });
    assert!(pair.ask(&ann(), rent(), None).await.unwrap().written);
    assert!(pair.bus.sent() > 10, "no member answered, then the other was not the owner, then it was");
    taking.await.unwrap();
    assert_eq!(pair.commits(), 1);
}

#[tokio::test(start_paused = true)]
async fn command_of_a_fenced_owner_is_resent_to_the_new_owner() {
    let pair = Pair::owned_here().await;
    let shard = shard_of(ALLOCATION);
    pair.store.stored.lock().unwrap().epochs.insert(shard, Epoch(2));
    let (here, there) = (Arc::clone(&pair.here.host), Arc::clone(&pair.there.host));
    let moving = tokio::spawn(async move {
        sleep(SECOND / 10).await;
        here.lose(shard);
        there.open(term(shard, 2), None).await.unwrap();
    });
    let mut answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
    // A command that was in flight at that moment is for the caller to resend.
    while let Err(AskError::Unknown { .. }) = answer {
        answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
    }
    assert!(answer.unwrap().written);
    moving.await.unwrap();
    assert_eq!(pair.store.stored.lock().unwrap().commits[0].epoch, Epoch(2));
}

#[tokio::test(start_paused = true)]
async fn shard_without_an_owner_is_unavailable_at_the_deadline() {
    let pair = Pair::new();
    let began = pair.environment.now();
    let answer = pair.ask(&ann(), rent(), None).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    let waited = pair.environment.now() - began;
    assert!(waited <= chrono::TimeDelta::seconds(1) && waited > chrono::TimeDelta::milliseconds(900), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn command_without_a_reply_is_unknown_and_safe_to_resend() {
    let pair = Pair::owned_there().await;
    for fate in [Fate::AnswerLost, Fate::AnswerMangled] {
        pair.bus.next_is([fate]);
        let answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
        assert!(matches!(answer, Err(AskError::Unknown { .. })), "{answer:?}");
    }
    assert_eq!(pair.bus.sent(), 2, "the directory does not resend a command that may have been executed");
    assert!(pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap().replayed);
    assert_eq!(pair.commits(), 1);
}

#[tokio::test(start_paused = true)]
async fn command_whose_owner_is_lost_is_resent_to_the_next_owner_and_executed_once() {
    for (fate, replayed) in [(Fate::Fails(RemoteError::OwnerChanged), false), (Fate::OwnerLost, true)] {
        let pair = Pair::owned_there().await;
        pair.bus.next_is([fate]);
        let answered = pair.ask(&ann(), rent(), Some(key("k"))).await.unwrap();
        assert_eq!((answered.replayed, answered.reply.asked.clone()), (replayed, request()));
        assert_eq!((pair.bus.sent(), pair.commits()), (2, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn command_without_an_id_is_executed_once_when_its_owner_is_lost() {
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
async fn command_whose_owner_is_lost_without_a_successor_is_unknown_at_the_deadline() {
    let pair = Pair::owned_there().await;
    pair.bus.next_is([Fate::OwnerLost]);
    pair.bus.next_is((0..100).map(|_| Fate::Fails(RemoteError::NoResponders)));
    let answer = pair.ask(&ann(), rent(), Some(key("k"))).await;
    assert!(matches!(answer, Err(AskError::Unknown { .. })), "it was executed: {answer:?}");
}

#[tokio::test(start_paused = true)]
async fn owner_with_a_skewed_clock_uses_the_remaining_time() {
    for off in [-30, 30] {
        let there = TestEnvironment::new();
        there.step(TimeDelta::seconds(off));
        let pair = Pair::with_clocks(Arc::new(TestEnvironment::new()), Arc::new(there));
        pair.there.host.open(term(shard_of(ALLOCATION), 1), None).await.unwrap();
        assert!(pair.ask(&ann(), rent(), None).await.unwrap().written, "{off} s");
        assert_eq!(pair.bus.sent(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn command_in_transit_past_its_deadline_is_not_executed() {
    let pair = Pair::owned_there().await;
    *pair.bus.in_transit.lock().unwrap() = SECOND + SECOND / 10;
    let answer = pair.ask(&ann(), rent(), None).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(pair.commits(), 0);
}

#[tokio::test(start_paused = true)]
async fn connection_quota_is_held_by_the_owner_of_its_shard_alone() {
    use crate::connection_quota::QuotaRequest;
    let pair = Pair::owned_there().await;
    let take = async |n: u128| {
        let place = Uuid::from_u128(n);
        pair.here.update_connection_quota(ALLOCATION, place, QuotaRequest::Acquire { most: 2 }, SECOND).await.unwrap()
    };
    assert_eq!([take(1).await, take(2).await, take(3).await], [true, true, false]);
    let left = pair.there.update_connection_quota(ALLOCATION, Uuid::from_u128(1), QuotaRequest::Release, SECOND).await;
    assert_eq!((left.unwrap(), take(3).await), (false, true));
    let elsewhere = Uuid::from_u128(0x71);
    assert_ne!(shard_of(ALLOCATION), shard_of(elsewhere));
    let of_another_owner =
        pair.here.update_connection_quota(elsewhere, Uuid::from_u128(1), QuotaRequest::Renew, SECOND).await;
    assert_eq!(
        of_another_owner,
        Err(QuotaUnavailable::NotStored),
        "a member that does not own the shard stores nothing of it"
    );
    *pair.bus.other.lock().unwrap() = None;
    let of_an_unreachable_owner =
        pair.here.update_connection_quota(ALLOCATION, Uuid::from_u128(4), QuotaRequest::Renew, SECOND).await;
    assert_eq!(of_an_unreachable_owner, Err(QuotaUnavailable::Unreachable(RemoteError::NoResponders)));
}

#[tokio::test(start_paused = true)]
async fn unreachable_bus_is_unavailable() {
    let pair = Pair::owned_there().await;
    pair.bus.next_is([Fate::Fails(RemoteError::Unreachable("no route".to_owned()))]);
    let answer = pair.ask(&ann(), rent(), None).await;
    assert_eq!(answer, Err(AskError::Unavailable { reason: "no route".to_owned() }));
}

#[tokio::test(start_paused = true)]
async fn command_past_its_deadline_is_not_sent() {
    let pair = Pair::owned_there().await;
    let permit = authorize(&ann(), Action::Rent).unwrap();
    let asked = CommandContext::new(&permit, "c", pair.environment.now() - SECOND);
    let answer = pair.here.ask::<Allocation>(&permit, ALLOCATION, rent(), asked).await;
    assert!(matches!(answer, Err(AskError::Unavailable { .. })), "{answer:?}");
    assert_eq!(pair.bus.sent(), 0);
}

#[tokio::test(start_paused = true)]
async fn malformed_request_is_answered_and_not_executed() {
    let pair = Pair::owned_there().await;
    let permit = authorize(&ann(), Action::Rent).unwrap();
    let asked = CommandContext::new(&permit, "c", pair.environment.now() + SECOND);
    let entity = EntityRef { kind: EntityKind::Allocation, id: ALLOCATION };
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

#[tokio::test(start_paused = true)]
async fn revision_of_a_version_is_refused_by_a_member_of_the_release_before_and_never_executed_without_its_version() {
    let pair = Pair::owned_there().await;
    let root = user("root", &[TokenRole::Admin]);
    let ask = async |command: sku::Command| {
        let permit = authorize(&root, command.action()).unwrap();
        let asked = CommandContext::new(&permit, "c", pair.environment.now() + SECOND);
        pair.here.ask::<Sku>(&permit, ALLOCATION, command, asked).await
    };
    let (price, validation) = (Price::new("EUR", 100).unwrap(), domain::validation::ValidationMinimums::default());
    ask(sku::Command::Create { spec: Box::new(node_fixture::sku_spec()), price, validation }).await.unwrap();
    let dearer = |if_version| sku::Command::Revise {
        price: Some(Price::new("EUR", 200).unwrap()),
        allowed_regions: None,
        expected_hardware: None,
        validation: None,
        if_version,
    };
    pair.bus.next_is([Fate::ToEarlierRelease, Fate::ToEarlierRelease]);
    let refused = ask(dearer(Some(1))).await;
    assert!(matches!(refused, Err(AskError::Unavailable { .. })), "{refused:?}");
    assert_eq!(pair.commits(), 1);
    assert!(ask(dearer(None)).await.is_ok(), "what the release before understands is executed by it");
    assert!(ask(dearer(Some(2))).await.is_ok(), "a member of this release checks the version");
}
