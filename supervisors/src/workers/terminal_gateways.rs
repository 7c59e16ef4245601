//! Detaches terminal sessions whose gateway has ended without a report of its connections, each member those of its own shards (decision 0120).
//!
//! A gateway is a member. Its row in the table of members is removed where it ended in order, or where a later process of its name began;
//! where it was killed, its heartbeats end. A member that lives, and was taken for an ended one, closes the connection: its user connects again.

use super::WorkerDependencies;
use super::polling_loop::{self, PollLoopConfig};
use crate::cluster::ClusterView;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::{AskError, CommandContext, Directory, Host};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::terminal_session::{Instruction, TerminalSession};
use domain::{Action, Permit, Principal, TerminalSessionId};
use futures::FutureExt as _;
use persistence::Reads;
use persistence::outage_log::RetryLog;
use persistence::queries::GatewayConnection;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How often the gateways are read.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
const PAGE_SIZE: u32 = 1000;
const CONCURRENCY: usize = 32;

/// A member without a heartbeat for so long has ended. Longer than the failure timeout, after which its shards are taken over: the connections
/// of a member that lives, and does not reach Postgres for a moment, stay.
const GATEWAY_TIMEOUT: Duration = Duration::from_secs(15);

const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(5);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, actors, .. } = &parts.stages;
    let (directory, host) = (actors.directory.clone(), Arc::clone(&actors.host));
    let gateways = TerminalGateways::new(directory, host, storage.reads.clone(), Arc::clone(&membership.view))?;
    Ok(task(&Arc::new(gateways), TerminalGateways::run))
}

struct TerminalGateways {
    directory: Directory,
    host: Arc<Host>,
    reads: Reads,
    view: Arc<ClusterView>,
    permit: Permit,
}

