//! Deletes terminal recordings that are older than policy `terminal.recording_retention_days` allows, each member those of its own shards.
//! The deletion is committed in the session first, and audited; after a crash in between the rows are found again.

use super::WorkerDependencies;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::sharding::shard_of;
use actors::shell_dependencies::Environment;
use actors::{AskError, CommandContext, Directory, Host};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::policy::PolicyKey;
use domain::terminal_session::{Maintenance, Phase, TerminalSession};
use domain::{Action, EntityKind, EntityRef, Permit, Principal};
use persistence::queries::Cursor;
use persistence::recordings::{Recording, RecordingFilter};
use persistence::{Reads, Recordings};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use uuid::Uuid;

/// How often recordings are checked. Some delay does not matter, since the retention is in days.
const INTERVAL: Duration = Duration::from_secs(600);
/// The first check: by then a member that has just started has its shards.
const FIRST_RUN_AFTER: Duration = Duration::from_secs(15);

/// Recordings that are read at once.
const PAGE_SIZE: i64 = 200;

/// No policy allows a shorter retention.
const MIN_RETENTION: TimeDelta = TimeDelta::days(1);

const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(5);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, actors, .. } = &parts.stages;
    let environment = Arc::clone(&actors.environment) as Arc<dyn Environment>;
    let (directory, host) = (actors.directory.clone(), Arc::clone(&actors.host));
    let (reads, recordings) = (storage.reads.clone(), storage.secrets.recordings());
    let retention = Arc::new(RecordingRetention::new(directory, host, reads, recordings, environment)?);
    Ok(task(&retention, |retention| async move { retention.run().await }))
}

/// Deletes expired recordings.
pub struct RecordingRetention {
    pub directory: Directory,
    pub host: Arc<Host>,
    pub reads: Reads,
    pub recordings: Recordings,
    pub environment: Arc<dyn Environment>,
    permit: Permit,
}

impl RecordingRetention {
    /// # Errors
    /// Where this worker is not authorized.
    pub fn new(
        directory: Directory,
        host: Arc<Host>,
        reads: Reads,
        recordings: Recordings,
        environment: Arc<dyn Environment>,
    ) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system("recordings"), Action::Advance)?;
        Ok(Self { directory, host, reads, recordings, environment, permit })
    }

    /// Deletes, periodically.
    ///
    /// # Errors
    /// Never; what fails is retried in the next round.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = interval_at(Instant::now() + FIRST_RUN_AFTER, INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticker.tick().await;
            if let Err(error) = self.delete_expired().await {
                tracing::warn!(error = format!("{error:#}"), "recordings that are too old are still there");
            }
        }
    }

    async fn delete_expired(&self) -> anyhow::Result<()> {
        let mut after = None;
        loop {
            let page = self.recordings.list(&RecordingFilter::default(), after, PAGE_SIZE).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(Cursor { created_at: last.created_at, id: last.session.0 });
            for recording in &page {
                if recording.created_at + MIN_RETENTION > self.environment.now() {
                    return Ok(());
                }
                let is_mine = self.host.term(shard_of(recording.session.0)).is_some();
                if is_mine && self.forget_if_expired(recording).await? {
                    self.recordings.delete(recording.session).await?;
                }
            }
        }
    }

    /// Whether the deletion is committed in the recording's session.
    async fn forget_if_expired(&self, recording: &Recording) -> anyhow::Result<bool> {
        let entity = EntityRef { kind: EntityKind::TerminalSession, id: recording.session.0 };
        let Some(row) = self.reads.entity(entity).await? else { return Ok(false) };
        let session: TerminalSession = serde_json::from_str(&row.body)?;
        let now = self.environment.now();
        let kept = self.environment.policy().int(PolicyKey::TerminalRecordingRetention, &session.scopes(), now);
        let Phase::Closed { at, .. } = session.phase else { return Ok(false) };
        if at + TimeDelta::days(kept) > now {
            return Ok(false);
        }
        let context = CommandContext::new(&self.permit, Uuid::now_v7().to_string(), Utc::now() + COMMAND_TIMEOUT);
        match self
            .directory
            .ask::<TerminalSession>(&self.permit, entity.id, Maintenance::ForgetRecording.into(), context)
            .await
        {
            Ok(_) => Ok(true),
            // A parked session keeps its recording, and does not block others.
            Err(AskError::Parked { .. }) => Ok(false),
            Err(error) => Err(anyhow::anyhow!("terminal session {} does not answer: {error}", recording.session)),
        }
    }
}
