//! What Postgres has, in plain SQL: it is read also where the schema is that of another release. Snapshots are not read, since they hold what
//! users wrote.

use super::anonymity::NAMES;
use super::items::{BundleItem, Collecting};
use crate::as_the_service;
use crate::config::installed_settings::InstalledSettings;
use flate2::read::GzDecoder;
use persistence::pool;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OnceCell;

const LIMIT: Duration = Duration::from_secs(20);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(8);

/// A file, what it is, and the statement whose rows it has.
const READS: [(&str, &str, &str); 13] = [
    (
        "database/overdue.json",
        "entities whose deadline has passed, the longest first",
        "SELECT d.entity, d.kind, d.shard, e.state, e.version, e.updated_at, d.wake_at, d.deadline_at, d.reason
         FROM deadline d LEFT JOIN entity e ON e.id = d.entity
         WHERE d.deadline_at < now() ORDER BY d.deadline_at LIMIT 500",
    ),
    (
        "database/parked.json",
        "entities that no member activates until an operator restarts them",
        "SELECT p.*, e.state, e.version, e.updated_at FROM parked p LEFT JOIN entity e ON e.id = p.entity
         ORDER BY p.parked_at DESC LIMIT 500",
    ),
    (
        "database/history.json",
        "the last transitions of entities that are overdue or parked",
        "SELECT h.* FROM (
             (SELECT entity FROM parked ORDER BY parked_at DESC LIMIT 100)
             UNION (SELECT entity FROM deadline WHERE deadline_at < now() ORDER BY deadline_at LIMIT 100)
         ) of, LATERAL (
             SELECT entity, kind, version, epoch, seq, at, command, from_state, to_state, why, actor, correlation_id
             FROM history WHERE history.entity = of.entity ORDER BY version DESC LIMIT 30
         ) h",
    ),
    (
        "database/states.json",
        "how many entities are in each state",
        "SELECT kind, state, count(*), max(updated_at) AS last FROM entity GROUP BY kind, state ORDER BY kind, state",
    ),
    (
        "database/members.json",
        "the members, by their rows, and the shards of each",
        "SELECT m.*, now() - m.beat_at AS silent_for, (SELECT count(*) FROM shard WHERE owner = m.id) AS shards
         FROM member m ORDER BY name LIMIT 500",
    ),
    (
        "database/shards.json",
        "the shards and their owners",
        "SELECT s.*, (SELECT incarnation FROM cluster) AS incarnation FROM shard s ORDER BY id",
    ),
    (
        "database/outbox.json",
        "events that wait, by subject",
        "SELECT subject, count(*), min(written_at) AS oldest, now() - min(written_at) AS age
         FROM outbox GROUP BY subject ORDER BY min(written_at) LIMIT 500",
    ),
    (
        "database/migrations.json",
        "the applied migrations",
        "SELECT version, description, installed_on, success, execution_time FROM _sqlx_migrations ORDER BY version",
    ),
    (
        "database/activity.json",
        "the sessions of this database and what they wait for",
        "SELECT pid, usename, application_name, client_addr, backend_start, xact_start, query_start, state_change, state,
                wait_event_type, wait_event, pg_blocking_pids(pid) AS blocked_by, left(query, 500) AS query
         FROM pg_stat_activity WHERE datname = current_database() ORDER BY xact_start NULLS LAST LIMIT 1000",
    ),
    (
        "database/locks.json",
        "the locks in this database",
        "SELECT l.pid, l.locktype, l.relation::regclass::text AS relation, l.mode, l.granted, l.waitstart
         FROM pg_locks l WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
         ORDER BY l.granted, l.pid LIMIT 5000",
    ),
    (
        "database/sizes.json",
        "the size of each table, with its indexes, and its dead rows",
        "SELECT relname, pg_total_relation_size(relid) AS bytes, n_live_tup, n_dead_tup, last_autovacuum, last_autoanalyze
         FROM pg_stat_user_tables ORDER BY pg_total_relation_size(relid) DESC LIMIT 500",
    ),
    (
        "database/server.json",
        "the server's version, its standbys, its archive, and the parameters that differ from the default",
        // Some parameters may hold passwords or commands.
        "SELECT version(), pg_is_in_recovery() AS is_standby, clock_timestamp() AS time, pg_postmaster_start_time() AS started_at,
                (SELECT to_jsonb(a) FROM pg_stat_archiver a) AS archiver,
                (SELECT jsonb_agg(r) FROM (SELECT application_name, state, sync_state, write_lag, flush_lag, replay_lag
                    FROM pg_stat_replication LIMIT 50) r) AS standbys,
                (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE source <> 'default'
                    AND name !~ 'conninfo|command|passphrase|password|_file$|key') AS parameters",
    ),
    (
        NAMES,
        "the names of entities, owners and members, for pseudonyms alone",
        "SELECT DISTINCT name FROM (
             SELECT unique_name AS name FROM entity UNION SELECT owner FROM entity
             UNION SELECT body #>> '{registration,name}' FROM entity WHERE kind = 'node'
             UNION SELECT body #>> '{registration,host}' FROM entity WHERE kind = 'node'
             UNION SELECT name FROM member
         ) names WHERE name IS NOT NULL LIMIT 100001",
    ),
];

