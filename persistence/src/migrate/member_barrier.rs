//! Keeps contracts and members that start apart. A member reads the schema first and stores its row later; a contract that is committed in
//! between would be one that nothing has refused.

use domain::MemberId;
use sqlx::{Connection as _, PgConnection, PgPool};
use std::time::Duration;

/// The advisory lock: shared by members that start, exclusive for a contract. Its number is arbitrary, and the same in every release.
const LOCK: i64 = 0x6770_7561_6173_0042;

const POLL: Duration = Duration::from_millis(200);
/// A member that starts has its row after seconds.
const LOCK_ATTEMPTS: u32 = 150;

/// A member that has read the schema, and has no row yet.
#[derive(Debug)]
pub struct StartingMember(PgConnection);

impl StartingMember {
    /// To be called before the schema is read. Waits for a contract in progress.
    ///
    /// # Errors
    /// Where the database cannot be used.
    pub async fn begin(pool: &PgPool) -> Result<Self, sqlx::Error> {
        let mut connection = pool.acquire().await?.detach();
        sqlx::raw_sql("SET statement_timeout = 0").execute(&mut connection).await?;
        sqlx::query("SELECT pg_advisory_lock_shared($1)").bind(LOCK).execute(&mut connection).await?;
        Ok(Self(connection))
    }

    /// Holds contracts off until the member's row is stored, by which they find it themselves, or until the process ends.
    pub async fn hold_until_joined(mut self, member: MemberId) {
        loop {
            let joined = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM member WHERE id = $1)").bind(member.0);
            match joined.fetch_one(&mut self.0).await {
                Ok(false) => tokio::time::sleep(POLL).await,
                Ok(true) | Err(_) => break,
            }
        }
        // The lock ends with the connection, however that closes.
        let _ = self.0.close().await;
    }
}

/// Keeps members from starting until the transaction ends. False where one has been starting for half a minute.
pub(super) async fn lock_out_starting_members(transaction: &mut PgConnection) -> Result<bool, sqlx::Error> {
    for _ in 0..LOCK_ATTEMPTS {
        let locked = sqlx::query_scalar("SELECT pg_try_advisory_xact_lock($1)").bind(LOCK);
        if locked.fetch_one(&mut *transaction).await? {
            return Ok(true);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(false)
}
