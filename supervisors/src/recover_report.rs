//! `gpuaas recover-report`: what a restored database has lost (decision 0069). It changes nothing, and may run before and after the incarnation
//! was begun, as long as the streams have the events of the lost time.

pub mod losses;
pub mod sources;

use crate::config::{Config, DatabaseArgs};
use crate::restore_gate;
use crate::startup::storage::open_database;
use chrono::{DateTime, TimeDelta, Utc};
use losses::{Loss, LossKind};
use persistence::membership::incarnation_of;
use persistence::{Cluster, Reads};
use secrecy::SecretString;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Longer than the streams store events.
const LOOKBACK: TimeDelta = TimeDelta::days(3);

/// Where to look.
#[derive(Debug, clap::Args)]
pub struct RecoverReportArgs {
    /// A user of NATS who may read streams; members' own may not.
    #[arg(long, env = "GPUAAS_OPERATOR_NATS_URL", hide_env_values = true)]
    nats_url: Option<SecretString>,
    /// Copies of nodes' state: a folder for each node, with the folder `allocations` of /var/lib/gpuaas-agent in it.
    #[arg(long)]
    nodes: Option<PathBuf>,
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
    #[command(flatten)]
    database: DatabaseArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OutputFormat {
    Text,
    Json,
}

/// What a source has shown.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum SourceReading {
    Read {
        count: usize,
    },
    /// Read, but not all of it.
    Partly {
        count: usize,
        why: String,
    },
    NotRead {
        why: String,
    },
    /// Not asked for, or not configured.
    Left {
        why: &'static str,
    },
}

#[derive(Debug, Serialize)]
struct RecoverReport {
    /// The last transition that the database has of the time before.
    restored_to: Option<DateTime<Utc>>,
    /// The incarnation that was begun since; `None` before.
    incarnation_begun: Option<i64>,
    sources: BTreeMap<&'static str, SourceReading>,
    lost_events: BTreeMap<String, u64>,
    losses: Vec<Loss>,
}

/// Prints the report. It exits with 0 where nothing is lost, with 1 where something is, and with 2 where a source could not be read.
///
/// # Errors
/// Where the database cannot be read.
pub async fn run(args: RecoverReportArgs) -> anyhow::Result<ExitCode> {
    let config = Config::with_database("all", &args.database)?;
    let report = gather(&config, &args).await?;
    let mut out = std::io::stdout().lock();
    match args.output {
        OutputFormat::Json => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        OutputFormat::Text => out.write_all(text(&report).as_bytes())?,
    }
    let is_unknown = |it: &SourceReading| matches!(it, SourceReading::NotRead { .. } | SourceReading::Partly { .. });
    Ok(if report.sources.values().any(is_unknown) {
        ExitCode::from(2)
    } else if report.losses.is_empty() && report.lost_events.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

async fn gather(config: &Config, args: &RecoverReportArgs) -> anyhow::Result<RecoverReport> {
    let pool = open_database(config).await?;
    let reads = Reads::new(pool.clone());
    let incarnation = Cluster::new(pool.clone()).incarnation().await?;
    let (database, bus) = restore_gate::read(config, &pool).await?;
    // What members have committed since an incarnation began is not of the lost time.
    let has_begun = incarnation > 0 && restore_gate::judge(&database, &bus).is_ok();
    let ends = reads.last_commits(has_begun.then_some(incarnation), Utc::now() - LOOKBACK).await?;
    let restored_to = ends.values().map(|end| end.at).max();

    let mut sources = BTreeMap::new();
    let url = args.nats_url.as_ref().unwrap_or(&config.nats_url);
    let published = match sources::events(url, config.nats_ca.as_deref()).await {
        Ok((events, 0)) => {
            sources.insert("events", SourceReading::Read { count: events.len() });
            events
        }
        Ok((events, strange)) => {
            let why = format!("{strange} messages are no events of this release");
            sources.insert("events", SourceReading::Partly { count: events.len(), why });
            events
        }
        Err(error) => {
            sources.insert("events", SourceReading::NotRead { why: format!("{error:#}") });
            Vec::new()
        }
    };
    let tenants = match args.nodes.as_deref().map(sources::tenants) {
        Some(Ok(tenants)) => {
            sources.insert("nodes", SourceReading::Read { count: tenants.len() });
            tenants
        }
        Some(Err(error)) => {
            sources.insert("nodes", SourceReading::NotRead { why: format!("{error:#}") });
            Vec::new()
        }
        None => {
            sources.insert("nodes", SourceReading::Left { why: "--nodes is not given" });
            Vec::new()
        }
    };
    let money = match (&config.payments, restored_to) {
        (Some(payments), Some(since)) => match sources::money(&*payments.open()?.processor, since).await {
            Ok((money, is_cut)) => {
                let (count, why) = (money.len(), "some objects could not be read".to_owned());
                let reading = if is_cut { SourceReading::Partly { count, why } } else { SourceReading::Read { count } };
                sources.insert("processor", reading);
                money
            }
            Err(error) => {
                sources.insert("processor", SourceReading::NotRead { why: format!("{error:#}") });
                Vec::new()
            }
        },
        (None, _) => {
            sources.insert("processor", SourceReading::Left { why: "no payment processor is configured" });
            Vec::new()
        }
        (Some(_), None) => {
            let why = "the database has no transition of the last days to begin from".to_owned();
            sources.insert("processor", SourceReading::NotRead { why });
            Vec::new()
        }
    };

    let is_before = |epoch| !has_begun || incarnation_of(domain::commit::Epoch(epoch)) < incarnation;
    let lost = losses::lost_events(published, &ends, is_before);
    let ids: Vec<_> = losses::entities_of(&lost, &tenants, &money).into_iter().collect();
    let states = reads.states_of(&ids).await?;
    let mut lost_events = BTreeMap::new();
    for it in &lost {
        *lost_events.entry(it.event.subject().to_owned()).or_default() += 1;
    }
    let losses = losses::losses(&lost, &tenants, &money, &states);
    Ok(RecoverReport { restored_to, incarnation_begun: has_begun.then_some(incarnation), sources, lost_events, losses })
}

fn text(report: &RecoverReport) -> String {
    let mut text = match report.restored_to {
        Some(at) => format!("the database ends at {}\n", at.to_rfc3339()),
        None => "the database has no transition of the last days\n".to_owned(),
    };
    for (name, reading) in &report.sources {
        text.push_str(&match reading {
            SourceReading::Read { count } => format!("{name}: {count} were read\n"),
            SourceReading::Partly { count, why } => format!("{name}: {count} were read, NOT ALL: {why}\n"),
            SourceReading::NotRead { why } => format!("{name}: NOT READ: {why}\n"),
            SourceReading::Left { why } => format!("{name}: left out: {why}\n"),
        });
    }
    let mut last = None::<LossKind>;
    for loss in &report.losses {
        if last.replace(loss.kind) != Some(loss.kind) {
            text.push_str(&format!("\n{}: {}\n", loss.kind.title(), loss.kind.next_step()));
        }
        text.push_str(&format!("  {}  {} (by {})\n", loss.subject, loss.detail, loss.source));
    }
    let count: u64 = report.lost_events.values().sum();
    text.push_str(&format!("\nlosses: {}; events that the database lacks: {count}\n", report.losses.len()));
    for (subject, count) in &report.lost_events {
        text.push_str(&format!("  {count:>6}  {subject}\n"));
    }
    text
}