/// Where the files come from.
#[derive(Clone)]
enum DatabaseSource {
    Pool(PgPool),
    /// Those that a process of the service's user has read, by name, and why it has not.
    Read(Arc<BTreeMap<String, Result<Vec<u8>, String>>>),
}

type SharedSource = Arc<OnceCell<Result<DatabaseSource, String>>>;

/// The command that reads the database alone, as the service's user, and the longest wait for it.
const READ_AS_THE_SERVICE: [&str; 6] =
    ["support-bundle", "--database-only", "--output", "-", "--timeout-seconds", "14"];
const AS_THE_SERVICE_WITHIN: Duration = Duration::from_secs(18);

pub(super) fn table(settings: &Arc<InstalledSettings>, is_anonymous: bool) -> Vec<BundleItem> {
    let source = SharedSource::default();
    READS
        .into_iter()
        .filter(|(name, ..)| is_anonymous || *name != NAMES)
        .map(|(name, what, statement)| {
            let collect = rows(Arc::clone(settings), Arc::clone(&source), name, statement);
            BundleItem { name, what, limit: LIMIT, collect }
        })
        .collect()
}

/// The rows as JSON, one a line.
fn rows(
    settings: Arc<InstalledSettings>,
    source: SharedSource,
    name: &'static str,
    statement: &'static str,
) -> Collecting {
    Box::pin(async move {
        let pool = match source.get_or_init(|| open(&settings)).await.clone()? {
            DatabaseSource::Pool(pool) => pool,
            DatabaseSource::Read(files) => {
                return files
                    .get(name)
                    .cloned()
                    .unwrap_or_else(|| Err("it was not read as the service's user".to_owned()));
            }
        };
        let element = if name == NAMES { "to_json(row.name)" } else { "row_to_json(row)" };
        let statement = format!("SELECT {element}::text FROM ({statement}) row");
        let rows: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(statement))
            .fetch_all(&pool)
            .await
            .map_err(|error| format!("Postgres: {error}"))?;
        Ok(format!("[{}]\n", rows.join(",\n")).into_bytes())
    })
}

async fn open(settings: &InstalledSettings) -> Result<DatabaseSource, String> {
    let mut config = settings.database().ok_or("SVC_DATABASE_URL is not set, or cannot be used")?;
    config.application_name = "gpuaas support-bundle".to_owned();
    (config.connections, config.statement_timeout) = (2, STATEMENT_TIMEOUT);
    config.acquire_timeout = LIMIT;
    let shown = |error: anyhow::Error| format!("{error:#}");
    match pool::check_connection(&config).await {
        Ok(()) => {}
        Err(error) if as_the_service::is_needed(&error) && as_the_service::is_possible(settings) => {
            let archive = as_the_service::output(settings, &READ_AS_THE_SERVICE, AS_THE_SERVICE_WITHIN).await?;
            let files = files_of(&archive).map_err(|error| format!("the archive of the service's user: {error}"))?;
            return Ok(DatabaseSource::Read(Arc::new(files)));
        }
        Err(error) => return Err(shown(error.into())),
    }
    pool::open(&config).map(DatabaseSource::Pool).map_err(|error| shown(error.into()))
}

/// The files of a bundle by their names in its folder, and its omissions.
fn files_of(archive: &[u8]) -> std::io::Result<BTreeMap<String, Result<Vec<u8>, String>>> {
    let mut archive = tar::Archive::new(GzDecoder::new(archive));
    let mut files = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.iter().skip(1).collect::<PathBuf>().display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        files.insert(name, Ok(content));
    }
    let manifest = files.remove("manifest.json").and_then(Result::ok).unwrap_or_default();
    let manifest: serde_json::Value = strict_json::from_slice(&manifest)?;
    for omission in manifest["omissions"].as_array().into_iter().flatten() {
        let text = |name: &str| omission[name].as_str().unwrap_or_default().to_owned();
        files.insert(text("file"), Err(text("reason")));
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support_bundle::archive::Bundle;
    use crate::support_bundle::items::Collected;

    #[test]
    fn archive_of_the_services_user_is_read_with_its_omissions() {
        let mut bundle = Bundle::new(chrono::DateTime::UNIX_EPOCH, false, 1 << 20);
        bundle.add(Collected::new("database/parked.json", "a test", Ok(b"[]\n".to_vec())));
        bundle.add(Collected::new("database/locks.json", "a test", Err("it did not answer in time".to_owned())));
        let mut archive = Vec::new();
        bundle.write_to(&mut archive).unwrap();
        let files = files_of(&archive).unwrap();
        let expected = [
            ("database/locks.json".to_owned(), Err("it did not answer in time".to_owned())),
            ("database/parked.json".to_owned(), Ok(b"[]\n".to_vec())),
        ];
        assert_eq!(files, expected.into());
        assert!(files_of(b"a message").is_err());
        assert!(files_of(&archive[..archive.len() / 2]).is_err());
    }
}
