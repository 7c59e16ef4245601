//! The schema, embedded and brought forward at start. Forward only: each migration suits the release before it, so that old and
//! new members run side by side while a release is rolled out.

use sqlx::PgPool;
use sqlx::migrate::{MigrateError, Migrator};

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations");

/// Why the schema could not be brought to this release.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    #[error(
        "the database is at migration {found}, which this release (up to {known}) does not know: run the newer release"
    )]
    Newer { found: i64, known: i64 },
    #[error("migration {version} was changed after it had been applied")]
    Changed { version: i64 },
    #[error("the schema could not be brought forward")]
    Failed(#[source] MigrateError),
}

/// The last migration that this release knows.
#[must_use]
pub fn known() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or_default()
}

/// Applies what is missing, under an advisory lock: of several members that start at once one does the work.
///
/// # Errors
/// [`SchemaError::Newer`] where a newer release has been here, so that this one would not understand what it reads.
#[expect(clippy::wildcard_enum_match_arm, reason = "not our enum: the rest is shown as it comes")]
pub async fn run(pool: &PgPool) -> Result<(), SchemaError> {
    MIGRATIONS.run(pool).await.map_err(|error| match error {
        MigrateError::VersionMissing(found) => SchemaError::Newer { found, known: known() },
        MigrateError::VersionMismatch(version) => SchemaError::Changed { version },
        error => SchemaError::Failed(error),
    })
}
