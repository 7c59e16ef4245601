//! The schema, embedded, and how a database is brought to it.
//!
//! Migrations go forward only. Each file of `migrations/` begins with its mark ([`MigrationKind`]): members of the release before run on a
//! schema that was expanded, and do not run on one that was contracted. So the order of an upgrade is expand, replace the members, contract
//! (deploy/decisions/0063-migrations-expand-then-contract.md).

mod member_barrier;
mod migration;
mod plan;

pub use member_barrier::StartingMember;
pub use migration::{MigrationKind, Migrations, SchemaMigration};
pub use plan::{SchemaReport, WaitingContract};

use member_barrier::lock_out_starting_members;
use plan::{AppliedMigrations, members_that_need};
use sqlx::migrate::Migrate as _;
use sqlx::{Connection as _, PgConnection, PgPool};
use std::time::{Duration, Instant};

/// The table of applied migrations, which sqlx has chosen.
const TABLE: &str = "_sqlx_migrations";

/// A statement that waits for a lock makes every later one wait behind it: it gives up after this, and is tried once more.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '500ms'";
const LOCK_RETRY: Duration = Duration::from_millis(500);
const LOCK_ATTEMPTS: u32 = 60;

/// After this, a wait for another process that migrates is reported.
const REPORTED_WAIT: Duration = Duration::from_secs(1);

/// Why the schema does not suit this release, or could not be brought to it.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    #[error(
        "the database has migration {found}, which removed something that this release (up to {known}) needs: run the newer release, or \
         restore the database from a backup from before that migration"
    )]
    Newer { found: i64, known: i64 },
    #[error(
        "the database lacks {} of this release: run `gpuaas migrate` with this release first, or set SVC_MIGRATE_ON_START=true",
        migrations_text(missing)
    )]
    Behind { missing: Vec<i64> },
    #[error(
        "migration {version} is not the one that was applied to this database: the file was changed afterwards. Run the release that the \
         database was migrated with"
    )]
    Changed { version: i64 },
    #[error(
        "migration {version} ({name}) failed, and nothing of it was applied. Members go on with the schema as it was; correct the cause, \
         then run `gpuaas migrate` once more"
    )]
    Failed {
        version: i64,
        name: String,
        #[source]
        source: sqlx::Error,
    },
    #[error(
        "migration {version} ({name}) waits for a lock that another transaction holds, and nothing of it was applied: find that \
         transaction in pg_stat_activity, end it, then run `gpuaas migrate` once more"
    )]
    Locked { version: i64, name: String },
    #[error("the state of the schema cannot be read")]
    Unreadable(#[source] sqlx::Error),
}

fn migrations_text(versions: &[i64]) -> String {
    let versions: Vec<String> = versions.iter().map(|version| format!("{version:04}")).collect();
    let noun = if versions.len() == 1 { "migration" } else { "migrations" };
    format!("{noun} {}", versions.join(", "))
}

/// Which migrations to apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationScope {
    /// All; a contract where no living member needs what it removes.
    All,
    /// Those after which the release before still runs. A database without any schema gets all.
    Expand,
}

