//! The end of a login, over Postgres and two members that share the shards.

use super::*;
use actors::Directory;
use actors::sharding::shard_of;
use actors::shell_dependencies::{Remote, RemoteError, Store};
use domain::announcement::{self, Announcement, Severity};
use domain::authz::{CallerIdentity, TokenRole};
use domain::precondition::Precondition;
use domain::state_machine::RequestOrigin;
use domain::terminal_session::{CloseReason, Request, TokenDigest};
use domain::{EntityRef, Event, EventId, Principal, Shard};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use local_servers::test_database::TestDatabase;
use persistence::{Outbox, Reads};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use test_host::{NoEffects, PgMember, TestHost, caller};
use uuid::Uuid;

const LOGIN: BrowserSessionId = BrowserSessionId(Uuid::from_u128(1));
const OTHER_LOGIN: BrowserSessionId = BrowserSessionId(Uuid::from_u128(2));

/// The member that owns the odd shards, while it is reachable.
struct OtherMember {
    directory: Directory,
    is_away: Mutex<bool>,
}

impl Remote for OtherMember {
    fn request(&self, _: Shard, payload: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        async move {
            if *self.is_away.lock().unwrap() {
                return Err(RemoteError::NoResponders);
            }
            Ok(self.directory.serve(&payload, Duration::ZERO).await)
        }
        .boxed()
    }
}

/// Terminal sessions of users.
struct Terminals {
    db: TestDatabase,
    host: TestHost,
    other: Arc<OtherMember>,
    context: ReactionContext,
    /// What each session is opened on, in place of an allocation.
    active: Precondition,
    opened: Mutex<u128>,
}

impl Terminals {
    async fn start() -> Self {
        let db = TestDatabase::fresh().await;
        let member = PgMember::start(&db.pool).await;
        let reads = Reads::new(db.pool.clone());
        let store: Arc<dyn Store> = Arc::new(member.store(&reads));
        let (even, odd): (Vec<_>, Vec<_>) = member.terms().partition(|term| is_even(term.shard));
        member.drop_published();
        let there = TestHost::start(Arc::clone(&store), odd, Arc::default(), Arc::new(NoEffects)).await;
        let other = Arc::new(OtherMember { directory: there.directory, is_away: Mutex::new(false) });
        let peers = Arc::clone(&other) as Arc<dyn Remote>;
        let host = TestHost::start_with_peers(store, even, Arc::default(), Arc::new(NoEffects), peers).await;
        let outbox = Outbox::new(db.pool.clone());
        let context = ReactionContext::new(&host.directory, reads, outbox, "test").unwrap();
        let active = Precondition { entity: Uuid::from_u128(99), version: 1 };
        let announce = announcement::Command::Announce { severity: Severity::Info, message: "x".to_owned() };
        host.ask::<Announcement>(&caller("root", TokenRole::Admin), active.entity, announce).await.unwrap();
        Self { db, host, other, context, active, opened: Mutex::new(1000) }
    }

    /// A session of this member, or of the other one.
    async fn open_at(&self, is_here: bool, user: &str, login: Option<BrowserSessionId>) -> TerminalSessionId {
        let (allocation_id, node_id) = (AllocationId(self.active.entity), NodeId(Uuid::from_u128(98)));
        self.open_of(is_here, &logged_in(user, login), allocation_id, node_id).await
    }

    /// One of this user, on this allocation and node.
    async fn open_of(
        &self,
        is_here: bool,
        user: &Principal,
        allocation_id: AllocationId,
        node_id: NodeId,
    ) -> TerminalSessionId {
        let id = {
            let mut last = self.opened.lock().unwrap();
            let id = (*last + 1..).map(Uuid::from_u128).find(|id| is_even(shard_of(*id)) == is_here).unwrap();
            *last = id.as_u128();
            TerminalSessionId(id)
        };
        let (token_sha256, active) = (TokenDigest([1; 32]), self.active);
        let open = Request::Open { allocation_id, node_id, token_sha256, active };
        self.host.ask::<TerminalSession>(user, id.0, open).await.unwrap();
        id
    }

    async fn open(&self, user: &str, login: Option<BrowserSessionId>) -> TerminalSessionId {
        self.open_at(true, user, login).await
    }

    /// The end of ann's login, delivered.
    async fn log_out(&self) -> Disposition {
        let user_id: UserId = "ann".into();
        let event = Event::BrowserSessionEnded {
            browser_session_id: LOGIN,
            user_id: user_id.clone(),
            reason: "logged_out".to_owned(),
        };
        let id = EventId(Uuid::from_u128(97));
        let delivery = EventDelivery { id, event, origin: RequestOrigin::untraced("test") };
        log_out_sessions(&self.context, &delivery, LOGIN, &user_id).await
    }

    /// Stores the sessions in a form that no release can read; their entities have them in memory.
    async fn make_unreadable(&self) {
        let alteration = "UPDATE entity SET body = body - 'node_id' WHERE kind = 'terminal_session'";
        sqlx::query(alteration).execute(&self.db.pool).await.unwrap();
    }

    /// The version of a session, whether or not it can be read.
    async fn version(&self, id: TerminalSessionId) -> i64 {
        let entity = EntityRef { kind: EntityKind::TerminalSession, id: id.0 };
        self.context.reads.snapshot(entity).await.unwrap().unwrap().version
    }

    /// Why the session is closed, and its version.
    async fn closed(&self, id: TerminalSessionId) -> (Option<CloseReason>, i64) {
        let entity = EntityRef { kind: EntityKind::TerminalSession, id: id.0 };
        let snapshot = self.context.reads.snapshot(entity).await.unwrap().unwrap();
        let session: TerminalSession = serde_json::from_str(&snapshot.body).unwrap();
        (session.closed().cloned(), snapshot.version)
    }
}