impl TerminalGateways {
    fn new(directory: Directory, host: Arc<Host>, reads: Reads, view: Arc<ClusterView>) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system("terminal-gateways"), Action::Advance)?;
        Ok(Self { directory, host, reads, view, permit })
    }

    async fn run(self: Arc<Self>) -> anyhow::Result<()> {
        let config =
            PollLoopConfig { interval: POLL_INTERVAL, concurrency: CONCURRENCY, page_size: PAGE_SIZE as usize };
        let poll = |except: Vec<TerminalSessionId>| {
            let gateways = Arc::clone(&self);
            async move { gateways.abandoned(&except).await }.boxed()
        };
        let work = |terminal| {
            let gateways = Arc::clone(&self);
            async move { gateways.detach(terminal).await }
        };
        polling_loop::run(config, poll, work).await;
        Ok(())
    }

    async fn abandoned(&self, except: &[TerminalSessionId]) -> Vec<(TerminalSessionId, GatewayConnection)> {
        static RETRIES: RetryLog = RetryLog::new("look for terminals of ended gateways");
        let shards: Vec<_> = self.host.terms().iter().map(|term| term.shard).collect();
        let ended = self.view.state().silent_members(GATEWAY_TIMEOUT, Instant::now());
        let found = async {
            let gateways = self.reads.ended_gateways(&ended).await?;
            // No session is read while all of them live.
            if gateways.is_empty() {
                return Ok(Vec::new());
            }
            self.reads.terminals_at(&gateways, &shards, except, PAGE_SIZE).await
        };
        RETRIES
            .observe(found.await)
            .unwrap_or_default()
            .into_iter()
            .map(|terminal| (terminal.session, terminal))
            .collect()
    }

    /// Whether the session is detached, or needs not be.
    async fn detach(&self, GatewayConnection { session, attachment }: GatewayConnection) -> bool {
        let context = CommandContext::new(&self.permit, Uuid::now_v7().to_string(), Utc::now() + COMMAND_TIMEOUT);
        let detach = Instruction::Detach { attachment };
        match self.directory.ask::<TerminalSession>(&self.permit, session.0, detach.into(), context).await {
            Ok(_) | Err(AskError::Rejected(_)) => true,
            Err(error) => {
                tracing::debug!(%error, "terminal session {session} of an ended gateway could not be detached");
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actors::shell_dependencies::Store;
    use domain::announcement::{self, Announcement, Severity};
    use domain::authz::TokenRole;
    use domain::precondition::Precondition;
    use domain::terminal_session::{Phase, Request, TokenDigest};
    use domain::{AllocationId, MemberId, NodeId};
    use local_servers::test_database::TestDatabase;
    use persistence::Cluster;
    use persistence::membership::Member;
    use test_host::{NoEffects, PgMember, TestHost, caller, system};

    fn member(n: u128) -> Member {
        let details = serde_json::Value::Null;
        Member { id: MemberId(Uuid::from_u128(n)), name: n.to_string(), started_at: Utc::now(), details }
    }

    /// A session with a connection at this gateway.
    async fn attached(host: &TestHost, n: u128, gateway: Option<MemberId>) -> Uuid {
        let (id, active) = (Uuid::from_u128(n), Precondition { entity: Uuid::from_u128(99), version: 1 });
        let (allocation_id, node_id) = (AllocationId(active.entity), NodeId(Uuid::from_u128(98)));
        let token_sha256 = TokenDigest([1; 32]);
        let open = Request::Open { allocation_id, node_id, token_sha256, active };
        host.ask::<TerminalSession>(&caller("ann", TokenRole::User), id, open).await.unwrap();
        let attach = Instruction::Attach { token_sha256, active, gateway };
        host.ask::<TerminalSession>(&system(), id, attach).await.unwrap();
        id
    }

    #[tokio::test]
    async fn session_is_detached_where_its_gateway_has_left_or_was_silent_for_long_and_no_other_is() {
        let db = TestDatabase::fresh().await;
        let postgres = PgMember::start(&db.pool).await;
        let reads = Reads::new(db.pool.clone());
        let store: Arc<dyn Store> = Arc::new(postgres.store(&reads));
        let terms: Vec<_> = postgres.terms().collect();
        postgres.drop_published();
        let host = TestHost::start(store, terms, Arc::default(), Arc::new(NoEffects)).await;
        let announce = announcement::Command::Announce { severity: Severity::Info, message: "x".to_owned() };
        host.ask::<Announcement>(&caller("root", TokenRole::Admin), Uuid::from_u128(99), announce).await.unwrap();
        let (cluster, view) = (Cluster::new(db.pool.clone()), Arc::new(ClusterView::new(member(1))));
        let [living, killed, left] = [1, 2, 3].map(member);
        for known in [&living, &killed] {
            cluster.heartbeat(known).await.unwrap();
        }
        let sessions = [
            attached(&host, 11, Some(living.id)).await,
            attached(&host, 12, Some(killed.id)).await,
            attached(&host, 13, Some(left.id)).await,
            attached(&host, 14, None).await,
        ];
        let (directory, entities) = (host.directory.clone(), Arc::clone(host.directory.host()));
        let gateways = TerminalGateways::new(directory, entities, reads.clone(), Arc::clone(&view)).unwrap();
        // One of the two members has a heartbeat before each read.
        let read = async |ago: u64| {
            cluster.heartbeat(&living).await.unwrap();
            let members = cluster.members().await.unwrap();
            view.update(members, &[], Instant::now().checked_sub(Duration::from_secs(ago)).unwrap());
        };
        let detached = async || {
            for (_, terminal) in gateways.abandoned(&[]).await {
                assert!(gateways.detach(terminal).await);
            }
            let mut detached = Vec::new();
            for session in sessions {
                let found = host.directory.host().committed_state::<TerminalSession>(session).unwrap().0;
                if matches!(found.phase, Phase::Detached { .. }) {
                    detached.push(session);
                }
            }
            detached
        };
        read(60).await;
        assert_eq!(detached().await, [sessions[2]], "this member has just begun to watch");
        for ago in (0..60).rev() {
            read(ago).await;
        }
        assert_eq!(detached().await, [sessions[1], sessions[2]]);
    }
}
