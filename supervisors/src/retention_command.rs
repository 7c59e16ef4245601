//! `gpuaas retention`: how large the tables are and grow, what the policies keep, what the next run removes, and when the disk is full.

use crate::workers::retention::retained_months;
use crate::workers::sweep::command_retention;
use anyhow::Context;
use chrono::{DateTime, Utc};
use domain::EntityKind;
use nix::sys::statvfs::statvfs;
use persistence::Reads;
use persistence::pool::{self, PoolConfig};
use persistence::retention::{self, MonthlyLog, RetentionCutoffs, RetentionMonths, count_ended, partitions};
use persistence::table_sizes::{DailyGrowth, TableSize, daily_growth, database_size, oldest_rows, table_sizes};
use secrecy::SecretString;
use serde::Serialize;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The database and the disk.
#[derive(Debug, clap::Args)]
pub struct RetentionArgs {
    /// The size in bytes of the file system with Postgres' data, where that is not on this machine or its folder cannot be seen.
    #[arg(long, value_name = "BYTES")]
    disk_bytes: Option<u64>,
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    output: OutputFormat,
    #[arg(long, env = "SVC_DATABASE_URL", hide_env_values = true)]
    database_url: Option<SecretString>,
    /// The authorities that the database's certificate is verified with.
    #[arg(long, env = "SVC_DATABASE_CA_PATH")]
    database_ca: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OutputFormat {
    Text,
    Json,
}

#[derive(Debug, Serialize)]
struct RetentionReport {
    retained_months: BTreeMap<&'static str, u32>,
    /// Largest first.
    tables: Vec<TableReport>,
    database: DatabaseReport,
}

#[derive(Debug, Serialize)]
struct TableReport {
    name: String,
    #[serde(flatten)]
    size: TableSize,
    /// `None` before there is a sample that is an hour old.
    bytes_per_day: Option<i64>,
    /// A time, or the oldest month; `None` where no index says so, and where there is no row.
    oldest: Option<String>,
    retention: String,
    next_run_removes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DatabaseReport {
    bytes: u64,
    bytes_per_day: Option<i64>,
    free_bytes: Option<u64>,
    /// `None` where the database does not grow, or where growth or disk is not known.
    full_in_days: Option<u64>,
}

/// Prints the report.
///
/// # Errors
/// Where the database cannot be read.
pub async fn run(args: RetentionArgs) -> anyhow::Result<()> {
    let url = args.database_url.context("SVC_DATABASE_URL is not set; it must name a postgres:// URL")?;
    let mut config = PoolConfig::new(url, args.database_ca);
    (config.application_name, config.connections) = ("gpuaas retention".to_owned(), 2);
    let report = gather(&pool::open_reached(&config).await?, args.disk_bytes, Utc::now()).await?;
    let mut out = std::io::stdout().lock();
    match args.output {
        OutputFormat::Json => writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?,
        OutputFormat::Text => out.write_all(text(&report).as_bytes())?,
    }
    Ok(())
}

async fn gather(pool: &PgPool, disk_bytes: Option<u64>, now: DateTime<Utc>) -> anyhow::Result<RetentionReport> {
    let now = retention::earlier_clock(pool, now).await?;
    let policy = Reads::new(pool.clone()).policy_book().await?;
    let (months, commands) = (retained_months(&policy, now), command_retention(&policy, now));
    let cutoffs = RetentionCutoffs::of(months, now);
    let sizes = table_sizes(pool).await?;
    let growth = daily_growth(pool, &sizes, now).await?;
    let oldest = oldest(pool).await?;
    let removals = removals(pool, &cutoffs).await?;
    let database = database_report(pool, &growth, disk_bytes).await?;
    let mut tables: Vec<_> = sizes
        .into_iter()
        .map(|(name, size)| TableReport {
            bytes_per_day: growth.tables.get(&name).copied(),
            oldest: oldest.get(name.as_str()).cloned(),
            retention: retention_of(&name, months, commands),
            next_run_removes: removals.get(name.as_str()).cloned().unwrap_or_default(),
            name,
            size,
        })
        .collect();
    tables.sort_by(|one, other| other.size.bytes.cmp(&one.size.bytes).then_with(|| one.name.cmp(&other.name)));
    let retained_months =
        [("history", months.history), ("audit", months.audit), ("ended_entities", months.ended_entities)].into();
    Ok(RetentionReport { retained_months, tables, database })
}

/// What keeps a table's rows, for operators.
fn retention_of(table: &str, months: RetentionMonths, commands: Duration) -> String {
    let fixed = match table {
        "history" => return format!("{} months (retention.history_months)", months.history),
        "audit" => return format!("{} months (retention.audit_months)", months.audit),
        "entity" => {
            return format!("ended ones {} months (retention.ended_entities_months)", months.ended_entities);
        }
        "command" => return format!("{} hours (retention.command_ids_hours)", commands.as_secs() / 3600),
        "audit_seal" | "audit_head" | "audit_checkpoint" => "as the audit log",
        "ledger" => "never removed",
        "outbox" => "until the event's effect is committed",
        "recording" | "recording_chunk" => "terminal.recording_retention_days",
        "table_size" => "90 days",
        "fleet_hour" | "fleet_hour_gpus" | "fleet_hour_rentals" | "fleet_hour_revenue" => {
            "retention.fleet_history_months"
        }
        _ => "as long as what it is about",
    };
    fixed.to_owned()
}

async fn oldest(pool: &PgPool) -> anyhow::Result<BTreeMap<&'static str, String>> {
    let rows = oldest_rows(pool).await?.into_iter();
    let mut oldest: BTreeMap<_, _> =
        rows.filter_map(|(table, at)| Some((table, at?.format("%Y-%m-%d %H:%M").to_string()))).collect();
    let months = partitions(pool).await?;
    for log in MonthlyLog::ALL {
        if let Some(first) = months.iter().find(|partition| partition.log == log) {
            oldest.insert(log.name(), first.month.to_string());
        }
    }
    Ok(oldest)
}

/// What the next run removes, by table.
async fn removals(pool: &PgPool, cutoffs: &RetentionCutoffs) -> anyhow::Result<BTreeMap<&'static str, Vec<String>>> {
    let mut removals: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for partition in retention::expired(&partitions(pool).await?, cutoffs) {
        removals.entry(partition.log.name()).or_default().push(partition.month.to_string());
    }
    for kind in EntityKind::ALL.iter().filter(|kind| !kind.ended_states().is_empty()) {
        match count_ended(pool, *kind, cutoffs.ended_entities).await? {
            0 => {}
            count => removals.entry("entity").or_default().push(format!("{count} {kind}")),
        }
    }
    Ok(removals)
}

