//! Postgres: the connection, the clock, what it promises of a commit, its standbys, and the schema.

use crate::as_the_service;
use crate::cluster::clock::ClockOffset;
use crate::config::installed_settings::InstalledSettings;
use chrono::{DateTime, TimeDelta, Utc};
use failures::chain;
use persistence::envelope_encryption::KeyRing;
use persistence::migrate::{Migrations, SchemaError};
use persistence::pool::{self, ConnectionError, PoolConfig};
use persistence::{Reads, Secrets};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use telemetry::diagnosis::DiagnosticFinding;

/// The oldest release that the service runs on.
const OLDEST: i64 = 15;

/// Connections that one replica opens at most: two pools, two lanes of commits, membership.
const CONNECTIONS_OF_A_REPLICA: i64 = 40;

/// How old the newest backup may be: a day, and an hour for the copying (as `deploy/alerts/backup.yaml`).
const OLDEST_BACKUP: TimeDelta = TimeDelta::hours(25);

/// A command as the service's user, with its settings and credentials.
const AS_THE_SERVICE: &str = "systemd-run --wait --pipe --collect --quiet -p DynamicUser=yes -p User=gpuaas \
    -p EnvironmentFile=/etc/gpuaas/gpuaas.env -p LoadCredential=kek:/etc/gpuaas/kek -p LoadCredential=tls.pem:/etc/gpuaas/tls.pem \
    -p LoadCredential=tls.key:/etc/gpuaas/tls.key";

/// The longest wait for that: its own limits, and the start of a process; less than the limit of the check.
const AS_THE_SERVICE_WITHIN: Duration = Duration::from_secs(14);
/// How the finding begins of a process that Postgres' socket does not admit.
const ANOTHER_USER: &str = "Postgres' socket admits the service's user alone: ";
const REPORT: &str = "look at `journalctl` for the unit that systemd-run started";

/// The parameters that are judged.
const PARAMETERS: [&str; 9] = [
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "synchronous_standby_names",
    "default_transaction_read_only",
    "max_connections",
    "superuser_reserved_connections",
    "wal_level",
    "archive_mode",
];

/// What a server says of itself.
#[derive(Clone, Debug)]
struct PostgresReading {
    /// By name.
    parameters: BTreeMap<String, String>,
    version: i64,
    is_standby: bool,
    /// Whether the user may make and alter tables.
    is_owner: bool,
    /// All connections to the server.
    connections: i64,
    /// Standbys that stream, and those of them that commits wait for.
    standbys: i64,
    synchronous_standbys: i64,
    /// The last attempt to archive WAL failed.
    archive_fails: bool,
}

pub(super) async fn examine(settings: Arc<InstalledSettings>) -> Vec<DiagnosticFinding> {
    let Some(mut config) = settings.database() else {
        let action = "set it; the check `settings` says what is wrong with it";
        return vec![DiagnosticFinding::error("SVC_DATABASE_URL is not set, or cannot be used", action)];
    };
    (config.application_name, config.connections) = ("gpuaas doctor".to_owned(), 1);
    (config.acquire_timeout, config.statement_timeout) = (Duration::from_secs(5), Duration::from_secs(4));
    if let Err(error) = pool::check_connection(&config).await {
        if as_the_service::is_needed(&error) && as_the_service::is_possible(&settings) {
            return match examine_as_the_service(&settings).await {
                Ok(found) => found.into_iter().map(judge_as_the_service).collect(),
                Err(why) => vec![judge_connection(&error, true), DiagnosticFinding::warning(why, REPORT)],
            };
        }
        return vec![judge_connection(&error, nix::unistd::geteuid().is_root())];
    }
    match opened(&config, &settings).await {
        Ok(findings) => findings,
        Err(error) => vec![unanswered(&error.to_string())],
    }
}

fn unanswered(error: &str) -> DiagnosticFinding {
    DiagnosticFinding::error(
        format!("Postgres accepts connections and does not answer: {error}"),
        "look at its log, at its disk, and at pg_stat_activity for transactions that hold locks",
    )
}

