//! Turns that are taken for a time: what two members must not do at once, where the second could not know of the first. And up to when
//! the books of somebody else were compared with ours, so that whoever goes on with it begins there.

use crate::error::{Doing, StoreError};
use domain::machine::Timestamp;
use sqlx::PgPool;
use std::time::Duration;

/// Turns nobody has for so long are of no use to anybody.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// See the module; cheap to clone.
#[derive(Clone, Debug)]
pub struct Turns {
    pool: PgPool,
}

impl Turns {
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Takes the turn of that name for so long, by the database's clock. `false` where somebody has it.
    ///
    /// # Errors
    /// [`StoreError`]; it may be taken then, until its time is up.
    pub async fn take(&self, name: &str, lasts: Duration) -> Result<bool, StoreError> {
        let taken = sqlx::query(
            "INSERT INTO turn (name, until) VALUES ($1, clock_timestamp() + make_interval(secs => $2))
             ON CONFLICT (name) DO UPDATE SET until = EXCLUDED.until WHERE turn.until <= clock_timestamp()",
        )
        .bind(name)
        .bind(lasts.as_secs_f64())
        .execute(&self.pool)
        .await;
        taken.map(|taken| taken.rows_affected() == 1).doing("taking a turn")
    }

    /// Gives it back before its time is up.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn give_back(&self, name: &str) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM turn WHERE name = $1")
            .bind(name)
            .execute(&self.pool)
            .await
            .doing("giving a turn back")?;
        Ok(())
    }

    /// Forgets turns that whoever took them did not give back.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn forget(&self) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM turn WHERE until < clock_timestamp() - make_interval(secs => $1)")
            .bind(FORGOTTEN_AFTER.as_secs_f64())
            .execute(&self.pool)
            .await
            .doing("forgetting turns")?;
        Ok(())
    }

    /// Up to when these books were compared; `None` where they never were.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn compared(&self, books: &str) -> Result<Option<Timestamp>, StoreError> {
        let until = sqlx::query_scalar("SELECT until FROM compared WHERE books = $1").bind(books);
        until.fetch_optional(&self.pool).await.doing("reading up to when books were compared")
    }

    /// Keeps it. What was reached once is not taken back by somebody slower.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn keep_compared(&self, books: &str, until: Timestamp) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO compared (books, until) VALUES ($1, $2)
             ON CONFLICT (books) DO UPDATE SET until = greatest(compared.until, EXCLUDED.until)",
        )
        .bind(books)
        .bind(until)
        .execute(&self.pool)
        .await
        .doing("keeping up to when books were compared")?;
        Ok(())
    }
}
