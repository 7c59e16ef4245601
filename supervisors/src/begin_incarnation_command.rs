//! `gpuaas begin-incarnation`: admits members to a database that was restored from a backup (decision 0069).

use crate::cluster::recovery_stream::{self, BusMark, PublishedMark};
use crate::cluster::{FAILURE_TIMEOUT, nats};
use crate::config::{Config, DatabaseArgs};
use crate::restore_gate::{RestoreFinding, is_connected, judge};
use crate::startup::storage::open_database;
use anyhow::Context as _;
use async_nats::Client;
use chrono::Utc;
use futures::StreamExt as _;
use persistence::{Cluster, RecoveryMarks, Secrets};
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A member publishes a mark every second: one that is silent for so long does not run.
const LISTEN: Duration = Duration::from_secs(4);

/// What is checked before, and the database.
#[derive(Debug, clap::Args)]
pub struct BeginIncarnationArgs {
    /// Begin one even where nothing looks restored, or where NATS has the marks of another cluster.
    #[arg(long)]
    force: bool,
    /// Do not look on NATS for members that still run on another database.
    #[arg(long)]
    without_nats: bool,
    #[command(flatten)]
    database: DatabaseArgs,
}

/// The incarnation, and whether it was begun by this call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IncarnationOutcome {
    New(i64),
    NotNeeded(i64),
}

/// Begins an incarnation of the cluster on a restored database, and prints it. Without `--force`, nothing is begun where nothing was restored.
///
/// # Errors
/// Where the database cannot be used, a member still runs anywhere, or NATS cannot be asked for one.
pub async fn run(args: BeginIncarnationArgs) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    match begin(args).await? {
        IncarnationOutcome::New(incarnation) => writeln!(out, "incarnation {incarnation}; members may start")?,
        IncarnationOutcome::NotNeeded(incarnation) => {
            writeln!(out, "nothing was restored since incarnation {incarnation} began; members may start")?;
        }
    }
    Ok(())
}

async fn begin(args: BeginIncarnationArgs) -> anyhow::Result<IncarnationOutcome> {
    let BeginIncarnationArgs { force, without_nats, database } = args;
    let config = Config::with_database("all", &database)?;
    let pool = open_database(&config).await?;
    let cluster = Cluster::new(pool.clone());
    if let Some(heartbeat) = cluster.alive(FAILURE_TIMEOUT).await?.first() {
        anyhow::bail!("{} still runs; stop every member first", heartbeat.member.name);
    }
    let client = nats::connect(&config.nats_url, config.nats_ca.as_deref(), &config.member_name).await?;
    let is_reachable = !without_nats && is_connected(&client).await;
    if !is_reachable && !without_nats {
        anyhow::bail!(
            "NATS cannot be reached, so that a member which still runs on another database would not be seen. Start NATS, or pass \
             --without-nats once every member is known to be stopped"
        );
    }
    let bus = if is_reachable {
        if let Some(running) = running_member(&client, &config).await? {
            anyhow::bail!("{running} still runs, on another database; stop every member first, wherever it is");
        }
        recovery_stream::read(&client, &config.key_ring).await
    } else {
        BusMark::Unknown("it was not asked".to_owned())
    };
    let secrets = Secrets::new(pool.clone(), Arc::clone(&config.key_ring));
    secrets
        .rewrap()
        .check()
        .await
        .context("SVC_KEK_FILE: the key ring does not fit the database; nothing was begun")?;
    let database = RecoveryMarks::new(pool).read().await?;
    match judge(&database, &bus) {
        // Without an answer of NATS a restore may have gone unnoticed, and an incarnation too many does no harm.
        Ok(()) if !force && matches!(bus, BusMark::Of(_)) => {
            return Ok(IncarnationOutcome::NotNeeded(cluster.incarnation().await?));
        }
        Err(finding @ RestoreFinding::AnotherCluster { .. }) if !force => return Err(finding.into()),
        Ok(()) | Err(_) => {}
    }
    if is_reachable {
        // NATS that was lost with the database has no stream. Where none can be made, nothing is begun.
        recovery_stream::make(&client, config.nats_stream_copies)
            .await
            .context("NATS has no place for the mark; nothing was begun")?;
    }
    let above = if let BusMark::Of(mark) = &bus { mark.incarnation } else { 0 };
    let begun = cluster.begin_incarnation(above).await?;
    if is_reachable {
        let mark = PublishedMark::new(&begun, &config.member_name, Utc::now());
        // The database alone admits members, too: its incarnation is above all that the bus has.
        recovery_stream::publish(&client, &config.key_ring, &mark).await.context("it is begun, but not published")?;
    }
    Ok(IncarnationOutcome::New(begun.position.incarnation))
}

/// A member that publishes marks while this waits, if there is one.
async fn running_member(client: &Client, config: &Config) -> anyhow::Result<Option<String>> {
    let mut marks = recovery_stream::subscribe(client).await?;
    let until = Instant::now() + LISTEN;
    while let Ok(Some(message)) = tokio::time::timeout_at(until, marks.next()).await {
        if let Some(mark) = PublishedMark::open(&config.key_ring, &message.payload) {
            return Ok(Some(mark.member));
        }
    }
    Ok(None)
}
