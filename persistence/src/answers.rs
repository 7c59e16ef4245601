//! Answers of requests with an `Idempotency-Key` (decisions 2). They lie beside the commands that were committed, in one table: its
//! primary key decides between a commit and a refusal under the same id.

use crate::error::{Doing, StoreError};
use crate::pool::Kept;
use domain::CommandId;
use sqlx::Row;
use sqlx::postgres::PgRow;

/// What is stored of a request that came before, for a day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRequest {
    /// SHA-256 of the request.
    pub digest: [u8; 32],
    /// The machine's reply, where a command was committed.
    pub reply: Option<String>,
    /// The answer as it was given; none where the request ended before it was stored.
    pub answer: Option<String>,
}

/// The stored requests.
#[derive(Clone, Debug)]
pub struct Answers {
    connections: Kept,
}

impl Answers {
    pub(crate) const fn new(connections: Kept) -> Self {
        Self { connections }
    }

    /// The request that came before under this id.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn find(&self, id: CommandId) -> Result<Option<StoredRequest>, StoreError> {
        let query = sqlx::query("SELECT digest, reply::text, answer FROM command WHERE id = $1").bind(id.0);
        let row = self.connections.fetch_optional(query).await;
        let stored =
            |row: PgRow| Ok(StoredRequest { digest: row.try_get(0)?, reply: row.try_get(1)?, answer: row.try_get(2)? });
        row.and_then(|row| row.map(stored).transpose()).doing("reading the answer of a request")
    }

    /// Stores the answer of a request whose command was committed, unless it has one. True where it was stored.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn of_committed(&self, id: CommandId, answer: &str) -> Result<bool, StoreError> {
        let query = sqlx::query("UPDATE command SET answer = $2 WHERE id = $1 AND answer IS NULL RETURNING id");
        let row = self.connections.fetch_optional(query.bind(id.0).bind(answer)).await;
        row.map(|row| row.is_some()).doing("storing the answer of a request")
    }

    /// Stores the answer of a request that committed nothing, unless there is a row under its id: of a commit, or of another answer. True
    /// where it was stored. Without an `answer` a repetition learns that the request ended, and no more.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn of_uncommitted(
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