/// The findings of this check by a process that Postgres' socket admits.
async fn examine_as_the_service(settings: &InstalledSettings) -> Result<Vec<DiagnosticFinding>, String> {
    let arguments = ["doctor", "--output", "json", "--only", "postgres"];
    let printed = as_the_service::output(settings, &arguments, AS_THE_SERVICE_WITHIN).await?;
    parse_findings(&printed)
        .ok_or_else(|| format!("the command as that user printed {}", String::from_utf8_lossy(&printed)))
}

/// Postgres' socket refuses the service itself: that one starts as little as this process of its user connects.
fn judge_as_the_service(found: DiagnosticFinding) -> DiagnosticFinding {
    let Some(why) = found.summary.strip_prefix(ANOTHER_USER) else { return found };
    DiagnosticFinding::error(
        format!("Postgres' socket refuses the service's user: {why}"),
        "apt-get install libnss-systemd, by which Postgres knows that user, and restart Postgres; SVC_DATABASE_URL must name the user gpuaas, or \
         pg_ident.conf must map it",
    )
}

fn parse_findings(report: &[u8]) -> Option<Vec<DiagnosticFinding>> {
    let report: serde_json::Value = strict_json::from_slice(report).ok()?;
    let findings = report["checks"].as_array()?.first()?["findings"].as_array()?;
    let finding = |it: &serde_json::Value| {
        let (summary, action) = (it["summary"].as_str()?, it["action"].as_str().unwrap_or_default());
        Some(match it["level"].as_str()? {
            "ok" => DiagnosticFinding::ok(summary),
            "warning" => DiagnosticFinding::warning(summary, action),
            _ => DiagnosticFinding::error(summary, action),
        })
    };
    findings.iter().map(finding).collect()
}

fn judge_connection(error: &ConnectionError, is_root: bool) -> DiagnosticFinding {
    let text = chain(error);
    if as_the_service::is_needed(error) {
        let summary = format!("{ANOTHER_USER}{text}");
        return match is_root {
            true => {
                DiagnosticFinding::warning(summary, format!("run this as that user: {AS_THE_SERVICE} gpuaas doctor"))
            }
            false => DiagnosticFinding::warning(summary, "run this command as root"),
        };
    }
    let action = match error {
        ConnectionError::Down { .. } => {
            "start Postgres, or correct host and port in SVC_DATABASE_URL; check the network between"
        }
        ConnectionError::Refused { .. } => {
            "correct user, password and database in SVC_DATABASE_URL, and SVC_DATABASE_CA_PATH; look at pg_hba.conf and the server's log"
        }
        ConnectionError::ReadOnly { .. } => {
            "name the primary in SVC_DATABASE_URL, or all servers of the database (host1:5432,host2:5432)"
        }
        ConnectionError::StartupParameter { .. } => {
            "set ignore_startup_parameters = options in pgbouncer.ini, or name the database itself in SVC_DATABASE_URL"
        }
        ConnectionError::SharedSessions { .. } | ConnectionError::LostSetting { .. } => {
            "set pool_mode = session in pgbouncer.ini, or name the database itself in SVC_DATABASE_URL"
        }
        ConnectionError::AnotherDatabase { .. } | ConnectionError::Pool(_) => {
            "correct SVC_DATABASE_URL and SVC_DATABASE_CA_PATH"
        }
    };
    DiagnosticFinding::error(text, action)
}

async fn opened(config: &PoolConfig, settings: &InstalledSettings) -> anyhow::Result<Vec<DiagnosticFinding>> {
    let pool = pool::open(config)?;
    // The first statement opens the connection; the second one is measured.
    sqlx::query("SELECT 1").execute(&pool).await?;
    let sent = Instant::now();
    let time: DateTime<Utc> = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&pool).await?;
    let within = sent.elapsed() / 2;
    let mut findings = vec![judge_clock("Postgres", ClockOffset { ahead: Utc::now() - within - time, within })];
    let reading = read(&pool).await?;
    findings.extend(judge(&reading));
    if !reading.is_standby {
        findings.extend(schema(&pool, settings).await);
        // An older schema has no record of backups; the check of the schema says so.
        if let Ok(times) = Reads::new(pool).backup_times().await {
            findings.push(judge_backups(times.completed.values().max().copied(), Utc::now()));
        }
    }
    Ok(findings)
}

