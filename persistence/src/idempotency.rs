//! Idempotency records: responses of requests with an `Idempotency-Key` (decisions 2). They share one table with the committed
//! commands: its primary key decides between a commit and a refusal under the same id.

use crate::error::{OperationContext, StoreError};
use crate::pool::ReadPool;
use domain::CommandId;
use sqlx::Row;
use sqlx::postgres::PgRow;

/// The record of an earlier request, stored for a day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyRecord {
    /// SHA-256 of the request.
    pub digest: [u8; 32],
    /// The machine's reply, where a command was committed.
    pub reply: Option<String>,
    /// What the answer shows beside the reply, where it was stored with the commit.
    pub resolved: Option<String>,
    /// The response as it was given; `None` where it follows from the reply, or the request ended before it was stored.
    pub answer: Option<String>,
}

/// The stored requests.
#[derive(Clone, Debug)]
pub struct IdempotencyRecords {
    connections: ReadPool,
}

impl IdempotencyRecords {
    pub(crate) const fn new(connections: ReadPool) -> Self {
        Self { connections }
    }

    /// The record of an earlier request under this id.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn find(&self, id: CommandId) -> Result<Option<IdempotencyRecord>, StoreError> {
        let query = sqlx::query("SELECT digest, reply::text, resolved, answer FROM command WHERE id = $1").bind(id.0);
        let row = self.connections.fetch_optional(query).await;
        let stored = |row: PgRow| {
            Ok(IdempotencyRecord {
                digest: row.try_get(0)?,
                reply: row.try_get(1)?,
                resolved: row.try_get(2)?,
                answer: row.try_get(3)?,
            })
        };
        row.and_then(|row| row.map(stored).transpose()).doing("reading the answer of a request")
    }

    /// Stores the response of a request whose command was committed, unless it has one. True where it was stored.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn store_for_committed(&self, id: CommandId, answer: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("UPDATE command SET answer = $2 WHERE id = $1 AND answer IS NULL RETURNING id");
        let row = self.connections.fetch_optional(query.bind(id.0).bind(answer)).await;
        row.map(|row| row.is_some()).doing("storing the answer of a request")
    }

    /// Stores the response of a request that committed nothing, unless the id has a record: of a commit, or of another response. True
    /// where it was stored. Without an `answer` a replay learns only that the request ended.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn store_for_uncommitted(
        &self,
        id: CommandId,
        digest: [u8; 32],
        answer: Option<&str>,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "INSERT INTO command (id, entity, shard, digest, answer)
             VALUES ($1, '00000000-0000-0000-0000-000000000000', 0, $2, $3)
             ON CONFLICT (id) DO NOTHING RETURNING id",
        );
        let row = self.connections.fetch_optional(query.bind(id.0).bind(digest).bind(answer)).await;
        row.map(|row| row.is_some()).doing("storing the answer of a request that committed nothing")
    }
}