const fn is_even(shard: Shard) -> bool {
    shard.0 & 1 == 0
}

fn logged_in(user: &str, login: Option<BrowserSessionId>) -> Principal {
    let Principal::Caller(caller) = caller(user, TokenRole::User) else { unreachable!() };
    Principal::Caller(CallerIdentity { browser_session: login, ..caller })
}

#[tokio::test]
async fn end_of_a_login_closes_all_of_its_terminals_once_and_no_others() {
    let terminals = Terminals::start().await;
    let own = [terminals.open("ann", Some(LOGIN)).await, terminals.open_at(false, "ann", Some(LOGIN)).await];
    let others = [
        terminals.open("ann", Some(OTHER_LOGIN)).await,
        terminals.open("ann", None).await,
        terminals.open("bob", Some(OTHER_LOGIN)).await,
    ];
    // The event is delivered once more after a crash.
    for _ in 0..2 {
        assert_eq!(terminals.log_out().await, Disposition::Settled);
        for id in own {
            assert_eq!(terminals.closed(id).await, (Some(CloseReason::LoggedOut), 2));
        }
    }
    for id in others {
        assert_eq!(terminals.closed(id).await, (None, 1));
    }
}

#[tokio::test]
async fn terminal_of_a_member_that_is_away_is_closed_later_and_keeps_no_other_open() {
    let terminals = Terminals::start().await;
    let (there, here) = (terminals.open_at(false, "ann", Some(LOGIN)).await, terminals.open("ann", Some(LOGIN)).await);
    *terminals.other.is_away.lock().unwrap() = true;
    assert!(matches!(terminals.log_out().await, Disposition::Later { .. }));
    assert_eq!(terminals.closed(there).await, (None, 1));
    assert_eq!(terminals.closed(here).await, (Some(CloseReason::LoggedOut), 2));
    *terminals.other.is_away.lock().unwrap() = false;
    assert_eq!(terminals.log_out().await, Disposition::Settled);
    for id in [there, here] {
        assert_eq!(terminals.closed(id).await, (Some(CloseReason::LoggedOut), 2));
    }
}

#[tokio::test]
async fn terminal_that_another_login_goes_on_with_stays() {
    let terminals = Terminals::start().await;
    let id = terminals.open("ann", Some(LOGIN)).await;
    let issue = Request::IssueToken { token_sha256: TokenDigest([2; 32]), active: terminals.active };
    terminals.host.ask::<TerminalSession>(&logged_in("ann", Some(OTHER_LOGIN)), id.0, issue).await.unwrap();
    assert_eq!(terminals.log_out().await, Disposition::Settled);
    assert_eq!(terminals.closed(id).await, (None, 2));
}

#[tokio::test]
async fn terminal_whose_row_cannot_be_read_is_closed_by_its_entity_with_its_own_login_alone() {
    let terminals = Terminals::start().await;
    let id = terminals.open("ann", Some(LOGIN)).await;
    let other = terminals.open("ann", Some(OTHER_LOGIN)).await;
    terminals.make_unreadable().await;
    assert_eq!(terminals.log_out().await, Disposition::Settled);
    assert_eq!(terminals.closed(id).await, (Some(CloseReason::LoggedOut), 2));
    assert_eq!(terminals.version(other).await, 1);
}

#[tokio::test]
async fn terminal_whose_row_cannot_be_read_is_closed_with_its_own_allocation_or_node_alone() {
    let terminals = Terminals::start().await;
    let ann = logged_in("ann", None);
    let on = |n: u128| (AllocationId(Uuid::from_u128(n)), NodeId(Uuid::from_u128(n)));
    let mut opened = Vec::new();
    for n in 1..=3 {
        let (allocation_id, node_id) = on(n);
        opened.push(terminals.open_of(true, &ann, allocation_id, node_id).await);
    }
    terminals.make_unreadable().await;
    let delivery = |n: u128, event: Event| EventDelivery {
        id: EventId(Uuid::from_u128(n)),
        event,
        origin: RequestOrigin::untraced("test"),
    };

    let (allocation_id, user_id) = (on(1).0, UserId::from("ann"));
    let unwanted = Event::TerminalsUnwanted { allocation_id, user_id: user_id.clone() };
    let revoked = revoke_sessions(&terminals.context, &delivery(96, unwanted), allocation_id, &user_id).await;
    assert_eq!(revoked, Disposition::Settled);
    assert_eq!(terminals.closed(opened[0]).await, (Some(CloseReason::AllocationEnded), 2));
    assert_eq!((terminals.version(opened[1]).await, terminals.version(opened[2]).await), (1, 1));

    let node_id = on(2).1;
    let cut_off = delivery(95, Event::TerminalsCutOff { node_id });
    assert_eq!(cut_sessions(&terminals.context, &cut_off, node_id).await, Disposition::Settled);
    assert_eq!(terminals.closed(opened[1]).await, (Some(CloseReason::Killed), 2));
    assert_eq!(terminals.version(opened[2]).await, 1);
}

#[tokio::test]
async fn event_waits_while_the_terminals_cannot_be_read() {
    let terminals = Terminals::start().await;
    let id = terminals.open("ann", Some(LOGIN)).await;
    sqlx::query("ALTER TABLE entity RENAME TO entity_away").execute(&terminals.db.pool).await.unwrap();
    assert!(matches!(terminals.log_out().await, Disposition::Later { .. }));
    sqlx::query("ALTER TABLE entity_away RENAME TO entity").execute(&terminals.db.pool).await.unwrap();
    assert_eq!(terminals.log_out().await, Disposition::Settled);
    assert_eq!(terminals.closed(id).await, (Some(CloseReason::LoggedOut), 2));
}