/// `server` is whose clock it was compared with.
pub(super) fn judge_clock(server: &str, offset: ClockOffset) -> DiagnosticFinding {
    let seconds = offset.ahead.as_seconds_f64();
    if offset.exceeds_tolerance() {
        let direction = if seconds > 0.0 { "ahead of" } else { "behind" };
        return DiagnosticFinding::error(
            format!("this machine's clock is {:.1} s {direction} that of {server}", seconds.abs()),
            "run a time service (chrony or systemd-timesyncd) on both machines, and look at which of them is wrong",
        );
    }
    DiagnosticFinding::ok(format!(
        "this machine's clock is {seconds:+.3} s off that of {server} (± {:.3} s)",
        offset.within.as_secs_f64()
    ))
}

async fn read(pool: &PgPool) -> Result<PostgresReading, sqlx::Error> {
    let names: Vec<String> = PARAMETERS.map(str::to_owned).to_vec();
    let rows: Vec<(String, String)> = sqlx::query_as("SELECT name, setting FROM pg_settings WHERE name = ANY ($1)")
        .bind(names)
        .fetch_all(pool)
        .await?;
    let (version, is_standby, is_owner): (i64, bool, bool) = sqlx::query_as(
        "SELECT current_setting('server_version_num')::bigint / 10000, pg_is_in_recovery(),
                has_schema_privilege(current_user, 'public', 'CREATE')",
    )
    .fetch_one(pool)
    .await?;
    // Of others' connections a user sees the number alone, and of standbys too, without pg_monitor: these are then taken from the setting.
    let (connections, standbys, synchronous_standbys, archive_fails): (i64, i64, i64, bool) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type IS NULL OR backend_type = 'client backend'),
                (SELECT count(*) FROM pg_stat_replication),
                (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')),
                (SELECT coalesce(last_failed_time > coalesce(last_archived_time, '-infinity'), false) FROM pg_stat_archiver)",
    )
    .fetch_one(pool)
    .await?;
    Ok(PostgresReading {
        parameters: rows.into_iter().collect(),
        version,
        is_standby,
        is_owner,
        connections,
        standbys,
        synchronous_standbys,
        archive_fails,
    })
}

fn judge(reading: &PostgresReading) -> Vec<DiagnosticFinding> {
    let mut findings = Vec::new();
    if reading.version < OLDEST {
        let summary = format!("Postgres {} is too old; the service needs {OLDEST} or later", reading.version);
        findings.push(DiagnosticFinding::error(summary, "upgrade it with pg_upgrade"));
    } else {
        findings.push(DiagnosticFinding::ok(format!("Postgres {}", reading.version)));
    }
    findings.push(judge_writes(reading));
    findings.extend(judge_durability(reading));
    findings.push(judge_standbys(reading));
    findings.push(judge_connections(reading));
    findings.push(judge_archive(reading));
    findings
}

fn judge_writes(reading: &PostgresReading) -> DiagnosticFinding {
    if reading.is_standby {
        return DiagnosticFinding::error(
            "this server is a standby: it is read-only",
            "point SVC_DATABASE_URL to the primary, or promote this one where the primary is lost for good",
        );
    }
    if is(reading, "default_transaction_read_only", "on") {
        return DiagnosticFinding::error(
            "default_transaction_read_only is on: every write fails",
            "ALTER ROLE, ALTER DATABASE or postgresql.conf set it; set it off. Cloud providers set it when the disk is full",
        );
    }
    if !reading.is_owner {
        return DiagnosticFinding::error(
            "the user may not make tables in the schema public: migrations would fail",
            "make the user the owner of the database: ALTER DATABASE … OWNER TO …",
        );
    }
    DiagnosticFinding::ok("this server is a primary, and the user may alter the schema")
}

fn is(reading: &PostgresReading, name: &str, value: &str) -> bool {
    reading.parameters.get(name).is_some_and(|setting| setting == value)
}

fn judge_durability(reading: &PostgresReading) -> Vec<DiagnosticFinding> {
    let off = |name, problem: fn(String, String) -> DiagnosticFinding, consequence: &str| {
        is(reading, name, "off").then(|| {
            problem(
                format!("{name} is off: {consequence}"),
                format!("set {name} = on in postgresql.conf and reload Postgres"),
            )
        })
    };
    let error = DiagnosticFinding::error::<String, String>;
    let mut findings: Vec<_> = [
        off("fsync", error, "a crash of the machine can destroy the database"),
        off("full_page_writes", error, "a crash in the middle of a page's write can destroy that page"),
        // Transitions of entities set it on themselves.
        off(
            "synchronous_commit",
            DiagnosticFinding::warning,
            "a crash can lose the last moments of what is not a transition",
        ),
    ]
    .into_iter()
    .flatten()
    .collect();
    if findings.is_empty() {
        let commit = reading.parameters.get("synchronous_commit").map_or("?", String::as_str);
        let summary = format!("fsync and full_page_writes are on, synchronous_commit is {commit}");
        findings.push(DiagnosticFinding::ok(summary));
    }
    findings
}

