//! What a database has of a release's schema, what it lacks, and who needs what a contract removes.

use super::{MigrationKind, Migrations, SchemaError, SchemaMigration};
use sqlx::PgConnection;
use std::collections::{BTreeMap, BTreeSet};

/// A member without a heartbeat for so long, on the database's clock, does not live. It is longer than any failure detector waits, since a
/// contract cannot be taken back.
const SILENT_SECONDS: f64 = 60.0;

/// The tables of applied migrations.
#[derive(Debug)]
pub(super) struct AppliedMigrations {
    checksums: BTreeMap<i64, Vec<u8>>,
    /// `None`: no release with marks has migrated this database.
    contracts: Option<BTreeSet<i64>>,
}

impl AppliedMigrations {
    pub(super) async fn read(connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        let (has_migrations, has_contracts): (bool, bool) = sqlx::query_as(
            "SELECT to_regclass('_sqlx_migrations') IS NOT NULL, to_regclass('contract_migration') IS NOT NULL",
        )
        .fetch_one(&mut *connection)
        .await?;
        let mut applied = Self { checksums: BTreeMap::new(), contracts: None };
        if has_migrations {
            let rows: Vec<(i64, Vec<u8>)> =
                sqlx::query_as("SELECT version, checksum FROM _sqlx_migrations").fetch_all(&mut *connection).await?;
            applied.checksums = rows.into_iter().collect();
        }
        if has_contracts {
            let rows: Vec<i64> =
                sqlx::query_scalar("SELECT version FROM contract_migration").fetch_all(&mut *connection).await?;
            applied.contracts = Some(rows.into_iter().collect());
        }
        Ok(applied)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.checksums.is_empty()
    }

    /// What a release lacks here.
    pub(super) fn compare(&self, release: &Migrations) -> Result<SchemaReport, SchemaError> {
        let mut known = BTreeMap::new();
        for migration in release.iter() {
            known.insert(migration.version, migration);
            let applied = self.checksums.get(&migration.version);
            if applied.is_some_and(|checksum| *checksum != migration.checksum) {
                return Err(SchemaError::Changed { version: migration.version });
            }
        }
        let later: Vec<i64> = self.checksums.keys().copied().filter(|version| !known.contains_key(version)).collect();
        // Without the table nothing is known of it.
        let is_contract = |version: &i64| self.contracts.as_ref().is_none_or(|contracts| contracts.contains(version));
        if let Some(found) = later.iter().copied().find(is_contract) {
            return Err(SchemaError::Newer { found, known: release.known() });
        }
        let missing = known.into_values().filter(|it| !self.checksums.contains_key(&it.version)).cloned().collect();
        Ok(SchemaReport { known: release.known(), missing, waiting: Vec::new(), later })
    }
}

/// A database beside a release that runs on it.
#[derive(Clone, Debug)]
pub struct SchemaReport {
    /// The last migration that the release knows.
    pub known: i64,
    /// What the database lacks, in the order of application.
    pub missing: Vec<SchemaMigration>,
    /// Those of it that are contracts and cannot be applied yet, or were left out.
    pub waiting: Vec<WaitingContract>,
    /// Expansions of later releases, which this one does not know and does not need to know.
    pub later: Vec<i64>,
}

impl SchemaReport {
    pub(super) fn missing_expansions(&self) -> Vec<i64> {
        let expands = self.missing.iter().filter(|migration| migration.kind == MigrationKind::Expand);
        expands.map(|migration| migration.version).collect()
    }

    /// What is left after these were applied.
    pub(super) fn without(mut self, done: &[i64], waiting: Vec<WaitingContract>) -> Self {
        self.missing.retain(|migration| !done.contains(&migration.version));
        self.waiting = waiting;
        self
    }
}

/// A contract that is not applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingContract {
    pub version: i64,
    pub name: String,
    /// The members that need what it removes, for people. Empty where it was left out on request.
    pub needed_by: Vec<String>,
}

impl WaitingContract {
    pub(super) fn new(migration: &SchemaMigration, needed_by: Vec<String>) -> Self {
        Self { version: migration.version, name: migration.name.clone(), needed_by }
    }
}

/// The living members whose release does not know the contract. A member writes into its row up to which migration it knows; one of a
/// release that does not, knows none.
pub(super) async fn members_that_need(
    connection: &mut PgConnection,
    contract: i64,
) -> Result<Vec<String>, sqlx::Error> {
    let has_members: bool =
        sqlx::query_scalar("SELECT to_regclass('member') IS NOT NULL").fetch_one(&mut *connection).await?;
    if !has_members {
        return Ok(Vec::new());
    }
    let rows: Vec<(String, serde_json::Value)> = sqlx::query_as(
        "SELECT name, details FROM member WHERE beat_at > clock_timestamp() - make_interval(secs => $1) ORDER BY name",
    )
    .bind(SILENT_SECONDS)
    .fetch_all(connection)
    .await?;
    let old = rows.into_iter().filter(|(_, details)| details["schema"].as_i64().unwrap_or(0) < contract);
    Ok(old.map(|(name, details)| format!("{name} ({})", details["version"].as_str().unwrap_or("?"))).collect())
}