async fn database_report(
    pool: &PgPool,
    growth: &DailyGrowth,
    disk_bytes: Option<u64>,
) -> anyhow::Result<DatabaseReport> {
    let bytes = database_size(pool).await?;
    let free_bytes = match disk_bytes {
        Some(disk) => Some(disk.saturating_sub(bytes)),
        None => free_on_this_machine(pool).await,
    };
    let full_in_days = free_bytes
        .zip(growth.database.and_then(|per_day| u64::try_from(per_day).ok()))
        .and_then(|(free, per_day)| free.checked_div(per_day));
    Ok(DatabaseReport { bytes, bytes_per_day: growth.database, free_bytes, full_in_days })
}

/// The free space of the file system of Postgres' data, where the server is on this machine and its user may see the setting.
async fn free_on_this_machine(pool: &PgPool) -> Option<u64> {
    let folder: Option<String> = sqlx::query_scalar(
        "SELECT setting FROM pg_settings WHERE name = 'data_directory'
         AND (inet_server_addr() IS NULL OR inet_server_addr() <<= '127.0.0.0/8' OR inet_server_addr() = '::1')",
    )
    .fetch_optional(pool)
    .await
    .ok()
    .flatten();
    let found = statvfs(Path::new(&folder?)).ok()?;
    Some(found.blocks_available() * found.fragment_size())
}

fn text(report: &RetentionReport) -> String {
    let header = ["TABLE", "SIZE", "ROWS", "PER DAY", "OLDEST", "RETENTION", "NEXT RUN REMOVES"].map(str::to_owned);
    let rows = report.tables.iter().map(|table| {
        [
            table.name.clone(),
            size_text(table.size.bytes),
            table.size.rows.to_string(),
            table.bytes_per_day.map_or_else(|| "unknown".to_owned(), growth_text),
            table.oldest.clone().unwrap_or_else(|| "-".to_owned()),
            table.retention.clone(),
            if table.next_run_removes.is_empty() { "nothing".to_owned() } else { table.next_run_removes.join(", ") },
        ]
    });
    let rows: Vec<_> = std::iter::once(header).chain(rows).collect();
    let widths: Vec<_> =
        (0..7).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<_> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
    let DatabaseReport { bytes, bytes_per_day, free_bytes, full_in_days } = &report.database;
    let growth =
        bytes_per_day.map_or_else(|| "an unknown growth".to_owned(), |it| format!("{} a day", growth_text(it)));
    let _ = write!(text, "\nThe database has {}, with {growth}. ", size_text(*bytes));
    let _ = match (free_bytes, full_in_days) {
        (None, _) => writeln!(text, "The disk is not known: give --disk-bytes, the size of Postgres' file system."),
        (Some(free), Some(days)) => writeln!(text, "{} are free: the disk is full in {days} days.", size_text(*free)),
        (Some(free), None) => writeln!(text, "{} are free.", size_text(*free)),
    };
    text
}