fn judge_standbys(reading: &PostgresReading) -> DiagnosticFinding {
    let names = reading.parameters.get("synchronous_standby_names").filter(|names| !names.trim().is_empty());
    match (reading.standbys, reading.synchronous_standbys, names) {
        (_, _, _) if reading.is_standby => DiagnosticFinding::ok("standbys are judged at the primary"),
        (0, _, None) => DiagnosticFinding::ok("no standby: the loss of this server's disk is a restore from a backup"),
        (_, 0, Some(names)) => DiagnosticFinding::warning(
            format!(
                "synchronous_standby_names is {names:?}, and no standby is synchronous (or this user may not see it): commits would wait"
            ),
            "start the standbys, or grant the user pg_monitor, so that this can be seen",
        ),
        (standbys, 0, None) => DiagnosticFinding::warning(
            format!("{standbys} standbys, none of them synchronous: a failover can lose acknowledged commits"),
            "set synchronous_standby_names (with Patroni: synchronous_mode and synchronous_mode_strict)",
        ),
        (standbys, synchronous, _) => {
            DiagnosticFinding::ok(format!("{standbys} standbys, {synchronous} of them synchronous"))
        }
    }
}

fn judge_connections(reading: &PostgresReading) -> DiagnosticFinding {
    let number = |name: &str| reading.parameters.get(name).and_then(|it| it.parse::<i64>().ok()).unwrap_or_default();
    let most = number("max_connections") - number("superuser_reserved_connections");
    let free = most - reading.connections;
    let used = reading.connections;
    if most < CONNECTIONS_OF_A_REPLICA {
        return DiagnosticFinding::error(
            format!("max_connections leaves {most} connections; a replica opens up to {CONNECTIONS_OF_A_REPLICA}"),
            "raise max_connections to 100 or more, and restart Postgres",
        );
    }
    if free < most / 10 {
        return DiagnosticFinding::warning(
            format!("{used} of {most} connections are in use"),
            "raise max_connections, or end idle sessions of other programs (pg_stat_activity)",
        );
    }
    DiagnosticFinding::ok(format!("{used} of {most} connections are in use"))
}

fn judge_archive(reading: &PostgresReading) -> DiagnosticFinding {
    if reading.archive_fails {
        return DiagnosticFinding::error(
            "the last attempt to archive WAL failed: the disk fills, and a restore ends before it",
            "look at archive_command and Postgres' log; pg_stat_archiver names the file",
        );
    }
    match reading.parameters.get("archive_mode").map(String::as_str) {
        Some("on" | "always") => DiagnosticFinding::ok("WAL is archived"),
        _ => DiagnosticFinding::warning(
            "WAL is not archived: a restore goes back to the last full backup",
            "set archive_mode and archive_command, for example by pgBackRest; see Backups and restore",
        ),
    }
}

fn judge_backups(newest: Option<DateTime<Utc>>, now: DateTime<Utc>) -> DiagnosticFinding {
    let Some(newest) = newest else {
        return DiagnosticFinding::warning(
            "the database was never backed up by gpuaas-backup",
            "set backups up (see Backups and restore); where another tool makes them, check there when the last one ended",
        );
    };
    let (age, at) = ((now - newest).num_hours(), newest.format("%Y-%m-%d %H:%M UTC"));
    if now - newest > OLDEST_BACKUP {
        return DiagnosticFinding::warning(
            format!("the last backup of the database is {age} hours old, of {at}"),
            "look at `journalctl -u 'gpuaas-backup@*'` on the machine with the database, and run `gpuaas-backup full`; see ops.backup",
        );
    }
    DiagnosticFinding::ok(format!("the last backup of the database is of {at}"))
}