/// What happens during [`Migrations::apply`], for a person who watches.
#[derive(Debug)]
pub enum Progress<'a> {
    /// Another process migrates this database.
    Waits,
    /// A lock that the migration needs is held by another transaction.
    Locked(&'a SchemaMigration),
    Applied(&'a SchemaMigration, Duration),
}

/// The last migration that this release knows.
#[must_use]
pub fn known() -> i64 {
    Migrations::embedded().known()
}

/// Applies everything that is missing.
///
/// # Errors
/// As [`Migrations::apply`].
pub async fn run(pool: &PgPool) -> Result<(), SchemaError> {
    Migrations::embedded().apply(pool, MigrationScope::All, &mut |_| {}).await.map(drop)
}

impl Migrations {
    /// Compares the database with this release, and changes nothing.
    ///
    /// # Errors
    /// [`SchemaError::Newer`], [`SchemaError::Behind`] or [`SchemaError::Changed`] where this release cannot run on it.
    pub async fn check(&self, pool: &PgPool) -> Result<SchemaReport, SchemaError> {
        let report = self.plan(pool).await?;
        match report.missing_expansions() {
            missing if missing.is_empty() => Ok(report),
            missing => Err(SchemaError::Behind { missing }),
        }
    }

    /// As [`Self::check`], for a schema that may lack migrations of this release.
    ///
    /// # Errors
    /// As [`Self::apply`], where it would apply nothing.
    pub async fn plan(&self, pool: &PgPool) -> Result<SchemaReport, SchemaError> {
        let mut connection = pool.acquire().await.map_err(SchemaError::Unreadable)?;
        let applied = AppliedMigrations::read(&mut connection).await.map_err(SchemaError::Unreadable)?;
        let mut report = applied.compare(self)?;
        for contract in report.missing.iter().filter(|migration| migration.kind == MigrationKind::Contract) {
            let needed_by =
                members_that_need(&mut connection, contract.version).await.map_err(SchemaError::Unreadable)?;
            report.waiting.extend((!needed_by.is_empty()).then(|| WaitingContract::new(contract, needed_by)));
        }
        Ok(report)
    }

    /// Applies what is missing, each file in a transaction of its own, under an advisory lock: of several processes one does the work, and
    /// the others wait for it.
    ///
    /// # Errors
    /// [`SchemaError`]. The files before the one that failed are applied.
    pub async fn apply(
        &self,
        pool: &PgPool,
        scope: MigrationScope,
        progress: &mut (dyn FnMut(Progress<'_>) + Send),
    ) -> Result<SchemaReport, SchemaError> {
        // Its settings and its lock end with it, however this function ends.
        let mut connection = pool.acquire().await.map_err(SchemaError::Unreadable)?.detach();
        let applied = self.apply_on(&mut connection, scope, progress).await;
        // The server ends the session in any case.
        let _ = connection.close().await;
        applied
    }

    async fn apply_on(
        &self,
        connection: &mut PgConnection,
        scope: MigrationScope,
        progress: &mut (dyn FnMut(Progress<'_>) + Send),
    ) -> Result<SchemaReport, SchemaError> {
        prepare(connection, progress).await.map_err(SchemaError::Unreadable)?;
        let applied = AppliedMigrations::read(connection).await.map_err(SchemaError::Unreadable)?;
        let report = applied.compare(self)?;
        let wants_contracts = scope == MigrationScope::All || applied.is_empty();
        let (mut done, mut waiting) = (Vec::new(), Vec::new());
        for migration in &report.missing {
            let began = Instant::now();
            let attempt = if migration.kind == MigrationKind::Expand || wants_contracts {
                apply_with_retries(connection, migration, progress).await?
            } else {
                Attempt::LeftOut(Vec::new())
            };
            match attempt {
                Attempt::Applied => {
                    done.push(migration.version);
                    progress(Progress::Applied(migration, began.elapsed()));
                }
                Attempt::LeftOut(needed_by) => waiting.push(WaitingContract::new(migration, needed_by)),
            }
        }
        Ok(report.without(&done, waiting))
    }
}

enum Attempt {
    Applied,
    /// A contract, with the members that need what it removes.
    LeftOut(Vec<String>),
}

/// Settings for long statements, the lock, and the tables of what is applied.
async fn prepare(
    connection: &mut PgConnection,
    progress: &mut (dyn FnMut(Progress<'_>) + Send),
) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("SET statement_timeout = 0").execute(&mut *connection).await?;
    // A process that is killed leaves its statement running on the server, and with it the lock, unless the server looks for its client.
    sqlx::raw_sql("SET client_connection_check_interval = '1s'").execute(&mut *connection).await?;
    {
        let mut lock = connection.lock();
        let locked = match tokio::time::timeout(REPORTED_WAIT, &mut lock).await {
            Ok(locked) => locked,
            Err(_) => {
                progress(Progress::Waits);
                lock.await
            }
        };
        locked.map_err(sqlx::Error::from)?;
    }
    connection.ensure_migrations_table(TABLE).await.map_err(sqlx::Error::from)?;
    // Beside the migrations, so that the release before, which knows nothing of it, still starts.
    sqlx::raw_sql("CREATE TABLE IF NOT EXISTS contract_migration (version bigint PRIMARY KEY)")
        .execute(&mut *connection)
        .await?;
    Ok(())
}

/// One file. Commits wait for a lock that a migration waits for, so that it never waits for long.
async fn apply_with_retries(
    connection: &mut PgConnection,
    migration: &SchemaMigration,
    progress: &mut (dyn FnMut(Progress<'_>) + Send),
) -> Result<Attempt, SchemaError> {
    let (version, name) = (migration.version, migration.name.clone());
    for attempt in 1..=LOCK_ATTEMPTS {
        match apply_once(connection, migration).await {
            Ok(attempt) => return Ok(attempt),
            Err(error) if is_lock_timeout(&error) => {
                if attempt == 1 {
                    progress(Progress::Locked(migration));
                }
                tokio::time::sleep(LOCK_RETRY).await;
            }
            Err(source) => return Err(SchemaError::Failed { version, name, source }),
        }
    }
    Err(SchemaError::Locked { version, name })
}

async fn apply_once(connection: &mut PgConnection, migration: &SchemaMigration) -> Result<Attempt, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    match apply_within(&mut transaction, migration).await {
        Ok(Attempt::Applied) => transaction.commit().await.map(|()| Attempt::Applied),
        other => {
            // At once: a dropped one is rolled back with the next statement. Where this fails, the connection is gone, and with it all.
            let _ = transaction.rollback().await;
            other
        }
    }
}

async fn apply_within(transaction: &mut PgConnection, migration: &SchemaMigration) -> Result<Attempt, sqlx::Error> {
    let began = Instant::now();
    sqlx::raw_sql(LOCK_TIMEOUT).execute(&mut *transaction).await?;
    if migration.kind == MigrationKind::Contract {
        if !lock_out_starting_members(transaction).await? {
            return Ok(Attempt::LeftOut(vec!["a member that is starting".to_owned()]));
        }
        let needed_by = members_that_need(transaction, migration.version).await?;
        if !needed_by.is_empty() {
            return Ok(Attempt::LeftOut(needed_by));
        }
        let marked = sqlx::query("INSERT INTO contract_migration (version) VALUES ($1)").bind(migration.version);
        marked.execute(&mut *transaction).await?;
    }
    sqlx::raw_sql(migration.sql).execute(&mut *transaction).await?;
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES ($1, $2, TRUE, $3, $4)",
    )
    .bind(migration.version)
    .bind(&migration.name)
    .bind(&migration.checksum)
    .bind(i64::try_from(began.elapsed().as_nanos()).unwrap_or(i64::MAX))
    .execute(transaction)
    .await?;
    Ok(Attempt::Applied)
}

fn is_lock_timeout(error: &sqlx::Error) -> bool {
    const LOCK_NOT_AVAILABLE: &str = "55P03";
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() == Some(LOCK_NOT_AVAILABLE)
}
