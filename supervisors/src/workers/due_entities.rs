//! The entities of one kind whose timer is due, for a worker that only members with its role have: those in this member's shards, and those in
//! the shards of owners without the role.

use crate::cluster::ClusterView;
use crate::process_roles::ProcessRole;
use actors::Directory;
use actors::shell_dependencies::Environment;
use domain::EntityKind;
use persistence::Reads;
use persistence::outage_log::RetryLog;
use persistence::queries::DueTimer;
use std::sync::Arc;
use uuid::Uuid;

pub(super) struct DueEntities {
    pub directory: Directory,
    pub view: Arc<ClusterView>,
    pub reads: Reads,
    pub environment: Arc<dyn Environment>,
    pub role: ProcessRole,
    pub kind: EntityKind,
    /// The most that one poll returns.
    pub page_size: u32,
}

impl DueEntities {
    /// The ones that have waited longest, without those with these ids; none where they cannot be read.
    pub(super) async fn find(self: Arc<Self>, excluded: Vec<Uuid>) -> Vec<(Uuid, DueTimer)> {
        let mut shards: Vec<_> = self.directory.host().terms().iter().map(|term| term.shard).collect();
        shards.extend(self.view.shards_without(self.role));
        if shards.is_empty() {
            return Vec::new();
        }
        static RETRIES: RetryLog = RetryLog::new("read which entities are due");
        let due = self.reads.due_timers(&shards, &[self.kind], self.environment.now(), &excluded, self.page_size).await;
        RETRIES.observe(due).into_iter().flatten().map(|due| (due.entity.id, due)).collect()
    }
}