async fn schema(pool: &PgPool, settings: &InstalledSettings) -> Vec<DiagnosticFinding> {
    let planned = Migrations::embedded().plan(pool).await;
    let expands = settings.get("SVC_MIGRATE_ON_START").is_some_and(|it| it == "true");
    let mut has_all_tables = false;
    let mut findings = match planned {
        Err(error) => vec![judge_schema_error(&error)],
        Ok(report) => {
            let expansions = report.missing.iter().filter(|it| it.kind.name() == "expand").count();
            has_all_tables = expansions == 0;
            vec![judge_schema(expansions, report.missing.len() - expansions, report.known, expands)]
        }
    };
    // Without an expansion the tables of what is sealed may be missing; a contract that waits removes none that this release reads.
    if has_all_tables {
        findings.extend(key_ring(pool, settings).await);
    }
    findings
}

fn judge_schema(expansions: usize, contracts: usize, known: i64, expands_on_start: bool) -> DiagnosticFinding {
    match (expansions, contracts) {
        (0, 0) => DiagnosticFinding::ok(format!("the schema is that of this release, up to migration {known:04}")),
        (0, contracts) => DiagnosticFinding::warning(
            format!("{contracts} contracts of this release are not applied"),
            "run `gpuaas migrate` once every replica runs this release; `gpuaas migrate --plan` names who is waited for",
        ),
        (expansions, _) if expands_on_start => DiagnosticFinding::warning(
            format!("{expansions} migrations of this release are not applied; the next start applies them"),
            "nothing, or `gpuaas migrate` before the start; `gpuaas migrate --plan` lists them",
        ),
        (expansions, _) => DiagnosticFinding::error(
            format!("{expansions} migrations of this release are not applied: the service does not start"),
            "run `gpuaas migrate` with this release, or set SVC_MIGRATE_ON_START=true",
        ),
    }
}

fn judge_schema_error(error: &SchemaError) -> DiagnosticFinding {
    DiagnosticFinding::error(chain(error), "`gpuaas migrate --plan` compares the database with this release once more")
}

