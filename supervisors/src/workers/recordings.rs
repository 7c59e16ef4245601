//! Deletes recordings of terminals that are older than policy `terminal.recording_retention_days` lets them be, each member those of its
//! own shards. That one is forgotten is committed first, and audited; a member that dies in between finds its rows again.

use actors::place::shard_of;
use actors::ports::World;
use actors::{AskError, Asked, Directory, Host};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::policy::Key;
use domain::terminal_session::{Command, Phase, TerminalSession};
use domain::{Action, EntityRef, Kind, Permit, Principal};
use persistence::read::Cursor;
use persistence::recordings::{Recording, RecordingFilter};
use persistence::{Reads, Recordings};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use uuid::Uuid;

/// A day or so does not matter.
const TURN: Duration = Duration::from_secs(600);
/// By then a member that has just started has its shards.
const FIRST_TURN: Duration = Duration::from_secs(15);

/// Recordings that are read at once.
const AT_ONCE: i64 = 200;

/// No policy forgets what is younger.
const YOUNGEST: TimeDelta = TimeDelta::days(1);

const ASK_WITHIN: TimeDelta = TimeDelta::seconds(5);

/// See the module.
pub struct Retention {
    pub directory: Directory,
    pub host: Arc<Host>,
    pub reads: Reads,
    pub recordings: Recordings,
    pub world: Arc<dyn World>,
    permit: Permit,
}

impl Retention {
    /// # Errors
    /// Where this worker may not say so.
    pub fn new(
        directory: Directory,
        host: Arc<Host>,
        reads: Reads,
        recordings: Recordings,
        world: Arc<dyn World>,
    ) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system("recordings"), Action::Advance)?;
        Ok(Self { directory, host, reads, recordings, world, permit })
    }

    /// Works, turn by turn.
    ///
    /// # Errors
    /// Never; what fails is taken up again at the next turn.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut turn = interval_at(Instant::now() + FIRST_TURN, TURN);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            turn.tick().await;
            if let Err(error) = self.turn().await {
                tracing::warn!(error = format!("{error:#}"), "recordings that are too old are still there");
            }
        }
    }

    async fn turn(&self) -> anyhow::Result<()> {
        let mut after = None;
        loop {
            let page = self.recordings.list(&RecordingFilter::default(), after, AT_ONCE).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(Cursor { created_at: last.created_at, id: last.session.0 });
            for recording in &page {
                if recording.created_at + YOUNGEST > self.world.now() {
                    return Ok(());
                }
                let is_mine = self.host.term(shard_of(recording.session.0)).is_some();
                if is_mine && self.is_over(recording).await? {
                    self.recordings.forget(recording.session).await?;
                }
            }
        }
    }

    /// Whether its session says, committed, that it is forgotten.
    async fn is_over(&self, recording: &Recording) -> anyhow::Result<bool> {
        let entity = EntityRef { kind: Kind::TerminalSession, id: recording.session.0 };
        let Some(row) = self.reads.entity(entity).await? else { return Ok(false) };
        let session: TerminalSession = serde_json::from_str(&row.body)?;
        let now = self.world.now();
        let kept = self.world.policy().int(Key::TerminalRecordingRetention, &session.scopes(), now);
        let Phase::Closed { at, .. } = session.phase else { return Ok(false) };
        if at + TimeDelta::days(kept) > now {
            return Ok(false);
        }
        let asked = Asked::new(&self.permit, Uuid::now_v7().to_string(), Utc::now() + ASK_WITHIN);
        match self.directory.ask::<TerminalSession>(&self.permit, entity.id, Command::ForgetRecording, asked).await {
            Ok(_) => Ok(true),
            // One that is parked keeps what it has, and hinders nobody else.
            Err(AskError::Parked { .. }) => Ok(false),
            Err(error) => Err(anyhow::anyhow!("terminal session {} does not answer: {error}", recording.session)),
        }
    }
}
