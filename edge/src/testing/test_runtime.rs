//! The operators' view of a standalone replica.

use crate::app_state::runtime_interface::{
    ClusterReport, EntityNode, EntityStatus, Readiness, RestartOutcome, Runtime, RuntimeError, Stats, Tree, TreeFilter,
    WorkerNode, WorkerState,
};
use crate::fleet_telemetry::{FleetSamples, FleetTelemetry, NodeSample};
use chrono::Utc;
use domain::restart_record::RuntimePart;
use domain::{EntityRef, MemberId, NodeId};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::Reads;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The runtime of one process, with entities from the store.
pub(super) struct TestRuntime {
    pub(super) reads: Reads,
    pub(super) fleet: FleetTelemetry,
}

impl Runtime for TestRuntime {
    fn tree(&self, _: TreeFilter) -> BoxFuture<'_, Result<Tree, RuntimeError>> {
        let tree = Tree {
            members: Vec::new(),
            silent: Vec::new(),
            entities_by_kind: BTreeMap::new(),
            overdue: 0,
            parked: 0,
            entities: Vec::new(),
            truncated: false,
            next_page: None,
        };
        async { Ok(tree) }.boxed()
    }

    fn entity(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<EntityNode>, RuntimeError>> {
        async move {
            let Some(row) = self.reads.entity(entity).await? else { return Ok(None) };
            Ok(Some(EntityNode {
                kind: entity.kind.to_string(),
                id: entity.id,
                shard: 0,
                member: None,
                member_name: None,
                status: EntityStatus::Awake,
                state: Some(row.state),
                version: row.version,
                since: None,
                waits_for: None,
                deadline_at: None,
                wakes_at: None,
                overdue: false,
                mailbox_depth: 0,
                restarts: 0,
                last_error: None,
            }))
        }
        .boxed()
    }

    fn worker(&self, member: MemberId, name: &str) -> BoxFuture<'_, Result<Option<WorkerNode>, RuntimeError>> {
        let there = member.0 == Uuid::from_u128(1) && ["timers", "committer-1"].contains(&name);
        let row = there.then(|| WorkerNode {
            name: name.to_owned(),
            under: "root".to_owned(),
            what: String::new(),
            state: WorkerState::Running,
            since: Utc::now(),
            restarts: 0,
            last_error: None,
            restartable: name == "timers",
            queue: None,
        });
        async { Ok(row) }.boxed()
    }

    fn restart(&self, _: RuntimePart) -> BoxFuture<'_, Result<RestartOutcome, RuntimeError>> {
        async { Ok(RestartOutcome::Restarted) }.boxed()
    }

    fn cluster(&self) -> BoxFuture<'_, Result<ClusterReport, RuntimeError>> {
        async { Err(RuntimeError("there is no cluster in this test".into())) }.boxed()
    }

    fn fleet(&self) -> BoxFuture<'_, FleetSamples> {
        let mut samples = FleetSamples::default();
        samples.merge(self.fleet.summaries(0, 1));
        async { samples }.boxed()
    }

    fn node_load(&self, node_id: NodeId) -> BoxFuture<'_, Option<NodeSample>> {
        let sample = self.fleet.sample(node_id);
        async { sample }.boxed()
    }

    fn provider_keys_changed(&self) {}

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        let checks = [("postgres".to_owned(), "ok".to_owned())].into();
        async { Readiness { ready: true, checks, starting: false } }.boxed()
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn metrics(&self) -> String {
        "provisioning_queue_depth 0\n".to_owned()
    }
}