/// Whether the key ring opens what the database has sealed.
async fn key_ring(pool: &PgPool, settings: &InstalledSettings) -> Option<DiagnosticFinding> {
    let path = settings.get("SVC_KEK_FILE")?;
    // An unreadable one is among the problems of settings.
    let ring = Arc::new(KeyRing::load(path.as_ref()).ok()?);
    Some(match Secrets::new(pool.clone(), ring).rewrap().check().await {
        Ok(()) => DiagnosticFinding::ok("the key ring opens what this database has sealed"),
        Err(error) => DiagnosticFinding::error(
            format!("the key ring does not fit the database: {}", chain(&error)),
            "use the key ring of this database, from where its copies are; a lost key cannot be made again",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;
    use telemetry::diagnosis::DiagnosticLevel::{self, Error, Ok, Warning};

    fn reading() -> PostgresReading {
        let parameters = [
            ("fsync", "on"),
            ("full_page_writes", "on"),
            ("synchronous_commit", "on"),
            ("synchronous_standby_names", ""),
            ("default_transaction_read_only", "off"),
            ("max_connections", "300"),
            ("superuser_reserved_connections", "3"),
            ("archive_mode", "on"),
        ];
        PostgresReading {
            parameters: parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            version: 16,
            is_standby: false,
            is_owner: true,
            connections: 40,
            standbys: 0,
            synchronous_standbys: 0,
            archive_fails: false,
        }
    }

    fn with(name: &str, value: &str) -> PostgresReading {
        let mut reading = reading();
        reading.parameters.insert(name.to_owned(), value.to_owned());
        reading
    }

    fn worst(reading: &PostgresReading) -> (DiagnosticLevel, String) {
        let worst = judge(reading).into_iter().max_by_key(|finding| finding.level).unwrap();
        (worst.level, worst.summary)
    }

    #[test]
    fn server_that_keeps_its_promises_has_no_problem() {
        assert_eq!(worst(&reading()).0, Ok, "{:?}", judge(&reading()));
        let replicated =
            PostgresReading { standbys: 2, synchronous_standbys: 1, ..with("synchronous_standby_names", "*") };
        assert_eq!(worst(&replicated).0, Ok);
    }

    #[test]
    fn each_fault_of_a_server_is_named() {
        for (faulty, level, named) in [
            (with("fsync", "off"), Error, "fsync is off"),
            (with("full_page_writes", "off"), Error, "full_page_writes is off"),
            (with("synchronous_commit", "off"), Warning, "synchronous_commit is off"),
            (with("default_transaction_read_only", "on"), Error, "read_only is on"),
            (with("max_connections", "20"), Error, "leaves 17 connections"),
            (with("archive_mode", "off"), Warning, "not archived"),
            (with("synchronous_standby_names", "standby1"), Warning, "no standby is synchronous"),
            (PostgresReading { is_standby: true, ..reading() }, Error, "read-only"),
            (PostgresReading { is_owner: false, ..reading() }, Error, "may not make tables"),
            (PostgresReading { version: 14, ..reading() }, Error, "too old"),
            (PostgresReading { standbys: 1, ..reading() }, Warning, "none of them synchronous"),
            (PostgresReading { connections: 280, ..reading() }, Warning, "280 of 297"),
            (PostgresReading { archive_fails: true, ..reading() }, Error, "archive WAL failed"),
        ] {
            let (found, summary) = worst(&faulty);
            assert!(found == level && summary.contains(named), "{named}: {found:?} {summary}");
        }
    }

    #[test]
    fn report_of_the_command_as_the_services_user_is_taken_over() {
        let finding = |level: &str| serde_json::json!({ "level": level, "summary": level, "action": (level != "ok").then_some("do it") });
        let report =
            serde_json::json!({ "checks": [{ "findings": [finding("ok"), finding("warning"), finding("error")] }] });
        let findings = parse_findings(report.to_string().as_bytes()).unwrap();
        let expected = vec![
            DiagnosticFinding::ok("ok"),
            DiagnosticFinding::warning("warning", "do it"),
            DiagnosticFinding::error("error", "do it"),
        ];
        assert_eq!(findings, expected);
        assert_eq!(parse_findings(b"{}"), None);
        assert_eq!(parse_findings(b"not JSON"), None);
    }

    #[test]
    fn socket_that_refuses_the_services_own_user_is_an_error() {
        let refused = DiagnosticFinding::warning(format!("{ANOTHER_USER}Peer authentication failed"), "as root");
        let found = judge_as_the_service(refused);
        assert!(found.level == Error && found.action.unwrap().contains("libnss-systemd"));
        let other = DiagnosticFinding::warning("WAL is not archived", "archive it");
        assert_eq!(judge_as_the_service(other.clone()), other);
    }

    #[test]
    fn clock_off_by_more_than_the_tolerance_is_an_error_in_both_directions() {
        let judge = |milliseconds, within| {
            judge_clock("Postgres", ClockOffset { ahead: TimeDelta::milliseconds(milliseconds), within })
        };
        let ahead = judge(5000, Duration::ZERO);
        assert!(ahead.level == Error && ahead.summary.contains("5.0 s ahead of that of Postgres"), "{ahead:?}");
        assert!(judge(-5000, Duration::ZERO).summary.contains("5.0 s behind"));
        assert_eq!(judge(1900, Duration::ZERO).level, Ok);
        assert_eq!(judge(5000, Duration::from_secs(4)).level, Ok, "a slow answer proves nothing");
    }

    #[test]
    fn schema_that_lacks_migrations_is_an_error_unless_the_start_applies_them() {
        assert_eq!(judge_schema(0, 0, 41, false).level, Ok);
        assert_eq!(judge_schema(0, 1, 41, false).level, Warning);
        assert_eq!(judge_schema(2, 0, 41, true).level, Warning);
        let behind = judge_schema(2, 0, 41, false);
        assert!(behind.level == Error && behind.action.unwrap().contains("gpuaas migrate"));
    }

    #[test]
    fn missing_and_old_backups_are_warnings() {
        let now = DateTime::UNIX_EPOCH + TimeDelta::days(30);
        for (hours, level, summary) in [
            (None, Warning, "never backed up"),
            (Some(26), Warning, "26 hours old"),
            (Some(24), Ok, "is of 1970-01-30"),
        ] {
            let finding = judge_backups(hours.map(|hours| now - TimeDelta::hours(hours)), now);
            assert!(finding.level == level && finding.summary.contains(summary), "{hours:?}: {}", finding.summary);
        }
    }
}
