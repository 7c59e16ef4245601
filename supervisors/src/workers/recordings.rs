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
use persistence::outage_log::RetryLog;
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

/// The pause after a check that failed.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

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
    /// Never; what fails is retried after a pause.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = interval_at(Instant::now() + FIRST_RUN_AFTER, INTERVAL);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let retries = RetryLog::new("remove expired recordings");
        loop {
            ticker.tick().await;
            if retries.observe(self.delete_expired().await).is_none() {
                ticker.reset_after(RETRY_PAUSE);
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
        let row = match self.reads.entity(entity).await {
            Ok(Some(row)) => row,
            Ok(None) => return Ok(false),
            Err(error) => match error.seal_refused() {
                // A session that was altered keeps its recording, and does not block others.
                Some(refusal) => return Ok(left(recording, &refusal.to_string())),
                None => return Err(error.into()),
            },
        };
        let session: TerminalSession = serde_json::from_str(&row.body)?;
        let now = self.environment.now();
        let stored = self.environment.policy().int(PolicyKey::TerminalRecordingRetention, &session.scopes(), now);
        let Phase::Closed { at, .. } = session.phase else { return Ok(false) };
        if at + TimeDelta::days(stored) > now {
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
            Err(AskError::Parked { reason }) => Ok(left(recording, &reason)),
            Err(error) => Err(anyhow::anyhow!("terminal session {} does not answer: {error}", recording.session)),
        }
    }
}

/// Logs why a recording is not judged. It is not deleted.
fn left(recording: &Recording, reason: &str) -> bool {
    let session = recording.session;
    let entity = EntityRef { kind: EntityKind::TerminalSession, id: session.0 };
    tracing::warn!(
        resource_name = %entity,
        error_code = "recording_not_deleted",
        reason,
        "the recording of terminal session {session} is not deleted at its end of retention: {reason}. Restore the session's row as the \
         runbook ops.snapshot.altered says; a later check deletes the recording."
    );
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use actors::shell_dependencies::Store;
    use domain::announcement::{self, Announcement, Severity};
    use domain::authz::TokenRole;
    use domain::precondition::Precondition;
    use domain::terminal_session::{Request, TokenDigest};
    use domain::{AllocationId, NodeId, TerminalSessionId};
    use local_servers::test_database::TestDatabase;
    use persistence::envelope_encryption::KeyRing;
    use persistence::recordings::{Chunk, ChunkOwner};
    use persistence::{Secrets, SnapshotSealer};
    use secrecy::SecretSlice;
    use test_host::{CapturedLog, NoEffects, PgMember, TestEnvironment, TestHost, caller};

    fn sealer() -> SnapshotSealer {
        SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), None).unwrap()
    }

    /// A closed session with a recording.
    async fn recorded(host: &TestHost, recordings: &Recordings, n: u128) -> TerminalSessionId {
        let (session, active) =
            (TerminalSessionId(Uuid::from_u128(n)), Precondition { entity: Uuid::from_u128(99), version: 1 });
        let (allocation_id, node_id) = (AllocationId(active.entity), NodeId(Uuid::from_u128(98)));
        let ann = caller("ann", TokenRole::User);
        let open = Request::Open { allocation_id, node_id, token_sha256: TokenDigest([1; 32]), active };
        host.ask::<TerminalSession>(&ann, session.0, open).await.unwrap();
        host.ask::<TerminalSession>(&ann, session.0, Request::EndByUser).await.unwrap();
        let of = ChunkOwner { session, owner: "ann", allocation: allocation_id, node: node_id };
        let chunk = Chunk { seq: 0, frames: b"frames", lost_bytes: 0, micros: 1, ends: true };
        recordings.store_chunk(&of, &chunk, 1 << 20).await.unwrap();
        session
    }

    #[tokio::test]
    async fn recording_of_an_altered_session_stays_and_is_logged_with_what_to_do() {
        let db = TestDatabase::fresh().await;
        let member = PgMember::with(&db.pool, |config| config.seals = Some(sealer())).await;
        let reads = Reads::new(db.pool.clone()).sealed(sealer());
        let store: Arc<dyn Store> = Arc::new(member.store(&reads));
        let terms: Vec<_> = member.terms().collect();
        member.drop_published();
        let host = TestHost::start(store, terms, Arc::default(), Arc::new(NoEffects)).await;
        let announce = announcement::Command::Announce { severity: Severity::Info, message: "x".to_owned() };
        host.ask::<Announcement>(&caller("root", TokenRole::Admin), Uuid::from_u128(99), announce).await.unwrap();
        let ring = KeyRing::parse(&format!("active k\nkey k {}=", "A".repeat(43))).unwrap();
        let recordings = Secrets::new(db.pool.clone(), Arc::new(ring)).recordings();
        let altered = recorded(&host, &recordings, 11).await;
        let intact = recorded(&host, &recordings, 12).await;
        let alteration = "UPDATE entity SET body = jsonb_set(body, '{attachments}', '7') WHERE id = $1";
        sqlx::query(alteration).bind(altered.0).execute(&db.pool).await.unwrap();

        let shared = Arc::clone(host.directory.host());
        let clock = Arc::<TestEnvironment>::default();
        clock.advance(TimeDelta::days(31));
        let retention =
            RecordingRetention::new(host.directory.clone(), shared, reads, recordings.clone(), clock).unwrap();
        let (log, logging) = CapturedLog::start();
        retention.delete_expired().await.unwrap();
        drop(logging);
        let lines = log.lines();
        assert!(recordings.get(altered).await.unwrap().is_some());
        assert!(recordings.get(intact).await.unwrap().is_none(), "the others are deleted");
        let logged: Vec<_> =
            lines.iter().filter(|line| line["fields"]["error_code"] == "recording_not_deleted").collect();
        let [line] = logged.as_slice() else { panic!("{lines:?}") };
        assert_eq!(line["level"], "WARN");
        let message = line["fields"]["message"].as_str().unwrap();
        assert!(message.contains(&altered.0.to_string()) && message.contains("ops.snapshot.altered"), "{message}");
    }
}