fn growth_text(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "+" };
    format!("{sign}{}", size_text(bytes.unsigned_abs()))
}

/// In the largest binary unit of which there is at least one.
fn size_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        (size, unit) = (size / 1024.0, unit + 1);
    }
    format!("{size:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use local_servers::test_database::TestDatabase;

    #[tokio::test]
    async fn report_names_what_the_next_run_removes_and_removes_nothing() {
        let db = TestDatabase::fresh().await;
        for statement in [
            "CREATE TABLE history_2024_01 PARTITION OF history FOR VALUES FROM ('2024-01-01 UTC') TO ('2024-02-01 UTC')",
            "INSERT INTO entity (id, kind, shard, version, state, body, created_at, updated_at) VALUES
                 (gen_random_uuid(), 'allocation', 1, 5, 'released', '{}', '2024-01-10T00:00:00Z', '2024-01-11T00:00:00Z')",
        ] {
            sqlx::query(statement).execute(&db.pool).await.unwrap();
        }
        for _ in 0..2 {
            let report = gather(&db.pool, Some(1 << 50), Utc::now()).await.unwrap();
            let of = |name| report.tables.iter().find(|table| table.name == name).unwrap();
            let (history, entity) = (of("history"), of("entity"));
            assert_eq!(
                (history.oldest.as_deref(), &*history.next_run_removes),
                (Some("2024-01"), &["2024-01".to_owned()][..])
            );
            let removes = ["1 allocation".to_owned()];
            assert_eq!((entity.oldest.as_deref(), &*entity.next_run_removes), (Some("2024-01-10 00:00"), &removes[..]));
            assert_eq!((&*of("ledger").retention, of("ledger").next_run_removes.len()), ("never removed", 0));
            let DatabaseReport { bytes, free_bytes, full_in_days, .. } = report.database;
            assert_eq!((free_bytes, full_in_days), (Some((1 << 50) - bytes), None), "growth is not known yet");
        }
        let known = gather(&db.pool, None, Utc::now()).await.unwrap().database.free_bytes;
        assert!(known.is_some_and(|free| free > 0), "the test's server is on this machine");
    }

    #[test]
    fn report_as_text_names_sizes_growth_and_the_day_of_the_full_disk() {
        let size = |bytes, rows, partitions| TableSize { bytes, rows, partitions };
        let months = RetentionMonths { history: 13, audit: 24, ended_entities: 13 };
        let table = |name: &str, size, bytes_per_day, oldest: Option<&str>, removes: &[&str]| TableReport {
            name: name.to_owned(),
            size,
            bytes_per_day,
            oldest: oldest.map(str::to_owned),
            retention: retention_of(name, months, Duration::from_secs(48 * 3600)),
            next_run_removes: removes.iter().map(|it| (*it).to_owned()).collect(),
        };
        let tables = vec![
            table("history", size(5 << 30, 31_000_000, 15), Some(300 << 20), Some("2025-01"), &["2025-01"]),
            table("entity", size(3 << 20, 900, 1), Some(-2048), Some("2024-11-02 10:00"), &["12 allocation"]),
            table("command", size(1 << 20, 90, 1), Some(0), None, &[]),
            table("ledger", size(16_384, 0, 1), None, None, &[]),
        ];
        let database = DatabaseReport {
            bytes: 6 << 30,
            bytes_per_day: Some(1 << 30),
            free_bytes: Some(90 << 30),
            full_in_days: Some(90),
        };
        let report = RetentionReport { retained_months: BTreeMap::new(), tables, database };
        let expected = [
            "TABLE    SIZE      ROWS      PER DAY     OLDEST            RETENTION                                               NEXT RUN REMOVES",
            "history  5.0 GiB   31000000  +300.0 MiB  2025-01           13 months (retention.history_months)                    2025-01",
            "entity   3.0 MiB   900       -2.0 KiB    2024-11-02 10:00  ended ones 13 months (retention.ended_entities_months)  12 allocation",
            "command  1.0 MiB   90        +0.0 KiB    -                 48 hours (retention.command_ids_hours)                  nothing",
            "ledger   16.0 KiB  0         unknown     -                 never removed                                           nothing",
            "",
            "The database has 6.0 GiB, with +1.0 GiB a day. 90.0 GiB are free: the disk is full in 90 days.",
        ];
        assert_eq!(text(&report).lines().collect::<Vec<_>>(), expected);
    }
}
